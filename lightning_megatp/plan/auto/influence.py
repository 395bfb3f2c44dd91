"""Which layers belong together, and which of their features: read off gradients.

A cotangent on one rank's share of a layer's input reaches, in the layers before it, exactly the features that this
share is made of. If they are other features for every rank, the layer can be split by its input (a row), and those
before it by these features (columns), whatever the code in between is called and however heads are packed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megatp.plan.auto.apart import StatisticsApart
from lightning_megatp.plan.auto.blocks import Call
from lightning_megatp.plan.auto.exact import exact
from lightning_megatp.plan.auto.thin import ThinLinear, concrete_call
from lightning_megatp.plan.ranges import Ranges, merge, split_evenly

_ROUNDS = (3, 10)
"""Least and most probes, with other values: a dead unit's gradient is zero by chance. Every second one repeats the last
with the layers' outputs negated: a unit that no token passes is passed by all of them. Where one layer reads what
another makes, both signs cancel; so in the other probes some features are negated, by chance."""

_MUCH = 4
"""Of rows, those that are so many times larger come first: an adapter stands before the layer that its features are
for. Otherwise the first in the block do."""


_MIXED = "its features mix with others before a layer could take them"


@dataclass
class Candidate:
    """Row layers that take the same features, with the column layers that feed them."""

    rows: list[str]
    """The largest first."""
    by_rank: tuple[Ranges, ...]
    unit: int
    """Input features of the rows that stay together: the size of a head, or 1."""
    columns: dict[str, tuple[Ranges, ...]] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)
    """On how many ranks each column's features are on average: 1, or more for key-value heads that ranks share."""

    @property
    def layers(self) -> list[str]:
        """Rows and columns."""
        return [*self.rows, *self.columns]


@dataclass
class Influence:
    """What a probe found.

    Args:
        sizes: number of weights of each layer.
        outputs: number of features that each put out in the call, of all tokens.
        reached: layer -> what its input is made of.
    """

    sizes: dict[str, int]
    outputs: dict[str, int]
    reached: dict[str, _Row]
    reasons: dict[str, str] = field(default_factory=dict)
    """Layer -> why it is in none of the last candidates."""

    def candidates(self, tp: int, taken: Collection[str] = (), refused: Collection[str] = ()) -> list[Candidate]:
        """Those that spare most messages together, in the order in which the block has their rows: what columns put out
        stays where it is, while layers by themselves are gathered, and rows are summed. Of equal ones, those that hold
        most weights.

        Args:
            taken: layers that are in use.
            refused: layers that are no rows of what they are made of; they may be columns of others.
        """
        rows = [name for name in self.reached if name not in refused]
        largest = max((self.sizes[name] for name in rows), default=1)
        by_row = sorted(rows, key=lambda name: int(math.log(largest / self.sizes[name], _MUCH)))
        alone = {name: self._in_turn([name], tp, taken, {}) for name in rows}
        by_gain = sorted(rows, key=lambda name: self._gain(alone[name]), reverse=True)
        reasons: dict[str, str] = {}
        found = self._in_turn(by_row, tp, taken, reasons)
        other_reasons: dict[str, str] = {}
        other = self._in_turn(by_gain, tp, taken, other_reasons)
        if self._gain(other) > self._gain(found):
            found, reasons = other, other_reasons
        taken = {*taken, *(name for candidate in found for name in candidate.layers)}
        self.reasons = {name: _MIXED for name in self.sizes if name not in taken} | reasons
        order = list(self.sizes)
        return sorted(found, key=lambda candidate: order.index(candidate.rows[0]))

    def _gain(self, candidates: Sequence[Candidate]) -> tuple[int, int]:
        """Features that need not be gathered, and weights."""
        return (
            sum(self.outputs[name] for candidate in candidates for name in candidate.columns),
            sum(self.sizes[name] for candidate in candidates for name in candidate.layers),
        )

    def _in_turn(
        self, rows: Sequence[str], tp: int, taken: Collection[str], reasons: dict[str, str]
    ) -> list[Candidate]:
        """Each row takes what is left of the layers that it is made of."""
        taken, found = set(taken), list[Candidate]()
        for name in rows:
            candidate = self.reached[name].candidate(name, tp, taken, reasons)
            if candidate is not None:
                others = (other for other in rows if other not in taken and other not in (name, *candidate.columns))
                candidate.rows += [other for other in others if self.reached[other].takes(candidate)]
                found.append(candidate)
                taken.update(candidate.layers)
        return found


