"""The user's reentrant activation checkpoints, run like the others.

A reentrant checkpoint (`torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`, what Hugging Face's
`gradient_checkpointing_enable()` long did, and the `CheckpointFunction` that diffusion models copied from each other)
is an autograd function around modules: its graph is made in the middle of backward. Until then it can't be known in
which region a parameter is used, and shards don't pass through it. `use_reentrant=False` computes the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, check_backward_validity, checkpoint

from lightning_megatp.shim.autograd import handle_functions


class _Reentrant(NamedTuple):
    """What one is called with."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    preserve_rng_state: bool
    differentiated: tuple[Any, ...]
    """A gradient is asked for where one of these requires it."""


def without_reentrant() -> AbstractContextManager[None]:
    """Around a user's code, and around backward, which runs parts of it again: reentrant activation checkpoints are run
    as `use_reentrant=False` runs them. Autograd functions of unknown kinds stay as they are."""
    return handle_functions(not_reentrant, others_only=True)


def not_reentrant(function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`without_reentrant` for one call: what stands for `function.apply(...)`."""
    found = _recognized(function, args)
    if found is None:
        return apply(*args, **kwargs)
    if torch.is_grad_enabled():
        check_backward_validity(found.differentiated)
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in found.differentiated):
        with torch.no_grad():  # so it is with a reentrant one, whatever the modules inside would learn
            return found.run(*found.inputs)

    return checkpoint(found.run, *found.inputs, use_reentrant=False, preserve_rng_state=found.preserve_rng_state)


def _recognized(function: Any, args: tuple[Any, ...]) -> _Reentrant | None:
    """torch's own, `apply(run, preserve_rng_state, *inputs)`, and that of guided-diffusion and what descends from it
    (latent-diffusion, ControlNet, VideoGPT), `apply(run, n, *inputs, *parameters)` with n inputs."""
    if function is CheckpointFunction:
        run, preserve, *inputs = args
        return _Reentrant(run, tuple(inputs), preserve, tuple(inputs))
    if getattr(function, "__name__", "") != CheckpointFunction.__name__ or len(args) < 2:
        return None
    run, n, *rest = args
    if not callable(run) or type(n) is not int or not all(isinstance(x, nn.Parameter) for x in rest[n:]):
        return None
    return _Reentrant(run, tuple(rest[:n]), False, tuple(rest))
