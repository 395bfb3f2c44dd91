"""Activations in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import storage_id

_SMALL = 2**16
"""Bytes from which a copy is worth its start."""


class OffloadActivations(saved_tensors_hooks):
    """Around a step: what autograd saves goes to host memory until backward asks for it (`save_on_cpu`, pinned for
    CUDA), except parameters and buffers, which stay anyway, and small tensors.

    Args:
        held: parameters and buffers.
        pin_memory: copy by way of page-locked memory.
    """

    def __init__(self, held: Iterable[Tensor], pin_memory: bool) -> None:
        copies = save_on_cpu(pin_memory=pin_memory)
        stays = {storage_id(x) for x in held}

        def pack(x: Tensor) -> Tensor | tuple[object, ...]:
            if is_fake(x) or x.numel() * x.element_size() < _SMALL or storage_id(x) in stays:
                return x
            packed: tuple[object, ...] = copies.pack_hook(x)
            return packed

        def unpack(packed: Tensor | tuple[object, ...]) -> Tensor:
            return packed if isinstance(packed, Tensor) else copies.unpack_hook(packed)

        super().__init__(pack, unpack)