def probe(twin: nn.Module, call: Call, tp: int, apart: StatisticsApart | None = None) -> Influence:
    """Probe a thin copy of a block.

    Args:
        twin: from `thin_copy`.
        call: what a step calls it with.
        tp: number of tensor ranks.
        apart: leaves aside what couples features. Then only layers that don't widen are rows: what goes into a norm is
            gathered for it, and after that the outputs of a wide layer are better gathered than summed.
    """
    layers = {name: child for name, child in twin.named_modules() if isinstance(child, ThinLinear)}
    rows = [name for name, layer in layers.items() if layer.in_features >= tp]
    if apart is not None:
        rows = [name for name in rows if layers[name].in_features >= layers[name].out_features]
    sums: dict[str, _Row] = {}
    outputs: dict[str, int] = {}
    for seed in range(_ROUNDS[1]):
        if seed >= _ROUNDS[0] and not any(row.has_gaps for row in sums.values()):
            break
        hopeful = [name for name in rows if name not in sums or sums[name].divides]
        outputs, found = _probe(twin, layers, hopeful if seed else rows, call, tp, seed, apart)
        for name, row in found.items():
            if name in sums:
                sums[name].add(row)
            else:
                sums[name] = row
    return Influence({name: x.in_features * x.out_features for name, x in layers.items()}, outputs, sums)


@dataclass
class _Row:
    """Reached features of the layers before a row, for each way of dealing out its input."""

    features: int
    reached: dict[int, dict[str, list[Tensor]]]
    """unit -> column -> for each rank a mask over the column's features."""

    @property
    def has_gaps(self) -> bool:
        """Whether some feature of a column was reached from nowhere."""
        return any(
            not bool(torch.stack(masks).any(0).all()) for columns in self.reached.values() for masks in columns.values()
        )

    @property
    def divides(self) -> bool:
        """Whether some way of dealing out leaves a rank's share of some column out."""
        held = [masks for columns in self.reached.values() for masks in columns.values()]
        return not all(bool(mask.all()) for masks in held for mask in masks)

    def add(self, other: _Row) -> None:
        for unit, columns in other.reached.items():
            for name, masks in columns.items():
                if name in self.reached[unit]:
                    masks = [a | b for a, b in zip(self.reached[unit][name], masks, strict=True)]
                self.reached[unit][name] = masks

    def takes(self, candidate: Candidate) -> bool:
        """Whether this row's input is made of the same features."""
        reached = self.reached.get(candidate.unit, {})
        return all(
            name in reached and tuple(map(_ranges, reached[name])) == by_rank
            for name, by_rank in candidate.columns.items()
        )

    def candidate(self, name: str, tp: int, taken: set[str], reasons: dict[str, str]) -> Candidate | None:
        """The way of dealing out this row's input that repeats the fewest features on several ranks."""
        if name in taken:
            return None
        found = []
        for unit, columns in self.reached.items():
            candidate = Candidate([name], deal(self.features, tp, unit), unit)
            for column, masks in columns.items():
                if column not in taken and not all(bool(mask.all()) for mask in masks):
                    _add_column(candidate, column, masks)
            if any(copies < 2 for copies in candidate.copies.values()):
                found.append(candidate)
        if self.reached and not found:
            reasons[name] = "no way of dealing out its input leaves each rank features of its own"
        return min(found, key=lambda candidate: sum(candidate.copies.values()), default=None)


