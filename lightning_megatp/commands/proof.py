"""What `megatp verify` changes about a run: float64, weights of unit scale, no randomness, only the first batch, and
with `--layers` fewer layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lightning_megatp.auto_plan.blocks import kinds_of_blocks
from lightning_megatp.building.building import Building
from lightning_megatp.commands import layers_to_keep
from lightning_megatp.tables import Folded, Titled

_ROWS = 12


def prepare(strategy: Any, trainer: Any, building: Building | None) -> None:
    """Before the model is split: shorten it if that was asked for, and make its first batch a proof.

    Args:
        strategy: whose ranks have met.
        trainer: about to fit.
        building: the module's parameters that have no values yet; they get them.

    Raises:
        ValueError: what is run can't be a proof.
    """
    module = strategy.lightning_module
    if strategy.mesh.size("dp") > 1:
        raise ValueError(
            f"megatp verify compares every gradient, at dp=1: use {strategy.tp * strategy.pp} devices (tp x pp), not"
            f" {strategy.world_size}."
        )
    if trainer.state.fn != "fit" or strategy.parallelism.split_form(module) is not None:
        raise ValueError("megatp verify compares a training step, and the script runs something else before fit.")
    layers = layers_to_keep()
    for name, had in (shorten(module, layers) if layers else {}).items():
        if strategy.is_global_zero:
            print(f"megatp verify --layers {layers}: `{name}` keeps the first of each kind of its {had} layers.")
    if building is not None:  # every weight is changed, and the whole is compared
        building.materialize(module, lambda parameter: None, torch.device("cpu"))
    _make_proof(trainer, module, strategy.namespace.silent_logger)


def _make_proof(trainer: Any, module: nn.Module, silent_logger: type) -> None:
    """Make the first batch a proof: an error in queries or keys hardly shows at initial weights, whose attention is
    nearly uniform, nor behind dropout, nor beside rounding."""
    trainer.callbacks = [x for x in trainer.callbacks if not hasattr(x, "best_model_path")]
    trainer.loggers = [silent_logger() for _ in trainer.loggers]  # callbacks and steps may need one
    trainer.num_sanity_val_steps, trainer.accumulate_grad_batches = 0, 1
    generator = torch.Generator().manual_seed(0)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(noise * 0.2)
    for child in module.modules():
        for name, value in vars(child).items():
            if "drop" in name and isinstance(value, float):
                setattr(child, name, 0.0)
        if isinstance(child, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            child.p = 0.0


def shorten(module: nn.Module, layers: int) -> dict[str, int]:
    """Keep the first layers of each kind in every list of a model: what splits one layer splits all of its kind.

    Args:
        module: changed in place.
        layers: how many of each kind.

    Returns:
        Name of each list that is shorter now -> how many it had.
    """
    before = {}
    for name, child in list(module.named_modules()):
        if not isinstance(child, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = [block for kind in kinds_of_blocks(child) for block in kind.names[layers:] if block.isdecimal()]
        if blocks:
            before[name] = len(child)
        for index in sorted(map(int, blocks), reverse=True):
            del child[index]
    return before


def print_errors(errors: Mapping[str, float], limit: float) -> None:
    """The largest relative differences of gradients, and how many there are."""
    table = Titled(title="Gradients beside those of the unsplit model, float64")
    table.add_column("parameter")
    table.add_column("relative difference", justify="right")
    for name, error in sorted(errors.items(), key=lambda item: -item[1])[:_ROWS]:
        table.add_row(Folded(name), f"{error:.1e}")
    wrong = sum(not error <= limit for error in errors.values())
    verdict = f"{wrong} of {len(errors)} differ" if wrong else f"all {len(errors)} agree"
    table.caption = f"{verdict} (limit {limit:.0e})"
    Console().print(table)
