"""What a step averages: seen while it runs, so that microbatches can weigh by it.

A number does not say what it is a mean of. So every mean and sum down to one number is noted as it is made, with how
many values it is over, and followed through what is linear: factors, other addends, a division by a count. The loss of
a masked language model, of a masked autoencoder (`(loss * mask).sum() / mask.sum()`), or of marked tokens
(`loss[mask].mean()`) is then the batch's, and not the mean of the microbatches' means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.pipeline.loss.functions import (
    CLAMPS,
    COMPARISONS,
    CONSTANTS,
    DIVISIONS,
    DOTS,
    EMPTY,
    INVERSIONS,
    JOINS,
    LIKE,
    LINEAR,
    LOSSES,
    MEANS,
    OF_CLASSES,
    OF_NUMBERS,
    PRODUCTS,
    REDUCTIONS,
    RESHAPES,
    SUMMED,
    SUMS,
    TOTALS,
    WEIGHTED,
    count_of,
)
from lightning_megatp.pipeline.loss.made import Average, Made
from lightning_megatp.pipeline.loss.pairs import Pairs
from lightning_megatp.pipeline.loss.samples import SLICES, Samples
from lightning_megatp.shim.autograd import functorch_is_active
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import WithoutMode
from lightning_megatp.tensor.functions import is_in_place


class Averages(TorchFunctionMode):
    """Notes what the step averages in one microbatch.

    A mean over nothing at all is nan, with a gradient of nan. Here it is 0, since the other microbatches' values make
    up the batch's mean.

    Args:
        look_inside: the units inside of which to look; None for all. A mode costs time at every operation.
        closed: whether not to look inside of a unit, of those: the compiler takes a mode into its graphs.
        rows: the microbatch's samples, to know them where a step takes them one by one; 0 for unknown.
        compares: whether to notice where samples are compared with each other, or all of them make a statistic.
        constants: the identities of tensors that are the same for all samples, where it compares.
    """

    def __init__(
        self,
        look_inside: Collection[str] | None = None,
        closed: Callable[[str], bool] = lambda unit: False,
        rows: int = 0,
        compares: bool = False,
        constants: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.compared = ""
        """By what operation samples are compared with each other."""
        self._samples, self._compares = Samples(rows, constants), compares and rows > 1
        self._pairs = Pairs(self._samples)
        self._of_sample = False
        """Whether the operation that runs is about one sample."""
        self._read_nothing = False
        """Whether the step was told a count of nothing, as a Python number."""
        self.of_targets: list[Average] = []
        """All cross-entropies of classes, also those that are no part of the loss."""
        self._look_inside, self._closed, self._unit = look_inside, closed, ""
        self._paused = False
        self._made: dict[int, tuple[Any, Made]] = {}
        """By the identity of a tensor or a Python number, which is kept alive for it."""
        self._inverted: dict[int, tuple[Tensor, Tensor, float | None]] = {}
        """By the identity of a number: itself, the one that it is the inverse of, and a Python factor."""
        self._shares: dict[int, tuple[Tensor, Tensor]] = {}
        """By the identity of a table: itself, and the count that it was divided by before it is added up."""
        self._early: dict[int, Tensor] = {}
        """By their identity, numbers that earlier stages have made."""
        self._kept: list[Any] = []
        """What averages are over, kept alive so that its address means it."""

    def made(self, number: Any) -> Made | None:
        """What a number was made of; None if nothing is known."""
        found = self._made.get(id(number))
        return None if found is None else found[1]

    def note_early(self, numbers: Iterable[Tensor]) -> None:
        """Earlier stages have made these, of what isn't seen here."""
        self._early.update((id(x), x) for x in numbers if x.numel() == 1 and x.is_floating_point())

    def is_early(self, number: Any) -> bool:
        """Whether an earlier stage has made a number."""
        return id(number) in self._early

    def count_of(self, number: Any) -> Tensor | float | None:
        """How many values a number is an average of, as `Made.count`; None for one sample's of all."""
        made = self.made(number)
        return None if made is None or self._samples.alone([number], ()) is not None else made.count

    def units_of(self, loss: Any) -> set[str]:
        """The units inside of which the averages of a loss were made, or cross-entropies if it has none."""
        made = self.made(loss)
        known = made is not None and made.weighs_by[0] != "samples"
        return {a.unit for a in (made.of if made is not None and known else self.of_targets)}

    def inside(self, unit: str) -> contextlib.AbstractContextManager[None]:
        """Around a call of a unit."""
        if (self._look_inside is not None and unit not in self._look_inside) or (unit and self._closed(unit)):
            return WithoutMode(self)
        return self._looking_inside(unit)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around a metric, whose averages are no losses."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def _looking_inside(self, unit: str) -> Iterator[None]:
        self._unit = unit
        try:
            yield
        finally:
            self._unit = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        sample = None if name in JOINS else self._samples.alone(_operands(args, kwargs), self._made, name in SUMS)
        if sample is None:
            if func in SLICES and args and id(args[0]) not in self._made:
                parts = self._samples.cut(func, args, kwargs)
                if parts is not NotImplemented:
                    return parts
            result = self._noted(func, args, kwargs)
            self._samples.forget(result)
            if self._compares:
                if not self._unit and self._pairs.compares(name, args, kwargs, result):
                    self.compared = self.compared or name
                self._samples.note_constant(_operands(args, kwargs), result)
            return result
        self._of_sample = True
        try:
            result = self._noted(func, args, kwargs)
        finally:
            self._of_sample = False
        self._samples.note(result, sample)
        return result

    def _noted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in REDUCTIONS:
            return self._reduced(func, args, kwargs)
        if func in LOSSES:
            return self._loss(func, args, kwargs)
        if func in DOTS and not any(id(x) in self._made for x in args):
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and not result.dim():
                self._note(result, func.__name__, None, None, summed=tuple(args[0].shape))
            return result
        if self._compares:
            if func in COMPARISONS:
                return self._comparison(func, args, kwargs)
            if not self._unit and self._samples.makes_a_statistic(getattr(func, "__name__", ""), args, kwargs):
                return self._statistic(func, args, kwargs)
        if func in EMPTY:
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.dim() == 0:
                self._keep(result, ())  # what losses are added to, one by one
            return result
        if self._made:
            return self._followed(func, args, kwargs)
        return func(*args, **kwargs)

    def _statistic(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of all samples that is no mean: known by what it bends."""
        result = func(*args, **kwargs)
        for x in result if isinstance(result, tuple) else [result]:
            if isinstance(x, Tensor) and x.is_floating_point():
                self._keep(x, (), bent=func.__name__)
        return result

    def _comparison(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that may compare samples."""
        result = func(*args, **kwargs)
        if self._pairs.tabulates(args, kwargs, result):
            self.compared = self.compared or func.__name__
        return result

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One of torch's losses; of an average, or a statistic of all samples, it is a function of that."""
        given = dict(zip(LOSSES[func], args, strict=False)) | kwargs
        result = self._averaged(func, args, kwargs, given)
        compared = [x for name, x in given.items() if isinstance(x, Tensor) and "weight" not in name]
        known = [made for x in compared if (made := self.made(x)) is not None and (made.of or made.bent)]
        if known and not self._of_sample and isinstance(result, Tensor):
            of = () if (made := self.made(result)) is None else made.of
            self._keep(result, of, bent=next((made.bent for made in known if made.bent), func.__name__))
        return result

    def _averaged(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]
    ) -> Any:
        """What one of torch's losses makes, noted.

        Args:
            given: its arguments by name.
        """
        if given.get("size_average") is not None or given.get("reduce") is not None:
            return func(*args, **kwargs)
        reduction, x = given.get("reduction", "mean"), given.get(LOSSES[func][0])
        target, weight = given.get("target"), given.get("weight")
        if reduction == "mean" and isinstance(target, Tensor):
            if func in OF_CLASSES and not target.is_floating_point():
                return self._of_targets(func, given, target)
            if func in WEIGHTED and isinstance(weight, Tensor):
                self._kept.append(weight)
                return self._divided_sum(func, given, weight.detach().sum(), ("weights", id(weight)))
        result = func(*args, **kwargs)
        if reduction == "sum" and isinstance(x, Tensor):
            self._note(result, func.__name__, None, None, summed=tuple(x.shape), adds=True)
        elif reduction != "none" and isinstance(x, Tensor):
            if not x.numel():
                result = x.sum()
            count = count_of(func, given, x)
            self._note(result, func.__name__, count, ("elements", count))
        return result

    def _of_targets(self, func: Callable[..., Any], given: Mapping[str, Any], target: Tensor) -> Tensor:
        by_class, ignored = given.get("weight"), given.get("ignore_index", -100)
        counted = target != ignored
        weights = counted if by_class is None else by_class[target.masked_fill(~counted, 0)] * counted
        over = target.data_ptr(), target.shape, target.stride(), ignored, None if by_class is None else id(by_class)
        self._kept.append((target, by_class))
        return self._divided_sum(func, given, weights.sum(), over, of_targets=True, weights=by_class)

    def _divided_sum(
        self,
        func: Callable[..., Any],
        given: Mapping[str, Any],
        count: Tensor,
        over: Hashable,
        of_targets: bool = False,
        weights: Tensor | None = None,
    ) -> Tensor:
        """A loss's mean by the sum of weights, () each."""
        total = func(**{**given, "reduction": "sum"})
        mean: Tensor = total / torch.where(count > 0, count, torch.ones_like(count))
        self._note(mean, func.__name__, count, over, of_targets, weights=weights)
        return mean

    def _reduced(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A mean or a sum."""
        x = args[0] if args else kwargs.get("input")
        if func in SUMMED and id(x) in self._shares and len(args) + len(kwargs) == 1:
            result, by = func(*args, **kwargs), self._shares[id(x)][1]
            self._note(result, "sum / count", torch.where(by > 0, by.detach(), 0.0), ("divisor", id(by)))
            return result
        if not isinstance(x, Tensor) or not x.dim() or id(x) in self._made:
            return self._followed(func, args, kwargs)
        result, mean = func(*args, **kwargs), func in MEANS
        if not isinstance(result, Tensor):
            return result
        if func in OF_NUMBERS:
            numbers = (~x.isnan()).sum()
            if mean and not result.dim():
                result = x.nansum(dtype=result.dtype) / numbers.clamp(min=1)  # 0 with a gradient where nothing is
                self._kept.append(numbers)
                self._note(result, func.__name__, numbers, ("numbers", id(numbers)))
            elif not result.dim():
                self._note(result, func.__name__, None, None, summed=tuple(x.shape))
        elif result.dim() == 0:
            if mean and not x.numel():
                result = x.sum(dtype=result.dtype)
            if mean:
                self._note(result, func.__name__, float(x.numel()), ("elements", float(x.numel())))
            else:
                whole = not x.is_floating_point() and not x.is_complex()
                self._note(result, func.__name__, None, None, summed=tuple(x.shape), adds=whole)
        elif not self._unit and self._samples.reduces(args, kwargs):
            each = float(x.numel() / max(result.numel(), 1))
            if mean:
                self._note(result, func.__name__, each, ("elements", each))
            else:
                self._note(result, func.__name__, None, None, summed=tuple(x.shape))
        return result

    def _followed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Any operation, maybe on numbers that are known."""
        if self._of_sample:  # whatever is made of one sample's numbers is a number of it
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.is_floating_point() and not result.dim():
                self._note(result, func.__name__, None, None)
            return result
        operands = list(_operands(args, kwargs))
        known = [found for x in operands if (found := self.made(x)) is not None]
        name = func.__name__
        if not known or name in CONSTANTS or self._is_table_with_constants(operands):
            return func(*args, **kwargs)
        if name in DIVISIONS and len(args) == 2 and not kwargs:
            if not self._bends(*args):
                return self._divided(func, *args)
            if self._is_share(*args):
                return self._share(func, *args)
        shares = [x for x in operands if id(x) in self._shares] if self._shares else []
        if shares and (name in RESHAPES or (name in PRODUCTS and len(shares) == len(known) == 1)):
            result = func(*args, **kwargs)
            self._keep_share(result, self._shares[id(shares[0])][1], "div")
            return result
        if name in PRODUCTS and self._inverted and len(args) == 2 and not kwargs:
            x, inverse = args if id(args[1]) in self._inverted else args[::-1]
            _, by, times = self._inverted.get(id(inverse), (None, None, None))
            if by is not None and not self._bends(x, by) and (x is args[0] or not is_in_place(name)):
                return self._divided(lambda x, safe: func(x, torch.where(by == safe, inverse, 1.0)), x, by, times)
        result = func(*args, **kwargs)
        if name in INVERSIONS and args and result.numel() == 1 and not result.requires_grad:
            times = args[1] if len(args) > 1 and not isinstance(args[1], Tensor) else None
            self._inverted[id(result)] = result, args[0], times
        joins = name not in LIKE and any(self._samples.holds(x) and self.made(x) is None for x in operands)
        if type(result) is float:  # `item`, `float(...)`; whole numbers may be one object for all
            self._made[id(result)] = result, known[0]
        elif type(result) is int or type(result) is bool:
            self._read_nothing = self._read_nothing or not result
        elif isinstance(result, Tensor) and name in CLAMPS and _is_count(result, operands, known):
            self._keep(result, tuple(a for x in known for a in x.of))
        elif isinstance(result, Tensor) and (result.is_floating_point() or joins) and self._follows(result, joins):
            bent = next((x.bent for x in known if x.bent), "")
            if name not in LINEAR or (name in PRODUCTS and sum(bool(x.of or x.bent) for x in known) > 1):
                bent = bent or name
            if joins:  # what was made of all samples goes back into each of them
                bent = bent or name
            adds = name in SUMS and any(
                isinstance(x, Tensor) and x.is_floating_point() and self.made(x) is None for x in operands
            )
            of = tuple(a for x in known for a in x.of)
            if name in PRODUCTS and len(known) == 1 and (factors := [x for x in operands if self.made(x) is None]):
                of = tuple(a.times(*factors) for a in of) if _is_single(factors) else of
            if name in TOTALS and not result.dim():
                of = tuple(a.summed_up(result) for a in of)
            if name == "mean" and isinstance(args[0], Tensor) and any(a.of_sample for a in of):
                number = args[0].numel()
                divided = (a.divided(number, ("divisor", number), False, result) if a.of_sample else a for a in of)
                of = tuple(divided)
            self._keep(result, of, adds or any(x.rest for x in known), bent)
        return result

    def _is_table_with_constants(self, operands: Sequence[Any]) -> bool:
        """Whether the numbers that are known are of weights alone, and are to be done with samples."""
        samples = any(self._samples.holds(x) and self.made(x) is None for x in operands)
        return samples and all(self._samples.is_constant(x) for x in operands if self.made(x) is not None)

    def _follows(self, result: Tensor, joins: bool) -> bool:
        """Whether to follow what was made of known numbers: a few, or a table that joins samples.

        Args:
            joins: whether samples were operands: followed where statistics are looked for.
        """
        if joins:
            return self._compares and not self._unit
        return result.numel() <= _FEW or not self._unit

    def _bends(self, x: Any, by: Any) -> bool:
        """Whether a division makes something else of averages than others of them."""
        if (made := self.made(by)) is not None and made.bent:
            return True
        return self.made(x) is None or (isinstance(by, Tensor) and (by.requires_grad or by.numel() != 1))

    def _is_share(self, x: Any, by: Any) -> bool:
        """Whether a division is of a table by a count (`mask / mask.sum()`): the sum of it, or of its products, is an
        average."""
        rows = self._samples.rows
        if not isinstance(x, Tensor) or not x.dim() or (rows and x.shape[0] % rows) or self.made(x) is not None:
            return False
        made = self.made(by)
        counts = made is not None and made.of and not made.bent and all(a.count is None for a in made.of)
        return bool(counts) and isinstance(by, Tensor) and by.numel() == 1 and not by.requires_grad

    def _share(self, func: Callable[..., Any], x: Tensor, by: Tensor) -> Tensor:
        """That table. Where the count is of nothing, it is 0 and not nan."""
        result: Tensor = func(x, torch.where(by == 0, torch.ones_like(by), by))
        self._keep_share(result, by, func.__name__)
        return result

    def _keep_share(self, result: Tensor, by: Tensor, bent: str) -> None:
        """Until it is added up, it is what bends averages, wherever else it goes."""
        self._shares[id(result)] = result, by
        self._keep(result, (), bent=bent)

    def _divided(self, func: Callable[..., Any], x: Tensor, by: Tensor | float, times: float | None = None) -> Any:
        """A division of a known number by another, which is multiplied by a third one before."""
        made, divisor_made = self._made[id(x)][1], self.made(by)
        over = "divisor", id(by) if isinstance(by, Tensor) else by
        divisor = by
        empty: Tensor | bool = by == 1 and self._read_nothing if not isinstance(by, Tensor) else False
        if divisor_made is not None and len(divisor_made.of) == 1 and divisor_made.of[0].count is None:
            empty = divisor_made.of[0].value == 0
        if isinstance(by, Tensor):
            self._kept.append(by)
            divisor = by.detach().clone().reshape(())
            nothing = (divisor == 0) & (x.detach() == 0)
            by = torch.where(nothing, torch.ones_like(by), by)
        result = func(x, by)
        mixed = divisor_made is not None and divisor_made.rest  # with something kept: an average of losses so far
        share = divisor_made is not None and not mixed and all(a.count is not None for a in divisor_made.of)
        divided = made.of if mixed else tuple(a.divided(divisor, over, share, result, empty, times) for a in made.of)
        self._keep(result, divided, made.rest, made.bent)
        return result

    def _note(
        self,
        result: Tensor,
        by: str,
        count: Tensor | float | None,
        over: Hashable,
        of_targets: bool = False,
        summed: tuple[int, ...] = (),
        adds: bool = False,
        weights: Tensor | None = None,
    ) -> None:
        if is_fake(result) or functorch_is_active():
            return
        average = Average(
            by, result.detach().clone(), count, over, of_targets, self._unit, summed, adds, weights=weights
        )
        if self._of_sample:
            average = replace(average, count=None, over=None, of_targets=False, summed=(), adds=True, of_sample=True)
        elif of_targets:
            self.of_targets.append(average)
        self._keep(result, (average,))

    def _keep(self, result: Tensor, of: tuple[Average, ...], rest: bool = False, bent: str = "") -> None:
        self._made[id(result)] = result, Made(of, rest, bent)


def _is_count(result: Tensor, operands: Sequence[Any], known: Sequence[Made]) -> bool:
    """Whether a clamped number may be a count: a sum of what is not trained."""
    single = result.numel() == 1 and all(x.numel() == 1 for x in operands if isinstance(x, Tensor))
    sums = all(a.count is None for x in known for a in x.of) and not any(x.bent for x in known)
    return single and sums and not result.requires_grad


def _is_single(factors: Sequence[Any]) -> bool:
    """Whether these are a single number."""
    (factor, *others) = factors
    return not others and (factor.numel() == 1 if isinstance(factor, Tensor) else isinstance(factor, (int, float)))


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x


def scalar(number: Tensor | float, device: torch.device) -> Tensor:
    """() float64 on a device. A number is written there by the device itself: copied from the host, it would wait for
    all that was launched before."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64, copy=True).reshape(())  # it may be changed in place later
    return torch.full((), float(number), dtype=torch.float64, device=device)


_FEW = 64
"""Numbers at most, as of losses of layers that are stacked."""
