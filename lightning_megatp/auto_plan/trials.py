"""Trials: which parts of a block, split, compute the same as the whole."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_megatp.auto_plan.apart import StatisticsApart
from lightning_megatp.auto_plan.blocks import Call
from lightning_megatp.auto_plan.compare import Outcome, Reference
from lightning_megatp.auto_plan.influence import Candidate, Influence, probe
from lightning_megatp.auto_plan.lookups import HOW
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.auto_plan.simulate import BlockPlan
from lightning_megatp.auto_plan.thin import ThinLinear, block_copy
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import AttributePlan
from lightning_megatp.plan.ranges import length, shard_ranges
from lightning_megatp.plan.styles import Style
from lightning_megatp.tensor.functions import couples

_MOST_TRIALS = 40
"""Ways of dividing attributes that are tried for one region."""
SMALL = 0.02
"""Layers with a smaller share of a block's linear weights aren't worth a collective of their own."""
_NARROW = 16
"""Nor are those with so many times fewer features inside than a value that is sent for them has: an adapter around a
layer that stays whole."""


class Trials:
    """Plans that are tried on a thin copy of a block; what is proven to hold is added to the block's.

    Args:
        twin: the copy.
        references: what it computes, on one device.
        tp: number of tensor ranks.
        result: what is found is put there.
        global_sizes: whether layers may hand out shards that report whole sizes.
        undivided: names of attributes that stay those of the whole.
        outputs: number of features that each layer puts out in a call, of all tokens.
    """

    def __init__(
        self,
        twin: nn.Module,
        references: Sequence[Reference],
        tp: int,
        result: BlockResult,
        global_sizes: bool,
        undivided: Collection[str],
        outputs: Mapping[str, int],
    ) -> None:
        self.twin, self.references, self.tp, self.result = twin, references, tp, result
        self.global_sizes, self.undivided = global_sizes, undivided
        self.layers = {name: child for name, child in twin.named_modules() if isinstance(child, ThinLinear)}
        self.called_on = {name: outputs[name] // layer.out_features for name, layer in self.layers.items()}
        """How many tokens or samples each layer is called on."""
        self.functions = set[str]().union(*(reference.functions for reference in references))
        """Layers that the block does not call, by whose weights it calls `F.linear`."""
        self._tried: deque[tuple[BlockPlan, Outcome]] = deque(maxlen=3)
        """The plans that were tried last, and what came of them."""

    def prove(self, plan: BlockPlan) -> Outcome:
        """The first outcome that does not hold, or the last one."""
        for tried, outcome in self._tried:
            if tried == plan:
                return outcome
        outcome, summed, received, gathers = Outcome("nothing was compared"), 0, 0, Counter[str]()
        for reference in self.references:
            outcome = reference.compare(plan, self.tp)
            summed += outcome.summed
            received += outcome.received
            gathers.update(outcome.gathers)
            if not outcome.holds:
                break
        outcome.summed, outcome.received, outcome.gathers = summed, received, dict(gathers)
        if outcome.holds and (unfelt := self._unfelt(plan)):
            outcome = Outcome(f"`{unfelt[0]}` makes no difference to what is computed here, so nothing is proven")
        self._tried.append((plan, outcome))
        return outcome

    def prove_together(self) -> Outcome:
        """The outcome of all that was accepted, together."""
        plan = self.result.plan
        outcome = self.prove(plan)
        return self.track(plan) if not outcome.holds and self.global_sizes and not plan.attributes else outcome

    def _unfelt(self, plan: BlockPlan) -> list[str]:
        """Layers inside of regions, or of what lies around them, that run, and on which no reference depends, though by
        other values it would."""
        regions = {layer.region for layer in plan.layers.values() if layer.region is not None}
        return [n for n in self._unfelt_layers if any(f"{n}.".startswith(f"{r}.".lstrip(".")) for r in regions)]

    @functools.cached_property
    def _unfelt_layers(self) -> list[str]:
        answers = {name: {reference.feels(name) for reference in self.references} for name in self.layers}
        unfelt = [name for name, felt in answers.items() if False in felt and True not in felt]
        return [name for name in unfelt if any(reference.uses(name) for reference in self.references)]

    def accept_trusted(self, plan: BlockPlan) -> bool:
        """Try a model's own plan. With layers that it does not call, it would have to be of global sizes."""
        named = self.functions.intersection(plan.layers)
        return self.accept(_tracked(plan) if named and self.global_sizes else plan, "as the model's own plan says")

    def accept(self, plan: BlockPlan, how: str) -> bool:
        """Add a plan to the block's if it is proven to hold."""
        outcome = self.prove(plan)
        if outcome.holds:
            self.result.plan = self.result.plan.merged(plan)
            self.result.how.update(dict.fromkeys(plan.layers, how))
        return outcome.holds

    def regions(self, influence: Influence) -> None:
        """Try all candidates, then what others there are without the rows of those that don't hold: a projection that
        is added to what a large layer reads may belong to nothing, and that layer to the one behind it."""
        refused = set[str]()
        while candidates := influence.candidates(self.tp, self.result.plan.layers, refused):
            for candidate in candidates:
                if not self.region(candidate) and candidate.smaller is not None:
                    self.region(candidate.smaller)
            refused.update(row for candidate in candidates for row in candidate.rows)
        for name, why in influence.reasons.items():
            self.result.whole.setdefault(name, why)

    def regions_across_norms(self, call: Call) -> None:
        """Try for the rest what would be candidates if features were not coupled by a norm between a pair of layers,
        which can gather them."""
        if not self.global_sizes or self.layers.keys() <= self.result.plan.layers.keys():
            return
        apart = StatisticsApart()
        influence = probe(block_copy(self.twin), call, self.tp, apart)
        if apart.met:
            self.extend_regions(influence)
            self.regions(influence)

    def extend_regions(self, influence: Influence) -> None:
        """Take layers into regions that were found without them: queries and keys that a norm of all heads couples,
        beside values, which it does not."""
        for candidate in influence.candidates(self.tp):
            before, plan = self.result.plan, _tracked(_region_plan(candidate, self.tp))
            held, added = before.layers.keys() & plan.layers.keys(), plan.layers.keys() - before.layers.keys()
            if not held or not added or not self._is_split_along_dims(plan):
                continue
            if any(before.layers[n].by_rank != plan.layers[n].by_rank for n in held):
                continue
            extended = before.merged(plan)
            outcome, apart = self.prove(extended), self.prove(before.merged(self._one_by_one(added)))
            if outcome.holds and apart.holds and outcome.received <= apart.received:
                self.result.plan = extended
                self.result.how.update(dict.fromkeys(plan.layers, "with global sizes"))

    def region(self, candidate: Candidate) -> bool:
        """Try a region as it is, then with attributes divided, then with global sizes.

        Returns:
            Whether one holds.
        """
        plan = _region_plan(candidate, self.tp)
        row = self.layers[candidate.rows[0]]
        if row.in_features * _NARROW <= row.out_features:
            self.result.whole.update(dict.fromkeys(plan.layers, "it is too narrow for a collective of its own"))
            return False
        if not self._is_split_along_dims(plan):
            self.result.whole.update(dict.fromkeys(plan.layers, "its parts would not lie along one dim of the weight"))
            return False
        if self._with_own_sizes(candidate, plan):
            return True
        tracked = _tracked(plan)
        last = self.prove(tracked)
        gathers = ", ".join(last.gathers)
        if not last.holds:
            why = f"split, the block does not compute the same: {last.error}"
        elif not self.global_sizes:
            why = "split, it counts whole features, which compiled code can't do with parts of them"
        elif gathers and (apart := self.prove(self._one_by_one(plan.layers))).holds and last.received > apart.received:
            why = f"together they send more than one by one: all features would be gathered for {gathers}"
        else:
            return self.accept(tracked, "with global sizes" + (f", gathered for {gathers}" if gathers else ""))
        self.result.whole.update(dict.fromkeys(plan.layers, why))
        return False

    def _is_split_along_dims(self, plan: BlockPlan) -> bool:
        """Whether each layer's features are those of some indices of one dim of its weight: of whole heads."""
        return all(
            self.layers[name].matrix_dims.split(layer.style.style == "row", layer.by_rank, self.layers[name].shape)
            for name, layer in plan.layers.items()
        )

    def _with_own_sizes(self, candidate: Candidate, plan: BlockPlan) -> bool:
        """Try a region whose code sees the sizes of this rank's part. Not one with layers that are not called: of such
        a weight, should a step keep it whole, nobody would take the part that fits."""
        if self.functions.intersection(plan.layers):
            return False
        first = self.prove(plan)
        if first.holds and not self._couples(plan, first):
            return self.accept(plan, "as it is")
        for attributes in () if first.misplaced or first.holds else self._attributes(candidate):
            divided = BlockPlan(plan.layers, list(attributes))
            if (found := self.prove(divided)).holds and not self._couples(plan, found):
                names = ", ".join(attribute.name for attribute in attributes)
                return self.accept(divided, f"with {names} divided")
        return False

    def _one_by_one(self, names: Collection[str]) -> BlockPlan:
        """These layers gathered, those that are worth it, instead of being a region."""
        return BlockPlan({name: self._gathered(name) for name in self._worth_a_gather if name in names})

    def _couples(self, plan: BlockPlan, outcome: Outcome) -> bool:
        """Whether something in a region looks at features of several ranks (a norm, a mean), though by these numbers
        parts come out the same: a limit that is not reached, a mask that hides it. With global sizes it is seen. What a
        gather of unknown purpose is for, a function of the user's own or a product, is left to the numbers."""
        if not self.global_sizes:
            return False
        tracked = self.prove(_tracked(plan))
        return tracked.holds and (tracked.summed > outcome.summed or any(map(couples, tracked.gathers)))

    def track(self, plan: BlockPlan) -> Outcome:
        """What holds for each region, but not for all together, as in regions inside of others: with global sizes."""
        tracked = _tracked(plan)
        outcome = self.prove(tracked)
        if outcome.holds:
            changed = [name for name, layer in tracked.layers.items() if layer != plan.layers[name]]
            self.result.plan = tracked
            self.result.how.update(dict.fromkeys(changed, "with global sizes"))
        return outcome

    def gather_the_rest(self) -> None:
        """Layers in no region: outputs split and gathered, which is right wherever they are."""
        rest = [name for name in self._worth_a_gather if name not in self.result.plan.layers]
        self._accept_most(
            {name: (self._gathered(name), f"gathered: {self.result.whole.get(name, '')}") for name in rest}
        )

    @functools.cached_property
    def _worth_a_gather(self) -> list[str]:
        """Layers that are neither small nor narrow, and have features for each rank. What few rows go through, those of
        a condition, sends little, however narrow it is."""
        sizes = {name: layer.in_features * layer.out_features for name, layer in self.layers.items()}
        least, most = SMALL * sum(sizes.values()), max(self.called_on.values(), default=0)
        found = []
        for name, layer in self.layers.items():
            fewer, more = sorted((layer.in_features, layer.out_features))
            narrow = fewer * _NARROW * most <= more * (self.called_on[name] or most)
            if sizes[name] >= least and not narrow and layer.out_features // layer.units[0] >= self.tp:
                found.append(name)
        return found

    def _gathered(self, name: str) -> LayerPlan:
        return gathered(name, self.layers[name].out_features, self.tp, self.layers[name].units[0])

    def convolutions(self, layers: dict[str, LayerPlan]) -> None:
        """Convolutions by their output channels, gathered: where values are whole."""
        self._accept_most({name: (layer, "gathered: a convolution") for name, layer in layers.items()})

    def tables(self, layers: dict[str, LayerPlan]) -> None:
        """Embeddings by their rows, bags of them by their columns, where values are whole."""
        self._accept_most({name: (layer, HOW[layer.style.style]) for name, layer in layers.items()})

    def _accept_most(self, layers: dict[str, tuple[LayerPlan, str]]) -> None:
        """Add layers, and how they are split, that each stand alone: all of them, or those that are proven to hold."""
        plan = BlockPlan({name: layer for name, (layer, _) in layers.items()})
        if layers and self.accept(plan, ""):
            self.result.how.update({name: how for name, (_, how) in layers.items()})
        elif len(layers) > 1:
            for name, (layer, how) in layers.items():
                self.accept(BlockPlan({name: layer}), how)

    def _attributes(self, candidate: Candidate) -> Iterator[tuple[AttributePlan, ...]]:
        shares = self._shares(candidate)
        above = {""} | {
            ".".join(name.split(".")[:i])
            for name in (*candidate.rows, *candidate.columns)
            for i in range(1, name.count(".") + 1)
        }
        possible = [
            AttributePlan(module, key, share)
            for module in sorted(above, key=len, reverse=True)
            for key, value in vars(self.twin.get_submodule(module)).items()
            if type(value) is int and value > 1 and (share := shares.get(value)) is not None
        ]
        found = [attribute for attribute in possible if attribute.name in self._read]
        combinations = itertools.chain.from_iterable(itertools.combinations(found, n) for n in range(1, len(found) + 1))
        return itertools.islice(combinations, _MOST_TRIALS)

    @functools.cached_property
    def _read(self) -> set[str]:
        """The numbers that the block's code reads, but for those that stay those of the whole."""
        holders = ((name, child) for name, child in self.twin.named_modules() if not isinstance(child, ThinLinear))
        held = {
            f"{name}.{key}".lstrip(".") for name, child in holders for key, x in vars(child).items() if type(x) is int
        }
        return set[str]().union(*(reference.reads(held - set(self.undivided)) for reference in self.references))

    def _shares(self, candidate: Candidate) -> dict[int, tuple[int, ...]]:
        """Numbers of features, and of units of them, -> each rank's."""
        shares: dict[int, tuple[int, ...]] = {}
        dealt = [(self.layers[candidate.rows[0]].in_features, candidate.dealing.by_rank(self.tp))]
        dealt += [(self.layers[name].out_features, by_rank) for name, by_rank in candidate.columns.items()]
        for features, by_rank in dealt:
            own = [length(ranges) for ranges in by_rank]
            for size in range(1, features // 2 + 1):
                if features % size == 0 and all(n % size == 0 for n in own):
                    shares.setdefault(features // size, tuple(n // size for n in own))
        return shares


def gathered(name: str, outputs: int, tp: int, unit: int = 1) -> LayerPlan:
    """A layer that is split by its outputs, which are gathered.

    Args:
        unit: outputs that stay together.
    """
    return LayerPlan(name, Style(name, "column_gather"), shard_ranges(outputs, tp, 1, unit), unit)


def _tracked(plan: BlockPlan) -> BlockPlan:
    """With global sizes in all regions."""
    regions = {name: layer for name, layer in plan.layers.items() if layer.style.style in ("column", "row")}
    tracked = {name: replace(layer, global_sizes=True) for name, layer in regions.items()}
    return BlockPlan({**plan.layers, **tracked}, plan.attributes)


def _region_plan(candidate: Candidate, tp: int) -> BlockPlan:
    region, by_rank = _common(candidate.layers), candidate.dealing.by_rank(tp)
    columns = {
        name: LayerPlan(name, Style(name, "column"), by_rank, region=region)
        for name, by_rank in candidate.columns.items()
    }
    parts, unit = candidate.dealing.parts, candidate.dealing.unit
    rows = {
        name: LayerPlan(name, Style(name, "row", parts if len(parts) > 1 else 1), by_rank, unit, region=region)
        for name in candidate.rows
    }
    return BlockPlan(columns | rows)


def _common(names: Sequence[str]) -> str:
    """The innermost module that holds all of these."""
    parts = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    return ".".join(same[0] for same in shared)
