"""What steps that optimize by hand, without a pipeline, do to gradients of which a rank may have parts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from lightning_megatp.gradients.clipping import clip
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.gradients import ClipCall, clipping_by, zero_grad_by
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.tensor.outside import WholeParameter


class StepGradients:
    """Lets a step clip by torch's functions, and clear gradients by `zero_grad()` of modules: done to what this rank
    trains, in place of what the step finds.

    Args:
        parallel: the module.
        mesh: where it is.
    """

    def __init__(self, parallel: ParallelModule, mesh: ParallelMesh) -> None:
        self._parallel, self._mesh = parallel, mesh

    @contextlib.contextmanager
    def changed_by_hand(self) -> Iterator[None]:
        """Around the step."""
        with clipping_by(self._clip), zero_grad_by(self._zero_grad):
            yield

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Around what is neither the step's nor an operation of it."""
        with self._parallel.context.running(user_code=False), DisableTorchFunction():
            yield

    def _clip(self, call: ClipCall) -> Any:
        held = self._held(call.parameters)
        if not self._parallel.context.user_code or not held:
            return call.of(call.parameters)
        call.check_known(len(held))
        with self._aside():
            return clip(call, held, self._parallel, self._mesh)

    def _held(self, parameters: Iterable[Any]) -> list[Tensor]:
        """What this rank trains in place of those that are the module's."""
        found = [x.parameter if isinstance(x, WholeParameter) else x for x in parameters]
        known = {id(parameter) for parameter in self._parallel.names.values()} | self._parallel.divided.keys()
        return [self._parallel.held(x) for x in found if id(x) in known]

    def _zero_grad(self, call: functools.partial[Any]) -> Any:
        """A divided parameter's gradient lies with its rows."""
        with self._aside():
            for parameter in call.args[0].parameters():
                held = self._parallel.held(parameter)
                if held is not parameter and held.grad is not None:
                    kept = not call.keywords.get("set_to_none", (*call.args, True)[1])
                    held.grad = held.grad.detach().zero_() if kept else None
            return call()
