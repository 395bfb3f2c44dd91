"""What one stage hands on to the next, and keeps: as the plan promised, or an error that says what is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Key, Relay
from lightning_megatp.pipeline.slicing.running import StageMode
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tensor_version


def received_by_key(relays: Sequence[Relay], tensors: Sequence[Tensor], stage: int) -> dict[Key, Tensor]:
    """The values that a stage received, if they are as planned.

    Raises:
        SliceError: they are not.
    """
    if len(tensors) != len(relays):
        raise SliceError(f"pipeline stage {stage} received {len(tensors)} values, and the plan has {len(relays)}.")
    for relay, tensor in zip(relays, tensors, strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (relay.shape, relay.dtype):
            raise SliceError(f"pipeline stage {stage} received {_describe(tensor)}; planned was {_describe(relay)}.")
    return {relay.key: tensor for relay, tensor in zip(relays, tensors, strict=True)}


def value_to_send(relay: Relay, mode: StageMode, received: Mapping[Key, Tensor], stage: int) -> Tensor:
    """A value for the next stage, if it is what the plan promised.

    Raises:
        SliceError: it is not.
    """
    if relay.key in received:
        return received[relay.key]
    operation = mode.operation(relay.key)
    tensor, version = mode.made.get(relay.key, (None, 0))
    if tensor is None or not _is_as_planned(tensor, relay):
        made = "another number of values" if tensor is None else _describe(tensor)
        raise SliceError(
            f"`{operation.name}` ({operation.where}) on pipeline stage {stage} made {made}; planned was"
            f" {_describe(relay)}. The batch has the shapes of the planned one, so something else differs between the"
            " calls: values on which a shape depends (give `pad_packed_sequence` its `total_length`), a random choice,"
            " a counter, the rank."
        )
    if tensor.requires_grad != (relay.requires_grad if relay.has_graph is None else relay.has_graph):
        now, then = ("is", "was not") if tensor.requires_grad else ("is not", "was")
        raise SliceError(
            f"what `{operation.name}` ({operation.where}) makes on pipeline stage {stage} {now} trained, and {then}"
            " when the step was planned: parameters were frozen or unfrozen since, or it decides by itself what it does"
            " (at random, by a counter). Other stages can't know that. Freeze at the start of an epoch, in"
            " `on_train_epoch_start`."
        )
    if tensor_version(tensor) != version:
        raise SliceError(
            f"what `{operation.name}` ({operation.where}) made on pipeline stage {stage} was changed in place before it"
            " was sent. Use the operation that returns a new tensor."
        )
    return tensor


def _is_as_planned(tensor: Tensor, relay: Relay) -> bool:
    return (tuple(tensor.shape), tensor.dtype) == (relay.shape, relay.dtype) and not is_fake(tensor)


def _describe(x: Tensor | Relay) -> str:
    data = "a value without data, " if is_fake(x) else ""
    return f"{data}shape {tuple(x.shape)}, {x.dtype}, requires_grad={x.requires_grad}"
