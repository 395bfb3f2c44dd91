"""What a unit returns that reads values inside (a mixture of experts, a recurrent layer that packs sequences), and so
can't run without data. The run compares it with what the unit really returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.shim.torch import tree_map


def guess(call: Callable[..., Any], hidden: Tensor) -> Any:
    """Of a recurrent layer outputs and state; of other units what blocks return, hidden states like those they take.

    Args:
        call: the unit's method.
        hidden: the first floating tensor that it takes, without data.
    """
    unit = getattr(inspect.unwrap(call), "__self__", None)
    out = _of_recurrent(unit, hidden) if isinstance(unit, nn.RNNBase) else hidden.clone()
    if not torch.is_grad_enabled():
        return out
    return tree_map(lambda x: x if x.requires_grad else x.requires_grad_(), out)


def _of_recurrent(layer: nn.RNNBase, hidden: Tensor) -> Any:
    """(batch, tokens, features) or (tokens, batch, features) -> outputs in that order, and the state of each layer and
    direction, with the cell's for an LSTM: torch.nn.LSTM, "Outputs"."""
    directions, size = 2 if layer.bidirectional else 1, layer.proj_size or layer.hidden_size
    out = hidden.new_empty(*hidden.shape[:-1], directions * size)
    batch = () if hidden.dim() < 3 else (hidden.shape[0 if layer.batch_first else 1],)
    states = [hidden.new_empty(layer.num_layers * directions, *batch, n) for n in (size, layer.hidden_size)]
    return out, tuple(states) if isinstance(layer, nn.LSTM) else states[0]
