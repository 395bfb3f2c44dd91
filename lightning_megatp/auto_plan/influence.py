"""Which layers belong together, and which of their features: read off gradients.

A cotangent on one rank's share of a layer's input reaches, in the layers before it, exactly the features that this
share is made of. If they are other features for every rank, the layer can be split by its input (a row), and those
before it by these features (columns), whatever the code in between is called and however heads are packed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.apart import StatisticsApart
from lightning_megatp.auto_plan.blocks import Call
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.thin import ThinLinear, concrete_call
from lightning_megatp.plan.ranges import Ranges, merge, shard_ranges

_ROUNDS = (3, 10)
"""Least and most probes, with other values: a dead unit's gradient is zero by chance. Every second one repeats the last
with the layers' outputs negated: a unit that no token passes is passed by all of them. Where one layer reads what
another makes, both signs cancel; so in the other probes some features are negated, by chance."""

_MUCH = 4
"""Rows that are so many times larger than others come first: an adapter stands before the layer that its features are
for. Otherwise the first in the block do."""

_MOST_DIVISIONS = 8
"""Divisions of a row's input in two parts that are tried, at most."""

_MIXED = "its features mix with others before a layer could take them"


@dataclass(frozen=True)
class Dealing:
    """A way of dealing out the input features of a row."""

    parts: tuple[int, ...]
    """Each is dealt out by itself: what attention and an MLP return, put together for one layer behind both."""
    unit: int = 1
    """Features that stay together: the size of a head, or 1."""

    def by_rank(self, tp: int) -> tuple[Ranges, ...]:
        """Each rank's features."""
        return shard_ranges(sum(self.parts), tp, self.parts, self.unit)


@dataclass
class Candidate:
    """Row layers whose inputs are dealt out alike, with the column layers that feed them."""

    rows: list[str]
    """The largest first."""
    dealing: Dealing
    columns: dict[str, tuple[Ranges, ...]] = field(default_factory=dict)
    shares: dict[str, list[Fraction]] = field(default_factory=dict)
    """Column -> each rank's share of its features: 1 in all, or more for key-value heads that ranks share."""
    smaller: Candidate | None = None
    """Without rows that bring columns of their own, for where they don't hold together."""

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
        """The candidates that spare most messages together, in the order in which the block has their rows: what
        columns put out stays where it is, while layers by themselves are gathered, and rows are summed. Of equal ones,
        those that hold most weights.

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
            candidate = self._best(name, tp, taken, reasons)
            if candidate is not None:
                candidate = self._joined(candidate, rows, taken)
                found.append(candidate)
                taken.update(candidate.layers)
        return found

    def _best(self, name: str, tp: int, taken: Collection[str], reasons: dict[str, str]) -> Candidate | None:
        """The way of dealing out a row's input by which most features of columns are split, and fewest are on several
        ranks; of equal ones, the most even."""
        if name in taken:
            return None
        reached = self.reached[name].reached
        candidates = [_candidate(name, dealing, columns, taken) for dealing, columns in reached.items()]
        found = [candidate for candidate in candidates if any(sum(own) < 2 for own in candidate.shares.values())]
        if reached and not found:
            reasons[name] = "no way of dealing out its input leaves each rank features of its own"
        return max(found, key=self._divided, default=None)

    def _divided(self, candidate: Candidate) -> tuple[Fraction, Fraction]:
        made = [[self.outputs[name] * share for share in own] for name, own in candidate.shares.items()]
        by_rank = [sum(own, Fraction()) for own in zip(*made, strict=True)]
        features = sum(self.outputs[name] for name in candidate.shares)
        return 2 * features - sum(by_rank, Fraction()), -max(by_rank)

    def _joined(self, candidate: Candidate, rows: Sequence[str], taken: Collection[str]) -> Candidate:
        """With the other rows that take what its columns make: all of it, or some, as the output layers of two streams
        of tokens that attend to each other do; those bring columns along."""
        others = [name for name in rows if name not in taken]
        added = True
        while added:
            added = False
            for name in others:
                if name in candidate.layers:
                    continue
                other = self.reached[name].beside(name, candidate, taken)
                if other is None:
                    continue
                added, rows_too, new = True, [*candidate.rows, name], other.columns.keys() - candidate.columns.keys()
                candidate = replace(
                    candidate,
                    rows=rows_too,
                    columns=candidate.columns | other.columns,
                    shares=candidate.shares | other.shares,
                    smaller=candidate if new and candidate.smaller is None else candidate.smaller,
                )
        return candidate


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
    numbers = _numbers(twin)  # before a forward counts something on
    for seed in range(_ROUNDS[1]):
        if seed >= _ROUNDS[0] and not any(row.has_gaps for row in sums.values()):
            break
        hopeful = [name for name in rows if name not in sums or sums[name].divides]
        outputs, found = _probe(twin, layers, hopeful if seed else rows, call, tp, seed, apart, numbers)
        for name, row in found.items():
            if name in sums:
                sums[name].add(row)
            else:
                sums[name] = row
    return Influence({name: x.in_features * x.out_features for name, x in layers.items()}, outputs, sums)


@dataclass
class _Row:
    """Reached features of the layers before a row, for each way of dealing out its input."""

    reached: dict[Dealing, dict[str, list[Tensor]]]
    """column -> for each rank a mask over the column's features."""

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
        for dealing, columns in other.reached.items():
            for name, masks in columns.items():
                if name in self.reached[dealing]:
                    masks = [a | b for a, b in zip(self.reached[dealing][name], masks, strict=True)]
                self.reached[dealing][name] = masks

    def beside(self, name: str, candidate: Candidate, taken: Collection[str]) -> Candidate | None:
        """This row as one more of a candidate's, if it takes features of the same columns, dealt out alike."""
        own = _candidate(name, candidate.dealing, self.reached.get(candidate.dealing, {}), taken)
        shared = candidate.columns.keys() & own.columns.keys()
        alike = all(own.columns[column] == candidate.columns[column] for column in shared)
        return own if shared and alike and not set(candidate.rows) & own.columns.keys() else None


