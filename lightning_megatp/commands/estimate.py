"""What `megatp estimate` prints."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from lightning_megatp.batches.example import Example
from lightning_megatp.batches.own import own_split
from lightning_megatp.batches.split import split_batch
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.planner.formula import rehearse_or_estimate
from lightning_megatp.planner.live import layout_of
from lightning_megatp.planner.optimizers import optimizers_in, states_of
from lightning_megatp.planner.rehearsal import SavedForBackward, rehearse, skeleton
from lightning_megatp.planner.report import estimate_table
from lightning_megatp.planner.sizes import place, predict


def rehearse_both(
    strategy: Any, trainer: Any, plan: ParallelPlan, problems: list[str]
) -> tuple[SavedForBackward, SavedForBackward] | None:
    """A step on a few rows, unsplit and on tensor rank 0. None if it can't be rehearsed; `problems` then says why."""
    precision = strategy.precision_plugin
    try:
        module = precision.convert_module(skeleton(strategy.lightning_module)).train()
        batch = Example(trainer, precision).batch
        whole, split = (
            rehearse(module, strategy.parallelism, each, batch, around=precision.forward_context)
            for each in (replace(plan, tp=1), plan)
        )
    except Exception as error:  # the user's step, which may look at values
        problems.append(f"activations could not be predicted ({type(error).__name__}: {str(error)[:200]})")
        return None
    return whole, split


def print_estimate(strategy: Any, trainer: Any, plan: ParallelPlan, problems: Sequence[str]) -> None:
    """The memory of tensor rank 0 of every pipeline rank.

    Args:
        strategy: of a Trainer that is about to fit; no rank was started.
        plan: complete.
    """
    notes = list(problems)
    precision = strategy.precision_plugin
    layout = layout_of(strategy, strategy.shape)
    module = precision.convert_module(skeleton(strategy.lightning_module))
    states = rehearsal = None
    try:
        states = states_of(optimizers_in(module.configure_optimizers()))
    except Exception as error:  # the user's own code, or an optimizer's
        notes.append(f"the optimizer's state could not be predicted ({type(error).__name__}: {error})")
    try:
        batch = getattr(module, "megatp_batch", None)
        batch = Example(trainer, precision, rows=None).batch if batch is None else batch
        split = own_split(module) or split_batch
        microbatch = split(batch, layout.microbatches)[0] if layout.pp > 1 else batch
        rehearse_this = functools.partial(
            rehearse_or_estimate, module.train(), strategy.parallelism, plan, microbatch,
            pipelined=layout.pp > 1, around=precision.forward_context,
        )  # fmt: skip
        rehearsal, problem = rehearse_this()
        if strategy.recompute.kind != "none":  # which blocks depends on the stages, and these on the order of units
            stages = place(module, layout, rehearsal) if layout.pp > 1 else None
            rehearsal, problem = rehearse_this(recompute=strategy.recompute, stage_of_unit=stages)
        notes += [problem] if problem else []
    except Exception as error:  # loading or splitting a batch: the user's code
        notes.append(f"there is no batch to rehearse a step with ({type(error).__name__}: {str(error)[:200]})")
    notes.append("gradients are complete at the optimizer's step; activations are at their peak before")
    title = f"Memory per rank, predicted: tp={layout.tp}, pp={layout.pp}, dp={layout.dp}, zero={layout.zero}"
    Console().print(estimate_table(predict(module, plan, layout, states, rehearsal), title, notes))
