"""Parameters that several stages hold: tied ones, those outside of all units, and those that are lent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.replicas import differing


@dataclass(frozen=True)
class Shared:
    """A parameter that several stages hold."""

    name: str
    shape: torch.Size
    """On this tensor rank."""
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Shared:
        return cls(name, parameter.shape, parameter.dtype)


class SharedParameters:
    """Sums their gradients over the stages.

    Args:
        parallel: the module.
        mesh: who is where.
        loans: which of them are lent.
        shared: those known so far, in the same order on all stages.
    """

    def __init__(self, parallel: ParallelModule, mesh: ParallelMesh, loans: Loans, shared: Iterable[Shared]) -> None:
        self._parallel, self._mesh, self._loans = parallel, mesh, loans
        self._shared = {each.name: each for each in shared}

    def add(self, shared: Shared) -> None:
        """One more; on all stages."""
        self._shared.setdefault(shared.name, shared)

    def check_alike(self) -> None:
        """Compare what several stages have, which must be the same. What is lent follows its own stage.

        Raises:
            RuntimeError: on every stage, naming a parameter that differs.

        Communication: see `differing`; once per epoch.
        """
        own = {name: None if self._loans.is_lent(name) else self._held(name) for name in self._shared}
        for name in differing(own, self._mesh.group("pp"), self._parallel.device, _ROUNDING):
            raise RuntimeError(
                f"MegaTPStrategy: several pipeline stages have `{name}`, and not with the same values. A hook has"
                " changed it on each by what that stage alone has: weights that are drawn anew in a hook"
                " (`reset_parameters`, `nn.init`) are drawn for each stage's own parameters, so that the random numbers"
                " part. Draw them in `__init__` or `configure_model`, or each from a generator that is seeded for it."
            )

    def sum_gradients(self) -> None:
        """Sum over the stages the gradients of parameters that several of them hold.

        Communication: one all-reduce over pp per dtype, 2 (p - 1) / p of these parameters' elements; and one of a flag
        each between the hosts: whether some stage has a gradient.
        """
        if not self._shared:
            return
        held = [self._held(shared.name) for shared in self._shared.values()]
        flags = torch.tensor([p is not None and p.grad is not None for p in held], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._mesh.hosts("pp"))
        used = [shared for shared, some in zip(self._shared.values(), flags.tolist(), strict=True) if some]
        device = self._mesh.device  # gradients may be offloaded
        for dtype in dict.fromkeys(shared.dtype for shared in used):
            group = [shared for shared in used if shared.dtype == dtype]
            held = [self._held(shared.name) for shared in group]
            grads = [None if p is None else p.grad for p in held]
            parts = [
                torch.zeros(self._held_shape(shared), dtype=dtype, device=device) if grad is None else grad.to(device)
                for shared, grad in zip(group, grads, strict=True)
            ]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=self._mesh.group("pp"))
            totals = flat.split([part.numel() for part in parts])
            for shared, parameter, total in zip(group, held, totals, strict=True):
                if parameter is not None:
                    lent = self._loans.is_lent(shared.name)  # its own stage has the sum, and the optimizer
                    parameter.grad = None if lent else total.view(parameter.shape).to(parameter.device)

    def _held(self, name: str) -> Tensor | None:
        """The plain tensor of a parameter, if this rank has it."""
        parameter = self._parallel.names.get(name)
        return None if parameter is None else self._parallel.held(parameter)

    def _held_shape(self, shared: Shared) -> torch.Size:
        """The shape of a parameter on this rank, or on one beside it on the pp axis, which has the same rows."""
        sharding = self._parallel.sharding
        return shared.shape if sharding is None else sharding.shape_of_rows(shared.name, shared.shape)


_ROUNDING = 1e-6
"""Far more than stages differ whose copies get the same gradient; sums of n elements drawn anew do by 1 / sqrt(n)."""
