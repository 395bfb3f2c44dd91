"""What a step calls the blocks of a model with, and in which ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import PLAIN, Block, Call, describe, uncompiled_part
from lightning_megatp.auto_plan.copies import copied
from lightning_megatp.detour import entries_replaced
from lightning_megatp.shim.autograd import transforms_are_active
from lightning_megatp.shim.fakes import CopiesFakes, GroupedProductsOnMeta, failures_of_fakes_unlogged, fake_tensor_mode
from lightning_megatp.shim.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten


def capture_calls(module: nn.Module, kinds: list[Block], step: Callable[[], Any]) -> Exception | None:
    """Run a step, and keep what the first block of each kind is called with; and the plain values (how deep it is, a
    flag) that its later calls, and those of other blocks of its kind, are given.

    Further blocks of a kind return what the first did, and once all blocks were called nothing has data any more: the
    cost is that of one block of each kind and of what lies between them.

    Args:
        module: the whole.
        kinds: each gets another entry in its `calls`, and maybe some in `other_calls`.
        step: calls the model, e.g. a training step on one batch.

    Returns:
        What the step raised, if it did, before all kinds were called.
    """
    if not kinds:
        return None
    capture = _Capture(kinds)
    with capture.in_place_of_blocks(module):
        try:
            with (
                torch.enable_grad(),  # which values need a gradient matters
                GroupedProductsOnMeta() if any(p.is_meta for p in module.parameters()) else contextlib.nullcontext(),
                failures_of_fakes_unlogged(),
                capture.without_data,
            ):
                step()
        except Exception as error:
            return None if capture.is_complete else error.with_traceback(None)
    return None


class _Capture:
    """Stands in for the forwards of blocks.

    Args:
        kinds: of blocks.
    """

    def __init__(self, kinds: list[Block]) -> None:
        self._kinds = kinds
        blocks = tuple(f"{name}." for kind in kinds for name in kind.names if not kind.stack)
        awaited = [kind for kind in kinds if not (kind.stack and kind.names[0].startswith(blocks))]  # blocks call these
        self._awaited = set(map(id, awaited))
        self._waiting = {name for kind in awaited for name in kind.names}
        self._known: dict[int, _Known] = {}
        self.without_data = contextlib.ExitStack()
        """Entered when all blocks were called."""

    @property
    def is_complete(self) -> bool:
        """Whether blocks of all kinds were called."""
        return self._awaited <= self._known.keys()

    def in_place_of_blocks(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Meanwhile blocks are recorded. A module may be a block and a stack of experts, and is recorded as both."""
        blocks = ((kind, name, module.get_submodule(name)) for kind in self._kinds for name in kind.names)
        return entries_replaced(
            (vars(block), "forward", self._recorded(kind, name, uncompiled_part(block).forward))
            for kind, name, block in blocks
        )

    def _recorded(self, kind: Block, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = self._result(kind, forward, args, kwargs)
            if name in self._waiting:
                self._waiting.discard(name)
                if not self._waiting:
                    self.without_data.enter_context(fake_tensor_mode(allow_non_fake_inputs=True))
                    self.without_data.enter_context(CopiesFakes())
            return result

        return run

    def _result(self, kind: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a block's forward; for one that is called like another of its kind, what that returned. A
        transform runs it as it is: what it is given lives no longer than that."""
        if transforms_are_active():
            return forward(*args, **kwargs)
        given = _Given.of(args, kwargs)
        dims = (x.dim() for x in given.leaves if isinstance(x, Tensor) and x.is_floating_point())
        kind.least_dims = min(kind.least_dims, max(dims, default=0))
        if id(kind) not in self._known:
            kind.calls.append(Call(*tree_map(copied, (args, kwargs))))
            self._known[id(kind)] = _Known(given, kind.calls[-1])
        of_kind = self._known[id(kind)]
        if given.shapes != of_kind.first.shapes:
            return forward(*args, **kwargs)
        of_kind.note(given, kind)
        if given.flags not in of_kind.results:
            of_kind.results[given.flags] = tree_map(copied, forward(*args, **kwargs))
        return tree_map(_handed_out, of_kind.results[given.flags])


def _handed_out(x: Any) -> Any:
    """A copy for the step, which may change it in place: no leaf, if it needs a gradient."""
    found = copied(x)
    return found.clone() if isinstance(found, Tensor) and found.requires_grad else found


@dataclass(frozen=True)
class _Given:
    """What a call is given."""

    shapes: Any
    """Shapes and types."""
    values: tuple[Any, ...]
    """Its plain values."""
    leaves: list[Any]
    tree: Any

    @classmethod
    def of(cls, args: Any, kwargs: Any) -> _Given:
        leaves, tree = tree_flatten((args, kwargs))
        return cls(describe((args, kwargs)), tuple(x for x in leaves if isinstance(x, PLAIN)), leaves, tree)

    @property
    def way(self) -> Any:
        """What is alike in calls that differ in tensors only."""
        return str(self.tree), self.values

    @property
    def flags(self) -> Any:
        """As `way`, without numbers, on which a block's result depends less often than on other plain values."""
        return str(self.tree), tuple(x for x in self.values if not isinstance(x, (int, float)) or isinstance(x, bool))


class _Known:
    """What is known of a kind of block, in one step.

    Args:
        first: what it was first called with.
        call: that, as it was kept.
    """

    def __init__(self, first: _Given, call: Call) -> None:
        self.first, self._call = first, call
        self.results: dict[Any, Any] = {}
        """What it returned, by flags."""
        self._ways = {first.way}

    def note(self, given: _Given, kind: Block) -> None:
        """Keep a call with other plain values, on the tensors of the first."""
        if given.way in self._ways:
            return
        self._ways.add(given.way)
        tensors = [x for x in tree_leaves((self._call.args, self._call.kwargs)) if isinstance(x, Tensor)]
        if len(tensors) == sum(isinstance(x, Tensor) for x in given.leaves):
            leaves = [tensors.pop(0) if isinstance(x, Tensor) else copied(x) for x in given.leaves]
            kind.other_calls.append(Call(*tree_unflatten(leaves, given.tree)))
