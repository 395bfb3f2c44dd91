"""Where a run would split the model, `megatp plan` and `megatp estimate` say how, and what each rank would hold."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning_megatp.auto_plan.discover import discover, look
from lightning_megatp.batches.example import Example
from lightning_megatp.commands import Done, requested
from lightning_megatp.commands.estimate import print_estimate, rehearse_both
from lightning_megatp.commands.show import print_plan
from lightning_megatp.planner.live import layout_of
from lightning_megatp.planner.sizes import place


def answer(strategy: Any, trainer: Any, example: Example) -> NoReturn:
    """Print what would be split, and the memory, without ranks.

    Args:
        strategy: of a Trainer that is about to run; no rank was started.
        trainer: that one.
        example: a batch and a step to look at.

    Raises:
        Done: always; the process ends.
        ValueError: there is nothing to split.
    """
    module, tp = strategy.lightning_module, strategy.tp
    if tp == 1 and requested() == "plan":
        raise ValueError("megatp plan: tp=1 splits nothing. Add the size, e.g. --trainer.strategy.tp 2.")
    plan = strategy.parallelism.resolve(module, tp, strategy.sequence_parallel)
    results: list[Any] = []
    problems: list[str] = []
    if plan.open and tp > 1:
        steps = example.calls()
        kinds, problems = look(module, plan, steps, example.uncut_calls)
        found = discover(module, tp, kinds, plan)
        results, problems = found.results, problems + found.problems + ([] if steps else [example.problem])
    if requested() == "estimate":
        print_estimate(strategy, trainer, plan, problems)
        raise Done(0)
    kept = rehearse_both(strategy, trainer, plan, problems)
    stage_of_unit = None
    if strategy.pp > 1:
        stage_of_unit = place(module, layout_of(strategy, strategy.shape), None if kept is None else kept[0])
    print_plan(module, plan, results, problems, stage_of_unit, kept)
    raise Done(0)