def _candidate(name: str, dealing: Dealing, reached: dict[str, list[Tensor]], taken: Collection[str]) -> Candidate:
    found = Candidate([name], dealing)
    for column, masks in reached.items():
        if column not in taken and not all(bool(mask.all()) for mask in masks):
            _add_column(found, column, masks)
    return found


def _add_column(found: Candidate, column: str, masks: list[Tensor]) -> None:
    count = torch.stack([mask.int() for mask in masks]).sum(0)
    if bool((count == 0).any()) or any(not bool(mask.any()) for mask in masks):
        return
    found.columns[column] = tuple(_ranges(mask) for mask in masks)
    found.shares[column] = [Fraction(int(mask.sum()), len(mask)) for mask in masks]


def _probe(
    twin: nn.Module,
    layers: dict[str, ThinLinear],
    rows: list[str],
    call: Call,
    tp: int,
    seed: int,
    apart: StatisticsApart | None,
    numbers: Collection[int],
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
        if inputs[name] and all(x.requires_grad for x in inputs[name]):
            others = [(other, y) for other, ys in outputs.items() if other != name for y in ys if y.numel()]
            if not others:
                continue
            reached = dict(_reach(layers[name], inputs[name], others, tp, layers.values(), numbers))
            if any(reached.values()):
                found[name] = _Row(reached)
    return made, found


def _reach(
    row: ThinLinear,
    inputs: list[Tensor],
    others: list[tuple[str, Tensor]],
    tp: int,
    layers: Collection[ThinLinear],
    numbers: Collection[int],
) -> Iterator[tuple[Dealing, dict[str, list[Tensor]]]]:
    """Which features of other layers' outputs each rank's part of a row layer's inputs is made of.

    Args:
        row: a layer.
        inputs: of all its calls.
        layers: of the block.
        numbers: see `_numbers`.
    """
    for dealing in _dealings(inputs[0].shape[-1], tp, layers, numbers):
        if row.matrix_dims.split(1, dealing.by_rank(tp), row.shape) is None:
            continue
        masks: dict[str, list[Tensor]] = {}
        for rank, ranges in enumerate(dealing.by_rank(tp)):
            cotangents = [torch.zeros_like(x) for x in inputs]
            for x in cotangents:
                for start, stop in ranges:
                    x[..., start:stop] = torch.randn(*x.shape[:-1], stop - start, dtype=x.dtype) + 2
            grads: Sequence[Tensor | None] = torch.autograd.grad(
                inputs, [y for _, y in others], cotangents, retain_graph=True, allow_unused=True
            )
            for (name, y), grad in zip(others, grads, strict=True):
                if grad is None:
                    continue
                mask = grad.reshape(-1, y.shape[-1]).abs().amax(0) > 0
                held = masks.setdefault(name, [torch.zeros_like(mask) for _ in range(tp)])
                held[rank] = held[rank] | mask
        yield dealing, {name: held for name, held in masks.items() if any(bool(mask.any()) for mask in held)}


def _numbers(twin: nn.Module) -> set[int]:
    """What modules hold as numbers, such as a count of heads."""
    return {value for child in twin.modules() for value in vars(child).values() if type(value) is int}


def _dealings(features: int, tp: int, layers: Collection[ThinLinear], numbers: Collection[int]) -> Iterator[Dealing]:
    """As a whole, and, where no other layer has so many features, in two parts of sizes that layers have."""
    held = {*numbers}.union(*(layer.units for layer in layers))
    readers = sum(layer.in_features == features for layer in layers)
    divisions: list[tuple[int, ...]] = [(features,)]
    if readers == 1 and all(layer.out_features % features for layer in layers):
        sizes = {size for layer in layers for size in (layer.in_features, layer.out_features)}
        possible = {part for size in sizes for part in (size, features - size) if tp <= part <= features - tp}
        divisions += [(size, features - size) for size in sorted(possible)[:_MOST_DIVISIONS]]
    for parts in divisions:
        yield Dealing(parts)
        yield from (Dealing(parts, unit) for unit in _units(parts, tp, held))


def _units(parts: Sequence[int], tp: int, held: Collection[int]) -> list[int]:
    """Sizes of heads to try besides equal shares: from numbers that the modules themselves hold."""
    sizes = {
        n for value in held for part in parts for n in (value, part // value if value and part % value == 0 else 0)
    }
    possible = sorted(n for n in sizes if n > 1 and all(part % n == 0 and part // n >= tp for part in parts))
    return [n for n in possible if any((part // n) % tp for part in parts)][:7]


def _ranges(mask: Tensor) -> Ranges:
    return merge([(i, i + 1) for i in torch.nonzero(mask).flatten().tolist()])
