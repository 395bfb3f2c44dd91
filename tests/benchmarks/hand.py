"""Megatron's tensor parallelism written by hand, for one model: what ours is measured against.

Activations are (s, b, h), so that tokens gather without a copy. A column layer's backward gathers the tokens while
nothing depends on them, and overlaps the reduction of the input's gradient with the weight's gradient.
Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_megatp.shim.collectives import all_gather_single, reduce_scatter_single
from tests.benchmarks.models import LEARNING_RATE, Block, Transformer


def _gathered(x: Tensor) -> tuple[Tensor, Any]:
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    return whole, all_gather_single(whole, x, async_op=True)


def _reduced(x: Tensor) -> tuple[Tensor, Any]:
    own = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    return own, reduce_scatter_single(own, x, async_op=True)


class _Column(torch.autograd.Function):
    """(s, b, h) -> (s, b, features of this rank); with `sequence` from this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sequence: bool) -> Tensor:
        ctx.sequence, ctx.biased = sequence, bias is not None
        ctx.save_for_backward(x, weight)
        if sequence:
            x, work = _gathered(x)
            work.wait()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gather = None
        if ctx.sequence:
            x, gather = _gathered(x)
        dx = grad @ weight
        if ctx.sequence:
            dx, work = _reduced(dx)
        else:
            work = dist.all_reduce(dx, async_op=True)
        if gather is not None:
            gather.wait()
        flat = grad.flatten(0, 1)
        dw = flat.t() @ x.flatten(0, 1)
        db = flat.sum(0) if ctx.biased else None
        work.wait()
        return dx, dw, db, None


class _Row(torch.autograd.Function):
    """Partial sums -> their sum, or this rank's tokens of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence: bool) -> Tensor:
        ctx.sequence = sequence
        x, work = _reduced(x) if sequence else (x, dist.all_reduce(x, async_op=True))
        work.wait()
        if not sequence:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sequence:
            grad, work = _gathered(grad.contiguous())
            work.wait()
        return grad, None


class _Loss(torch.autograd.Function):
    """Cross-entropy of logits whose classes are split. (n, classes of this rank), (n) -> mean"""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        most = logits.max(-1).values
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        shifted = logits - most.unsqueeze(-1)
        own = target - dist.get_rank() * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0)
        picked = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), picked])
        dist.all_reduce(sums)
        ctx.save_for_backward(exps.div_(sums[0].unsqueeze(-1)), own, elsewhere)
        return (sums[0].log() - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, own, elsewhere = ctx.saved_tensors
        softmax.scatter_add_(-1, own.unsqueeze(-1), elsewhere.float().unsqueeze(-1) - 1)
        return softmax.mul_(grad / len(own)), None


class HandBlock(nn.Module):
    def __init__(self, block: Block, sequence: bool) -> None:
        super().__init__()
        attention, mlp = block.attention, block.mlp
        self.sequence, self.head = sequence, attention.head
        self.norm1, self.norm2 = block.norm1, block.norm2
        projections = (attention.q, attention.k, attention.v)
        self.qkv = nn.Parameter(torch.cat([_rows(p.weight) for p in projections]))
        self.qkv_bias = nn.Parameter(torch.cat([_rows(p.bias) for p in projections]))
        self.o, self.o_bias = nn.Parameter(_columns(attention.o.weight)), attention.o.bias
        self.fc1, self.fc1_bias = nn.Parameter(_rows(mlp.fc1.weight)), nn.Parameter(_rows(mlp.fc1.bias))
        self.fc2, self.fc2_bias = nn.Parameter(_columns(mlp.fc2.weight)), mlp.fc2.bias

    def forward(self, x: Tensor) -> Tensor:
        qkv = _Column.apply(self.norm1(x), self.qkv, self.qkv_bias, self.sequence)
        s, b, _ = qkv.shape
        q, k, v = qkv.view(s, b, 3, -1, self.head).permute(2, 1, 3, 0, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.linear(attended.permute(2, 0, 1, 3).reshape(s, b, -1), self.o)
        x = x + (_Row.apply(out, self.sequence) + self.o_bias)
        inner = F.gelu(_Column.apply(self.norm2(x), self.fc1, self.fc1_bias, self.sequence))
        return x + (_Row.apply(F.linear(inner, self.fc2), self.sequence) + self.fc2_bias)


class HandDecoder(nn.Module):
    """The shards of a `Transformer` on this rank, and its training step.

    Args:
        model: the whole model; its parameters are sliced.
        sequence: whether norms and residuals hold this rank's tokens only.
    """

    def __init__(self, model: Transformer, sequence: bool) -> None:
        super().__init__()
        self.sequence = sequence
        self.embed = nn.Parameter(_rows(model.embed.weight))
        self.blocks = nn.ModuleList(HandBlock(block, sequence) for block in model.blocks)
        self.norm = model.norm
        self.head = nn.Parameter(_rows(model.head.weight))
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)
        own = ("norm", "o_bias", "fc2_bias")
        self.on_own_tokens = [p for name, p in self.named_parameters() if any(part in name for part in own)]

    def step(self, ids: Tensor, target: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self(ids, target)
        loss.backward()
        self.sum_gradients()
        self.optimizer.step()
        return loss

    def sum_gradients(self) -> None:
        """Of what each rank used on its own tokens."""
        if not self.sequence:
            return
        grads = [p.grad for p in self.on_own_tokens]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        rows = len(self.embed)
        own = ids.t() - dist.get_rank() * rows
        elsewhere = (own < 0) | (own >= rows)
        h = F.embedding(own.masked_fill(elsewhere, 0), self.embed).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        h = _Row.apply(h, self.sequence)
        for block in self.blocks:
            h = block(h)
        logits = _Column.apply(self.norm(h), self.head, None, self.sequence)
        return _Loss.apply(logits.flatten(0, 1), target.t().flatten())


class HandModule(LightningModule):
    """The same in Lightning's loop, on what Lightning takes for a single device: what the loop alone costs."""

    def __init__(self, decoder: HandDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.decoder(*batch)

    def on_after_backward(self) -> None:
        self.decoder.sum_gradients()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.decoder.optimizer


def _rows(x: Tensor) -> Tensor:
    return x.detach().chunk(dist.get_world_size(), 0)[dist.get_rank()].clone()


def _columns(x: Tensor) -> Tensor:
    return x.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()
