"""In which regions a loss uses each parameter, read off its autograd graph.

A parameter used where each rank holds other features or other tokens gets a partial gradient, to be summed over the
tensor ranks; used where values are whole it gets the full one. Rather than guess, walk the real graph of a step once,
from the loss to the leaves, and change region at the marks that the collectives left (`region_above`, `region_below`;
`crossing_input` where one input alone is in the lower region).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_megatp.shim.autograd import accumulated_parameter
from lightning_megatp.shim.fsdp import is_post_backward


@dataclass
class Lineage:
    """What a walk found."""

    regions: dict[int, set[str]] = field(default_factory=dict)
    """id(leaf) -> the regions in which it is used: "whole", "tensor", "sequence"."""
    leaves: dict[int, Tensor] = field(default_factory=dict)
    uses: dict[int, list[Any]] = field(default_factory=dict)
    """id(leaf) -> its uses on tokens of this rank that complete its gradient themselves (`use_on_tokens`)."""
    edges: dict[int, dict[tuple[Any, int], set[str]]] = field(default_factory=dict)
    """id(leaf) -> (node, input) of each use -> its regions, if these were asked for."""
    hidden: bool = False
    """Whether a part of the graph will only be built during backward (reentrant activation checkpointing)."""
    crossings: set[tuple[str, str]] = field(default_factory=set)
    """(found, expected): a value of one region used in another without passing an entry or exit."""


def trace_regions(outputs: Iterable[Tensor], edges: bool = False, region: str = "whole") -> Lineage:
    """Walk the graph from the outputs of a step. Nodes of the user's own autograd functions are told their region, for
    graphs that they may make in backward: `region_of`.

    Args:
        outputs: tensors with or without a graph, usually the loss.
        edges: also note the single uses of leaves.
        region: in which the outputs live.

    Returns:
        The regions of every leaf that requires a gradient. No communication, no computation on tensors.
    """
    lineage = Lineage()
    todo: list[tuple[Any, str]] = [(x.grad_fn, region) for x in outputs if x.grad_fn is not None]
    seen = set(todo)  # holds the nodes alive: their wrappers, and so their identity, last as long as a reference does
    while todo:
        node, region = todo.pop()
        kind = _kind(type(node))  # type: ignore[arg-type]
        below, crossing = region, None
        if kind == "function":
            above = getattr(node, "region_above", None)
            if above is not None:
                if above != region:
                    lineage.crossings.add((above, region))
                below, crossing = node.region_below, getattr(node, "crossing_input", None)
                if hasattr(node, "completes") and _note_use(node, lineage):
                    continue
            else:
                node.metadata["region"] = region
        elif kind == "leaf":
            leaf = accumulated_parameter(node)
            if leaf is not None:
                lineage.leaves[id(leaf)] = leaf
                lineage.regions.setdefault(id(leaf), set()).add(region)
            continue
        elif kind == "reentrant":
            lineage.hidden = True
        for i, (parent, output) in enumerate(node.next_functions):
            while parent is not None and _kind(type(parent)) == "each":  # type: ignore[arg-type]
                parent, output = parent.next_functions[output]
            if parent is None:
                continue
            step = (parent, below if crossing is None or crossing == i else region)
            if edges and hasattr(parent, "variable"):
                uses = lineage.edges.setdefault(id(accumulated_parameter(parent)), {})
                uses.setdefault((node, i), set()).add(step[1])
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return lineage


def region_of(node: Any) -> str:
    """The region of an autograd function's node, as the last walk found it; "whole" for others."""
    return str(node.metadata.get("region", "whole")) if isinstance(node, BackwardCFunction) else "whole"


def _note_use(node: Any, lineage: Lineage) -> bool:
    """Note a use of a leaf, and whether it is one."""
    leaf = accumulated_parameter(node.next_functions[0][0])
    if leaf is not None:
        lineage.leaves[id(leaf)] = leaf
        lineage.uses.setdefault(id(leaf), []).append(node)
    return leaf is not None


@functools.lru_cache(maxsize=1024)
def _kind(kind: type) -> str:
    """The kind of all nodes of a type: an autograd function's in Python, a leaf's, or another that torch itself made.
    Such a walk visits every node of every step, and there are more of the last kind than of the others. The inputs of
    the kind "each" have nothing to do with each other."""
    if kind.__name__ == "CheckpointFunctionBackward":
        return "reentrant"
    if is_post_backward(kind):
        return "each"
    if issubclass(kind, BackwardCFunction):
        return "function"
    return "leaf" if hasattr(kind, "variable") else "other"


def enters_region(x: Tensor) -> bool:
    """Whether a value was computed inside the tensor region it is used in: some path of its graph comes from an entry,
    or from a layer that reads what entered (`is_inside`), before it meets the exit of another region."""
    return any(
        getattr(node, "region_above", None) == "tensor" or hasattr(node, "is_inside") for node in _back_to_marks(x)
    )


def computed_with(x: Tensor, parts: Iterable[Tensor]) -> bool:
    """Whether a value was computed with one of these tensors, inside of the tensor region it is used in."""
    nodes = {part.grad_fn for part in parts} - {None}
    leaves = {id(part) for part in parts if part.grad_fn is None}
    return any(
        node in nodes or (hasattr(node, "variable") and id(accumulated_parameter(node)) in leaves)
        for node in _back_to_marks(x)
    )


def _back_to_marks(x: Tensor) -> Iterator[Any]:
    """The nodes that a value's graph has up to the marks of a region, and these."""
    todo: list[Any] = [] if x.grad_fn is None else [x.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        if getattr(node, "region_above", None) is None:
            new = {parent for parent, _ in node.next_functions if parent is not None} - seen
            seen |= new
            todo += new
