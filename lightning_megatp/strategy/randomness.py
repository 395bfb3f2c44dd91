"""One random stream for all ranks that work on the same samples, another for each data-parallel index."""

from __future__ import annotations

import pickle
import random
import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.random_states import generator_state, random_state, set_generator_state, set_random_state
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.snapshots.snapshot import drawn_by

_MIX = 0xD1B54A32D192ED03  # an odd 64-bit constant: neighbouring dp ranks get unrelated seeds


def synchronize_random_state(mesh: ParallelMesh) -> None:
    """Give every rank rank 0's random state, then set apart the data-parallel ranks above 0.

    Without it, ranks that were not seeded alike shuffle differently and drop out different units of whole values. dp
    rank 0 goes on with the very stream of the one-device run.

    Communication: one object broadcast over the world (about 8 KB), at set-up.
    """
    share_random_state()
    if mesh.rank("dp") > 0:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
        drawn = int(torch.randint(0, 2**62, (), generator=generator))
        seed = (drawn + mesh.rank("dp") * _MIX) % 2**63
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def share_random_state() -> None:
    """Give every rank rank 0's random state.

    Communication: one object broadcast over the world (about 8 KB).
    """
    states: list[Any] = [random_state() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(states, src=0)
    set_random_state(states[0])


def share_drawn(module: nn.Module, mesh: ParallelMesh) -> None:
    """Give what a module holds besides parameters and buffers, in plain tensors, arrays and generators, the values of
    the first among the ranks that work on the same samples. Where processes are not seeded alike, `__init__` may have
    drawn others in each: a permutation, a random projection.

    Args:
        module: whole: the same on all ranks but for its values.

    Communication: an object all-gather of a number for each of them, and one of those that differ, over tp and pp.
    """
    held = drawn_by(module.modules())
    marks = mesh.exchange([_mark(x) for x in held], "pp", "tp")
    if any([kind for kind, _ in other] != [kind for kind, _ in marks[0]] for other in marks):
        return  # what is there depends on the rank, too
    different = [i for i, (mine, *others) in enumerate(zip(*marks, strict=True)) if any(x != mine for x in others)]
    if not different:
        return
    first = mesh.ranks("pp", "tp")[0] == mesh.global_rank
    values = mesh.exchange([_value(held[i]) for i in different] if first else None, "pp", "tp")[0]
    for i, value in zip(different, values, strict=True):
        _put(held[i], value)


_MOST = 1 << 26
"""Bytes of a tensor or array that are compared: more is data."""


def _mark(x: Any) -> tuple[Any, int]:
    """What has to be alike on all ranks, and a number of its value."""
    if not isinstance(x, Tensor | np.ndarray):
        return type(x).__name__, zlib.crc32(pickle.dumps(_value(x)))
    kind = (tuple(x.shape), str(x.dtype))
    if isinstance(x, Tensor):
        other = is_fake(x) or x.is_meta or x.is_quantized or x.is_conj() or x.is_neg()
        comparable = type(x) is Tensor and x.layout is torch.strided and not other
    else:
        comparable = x.flags.writeable and not x.dtype.hasobject
    return kind, zlib.crc32(pickle.dumps(_value(x))) if comparable and x.nbytes <= _MOST else 0


def _value(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return x if isinstance(x, np.ndarray) else generator_state(x)


def _put(x: Any, value: Any) -> None:
    if isinstance(x, Tensor):
        with torch.no_grad():
            x.copy_(torch.frombuffer(bytearray(value), dtype=x.dtype).view(x.shape))
    elif isinstance(x, np.ndarray):
        x[...] = value
    else:
        set_generator_state(x, value)


def gather_random_states(mesh: ParallelMesh) -> list[dict[str, Any]] | None:
    """The random states of all data-parallel ranks, on global rank 0; the tensor ranks of each share one.

    Communication: one object gather over dp (about 8 KB each), between the hosts. Every rank has to call it.
    """
    if mesh.rank("tp") > 0 or not mesh.is_last_stage:
        return None
    states: list[Any] | None = [None] * mesh.size("dp") if mesh.rank("dp") == 0 else None
    dist.gather_object(random_state(), states, dst=mesh.ranks("dp")[0], group=mesh.hosts("dp"))
    return states
