"""The tail of a step made once for all microbatches: the loss is one device's, whatever it is."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import fewer
from tests.distributed.pipeline.test_losses import OTHERS, SAME, Lit, _data
from tests.distributed.pipeline.test_weighed_over_data import Masked
from tests.distributed.training import PLAIN, PP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

EVERY = {name: loss for name, (loss, _) in OTHERS.items()} | dict(list(SAME.items())[::8])


def _fit(layout: Layout, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        module, losses = Lit(EVERY[name], False), Losses()
        strategy = {"plan": None, "whole_loss": True}
        trainer = make_trainer(layout, strategy=strategy, callbacks=[losses], num_sanity_val_steps=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, _data(8), _data(8))
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        said = [str(w.message) for w in caught if "microbatch" in str(w.message)]
        found[name] = losses.seen, logged, said
    return found


@pytest.mark.parametrize("first", fewer(range(4), extended=[1, 2, 3]))
def test_any_loss_is_that_of_one_device(first: int) -> None:
    names = list(EVERY)[first::4]
    (expected,) = run_program(PLAIN, _fit, names)
    wrong = {}
    for found in run_program(PP2, _fit, names):
        for name in names:
            losses, logged, said = found[name]
            if losses != pytest.approx(expected[name][0], rel=1e-9, nan_ok=True) or said:
                wrong[name] = losses, expected[name][0], said
            if logged != pytest.approx(expected[name][1], rel=1e-6, nan_ok=True):
                wrong[f"{name}, logged"] = logged, expected[name][1]
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


class Contrastive(Masked):
    """Compares samples with each other, and divides by what is marked in all of them."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.calls = 0

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.table(batch[0]) * self.scale
        for block in self.blocks:
            x = x + block(x)
        self.calls += 1
        y = F.normalize(x.mean(1), dim=1)
        marked = batch[1] != -100
        entropies = F.cross_entropy(self.head(x).transpose(1, 2), batch[1], reduction="none")
        loss = (y @ y.T).exp().mean() + (entropies * marked).sum() / marked.sum() + 0.01 * self.scale.square().sum()
        self.log("similar", (y @ y.T).mean())
        return loss + 0.01 * self.table.weight.square().mean()


class TwoHeads(Contrastive):
    """Makes a loss before its last block is called."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16, 5)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.table(batch[0]) * self.scale
        for block in self.blocks:
            x = x + block(x)
        first = F.cross_entropy(self.head(x).transpose(1, 2), batch[1]).sqrt()
        self.log("similar", first)
        y = self.second(x.mean(1))
        return first + (y @ y.T).exp().mean()


class Noisy(Contrastive):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        noise = torch.randn(*batch[0].shape, 16, dtype=torch.float64)
        x = self.table(batch[0]) * self.scale + noise
        for block in self.blocks:
            x = x + block(x)
        return (self.head(x).mean(-1) - noise.mean(-1)).square().mean()


class Auxiliary(nn.Module):
    """Makes a number of all its samples, beside what it returns for each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return x + y, y.square().mean()


class Balanced(Contrastive):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary() for _ in range(4))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, losses = self.table(batch[0]), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        y = self.head(x).mean(1)
        self.log("similar", sum(losses))
        return (y @ y.T).exp().mean() + 0.1 * sum(losses)


class Normalises(Contrastive):
    """Takes a statistic of the batch before its first block; or of each sample."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.first, self.by_sample = nn.Linear(6, 16), by_sample

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = batch[0].double()
        x = x / x.mean(1, keepdim=True) if self.by_sample else x / x.mean(0)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        self.log("similar", x.mean())
        return (x @ x.T).tanh().mean() + 0 * self.head(x).sum()


class Generates(Contrastive):
    """Evaluates in a loop over the whole model, which the last stage has to run."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        ids = batch[0]
        for _ in range(2):
            x = self.table(ids)
            for block in self.blocks:
                x = x + block(x)
            ids = torch.cat([ids, self.head(x)[:, -1:].argmax(-1)], 1)
        self.log("similar", ids.double().mean())


