"""Buffers of which each pipeline stage's hooks keep up those that belong to its own parameters: averages of weights, as
latent diffusion's LitEma has them. Every stage holds all of them, and a checkpoint wants each as its stage has it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_megatp.mesh import ParallelMesh, on_cpu
from lightning_megatp.places import address
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tensor_version

Versions = dict[str, tuple[int, int]]
"""Name of a buffer -> where it lies, and how often it was changed."""


def versions_of(module: nn.Module) -> Versions:
    """The versions of the buffers that this rank holds."""
    return {name: (address(x), tensor_version(x)) for name, x in _held(module).items()}


def agree_on_buffers(module: nn.Module, before: Versions, mesh: ParallelMesh) -> None:
    """Give all stages what hooks of a single one have made of a buffer that all hold. What the last stage has changed
    is its own, as steps leave it.

    Args:
        before: when training began, or at the agreement before.

    Communication: an object all-gather over pp of names, and one of those buffers.
    """
    held = _held(module)
    changed = {name for name, version in versions_of(module).items() if before.get(name, version) != version}
    of_last, *of_others = mesh.exchange((set(held), changed), "pp")  # index 0 is the last stage
    common = of_last[0].intersection(*(names for names, _ in of_others)) - of_last[1]
    wanted = {name for _, names in of_others for name in names} & common
    if not wanted:
        return
    with torch.no_grad():
        for values in mesh.exchange(on_cpu({name: held[name] for name in sorted(wanted & changed)}), "pp"):
            for name, value in values.items():
                held[name].copy_(value)


def _held(module: nn.Module) -> dict[str, Tensor]:
    return {name: x for name, x in module.named_buffers() if not is_fake(x) and not x.is_meta}
