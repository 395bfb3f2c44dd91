"""LightningModules whose steps do what a plan can't know: change with the batch, recompute, differentiate twice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.parity.models import GPT, GPTConfig


class LateRegulariser(GPT):
    """From the fourth batch on the loss contains a norm of a weight that the plan splits."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * self.blocks[0].mlp.up.weight.norm() if batch_idx >= 3 else loss


class RegularisedEverywhere(GPT):
    """Every parameter is used outside its layer, so that none stays split; and counted before, which is no use."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert sum(p.numel() for p in self.parameters()) == self.size, "a tied weight counts once"
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.abs().sum() for p in self.parameters())

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.size = sum(p.numel() for p in self.parameters())


class Recomputed(GPT):
    """Activation checkpointing of every block, as the user writes it."""

    reentrant = False

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.size(1), device=tokens_BL.device)
        x_BLD = self.drop(self.tok(tokens_BL) + self.pos(positions_L))
        for block in self.blocks:
            x_BLD = checkpoint(block, x_BLD, use_reentrant=self.reentrant)
        return self.norm(x_BLD)


class RecomputedReentrant(Recomputed):
    reentrant = True


class CheckpointFunction(torch.autograd.Function):
    """As guided-diffusion has it, and what descends from it: its backward runs the function again, and asks autograd
    for the gradients of inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: Any) -> Any:
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.run(*[x.view_as(x) for x in ctx.inputs])
        found = torch.autograd.grad(outputs, ctx.inputs + ctx.parameters, grads, allow_unused=True)
        return (None, None, *found)


class RecomputedByFunction(GPT):
    """Blocks in a checkpoint function of the model's own, one inside of torch's reentrant one."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.size(1), device=tokens_BL.device)
        x_BLD = self.drop(self.tok(tokens_BL) + self.pos(positions_L))
        for i, block in enumerate(self.blocks):

            def run(x: Tensor, block: nn.Module = block) -> Tensor:
                return CheckpointFunction.apply(block, 1, x, *block.parameters())

            x_BLD = checkpoint(run, x_BLD, use_reentrant=True) if i else run(x_BLD)
        return self.norm(x_BLD)


class RecomputedParts(GPT):
    """Activation checkpointing inside the blocks: of the MLPs alone."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        for block in self.blocks:
            forward = block.mlp.forward
            block.mlp.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


class Looking(TorchDispatchMode):
    """Stands for the modes that count, log or check operations below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class LookedAt(GPT):
    """Runs forward and backward under a dispatch mode."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with Looking():
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with Looking():
            super().backward(loss, *args, **kwargs)


class Twice(GPT):
    """Runs the model twice per step, once on other lengths, and once without gradients."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        with torch.no_grad():
            teacher_BLV = self(inputs)
        student_BLV = self(inputs)
        shorter_BLV = self(inputs[:, : max(1, inputs.size(1) // 2)])
        distillation = F.mse_loss(student_BLV, 0.9 * teacher_BLV)
        main = F.cross_entropy(student_BLV.flatten(0, 1), targets.flatten())
        return main + distillation + shorter_BLV.square().mean()


class Replaced(GPT):
    """Calls layers with other parameters: computed ones, as meta-learning does, and, afterwards, their own."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        mlp, x_BLD = self.blocks[0].mlp, self.tok(batch[0])
        own = dict(mlp.named_parameters())
        smaller_BLD = torch.func.functional_call(mlp, {name: 0.9 * p for name, p in own.items()}, (x_BLD,))
        same_BLD = torch.func.functional_call(mlp, own, (x_BLD,))
        return super().loss(batch) + (same_BLD - 2 * smaller_BLD).square().mean()


class InPlace(GPT):
    """Changes a column layer's input between two layers that read it."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.mlp.gate.requires_grad_(False)  # or its input would be needed unchanged
            block.mlp.forward = lambda x, mlp=block.mlp: self._mlp(mlp, x)

    @staticmethod
    def _mlp(mlp: torch.nn.Module, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD * 1.0
        gate = mlp.gate(x_BLD)
        x_BLD.mul_(0.5)
        return mlp.down(F.silu(gate) * mlp.up(x_BLD))


class GradientPenalty(GPT):
    """Differentiates its own gradient."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        (grad,) = torch.autograd.grad(loss, self.norm.weight, create_graph=True)
        return loss + grad.square().sum()


class AdaptiveWeights(GPT):
    """Losses weighed by their gradients on shared layers (VQGAN, GradNorm): on split and whole parameters, in regions
    and outside of them."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens_BL, targets_BL = batch
        logits_BLV = self(tokens_BL)
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
        other = logits_BLV.square().mean()
        shared = [*self.blocks[0].parameters(), self.norm.weight]
        gradients = zip(*(torch.autograd.grad(x, shared, retain_graph=True) for x in (loss, other)), strict=True)
        for mine, others in gradients:
            loss = loss + 0.01 * other * (mine.norm() / (others.norm() + 1e-3)).detach()
        return loss


class ManualAccumulation(GPT):
    """Two backward passes by hand before each step, clipped by hand through Lightning."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        first, second = self.loss(batch), self.loss((batch[0].flip(1), batch[1]))
        optimizer.zero_grad()
        self.manual_backward(first)
        self.manual_backward(0.5 * second)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        return first + second


class Computed(GPT):
    """Norms and a head with weights computed from parameters: low-rank updates of frozen weights."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        hidden, vocab = self.head.in_features, self.head.out_features
        self.down, self.up = (torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in ((2, hidden), (vocab, 2)))
        self.log_scale, self.shift = (torch.nn.Parameter(0.1 * torch.randn(hidden)) for _ in range(2))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        h_BLD = F.layer_norm(self.trunk(tokens_BL), (self.head.in_features,), self.log_scale.exp(), self.shift)
        return F.linear(h_BLD, self.head.weight + self.up @ self.down)
