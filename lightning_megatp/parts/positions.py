"""Rows and columns by their numbers (`grad[:100] = 0`), in hooks, where a tensor rank has some of the rows, and counts
its own. Values put there go where they belong; what else is written so is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.tensor.functions import argument, is_in_place, operation_names

_DIM_FIRST = operation_names(
    """
    narrow select index_select gather take_along_dim index_fill index_fill_ index_copy index_copy_ index_add index_add_
    index_reduce_ scatter scatter_ scatter_add_ select_scatter slice_scatter unbind
    """
)
"""Operations that take a dim, and positions along it."""
_DIM_SECOND = operation_names("split split_with_sizes chunk tensor_split")
"""Whose dim comes after these."""
_BY_POSITION = _DIM_FIRST | _DIM_SECOND | operation_names("__getitem__ __setitem__")
_COPIES = operation_names("index_select gather take_along_dim")
_RESHAPES = operation_names("view reshape unflatten view_as reshape_as")
_OTHER = object()
_ALL = (slice(None), slice(0, None), slice(None, None, 1))


class Positions:
    """What the hooks of one moment do by position.

    Args:
        rank: in the tensor group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._views: Any = WeakIdKeyDictionary()
        """Some of this rank's rows -> whose they are."""
        self._reshaped: Any = WeakIdKeyDictionary()
        """This rank's rows in a shape of more dims -> whose they are, and the first dim of those that rows became
        (heads)."""

    def concern(self, name: str) -> bool:
        """Whether an operation may be one of those that the others look for."""
        return name in _BY_POSITION or name in _RESHAPES or bool(self._views or self._reshaped)

    def follow(self, what: str, spec: ShardedTensorSpec | None, name: str, args: Any, result: Any) -> None:
        """After an operation.

        Args:
            what, spec, name, args: as for `carry_out`.
            result: of the operation.
        """
        if not isinstance(result, Tensor):
            return
        if name in _RESHAPES and spec is not None and (dim := _dim_of_heads(result, spec, self._rank)) is not None:
            self._reshaped[result] = what, dim
        elif self._reshaped and name not in _RESHAPES:
            same = (x for x in args if isinstance(x, Tensor) and x in self._reshaped and x.shape == result.shape)
            if (x := next(same, None)) is not None and x is not result:
                self._reshaped[result] = self._reshaped[x]

    def check_meeting(self, given: Iterable[Any]) -> None:
        """Refuse that heads, counted by a rank, meet numbers for each head, which are those of all ranks.

        Args:
            given: to an operation.

        Raises:
            RuntimeError: it would do that.
        """
        if not self._reshaped:
            return
        tensors = [x for x in given if isinstance(x, Tensor)]
        of_heads = next((x for x in tensors if x in self._reshaped), None)
        if of_heads is None:
            return
        what, dim = self._reshaped[of_heads]
        for x in tensors:
            at = dim - of_heads.dim()
            if x not in self._reshaped and x.dim() >= -at and x.shape[at] > 1:
                raise _refused("puts other numbers beside its rows in another shape (heads)", what)

    def carry_out(
        self, what: str, spec: ShardedTensorSpec | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        """Look at an operation, before it is done.

        Returns:
            "done" if it was done here; "read" if it is about a part of the rows; "" for any other.

        Args:
            what: the tensor that is the first argument, for messages.
            spec: of it; None if it is not split, or not all of what this rank has.
            name: of the operation.
            args: of the operation.
            kwargs: likewise.

        Raises:
            RuntimeError: it writes by position what can't be told apart.
        """
        x = args[0] if args else None
        if spec is None or not isinstance(x, Tensor) or name not in _BY_POSITION:
            return ""
        own = spec.spec(self._rank).local_shape
        if tuple(x.shape) != own:
            return self._of_reshaped(what, name, args) if x.numel() == math.prod(own) else ""
        if name in ("__getitem__", "__setitem__"):
            index = _at(args[1], spec)
            if index is None or name == "__getitem__":
                return "" if index is None else "read"
            if index is _OTHER or (isinstance(args[2], Tensor) and args[2].dim() > 0):
                raise _refused("writes rows or columns by their numbers", what)
            return self._put(x, spec, index, args[2])
        if _dim(name, args, kwargs) % len(spec.shape) != spec.dim:
            return ""
        if name == "index_fill_" and len(args) == 4:
            return self._put(x, spec, args[2], args[3])
        if is_in_place(name):
            raise _refused(f"writes rows or columns by their numbers (`{name}`)", what)
        return "read"

    def _of_reshaped(self, what: str, name: str, args: tuple[Any, ...]) -> str:
        """`carry_out` for a tensor with all elements that this rank has, in another shape."""
        index = args[1:2] if name in ("__getitem__", "__setitem__") else ()
        if index and all(map(_is_all, index[0] if isinstance(index[0], tuple) else index)):
            return ""
        if is_in_place(name):
            raise _refused("writes elements by their numbers", what)
        return "read"

    def note(self, what: str, name: str, made: Any) -> None:
        """What was read by position: nobody may write there."""
        for x in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(x, Tensor) and name not in _COPIES:
                self._views[x] = what

    def check_view(self, x: Any) -> None:
        """Refuse to change what was read by position.

        Raises:
            RuntimeError: an operation is about to.
        """
        what = self._views.get(x) if isinstance(x, Tensor) else None
        if what is not None:
            raise _refused("changes some of its rows or columns, by their numbers,", what)

    def _put(self, x: Tensor, spec: ShardedTensorSpec, index: Any, value: Any) -> str:
        chosen = torch.zeros(spec.shape[spec.dim], dtype=torch.bool)
        chosen[index.cpu() if isinstance(index, Tensor) else index] = True
        own = torch.cat([chosen[start:stop] for start, stop in spec.by_rank[self._rank]] or [chosen[:0]])
        x[(slice(None),) * spec.dim + (own.to(x.device),)] = value
        return "done"


def _dim_of_heads(reshaped: Tensor, spec: ShardedTensorSpec, rank: int) -> int | None:
    """The first dim of those that the split one has become in another shape of all that a rank has; None if it is one
    still."""
    own, n = spec.spec(rank).local_shape, 1
    for dim, size in enumerate(reshaped.shape):
        if n == math.prod(own[: spec.dim]):
            return None if size == own[spec.dim] or reshaped.numel() != math.prod(own) else dim
        n *= size
    return None


def _at(index: Any, spec: ShardedTensorSpec) -> Any:
    """The entry of an index that is about the dim which is split; None if it takes all there, `_OTHER` if it is not the
    only one that chooses."""
    entries = index if isinstance(index, tuple) else (index,)
    taken = [0 if x is None else x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in entries]
    rest = len(spec.shape) - sum(n for x, n in zip(entries, taken, strict=True) if x is not Ellipsis)
    dim, found, others = 0, None, False
    for x, n in zip(entries, taken, strict=True):
        n = rest if x is Ellipsis else n
        if dim <= spec.dim < dim + n and not _is_all(x):
            found, others = x, others or n > 1
        elif not _is_all(x):
            others = True
        dim += n
    return _OTHER if found is not None and others else found


def _is_all(x: Any) -> bool:
    """Whether an entry of an index chooses nothing."""
    return x is None or x is Ellipsis or (isinstance(x, slice) and x in _ALL)


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    found = argument(args, kwargs, 2 if name in _DIM_SECOND else 1, "dim", default=0)
    return found if isinstance(found, int) else 0


def _refused(does: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"MegaTPStrategy: a hook {does} of `{what}`, of which each tensor rank holds a part: these numbers count that"
        " part's. A number may be put there (`x[rows] = 0`). For the rest work on whole weights, on all ranks, inside"
        " of `with self.trainer.strategy.whole_parameters():`; or on a gradient in a hook of `register_hook`, which is"
        " given the whole one."
    )
