"""Start-up: importing, and what `Trainer.fit` does before the first step of a model of 32 layers is done."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.models import Size, decoder, loader, trainer
from tests.benchmarks.ratios import Figure
from tests.benchmarks.turns import Program, fit
from tests.ranks import run_ranks

MICROBATCHES = 4
LIGHTNING, BOTH = "import lightning.pytorch", "import lightning.pytorch, lightning_megatp"


def rows(sizes: list[Size], tp: int, rounds: int) -> Iterator[Figure]:
    alone, both = ([_seconds_of(code) for _ in range(rounds)] for code in (LIGHTNING, BOTH))
    extra = statistics.median(b - a for a, b in zip(alone, both, strict=True))
    yield Figure("start", f"import, beyond lightning.pytorch's {statistics.median(alone):.2f} s", extra, "s")
    for size in sizes:
        by_round = [
            max(run_ranks(tp, setting_up, size, timeout=300)) - run_ranks(1, setting_up, size)[0] for _ in range(rounds)
        ]
        yield Figure("start", f"tp={tp}, {size}: set-up beyond Lightning's own", statistics.median(by_round), "s", 5.0)
    for size in (dataclasses.replace(size, rows=MICROBATCHES) for size in sizes):
        by_round = [
            max(run_ranks(2, first_batch, size, timeout=300)) - run_ranks(1, first_batch, size)[0]
            for _ in range(rounds)
        ]
        name = f"pp=2, {size}: set-up and the first batch, with its plan, beyond one device's"
        yield Figure("start", name, statistics.median(by_round), "s", 5.0)
    for ways in (2, 4, 8):
        planned = statistics.median(run_ranks(1, planning, ways)[0] for _ in range(rounds))
        yield Figure("start", f"tp={ways}, 32 layers of 4096/11008 on meta: plan and verify", planned, "s", 5.0)


def setting_up(rank: int, world_size: int, size: Size) -> float:
    """Seconds from `fit` to the first batch: plan, verify, swap, slice; on one device without this package."""
    from lightning_megatp import MegaTPStrategy

    model = decoder(size)  # building it is not measured
    strategy = "auto" if world_size == 1 else MegaTPStrategy(tp=world_size, summary=False)
    return _until_the_first_step(lambda callback: trainer(strategy, world_size, callback), model)


def first_batch(rank: int, world_size: int, size: Size) -> float:
    """Seconds from `fit` to the end of the first batch: how a pipeline cuts the step is found in it."""
    from lightning_megatp import MegaTPStrategy

    model, options = decoder(size), {"pp": world_size, "microbatches": MICROBATCHES, "summary": False}
    strategy = "auto" if world_size == 1 else MegaTPStrategy(**options)
    return _until_the_first_step(lambda callback: trainer(strategy, world_size, callback), model, is_done=True)


def planning(rank: int, world_size: int, tp: int) -> float:
    """Seconds to look at a 7B-class model on meta, find its plan and prove it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lightning_megatp.auto_plan.discover import discover, look
    from lightning_megatp.commands.huggingface import Model, example_batch
    from lightning_megatp.plugin import ParallelismPlugin

    config = LlamaConfig()  # 32 layers of 4096/11008, 32 heads
    with torch.device("meta"):
        model = Model(LlamaForCausalLM(config))
    batch = example_batch(model.model, config, True)
    start = time.perf_counter()
    plan = ParallelismPlugin("auto").resolve(model, tp, True)
    kinds, _ = look(model, plan, [lambda: model.training_step(batch, 0)])
    discover(model, tp, kinds, plan)
    return time.perf_counter() - start


def _until_the_first_step(make: Callable[[Any], Any], model: Any, is_done: bool = False) -> float:
    def both(callback: Any) -> Any:
        return make(callback), model, loader(model.size)

    start = time.perf_counter()
    program = Program(fit(both))  # returns as training starts
    if is_done:
        program.step()
    seconds = time.perf_counter() - start
    program.close()
    return seconds


def _seconds_of(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return time.perf_counter() - start
