"""What a step does with single samples of a microbatch, and with all of them at once, beside its averages.

A loop over samples (`for x, t in zip(y, target)`) makes a loss of each: numbers to add up, whatever each is a mean of.
And a statistic of all samples (`x.std()`, `loss.topk(k)`, `p.sum(0)`) is the microbatch's in a pipeline, and no mean.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_megatp.shim.torch import viewed
from lightning_megatp.tensor.functions import argument

SLICES = frozenset([Tensor.__iter__, Tensor.__getitem__, torch.unbind, Tensor.unbind])
STATISTICS: dict[str, tuple[int, Any]] = {
    **dict.fromkeys(("std", "var", "std_mean", "var_mean", "max", "min", "amax", "amin", "aminmax"), (1, None)),
    **dict.fromkeys(("median", "nanmedian", "logsumexp", "prod"), (1, None)),
    **dict.fromkeys(("quantile", "nanquantile", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm"), (2, None)),
    **dict.fromkeys(("sort", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp"), (1, -1)),
    **{"topk": (2, -1), "kthvalue": (2, -1), "normalize": (2, 1), "batch_norm": (9, 0)},
}
"""By name, which argument is the dim of a function that is no mean of it, and its default; None for all dims."""
GROUPED = frozenset(["scatter_add", "scatter_add_", "index_add", "index_add_", "scatter_reduce", "scatter_reduce_"])
"""Sums of groups of what they are given."""


class Samples:
    """The tensors of one microbatch that are made of one sample each.

    Args:
        rows: the microbatch's samples; 0 to follow nothing.
        constants: the identities of tensors that are the same for all samples, beside parameters.
    """

    def __init__(self, rows: int, constants: Iterable[int] = ()) -> None:
        self.rows = rows
        self._constants = set(constants)
        self._made_of_constants: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """By their identities."""
        self._of: dict[int, tuple[Tensor, int]] = {}
        """By the identity of a tensor, which is kept alive for it, and the number of its sample."""

    def holds(self, x: Any) -> bool:
        """Whether a tensor has a row per sample. Of one whose rows have as many rows this isn't known: its first dim
        may be that of layers, heads or time."""
        return (
            isinstance(x, Tensor)
            and 0 < self.rows == (x.shape[0] if x.dim() else 0)
            and (x.dim() == 1 or x.shape[1] != self.rows)
            and not self.is_constant(x)
        )

    def is_constant(self, x: Any) -> bool:
        """Whether a tensor is known to be the same for all samples: a parameter, a constant, a view of one, or made of
        such alone."""
        if not isinstance(x, Tensor):
            return False
        of = viewed(x)
        return is_parameter(x) or self._is_known(x) or (of is not None and self._is_known(of))

    def _is_known(self, x: Tensor) -> bool:
        return id(x) in self._constants or self._made_of_constants.get(id(x)) is x

    def note_constant(self, operands: Iterable[Any], result: Any) -> None:
        """After an operation: what it has made of constants alone is one, and what it has changed otherwise is none."""
        given = [x for x in operands if isinstance(x, Tensor)]
        made = [x for x in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(x, Tensor)]
        if given and all(map(self.is_constant, given)):
            self._made_of_constants.update({id(x): x for x in made})
        else:
            self._constants.difference_update(map(id, made))
            for x in made:
                self._made_of_constants.pop(id(x), None)

    def alone(self, operands: Iterable[Any], known: Container[int], adds: bool = False) -> int | None:
        """The sample that an operation is about, if it is about one: others of its operands are constants and weights,
        and no larger than what it has of that sample.

        Args:
            known: the identities of numbers of which more is known, all samples' or one's.
            adds: whether it is an addition: of a sample's number to 0, or to others', is a sum over samples.
        """
        if not self._of:
            return None
        samples, largest, others, number = set(), 0, 0, False
        for x in operands:
            if not isinstance(x, Tensor):
                number = number or isinstance(x, (int, float))
            elif (of := self._of.get(id(x))) is not None:
                samples.add(of[1])
                largest = max(largest, x.numel())
            elif id(x) in known or self.holds(x):
                return None
            elif not is_parameter(x):
                others, number = max(others, x.numel()), number or not x.dim()
        joins = adds and number and largest <= 1
        return None if len(samples) != 1 or others > largest or joins else samples.pop()

    def forget(self, result: Any) -> None:
        """What was changed in place by others."""
        if self._of:
            self._of.pop(id(result), None)

    def note(self, result: Any, sample: int) -> None:
        """What an operation has made of one sample."""
        for x in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(x, Tensor):
                self._of[id(x)] = x, sample

    def cut(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of one of `SLICES`, whose samples are noted; NotImplemented if it does not cut samples apart.
        Numbers are not: a vector of as many may be the weights of losses."""
        if not args or not self.holds(args[0]) or args[0].dim() < 2:
            return NotImplemented
        if func is Tensor.__getitem__:
            index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if type(index) is slice and type(index.start) is int and index.stop == index.start + 1:
                index = index.start  # a microbatch of one sample
            if type(index) is not int:
                return NotImplemented
            result = func(*args)
            self.note(result, index % self.rows)
            return result
        if argument(args, kwargs, 1, "dim", default=0) != 0:
            return NotImplemented
        parts = args[0].unbind(0)
        for i, part in enumerate(parts):
            self.note(part, i)
        return iter(parts) if func is Tensor.__iter__ else parts

    def makes_a_statistic(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function, by its name, joins samples to something that is no mean or sum of all of them."""
        if name in GROUPED:
            return bool(args) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        if name == "batch_norm" and not argument(args, kwargs, 5, "training", "use_input_stats", default=False):
            return False
        return name in STATISTICS and self.reduces(args, kwargs, *STATISTICS[name])

    def reduces(self, args: Sequence[Any], kwargs: Mapping[str, Any], position: int = 1, default: Any = None) -> bool:
        """Whether a function of its first argument joins samples: over dim 0 of one row per sample, or over all of it.

        Args:
            position: of the argument that is a dim.
            default: of that; None for all dims.
        """
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.dim() or self.is_constant(x):
            return False
        dim = argument(args, kwargs, position, "dim", "axis", default=default)
        if isinstance(dim, Tensor):
            return False  # the larger of two
        dims = [dim] if type(dim) is int else dim
        whole = not isinstance(dims, (list, tuple)) or not dims
        if not whole and 0 not in [d % x.dim() for d in dims]:
            return False
        flat = x.dim() == 1 and x.requires_grad and self.rows > 0 and x.shape[0] % self.rows == 0
        return self.holds(x) or flat


def is_parameter(x: Tensor) -> bool:
    """Whether this is a parameter, or a view of one."""
    of = viewed(x)
    return isinstance(x if of is None else of, nn.Parameter)
