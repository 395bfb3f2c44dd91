"""Whether what the parts of a stack of experts compute adds up to what the whole does, for a way of splitting it: tried
on thin copies, whose experts have few features inside."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import PLAIN, Call, tensors_anywhere_in
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.runs import Ran, crowded, large, run
from lightning_megatp.auto_plan.thin import block_copy, concrete_call
from lightning_megatp.auto_plan.thin_stacks import ThinStack, holder_of
from lightning_megatp.plan.layer import StackLayout, UserOperation
from lightning_megatp.shim.torch import tree_flatten, tree_leaves, tree_unflatten

_CLOSE = 1e-8
_LARGE = 30.0
"""How many times larger weights and inputs are than usual, for limits to be reached."""

NOT_A_SUM = (
    "what its parts compute does not add up, in no way in which it could be split. Parameters of three dims are taken"
    " for stacks of experts; what is no sum over their features (attention, a norm of the result) has to be done"
    " outside of the module that has them"
)
NOT_USED = "what it returns is the same whatever its experts compute"


class NotAdditive(Exception):
    """Why a module is not what this file is about."""


def proven(module: nn.Module, layout: StackLayout, calls: Sequence[Call]) -> StackLayout:
    """Run the parts of a thin copy, and compare the sums of what they return and of their gradients; also with large
    numbers, and with all tokens alike.

    Raises:
        NotAdditive: it isn't.
        Exception: whatever the module raises.
    """
    thin = ThinStack.of(module, layout)
    trial = _Trial(thin, layout)
    for train, call in itertools.product((True, False), calls):
        trial.compare(train, lambda call=call: concrete_call(call, 0, noise=0.1))  # type: ignore[misc]
    found = trial.found()
    trial.check_used()
    stressed = _Trial(thin.enlarged(_LARGE), found)
    with contextlib.suppress(_Unfit):  # the whole itself may take no such numbers
        trial.compare(True, lambda: crowded(concrete_call(calls[0], 0, noise=0.1)))
    for by in (_LARGE, _LARGE**2):
        with contextlib.suppress(_Unfit):
            stressed.compare(True, lambda by=by: large(concrete_call(calls[0], 0, noise=0.1), by))  # type: ignore[misc]
    if any(tried.found() != found for tried in (trial, stressed) if tried.verdicts):  # in draws, or what it keeps
        raise NotAdditive("what it returns is a sum for some inputs, and not for others")
    return replace(found, done=trial.done | stressed.done)


def check_numbered(
    module: nn.Module, layout: StackLayout, call: Call, numbers: Mapping[str, int]
) -> frozenset[UserOperation]:
    """Check that the parts of a module that counts itself add up with other numbers, too.

    Args:
        layout: what was proven.
        numbers: attributes, by their names from the module on.

    Returns:
        The operations that were seen.

    Raises:
        NotAdditive: then its parts don't add up.
    """
    thin = ThinStack.of(module, layout)
    for name, number in numbers.items():
        holder, key = holder_of(thin.whole, name)
        vars(holder)[key] = number
    trial = _Trial(thin, layout)
    with contextlib.suppress(_Unfit):
        trial.compare(True, lambda: concrete_call(call, 0, noise=0.1))
        if trial.found() != layout:
            raise NotAdditive("modules of its kind do something else, by the numbers that they have")
    return trial.done


class _Unfit(Exception):
    """The whole itself failed, or gave no finite numbers."""


class _Trial:
    """A way of splitting, compared on several calls.

    Args:
        thin: the whole.
        layout: what is split.
    """

    def __init__(self, thin: ThinStack, layout: StackLayout) -> None:
        self._thin, self._layout = thin, layout
        self._owns = (0, thin.inside // 3), (thin.inside // 3, thin.inside)
        self._shares = [thin.share(layout, own) for own in self._owns]
        self.verdicts: list[tuple[list[bool | None], set[str]]] = []
        self.done = frozenset[UserOperation]()
        self._draws: set[bool] = set()
        self._adds: set[int | str | None] = set()
        self._used = False
        self._single = False

    def compare(self, train: bool, call: Callable[[], Call]) -> None:
        """Compare what the whole makes of a call with the sum of what its parts make of it.

        Args:
            call: makes it, anew for each.

        Raises:
            NotAdditive: the parts do something else than the whole.
        """
        try:
            wanted = run(block_copy(self._thin.whole, train), call())
        except Exception as error:
            raise _Unfit from error
        if not all(x.isfinite().all() for x in _tensors(wanted.result) if x.is_floating_point()):
            raise _Unfit
        _check_whole(wanted)
        parts = [run(block_copy(share, train), call()) for share in self._shares]
        adds = _adds(wanted, parts)
        for part in parts[1:]:
            _subtract(part, adds)
        verdict = _adds_up(wanted, parts)
        self._compare_gradients(wanted, parts, *verdict)
        self._adds.add(adds)
        self.verdicts.append(verdict)
        self.done |= wanted.done
        self._draws |= _drawn_alike(wanted, parts)
        self._single = isinstance(wanted.result, Tensor)

    def found(self) -> StackLayout:
        """How it is split, with what was seen.

        Raises:
            NotAdditive: nothing is a sum.
        """
        seen = [set(same) - {None} for same in zip(*(same for same, _ in self.verdicts), strict=True)]
        if {True, False} in seen:
            raise NotAdditive("what it returns is a sum for some inputs, and not for others")
        returns = tuple(False not in same for same in seen)
        if all(returns):
            raise NotAdditive(NOT_USED)
        if len(self._draws) > 1:
            raise NotAdditive(
                "it draws random numbers for the features inside of experts, and for what all ranks share"
            )
        if len(self._adds) > 1:
            raise NotAdditive("it adds what it is given for some inputs, and not for others")
        return replace(
            self._layout,
            adds=next(iter(self._adds)),
            returns=() if self._single else tuple(not same for same in returns),
            kept=tuple(sorted(set().union(*(names for _, names in self.verdicts)))),
            draws_alike=self._draws != {False},
        )

    def check_used(self) -> None:
        """See whether what the calls returned depends on what is split.

        Raises:
            NotAdditive: it doesn't.
        """
        split = [entry.name for entry in self._layout.parameters if entry.split]
        if not self._used and any(self._thin.whole.get_parameter(name).requires_grad for name in split):
            raise NotAdditive(NOT_USED)

    def _compare_gradients(
        self, wanted: Ran, parts: Sequence[Ran], same: Sequence[bool | None], kept: set[str]
    ) -> None:
        """Check that gradients of inputs and parameters are the sums of the parts'. Of what parts have alike each has
        its share.

        Raises:
            NotAdditive: they are others, as where an autograd function adds to a gradient.
        """
        whole = _gradients(wanted, same, kept, 1)
        if whole is None:
            return
        found = [_gradients(part, same, kept, len(parts)) for part in parts]
        if None in found:
            raise NotAdditive("gradients of its parts do not add up")
        inputs, parameters = whole
        for i, gradient in enumerate(inputs):
            _check_sum(gradient, [x[0][i] for x in found])
        entries = {entry.name: entry for entry in self._layout.parameters}
        for name, gradient in parameters.items():
            each: list[Tensor] = [x[1][name] for x in found]
            entry = entries.get(name)
            self._used |= entry is not None and entry.split and bool(gradient.any())
            if entry is None or entry.dim is None:
                _check_sum(gradient, each[:1] if entry is not None and entry.once else each)
                continue
            for own, part in zip(self._owns, each, strict=True):
                _check_sum(self._thin.part_of(gradient, entry, own), [part])


def _gradients(ran: Ran, same: Sequence[bool | None], kept: set[str], shares: int) -> Any:
    """Gradients of inputs, and of parameters by name, for fixed ones of what was returned and kept; None where there is
    none."""
    results = [x for x in _tensors(ran.result) if x.is_floating_point()]
    alike = [is_same for x, is_same in zip(_tensors(ran.result), same, strict=True) if x.is_floating_point()]
    results += [ran.kept[name] for name in sorted(kept)]
    alike += [True] * len(kept)
    pairs = [(x, is_same) for x, is_same in zip(results, alike, strict=True) if x.requires_grad]
    if not pairs:
        return None
    generator = torch.Generator().manual_seed(1)
    given = [x for x in ran.given if x.requires_grad]
    parameters = dict(ran.module.named_parameters())
    cotangents = [
        torch.randn(x.shape, generator=generator, dtype=x.dtype) / (shares if is_same else 1) for x, is_same in pairs
    ]
    wanted = [*given, *(p for p in parameters.values() if p.requires_grad)]
    with exact():
        found = torch.autograd.grad(
            [x for x, _ in pairs], wanted, cotangents, allow_unused=True, materialize_grads=True
        )
    named = [name for name, p in parameters.items() if p.requires_grad]
    return found[: len(given)], dict(zip(named, found[len(given) :], strict=True))


def _check_sum(wanted: Tensor, parts: Sequence[Tensor]) -> None:
    if not _close(sum(parts[1:], parts[0]), wanted, parts):
        raise NotAdditive("gradients of its parts do not add up")


def _close(found: Any, wanted: Tensor, parts: Sequence[Tensor]) -> bool:
    """Up to rounding, which goes by the largest numbers that were added."""
    largest = max([1.0, *(float(x.detach().abs().max()) for x in (wanted, *parts) if x.numel())])
    return torch.allclose(found, wanted, rtol=_CLOSE, atol=_CLOSE * largest)


def _check_whole(ran: Ran) -> None:
    """See whether the whole does what its parts can't do for it.

    Raises:
        NotAdditive: it does.
    """
    if ran.checkpoints:
        raise NotAdditive(
            "it makes an activation checkpoint inside, which would run with the whole weights: put it around"
        )
    if ran.hides:
        raise NotAdditive("it is given an object with tensors in it; give these as arguments")
    if ran.changes:
        raise NotAdditive("it changes what it is given")
    if any("alpha" in name for name, _ in ran.drew):
        raise NotAdditive("alpha dropout adds to what it leaves out")


def _adds(wanted: Ran, parts: Sequence[Ran]) -> int | str | None:
    """Position or keyword of the argument that the first sum has in it besides, and so each part; None for none."""
    whole, *first = ([*_tensors(ran.result), None][0] for ran in (wanted, *parts))
    if whole is None or _alike(whole, first) or not all(_fits(whole, x) for x in first):
        return None
    held = [x for x in first if x is not None]
    total = sum(held[1:], held[0])
    if _close(total, whole, held):
        return None
    fit = ((key, x) for key, x in wanted.arguments.items() if _fits(whole, x) and x.is_floating_point())
    return next((key for key, x in fit if _close(total - (len(parts) - 1) * x, whole, held)), None)


def _subtract(part: Ran, key: int | str | None) -> None:
    """Take an argument off the first tensor that was returned."""
    if key is None:
        return
    leaves, tree = tree_flatten(part.result)
    at = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor))
    leaves[at] = leaves[at] - part.arguments[key]
    part.result = tree_unflatten(leaves, tree)


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in tree_leaves(result) if isinstance(x, Tensor)]


def _adds_up(wanted: Ran, parts: Sequence[Ran]) -> tuple[list[bool | None], set[str]]:
    """Whether each tensor that is returned is the same in all parts, and not a sum, None for zeros, which are either;
    and the attributes with a graph that are the same.

    Raises:
        NotAdditive: anything is neither.
    """
    returned, trees = zip(*(tree_flatten(ran.result) for ran in (wanted, *parts)), strict=True)
    if any(tree != trees[0] for tree in trees):
        raise NotAdditive("its parts return something else than the whole")
    same: list[bool | None] = []
    for x, *of_parts in zip(*returned, strict=True):
        if _alike(x, of_parts):
            zeros = isinstance(x, Tensor) and not x.any()
            if zeros and x.requires_grad:
                raise NotAdditive("it returns zeros, of which it can't be known whether they are a sum")
            same += [None if zeros else True] if isinstance(x, Tensor) else []
        elif isinstance(x, Tensor) and x.is_floating_point() and all(_fits(x, part) for part in of_parts):
            if not _close(sum(of_parts[1:], of_parts[0]), x, of_parts):
                raise NotAdditive(NOT_A_SUM)
            same.append(False)
        else:
            raise NotAdditive("its parts return something else than the whole")
    for name, buffer in wanted.buffers.items():
        if not _alike(buffer, [part.buffers.get(name) for part in parts]):
            raise NotAdditive(f"its buffer `{name}` would be another on each rank")
    left = set()
    for name, value in wanted.kept.items():
        if not _alike(value, [part.kept.get(name) for part in parts]):
            raise NotAdditive(f"what it leaves in `{name}` would be another on each rank")
        if isinstance(value, Tensor) and value.requires_grad:
            left.add(name)
        elif any(x.requires_grad for x in tensors_anywhere_in(value)):
            raise NotAdditive(f"it leaves tensors with a graph in `{name}`")
    return same, left


def _drawn_alike(wanted: Ran, parts: Sequence[Ran]) -> set[bool]:
    """Whether draws of random numbers are the same for the whole and all parts: the answers, over all draws."""
    each = list(zip(wanted.drew, *(part.drew for part in parts), strict=True))
    return {all(drawn == draws[0] for drawn in draws) for draws in each}


def _fits(x: Tensor, part: Any) -> bool:
    return isinstance(part, Tensor) and part.shape == x.shape


def _alike(x: Any, parts: Sequence[Any]) -> bool:
    """Whether parts have what the whole has."""
    if isinstance(x, Tensor):
        return all(_fits(x, y) and torch.allclose(x.double(), y.double(), rtol=_CLOSE, atol=_CLOSE) for y in parts)
    if isinstance(x, PLAIN):
        return all(type(x) is type(y) and x == y for y in parts)
    tensors = [tensors_anywhere_in(value) for value in (x, *parts)]
    return len(set(map(len, tensors))) == 1 and all(_alike(y, z) for y, *z in zip(*tensors, strict=True))
