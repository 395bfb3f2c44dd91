"""What a step returned exists on the last stage. Callbacks that ask for it get it on the others, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_megatp.batches.same import SameBatch
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.steps import StepKind
from lightning_megatp.user_hooks import is_users

_TAKES_OUTPUTS = "batch_end"
"""The moment of the hooks that are given what a step returned."""


class Outputs:
    """Sends what steps returned to all stages, if some callback of the user's takes it in a hook.

    Args:
        mesh: pp > 1.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._same = SameBatch(mesh.group("pp"), mesh.device, mesh.hosts("pp"))
        self._same.checked = True  # the others come with nothing
        self._asked: set[StepKind] = set()

    def look_at(self, trainer: Any) -> None:
        """Find out which kinds of steps callbacks ask for. Every rank of the pipeline has to call it.

        Communication: an all-reduce of four numbers over pp: some rank may have a callback of its own.
        """
        hooks = [kind.hook(_TAKES_OUTPUTS) for kind in StepKind]
        counts = torch.tensor([sum(is_users(x, hook) for x in trainer.callbacks) for hook in hooks])
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._mesh.hosts("pp"))
        self._asked = {kind for kind, count in zip(StepKind, counts.tolist(), strict=True) if count}

    def step_taken(self, kind: StepKind, module: Any) -> str:
        """The method of a kind of step, if somebody takes what it returns; "" otherwise."""
        taken = kind is StepKind.PREDICT or kind in self._asked or is_users(module, kind.hook(_TAKES_OUTPUTS))
        return kind.method if taken else ""

    def sent(self, kind: StepKind, outputs: Any) -> Any:
        """The last stage's outputs, on the others None if nobody asks.

        Args:
            kind: of step.
            outputs: of the last stage; None on the others.

        Communication: if a callback asks, that of `SameBatch` over pp: all bytes of the outputs.
        """
        if kind not in self._asked:
            return outputs
        try:
            return self._same(outputs)
        except TypeError:  # on all of them
            warn_once_per_run(
                f"what the step returns to `{kind.hook(_TAKES_OUTPUTS)}` of callbacks can't be pickled, and so not be"
                " sent: on other pipeline stages than the last they get None, or the loss alone. Return tensors in"
                " dicts, tuples or dataclasses."
            )
            return outputs
