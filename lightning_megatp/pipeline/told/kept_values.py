"""What units set on themselves in their forward, for the other stages: numbers and the like (a count, a range), and
tensors that a hook names (a perplexity, attention weights). Hooks read them there, and the next step."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.carried import Twice, counters, warn_of_counters
from lightning_megatp.pipeline.slicing.state.kept import set_anew_by_forward, stored_by_forward
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.snapshots.leftovers import Path, PlainValues
from lightning_megatp.steps import StepKind


class KeptValues:
    """Tells them after each batch: numbers once batches 1, 2, 4, 8, ... of a kind have set some.

    Args:
        mesh: who is where.
        modules: the parts of all units, by name, that are in units of one stage alone.
        own: the names of those of this rank.
        is_named: whether some hook has to do with attributes of a name.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        modules: Mapping[str, nn.Module],
        own: Collection[str],
        is_named: Callable[[str], bool],
    ) -> None:
        self._mesh, self._modules, self._is_named = mesh, modules, functools.cache(is_named)
        stored = {name: stored_by_forward(module) for name, module in modules.items()}
        named = {attribute: self._is_named(attribute) for attribute in frozenset().union(*stored.values())}
        self._named = {name: [x for x in sorted(of) if named[x]] for name, of in stored.items()}
        """Module -> the attributes that its forward sets and hooks name."""
        anew = {name: set_anew_by_forward(module) for name, module in modules.items() if self._named[name]}
        self._set_anew = {(name, x) for name, of in anew.items() for x in self._named[name] if x in of}
        self._any_named = any(self._named.values())
        self._own = {name: modules[name] for name in own}
        self._telling: set[str] = set()
        """The modules of all stages that set some."""
        self._batches: Counter[str] = Counter()
        self._looks = self._notes = False
        self._set: dict[Path, bytes] = {}
        self._before: dict[Path, Any] = {}
        """What named attributes held before the batch."""
        self._first: dict[Path, Any] = {}
        """What the first microbatch has set there."""
        self._differ: set[Path] = set()
        """Those that another microbatch of the batch has set to something else."""
        self._counters: list[str] = []
        self._counted = Twice()
        self._microbatches = 1

    @contextlib.contextmanager
    def batch(self, kind: StepKind, microbatches: Sequence[Any]) -> Iterator[None]:
        """Around the forwards and backwards of a batch."""
        self._batches[kind] += 1
        n = self._batches[kind]
        self._looks = n & (n - 1) == 0
        self._notes = self._looks and bool(self._set_anew) and len(microbatches) > 1
        self._before = self._named_now() if self._notes else {}
        modules = self._own if self._looks else {name: self._own[name] for name in self._telling & self._own.keys()}
        before = PlainValues(modules, arrays=False) if modules else None
        yield
        self._notes, self._before, self._first = False, {}, {}
        if before is None:
            return
        now = PlainValues(modules, arrays=False)
        own = {path: value for path, value in now.changes(before).items() if len(path) == 2}  # objects may be shared
        self._set.update({path: value for path, value in own.items() if not self._is_of_a_table(*path)})
        self._microbatches = len(microbatches)
        if self._counted.wanted and kind is StepKind.TRAIN and len(microbatches) > 1:
            self._counters = self._counted.of(counters(now, before, microbatches))

    def note(self) -> None:
        """After a stage's forward of a microbatch: see whether hooks will find what is not the whole batch's."""
        if not self._notes:
            return
        for path, x in self._named_now().items():
            if x is self._before.get(path):
                continue
            kept = x.detach() if isinstance(x, Tensor) else x  # not the first microbatch's graph
            if not _is_same(x, self._first.setdefault(path, kept)):
                self._differ.add(path)

    def _named_now(self) -> dict[Path, Any]:
        """What attributes hold that the forward sets anew and hooks name."""
        of = {(name, x): vars(self._own[name]).get(x) for name, x in self._set_anew if name in self._own}
        return {path: x for path, x in of.items() if _is_told(x) or type(x) in (int, float)}

    def _is_of_a_table(self, name: str, attribute: str) -> bool:
        """Whether a value may say what a tensor is of that the same forward keeps (the length of a table of angles),
        and no hook asks for it. The tensor is not told, and without it the value would be wrong."""
        module = self._own[name]
        kept = (vars(module).get(x) for x in stored_by_forward(module))
        return any(isinstance(x, Tensor) for x in tree_leaves([*kept])) and not self._is_named(attribute)

    def share(self) -> None:
        """After a batch: let every stage have what others have set.

        Communication: one object all-gather over pp, if there may be something.
        """
        if not (self._looks or self._telling or self._any_named):
            return
        told = self._mesh.exchange((self._set, self._counters, self._differ, self._tensors()), "pp")
        self._set, self._counters, self._differ = {}, [], set()
        warn_of_counters([name for _, names, *_ in told for name in names], self._microbatches)
        _warn_of_last(sorted(set[Path]().union(*(paths for _, _, paths, _ in told))))
        for name, tensors in ((name, x) for *_, each in told for name, x in each.items() if name not in self._own):
            vars(self._modules[name]).update({key: x.to(self._mesh.device) for key, x in tensors.items()})
        changes = {path: value for each, *_ in told for path, value in each.items()}
        self._telling.update(name for name, _ in changes)
        others = {name: self._modules[name] for name, _ in changes if name not in self._own}
        PlainValues(others).adopt({path: value for path, value in changes.items() if path[0] in others})

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """By module and attribute."""
        found = {name: {key: vars(module).get(key) for key in self._named[name]} for name, module in self._own.items()}
        tensors = {name: {key: x.detach() for key, x in held.items() if _is_told(x)} for name, held in found.items()}
        return {name: held for name, held in tensors.items() if held}


def _is_told(x: Any) -> TypeGuard[Tensor]:
    return type(x) is Tensor and x.layout is torch.strided and not (x.is_meta or is_fake(x))


def _is_same(x: Any, other: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return x.shape == other.shape and bool(torch.equal(x, other))
    return type(x) is type(other) and x == other


def _warn_of_last(paths: Sequence[Path]) -> None:
    for name, attribute in paths[:1]:
        warn_once_per_run(
            f"the forward of each microbatch sets `{name}.{attribute}` anew, and a hook has to do with `{attribute}`:"
            " the hook finds the last microbatch's, where one device has the whole batch's. Let the block add it up and"
            " the hook clear it, log it in the step, or use microbatches=1."
        )
