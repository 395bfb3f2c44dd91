"""Which divided parameters a step has used, and which units it has called, on some data-parallel rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.shim.collectives import unrecorded
from lightning_megatp.tensor.functions import OwnHook
from lightning_megatp.zero.holders import REDUCES_UNUSED, Holder


class Uses:
    """What had a gradient on this rank since the last reduction, and on the others, which are told.

    Args:
        parameters: backwards note which of them they reach, from now on.
        holders: of the units.
        mesh: who is where.
        level: of zero.
    """

    def __init__(
        self, parameters: Sequence[DividedParameter], holders: Mapping[str, Holder], mesh: ParallelMesh, level: int
    ) -> None:
        self._parameters, self._holders, self._mesh, self._level = parameters, holders, mesh, level
        self._used: set[str] = set()
        """Names of parameters."""
        self._telling: dist.Work | None = None
        """What tells the other ranks which parameters were used here, and which units called."""
        self._flags = torch.zeros(0, dtype=torch.uint8)
        """What it tells: a number for each parameter, and two for each unit: whether some rank has called it, and
        whether some has not."""
        for parameter in parameters:
            use = OwnHook(functools.partial(_note, self._used, parameter.name))
            trained = parameter.whole.requires_grad  # a frozen one, which takes no hook, may be unfrozen later
            parameter.whole.requires_grad_(True).register_post_accumulate_grad_hook(use)
            parameter.whole.requires_grad_(trained)

    def __contains__(self, name: str) -> bool:
        """Whether this rank has used a parameter."""
        return name in self._used

    def forget(self) -> None:
        """What comes next is reduced anew."""
        self._used.clear()

    def reduced(self) -> list[tuple[DividedParameter, Tensor]]:
        """The parameters that have had a gradient on one of the ranks, and this rank's rows of what was reduced of
        each. A rank that has used them all knows without the others, and does not wait until they know.

        Raises:
            RuntimeError: as `wait`; or ranks used different parameters, with a torch that can't reduce these.

        Communication: one all-reduce of a byte per parameter and two per unit, between the hosts of dp ranks, waited
        for where a parameter was not used.
        """
        found = [(p, p.sharded.grad) for p in self._parameters]  # frozen since, too
        reduced = [(p, grad.to_local()) for p, grad in found if isinstance(grad, DTensor)]
        self.wait()
        used = [p.name in self._used for p in self._parameters]
        called = [holder.called for holder in self._holders.values()]
        self._flags = torch.tensor([*used, *called, *(not x for x in called)], dtype=torch.uint8)
        with unrecorded():
            group = self._mesh.hosts("dp")
            self._telling = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=group, async_op=True)
        if all(p.name in self._used for p, _ in reduced) and (REDUCES_UNUSED or all(used)):
            return reduced
        self.wait()
        names = {p.name for p, was in zip(self._parameters, self._flags.tolist(), strict=False) if was}
        if not REDUCES_UNUSED and (others := sorted(names - self._used)):
            raise RuntimeError(
                f"MegaTPStrategy: another data-parallel rank has used `{others[0]}` in this step, and this one has not."
                f" With zero={self._level}, FSDP2 of torch {torch.__version__} then adds up gradients of"
                " different parameters. Use torch 2.13, zero=0, or a step in which all ranks use the same parameters."
            )
        return [(p, grad) for p, grad in reduced if p.name in names]

    def wait(self) -> None:
        """Wait until what was told is known.

        Raises:
            RuntimeError: some ranks have called a unit, and others have not.
        """
        if self._telling is None:
            return
        self._telling.wait()
        self._telling = None
        called, not_called = self._flags[len(self._parameters) :].chunk(2) if self._holders else ((), ())
        for unit, some, not_all in zip(self._holders, called, not_called, strict=True):
            if some and not_all:
                raise RuntimeError(
                    f"MegaTPStrategy: some data-parallel ranks have called `{unit}` in this step, and others have not."
                    f" With zero={self._level} its parameters are gathered from all of them at once, and so may"
                    " be those of another module in its place. Let all ranks call the same modules (layers that are"
                    " left out at random: by a generator of the same seed on all ranks), or use zero=0."
                )


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)
