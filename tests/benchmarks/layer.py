"""A transformer layer of 70B-class models, and the shard of it that one tensor rank computes: by this package's layers,
and by plain nn.Linear of the same shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp import MeshShape, ParallelismPlugin, ParallelMesh
from lightning_megatp.tensor.sequence import SequenceLayout, SequenceShard

PLAN = {"blocks.*": "sequence"}
PLAN |= {f"blocks.*.{name}": "column" for name in ("q", "k", "v", "gate", "up")}
PLAN |= {f"blocks.*.{name}": "row" for name in ("o", "down")}


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """A size of `sizes.toml`: of the whole layer, and how many ranks share it.

    Args:
        layers: how many are stacked.
        tokens: of one sequence, on all ranks together.
        sequences: of a batch.
    """

    tp: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    tokens: int
    sequences: int = 1

    def __str__(self) -> str:
        shards = f"tp={self.tp} shards of {self.layers} layers of {self.hidden}/{self.ffn}"
        return f"{shards}, {self.sequences} x {self.tokens} tokens"

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def flops(self) -> float:
        """Of one layer's shard, forward and backward: twice the forward's. Causal attention needs half of the scores;
        what its backward computes again is not counted."""
        queries, keys, inner = self.hidden // self.tp, self.kv_heads * self.head // self.tp, self.ffn // self.tp
        linears = 2 * self.tokens * self.hidden * (2 * queries + 2 * keys + 3 * inner)
        return 3 * self.sequences * (linears + 2 * self.tokens**2 * queries)


class Layer(nn.Module):
    """A pre-norm layer with grouped-query attention and a gated MLP. (b, s, h) -> (b, s, h)

    Args:
        ways: over how many ranks its features are divided already.
    """

    def __init__(self, size: LayerSize, ways: int = 1) -> None:
        super().__init__()
        h, queries, keys, inner = size.hidden, size.hidden // ways, size.kv_heads * size.head // ways, size.ffn // ways
        self.head = size.head
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.q, self.k, self.v = (nn.Linear(h, features, bias=False) for features in (queries, keys, keys))
        self.o = nn.Linear(queries, h, bias=False)
        self.gate, self.up = nn.Linear(h, inner, bias=False), nn.Linear(h, inner, bias=False)
        self.down = nn.Linear(inner, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.leave(self.attend(self.enter(self.norm1(x))))
        y = self.enter(self.norm2(x))
        return x + self.leave(self.down(F.silu(self.gate(y)) * self.up(y)))

    def attend(self, x: Tensor) -> Tensor:
        """(b, s, h) -> (b, s, h)"""
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))

    def enter(self, x: Tensor) -> Tensor:
        """What the features that are divided are computed of."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What is made of their partial sum."""
        return x


class PlainLayer(Layer):
    """A rank's shard of plain nn.Linear.

    Args:
        elsewhere: what stands for the tokens of other ranks, and for gradients of them, (b, s, h): norms and sums see
            1 / tp of the tokens, the linears all, and no time is spent on getting from one to the other. None: all see
            all tokens.
    """

    def __init__(self, size: LayerSize, elsewhere: Tensor | None) -> None:
        super().__init__(size, ways=size.tp)
        self.own, self.elsewhere = size.tokens // size.tp, elsewhere

    def enter(self, x: Tensor) -> Tensor:
        return x if self.elsewhere is None else _Enter.apply(x, self.own, [self.elsewhere])

    def leave(self, x: Tensor) -> Tensor:
        return x if self.elsewhere is None else _Leave.apply(x, self.own, [self.elsewhere])


