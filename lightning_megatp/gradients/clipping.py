"""Clipping by torch's own functions, which the user's code calls where it may find parts of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from lightning_megatp.gradients.norm import global_norm
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.gradients import ClipCall
from lightning_megatp.shim.torch import DisableTorchFunction


def clip(call: ClipCall, held: Iterable[Tensor], parallel: ParallelModule, mesh: ParallelMesh) -> Tensor | None:
    """Clip what this rank trains, by the norm that all ranks have together.

    Args:
        call: what is asked for.
        held: in place of the parameters that it was given.
        parallel: whose they are.
        mesh: where it is. All ranks call this.

    Returns:
        As torch: the norm, (), or None where values are clipped.

    Raises:
        ValueError: an order that has no sum over ranks.
        RuntimeError: the norm is not finite, and has to be.

    Communication: that of `global_norm`; none where values are clipped.
    """
    held = list(held)
    trained = [parameter for parameter in held if parameter.grad is not None]
    if call.limit is None:
        if trained:  # torch's function fails where a pipeline stage trains nothing
            call.of(trained)
        return None
    if not call.order > 0:
        raise ValueError(
            f"MegaTPStrategy: clip_grad_norm_(norm_type={call.order:g}), of gradients of which each rank has parts."
            " Norms of an order above 0, or infinite, can be put together."
        )
    norm = global_norm(held, parallel, mesh, call.order)
    if call.has_to_be_finite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {call.order:g} of the gradients is {norm.item()}, and clip_grad_norm_ was told to raise"
            " then (error_if_nonfinite=True)."
        )
    clip_grads_with_norm_(trained, call.limit, norm)
    return norm


def clip_in_hook(
    call: ClipCall, parallel: ParallelModule, mesh: ParallelMesh, does: Callable[..., Any] | None = None
) -> Any:
    """Do what a hook asks for that all ranks run, between a backward and the optimizer's step.

    With stages ranks only know that all of them ask if each gives all that it trains: `self.parameters()` has none of
    other stages.

    Args:
        does: clips, in place of `clip`, where the hook finds the 2-norms of whole gradients by itself.

    Raises:
        RuntimeError: gradients of some parameters, in a pipeline, by a norm that ranks don't have.
    """
    finds_norms = does is not None
    held = [parallel.held(parameter) for parameter in call.parameters]
    own = {id(x): x for x in map(parallel.held, parallel.names.values())}
    if held and own.keys().isdisjoint(map(id, held)):
        return call.of(call.parameters)
    trained = {key for key, x in own.items() if x.grad is not None}  # of a frozen stage none
    if mesh.size("pp") > 1 and call.limit is not None and (call.is_of_one or not trained <= {id(x) for x in held}):
        parted = any(id(x) in parallel.sharded or id(x) in parallel.divided for x in held)
        if not finds_norms and (parted or not call.is_of_one):
            raise RuntimeError(
                "MegaTPStrategy: a hook clips the gradients of some parameters by their norm, of which each pipeline"
                " stage has its own. Clip those of `self.parameters()`, or give Trainer(gradient_clip_val=...)."
            )
        return call.of(call.parameters)
    if mesh.size("pp") == 1 and finds_norms and call.order == 2.0:
        return call.of(call.parameters)
    with DisableTorchFunction():
        return (does or clip)(call, held, parallel, mesh)
