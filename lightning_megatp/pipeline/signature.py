"""What a plan depends on: the kind of a batch, without the values of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def modes_of(module: nn.Module) -> Hashable:
    """The modes of a module, of its parts and of autograd."""
    training = tuple(child.training for child in module.modules())
    return training if len(set(training)) > 1 else training[:1], torch.is_grad_enabled()


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch of any nesting: mappings, sequences, dataclasses, objects with attributes."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for part in _parts(batch).values() for tensor in tensors_of(part)]


def signature_of(batch: Any) -> Hashable:
    """Structure, shapes, dtypes and devices of a batch, and plain values in it."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.stride(), batch.dtype, batch.device, batch.requires_grad
    parts = _parts(batch)
    if parts or (isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, (str, bytes))):
        return type(batch), tuple((key, signature_of(part)) for key, part in parts.items())
    return batch if isinstance(batch, Hashable) else repr(batch)


def _parts(batch: Any) -> Mapping[Any, Any]:
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return dict(enumerate(batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {}