class _Enter(torch.autograd.Function):
    """Own tokens -> all tokens, for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: int, elsewhere: list[Tensor]) -> Tensor:
        ctx.own = own
        return elsewhere[0].detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.narrow(1, 0, ctx.own), None, None


class _Leave(torch.autograd.Function):
    """All tokens -> own tokens, for nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, own: int, elsewhere: list[Tensor]) -> Tensor:
        ctx.elsewhere = elsewhere
        return x.detach().narrow(1, 0, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.elsewhere[0].detach(), None, None


class Stack(nn.Module):
    """Layers one after another. (b, s, h) -> (b, s, h)"""

    def __init__(self, size: LayerSize, make: Callable[[], Layer]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(size.layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Plain:
    """The training step of plain layers, without an optimizer.

    Args:
        sequence: whether norms and sums see 1 / tp of the tokens.
        compiler: of `torch.compile`; None runs the layers as they are.
    """

    def __init__(
        self, size: LayerSize, sequence: bool, device: torch.device, dtype: torch.dtype, compiler: str | None = None
    ) -> None:
        tokens = size.tokens // size.tp if sequence else size.tokens
        with device:
            torch.manual_seed(0)
            elsewhere = torch.randn(size.sequences, size.tokens, size.hidden, dtype=dtype) if sequence else None
            self.model = Stack(size, lambda: PlainLayer(size, elsewhere)).to(dtype)
            self.x = torch.randn(size.sequences, tokens, size.hidden, dtype=dtype, requires_grad=True)
            self.grad = torch.randn_like(self.x)
        compile_blocks(self.model, compiler)

    def step(self) -> Tensor:
        """Forward and backward; gradients are dropped."""
        y = self.model(self.x)
        y.backward(self.grad)
        return forget_gradients(y, self.model, self.x)


class Ours:
    """The training step of the same layers, split by the plugin as MegaTPStrategy does it. Arguments as `Plain`'s; the
    default process group is the tensor group."""

    def __init__(
        self, size: LayerSize, sequence: bool, device: torch.device, dtype: torch.dtype, compiler: str | None = None
    ) -> None:
        mesh = ParallelMesh(MeshShape(tp=dist.get_world_size()), device.type, host_backend=dist.get_backend())
        self.plugin = ParallelismPlugin(PLAN)
        with device:
            torch.manual_seed(0)
            self.model = Stack(size, lambda: Layer(size)).to(dtype)
        compile_blocks(self.model, compiler)
        self.parallel = self.plugin.parallelize(self.model, mesh, device, sequence_parallel=sequence)
        self.layout = SequenceLayout(-2, size.tokens, self.parallel.context) if sequence else None
        tokens = size.tokens // size.tp if sequence else size.tokens
        with device:
            self.x = torch.randn(size.sequences, tokens, size.hidden, dtype=dtype, requires_grad=True)
            self.grad = torch.randn_like(self.x)

    def forward(self) -> Tensor:
        """This rank's part of what the layers make of x."""
        x = self.x if self.layout is None else SequenceShard.wrap(self.x, self.layout)
        with self.parallel.step(watch=False):
            y = self.model(x)
        return _Edge.apply(y.plain) if isinstance(y, SequenceShard) else y

    def step(self) -> Tensor:
        """Forward and backward; gradients are dropped."""
        y = self.forward()
        self.backward(y)
        return forget_gradients(y, self.model, self.x)

    def backward(self, y: Tensor) -> None:
        """As MegaTPStrategy does it."""
        self.parallel.partial.trace([y], received=[self.x])
        with self.parallel.user_code():
            y.backward(self.grad)
        self.plugin.finalize_gradients(self.parallel)
        self.parallel.partial.forget()


class _Edge(torch.autograd.Function):
    """Where further layers would follow, which also see this rank's tokens. The marks are those of
    `lightning_megatp.tensor.collectives`: `trace` expects a loss behind them, the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.region_above, ctx.region_below = "whole", "sequence"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def compile_blocks(model: Stack, compiler: str | None) -> None:
    """Compile each block by itself, as one does where they are alike."""
    for block in model.blocks if compiler is not None else ():
        block.compile(backend=compiler)


def forget_gradients(y: Tensor, model: nn.Module, x: Tensor) -> Tensor:
    """Drop them, and hand on what the step computed."""
    for tensor in (*model.parameters(), x):
        tensor.grad = None
    return y.detach()
