"""Saving and loading a folder, beside torch.save and torch.distributed.checkpoint (DCP) with the same bytes.

    python -m tests.benchmarks.checkpoint [--rounds 5] [--mib 128]

Two processes. Each holds tensors of 4 MiB, half of each tensor's rows in two pieces, as a fused projection has them.
Every round runs in turn (A B A B), all with fsync:

- ours: checksums, agreement of the ranks, rename;
- dcp: torch.distributed.checkpoint itself, on the same chunks;
- torch: each rank one torch.save / torch.load of its own part.

Printed are medians of the slower rank in MiB/s of all ranks together, and ratios with their spread over the rounds.
Files are read from the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_megatp.checkpoint.chunks import Chunks, LoadPlanner, SavePlanner
from lightning_megatp.checkpoint.folder import Folder, save_folder, to_bytes
from lightning_megatp.plan.shard import ShardedTensorSpec
from tests.ranks import pools, run_ranks

ROWS, COLUMNS = 1024, 1024
BY_RANK = (((0, 256), (512, 768)), ((256, 512), (768, 1024)))
Seconds = dict[str, list[float]]


def measure(rank: int, world_size: int, mib: int, rounds: int, root: str) -> Seconds:
    """Seconds of each kind of save and load, by round."""
    specs = {f"{i}": ShardedTensorSpec(f"{i}", (ROWS, COLUMNS), 0, BY_RANK).spec(rank) for i in range(mib // 4)}
    held = {name: torch.randn(spec.local_shape) for name, spec in specs.items()}
    reads = {name: Chunks.to_read(torch.empty_like(x), specs[name]) for name, x in held.items()}
    writes = {name: Chunks.to_write(x, specs[name], True) for name, x in held.items()}
    ours, theirs, plain = (Path(root) / name for name in ("ours", "dcp", f"torch{rank}.pt"))

    def save_plain() -> None:
        with plain.open("wb") as file:
            torch.save(held, file)
            file.flush()
            os.fsync(file.fileno())

    def save_theirs() -> None:
        dcp.save(dict(writes), storage_writer=dcp.FileSystemWriter(theirs), planner=SavePlanner())

    def load_theirs() -> None:
        reader = dcp.FileSystemReader(theirs)
        planner = LoadPlanner(dict(reads), reader.read_metadata())
        dcp.load(dict(reads), storage_reader=reader, planner=_Loads(planner))

    kinds: dict[str, Callable[[], object]] = {
        "save ours": lambda: save_folder(ours, writes, to_bytes({})),
        "save dcp": save_theirs,
        "save torch": save_plain,
        "load ours": lambda: Folder(ours).read(reads),
        "load dcp": load_theirs,
        "load torch": lambda: _copy(torch.load(plain), reads),
    }
    found: Seconds = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, run in kinds.items():
            dist.barrier()
            if rank == 0 and name in ("save ours", "save dcp"):
                shutil.rmtree(ours if name == "save ours" else theirs, ignore_errors=True)
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if turn:  # the first warms up
                found[name].append(time.perf_counter() - start)
    assert all(torch.equal(reads[name].tensor, x) for name, x in held.items())
    return found


class _Loads(LoadPlanner):
    """For dcp.load, which sets a planner up itself."""

    def __init__(self, made: LoadPlanner) -> None:
        self.__dict__.update(made.__dict__)

    def set_up_planner(self, *args: object, **kwargs: object) -> None:
        pass


def _copy(loaded: dict[str, Tensor], reads: dict[str, Chunks]) -> None:
    for name, x in loaded.items():
        reads[name].tensor.copy_(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=128, help="of both ranks together")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as root:
        found = run_ranks(2, measure, arguments.mib, arguments.rounds, root)[0]
    print(f"2 ranks, {arguments.mib} MiB in all, {arguments.rounds} rounds")
    for name, seconds in found.items():
        ratios = [a / b for a, b in zip(found[f"{name.split()[0]} ours"], seconds, strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        print(
            f"  {name:10s} {arguments.mib / statistics.median(seconds):7.0f} MiB/s"
            f"   ours / this: {statistics.median(ratios):.2f} ({spread})"
        )
    pools.close()


if __name__ == "__main__":
    from tests.benchmarks import checkpoint  # what the ranks get is pickled by the module's name, not as __main__'s

    checkpoint.main()
