"""The parity matrix and a pairwise cover of it. Pure: no torch, no package."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

FACTORS: dict[str, Sequence[object]] = {
    "tp": (2, 4, 1),
    "sequence": (True, False),
    "dp": (1, 2),
    "precision": ("64-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed"),
    "accumulate": (1, 2),
    "clip": ("none", "norm", "value"),
    "length": (4, 7, 1),  # 4 is the batch size too: code that takes a dim for another would show
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One parity run."""

    model: str
    tp: int = 2
    sequence: bool = True
    dp: int = 1
    precision: str = "64-true"
    accumulate: int = 1
    clip: str = "none"
    length: int = 4

    def __str__(self) -> str:
        regions = "sequence" if self.sequence else "replicated"
        parts = (self.model, f"tp{self.tp}", f"dp{self.dp}", regions, self.precision, f"accumulate{self.accumulate}")
        return "-".join((*parts, f"clip_{self.clip}", f"length{self.length}"))


FEWER = {**FACTORS, "tp": (2, 1), "precision": ("64-true", "32-true", "bf16-true", "bf16-mixed")}
"""Without 16-mixed, which Lightning runs as bf16-mixed on a CPU, and without tp=4, of which FOUR has a few."""

TYPICAL = ["tied", "grouped", "swiglu_rms"]
"""The models that the fast suite trains with every pair of the other factors."""

FOUR = [
    Case("tied", tp=4, clip="norm", accumulate=2),
    Case("uneven", tp=4, precision="bf16-mixed", length=7),
    Case("grouped", tp=4, sequence=False, length=7),
    Case("grouped_fused", tp=4, precision="32-true"),
    Case("qk_norm", tp=4, precision="64-true", clip="norm"),
    Case("swiglu_rms", tp=4, sequence=False, clip="value", length=1),
    Case("mean_in_region", tp=4, length=1),
]
"""What four tensor ranks may do differently: uneven heads, heads that ranks share, sequences shorter than they are."""


def each_model(models: Sequence[str]) -> Iterator[Case]:
    """Every model in float64, with and without sequence regions, while the other settings take turns."""
    for i, (model, sequence) in enumerate(itertools.product(models, (True, False))):
        accumulate, clip = (1, "none") if model == "manual" else (1 + i // 4 % 2, ("none", "norm", "value")[i // 2 % 3])
        yield Case(model, sequence=sequence, accumulate=accumulate, clip=clip, length=(4, 7, 1)[i % 3])


def every_case(models: Sequence[str], among: dict[str, Sequence[object]] = FACTORS) -> Iterator[Case]:
    """Every combination of the factors that can run."""
    for model, *values in itertools.product(models, *among.values()):
        case = Case(model, **dict(zip(among, values, strict=True)))  # type: ignore[arg-type]
        if _possible(case):
            yield case


def matrix(models: Sequence[str]) -> Iterator[Case]:
    """The cases of `--all-cases`: hours instead of half a day, and nothing lost.

    Every combination in float64, where no mistake hides behind a tolerance; the other precisions in every layout, with
    accumulation, clipping and an odd length. At tp = 1 sequence regions do not exist.
    """
    for case in every_case(models):
        rest = (case.accumulate, case.clip, case.length)
        typical = (1, "none", 7) if case.model == "manual" else (2, "norm", 7)
        if (case.tp > 1 or case.sequence) and (case.precision == "64-true" or rest == typical):
            yield case


def pairwise(models: Sequence[str], seed: int = 2, among: dict[str, Sequence[object]] = FACTORS) -> list[Case]:
    """A small set of cases in which every pair of values of two factors occurs.

    Greedy: build each case around a pair not met yet, choose the other values by how many new pairs they bring, and
        keep the best of a few tries. Source: Cohen et al. 1997, "The AETG system".
    """
    generator = random.Random(seed)
    factors = {"model": list(models), **among}
    names = list(factors)
    wanted = {pair for case in every_case(models, among) for pair in _pairs(case)}
    cases: list[Case] = []
    while wanted:
        ordered = sorted(wanted, key=repr)
        tries = [_grow(generator, names, factors, wanted, generator.choice(ordered)) for _ in range(12)]
        best = max(tries, key=lambda case: len(_pairs(case) & wanted) - _cost(vars(case)))
        wanted -= _pairs(best)
        cases.append(best)
    return cases


def _cost(values: dict[str, object]) -> float:
    """In new pairs: eight processes on few cores are slow, and without tensor parallelism a case says little."""
    costs = {(1, 1): 6.0, (1, 2): 2.0, (2, 2): 3.0, (4, 2): 12.0}
    return costs.get((values.get("tp"), values.get("dp")), 0.0)  # type: ignore[arg-type]


Pair = tuple[tuple[str, object], tuple[str, object]]


def _grow(
    generator: random.Random, names: list[str], factors: dict[str, Sequence[object]], wanted: set[Pair], around: Pair
) -> Case:
    chosen = dict(around)
    for name in sorted((name for name in names if name not in chosen), key=lambda _: generator.random()):

        def gain(value: object, name: str = name) -> float:
            new = sum(_pair((name, value), item) in wanted for item in chosen.items())
            tried = {**chosen, name: value}
            return new - _cost(tried) - 1000 * (not _possible_values(tried)) + generator.random() / 2

        chosen[name] = max(factors[name], key=gain)
    return Case(**chosen)  # type: ignore[arg-type]


def _pair(a: tuple[str, object], b: tuple[str, object]) -> Pair:
    return (a, b) if a[0] < b[0] else (b, a)


def _pairs(case: Case) -> set[Pair]:
    return {_pair(a, b) for a, b in itertools.combinations(vars(case).items(), 2)}


def _possible(case: Case) -> bool:
    return _possible_values(vars(case))


def _possible_values(values: dict[str, object]) -> bool:
    manual = values.get("model") == "manual"
    return not manual or (values.get("clip", "none") == "none" and values.get("accumulate", 1) == 1)
