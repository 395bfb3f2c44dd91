"""Sequences that a unit packs, in a dry run: all are taken to be as long as what they are padded to. How many there are
at each time is then known, and what is padded again has the shape that it has with `total_length`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def on_whole_sequences(
    name: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Functions that pack or pad, and recurrent layers that take what is packed, as functions of the tensors that may
    have no data: how many sequences there are at each time, which the host reads, they have. Others stay as they are.

    Returns:
        A function, and its arguments.
    """
    if name == "_pack_padded_sequence":
        padded, _, batch_first = args
        batch, time = padded.shape[:2] if batch_first else padded.shape[1::-1]
        return functools.partial(_packed, torch.full((time,), batch)), (padded, batch_first)
    if name == "_pad_packed_sequence":
        packed, sizes, *rest = args
        return functools.partial(_padded, sizes, torch.full((len(packed) // len(sizes),), len(sizes))), (packed, *rest)
    if name in _RECURRENT and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return lambda data, *rest: function(data, args[1], *rest), (args[0], *args[2:])
    return function, args


def _packed(sizes: Tensor, padded: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    return (padded.transpose(0, 1) if batch_first else padded).flatten(0, 1), sizes


def _padded(
    sizes: Tensor, lengths: Tensor, packed: Tensor, batch_first: bool, value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    by_time = packed.unflatten(0, (len(sizes), -1))
    by_time = F.pad(by_time, (*(0, 0) * (by_time.dim() - 1), 0, total_length - len(sizes)), value=value)
    return by_time.transpose(0, 1) if batch_first else by_time, lengths


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
