"""The building methods of MegaTPStrategy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lightning_megatp.building.building import Building
from lightning_megatp.example import Example
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts import Parts
from lightning_megatp.pipeline.snapshot import Snapshot
from lightning_megatp.pipeline.units import find_units
from lightning_megatp.randomness import random_state, set_random_state, share_random_state


class BuildingMethods(Parts):
    """From what `configure_model` creates to what this rank holds of it, on its device."""

    def _set_up_building(self) -> None:
        self._building: Building | None = None
        self._before_building: Snapshot | None = None

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

    def model_to_device(self) -> None:
        """Everything but parameters that have no values yet."""
        assert self.model is not None
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to(self.root_device)
            return
        for part in self.model.modules():
            if not any(parameter.is_meta for parameter in part.parameters()):
                part.to(self.root_device)

    def _example(self, trainer: Any) -> Example:
        example = Example(trainer, self.precision_plugin)
        if self._building is not None:
            example.weights = functools.partial(self._building.on_demand, trainer.lightning_module)
        return example

    def _materialize(self, module: nn.Module, without: Iterable[nn.Module] = ()) -> None:
        """Make what this rank holds of a module, as far as it was recorded."""
        if self._building is not None:
            self._building.materialize(module, self._parallel().own_spec, self.root_device, without)

    def _materialize_units(self, parallel: ParallelModule) -> None:
        """Make, unit by unit, what this rank holds of the parameters that were recorded."""
        module = parallel.module
        units = find_units(module) if self.pipeline is None else list(self.pipeline.stage_of_unit)
        for unit in (*map(module.get_submodule, units), module):
            self._materialize(unit)
        self._building = self._before_building = None
        self.model_to_device()

    def _leave_building(self) -> None:
        if self._before_building is not None:  # set-up failed: another run shall not find layers without values
            self._before_building.restore()
            self._building = self._before_building = None
