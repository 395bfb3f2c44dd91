"""Operations between units that no pipeline can do: each error says where, why and what else to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.call import Call, sets_requires_grad
from lightning_megatp.pipeline.slicing.dry_run.values import Value
from lightning_megatp.pipeline.slicing.errors import KindError, SliceError, gradient_read
from lightning_megatp.shim.autograd import checkpoint_region
from lightning_megatp.tensor.functions import asks_gradient


def refuse_kind(call: Call) -> None:
    """Before an operation is tried.

    Raises:
        KindError: it is of a kind that can't be cut anywhere.
    """
    if call.what in (torch.autograd.grad, torch.Tensor.backward):
        raise KindError(
            f"{call.by} differentiates inside the step. Under pipeline parallelism the strategy runs backward, after"
            " the step: return the loss (with automatic_optimization=False call `self.manual_backward(loss)`), or do it"
            " inside the forward of a module that is never cut: one that a ModuleList or a Sequential holds."
        )
    if asks_gradient(call.what, call.args):
        raise gradient_read(call.by)


def refuse_setting(call: Call, outlives: Callable[[Tensor], bool]) -> None:
    """When an operation's inputs are known. What every stage has by itself may be told to require a gradient.

    Args:
        outlives: whether a tensor was there before the step, and will be after.

    Raises:
        SliceError: it sets an attribute of a tensor, and other stages would not see that, or the next step would.
    """
    if getattr(call.what, "__name__", "") != "__set__":
        return
    if sets_requires_grad(call) and call.inputs[0].stage is None and not outlives(call.inputs[0].tensor):
        return
    raise SliceError(
        f"{call.by} sets an attribute of a tensor, between the pipeline's units. Use an operation; what changes"
        " parameters (an average of weights) belongs into `on_train_batch_start` of a callback, and gradients are"
        " cleared by `zero_grad()` of an optimizer or a module."
    )


def refuse_stand_in(value: Value, stage: int | None, what: str) -> None:
    """Raise where a stage would find the tensor that another stage changed in place, and not what it became.

    Raises:
        SliceError: it would.
    """
    if value.key is not None and value.stage != stage and value.by_change:
        raise SliceError(
            f"{what} was changed in place by {value.maker} on pipeline stage {value.stage}; stage {stage} does not"
            " see that. Use the operation that returns a new tensor."
        )


def refuse_backwards(call: Call) -> None:
    """When an operation's stage is known.

    Raises:
        SliceError: it takes what a later stage makes.
    """
    late = [value for value in call.inputs if value.stage is not None and not call.shape_only]
    late = [value for value in late if call.stage is None or (value.stage or 0) > call.stage]
    if late:
        raise SliceError(
            f"{call.by} is on pipeline stage {call.stage}, and takes what {late[0].maker} made on the later stage"
            f" {late[0].stage}. Data flows forward only: keep the modules in between on one stage, by"
            " `stages=[[...], ...]`. A loop over the whole model (generating token by token) has no such place: do it"
            " in `validation_step` or `predict_step`, which the last stage can run alone."
        )


class CheckpointRegions:
    """The activation checkpoints of a step (use_reentrant=False), each of which has to be of one stage: that one
    alone recomputes it, in backward and without a plan."""

    def __init__(self) -> None:
        self._stages: dict[int, tuple[object, int, set[int]]] = {}

    def add(self, call: Call, number: int) -> None:
        """An operation of a stage, perhaps in a region, which it then knows by the first operation there.

        Args:
            call: what is done.
            number: of the operation.

        Raises:
            SliceError: its recomputation would give something else.
        """
        region = checkpoint_region()
        if region is None:
            return
        _, call.checkpoint, stages = self._stages.setdefault(id(region), (region, number, set()))
        stages.update(() if call.stage is None else [call.stage])
        if len(stages) > 1:
            raise SliceError(
                f"{call.by} is part of an activation checkpoint that reaches over pipeline stages {sorted(stages)}."
                " Checkpoint single blocks, or keep these modules on one stage by `stages=[[...], ...]`."
            )
        if call.random:
            raise SliceError(
                f"{call.by} draws random numbers that all pipeline stages share, inside an activation checkpoint, which"
                " would draw others when it recomputes. Draw them before the checkpoint, or inside a module."
            )
        for value in call.inputs:
            refuse_stand_in(value, call.stage, f"a tensor that {call.by} takes in an activation checkpoint")
