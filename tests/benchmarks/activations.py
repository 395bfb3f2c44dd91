"""Bytes that one transformer layer keeps for backward, beside the formulas of Korthikanti et al. 2022.

    python -m tests.benchmarks.activations [--tp 2 4] [--batch 2] [--length 512] [--hidden 512] [--heads 8]

A Megatron-style layer of plain torch code, in bfloat16, split over real gloo ranks. Counted on each rank are the
storages of what autograd saves, shared ones once, parameters not: three layers less two. Two kinds of attention: eager
(matmul, softmax, dropout) and F.scaled_dot_product_attention (no dropout, as its fused kernels on a CPU have none).

Statistics, a few numbers per token (mean and variance of a norm, logsumexp of fused attention), are listed apart, since
the paper leaves them out. Dropout is counted twice: "measured" has its kernel of CUDA, `torch.native_dropout`, which
keeps a mask of 1 byte as the paper assumes; what F.dropout keeps on a CPU has the dtype of the input, 2 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp import MeshShape, ParallelismPlugin, ParallelMesh
from lightning_megatp.recompute.blocks import recompute_blocks
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.tensor import entry
from tests.ranks import pools, run_ranks


@dataclasses.dataclass(frozen=True)
class Shape:
    """b, s, h and a of the paper."""

    batch: int = 2
    length: int = 512
    hidden: int = 512
    heads: int = 8
    fused: bool = False
    """Attention by F.scaled_dot_product_attention."""

    @property
    def sbh(self) -> int:
        return self.length * self.batch * self.hidden

    @property
    def scores(self) -> float:
        """5 a s / h; nothing for fused attention."""
        return 0.0 if self.fused else 5 * self.heads * self.length / self.hidden


@dataclasses.dataclass(frozen=True)
class Row:
    """A layout, and what the paper says of it."""

    name: str
    tp: int = 1
    sequence: bool = False
    recompute: str = "none"

    def formula(self, shape: Shape) -> float:
        """Bytes per layer and rank."""
        t = self.tp
        if self.recompute == "full":
            return shape.sbh * 2 / t
        scores = 0.0 if self.recompute == "selective" else shape.scores
        whole, split = (0.0, 34.0) if self.sequence else (10.0, 24.0)
        return shape.sbh * (whole + (split + scores) / t)


class Layer(nn.Module):
    """Pre-norm; shapes: b batch, s sequence, h hidden, n heads of this rank, d head size."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        h, self.heads, self.fused = shape.hidden, shape.heads, shape.fused
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("later", torch.ones(shape.length, shape.length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.out(self.attention(*self.qkv(self.norm1(x)).chunk(3, -1))))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def attention(self, *parts: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(self.later, float("-inf")).softmax(-1)
            y = F.dropout(weights, 0.1, self.training) @ v
        return y.transpose(1, 2).flatten(2)


PLAN = {
    "blocks.*": "sequence",
    "blocks.*.qkv": {"style": "column", "parts": 3},
    "blocks.*.heads": "divide",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
}


def rows(tp: int) -> list[Row]:
    return [
        Row("tensor parallel", tp),
        Row("+ sequence parallel", tp, sequence=True),
        Row('+ recompute="selective"', tp, sequence=True, recompute="selective"),
        Row('tensor parallel, recompute="full"', tp, recompute="full"),
        Row('+ sequence parallel, recompute="full"', tp, sequence=True, recompute="full"),
    ]


ALONE = [
    Row("one device"),
    Row('recompute="selective"', recompute="selective"),
    Row('recompute="full"', recompute="full"),
]


def measure(rank: int, world_size: int, row: Row, shape: Shape, cuda_dropout: bool) -> tuple[int, int]:
    """Bytes that one layer keeps on this rank: activations, statistics. A shape stands for larger ones."""
    dropout = _dropout_of_cuda() if cuda_dropout else contextlib.nullcontext()
    with dropout, mock.patch.object(entry, "KEPT_BYTES", 0):
        three, two = (_kept(row, shape, layers) for layers in (3, 2))
    return three[0] - two[0], three[1] - two[1]


def _kept(row: Row, shape: Shape, layers: int) -> tuple[int, int]:
    torch.manual_seed(0)
    module = nn.Module()
    module.blocks = nn.ModuleList(Layer(shape) for _ in range(layers)).bfloat16()
    mesh = ParallelMesh(MeshShape(tp=row.tp))
    parallel = ParallelismPlugin(PLAN).parallelize(module, mesh, torch.device("cpu"), row.sequence)
    recompute_blocks(parallel, options := RecomputeOptions.of(row.recompute))
    if parallel.recomputation is not None:
        parallel.recomputation.choose(options)
    held = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    x = torch.randn(shape.batch, shape.length, shape.hidden, dtype=torch.bfloat16).requires_grad_() * 1
    for first in (True, False):  # the first step looks around
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), parallel.step(watch=first):
            y = x
            for block in module.blocks:
                y = block(y)
            y = parallel.outputs(y)
    storages = {x.untyped_storage().data_ptr(): x for x in saved}
    sizes = [x.untyped_storage().nbytes() for pointer, x in storages.items() if pointer not in held]
    small = [size for size in sizes if size <= 4 * shape.batch * shape.length * shape.heads]
    y.float().square().mean().backward()  # and it works
    return sum(sizes) - sum(small), sum(small)


@contextlib.contextmanager
def _dropout_of_cuda() -> Iterator[None]:
    """F.dropout by the kernel it has on CUDA, which exists for CPUs too."""

    def dropout(x: Tensor, p: float, training: bool) -> Tensor:
        return torch.native_dropout(x, p, training)[0] if training else x

    with mock.patch("torch.nn.functional._VF.dropout", dropout):
        yield


def table(shape: Shape, sizes: list[int]) -> list[str]:
    """Markdown."""
    kind = "F.scaled_dot_product_attention" if shape.fused else "eager attention with dropout"
    lines = [
        f"{kind}, b={shape.batch} s={shape.length} h={shape.hidden} a={shape.heads}; bytes per layer and rank over sbh",
        "",
        "| | t | formula | measured | ratio | with CPU's dropout | statistics |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in [*ALONE, *(row for tp in sizes for row in rows(tp))]:
        formula = row.formula(shape) / shape.sbh
        (cuda, small), (cpu, _) = (max(run_ranks(row.tp, measure, row, shape, kind)) for kind in (True, False))
        figures = f"{formula:.2f} | {cuda / shape.sbh:.2f} | {cuda / shape.sbh / formula:.3f} | {cpu / shape.sbh:.2f}"
        lines.append(f"| {row.name} | {row.tp} | {figures} | {small / shape.sbh:.3f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    for field in ("batch", "length", "hidden", "heads"):
        parser.add_argument(f"--{field}", type=int, default=getattr(Shape(), field))
    arguments = vars(parser.parse_args())
    sizes = arguments.pop("tp")
    for fused in (False, True):
        print("\n".join([*table(Shape(**arguments, fused=fused), sizes), ""]), flush=True)
    pools.close()


if __name__ == "__main__":
    from tests.benchmarks import activations  # what the ranks get is pickled by the module's name, not as __main__'s

    activations.main()
