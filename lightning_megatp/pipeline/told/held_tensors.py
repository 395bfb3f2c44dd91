"""Tensors that hooks of the last stage set on the module, outside of units: other stages may need them in their part of
the next step (a clipped noise schedule, weights of classes, a threshold)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_megatp.mesh import on_cpu
from lightning_megatp.places import address
from lightning_megatp.shim.torch import tensor_version
from lightning_megatp.snapshots.leftovers import Path, is_own_object

_OF_MODULES = frozenset(nn.Module().__dict__) - {"_buffers"}


@dataclass(frozen=True)
class Change:
    """A change of one tensor: its new value, and whether it is another tensor."""

    value: Tensor
    replaced: bool
    """By another one, and not changed in place."""


class HeldTensors:
    """The tensors on some modules at one moment: buffers and attributes, also of the user's own objects there.

    Args:
        modules: by name; what their submodules hold is not looked at.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._seen: set[int] = set()
        self._tensors: dict[Path, Tensor] = {}
        for name, module in modules.items():
            self._tensors.update(self._of((name,), vars(module), _OF_MODULES))
        self._versions = {path: _version(x) for path, x in self._tensors.items()}

    def changes(self, earlier: HeldTensors) -> dict[Path, Change]:
        """What was set or changed since. What is done to their `.data` is not noticed."""
        return {
            path: Change(on_cpu(x.detach()), replaced=x is not earlier._tensors.get(path))
            for path, x in self._tensors.items()
            if x is not earlier._tensors.get(path) or self._versions[path] != earlier._versions[path]
        }

    def at(self, paths: Collection[Path]) -> dict[Path, Change]:
        """The tensors at these paths, as changes in place."""
        found = {path: self._tensors[path] for path in paths if path in self._tensors}
        return {path: Change(on_cpu(x.detach()), replaced=False) for path, x in found.items()}

    def of_objects(self, paths: Collection[Path]) -> dict[Path, Change]:
        """All that lie on some of the user's own objects, which are at these paths."""
        return {
            path: Change(on_cpu(x.detach()), replaced=True) for path, x in self._tensors.items() if path[:-1] in paths
        }

    def _of(self, path: Path, holder: Mapping[str, Any], left_out: Iterable[str] = ()) -> Iterator[tuple[Path, Tensor]]:
        for name, value in holder.items():
            if name in left_out:
                continue
            if name == "_buffers" and isinstance(value, dict):
                yield from self._of(path, value)
            elif isinstance(value, Tensor):
                if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
                    yield (*path, name), value
            elif is_own_object(value) and id(value) not in self._seen:
                self._seen.add(id(value))
                yield from self._of((*path, name), value.__dict__)


class Buffers:
    """The buffers of some modules at one moment, but for averages of divided parameters, which are rows as these are.

    Args:
        modules: by name; those of their submodules are not looked at.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._buffers: dict[Path, Tensor] = {
            (name, leaf): x
            for name, module in modules.items()
            for leaf, x in module._buffers.items()
            if x is not None and not isinstance(x, DTensor)
        }

    def replaced(self, earlier: Buffers, most: int) -> dict[Path, Change]:
        """The buffers that are other tensors than earlier, of so many bytes at most."""
        others = {path: x for path, x in self._buffers.items() if x is not earlier._buffers.get(path)}
        return {path: Change(on_cpu(x.detach()), replaced=True) for path, x in others.items() if x.nbytes <= most}

    def numbers(self) -> dict[str, float]:
        """What those of one element hold, by name; but for how many batches a BatchNorm has seen."""
        found = {".".join(filter(None, path)): x for path, x in self._buffers.items() if x.numel() == 1}
        return {name: x.item() for name, x in found.items() if not name.endswith("num_batches_tracked")}


def modules_outside(module: nn.Module, units: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that are in no unit, by name; without metrics, which are the last stage's."""
    inside = tuple(f"{unit}." for unit in units)
    return {
        name: child
        for name, child in module.named_modules()
        if not f"{name}.".startswith(inside) and not isinstance(child, Metric)
    }


def adopt(modules: Mapping[str, nn.Module], changes: Mapping[Path, Change], device: torch.device) -> None:
    """Set what was changed on another stage."""
    for (name, *outer, leaf), change in changes.items():
        holder: Any = modules[name]
        for part in outer:
            holder = getattr(holder, part)
        mine = getattr(holder, leaf, None)
        if isinstance(mine, Tensor) and mine.shape == change.value.shape and not change.replaced:
            with torch.no_grad():
                mine.copy_(change.value)
        else:
            setattr(holder, leaf, change.value.to(mine.device if isinstance(mine, Tensor) else device))


def _version(x: Tensor) -> tuple[int, int]:
    return address(x), tensor_version(x)
