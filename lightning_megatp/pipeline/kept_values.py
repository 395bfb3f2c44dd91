"""Python values that units set on themselves in their forward, a count or a range, for the other stages: hooks read
them there, and the next step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.pipeline.carried import counters, warn_of_counters
from lightning_megatp.pipeline.slicing.leftovers import Path, PlainValues


class KeptValues:
    """Tells them after each batch, once batches 1, 2, 4, 8, ... of a kind have set some.

    Args:
        mesh: who is where.
        modules: the parts of all units, by name, that are in units of one stage alone.
        own: the names of those of this rank.
    """

    def __init__(self, mesh: ParallelMesh, modules: Mapping[str, nn.Module], own: Collection[str]) -> None:
        self._mesh, self._modules = mesh, modules
        self._own = {name: modules[name] for name in own}
        self._telling: set[str] = set()
        """The modules of all stages that set some."""
        self._batches: Counter[str] = Counter()
        self._looks = False
        self._set: dict[Path, bytes] = {}
        self._counters: list[str] = []
        self._microbatches = 1

    @contextlib.contextmanager
    def batch(self, kind: str, microbatches: Sequence[Any]) -> Iterator[None]:
        """Around the forwards and backwards of a batch: train, validate, test or predict."""
        self._batches[kind] += 1
        n = self._batches[kind]
        self._looks = n & (n - 1) == 0
        modules = self._own if self._looks else {name: self._own[name] for name in self._telling & self._own.keys()}
        before = PlainValues(modules) if modules else None
        yield
        if before is None:
            return
        now = PlainValues(modules)
        own = ((path, value) for path, value in now.changes(before).items() if len(path) == 2)  # objects may be shared
        self._set.update(own)
        self._microbatches = len(microbatches)
        if n == 1 and kind == "train" and len(microbatches) > 1:
            self._counters = counters(now, before, microbatches)

    def share(self) -> None:
        """After a batch: let every stage have what others have set.

        Communication: one object all-gather over pp, if there may be something.
        """
        if not (self._looks or self._telling):
            return
        told = self._mesh.exchange((self._set, self._counters), "pp")
        self._set, self._counters = {}, []
        warn_of_counters([name for _, names in told for name in names], self._microbatches)
        changes = {path: value for each, _ in told for path, value in each.items()}
        self._telling.update(name for name, _ in changes)
        others = {name: self._modules[name] for name, _ in changes if name not in self._own}
        PlainValues(others).adopt({path: value for path, value in changes.items() if path[0] in others})


def parts_of_one_stage(module: nn.Module, stage_of_unit: Mapping[str, int]) -> dict[str, int]:
    """The names of the modules in units, each of which only one stage has, with that stage."""
    found: dict[int, tuple[str, set[int]]] = {}
    for unit, stage in stage_of_unit.items():
        for name, part in module.get_submodule(unit).named_modules():
            found.setdefault(id(part), (f"{unit}.{name}".rstrip("."), set()))[1].add(stage)
    return {name: next(iter(stages)) for name, stages in found.values() if len(stages) == 1}