KINDS: dict[str, Any] = {
    "balanced": Balanced,
    "by sample": lambda: Normalises(True),
    "of the batch": lambda: Normalises(False),
    "generates": Generates,
    "heads": TwoHeads,
    "noisy": Noisy,
    "untied": Contrastive,
    "tied": lambda: Contrastive(tied=True),
    "frozen": lambda: Contrastive(frozen=True),
}


def _contrast(layout: Layout, kind: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    module, (x, y), losses = KINDS[kind](), torch.randint(20, (2, 22, 6)), Losses()
    for i in range(22):
        y[i, 5 - i % 4 - i % 2 :] = -100
    trainer = make_trainer(
        layout, strategy={"plan": "auto", "whole_loss": layout.pp > 1}, max_epochs=2, callbacks=[losses], **options
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    trainer.fit(module, loader, loader if kind == "generates" else None)
    return losses.seen, module.trained, [float(trainer.callback_metrics["similar"]), module.calls]


@pytest.mark.parametrize(
    ("layout", "kind", "options"),
    [
        (Layout(pp=2, microbatches=3), "tied", {}),
        (Layout(pp=2, microbatches=4), "frozen", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Layout(pp=2, microbatches=2), "heads", {}),
        (Layout(pp=2, microbatches=2), "generates", {}),
        (Layout(tp=2, pp=2, microbatches=2), "untied", {}),
        (Layout(pp=2, dp=2, microbatches=2), "untied", {}),
        *(
            pytest.param(Layout(pp=2, dp=2, microbatches=2, zero=zero), "untied", {}, marks=pytest.mark.extended)
            for zero in (1, 3)
        ),
        (Layout(pp=2, dp=2, microbatches=4, zero=2), "untied", {"accumulate_grad_batches": 2}),
    ],
    ids=str,
)
def test_parameters_are_those_of_one_device(layout: Layout, kind: str, options: dict[str, Any]) -> None:
    expected = run_program(Layout(dp=layout.dp) if layout.dp > 1 else PLAIN, _contrast, kind, options)
    found = run_program(layout, _contrast, kind, options)
    for losses, _, logged in found:
        assert any(
            losses == pytest.approx(other, rel=1e-9) and logged == pytest.approx(value, rel=1e-6)
            for other, _, value in expected
        )
    wanted, saved = expected[0][1], next(state for _, state, _ in found if state)
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-7, atol=1e-9)


def _said(layout: Layout, kind: str = "balanced") -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses, _, _ = _contrast(layout, kind, {"limit_train_batches": 2})
    return losses, [str(w.message) for w in caught if "whole_loss" in str(w.message)]


@pytest.mark.parametrize("kind", ["by sample", "of the batch"])
def test_statistics_before_blocks_are_said(kind: str) -> None:
    ((expected, _),) = run_program(PLAIN, _said, kind)
    last, first = run_program(Layout(pp=2, microbatches=2), _said, kind)
    if kind == "by sample":
        assert last == first == (pytest.approx(expected, rel=1e-9), [])
    else:
        assert last[0] != pytest.approx(expected, rel=1e-3)
        assert any("what `first`" in text and "a statistic of all samples" in text for text in last[1])


def test_numbers_that_blocks_make_of_microbatches_are_averaged() -> None:
    """Here these hold as many samples, so that the mean is right."""
    ((expected, _),) = run_program(PLAIN, _said)
    last, first = run_program(Layout(pp=2, microbatches=2), _said)
    assert last[0] == first[0] == pytest.approx(expected, rel=1e-9)
    assert any("is averaged over the microbatches" in text for text in last[1])


def test_what_microbatches_draw_for_themselves_is_refused() -> None:
    with pytest.raises(RankError, match="whole_loss=True the step draws random numbers by `randn`"):
        run_program(PP2, _contrast, "noisy", {})


def test_a_schedule_that_does_not_wait_is_refused() -> None:
    from lightning_megatp import MegaTPStrategy

    with pytest.raises(ValueError, match='which is then "gpipe"'):
        MegaTPStrategy(pp=2, schedule="zb_v", whole_loss=True)
