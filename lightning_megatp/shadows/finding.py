"""Which lists and dicts of the user's hold a tensor for each weight of the module, or of a part of it.

`[p.detach().clone() for p in self.net.parameters()]` can't be told by name, but by its shapes: those of a module's
parameters, all of them, one after another (`itertools.chain` may have put several modules' together). Where several
modules have these shapes, the one with these values is meant.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.parts.rows import own_part
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.snapshots.leftovers import is_own_object

Shapes = tuple[tuple[int, ...], ...]
Named = Sequence[tuple[str, Tensor]]
Choice = Callable[[list[Named], Sequence[Tensor]], list[Named]]
"""Chooses, of the lists with the shapes of the next tensors, the longest first, the one that is meant; or several."""
BUFFERS = "_buffers"
"""Where a module has those: latent diffusion's LitEma keeps its averages so."""
_MOST = 10_000
"""Entries of a container that is looked into."""


@dataclass(frozen=True)
class Found:
    """A list or dict of tensors, one for each weight of a module."""

    path: str
    """Where it was found, for people, and the same on all ranks: `ema.shadow_params`."""
    holder: Any
    """The dict (an object's attributes, mostly) or list that has it as an entry."""
    key: Any
    names: Mapping[Any, str]
    """Key or index of an entry -> name of its weight in the module."""
    buffers: bool = False
    """Whether some are names of buffers, as a state dict has them too."""

    @property
    def tensors(self) -> list[Tensor]:
        """In their order."""
        value = self.holder[self.key]
        return [value[key] for key in self.names]


def find_shadows(owners: Mapping[str, Any], weights: Weights) -> tuple[list[Found], list[str]]:
    """Find the lists and dicts of tensors that go with the weights of a module, one by one.

    Args:
        owners: by name, what is looked into: the module, and callbacks.
        weights: of the module.

    Returns:
        What was found; and the paths of what may belong to several modules, which can't be told apart.
    """
    found, unclear = list[Found](), list[str]()
    for path, holder, key, value in _containers(owners):
        entries = {k: x for k, x in _items(value) if key != BUFFERS or (x is not None and x.dim() > 0)}
        if len(entries) < 2 or max(x.dim() for x in entries.values()) < 2:
            continue
        named = weights.like(list(entries.values()))
        if named is None:
            unclear.append(path)
        elif named:
            names = {k: name for k, (name, _) in zip(entries, named, strict=True)}
            buffers = not all(isinstance(x, nn.Parameter) for _, x in named)
            found.append(Found(path, holder, key, names, buffers))
    return found, unclear


