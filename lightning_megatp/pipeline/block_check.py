"""Blocks that make something else of a sample where others are with it: a statistic of the batch, experts with places
for some of its tokens, samples that are mixed. A pipeline gives them a microbatch, where one device gives the batch.

Nobody looks into blocks, so they are tried. In some batches what a block is given of a microbatch is kept, in two
halves a and b of as many samples, and it is run again on (a, b), on (a, a) and on (b, b). Where each sample is taken by
itself, it makes the same of a beside b and beside a. As shapes are the same, so are kernels and random numbers, and
what comes out is equal to the last digit, or nearly so where rows are sorted, as for experts.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.calls import calls_surrounded
from lightning_megatp.containers import leaves_in, tensors_in, with_tensors
from lightning_megatp.pipeline.ambient import Ambient
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.own_values import BATCH_NORMS
from lightning_megatp.pipeline.seeds import mixed
from lightning_megatp.pipeline.slicing.handed import opened
from lightning_megatp.pipeline.slicing.rows import CallRows, Placed, Rows
from lightning_megatp.random_states import is_random_state, random_state
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import DisableTorchFunction, tree_map
from lightning_megatp.snapshots.snapshot import Snapshot, drawn_by
from lightning_megatp.tensor.functions import operation_name, operation_names
from lightning_megatp.tensor.shards import gathered

Run = Callable[[Callable[[], Any], int], Any]
"""Runs a block, with random numbers from a seed, so that nothing is left of that."""


class Coupling(Enum):
    """What depends on which samples are together."""

    SAMPLES = auto()
    """What a block makes of each."""
    NUMBER = auto()
    """One that it makes of all: of a and b it is not in the middle between those of a alone and of b alone, as sums and
    means over samples are."""


@dataclass
class _Call:
    """What a block was given of a microbatch."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ambient: Ambient
    objects: Snapshot
    """What objects held that it was given (a cache of keys and values)."""

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """A call that is about to be made."""
        with DisableTorchFunction(), torch.no_grad():
            args, kwargs = with_tensors(_kept, args), with_tensors(_kept, kwargs)
        return cls(function, args, kwargs, Ambient.now(), _snapshot(args, kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in(self.args, self.kwargs)

    @property
    def precision(self) -> float:
        """The distance of numbers that autocast computes with."""
        lowered = (dtype for _, enabled, dtype in self.ambient.autocast if enabled)
        return max((torch.finfo(dtype).eps for dtype in lowered), default=0.0)


class BlockCheck:
    """Tries one block of each kind of this rank, in one batch.

    Args:
        module: whose blocks they are.
        units: their names, without what was found to couple samples before.
        rows: of each, where samples lie in its tensors, of the whole batch.
        samples: of the batch.
        of_microbatches: how many each has.
        seed: of the batch.
        turn: how many batches were looked at before: in each it is the next block of a kind's.

    Memory: what a block of each kind is given of one microbatch, or of two of a single sample each.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        rows: Mapping[str, CallRows],
        samples: int,
        of_microbatches: Sequence[int],
        seed: int,
        turn: int,
    ) -> None:
        self._rows, self.samples, self._seed = rows, samples, seed
        kinds: defaultdict[Any, list[str]] = defaultdict(list)
        for name in (name for name in units if name in rows):
            kinds[kind_of(module.get_submodule(name))].append(name)
        tried = (names[turn % len(names)] for names in kinds.values())
        self._units = {name: module.get_submodule(name) for name in tried}
        self.microbatch = of_microbatches[0]
        """Samples of the first one."""
        self._noted = 1 if self.microbatch > 1 else 2
        self._calls: defaultdict[str, dict[int, _Call]] = defaultdict(dict)

    @property
    def tried(self) -> Any:
        """What has to be the same in all copies of the model: which blocks were met, and with how many samples."""
        return sorted(self._calls), self.samples, self.microbatch

    def noting(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """Around a stage's forward of a microbatch."""
        if microbatch >= self._noted:
            return contextlib.nullcontext()
        around = {unit: functools.partial(self._note, name, microbatch) for name, unit in self._units.items()}
        return calls_surrounded(around)

    def _note(
        self, name: str, microbatch: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        calls = self._calls[name]
        if microbatch not in calls and not any(map(is_fake, tensors_in(args, kwargs))):
            calls[microbatch] = _Call.of(function, args, kwargs)
        return function(*args, **kwargs)

    def coupled(self, run: Run) -> dict[str, Coupling]:
        """After the batch: the blocks that make something of samples which depends on which are together.

        Args:
            run: is called three times for each block, and nine times if it draws random numbers; on all ranks alike.
        """
        found = {}
        for name, unit in self._units.items():
            with contextlib.suppress(Exception), _norms_apart(unit), torch.no_grad():  # of what nobody asked for
                if (how := self._coupling(name, unit, run)) is not None:
                    found[name] = how
            self._calls.pop(name, None)
        return found

    def _coupling(self, name: str, unit: nn.Module, run: Run) -> Coupling | None:
        found = self._whole_call(name)
        if found is None:
            return None
        call, samples = found
        places, couplings = self._rows[name], set[Coupling]()
        given = self._parts(call.tensors, places.taken, samples)
        taken = zip(call.tensors, given, places.taken, strict=True)
        told = _has_more(unit, call) or any(part is None and x.shape != place.shape for x, part, place in taken)
        for i in range(_TRIES):  # as many on all ranks, whatever comes out: a block may communicate
            seed = mixed(self._seed, i)
            ways = [run(functools.partial(_run, _exchanged(call, given, *way), samples), seed) for way in _WAYS]
            draws = {way.draws for way in ways}
            if _Draws.BY_VALUES in draws:
                return None  # what is drawn for the first samples decides what the others get
            still = draws == {_Draws.NOTHING}
            known = still and not told
            parts = (self._parts(way.tensors, places.made, samples) for way in ways)
            if any(_differ(call.precision, known, *x) for x in zip(*parts, strict=True)):
                couplings.add(Coupling.SAMPLES)
            numbers = zip(places.made, *(way.numbers for way in ways), strict=False) if known else ()
            if any(_is_loss(place) and _is_no_average(call.precision, *x) for place, *x in numbers):
                couplings.add(Coupling.NUMBER)
            if still:
                break  # else samples that are shuffled may have stayed where they were, but hardly each time
        return next((coupling for coupling in Coupling if coupling in couplings), None)

    def _parts(self, tensors: Sequence[Tensor], places: Sequence[Placed], samples: int) -> list[_Parts | None]:
        """The samples of tensors, in parts; None of those in which none are known to lie. Behind what a block returns,
        its places may be of what its layers have collected."""
        found = ((x, place.rows_in(x, self.samples, samples)) for x, place in zip(tensors, places, strict=False))
        return [None if rows is None else _Parts.of(x, rows, samples) for x, rows in found]

    def _whole_call(self, name: str) -> tuple[_Call, int] | None:
        """A call of several samples, and how many; None if there was none."""
        calls, taken = self._calls.get(name, {}), self._rows[name].taken
        if not calls or any(len(call.tensors) != len(taken) for call in calls.values()):
            return None
        if self._noted == 1:
            return calls[0], self.microbatch
        if len(calls) < 2:
            return None
        joined: list[Tensor] = []
        for place, x, y in zip(taken, calls[0].tensors, calls[1].tensors, strict=True):
            rows = place.rows_in(x, self.samples, 1)
            if x.shape != y.shape or (rows is None and place.shape != x.shape):
                return None  # nobody knows how to put them together
            joined.append(x if rows is None else rows.join([x, y]))
        return _with(calls[0], joined), 2


def kind_of(unit: nn.Module) -> Any:
    """What blocks of one kind have in common: their modules' classes and modes."""
    return tuple((name, type(module), module.training) for name, module in unit.named_modules())


def _kept(x: Tensor) -> Tensor:
    whole: Tensor = gathered(x)
    return whole.detach()


def _with(call: _Call, tensors: Sequence[Tensor]) -> _Call:
    """The same call of other tensors."""
    count = itertools.count()
    args, kwargs = with_tensors(lambda _: tensors[next(count)], (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _exchanged(call: _Call, given: Sequence[_Parts | None], first: int, second: int) -> _Call:
    """A call with one half of its samples, or the other, in either place; a tensor of none is copied."""
    pairs = zip(call.tensors, given, strict=True)
    return _with(call, [x.clone() if parts is None else parts.joined(first, second) for x, parts in pairs])


def _snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Snapshot:
    return Snapshot(SimpleNamespace(args=args, kwargs=kwargs), submodules=False)


def _has_more(unit: nn.Module, call: _Call) -> bool:
    """Whether a block may know something of samples that was not exchanged with them: by objects and lists of numbers
    that it is given, or by what hangs on it."""
    leaves = leaves_in(call.args, call.kwargs)
    plain = [x for x in (*call.args, *call.kwargs.values()) if x is None or type(x) in (bool, int, float, str)]
    return len(leaves) > len(plain) + len(call.tensors) or bool(drawn_by(unit.modules()))


def _is_loss(place: Placed) -> bool:
    """Whether a block may have made a loss there."""
    return place.has_graph and not place.shape and place.rows is None


class _Draws(Enum):
    """What random numbers a call draws."""

    NOTHING = auto()
    AS_MANY = auto()
    """As many for other values."""
    BY_VALUES = auto()


class _Watch(TorchFunctionMode):
    """Notes whether some operation draws as many as values ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.by_values = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.by_values = self.by_values or operation_name(func) in _REJECTS
        return func(*args, **(kwargs or {}))


class _Made(NamedTuple):
    """What came of a call."""

    tensors: list[Tensor]
    counts: list[Tensor | float | None]
    """How many values a number is an average of, which microbatches weigh by; None where that isn't known."""
    draws: _Draws

    @property
    def numbers(self) -> list[tuple[Tensor, Tensor | float | None]]:
        """Tensors with their counts."""
        return list(zip(self.tensors, self.counts, strict=True))


def _run(call: _Call, samples: int) -> _Made:
    """What comes of a call of so many samples."""
    now, before = _snapshot(call.args, call.kwargs), random_state()
    call.objects.restore()
    try:
        with call.ambient._replace(grad=False).again(), _Watch() as watch, Averages(rows=samples) as counting:
            made = tensors_in(tree_map(gathered, opened(call.function(*call.args, **call.kwargs), call.function)))
        drawn = _Draws.NOTHING if is_random_state(before) else _Draws.AS_MANY
        return _Made(made, list(map(counting.count_of, made)), _Draws.BY_VALUES if watch.by_values else drawn)
    finally:
        now.restore()


class _Parts(NamedTuple):
    """A tensor's samples, in three parts: two of as many, and what is left."""

    rows: Rows
    parts: tuple[Tensor, ...]
    """With a dim of its own for rounds."""

    @classmethod
    def of(cls, x: Tensor, rows: Rows, samples: int) -> _Parts:
        each = x.shape[rows.dim] // (rows.rounds * samples)
        half = samples // 2 * each
        return cls(rows, rows.apart(x).split([half, half, samples % 2 * each], rows.dim + 1))

    def joined(self, first: int, second: int) -> Tensor:
        """A tensor of some of them."""
        return self.rows.put([self.parts[first], self.parts[second], self.parts[2]])


def _differ(eps: float, is_still: bool, *ways: _Parts | None) -> bool:
    """Whether a tensor's parts are others where they are alone.

    Args:
        eps: the distance of numbers, at least.
        is_still: of the same samples the same is made, wherever they are: nothing is drawn, or known of their places.
        ways: made of (a, b), (a, a) and (b, b).
    """
    if any(way is None for way in ways):
        return False
    both, of_one, of_other = (way.parts for way in ways if way is not None)
    pairs = [(both[0], of_one[0]), (both[1], of_other[1]), (both[2], of_one[2])]
    if is_still:  # the first to come may take the places of all
        pairs += [(of_one[0], of_one[1]), (of_other[0], of_other[1])]
    return any(x.shape == y.shape and _are_apart(x, y, eps) for x, y in pairs)


def _is_no_average(eps: float, *ways: tuple[Tensor, Tensor | float | None]) -> bool:
    """Whether a number of two halves is not in the middle between those of each alone, as sums and averages are.

    Args:
        eps: the distance of numbers, at least.
        ways: numbers and their counts, made of (a, b), (a, a) and (b, b).
    """
    (both, _), (one, n), (other, m) = ways
    middle = (one + other) / 2 if n is None or m is None else (one * n + other * m) / (n + m)
    return _are_apart(both, middle, eps / _ROUNDINGS)  # of many values, whose roundings have no common sign


def _are_apart(x: Tensor, y: Tensor, eps: float) -> bool:
    """Whether real numbers are apart by more than roundings add up to. Others may be positions in the batch."""
    if not x.is_floating_point() or x.equal(y):
        return False
    eps = max(eps, torch.finfo(x.dtype).eps)
    x, y = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (x, y))
    known = x.isfinite() & y.isfinite()
    x, y = x[known], y[known]
    limit = min(_ROUNDINGS * eps, _MOST)
    return bool(x.numel()) and bool((x - y).abs().max() > limit * torch.maximum(x.abs(), y.abs()).max())


@contextlib.contextmanager
def _norms_apart(unit: nn.Module) -> Iterator[None]:
    """Meanwhile batch norms take their running statistics: of them another warning speaks."""
    norms = [x for x in unit.modules() if isinstance(x, BATCH_NORMS) and x.training and x.track_running_stats]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


_WAYS = (0, 1), (0, 0), (1, 1)
"""Which half is in the first place, and which in the second."""
_TRIES = 3
"""With other random numbers, where a block draws some."""
_REJECTS = operation_names("poisson binomial _standard_gamma _sample_dirichlet")
"""They try until a number fits."""
_ROUNDINGS = 2.0**10
_MOST = 0.05
"""Relative to the largest number: rows that experts take together with others go through other kernels."""
