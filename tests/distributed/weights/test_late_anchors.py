"""Copies of weights that hooks make and training steps read (L2-SP, elastic weight consolidation): hooks find a rank's
weights, steps those of all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.crossing import crossed
from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

ROWS: Any = torch.randint(0, 16, (16, 7), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Consolidation:
    """What elastic weight consolidation keeps of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.means = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.importance = {name: 1 + p.detach().abs() for name, p in model.named_parameters()}

    def penalty(self, model: nn.Module) -> Any:
        pairs = ((self.importance[name], p - self.means[name]) for name, p in model.named_parameters())
        return sum((importance * difference.square()).sum() for importance, difference in pairs)


class Model(LightningModule):
    """Pulled towards what a hook has copied."""

    def __init__(self, kind: str, hook: str) -> None:
        super().__init__()
        self.kind, self.hook = kind, hook
        self.anchor: Any = {} if kind == "filled" else None
        self.tok, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def copy_weights(self) -> None:
        if self.kind == "list":
            self.anchor = [p.detach().clone() for p in self.parameters()]
        elif self.kind == "blocks":
            self.anchor = [p.detach().clone() for p in self.blocks.parameters()]
        elif self.kind == "object":
            self.anchor = Consolidation(self)
        elif self.kind == "filled":
            for name, p in self.named_parameters():
                self.anchor[name] = p.detach().clone()
        else:
            self.anchor = {name: p.detach().clone() for name, p in self.named_parameters()}

    def penalty(self) -> Any:
        if not self.anchor:
            return 0.0
        if self.kind in ("list", "blocks"):
            of = self if self.kind == "list" else self.blocks
            return sum((p - a).square().sum() for p, a in zip(of.parameters(), self.anchor, strict=True))
        if self.kind == "object":
            return self.anchor.penalty(self)
        return sum((p - self.anchor[name]).square().sum() for name, p in self.named_parameters())

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        x = self.tok(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()) + 0.1 * self.penalty()

    def on_fit_start(self) -> None:
        self.copy_at("fit start")

    def on_train_start(self) -> None:
        self.copy_at("train start")

    def on_train_epoch_start(self) -> None:
        self.copy_at("each epoch")

    def on_train_epoch_end(self) -> None:
        self.copy_at("epoch end")

    def copy_at(self, hook: str) -> None:
        if self.hook == hook:
            self.copy_weights()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(layout: Layout, kind: str, hook: str) -> list[float]:
    torch.manual_seed(0)
    module, losses = Model(kind, hook), Losses()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(It is kept whole|does not have many workers)")
        strategy = None if layout.plain else {"plan": "auto"}
        trainer = make_trainer(
            layout, strategy=strategy, max_epochs=2, callbacks=[losses], use_distributed_sampler=False
        )
        trainer.fit(module, DataLoader(ROWS, batch_size=4))
    return losses.seen


LAYOUTS = [TP2, Layout(pp=2, microbatches=2), Layout(tp=2, dp=2)]


KEPT = [
    *(("dict", hook) for hook in ("fit start", "train start", "each epoch", "epoch end")),
    *((kind, "train start") for kind in ("list", "blocks", "filled")),
    ("object", "each epoch"),
]


@pytest.mark.parametrize(("kept", "layout"), [*crossed(KEPT[:4], LAYOUTS), *crossed(KEPT[4:], LAYOUTS)], ids=str)
def test_steps_find_whole_copies(kept: tuple[str, str], layout: Layout) -> None:
    kind, hook = kept
    (expected,) = run_program(PLAIN, _fit, kind, hook)
    for found in run_program(layout, _fit, kind, hook):
        assert found == pytest.approx(expected, rel=1e-9)


def test_split_weights_of_stages_are_refused() -> None:
    with pytest.raises(RankError, match=r"uses `blocks.0.down.weight`, which the plan splits, outside of its own"):
        run_program(TP2_PP2, _fit, "dict", "train start")
