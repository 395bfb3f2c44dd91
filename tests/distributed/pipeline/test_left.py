"""Hooks that put weights in, or back, and read what steps of validation have kept: all stages run them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError


class Average:
    """As libraries keep one: nothing that a module knows of."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [p.detach().clone() for p in parameters]
        self.kept: list[Tensor] = []

    def update(self, parameters: Any) -> None:
        for mean, p in zip(self.shadow, parameters, strict=True):
            mean.lerp_(p.detach(), 0.3)

    def swap(self, parameters: list[nn.Parameter]) -> None:
        self.kept = [p.detach().clone() for p in parameters]
        for mean, p in zip(self.shadow, parameters, strict=True):
            p.data.copy_(mean)

    def restore(self, parameters: list[nn.Parameter]) -> None:
        for kept, p in zip(self.kept, parameters, strict=True):
            p.data.copy_(kept)


class Opaque:
    """What can't be sent."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.call = value, lambda: value


class Meters:
    """What steps keep in it can be sent, it can't."""

    def __init__(self) -> None:
        self.seen: dict[tuple[float, int], list[Tensor]] = {(0.5, 1): []}
        self.decode = lambda x: x


class Lit(LightningModule):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [8, 16, 16, 16, 4]
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)])
        self.net.double()  # as the Trainer will, but before there is an average
        self.average, self.keeps = Average(self.net.parameters()), keeps
        self.meters = Meters()
        self.outputs: Any = {"logits": [], "rows": 0} if keeps == "dict" else []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update(self.net.parameters())

    def on_validation_epoch_start(self) -> None:
        self.average.swap(list(self.net.parameters()))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self.net(batch[0])
        if self.keeps == "dict":
            self.outputs["logits"].append((logits, batch[1].numpy()))
            self.outputs["rows"] += len(logits)
        elif self.keeps == "meters":
            self.meters.seen[0.5, 1].append(logits)
        else:
            self.outputs.append(Opaque(logits) if self.keeps == "objects" else logits)

    def on_validation_epoch_end(self) -> None:
        if self.keeps == "dict":
            logits = torch.cat([x for x, _ in self.outputs["logits"]])
            right = sum((x.argmax(-1).numpy() == y).sum() for x, y in self.outputs["logits"])
            self.log("share", float(right) / self.outputs["rows"])
            self.outputs = {"logits": [], "rows": 0}
        elif self.keeps == "meters":  # never emptied: what is kept goes on
            logits = torch.cat(self.meters.seen[0.5, 1])
        else:
            logits = torch.cat([getattr(x, "value", x) for x in self.outputs])
            self.outputs.clear()
        self.log("spread", logits.std())
        self.average.restore(list(self.net.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


class Kept(Lit):
    """Keeps what the average replaces beside what steps have kept, which it never empties."""

    def on_validation_epoch_start(self) -> None:
        self.replaced = [p.detach().clone() for p in self.net.parameters()]
        self.average.swap(list(self.net.parameters()))

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.outputs).std())
        for kept, p in zip(self.replaced, self.net.parameters(), strict=True):
            p.data.copy_(kept)


class Student(Lit):
    """Moves its teacher after batches, also after a validation that has kept something (as solo-learn)."""

    def __init__(self, keeps: str) -> None:
        super().__init__(keeps)
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher.load_state_dict(self.student.state_dict())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        h = self.net(batch[0])
        with torch.no_grad():
            wanted = self.teacher(h)
        return super().training_step(batch, batch_idx) + F.mse_loss(self.student(h), wanted + 1)

    def on_train_batch_end(self, *args: Any) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data

    def on_validation_epoch_start(self) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log("spread", torch.cat(self.outputs).std())
        self.outputs.clear()


def _fit(layout: Layout, kind: Callable[[str], LightningModule], keeps: str) -> tuple[list[float], dict[str, float]]:
    module, losses = kind(keeps), Losses()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(16, 8, dtype=torch.float64, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    )
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[losses], **options)
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    return losses.seen, {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("layout", "kind", "keeps"),
    [
        (PP2, Lit, "list"),
        (PP2, Lit, "dict"),
        (PP2, Lit, "meters"),
        (PP2, Kept, "list"),
        (PP2, Student, "list"),
        (TP2_PP2, Lit, "list"),
    ],
    ids=["list", "dict", "meters", "kept", "teacher", "tp2-pp2"],
)
def test_hooks_that_move_weights_are_given_what_steps_have_kept(layout: Layout, kind: Any, keeps: str) -> None:
    ((losses, logged),) = run_program(PLAIN, _fit, kind, keeps)
    for found, values in run_program(layout, _fit, kind, keeps):
        assert found == pytest.approx(losses, rel=1e-9)
        assert values == pytest.approx(logged, rel=1e-9)


def test_what_can_not_be_given_is_said() -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _fit, Lit, "objects")
    messages = [failure.message for failure in error.value.failures]
    assert any("`on_validation_epoch_end` changes parameters" in message for message in messages), messages
    assert any("leave nothing there but tensors" in message for message in messages), messages
