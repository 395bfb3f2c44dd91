"""torch.compile with tensor parallelism, pipelines and zero: losses, gradients and weights are those of one device.

The backend only traces (`aot_eager`): a machine for tests need not have a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.crossing import fewer
from tests.distributed.training import PLAIN, TP2, Layout, eval_loader, make_trainer, run_program, train_loader

D, HIDDEN, HEAD, VOCAB, LENGTH = 16, 24, 4, 12, 6
TP2_DP2_ZERO3, TP2_PP2 = Layout(tp=2, dp=2, zero=3), Layout(tp=2, pp=2, microbatches=2)
PLAN = {
    **{f"decoder.blocks.*.attention.{name}": "column" for name in "qkv"},
    "decoder.blocks.*.attention.o": "row",
    "decoder.blocks.*.gate": "column",
    "decoder.blocks.*.up": "column",
    "decoder.blocks.*.down": "row",
    "decoder.embed": "vocab",
    "decoder.head": "column_gather",
}
ADAPTED = {
    **{name: style for name, style in PLAN.items() if "attention" in name},
    "decoder.blocks.*.gate.base": "column",
    "decoder.blocks.*.gate.up": "column",
    "decoder.blocks.*.up.base": "column",
    "decoder.blocks.*.up.up": "column",
    "decoder.blocks.*.down.base": "row",
    "decoder.blocks.*.down.down": "row",
}


class Attention(nn.Module):
    """Grouped queries, with norms of each head, whose gradients are partial on every tensor rank."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // 2), nn.Linear(D, D // 2, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD), nn.RMSNorm(HEAD)
        self.o, self.dropout = nn.Linear(D, D), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """A frozen linear layer and what is added to it (LoRA)."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.down, self.up = nn.Linear(inner, 2, bias=False), nn.Linear(2, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, linear: Callable[[int, int], nn.Module] = nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(D), Attention(dropout), nn.LayerNorm(D)
        self.gate, self.up, self.down = linear(D, HIDDEN), linear(D, HIDDEN), linear(HIDDEN, D)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) * self.scale)


class Decoder(nn.Module):
    """Args:
    again: the user's own checkpoint around each block.
    """

    def __init__(self, linear: Any, dropout: float, again: bool) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(Block(linear, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


class Model(LightningModule):
    """Args:
    compiled: "in_place" (`block.compile()`), "wrapped" (`torch.compile(block)`), "whole" (the decoder), "loss" (a
        function), or "".
    scaled: the scale of a block, inside of its tensor region, also scales the loss.
    """

    def __init__(
        self,
        compiled: str = "in_place",
        linear: Any = nn.Linear,
        dropout: float = 0.0,
        again: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.decoder, self.scaled = Decoder(linear, dropout, again), scaled
        blocks = self.decoder.blocks
        for i, block in enumerate(blocks):
            if compiled == "in_place":
                block.compile(backend="aot_eager")
            elif compiled == "wrapped":
                blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        if compiled == "whole":
            self.decoder.compile(backend="aot_eager")
        self.cross_entropy = F.cross_entropy
        if compiled == "loss":
            self.cross_entropy = torch.compile(_cross_entropy, backend="aot_eager")

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = self.cross_entropy(self.decoder(batch[0]).flatten(0, 1), batch[1].flatten())
        return loss * self.decoder.blocks[0].scale if self.scaled else loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


class Thaws(Model):
    """The second block learns from the third batch on, in the middle of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.decoder.blocks[1].requires_grad_(batch_idx > 1)


class Seen(Callback):
    """Losses, and the gradients of the last step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if hasattr(trainer.strategy, "full_gradients"):
            self.gradients = trainer.strategy.full_gradients()
        else:
            self.gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))


def _train(
    layout: Layout, model: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any], kind: type[Model] = Model
) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(3)
    module, seen = kind(**{**model, "compiled": ""} if layout.plain else model), Seen()
    trainer = make_trainer(layout, strategy={"plan": PLAN, **strategy}, callbacks=[seen], **options)
    trainer.fit(module, train_loader(layout, 4, vocab=VOCAB), eval_loader(layout, 2, vocab=VOCAB))
    state = trainer.strategy.lightning_module_state_dict()
    return {
        "losses": seen.losses,
        "val": trainer.callback_metrics["val"].item(),
        "gradients": {name.replace("_orig_mod.", ""): gradient for name, gradient in seen.gradients.items()},
        "state": {name.replace("_orig_mod.", ""): value for name, value in state.items()},
        "graphs": counters["stats"]["unique_graphs"],
    }


def _agrees(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=tolerance)
    assert found["val"] == pytest.approx(expected["val"], abs=tolerance)
    for kind in ("gradients", "state"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, atol=tolerance, rtol=0, msg=f"{kind}: {name}")


CASES: dict[str, tuple[Layout, dict[str, Any], dict[str, Any], type[Model]]] = {
    "in_place": (TP2, {}, {}, Model),
    "wrapped": (TP2, {"compiled": "wrapped"}, {}, Model),
    "whole": (TP2, {"compiled": "whole"}, {}, Model),
    "loss": (TP2, {"compiled": "loss"}, {}, Model),
    "frozen_and_adapted": (TP2, {"linear": Adapted}, {"plan": ADAPTED}, Model),
    "scaled": (TP2, {"scaled": True}, {}, Model),
    "thaws": (TP2, {}, {}, Thaws),
    "checkpoint": (TP2, {"again": True}, {}, Model),
    "recompute": (TP2, {}, {"recompute": "full"}, Model),
    "zero3": (TP2_DP2_ZERO3, {}, {}, Model),
    "pipeline": (TP2_PP2, {}, {}, Model),
    "checkpoint_in_a_pipeline": (TP2_PP2, {"again": True}, {}, Model),
}


@pytest.mark.parametrize(
    "case", fewer(CASES, extended=["wrapped", "whole", "frozen_and_adapted", "checkpoint", "recompute"])
)
def test_compiled_code_computes_the_same(case: str) -> None:
    layout, model, strategy, kind = CASES[case]
    (expected,) = run_program(PLAIN, _train, model, {}, {}, kind)
    results = run_program(layout, _train, model, strategy, {}, kind)
    _agrees(results[0], expected)
    for found in results:
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-9)
    assert any(found["graphs"] for found in results)


@pytest.mark.extended  # repeats a case of the first test in a further precision
def test_mixed_precision() -> None:
    """Beside the same without a compiler: their roundings to bfloat16 are the same, but for fused ones."""
    options = {"precision": "bf16-mixed"}
    plain, compiled = (run_program(TP2, _train, {"compiled": how}, {}, options)[0] for how in ("", "in_place"))
    _agrees(compiled, plain, tolerance=2e-3)
    assert compiled["graphs"] > 0


@pytest.mark.extended  # repeats a case of the first test with dropout
def test_ranks_agree_on_dropout_in_compiled_code() -> None:
    first, second = run_program(TP2, _train, {"dropout": 0.5}, {}, {})
    assert first["losses"] == second["losses"] and first["graphs"] > 0
