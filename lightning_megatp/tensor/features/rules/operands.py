"""What rules share: reading a call, and bringing its operands to the same features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_megatp.plan.ranges import ByRank, contains, positions
from lightning_megatp.tensor.features.call import Call, Operand, Rule
from lightning_megatp.tensor.features.decision import Action, Enter, Pick, Scatter


def either(first: Rule, second: Rule) -> Rule:
    """The second rule where the first one doesn't know."""
    return lambda call: first(call) or second(call)


def single(call: Call) -> Operand | None:
    """The first argument, if it is the only tensor and sharded."""
    x = call.args[0] if call.args else None
    return x if isinstance(x, Operand) and x.sharded and len(call.operands) == 1 else None


def beside(call: Call) -> list[Action | None] | None:
    """What is done with the operands of an operation on its first one alone; None if another one is sharded too."""
    if not call.operands[0].sharded or any(x.sharded for x in call.operands[1:]):
        return None
    return [Enter(call.layout.context) if x.layout is None else None for x in call.operands]


def agree(call: Call) -> bool:
    """Whether all sharded operands are sharded on the same dim."""
    found = {(x.layout.dim, x.layout.size) for x in call.operands if x.layout is not None and x.sharded}
    return len(found) == 1


def align(call: Call, dims: Sequence[int | None]) -> tuple[list[Action | None], ByRank] | None:
    """Bring all operands to the same features: those that all sharded ones hold.

    Args:
        dims: for each operand where it spans the sharded dim; None where it doesn't.
    """
    sharded = [x.layout for x in call.operands if x.layout is not None and x.sharded]
    size = sharded[0].size
    chosen = next((a.by_rank for a in sharded if all(contains(b.by_rank, a.by_rank) for b in sharded)), None)
    if chosen is None:
        return None
    actions: list[Action | None] = []
    for x, dim in zip(call.operands, dims, strict=True):
        if dim is None:
            if x.sharded:
                return None
            actions.append(Enter(call.layout.context) if x.layout is None else None)
            continue
        fits, action = fit(call, x, dim, chosen, size)
        if not fits:
            return None
        actions.append(action)
    return actions, chosen


def fit(call: Call, x: Operand, dim: int, by_rank: ByRank, size: int) -> tuple[bool, Action | None]:
    """How an operand that spans the sharded dim comes to the features of `by_rank`; (False, None) if it can't."""
    if x.layout is None:
        return True, Scatter(call.layout.context, dim, by_rank)
    if x.layout.replicated:
        return True, Pick(dim, by_rank[call.rank])
    if (x.layout.dim, x.layout.size) != (dim, size) or not contains(x.layout.by_rank, by_rank):
        return False, None
    if x.layout.by_rank == by_rank:
        return True, None
    return True, Pick(dim, positions(x.layout.by_rank[call.rank], by_rank[call.rank]) or ())


def broadcast_dims(call: Call, dim: int, size: int) -> list[int | None] | None:
    dims: list[int | None] = []
    for x in call.operands:
        spans = x.ndim >= -dim and x.shape[dim] != 1
        if spans and x.shape[dim] != size:
            return None
        dims.append(dim if spans or x.sharded else None)
    return dims


def dims_of(x: Operand, given: Any) -> list[int] | None:
    """Dims counted from the last."""
    values = [given] if isinstance(given, int) else given
    if isinstance(given, bool) or not isinstance(values, (tuple, list)):
        return None
    if not all(isinstance(dim, int) and -x.ndim <= dim < x.ndim for dim in values):
        return None
    return [dim if dim < 0 else dim - x.ndim for dim in values]


def sizes_of(call: Call, *names: str) -> list[int] | None:
    """Sizes given as one sequence or one by one."""
    given = call.args[1:] or tuple(call.kwargs[name] for name in names if name in call.kwargs)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    return list(given) if all(isinstance(size, int) for size in given) else None
