"""Rules of products: matmul, linear, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_megatp.tensor.einsum import labels_of
from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.rules.operands import align


def matmul(call: Call) -> Decision | None:
    if len(call.operands) != 2 or not all(x.ndim for x in call.operands):
        return None
    x, y = call.operands if call.name != "__rmatmul__" else call.operands[::-1]
    left = ["k"] if x.ndim == 1 else [*_batch(x), "m", "k"]
    right = ["k"] if y.ndim == 1 else [*_batch(y), "k", "n"]
    out = max(_batch(x), _batch(y), key=len) + ["m"] * (x.ndim > 1) + ["n"] * (y.ndim > 1)
    return contract(call, [left, right] if x.position == 0 else [right, left], out)


def add_matmul(call: Call) -> Decision | None:
    """baddbmm and addmm: another operand is added to the product."""
    if len(call.operands) != 3:
        return None
    out = ["b", "m", "n"] if "b" in call.name else ["m", "n"]
    batch = out[:-2]
    added = call.operands[0]
    if added.ndim > len(out):
        return None
    return contract(call, [out[len(out) - added.ndim :], [*batch, "m", "k"], [*batch, "k", "n"]], out)


def linear(call: Call) -> Decision | None:
    x, *rest = call.operands
    if not rest or rest[0].ndim != 2:
        return None
    out = [*range(-x.ndim, -1), "n"]
    return contract(call, [[*range(-x.ndim, -1), "k"], ["n", "k"], ["n"]][: len(call.operands)], out)


def outer(call: Call) -> Decision | None:
    return contract(call, [["m"], ["n"]], ["m", "n"]) if len(call.operands) == 2 else None


def einsum(call: Call) -> Decision | None:
    found = labels_of(call.args[0] if call.args else None, [x.ndim for x in call.operands])
    return None if found is None else contract(call, *found)


def contract(call: Call, labels: Sequence[Sequence[Any]], out: Sequence[Any]) -> Decision | None:
    """A product of operands whose dims carry labels, as in an einsum: local if the sharded dim is in the result."""
    found = {labels[x.position][x.layout.dim] for x in call.operands if x.layout is not None and x.sharded}
    label = found.pop()
    if found or label not in out or any(own.count(label) > 1 for own in labels):
        return None
    size = call.layout.size
    dims: list[int | None] = []
    for x, own in zip(call.operands, labels, strict=True):
        dim = own.index(label) - len(own) if label in own else None
        if dim is not None and x.shape[dim] not in (1, size):
            return None
        dims.append(dim if dim is not None and (x.shape[dim] == size or x.sharded) else None)
    aligned = align(call, dims)
    if aligned is None:
        return None
    return Decision(call.layout.with_(out.index(label) - len(out), aligned[1], size), aligned[0])


def _batch(x: Operand) -> list[Any]:
    """Labels of all dims but the last two, as broadcasting pairs them."""
    return list(range(-x.ndim, -2))