class Weights:
    """The lists of tensors that each part of a module has: its parameters, those that are trained, and all that is in
    its state dict.

    Args:
        module: the whole; or what a rank holds of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @functools.cached_property
    def _by_first(self) -> dict[Any, list[tuple[Shapes, Named]]]:
        return _by_first(_lists(self._module))

    def without_values(self) -> Weights:
        """The names and shapes of these tensors, for after the module was divided."""
        same: dict[int, Tensor] = {}

        def bare(x: Tensor) -> Tensor:
            if id(x) not in same:
                meta = torch.empty(x.shape, dtype=x.dtype, device="meta")
                same[id(x)] = nn.Parameter(meta, x.requires_grad) if isinstance(x, nn.Parameter) else meta
            return same[id(x)]

        made = copy.copy(self)
        made._by_first = {
            first: [(shapes, [(name, bare(x)) for name, x in named]) for shapes, named in lists]
            for first, lists in self._by_first.items()
        }
        return made

    def like(self, tensors: Sequence[Tensor]) -> Named | None:
        """The weights of a part, or of several one after another, that have these values, or else these shapes; none;
        or None where several parts have these shapes."""
        return self._follow(tensors, _of_values) or self._follow(tensors, _of_shapes)

    def _follow(self, tensors: Sequence[Tensor], choose: Choice) -> Named | None:
        found: dict[str, Tensor] = {}
        shapes, at = _shapes(tensors), 0
        while at < len(tensors):
            fitting = [named for of, named in self._by_first.get(shapes[at], ()) if of == shapes[at : at + len(of)]]
            chosen = choose([named for named in fitting if _are_alike(tensors[at:], named)], tensors[at:])
            if len(chosen) != 1:
                return None if chosen or found else []
            at += len(chosen[0])
            found.update(chosen[0])
        return list(found.items()) if len(found) == len(tensors) else []


def _lists(module: nn.Module) -> Iterable[Named]:
    found: dict[tuple[int, ...], Named] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        parameters = [(prefix + name, p) for name, p in part.named_parameters()]
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        every: tuple[Named, ...] = (parameters, trained, list(_state(path, part)))
        for named in every:
            found.setdefault(tuple(id(x) for _, x in named), named)
    return found.values()


def _by_first(lists: Iterable[Named]) -> dict[Any, list[tuple[Shapes, Named]]]:
    """Shape of the first -> the lists, the longest first, with all shapes."""
    found: dict[Any, list[tuple[Shapes, Named]]] = {}
    for named in sorted(filter(None, lists), key=len, reverse=True):
        shapes = _shapes(x for _, x in named)
        found.setdefault(shapes[0], []).append((shapes, named))
    return found


def _of_values(fitting: list[Named], tensors: Sequence[Tensor]) -> list[Named]:
    return [named for named in fitting if _equal(tensors, named)][:1]


def _of_shapes(fitting: list[Named], tensors: Sequence[Tensor]) -> list[Named]:
    """A single tensor of some shape means nothing."""
    return [named for named in fitting if len(named) == len(fitting[0]) > 1]


def _are_alike(tensors: Sequence[Tensor], named: Named) -> bool:
    """Whether they are of one kind: what follows weights is not of whole numbers (a batch and its labels may have the
    shapes of a layer), nor are parts of a DTensor's shape the whole."""
    return all(
        (x.is_floating_point() or not y.is_floating_point()) and isinstance(x, DTensor) == isinstance(y, DTensor)
        for x, (_, y) in zip(tensors, named, strict=False)
    )


def _state(path: str, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a state dict has, in its order."""
    for name, child in part.named_modules(prefix=path, remove_duplicate=False):
        left_out = child._non_persistent_buffers_set
        buffers = ((leaf, x) for leaf, x in child._buffers.items() if leaf not in left_out)
        for leaf, x in (*child._parameters.items(), *buffers):
            if x is not None:
                yield f"{name}.{leaf}" if name else leaf, x


def _shapes(tensors: Iterable[Tensor]) -> Shapes:
    return tuple(tuple(x.shape) for x in tensors)


@torch.no_grad()
def _equal(tensors: Iterable[Tensor], named: Named) -> bool:
    """Whether the first of the tensors have these values."""
    pairs = [(own_part(x), own_part(y)) for x, (_, y) in zip(tensors, named, strict=False)]
    if any(y.is_meta or is_fake(y) for _, y in pairs):
        return False
    return all(torch.equal(x, y.to(x)) for x, y in pairs)


def _containers(owners: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Path, holder, key and value of every list and dict of tensors."""
    waiting: list[tuple[str, Any]] = [(name, owner.__dict__) for name, owner in owners.items()][::-1]
    seen: set[int] = set()
    while waiting:
        path, holder = waiting.pop()
        if id(holder) in seen or len(holder) > _MOST:
            continue
        seen.add(id(holder))
        further = []
        for key, value in list(_items(holder)):
            below = path if key == "_modules" else f"{path}.{key}" if path else str(key)
            if isinstance(value, (list, dict)):
                if _of_tensors(value, key) and id(value) not in seen:
                    seen.add(id(value))
                    yield below, holder, key, value
                else:
                    further.append((below, value))
            elif isinstance(value, nn.Module) or is_own_object(value):
                further.append((below, value.__dict__))
        waiting += reversed(further)


def _of_tensors(value: Any, key: Any) -> bool:
    """Whether it holds nothing else, and no parameters, which are the module's."""
    if len(value) > _MOST:
        return False
    tensors = [x for _, x in _items(value) if not (key == BUFFERS and x is None)]
    return bool(tensors) and all(
        isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and not is_fake(x) for x in tensors
    )


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)
