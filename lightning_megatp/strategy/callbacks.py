"""Callbacks, hooks and loggers, as far as a model in parts is something else to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning_megatp.detour import Detour
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.shim.lightning import draws_graph, summaries, throughputs
from lightning_megatp.user_hooks import mentions

_PROCESS = frozenset(["global_rank", "local_rank", "get_rank"])
"""What is asked for by code that names files by processes."""


def check_callbacks(trainer: Any, mesh: ParallelMesh, zero: int) -> None:
    """Refuse callbacks that can't work on a part of a model.

    Raises:
        ValueError: a callback that needs whole parameters, or those of all stages.
    """
    pp, tp = mesh.size("pp"), mesh.size("tp")
    pruning = [type(x).__name__ for x in trainer.callbacks if hasattr(x, "make_pruning_permanent")]
    if pruning and (pp * tp > 1 or zero > 0):
        raise ValueError(
            f"MegaTPStrategy: the callback {pruning[0]} compares the weights of the whole model, and puts masks in"
            f" place of its parameters; with tp={tp}, pp={pp}, zero={zero} a rank holds a part of them. Prune"
            " with dp alone, or afterwards, from a checkpoint."
        )


def count_replicas(trainer: Any, mesh: ParallelMesh) -> None:
    """Let ThroughputMonitor take for one device what works on the same samples together."""
    together = mesh.size("pp") * mesh.size("tp")
    for throughput in throughputs(trainer) if together > 1 else ():
        if throughput.world_size == trainer.world_size:  # and not counted so already
            throughput.world_size = mesh.size("dp")
            if throughput.available_flops:
                throughput.available_flops *= together


def without_examples(trainer: Any, whole_forward: bool) -> Iterator[Detour]:
    """Leave out what would run the module's `example_input_array` where that can't be done.

    Args:
        trainer: about to fit a module that is split.
        whole_forward: whether all ranks can run the module outside of a step, if they do it together.
    """
    for logger in filter(draws_graph, trainer.loggers):
        yield Detour(logger, "log_graph", _draw_nothing)
    for callback in () if whole_forward else summaries(trainer):
        yield Detour(callback, "on_fit_start", functools.partial(_without_example, trainer.lightning_module))


def without_inference_mode(trainer: Any) -> None:
    """Let validation, test and prediction run without gradients instead, as Lightning does it for FSDP, and with gloo:
    tensors of inference mode don't tell whether they were changed in place."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def without_predictions(trainer: Any) -> Iterator[Detour]:
    """Let BasePredictionWriters of stages that have no predictions write none."""
    for callback in (x for x in trainer.callbacks if hasattr(x, "write_on_batch_end")):
        for hook in ("on_predict_batch_end", "on_predict_epoch_end"):
            yield Detour(callback, hook, _write_nothing)


def warn_of_writers(trainer: Any, tp: int) -> None:
    """Say where a BasePredictionWriter would write the same predictions on each tensor rank."""
    for callback in trainer.callbacks if trainer.state.fn == "predict" else ():
        hooks = ("on_predict_batch_end", "on_predict_epoch_end") if hasattr(callback, "write_on_batch_end") else ()
        if any(mentions(callback, _PROCESS, hook) for hook in hooks):
            warn_once_per_run(
                f"{type(callback).__name__} writes by the rank of the process, and with tp={tp} as many ranks have the"
                " same predictions: files of all ranks hold each as often. Write where"
                ' `trainer.strategy.mesh.rank("tp") == 0`.'
            )


def _write_nothing(call: Callable[[], Any]) -> None:
    pass


def _draw_nothing(call: Callable[[], Any]) -> None:
    warn_once_per_run("log_graph=True draws nothing: no rank has the whole model. Log it from one device.")


def _without_example(module: Any, call: Callable[[], Any]) -> Any:
    example, module.example_input_array = module.example_input_array, None
    try:
        return call()
    finally:
        module.example_input_array = example
