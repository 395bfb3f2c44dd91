"""What a user does with a model in parts after a run: asks for its state dict, or trains it by another strategy."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_megatp.detour import Detour
from lightning_megatp.messages import OfOneRank, warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.lightning import trainer_of
from lightning_megatp.shim.modules import first_before_state_dict


def refuse_others(parallel: ParallelModule, own: type) -> None:
    """Let no strategy but ours train the module from now on: another would take this rank's part for all of it.

    Args:
        own: the base of our strategies.
    """
    module = parallel.module

    def set_up(call: functools.partial[Any]) -> Any:
        trainer = trainer_of(module)
        if trainer is not None and trainer.state.fn == "fit" and not isinstance(trainer.strategy, own):
            raise RuntimeError(
                f"MegaTPStrategy: an earlier run has split this {type(module).__name__}, and this process holds a part"
                f" of it, which {type(trainer.strategy).__name__} would train as if it were all. Save the model by"
                " `trainer.save_checkpoint(path, weights_only=True)` of that run and load it into a new module; or go"
                " on with MegaTPStrategy."
            )
        return call()

    Detour(module, "setup", set_up)


def warn_of_parts(parallel: ParallelModule) -> None:
    """From now on say so where somebody asks for a state dict and doesn't expect parts."""
    asked = _Asked(weakref.ref(parallel))
    for child in parallel.module.modules():
        held = list(child.parameters(recurse=False))
        cut = any(parallel.spec(p) is not None or id(p) in parallel.divided for p in held)
        if cut or (held and parallel.pipeline is not None):
            first_before_state_dict(child, asked)


@dataclass(frozen=True)
class _Asked(OfOneRank):
    """A module that holds a part is asked for its state dict."""

    of: weakref.ref[ParallelModule]

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        parallel = self.of()
        if parallel is None or parallel.expects_parts:
            return
        parallel.expects_parts = True  # it is said once
        whole = " Or ask inside of `with trainer.strategy.whole_parameters():`, on all ranks."
        warn_once_per_run(
            "`state_dict()` after a run has the part of the model that this rank holds. A file of all of it is written"
            " by `trainer.save_checkpoint(path, weights_only=True)`, called on all ranks; `megatp convert` makes"
            f" safetensors of it.{'' if parallel.divided or parallel.pipeline is not None else whole}"
        )
