"""Where modules hold tensors that their own forwards may change: buffers, plain attributes, small frozen parameters
(the vectors of an old-fashioned spectral norm)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_LARGE = 2**20
"""Bytes of a frozen parameter from which it is taken for a weight, which nothing changes."""


@dataclass(frozen=True)
class Place:
    """Where a module has a tensor.

    Args:
        module: which has it.
        holder: `_buffers` or `_parameters`; "" for plain attributes.
        leaf: its name there.
    """

    module: nn.Module
    holder: str
    leaf: str

    @property
    def value(self) -> Tensor | None:
        """What is there."""
        found = dict.get(self._dict, self.leaf)
        return found if isinstance(found, Tensor) else None

    def put(self, value: Tensor) -> None:
        """Replace it; nothing is copied."""
        dict.__setitem__(self._dict, self.leaf, value)

    @property
    def _dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = getattr(self.module, self.holder) if self.holder else vars(self.module)
        return found


def buffer_at(module: nn.Module, name: str) -> Place | None:
    """The place of a buffer, by its name; None where there is none."""
    path, _, leaf = name.rpartition(".")
    try:
        holder = module.get_submodule(path)
    except AttributeError:
        return None
    return Place(holder, "_buffers", leaf) if leaf in holder._buffers else None


def changeable(module: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """The places of one module's tensors that may change, without its submodules', and what is there."""
    for holder, tensors in (("_buffers", module._buffers), ("_parameters", module._parameters), ("", vars(module))):
        for leaf, x in dict.items(tensors):  # that of a split layer hands out other things by itself
            if isinstance(x, Tensor) and _may_change(x) and (holder != "_parameters" or x.nbytes < _LARGE):
                yield Place(module, holder, leaf), x


def address(x: Tensor) -> int:
    """Where the values of a tensor lie; of one that has no one place for them (a sparse one), a number of its own."""
    return x.data_ptr() if x.layout is torch.strided else id(x)


def copy_of(x: Tensor) -> Tensor:
    """Without gradient, and of the same class."""
    copy = x.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(x, nn.Parameter) else copy


def is_same(x: Tensor | None, copy: Tensor) -> bool:
    """Whether a tensor still has the values of its copy."""
    return x is not None and x.shape == copy.shape and x.dtype == copy.dtype and torch.equal(x, copy)


def _may_change(x: Tensor) -> bool:
    is_plain = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return is_plain and not x.requires_grad and not x.is_meta