def _add_column(found: Candidate, column: str, masks: list[Tensor]) -> None:
    count = torch.stack([mask.int() for mask in masks]).sum(0)
    if bool((count == 0).any()) or any(not bool(mask.any()) for mask in masks):
        return
    found.columns[column] = tuple(_ranges(mask) for mask in masks)
    found.copies[column] = float(count.double().mean())


def _probe(
    twin: nn.Module,
    layers: dict[str, ThinLinear],
    rows: list[str],
    call: Call,
    tp: int,
    seed: int,
    apart: StatisticsApart | None,
) -> tuple[dict[str, int], dict[str, _Row]]:
    """How many features each layer put out, and what the rows' inputs are made of."""
    call = concrete_call(call, seed // 2, noise=seed // 2)
    signs = torch.Generator().manual_seed(seed)
    for layer in layers.values():
        layer.record = []
        if seed:
            chance = torch.rand(layer.out_features, generator=signs).round()
            layer.turn(torch.full_like(chance, -1.0) if seed % 2 else 1 - 2 * chance)
    try:
        with torch.enable_grad(), exact(), apart or contextlib.nullcontext():
            twin(*call.args, **call.kwargs)
        made = {name: sum(y.numel() for _, y in layer.record or ()) for name, layer in layers.items()}
        outputs = {name: [y for _, y in layer.record or () if y.requires_grad] for name, layer in layers.items()}
        inputs = {name: [x for x, _ in layer.record or ()] for name, layer in layers.items()}
    finally:
        for layer in layers.values():
            layer.record = None
    found = {}
    for name in rows:
        if len(inputs[name]) == 1 and inputs[name][0].requires_grad:
            others = [(other, y) for other, ys in outputs.items() if other != name for y in ys]
            if not others:
                continue
            reached = dict(_reach(inputs[name][0], others, tp, twin))
            if any(reached.values()):
                found[name] = _Row(layers[name].in_features, reached)
    return made, found


def _reach(
    x: Tensor, others: list[tuple[str, Tensor]], tp: int, twin: nn.Module
) -> Iterator[tuple[int, dict[str, list[Tensor]]]]:
    for unit in _units(x.shape[-1], tp, twin):
        masks: dict[str, list[Tensor]] = {}
        for rank, ranges in enumerate(deal(x.shape[-1], tp, unit)):
            cotangent = torch.zeros_like(x)
            for start, stop in ranges:
                cotangent[..., start:stop] = torch.randn(*x.shape[:-1], stop - start, dtype=x.dtype) + 2
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                x, [y for _, y in others], cotangent, retain_graph=True, allow_unused=True
            )
            for (name, y), grad in zip(others, grads, strict=True):
                if grad is None:
                    continue
                mask = grad.reshape(-1, y.shape[-1]).abs().amax(0) > 0
                held = masks.setdefault(name, [torch.zeros_like(mask) for _ in range(tp)])
                held[rank] = held[rank] | mask
        yield unit, {name: held for name, held in masks.items() if any(bool(mask.any()) for mask in held)}


def _units(features: int, tp: int, twin: nn.Module) -> list[int]:
    """Sizes of heads to try: equal shares first, then numbers that the modules themselves hold."""
    held = {value for child in twin.modules() for value in vars(child).values() if type(value) is int}
    sizes = {n for value in held for n in (value, features // value if value and features % value == 0 else 0)}
    possible = sorted(n for n in sizes if 1 < n < features and features % n == 0 and features // n >= tp)
    return [1, *(n for n in possible if (features // n) % tp)][:8]


def deal(features: int, tp: int, unit: int) -> tuple[Ranges, ...]:
    """Features in units, dealt to the ranks."""
    pieces = split_evenly(features // unit, tp)
    return tuple(((start * unit, stop * unit),) if stop > start else () for start, stop in pieces)


def _ranges(mask: Tensor) -> Ranges:
    return merge([(i, i + 1) for i in torch.nonzero(mask).flatten().tolist()])
