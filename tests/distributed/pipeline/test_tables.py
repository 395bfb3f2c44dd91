"""Tables that a step keeps for one length, and makes anew for another: as lengths come and go, stages keep in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program


class Table(nn.Module):
    """Weights of positions.

    Args:
        grows: it is made anew for longer sequences only.
    """

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.grows, self.length, self.table, self.calls = grows, 0, torch.zeros(0), 0

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        self.calls += 1
        if n > self.length or (n < self.length and not self.grows):
            self.length, self.table = n, 1 / torch.arange(1, n + 1, device=x.device).to(x.dtype)
        return self.table[:n]


class Weighs(LightningModule):
    """Args:
    place: where its step takes weights of positions.
    kind: what makes them: a module, one that "grows", or the step itself, by what it keeps on the "whole".
    """

    def __init__(self, place: str, kind: str) -> None:
        super().__init__()
        self.place, self.kind = place, kind
        self.embed, self.head, self.table = nn.Embedding(16, 8), nn.Linear(8, 16), Table(kind == "grows")
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
        self.length, self.weights, self.steps = 0, torch.zeros(0), 0

    def weigh(self, x: Tensor, place: str) -> Tensor:
        if place != self.place:
            return x
        if self.kind != "whole":
            return x * self.table(x)[:, None]
        if self.length != x.shape[1]:
            self.length = x.shape[1]
            self.weights = 1 / torch.arange(1, self.length + 1, device=x.device).to(x.dtype)
        return x * self.weights[:, None]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, target = batch
        h = self.weigh(self.embed(ids), "early")
        for i, block in enumerate(self.blocks):
            h = h + block(self.weigh(h, "between") if i == 2 else h)
        loss = F.cross_entropy(self.weigh(self.head(h), "late").flatten(0, 1), target.flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches(lengths: list[int], seed: int) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, 16, (2, 4, n), generator=made) for n in lengths]
    return DataLoader([(x, y) for x, y in ids], batch_size=None)


def _weigh(layout: Layout, place: str, kind: str, options: dict[str, Any]) -> tuple[list[float], float, int]:
    torch.manual_seed(0)
    module, losses = Weighs(place, kind), Losses()
    strategy = {} if layout.plain else {"plan": None, **options}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[losses], max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, _batches([6, 8, 6], 1), _batches([6, 8, 7, 5, 8], 2))
    return losses.seen, float(trainer.callback_metrics["val"]), module.steps


@pytest.mark.parametrize(
    ("place", "kind", "schedule", "options"),
    [
        ("early", "module", "1f1b", {"whole_loss": True}),
        pytest.param("early", "whole", "1f1b", {"whole_loss": True}, marks=pytest.mark.extended),
        ("early", "whole", "interleaved", {}),
        pytest.param("between", "module", "1f1b", {}, marks=pytest.mark.extended),
        ("between", "grows", "1f1b", {"whole_loss": True}),
        ("between", "whole", "zb_v", {}),
        pytest.param("late", "module", "1f1b", {}, marks=pytest.mark.extended),
        pytest.param("late", "grows", "1f1b", {}, marks=pytest.mark.extended),
        ("late", "whole", "1f1b", {}),
        ("late", "module", "1f1b", {"whole_loss": True}),
        pytest.param("late", "whole", "1f1b", {"whole_loss": True}, marks=pytest.mark.extended),
        ("late", "module", "interleaved", {}),
    ],
    ids=str,
)
def test_tables_of_lengths_that_come_and_go(place: str, kind: str, schedule: str, options: dict[str, Any]) -> None:
    ((losses, metric, steps),) = run_program(PLAIN, _weigh, place, kind, options)
    for seen, found, counted in run_program(
        Layout(pp=2, microbatches=2, schedule=schedule), _weigh, place, kind, options
    ):
        assert seen == pytest.approx(losses, rel=1e-9)
        assert found == pytest.approx(metric, rel=1e-9)
        assert counted == steps


class CountsBeside(Weighs):
    """Its step counts its calls where it keeps a table's length."""

    def weigh(self, x: Tensor, place: str) -> Tensor:
        self.steps += place == "late"
        return super().weigh(x, place)

    def on_train_batch_end(self, *args: Any) -> None: ...


def _count(layout: Layout, place: str) -> int:
    torch.manual_seed(0)
    module = CountsBeside(place, "whole")
    strategy = {} if layout.plain else {"plan": None}
    make_trainer(layout, strategy=strategy, max_epochs=1).fit(module, _batches([6, 8, 6], 1))
    return module.steps


@pytest.mark.parametrize("place", ["early", "late"])
def test_a_table_put_in_place_is_no_call(place: str) -> None:
    assert run_program(PLAIN, _count, place) == [3]
    assert run_program(Layout(pp=2, microbatches=2), _count, place)[0] == 6
