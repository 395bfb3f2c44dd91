"""What a module returns that reads values inside (a mixture of experts, a recurrent layer that packs sequences), and so
can't run without data: of a unit's parts as few as can be, else of all of it. The run compares what a unit returns."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torchmetrics import MetricCollection

from lightning_megatp.containers import tensors_in
from lightning_megatp.origins import is_torchs
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.shim.torch import tree_map


class Guesses:
    """What of a step was guessed, and what came of that."""

    def __init__(self) -> None:
        self.any = False
        """From there on the step may fail for that."""
        self.unseen: set[str] = set()
        """Units that were not followed to their end: they may set others of their Python values than was seen."""
        self.misled = ""
        """Which unit's result was guessed, and how the step failed after that."""
        self.failed = False
        """Whether it did fail."""

    def note_unit(self, call: Call) -> None:
        """A unit's result was guessed, or a part of it."""
        self.unseen.update(call.units)
        self.any = True
        self.misled = self.misled or f"{call.by} has shapes that depend on values, so its result was guessed"

    def explain(self, error: Exception) -> bool:
        """Whether the step may have failed by a guess."""
        if self.misled:
            self.failed = True
            self.misled += f", and then the step failed ({type(error).__name__}: {error})"
        return self.any


def parts_of(call: Callable[..., Any]) -> list[nn.Module]:
    """The modules inside of a unit whose results may be guessed: recurrent layers, and what is none of torch's.

    Args:
        call: the unit's method.
    """
    unit = getattr(inspect.unwrap(call), "__self__", None)
    inside = list(unit.modules())[1:] if isinstance(unit, nn.Module) else []
    return [x for x in inside if isinstance(x, nn.RNNBase) or not is_torchs(type(x))]


@contextlib.contextmanager
def guessed_where_they_fail(parts: list[nn.Module], needs_values: Callable[[Exception], bool]) -> Iterator[None]:
    """Meanwhile modules return what is guessed of them, where their forwards raise that they need values.

    Args:
        needs_values: whether an error is that, or comes of it.
    """

    def attempt(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            hidden = next((x for x in tensors_in(args, kwargs) if x.is_floating_point()), None)
            if hidden is None or hidden.dim() < 2 or not needs_values(error):
                raise
            return guess(original, hidden)

    before = [(vars(part), vars(part).get("forward")) for part in parts]
    for part in parts:
        vars(part)["forward"] = functools.partial(attempt, part.forward)
    try:
        yield
    finally:
        for held, forward in before:
            if forward is None:
                held.pop("forward", None)
            else:
                held["forward"] = forward


def guess_unit(call: Call) -> Any:
    """The result of a unit inside of which values are read; None if there is nothing to go by."""
    hidden = _hidden(call)
    packed = any(isinstance(x, PackedSequence) for x in call.args)
    if call.collects or packed or hidden is None or hidden.dim() < 2:
        return None
    return guess(call.function, hidden)


def returns_alike(call: Call, out: Any) -> bool:
    """Whether a unit that read made-up numbers returns hidden states of the shape that it was given: then they hardly
    are sizes of what it returns.

    Args:
        call: the unit's.
        out: what it returned.
    """
    hidden, made = _hidden(call), next((x for x in tensors_in(out) if x.is_floating_point()), None)
    return hidden is not None and made is not None and made.shape == hidden.shape


def _hidden(call: Call) -> Tensor | None:
    return next((value.fake for value in call.inputs if value.tensor.is_floating_point()), None)


def metric_learns(metric: Any) -> bool:
    """Whether gradients may come back through a call of a metric."""
    if isinstance(metric, MetricCollection):
        parts = metric.values(copy_state=False)  # copies of states would look like what a step leaves
        differentiable = any(part.is_differentiable is not False for part in parts)
    else:
        differentiable = metric is not None and metric.is_differentiable is not False
    return differentiable and torch.is_grad_enabled()


def guess_metric(learning: bool, /, *args: Any, **kwargs: Any) -> Tensor:
    """The result of a call of a metric: one number.

    Args:
        learning: gradients may come back through it.
        args: those of the call.
        kwargs: the same.
    """
    tensors = tensors_in(args, kwargs)
    made = torch.zeros((), device=tensors[0].device if tensors else "cpu")
    return sum((0 * x.sum() for x in tensors if x.requires_grad), start=made) if learning else made


def guess(call: Callable[..., Any], hidden: Tensor) -> Any:
    """What a unit is guessed to return: a recurrent layer outputs and state, any other what blocks do, hidden states
    like those they take.

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
