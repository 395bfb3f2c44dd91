"""One random stream for all ranks that work on the same samples, another for each data-parallel index."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatp.mesh import ParallelMesh

_MIX = 0xD1B54A32D192ED03  # an odd 64-bit constant: neighbouring dp ranks get unrelated seeds


def synchronize_random_state(mesh: ParallelMesh) -> None:
    """Give every rank rank 0's random state, then set apart the data-parallel ranks above 0.

    Without it, ranks that were not seeded alike shuffle differently and drop out different units of whole values. dp
    rank 0 goes on with the very stream of the one-device run.

    Communication: one object broadcast over the world (about 8 KB), at set-up.
    """
    states: list[Any] = [None]
    if mesh.global_rank == 0:
        states = [(random.getstate(), torch.get_rng_state(), _numpy_state())]
    dist.broadcast_object_list(states, src=0)
    python_state, torch_state, numpy_state = states[0]
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    _set_numpy_state(numpy_state)
    if mesh.device.type == "cuda":
        torch.cuda.manual_seed(_peek())
    if mesh.rank("dp") > 0:
        seed = (_peek() + mesh.rank("dp") * _MIX) % 2**63
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(seed % 2**32)


def _peek() -> int:
    """A number that depends on the torch state and leaves it as it is."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return int(torch.randint(0, 2**62, (), generator=generator))


def _numpy_state() -> Any:
    try:
        import numpy as np
    except ImportError:
        return None
    return np.random.get_state()


def _set_numpy_state(state: Any) -> None:
    if state is not None:
        import numpy as np

        np.random.set_state(state)


def _seed_numpy(seed: int) -> None:
    if _numpy_state() is not None:
        import numpy as np

        np.random.seed(seed)
