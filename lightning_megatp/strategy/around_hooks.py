"""The strategy's part in the user's hooks: what stands around which of them, and in which order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_megatp.detour import Detour
from lightning_megatp.hooks.around import (
    among_copies,
    explaining_stages,
    finding_divided,
    finding_states,
    keeping_data,
    logging_whole,
    watching_weights,
    with_whole_functions,
    with_whole_groups,
    with_whole_values,
)
from lightning_megatp.hooks.forwards import Forwards, GatheredCalls
from lightning_megatp.hooks.meeting import Meetings
from lightning_megatp.hooks.norms import clipping_around_steps
from lightning_megatp.hooks.others import leaving_out_others
from lightning_megatp.hooks.stops import stopping_together
from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.optimizers.nested import with_inner
from lightning_megatp.optimizers.states import states_by_parameter
from lightning_megatp.shim.lightning import default_store
from lightning_megatp.strategy.callbacks import warn_of_writers, without_examples, without_predictions
from lightning_megatp.strategy.gradients import GradientMethods
from lightning_megatp.user_hooks import Hook, users_hooks


class HookMethods(GradientMethods):
    """Detours around hooks. What comes later is outside of what comes earlier."""

    _detours: list[Detour]

    def _stand_in_for_hooks(self, trainer: Any, parallel: ParallelModule, mesh: ParallelMesh) -> None:
        """In runs of every kind."""
        if not self._undivided:
            self._detours += without_examples(trainer, whole_forward=self.pipeline is None and self.sharding is None)
        if mesh.size("tp") > 1:
            warn_of_writers(trainer, mesh.size("tp"))
        if mesh.size("tp") > 1 or self.sharding is not None or self.pipeline is not None:
            meetings = Meetings(parallel.context, mesh, default_store(), divided=self.sharding is not None)
            self._detours += meetings.around_hooks(trainer)
        self._detours += self._in_contexts(parallel, _hooks_of(trainer))
        if self.pipeline is not None and not self.pipeline.is_last:
            self._detours += without_predictions(trainer)

    def _in_contexts(self, parallel: ParallelModule, hooks: Sequence[Hook]) -> Iterator[Detour]:
        """What lets hooks talk among copies of the model, and run forwards."""
        if self._default_group is not None:
            yield from among_copies(hooks, self.among_copies)
        if self._mesh().size("tp") > 1:
            yield from with_whole_functions(hooks, parallel)
        if self.pipeline is not None:
            yield from Forwards(self.pipeline.running_units).around(hooks)
            yield from explaining_stages(hooks)
        elif self.sharding is not None:
            yield from Forwards(GatheredCalls(parallel, self.sharding).running).around(hooks)

    def _with_weights(self, trainer: Any, parallel: ParallelModule, hooks: Sequence[Hook]) -> Iterator[Detour]:
        """What lets hooks read and change weights, of which this rank holds a part."""
        if self._mesh().size("tp") > 1 or self.sharding is not None:
            yield from with_whole_values(trainer, hooks, parallel)  # inside of the next ones
        if self._mesh().size("tp") > 1:
            yield from watching_weights(trainer, hooks, parallel)
        if self.pipeline is not None:
            yield from leaving_out_others(trainer, hooks, self.pipeline.slicer.ownership.take_back)
        if self.sharding is not None:
            yield from keeping_data(trainer, hooks, self.sharding.parameters)

    def _states_by_parameter(self, parallel: ParallelModule) -> contextlib.AbstractContextManager[None]:
        return states_by_parameter(list(with_inner(self.optimizers)), parallel.held)

    def _stand_in_for_fit_hooks(self, trainer: Any, parallel: ParallelModule, mesh: ParallelMesh) -> None:
        """Around those that meet weights, gradients and optimizers."""
        hooks = _hooks_of(trainer)
        self._detours += with_whole_groups(trainer, self._as_on_one_device)
        if self.world_size > 1:
            self._detours += stopping_together(trainer, mesh.hosts(*AXES))
        self._detours += self._with_weights(trainer, parallel, hooks)
        if not self._undivided:
            self._detours += clipping_around_steps(trainer, parallel, mesh)
        if self.sharding is not None:
            self._detours += logging_whole(trainer, parallel.context.meet)
            self._detours += finding_divided(hooks, self.sharding.as_divided)
            self._detours += finding_states(hooks, functools.partial(self._states_by_parameter, parallel))


def _hooks_of(trainer: Any) -> list[Hook]:
    return list(users_hooks((trainer.lightning_module, *trainer.callbacks)))
