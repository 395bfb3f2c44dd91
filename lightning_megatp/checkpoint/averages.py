"""Averaged copies of the module, as WeightAveraging and StochasticWeightAveraging keep them: cut as the module is.

Such a callback goes through the parameters of its copy and of the module side by side. So the copy keeps what this rank
holds, as plain tensors, and while a hook of the callback runs the module shows the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.checkpoint.stages import load_own, own_state_dict
from lightning_megatp.detour import Detour, end_all
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.lightning import saves_averages_as_model

_HOOKS = (
    *("on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end"),
)
"""Between steps, where a copy is updated from the module, or changes places with it."""
_LOADS = ("on_load_checkpoint", "load_state_dict")
_AVERAGES = ("state_dict", "average_model_state")
"""Where a checkpoint, or the state of a callback, has them."""


class AveragedCopies:
    """The averaged copies of one module, in one run.

    Args:
        copies: callback -> its copy, usually made before the module was split.
        parallel: the module, cut into stages and divided.
        mesh: who is where.

    Raises:
        ValueError: a copy holds other tensors than the module, or a callback does what can't be done here.
    """

    def __init__(self, copies: Sequence[tuple[Any, nn.Module]], parallel: ParallelModule, mesh: ParallelMesh) -> None:
        self._parallel, self._mesh = parallel, mesh
        self._detours: list[Detour] = []
        _refuse_two(callback for callback, _ in copies)
        parallel.averages = [copy for _, copy in copies]
        with self._as_held():
            for callback, copy in copies:
                self._refuse(callback)
                _keep_own(copy, parallel, mesh)
                _check_alike(type(callback).__name__, copy, parallel.module)
        cut = parallel.divided or parallel.pipeline is not None
        if cut:
            self._detours = [Detour(callback, hook, self._call) for callback, _ in copies for hook in _HOOKS]
        if cut or parallel.sharded:
            self._detours += [Detour(callback, load, self._load) for callback, _ in copies for load in _LOADS]

    def close(self) -> None:
        """Give the callbacks their own hooks back."""
        end_all(self._detours)

    def _call(self, hook: Callable[[], Any]) -> Any:
        """Run a hook; what else there is of the parameters that it may have changed follows.

        Communication: one broadcast over pp per parameter lent to another stage.
        """
        with self._as_held():
            result = hook()
        if self._parallel.sharding is not None:
            self._parallel.sharding.end()
        if self._parallel.pipeline is not None:
            self._parallel.pipeline.loans.renew()
        return result

    def _load(self, load: functools.partial[Any]) -> Any:
        """Run a hook that loads what a checkpoint has, the whole model's: the copy takes what this rank holds of it,
        and so does the module."""
        *others, content = load.args
        with self._as_held():
            found = {key: self._own_state(content[key]) for key in _AVERAGES if isinstance(content.get(key), Mapping)}

        def load_module(load: functools.partial[Any]) -> Any:
            state, *rest = load.args
            return load_own(state, self._parallel, lambda own: load.func(own, *rest, **load.keywords))

        module = Detour(self._parallel.module, "load_state_dict", load_module)
        try:
            return load.func(*others, {**content, **found})
        finally:
            module.end()

    def _own_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        parallel, mesh = self._parallel, self._mesh
        held = dict(parallel.module.named_parameters(remove_duplicate=False))
        own = own_state_dict(state, parallel) if parallel.order else state
        return {name: _own(x, held[name], parallel, mesh) if name in held else x for name, x in own.items()}

    @contextlib.contextmanager
    def _as_held(self) -> Iterator[None]:
        """Meanwhile the module has what this rank trains, as plain tensors: rows, and no lent parameters."""
        with contextlib.ExitStack() as stack:
            if self._parallel.sharding is not None:
                stack.enter_context(self._parallel.sharding.as_rows())
            if self._parallel.pipeline is not None:
                stack.enter_context(self._parallel.pipeline.loans.aside())
            yield

    def _refuse(self, callback: Any) -> None:
        has_norms = getattr(callback, "pl_module_contains_batch_norm", lambda module: False)
        cut = self._parallel.divided or self._parallel.pipeline is not None
        if cut and has_norms(self._parallel.module):
            raise ValueError(
                f"MegaTPStrategy: the callback {type(callback).__name__} runs an epoch without backward to renew the"
                " statistics of batch norms, which pp > 1 and zero > 0 have no step for. Use pp=1 and zero=0, or"
                " WeightAveraging, which averages the statistics too."
            )


def _refuse_two(callbacks: Iterable[Any]) -> None:
    averaging = [type(callback).__name__ for callback in callbacks if saves_averages_as_model(callback)]
    if len(averaging) > 1:
        raise ValueError(
            f"MegaTPStrategy: {' and '.join(averaging)} both put their averages into a checkpoint's `state_dict`, and"
            " the trained model's parameters would be in it no more. Keep one of them."
        )


def _keep_own(copy: nn.Module, parallel: ParallelModule, mesh: ParallelMesh) -> None:
    held = dict(parallel.module.named_parameters(remove_duplicate=False))
    buffers = dict(parallel.module.named_buffers(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    for path, part in copy.named_modules():
        prefix = f"{path}." if path else ""
        for leaf in [leaf for leaf in part._buffers if prefix + leaf not in buffers]:
            del part._buffers[leaf]
        for leaf, parameter in list(part._parameters.items()):
            if prefix + leaf not in held:
                del part._parameters[leaf]
            elif parameter is not None:
                if id(parameter) not in made:
                    own = _own(parameter.detach(), held[prefix + leaf], parallel, mesh)
                    made[id(parameter)] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                part._parameters[leaf] = made[id(parameter)]


def _own(value: Tensor, held: Tensor, parallel: ParallelModule, mesh: ParallelMesh) -> Tensor:
    """What this rank keeps of a parameter's copy, which may be of a module that an earlier run has cut."""
    if isinstance(value, DTensor):
        return value.to_local()
    spec, divided = parallel.spec(held), parallel.divided.get(id(held))
    if spec is not None and tuple(value.shape) == spec.shape:
        value = spec.spec(mesh.rank("tp")).take(value)
    if divided is not None and value.shape == divided.shape:
        value = divided.take(value)
    return value


def _check_alike(callback: str, copy: nn.Module, module: nn.Module) -> None:
    for found, wanted in (
        (copy.named_parameters(), module.named_parameters()),
        (copy.named_buffers(), module.named_buffers()),
    ):
        names, others = ([name for name, _ in tensors] for tensors in (found, wanted))
        if names != others:
            raise ValueError(
                f"MegaTPStrategy: the callback {callback} copied {len(names)} tensors on this rank, and the module has"
                f" {len(others)}{_first_difference(names, others)}, since it was changed after the callback's `setup`."
                " Create all layers in `__init__`, or remove the callback."
            )


def _first_difference(names: list[str], others: list[str]) -> str:
    name = next((b or a for a, b in zip([*names, ""], [*others, ""], strict=False) if a != b), "")
    return f" (they differ in `{name}`)" if name else ""


def averaged_states(checkpoint: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where callbacks have put the state of their copies: a dict, and its key."""
    if "averaging_state" in checkpoint:  # WeightAveraging; what was there before is the "current_model_state"
        yield checkpoint, "state_dict"
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and any(
            isinstance(x, Tensor) for x in (state.get("average_model_state") or {}).values()
        ):
            yield state, "average_model_state"  # StochasticWeightAveraging
