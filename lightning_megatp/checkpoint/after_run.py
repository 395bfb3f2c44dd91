"""State dicts that a user asks a model in parts for, after a run."""

from __future__ import annotations

import functools
import weakref

from torch import nn

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule


def warn_of_parts(parallel: ParallelModule) -> None:
    """From now on say so where somebody asks for a state dict and doesn't expect parts."""
    asked = functools.partial(_asked_for_state, weakref.ref(parallel))
    for child in parallel.module.modules():
        held = list(child.parameters(recurse=False))
        cut = any(parallel.spec(p) is not None or id(p) in parallel.divided for p in held)
        if cut or (held and parallel.pipeline is not None):
            child.register_state_dict_pre_hook(asked)


def _asked_for_state(of: weakref.ref[ParallelModule], module: nn.Module, prefix: str, keep_vars: bool) -> None:
    parallel = of()
    if parallel is None or parallel.expects_parts:
        return
    parallel.expects_parts = True  # it is said once
    whole = " Or ask inside of `with trainer.strategy.whole_parameters():`, on all ranks."
    warn_once_per_run(
        "`state_dict()` after a run has the part of the model that this rank holds. A file of all of it is written by"
        " `trainer.save_checkpoint(path, weights_only=True)`, called on all ranks; `megatp convert` makes safetensors"
        f" of it.{'' if parallel.divided or parallel.pipeline is not None else whole}"
    )
