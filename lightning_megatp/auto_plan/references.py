"""By which calls a block is compared with its parts: every way in which it was seen to be called, and others that
models take besides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.auto_plan.blocks import Block, Call
from lightning_megatp.auto_plan.compare import Reference
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.thin import block_copy, concrete_call, thin_copy
from lightning_megatp.plan.layer import UserOperation
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.functions import LOOKS_AT_GRADIENT, couples, done_by_user, operation_name

_HIDDEN = -1e3
"""Added to the score of a hidden token."""


def references_of(twin: nn.Module, block: Block) -> list[Reference]:
    """What a thin copy of a block computes."""
    found = list(_of_calls(twin, block.calls))
    return [*found, *_other_ways(twin, block, found[0])]


def _of_calls(twin: nn.Module, calls: Sequence[Call]) -> Iterator[Reference]:
    """Training and evaluation; other calls, if they differ in more than values; and the first without its masks, where
    the block runs without them."""
    for train in (True, False):
        yield Reference(twin, calls[0], train)
    seen = [calls[0].describe()]
    for call in calls[1:]:
        if call.describe() not in seen:
            seen.append(call.describe())
            yield Reference(twin, call)
    for other in (x for call in calls for x in _other_masks(call)):
        if other.describe() not in seen:
            try:
                yield Reference(twin, other)
            except Exception:
                continue  # not what it takes
            seen.append(other.describe())


def _other_ways(twin: nn.Module, block: Block, first_reference: Reference) -> Iterator[Reference]:
    """What blocks of a kind compute by other operations than the first one does: by plain values that they are given,
    or by the number that counts them."""
    known = [_path(twin, block.calls[0])]
    first = block.counts[0] if block.counts else {}
    paths = {key.lstrip("."): key for key in first}
    read = set(paths)
    with contextlib.suppress(Exception):  # a class may not let itself be watched
        read = first_reference.reads(paths) if paths else read
    numbers = [
        (paths[name], n)
        for counts in block.counts
        for name in sorted(read)
        if (n := counts[paths[name]]) != first[paths[name]]
    ]
    for key, number in (("", 0), *dict.fromkeys(numbers)):
        other = block_copy(twin)
        if key:
            module, _, attribute = key.rpartition(".")
            vars(other.get_submodule(module))[attribute] = number
        for call in (block.calls[0], *block.other_calls):
            try:
                way = _path(other, call)
            except Exception:
                continue  # not what it takes
            if way not in known:
                known.append(way)
                yield Reference(other, call)


def couplings(references: Sequence[Reference]) -> Iterator[UserOperation]:
    """What a block does by these that looks at several elements at once, or lets code see a gradient."""
    for reference in references:
        for train in (True, False):
            with contextlib.suppress(Exception):  # it may not be what it takes in this mode
                yield from _done_in(reference.twin, reference.call, train)


def looks_at_gradients(references: Sequence[Reference]) -> bool:
    """Whether code of a block keeps gradients of tensors (`retain_grad`), or has hooks on them that look at several of
    their elements. By the numbers with which a block is tried these may come to nothing: a limit, a log."""
    return any(_looks_at_gradients(reference) for reference in references)


def _looks_at_gradients(reference: Reference) -> bool:
    own = concrete_call(reference.call, seed=0, noise=0.1)
    with contextlib.suppress(Exception), exact(), _Operations() as seen:  # it may be any code
        outputs = block_copy(reference.twin)(*own.args, **own.kwargs)
        if not LOOKS_AT_GRADIENT.isdisjoint(name for name, _, _ in seen.done):
            sums = [x.sum() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
            kept = any(name == "retain_grad" for name, _, _ in seen.done)
            seen.done.clear()
            torch.autograd.backward(sums)
            return kept or any(couples(name) for name, _, _ in seen.done)
    return False


def attentions_in(module: nn.Module) -> set[str]:
    """The names of the nn.MultiheadAttention in a module."""
    return {name for name, child in module.named_modules() if type(child) is nn.MultiheadAttention}


def attentions_called(block: Block) -> set[str]:
    """The names of the nn.MultiheadAttention in a block that it calls; of all of them, where it can't be run. Others
    are there for their weights."""
    inside = attentions_in(block.module)
    if not inside or not block.calls:
        return inside
    called = set[str]()
    try:
        twin = thin_copy(block.module, seed=0)
        for name in inside:
            twin.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
        call = concrete_call(block.calls[0], 0)
        with exact(), torch.no_grad():
            twin(*call.args, **call.kwargs)
    except Exception:  # it may be any code
        return inside
    return called


def _other_masks(call: Call) -> Iterator[Call]:
    """The call without its masks, and with masks where it has none: models take other paths then. An added mask is the
    one that attention adds to its scores, (rows, 1, tokens, tokens), of this sequence or of another that is given."""
    given = [key for key, x in call.kwargs.items() if "mask" in key and x is not None]
    if given:
        yield Call(call.args, {**call.kwargs, **dict.fromkeys(given)})
    hidden = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
    lengths = list(dict.fromkeys(x.shape[1] for x in hidden if x.dim() == 3 and x.shape[0] == hidden[0].shape[0]))
    for key in [key for key, x in call.kwargs.items() if "mask" in key and x is None]:
        for tokens in reversed(lengths):
            mask = torch.zeros(hidden[0].shape[0], 1, lengths[0], tokens, dtype=torch.float64)
            mask[0, ..., -1] = _HIDDEN
            yield Call(call.args, {**call.kwargs, key: mask})


def _path(twin: nn.Module, call: Call) -> list[Any]:
    """The operations by which a thin block in training computes a call, and the shapes of what they return."""
    return _watched(twin, call, train=True).found


def _done_in(twin: nn.Module, call: Call, train: bool) -> set[UserOperation]:
    """The operations by which a thin block computes a call, each with the user's line that calls it."""
    return _watched(twin, call, train).done


def _watched(twin: nn.Module, call: Call, train: bool) -> _Operations:
    own = concrete_call(call, seed=0, noise=0.1)
    with exact(), _Operations() as seen:
        block_copy(twin, train)(*own.args, **own.kwargs)
    return seen


class _Operations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.done: set[UserOperation] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = operation_name(func)
        if name == "register_hook" and len(args) > 1:
            args = (args[0], self._seen(args[1]), *args[2:])
        result = func(*args, **(kwargs or {}))
        self.found.append((name, [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)]))
        if couples(name) or name in LOOKS_AT_GRADIENT:
            self.done.add(done_by_user(name))
        return result

    def _seen(self, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A hook whose operations are noted, too: backward runs it outside of modes."""

        def run(gradient: Tensor) -> Any:
            with self:
                return hook(gradient)

        return run
