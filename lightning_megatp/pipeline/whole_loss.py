"""The tail of a step, made once for all microbatches: its loss is that of the batch, whatever it is.

Microbatches go through the units one by one. What the step does after the last unit takes what they made, put together
along the rows, as one device would. So a loss may compare samples, be no average, or take statistics of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Key, Relay, SlicePlan, last_unit
from lightning_megatp.pipeline.slicing.rows import Rows
from lightning_megatp.pipeline.slicing.running import Taken


@dataclass
class WholeLoss:
    """The tail of the step on one batch, on its last stage.

    Args:
        batch: all of it.
        plan: of the step on it.
        stands: the microbatch whose numbers stand for the batch's, where blocks make one of a microbatch and not of
            each sample; None for the mean of all, which is no longer one device's.
    """

    batch: Any
    plan: SlicePlan
    stands: int | None = None
    parts: list[list[Tensor]] = field(default_factory=list)
    """By microbatch, what crosses from the units to the tail, without a graph."""
    leaves: list[Tensor] = field(default_factory=list)
    """The same, put together."""
    says: Callable[[str], None] | None = None
    """Is told what is not that of one device; None where nobody looks, since a GPU would be waited for."""
    coupled: str = ""
    """What makes something of all samples before the last block."""
    _dims: list[int | None] = field(default_factory=list)
    _taken: list[Taken] = field(default_factory=list)
    """What operations of stages take, by microbatch, and last of the batch; where somebody looks."""

    @classmethod
    def of(cls, batch: Any, plans: Sequence[SlicePlan]) -> WholeLoss:
        """Find out which tensors of the microbatches the tail takes, and how they are put together.

        Args:
            plans: of its microbatches, and last of itself.

        Raises:
            SliceError: the step does something else with the whole batch than with a microbatch, or draws random
                numbers, or puts samples beside others, before the tail.
        """
        whole = cls(batch, plans[-1])
        for plan in plans:
            early = plan.operations[: last_unit(plan.operations) + 1]
            drawn = next((operation for operation in early if operation.random), None)
            if drawn is not None or plan.effects.draws_on_host:
                what = "on the host" if drawn is None else f"by `{drawn.name}` ({drawn.where}), before its last block"
                raise SliceError(
                    f"with whole_loss=True the step draws random numbers {what}: microbatches draw others than the"
                    " whole batch, whose loss they may be for. Draw them by torch after the last block, in the module"
                    " that uses them, or in `on_after_batch_transfer`; or leave whole_loss out."
                )
            if plan.mixes:
                raise SliceError(
                    f"with whole_loss=True the step puts samples beside others by {plan.mixes}, before its last block,"
                    " in a microbatch other ones than in the batch. Do it in `on_after_batch_transfer`, or leave"
                    " whole_loss out."
                )
            if _shape(plan) != _shape(whole.plan):
                raise SliceError(
                    "with whole_loss=True the step does something else with a whole batch than with a microbatch, up to"
                    " its last block. Leave whole_loss out, or let it do the same for all sizes."
                )
        whole.coupled = whole.plan.couples if any(plan.couples for plan in plans[:-1]) else ""
        return whole

    def join(self) -> list[Tensor]:
        """What the tail takes: leaves.

        Raises:
            SliceError: something has other sizes than rows that add up, or can't be averaged.
        """
        self.leaves, self._dims = [], []
        for relay, parts in zip(self.plan.relays[-1], zip(*self.parts, strict=True), strict=True):
            dim = _dim_of_rows(relay, parts)
            self._dims.append(dim)
            joined = self._mean(parts) if dim is None else Rows(dim, relay.rounds).join(parts)
            if joined.stride() != relay.stride:  # a view may be made of it that needs these
                laid = torch.empty_strided(relay.shape, relay.stride, dtype=joined.dtype, device=joined.device)
                joined = laid.copy_(joined)
            self.leaves.append(joined.requires_grad_(relay.requires_grad or bool(relay.has_graph)))
        return self.leaves

    @property
    def has_numbers(self) -> bool:
        """Whether blocks have made numbers of a microbatch that are not the batch's; known once they are joined."""
        pairs = zip(self._dims, zip(*self.parts, strict=True), strict=True)
        return any(dim is None and not all(map(parts[0].equal, parts[1:])) for dim, parts in pairs)

    def taken_by(self, microbatch: int) -> Taken | None:
        """Where what a run's operations take is to be noted; None if nobody looks."""
        if self.says is None:
            return None
        self._taken[microbatch:] = [{}]
        return self._taken[microbatch]

    def forget_taken(self, microbatch: int, stage: int) -> None:
        """Let go of what a stage's operations take of a microbatch, hidden states; and of what comes after blocks."""
        operations, end = self.plan.operations, last_unit(self.plan.operations)
        early = {n for i, n in self.plan.numbers.items() if i <= end and operations[i].stage != stage}
        self._taken[microbatch] = {key: x for key, x in self._taken[microbatch].items() if key[0] in early}

    def compare_taken(self) -> None:
        """After the tail: say what blocks take of microbatches that is not the batch's. What every stage computes, on
        either, is a part of that, row by row; but for statistics, and samples in another order."""
        if self.says is None:
            return
        if self.coupled:
            self.says(
                f"{self.coupled} makes something of all samples between blocks: of a microbatch's, where one device"
                " takes the batch's. whole_loss=True takes the batch's behind the last block."
            )
        if len(self._taken) <= len(self.parts):
            return  # the tail was not run
        *parts, of_batch = self._taken
        operations = [self.plan.operations[i] for i in self.plan.numbers]
        rounds = {1, *(relay.rounds for relay in self.plan.relays[-1] if relay.rounds)}
        for (number, position), x in of_batch.items():
            each = [part[number, position] for part in parts if (number, position) in part]
            operation = operations[number]
            if (
                len(each) == len(parts)
                and operation.stage != self.plan.n_stages - 1
                and not _is_made_of(x, each, rounds)
            ):
                self.says(
                    f"what `{operation.name}` ({operation.where}) takes of a microbatch is not that of the batch:"
                    " before its blocks the step takes a statistic of all samples, or puts them in another order. Do"
                    " that in `on_after_batch_transfer`."
                )
        self._taken = []

    def _mean(self, parts: Sequence[Tensor]) -> Tensor:
        """The mean of numbers that each microbatch has: the same in all of them, where they are made of weights
        alone."""
        if self.stands is not None:
            return parts[self.stands].clone()
        if self.says is not None and not all(map(parts[0].equal, parts[1:])):
            self.says(
                f"with whole_loss=True a value of shape {tuple(parts[0].shape)}, which blocks make of a microbatch and"
                " not of each sample (an auxiliary loss of experts, a criterion that is a module with parameters), is"
                " averaged over the microbatches."
            )
        return torch.stack(list(parts)).mean(0)

    def gradients(self, microbatch: int) -> list[Tensor]:
        """The gradients of a microbatch's part of what crosses to the tail, where that has one."""
        found = []
        for i, (relay, leaf, dim) in enumerate(zip(self.plan.relays[-1], self.leaves, self._dims, strict=True)):
            if not relay.requires_grad:
                continue
            if leaf.grad is None:
                found.append(torch.zeros_like(self.parts[microbatch][i]))
            elif dim is None:
                found.append(leaf.grad / len(self.parts))
            else:
                sizes = [part[i].shape[dim] // relay.rounds for part in self.parts]
                rounds = leaf.grad.unflatten(dim, (relay.rounds, -1))
                own = rounds.narrow(dim + 1, sum(sizes[:microbatch]), sizes[microbatch])
                found.append(own.flatten(dim, dim + 1))
        return found


def check_order(batch: Any, microbatches: Sequence[Any]) -> None:
    """See whether microbatches, one behind the other, are the batch.

    Raises:
        SliceError: the user's `split_batch` brings samples into another order.
    """
    if not has_order(batch, microbatches):
        raise SliceError(
            "with whole_loss=True what `split_batch` returns has to have the samples in the order of the batch, all"
            " of which its loss is computed on. Sort them in the DataLoader, or leave whole_loss out."
        )


def has_order(batch: Any, microbatches: Sequence[Any]) -> bool:
    """Whether microbatches have the samples in the order of the batch, as far as their tensors add up to its."""
    whole, parts = tensors_in(batch), [tensors_in(microbatch) for microbatch in microbatches]
    if any(len(part) != len(whole) for part in parts):
        return True
    for x, *each in zip(whole, *parts, strict=True):
        dims = _dims_of_rows(tuple(x.shape), [tuple(part.shape) for part in each])
        if len(dims) == 1 and not torch.cat(each, dims[0]).equal(x):
            return False
    return True


def _shape(plan: SlicePlan) -> Any:
    """What has to be the same for a microbatch and for the batch."""
    tail = plan.n_stages - 1

    def of_stages(key: Key | None) -> Any:
        return None if key is None else (plan.numbers.get(key.operation), key.output)

    early = [(x.name, x.stage, *map(of_stages, x.outputs)) for x in plan.operations if x.stage not in (None, tail)]
    return early, [(of_stages(relay.key), relay.dtype, relay.requires_grad) for relay in plan.relays[-1]]


def _is_made_of(x: Tensor, parts: Sequence[Tensor], rounds: Collection[int]) -> bool:
    """Whether parts of microbatches make up the batch's along some dim, or each is the same as that. Of other shapes,
    as where a microbatch is padded to fewer tokens, this can't be told, and is taken to be so."""
    shapes = [tuple(part.shape) for part in parts]
    if all(shape == x.shape for shape in shapes):
        return all(_is_close(part, x) for part in parts)
    ways = [
        (n, dim)
        for dim in _dims_of_rows(tuple(x.shape), shapes)
        for n in rounds
        if not any(shape[dim] % n for shape in shapes)
    ]
    return not ways or any(_is_close(Rows(dim, n).join(parts), x) for n, dim in ways)


def _is_close(found: Tensor, x: Tensor) -> bool:
    """Whether numbers are the same but for how a kernel divides them among vectors."""
    if not (x.is_floating_point() or x.is_complex()):
        return found.equal(x)
    return bool(torch.isclose(found, x, rtol=1e-3, atol=1e-6, equal_nan=True).all())


def _dims_of_rows(whole: tuple[int, ...], shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The dims along which tensors of some shapes can be put together to another one."""
    if any(len(shape) != len(whole) for shape in shapes):
        return []
    return [
        dim
        for dim, size in enumerate(whole)
        if sum(shape[dim] for shape in shapes) == size
        and all((*x[:dim], *x[dim + 1 :]) == (*whole[:dim], *whole[dim + 1 :]) for x in shapes)
    ]


def _dim_of_rows(relay: Relay, parts: Sequence[Tensor]) -> int | None:
    """Along which dim parts of microbatches are put together to the batch's; None if each has all of it.

    Raises:
        SliceError: along none, or several.
    """
    shapes = [tuple(part.shape) for part in parts]
    if len(parts) == 1 and shapes[0] == relay.shape:
        return 0 if relay.shape else None
    dims = _dims_of_rows(relay.shape, shapes)
    if len(dims) == 1 and not relay.rounds:
        raise SliceError(
            "with whole_loss=True the step takes some of its samples, or puts rows beside others, before its last"
            " block, and a microbatch's rows are no part of the batch's then. Do it after the last block, or in"
            " `on_after_batch_transfer`; or leave whole_loss out."
        )
    if len(dims) == 1:
        return dims[0]
    if all(shape == relay.shape for shape in shapes) and relay.dtype.is_floating_point:
        return None
    raise SliceError(
        f"with whole_loss=True what comes out of the last block for microbatches, of shapes {shapes}, can't be put"
        f" together to the batch's {relay.shape}. Let it have the samples along one dim, or leave whole_loss out."
    )
