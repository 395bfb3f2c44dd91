"""Averaged copies of the module, as WeightAveraging and StochasticWeightAveraging keep them: split as the module is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule


def split_averages(averages: Mapping[str, nn.Module], parallel: ParallelModule, mesh: ParallelMesh) -> None:
    """Keep of each copy what the rank keeps of the module. Callbacks go through the parameters of both side by side.

    Args:
        averages: name of callback -> copy of the module, usually made before that was split.

    Raises:
        ValueError: at pp > 1, where stages also hold copies of parameters for a while, and with divided parameters.
    """
    if averages and parallel.divided:
        raise ValueError(
            f"MegaTPStrategy: the callback {next(iter(averages))} averages a copy of the whole model, and zero > 0"
            " divides the model over data-parallel ranks. That is not supported: use zero=0, or remove the callback."
        )
    if averages and mesh.size("pp") > 1:
        raise ValueError(
            f"MegaTPStrategy: the callback {next(iter(averages))} averages a copy of the whole model, and pp > 1 cuts"
            " the model into stages. That is not supported: use pp=1, or remove the callback."
        )
    parallel.averages = list(averages.values())
    for average in parallel.averages:
        for name, parameter in average.named_parameters():
            spec = parallel.spec_of(name)
            if spec is not None and tuple(parameter.shape) == spec.shape:
                parameter.data = spec.spec(mesh.rank("tp")).take(parameter.data)


def averaged_states(checkpoint: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where callbacks have put the state of their copies: a dict, and its key."""
    if "averaging_state" in checkpoint:  # WeightAveraging; what was there before is the "current_model_state"
        yield checkpoint, "state_dict"
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and any(
            isinstance(x, Tensor) for x in (state.get("average_model_state") or {}).values()
        ):
            yield state, "average_model_state"  # StochasticWeightAveraging
