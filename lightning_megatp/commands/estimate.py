"""What `megatp estimate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lightning_megatp.example import Example
from lightning_megatp.pipeline.split import split_batch
from lightning_megatp.plan.resolve import ParallelPlan
from lightning_megatp.planner.live import layout_of
from lightning_megatp.planner.optimizers import optimizers_in, states_of
from lightning_megatp.planner.rehearsal import rehearse, skeleton
from lightning_megatp.planner.report import estimate_table
from lightning_megatp.planner.sizes import predict


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
        split = getattr(module, "split_batch", split_batch)
        microbatch = split(batch, layout.microbatches)[0] if layout.pp > 1 else batch
        context = precision.forward_context
        module.train()
        rehearsal = rehearse(module, strategy.parallelism, plan, microbatch, pipelined=layout.pp > 1, around=context)
    except Exception as error:  # the user's step, which may look at values
        notes.append(f"activations could not be predicted ({type(error).__name__}: {str(error)[:200]})")
    notes.append("gradients are complete at the optimizer's step; activations are at their peak before")
    title = f"Memory per rank, predicted: tp={layout.tp}, pp={layout.pp}, dp={layout.dp}, zero={layout.zero}"
    Console().print(estimate_table(predict(module, plan, layout, states, rehearsal), title, notes))
