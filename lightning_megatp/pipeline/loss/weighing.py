"""How much each microbatch counts in the loss of its batch, and that loss.

The weight is what the step's average is over, where it makes one (`averages.py`): targets, elements, or the sum that it
divides by. Otherwise the user's `loss_weight(batch)` says it, or else the number of samples. A loss that is a sum over
the samples has the sum of the microbatches'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.pipeline.loss.averages import Averages, scalar
from lightning_megatp.pipeline.loss.made import NEXT_TO_NOTHING, Average, Made
from lightning_megatp.pipeline.tail_check import IfItDiffers


@dataclass
class BatchLoss:
    """The losses and weights of the microbatches of one batch, on the last stage.

    Args:
        rows: the samples of each microbatch.
        device: of weights that are plain numbers.
        total: () float64, what the weights add up to, if that is known before.
    """

    rows: Sequence[int]
    device: torch.device
    total: Tensor | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    """By microbatch, () each, without a graph."""
    compared: str = ""
    """The operation by which the step compares samples with each other, if that was looked for."""
    _weights: dict[int, Tensor | float] = field(default_factory=dict)
    _made: dict[int, Made | None] = field(default_factory=dict)
    _chosen: dict[int, Average | None] = field(default_factory=dict)
    """By microbatch, the average whose count it weighs."""
    _kinds: dict[int, str] = field(default_factory=dict)
    """By microbatch, what it weighs by."""
    _elements: tuple[Tensor | float, int] | None = None
    """What the first microbatch that weighs by elements averages over, and its samples."""
    _several: tuple[list[Tensor], int] | None = None
    """The numbers of targets of the first microbatch with several cross-entropies, and its samples."""

    def add(self, microbatch: int, loss: Any, averages: Averages, own: Tensor | float | None) -> None:
        """After the step of a microbatch.

        Args:
            loss: what it returned as one, if anything.
            averages: that the step made.
            own: what the user says it weighs; None if nothing.
        """
        made = averages.made(loss)
        if made is not None and not made.of and not made.bent:
            made = None
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.losses[microbatch] = loss.detach().reshape(())
        self.compared = self.compared or averages.compared
        if own is not None:
            self._weights[microbatch] = own
            return
        self._made[microbatch] = made
        # if nothing is known, it may be made of the cross-entropies that there are
        of = made or Made(tuple(averages.of_targets))
        kind, chosen = of.weighs_by
        self._kinds[microbatch] = kind
        self._chosen[microbatch] = chosen
        rows = self.rows[microbatch]
        several = kind == "several"
        self._weights[microbatch] = self._of_several(of.targets, rows) if several else self._weight(kind, chosen, rows)

    def _weight(self, kind: str, chosen: Average | None, rows: int) -> Tensor | float:
        if kind == "sums":
            return 1.0
        if chosen is None or chosen.count is None:
            return float(rows)
        if kind == "targets":
            return chosen.count
        if self._elements is None:
            self._elements = chosen.count, rows
        first, first_rows = self._elements
        if isinstance(first, Tensor):
            first = first.double()
            return chosen.count * torch.where(first > NEXT_TO_NOTHING, first_rows / first, torch.ones_like(first))
        return chosen.count * (first_rows / first) if first else chosen.count

    def _of_several(self, targets: Sequence[Average], rows: int) -> Tensor | float:
        """The weight of a microbatch with cross-entropies over different targets: how many times as many as in the
        first microbatch there are, on average, times the samples of that. It is right for all of them where their
        numbers have one ratio."""
        counts = [scalar(a.count, self.device) for a in targets if a.count is not None]
        if self._several is None:
            self._several = counts, rows
        first, first_rows = self._several
        if len(first) != len(counts):
            return float(rows)
        weights = [torch.where(n > 0, x * first_rows / n, x) for x, n in zip(counts, first, strict=True)]
        return torch.stack(weights).mean()

    @property
    def adds_up(self) -> bool:
        """Whether the batch's loss is the sum of the microbatches', not their mean."""
        return set(self._kinds.values()) == {"sums"}

    @functools.cached_property
    def provisional_total(self) -> Tensor:
        """() float64, by what the weights are divided in the losses, before their sum is known: as if all samples
        weighed what those of the first microbatch do. Where they do, nothing is left to correct. Not less than the
        number of samples: few targets in the first would let the other losses overflow."""
        if self.total is not None:
            return self.total
        first = scalar(self._weights[0], self.device)
        if self.adds_up:
            return torch.ones_like(first)
        return first.clamp(min=float(self.rows[0])) * (sum(self.rows) / self.rows[0])

    def share(self, microbatch: int) -> Tensor:
        """() float64: the factor of a microbatch's loss, but for one that is the same for all."""
        return scalar(self._weights[microbatch], self.device) / self.provisional_total

    def weights(self) -> Tensor:
        """(m,) float64, of the microbatches. One that averages nothing, where others do, and whose loss is 0 (steps
        return `y.sum() * 0` where nothing is marked), weighs nothing.

        Raises:
            RuntimeError: some are numbers of targets, and others of samples.
        """
        weights = [scalar(self._weights[i], self.device) for i in range(len(self.rows))]
        kinds = set(self._kinds.values())
        if not kinds & {"targets", "elements"}:
            return torch.stack(weights)
        others = [i for i, kind in self._kinds.items() if kind not in ("targets", "elements")]
        for i in others:
            weights[i] = torch.where(self.losses.get(i, torch.ones(())).to(self.device) == 0, 0.0, weights[i])
        single = [i for i, kind in self._kinds.items() if kind == "targets"]
        mixed = single and ("elements" in kinds or any(bool(weights[i]) for i in others))
        if mixed and any(bool(weights[i]) for i in single):  # without targets several cross-entropies look like one
            raise RuntimeError(
                "MegaTPStrategy: the step averages one cross-entropy in some microbatches of a batch, and none or"
                " several in others, so what they weigh can't be told. Define `loss_weight(self, batch)` on the"
                " LightningModule."
            )
        return torch.stack(weights)

    def total_weight(self, weights: Tensor) -> Tensor:
        """() float64: what the weighted losses are divided by."""
        if self.adds_up:
            return torch.ones_like(self.provisional_total)
        if not any(isinstance(a.empty, Tensor) or a.empty for a in self._chosen.values() if a is not None):
            return weights.sum()
        empty = [False if (a := self._chosen.get(i)) is None else a.empty for i in range(len(self.rows))]
        counted = (1 - torch.stack([scalar(x, self.device) for x in empty])) * weights
        # one device takes a count of nothing for something, too: once
        once = torch.where(weights.max() > NEXT_TO_NOTHING, weights.max(), weights.sum())
        return torch.where(counted.sum() > 0, counted.sum(), once)

    def factor(self, weights: Tensor) -> Tensor:
        """() float64, the one that `share` leaves out."""
        return self.provisional_total / self.total_weight(weights)

    def value(self, weights: Tensor) -> Tensor:
        """() of the batch."""
        losses = torch.stack([self.losses[i] for i in range(len(self.rows))])
        total: Tensor = (losses.double() * weights).sum() / self.total_weight(weights)
        return total.to(losses.dtype)

    def warn(self, weights: Tensor, say: Callable[[str], None]) -> None:
        """Say where the batch's loss is not that of one device. Waits for a GPU: of a few batches of a run.

        Args:
            say: is told, if the step adds averages over different things, makes something else of them, or adds
                something of which nothing is known; or if it compares samples.
        """
        if self.compared:
            say(
                f"the step compares samples with each other (by `{self.compared}`), and finds those of a microbatch"
                f" only, {self.rows[0]} of the {sum(self.rows)} that one device compares. That is another loss: use"
                " whole_loss=True for the same one."
            )
        if self._made and (text := self._different(weights)):  # else the user says what microbatches weigh
            say(text)

    def _different(self, weights: Tensor) -> str:
        losses = torch.stack([self.losses.get(i, torch.ones(())).to(weights) for i in range(len(self.rows))])
        holds = weights > NEXT_TO_NOTHING * sum(self.rows)
        counted = (holds | (losses != 0)).nonzero().flatten().tolist() or list(range(len(self.rows)))
        made = [self._made[i] for i in counted]
        known = [x for x in made if x is not None]
        if not known and "targets" not in self._kinds.values():
            return (
                "what the step's loss is an average of can't be followed (compiled code makes it, or none of torch's"
                " losses, means and sums), so its microbatches weigh by their samples. If they hold different numbers"
                " of what it averages (targets, marked tokens), let `loss_weight(self, batch)` on the LightningModule"
                " tell how many; if not, let it tell the number of samples."
            )
        if bent := next((x.bent for x in known if x.bent), ""):
            return (
                f"the step does not add averages over its samples, but makes something else of them (by `{bent}`). A"
                " pipeline does so for every microbatch, and the batch's loss is the mean of the results; on one device"
                " it is made of the averages over the batch. If that matters, use whole_loss=True."
            )
        if len(known) < len(made):
            return ""  # of some of them nothing can be followed
        if len({len([a for a in x.of if not a.of_sample]) for x in known}) > 1:
            numbers = " and ".join(str(n) for n in sorted({len(x.of) for x in known}))
            return (
                f"the step adds up {numbers} averages in different microbatches of a batch, as where a term is there"
                " only if some sample has what it is about. The batch's loss is the mean of the microbatches'; on one"
                " device each term is of the whole batch. If that matters, use whole_loss=True."
            )
        if len({len(x.of) for x in known}) > 1:
            return ""  # loops over other numbers of samples
        if (average := self._multiplied(known)) is not None:
            return (
                f"the step multiplies an average (`{average.by}`) by a number of the microbatch, or weighs classes by"
                " what is counted in it: it differs between microbatches, and on one device is that of the batch. If"
                " that matters, use whole_loss=True; or where the product is a mean over other things, divide a sum by"
                " how many these are."
            )
        besides = [[a for a in x.of if not a.of_sample] for x in known]
        if self.adds_up and len(known[0].of) > 1 and any(map(_alike, _by_average(besides))):
            return (
                "the step's loss is a sum over its samples, and so is the batch's: what is added to it and doesn't"
                " depend on samples (a norm of weights) counts once for every microbatch. Divide it by their number, or"
                " use whole_loss=True."
            )
        if all(a.count is None for a in known[0].of) and not self.adds_up:
            return (
                "the step's loss is a sum over its samples, and the batch's is the mean of the microbatches' sums."
                " Divide it by the number of samples (`len(x)`), or let one of torch's losses sum it"
                " (`reduction='sum'`), which is added up. If what it sums is divided already, let"
                " `loss_weight(self, batch)` on the LightningModule return the number of samples."
            )
        if (number := self._constant(known, [self.rows[i] for i in counted])) is not None:
            return IfItDiffers(
                f"the step divides a sum over its samples by {number:g} in every microbatch, which by their shapes is"
                " no number of what it has added up. The batch's loss is the mean of the microbatches'. If one device"
                f" divides the whole batch by {number:g}, too, its loss is {len(made)} times as large: divide by what a"
                " microbatch holds (`len(x)`), or use whole_loss=True. If it divides by what it counts in the batch, it"
                " is the same."
            )
        if not self.adds_up and self._unequal(known, weights[counted]):
            names = ", ".join(dict.fromkeys(f"`{a.by}`" for a in known[0].of))
            kind, chosen = self._kinds[counted[0]], self._chosen[counted[0]]
            by = "their samples" if chosen is None else f"what `{chosen.by}` is over"
            by = "the mean of these" if kind == "several" else by
            return (
                f"the step adds averages over different numbers ({names}), and its microbatches weigh by {by}: so does"
                " all that is added. On one device each average is of the whole batch. If that matters, use"
                " whole_loss=True, or let `loss_weight(self, batch)` on the LightningModule tell what a microbatch"
                " counts in all of the loss."
            )
        if self._chosen[0] is not None and any(x.rest for x in known) and self._adds(weights):
            return (
                "the step adds something of its samples to an average, and its microbatches, which hold different"
                " numbers of targets per sample, weigh by these: so does what is added, which on one device may be a"
                " mean over samples. If it is, use whole_loss=True, or let `loss_weight(self, batch)` on the"
                " LightningModule tell what a microbatch counts in all of the loss."
            )
        return ""

    def _constant(self, made: Sequence[Made], rows: Sequence[int]) -> float | None:
        """A Python number that a sum is divided by in all microbatches, though it can't be a count."""
        for averages in zip(*(x.of for x in made), strict=True):
            divisors = {a.divisor for a in averages}
            counts = any(a.divisor_counts(n, sum(self.rows)) for a, n in zip(averages, rows, strict=True))
            empty = any(isinstance(a.empty, Tensor) or a.empty for a in averages)
            if len(divisors) == 1 and not counts and not empty:
                return divisors.pop()
        return None

    def _multiplied(self, made: Sequence[Made]) -> Average | None:
        """An average that is multiplied by another number in some microbatches, or is of other weights."""
        for averages in zip(*(x.of for x in made), strict=True):
            if not _alike(torch.stack([scalar(a.factor, self.device) for a in averages])):
                return averages[0]
            weights = [a.weights for a in averages if a.weights is not None]
            if len({x.shape for x in weights}) > 1 or (weights and not all(map(weights[0].allclose, weights))):
                return averages[0]
        return None

    def _unequal(self, made: Sequence[Made], weights: Tensor) -> bool:
        """Whether some average is over numbers of another ratio than the weights, or a sum beside averages is not the
        same in all microbatches."""
        of = [x.distinct for x in made]
        if len(set(map(len, of))) > 1:
            return False
        for averages, values in zip(zip(*of, strict=True), _by_average(of), strict=True):
            if any(a.count is None for a in averages):
                if not _alike(values):
                    return True
                continue
            counts = torch.stack([scalar(a.count, self.device) for a in averages])
            shares = counts / counts.sum().clamp(min=1e-12), weights / weights.sum().clamp(min=1e-12)
            if float((shares[0] - shares[1]).abs().max()) > _ALIKE / len(self.rows):
                return True
        return False

    def _adds(self, weights: Tensor) -> bool:
        """Whether a loss is its average, but for a factor or a number that is the same for all (a norm of weights)."""
        chosen = [self._chosen.get(i) for i in range(len(self.rows))]
        if any(a is None for a in chosen):
            return False
        found = torch.stack([self.losses[i] for i in range(len(self.rows))]).double()
        averaged = torch.stack([a.value for a in chosen if a is not None]).double()
        rest = found - averaged
        same_rest = float(rest.max() - rest.min()) <= _ALIKE * float(found.abs().max())
        rows = torch.tensor(self.rows, dtype=torch.float64, device=weights.device)
        return not same_rest and not _alike(weights / rows) and not _alike(found / averaged)


_ALIKE = 1e-2
"""How far apart numbers that may be 16 bits wide may be and count as alike, relative to the largest."""


def _by_average(averages: Sequence[Sequence[Average]]) -> list[Tensor]:
    """(m,) each, the values of an average in the microbatches; of a table, their mean."""
    return [torch.stack([a.value.double().mean() for a in each]) for each in zip(*averages, strict=False)]


def _alike(x: Tensor) -> bool:
    return float((x.max() - x.min()) / x.abs().max().clamp(min=1e-12)) <= _ALIKE
