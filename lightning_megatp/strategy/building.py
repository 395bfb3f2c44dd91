"""The building methods of MegaTPStrategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_megatp.batches.example import Example
from lightning_megatp.building.building import Building
from lightning_megatp.detour import entries_replaced
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.places import address
from lightning_megatp.plan.units import find_units
from lightning_megatp.random_states import random_state, set_random_state
from lightning_megatp.shim.modules import weights_of_recurrent_layers_renewed
from lightning_megatp.snapshots.snapshot import Snapshot
from lightning_megatp.strategy.randomness import share_random_state
from lightning_megatp.strategy.state import StrategyState


class BuildingMethods(StrategyState):
    """From the layers that a module has, or `configure_model` would create, to what this rank holds, on its device."""

    def _set_up_building(self) -> None:
        self._building: Building | None = None
        self._before_building: Snapshot | None = None
        self._waiting: dict[int, nn.Parameter] = {}
        """By id, parameters of units that stay in the host's memory until it is known what of them this rank holds."""

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: what creates layers there is recorded, and each rank makes only what it holds.

        If it can't be recorded, it is run once more on all ranks, as if this were one device.

        Communication: one object broadcast over the world, of the random state, and one all-reduce of an element.
        """
        module = self.lightning_module
        if module is None or module.trainer.state.status != "running":  # trainer.init_module(), outside of a run
            yield
            return
        if self.mesh is not None:
            share_random_state()
        before, state, building, problem = Snapshot(module), random_state(), Building(), ""
        try:
            with torch.device("cpu"), building.record():
                yield
            building.check()
        except Exception as error:  # the user's own will come again
            problem = f"{type(error).__name__}: {error}"
        if not (bool(problem) if self.mesh is None else self.reduce_boolean_decision(bool(problem), all=False)):
            self._building, self._before_building = building, before
            return
        warn_once_per_run(
            "configure_model can't be recorded, so that every rank creates the whole model before it is split:"
            f" {problem or 'another rank says why'}."
        )
        before.restore()
        set_random_state(state)
        with torch.device("cpu"), self.precision_plugin.module_init_context():
            module.configure_model()

    def _hold_back(self, module: nn.Module) -> None:
        """Let the parameters of units wait, where stages or data-parallel ranks will share them."""
        shares = self.pp > 1 or (self.zero.level == 3 and self._mesh().size("dp") > 1)
        if shares and self.root_device.type != "cpu":
            inside = (p for unit in find_units(module) for p in module.get_submodule(unit).parameters())
            self._waiting = {id(p): p for p in inside if p.device.type == "cpu"}

    def model_to_device(self) -> None:
        """Everything but parameters that have no values yet, or wait."""
        assert self.model is not None
        later = [
            (part._parameters, name, None)
            for part in self.model.modules()
            for name, p in dict.items(part._parameters)
            if p is not None and (p.is_meta or id(p) in self._waiting)
        ]
        renewed = weights_of_recurrent_layers_renewed(self.model) if later else contextlib.nullcontext()
        with renewed, entries_replaced(later):
            self.model.to(self.root_device)

    def _example(self, trainer: Any) -> Example:
        example = Example(trainer, self.precision_plugin)
        if self._building is not None:
            example.weights = functools.partial(self._building.on_demand, trainer.lightning_module)
        return example

    def _materialize(self, module: nn.Module, without: Iterable[nn.Module] = ()) -> None:
        """Make what this rank holds of a module, as far as it was recorded; let come what waits."""
        if self._building is not None:
            self._building.materialize(module, self._parallel().own_spec, self.root_device, without)
        if self._waiting:
            with weights_of_recurrent_layers_renewed(module):
                for parameter in module.parameters():
                    if self._waiting.pop(id(parameter), None) is not None:
                        parameter.data = parameter.data.to(self.root_device)

    def _materialize_units(self, parallel: ParallelModule) -> None:
        """Make, unit by unit, what this rank holds of the parameters that were recorded; or let them come."""
        module = parallel.module
        units = find_units(module) if self.pipeline is None else list(self.pipeline.stage_of_unit)
        for unit in (*map(module.get_submodule, units), module):
            self._materialize(unit)
        self._building = self._before_building = None
        self._waiting = {}

    def _leave_building(self) -> None:
        self._waiting = {}
        if self._before_building is not None:  # set-up failed: another run shall not find layers without values
            self._before_building.restore()
            self._building = self._before_building = None


def check_has_shapes(module: nn.Module) -> None:
    """Refuse layers that wait for their first forward.

    Raises:
        ValueError: there are some.
    """
    lazy = [name for name, x in (*module.named_parameters(), *module.named_buffers()) if is_lazy(x)]
    if lazy:
        raise ValueError(
            f"MegaTPStrategy: `{lazy[0]}` is a lazy module's, which has no shape before its first forward: what a rank"
            " holds can't be planned. Run the model once on some rows in `setup` or `__init__`, or give the layer its"
            " sizes."
        )


def warn_of_shared_memory(module: nn.Module) -> None:
    """Warn of weights that are tied by their memory alone: a part, or another stage's copy, has memory of its own."""
    at: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        place = address(parameter)  # 0 for what has no memory
        other = at.setdefault(place, name) if place else name
        if other != name:
            warn_once_per_run(
                f"`{other}` and `{name}` are two parameters that share memory (`.data`). Parts of them don't, so they"
                " are trained apart, as on a GPU without this strategy. To tie them, give both modules one parameter"
                " (`self.head.weight = self.embedding.weight`)."
            )
