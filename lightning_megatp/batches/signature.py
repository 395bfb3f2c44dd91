"""What a plan depends on: the kind of a batch, without the values of its tensors and texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_megatp.shim.modules import modules_in
from lightning_megatp.snapshots.leftovers import is_own_object


def modes_of(module: nn.Module) -> Hashable:
    """The modes of a module, of its parts and of autograd."""
    training = tuple(child.training for child in modules_in(module))
    return training if len(set(training)) > 1 else training[:1], torch.is_grad_enabled()


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch of any nesting: mappings, sequences, dataclasses, objects with attributes."""
    found: list[Tensor] = []
    _read(batch, _Reading(tensors=found))
    return found


def is_sparse(tensor: Tensor) -> bool:
    """Whether it keeps some of its elements only, and has no strides."""
    return tensor.layout not in (torch.strided, torch.jagged)


def signature_of(batch: Any) -> Hashable:
    """Structure, shapes, dtypes and devices of a batch, and plain values in it, but for those that `leaves_out` is
    about. Objects are what they are when pickled: other ranks get the batch so, without what `__getstate__` drops."""
    return _read(batch, _Reading(as_pickled=True))


def leaves_out(batch: Any) -> bool:
    """Whether a batch has values that its signature doesn't tell, since each row has its own: texts in lists, arrays.
    A plan for each of them would be a plan per microbatch."""
    reading = _Reading()
    _read(batch, reading)
    return reading.left_out


@dataclasses.dataclass
class _Reading:
    """What is found on the way through a batch."""

    tensors: list[Tensor] = dataclasses.field(default_factory=list)
    left_out: bool = False
    as_pickled: bool = False
    met: dict[int, int] = dataclasses.field(default_factory=dict)
    """id(object of the user's) -> its number: they may hold each other."""


def _read(value: Any, reading: _Reading, in_list: bool = False) -> Hashable:
    """The signature of a part of a batch.

    Args:
        in_list: it is in a list or tuple, at any depth.
    """
    kind: Any = type(value)
    if isinstance(value, Tensor):
        reading.tensors.append(value)
        layout = value.layout if is_sparse(value) else value.stride()
        return tuple(value.shape), layout, value.dtype, value.device, value.requires_grad
    if isinstance(value, np.ndarray):
        reading.left_out = True
        return np.ndarray, value.shape, str(value.dtype)
    if isinstance(value, (str, bytes)):
        reading.left_out = reading.left_out or in_list
        return kind if in_list else value
    if isinstance(value, Mapping):
        parts = value
    elif isinstance(value, Sequence):
        parts, in_list = dict(enumerate(value)), True
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif _is_told_by_value(value):
        return value
    elif is_own_object(value):
        if id(value) in reading.met:
            return reading.met[id(value)]
        reading.met[id(value)] = len(reading.met)
        parts = vars(value)
        if reading.as_pickled and kind.__getstate__ is not object.__getstate__:
            return kind, _read(value.__getstate__(), reading, in_list)
        if _pickles_in_its_own_way(kind):
            return kind, _of_tensors_in(parts, reading)
    elif kind.__module__ == "builtins" and kind is not object:
        return repr(value)
    else:
        reading.left_out = True
        return kind
    return kind, tuple((key, _read(part, reading, in_list)) for key, part in parts.items())


def _pickles_in_its_own_way(kind: Any) -> bool:
    """Whether what it is made of is not what it keeps: a table's columns keep what they have looked up, and other
    ranks, which get the batch by pickling, do without."""
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _of_tensors_in(parts: Any, reading: _Reading) -> Hashable:
    inside = dataclasses.replace(reading, tensors=[])
    _read(parts, inside)
    reading.tensors += inside.tensors
    reading.left_out = True
    return tuple(_read(tensor, _Reading()) for tensor in inside.tensors)


def _is_told_by_value(value: Any) -> bool:
    """Whether it has a hash of its own, and not only that of its place in memory."""
    of_kind: Any = type(value).__hash__
    return of_kind is not None and of_kind is not object.__hash__
