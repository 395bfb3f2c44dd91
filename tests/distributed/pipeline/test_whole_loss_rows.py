"""What a step does after its last block, on values of any stage and with rows in any order, is done on the batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import fewer
from tests.distributed.training import PLAIN, PP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

WIDTH, CLASSES, LENGTH = 12, 5, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def contrast(x: Tensor) -> Tensor:
    y = F.normalize(x, dim=1)
    return (y @ y.T).exp().mean()


def contrast_of_classes(x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(x, dim=1)
    similar = z @ z.T / 0.5
    return -((y[:, None] == y).double() * similar.log_softmax(1)).sum(1).mean()


class Spread(torch.autograd.Function):
    """Divides by a statistic of all rows, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / x.detach().std()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Lit(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.step = globals()[kind]
        self.table, self.blocks = nn.Embedding(9, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states behind the first block, and behind the last one."""
        x = early = self.table(ids)
        for i, block in enumerate(self.blocks):
            x = block(x)
            early = x if i == 0 else early
        return early, x

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.step(self, *batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.step(self, *batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_an_early_stage(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    early, x = lit.run(ids)
    normed = (early - early.mean(0)) / (early.std(0) + 0.1)
    return F.cross_entropy(lit.head(x).mean(1), y) + contrast(early.mean(1)) + (normed.mean((1, 2)) * y).mean().square()


def views(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """As SimCSE, and FixMatch, put views of the samples one after the other."""
    _, x = lit.run(torch.cat([ids, ids.flip(1)]))
    first, second = F.normalize(lit.head(x).mean(1), dim=1).chunk(2)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(y))) + F.cross_entropy(first, y)


def sliced(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """As I-JEPA lays out several masks of a batch: by slices of its length."""
    x, n = lit.table(torch.cat([ids, ids.flip(1), ids.roll(1, 1)])), len(ids)
    x = torch.cat([torch.cat([x[i * n : (i + 1) * n]], 0) for i in range(3)])
    for block in lit.blocks:
        x = block(x)
    first, second, third = F.normalize(lit.head(x).mean(1), dim=1).chunk(3)
    return F.cross_entropy(first @ second.T / 0.5, torch.arange(len(y))) + F.cross_entropy(third, y)


def repeated(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    _, x = lit.run(ids.repeat(3, 1))
    return F.cross_entropy(lit.head(x).mean(1), y.repeat(3)).sqrt()


def each_sample_twice(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """As R-Drop does: both rows of a sample lie beside each other."""
    _, x = lit.run(ids.repeat_interleave(2, 0))
    logits = lit.head(x).mean(1).log_softmax(1)
    return F.nll_loss(logits, y.repeat_interleave(2)) + F.mse_loss(logits[::2], logits[1::2].flip(0))


def tokens_first(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """Hidden states as (tokens x samples, width)."""
    x = lit.table(ids).transpose(0, 1)
    tokens, samples, width = x.shape
    x = x.reshape(tokens * samples, width)
    for block in lit.blocks:
        x = block(x)
    logits = lit.head(x).view(tokens, samples, CLASSES).mean(0)
    return F.cross_entropy(logits, y).sqrt() + contrast(logits)


def by_a_function(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(Spread.apply(lit.head(lit.run(ids)[1]).mean(1)), y)


def behind_a_mask(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """A head behind a mask, as of masked language models."""
    mask = ids > 3
    return F.cross_entropy(lit.head(lit.run(ids)[1][mask]), ids[mask] % CLASSES).sqrt()


def transposed(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """What comes out of the last block lies otherwise than in rows."""
    _, x = lit.run(ids)
    return contrast(lit.head(x).transpose(1, 2).mean(2))


def of_weights(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """A penalty on weights of all stages."""
    return F.cross_entropy(lit.head(lit.run(ids)[1]).mean(1), y).sqrt() + sum(p.norm() for p in lit.parameters())


def positions_like(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    """A table of the hidden states' dtype, before the first block."""
    x = lit.table(ids)
    x = x + torch.arange(WIDTH).type_as(x) / WIDTH
    for block in lit.blocks:
        x = block(x)
    return contrast(lit.head(x).mean(1))


def between_blocks(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    x = lit.table(ids)
    for block in lit.blocks:
        x = block(x - x.mean(0))
    return F.cross_entropy(lit.head(x).mean(1), y)


def compared_between_blocks(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    _, x = lit.run(ids)
    pooled = x.mean(1)
    return F.cross_entropy(lit.head((pooled @ pooled.T).softmax(1) @ pooled), y)


def of_whole_numbers(lit: Lit, ids: Tensor, y: Tensor) -> Tensor:
    _, x = lit.run((ids + ids.max(0).values) % 9)
    return F.cross_entropy(lit.head(x).mean(1), y)


def _data(rows: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (2 * rows, LENGTH), generator=generator)
    ids[:, 0] = 5
    y = torch.randint(0, CLASSES, (2 * rows,), generator=generator)
    return DataLoader(TensorDataset(ids, y), batch_size=rows)


def _fit(layout: Layout, kind: str, rows: int = 6, whole: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    module, losses = Lit(kind).double(), Losses()
    options = {"plan": None, "whole_loss": whole}
    trainer = make_trainer(layout, strategy=options, callbacks=[losses], num_sanity_val_steps=0, max_epochs=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, _data(rows), _data(rows))
    said = [str(w.message) for w in caught if "whole_loss" in str(w.message)]
    return {"losses": losses.seen, "val": float(trainer.callback_metrics["val"]), "said": said}


PP2_IN_TWO = Layout(pp=2, microbatches=2)
RIGHT = [
    "of_an_early_stage", "views", "repeated", "each_sample_twice", "tokens_first", "by_a_function", "behind_a_mask",
    "sliced", "transposed", "of_weights", "positions_like",
]  # fmt: skip


@pytest.mark.parametrize("kind", fewer(RIGHT, extended=RIGHT[1::2]))
def test_it_is_done_on_all_rows(kind: str) -> None:
    (expected,) = run_program(PLAIN, _fit, kind)
    for found in run_program(PP2, _fit, kind):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["val"] == pytest.approx(expected["val"], rel=1e-6), "logged in float32"
        assert not found["said"]


@pytest.mark.parametrize(
    ("kind", "by"),
    [("between_blocks", "`mean`"), ("compared_between_blocks", "`matmul`"), ("of_whole_numbers", "table")],
)
def test_what_can_not_be_is_said(kind: str, by: str) -> None:
    said = " ".join(run_program(PP2_IN_TWO, _fit, kind)[0]["said"])
    assert by in said and "of a microbatch" in said, said


class Compared(LightningModule):
    """Its loss is a function, compiled or not."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head, self.loss = nn.Linear(WIDTH, CLASSES), [loss]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.loss[0](self.head(x), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _compared(layout: Layout) -> list[list[float]]:
    torch.compiler.reset()
    found = []
    compiled = torch.compile(contrast_of_classes, backend="aot_eager")
    for loss, whole in [(compiled, True), (compiled, False), (contrast_of_classes, True), (contrast_of_classes, False)]:
        torch.manual_seed(0)
        module, losses = Compared(loss).double(), Losses()
        data = TensorDataset(torch.randn(20, 6).double(), torch.randint(0, CLASSES, (20,)))
        trainer = make_trainer(layout, strategy={"plan": None, "whole_loss": whole}, callbacks=[losses])
        trainer.fit(module, DataLoader(data, batch_size=4))
        found.append(losses.seen)
    return found


def test_compiled_losses_are_those_of_their_own_microbatches() -> None:
    """The compiler does not look into what watches the step: it would keep what that knew of another microbatch."""
    for whole, plain, expected_whole, expected_plain in run_program(PP2_IN_TWO, _compared):
        assert whole == pytest.approx(expected_whole, rel=1e-9)
        assert plain == pytest.approx(expected_plain, rel=1e-9)


class GeneratesLate(Lit):
    """The second batch of its validation goes through its blocks twice."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        _, x = self.run(batch[0])
        for _ in range(index):
            _, x = self.run(self.head(x).argmax(2))
        self.log("val", contrast(self.head(x).mean(1)))


def _generates(layout: Layout) -> float:
    torch.manual_seed(0)
    module = GeneratesLate("of_an_early_stage").double()
    options = {"plan": None, "whole_loss": True}
    trainer = make_trainer(layout, strategy=options, num_sanity_val_steps=0, max_epochs=1)
    trainer.fit(module, _data(6), _data(6))
    return float(trainer.callback_metrics["val"])


def test_a_batch_that_can_not_be_cut_is_whole_too() -> None:
    (expected,) = run_program(PLAIN, _generates)
    for found in run_program(PP2_IN_TWO, _generates):
        assert found == pytest.approx(expected, rel=1e-6), "logged in float32"


class Strided(Lit):
    def split_batch(self, batch: list[Tensor], microbatches: int) -> list[list[Tensor]]:
        return [[x[i::microbatches] for x in batch] for i in range(microbatches)]


def _strided(layout: Layout) -> None:
    trainer = make_trainer(layout, strategy={"plan": None, "whole_loss": True})
    trainer.fit(Strided("views").double(), _data(4))


def test_samples_in_another_order_are_refused() -> None:
    with pytest.raises(RankError, match="`split_batch` returns has to have the samples in the order of the batch"):
        run_program(PP2_IN_TWO, _strided)
