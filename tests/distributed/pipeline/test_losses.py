"""Losses that average over what microbatches hold different numbers of: the batch's, and what is logged of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program

# y: (B, T, 3) float, of the model; t: the same shape; m: (B, T) bool, of what counts.
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _squares(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().mean(-1)


def _classes(t: Tensor) -> Tensor:
    return t.argmax(-1)


def _entropies(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), _classes(t), reduction="none")


def _half(x: Tensor, side: int) -> Tensor:
    n = max(len(x) // 2, 1)
    return x[:n] if side > 0 else x[-n:]


def _in_place(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    loss = (_squares(y, t) * m).sum()
    loss /= m.sum()
    loss += 0.5 * _entropies(y, t)[m].mean()
    return loss


def _ignored(t: Tensor, m: Tensor) -> Tensor:
    return _classes(t).masked_fill(~m, -100).flatten()


def _of_samples(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    losses = [F.mse_loss(a[k], b[k]) for a, b, k in zip(y, t, m, strict=True) if k.any()]
    return torch.stack(losses).mean() if losses else y.sum() * 0


def _samples_by_number(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=y.dtype)
    for i in range(len(y)):
        near = 1 - (y[i] * t[i]).sum() / (y[i].square().sum() * t[i].square().sum()).sqrt()
        loss += (
            F.cross_entropy(y[i], _classes(t)[i])
            + near
            + 0.1 * (_squares(y[i], t[i]) * m[i]).sum() / m[i].sum().clamp(1)
        )
    return loss / len(y)


def _one_by_one(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    loss, count = y.new_zeros(()), y.new_zeros(())
    for i in range(y.shape[1]):
        loss = loss + (_squares(y, t) * m)[:, i].sum()
        count = count + m[:, i].sum()
    return loss / count.clamp(min=1)


def _heads(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    """As many heads as a microbatch has samples are no samples."""
    losses = [(_squares(head, t) * m).sum() / m.sum().clamp(1) for head in torch.stack([y, 2 * y, 3 * y, -y])]
    return sum(losses) / 4  # type: ignore[return-value]


def _with_nan(y: Tensor, t: Tensor, m: Tensor) -> Tensor:
    return torch.where(m[..., None], (y - t).square(), torch.nan)


SAME: dict[str, Loss] = {
    "of samples": _of_samples,
    "of samples, by number": _samples_by_number,
    "of samples, added up": lambda y, t, m: sum(2 * F.l1_loss(*each) for each in zip(y, t, strict=True)),  # type: ignore
    "one by one": _one_by_one,
    "weights of tasks": lambda y, t, m: (
        (w := y.new_tensor([0.3, 0.7]))[0] * F.mse_loss(y, t) + w[1] * F.l1_loss(y.flatten(0, 1), t.flatten(0, 1))
    ),
    "prototypes": lambda y, t, m: sum(  # type: ignore[return-value]
        (y.flatten(0, 1) - p).square().mean() for p in t.new_tensor([[0.1, 0.2, 0.3], [-0.1, 0, 0.1]])
    ),
    "heads": _heads,
    "all / clamped count": lambda y, t, m: _squares(y, t).sum() / m.sum().clamp(min=1),
    "all / number": lambda y, t, m: _squares(y, t).sum() / max(m.sum().item(), 1),
    "dim by dim": lambda y, t, m: (y - t).square().mean(0).mean(0).sum(),
    "divided twice": lambda y, t, m: (y - t).square().sum() / 15 / len(y),
    "without nan": lambda y, t, m: torch.nanmean(_with_nan(y, t, m)),
    "sum without nan": lambda y, t, m: _with_nan(y, t, m).nansum() / (3 * m.sum()),
    "mse of marked": lambda y, t, m: F.mse_loss(y[m], t[m]),
    "weighted mse": lambda y, t, m: F.mse_loss(y, t, weight=m[..., None].expand_as(y).to(y)),
    "mean of marked": lambda y, t, m: _squares(y, t)[m].mean(),
    "sum / count": lambda y, t, m: (_squares(y, t) * m).sum() / m.sum(),
    "sum / clamped count": lambda y, t, m: (_squares(y, t) * m).sum() / m.sum().clamp(min=1),
    "sum / number": lambda y, t, m: torch.div(_squares(y, t)[m].sum(), max(int(m.sum()), 1)),
    "sum * (1 / count)": lambda y, t, m: (_squares(y, t) * m).sum() * (1 / m.sum()),
    "2 / count * sum": lambda y, t, m: (2.0 / m.to(y).sum()) * _squares(y, t)[m].sum() + F.l1_loss(y[m], t[m]),
    "reciprocal": lambda y, t, m: (_entropies(y, t) * m).sum().mul_((m.sum() + 1e-12).reciprocal()),
    "mean * (all / count)": lambda y, t, m: (_squares(y, t) * m).mean() * (m.numel() / m.sum()),
    "sums / counts": lambda y, t, m: (_squares(y, t) * m).sum(0).sum() / m.sum(0).sum().clamp(min=1),
    "shares": lambda y, t, m: ((w := m.to(y)) / w.sum() * _squares(y, t)).sum(),
    "shares of losses": lambda y, t, m: ((_squares(y, t) * m) / m.sum())[m].flatten().sum() + F.l1_loss(y[m], t[m]),
    "dot / count": lambda y, t, m: torch.dot(_squares(y, t).flatten(), m.to(y).flatten()) / m.sum(),
    "sum / count + eps": lambda y, t, m: (_squares(y, t) * m).sum() / (m.sum() + 1e-12),
    "mean / mean": lambda y, t, m: (_squares(y, t) * m).mean() / m.to(y).mean(),
    "entropies by hand": lambda y, t, m: (_entropies(y, t) * m).sum() / m.sum(),
    "logits by hand": lambda y, t, m: (
        (F.binary_cross_entropy_with_logits(y, t.sigmoid(), reduction="none").mean(-1) * m).sum() / m.sum()
    ),
    "sum": lambda y, t, m: F.mse_loss(y, t, reduction="sum"),
    "sums": lambda y, t, m: (
        2 * F.mse_loss(y[m], t[m], reduction="sum") - 0.3 * F.cross_entropy(y[:, 0], _classes(t)[:, 0], reduction="sum")
    ),
    "sum / rows": lambda y, t, m: _squares(y, t).sum() / len(y),
    "of rows": lambda y, t, m: ((_squares(y, t) * m).sum(1) / m.sum(1).clamp(min=1)).mean(),
    "of the same": lambda y, t, m: (
        (_squares(y, t) * m).sum() / m.sum() + 0.5 * (_entropies(y, t) * m).sum() / m.sum() + F.l1_loss(y[m], t[m])
    ),
    "sum of marked / all": lambda y, t, m: _squares(y, t)[m].sum() / (y.shape[0] * y.shape[1]),
    "stacked": lambda y, t, m: torch.stack([F.mse_loss(y[m], t[m]), F.l1_loss(y[m], t[m])]).mean(),
    "summed": lambda y, t, m: sum([F.mse_loss(y[m], t[m]), F.l1_loss(y[m], t[m])]) / 2,  # type: ignore[return-value]
    "in place": _in_place,
    "two of as many": lambda y, t, m: (
        F.cross_entropy(y.transpose(1, 2), _classes(t)) + F.cross_entropy(-y.transpose(1, 2), _classes(t).clone())
    ),
    "several of the same padding": lambda y, t, m: (
        (F.cross_entropy(y[m], _classes(t)[m]) + 3 * F.cross_entropy(-y[m], t[m].argmin(-1))) / 2
        + F.cross_entropy(y[m][:, :2].repeat(2, 1), t[m][:, :2].argmax(-1).repeat(2))
    ),
    "entropy and mean": lambda y, t, m: (
        F.cross_entropy(y.flatten(0, 1), _ignored(t, m)) + 0.1 * F.smooth_l1_loss(y[m], t[m])
    ),
    "halves apart": lambda y, t, m: torch.cat([y[:2] * 2, y[2:] * 2]).sub(t).square().mean() / 4,
    "first and last tokens": lambda y, t, m: (
        (y[:, 0] - y[:, -1] - t[:, 0]).square().mean() + (y[:, 1:] - y[:, :-1]).abs().mean()
    ),
    "products of each": lambda y, t, m: torch.einsum("bid,bjd->bij", y, 2 * y).log_softmax(2).diagonal(0, 1, 2).mean(),
    "divergence": lambda y, t, m: F.kl_div(y[m].log_softmax(-1), t[m].softmax(-1), reduction="batchmean"),
}
BY_NUMBERS = {"sum of marked / all"}
"""Those of SAME that only their numbers show to be the same. What a unit makes of samples can't be put together again,
so there the warning stays."""
OTHERS: dict[str, tuple[Loss, str]] = {
    "root": (lambda y, t, m: F.mse_loss(y, t).sqrt(), "`sqrt`"),
    "overlap": (lambda y, t, m: 1 - (y.sigmoid() * m[..., None]).sum() / (y.sigmoid().sum() + m.sum()), "`div`"),
    "clamped": (lambda y, t, m: F.mse_loss(y[m], t[m]).clamp(min=0.1), "`clamp`"),
    "a clamped sum": (lambda y, t, m: F.mse_loss(y, t, reduction="sum").clamp(max=1e3), "`clamp`"),
    "mixed": (lambda y, t, m: F.mse_loss(y[m], t[m]) + _squares(y, t).mean(), "`mse_loss`, `mean`"),
    "two entropies": (
        lambda y, t, m: F.cross_entropy(y.flatten(0, 1), _ignored(t, m)) + _entropies(y, t).mean(),
        "`cross_entropy`, `mean`",
    ),
    "sum / constant": (lambda y, t, m: _squares(y, t).sum() / 3, "If one device divides the whole batch by 3, too"),
    "sum / batch": (lambda y, t, m: _squares(y, t).sum() / 8, "by 8 in every microbatch"),
    "a penalty": (
        lambda y, t, m: F.mse_loss(y, t, reduction="sum") + F.mse_loss(y.new_ones(1), y.new_zeros(1), reduction="sum"),
        "counts once for every microbatch",
    ),
    "a sum": (lambda y, t, m: (_squares(y, t) / (m * 1.0 + 1)).sum(), "loss is a sum over its samples"),
    "of pairs": (lambda y, t, m: (y.flatten(1) @ t.flatten(1).T).log_softmax(1).diagonal().mean(), "`matmul`"),
    "of pairs at each token": (
        lambda y, t, m: torch.einsum("btd,ntd->tbn", y, 2 * y).log_softmax(2).diagonal(0, 1, 2).mean(),
        "(by `einsum`)",
    ),
    "of pairs, some": (
        lambda y, t, m: (
            F.mse_loss(y, t) if m.all() else (y.flatten(1) @ t.flatten(1).T).log_softmax(1).diagonal().mean()
        ),
        "`matmul`",
    ),
    "two views of others": (
        lambda y, t, m: torch.cdist(y.flatten(1), torch.cat([2 * y, 3 * y]).flatten(1)).amax(1).mean(),
        "(by `cdist`)",
    ),
    "a function": (lambda y, t, m: torch.einsum("bti,bti->", y - t, y - t) / y.numel(), "can't be followed"),
    "a statistic": (lambda y, t, m: ((y - t) / t.std()).square().mean(), "`std`"),
    "a clamped statistic": (lambda y, t, m: F.mse_loss(y, t) / t.std().clamp(min=0.1), "`std`"),
    "of normalised": (lambda y, t, m: ((t - t.mean()) / (t.std() + 1e-8) * y).mean(), "makes something else"),
    "a loss of a mean": (lambda y, t, m: F.l1_loss(y.mean(0), t.mean(0)), "`l1_loss`"),
    "a loss of normalised samples": (lambda y, t, m: F.mse_loss(y / y.std(0), t), "`std`"),
    "normalised samples": (lambda y, t, m: ((y - y.mean(0)) * t).mean(), "`sub`"),
    "hard ones": (lambda y, t, m: _squares(y, t).flatten().topk(3).values.mean(), "`topk`"),
    "overlap of classes": (
        lambda y, t, m: 1 - ((y.sigmoid() * t).sum((0, 1)) / (y.sigmoid() + t.abs()).sum((0, 1))).mean(),
        "`div`",
    ),
    "of groups": (
        lambda y, t, m: y.new_zeros(2).scatter_add(0, m.long().flatten(), _squares(y, t).flatten()).square().sum(),
        "`scatter_add`",
    ),
    "halves": (
        lambda y, t, m: -F.logsigmoid(_half(y.sum((1, 2)), 1) - _half(y.sum((1, 2)), -1)).mean(),
        "(by `sub`)",
    ),
    "pairs": (lambda y, t, m: F.mse_loss(_half(y, 1).tanh(), 2 * _half(y.exp(), -1)), "(by `mse_loss`)"),
    "others": (lambda y, t, m: (y * y[torch.arange(len(y)).flip(0)]).square().mean(), "(by `mul`)"),
    "each with each": (lambda y, t, m: (y[:, None] - y).abs().add(1).log().mean(), "(by `sub`)"),
    "times a share": (lambda y, t, m: F.l1_loss(y[m], t[m]) * (m.sum().item() / m.numel()), "multiplies"),
    "times a tensor": (lambda y, t, m: F.l1_loss(y[m], t[m]) * m.to(y).std() / 2, "makes something else"),
    "counted classes": (
        lambda y, t, m: F.cross_entropy(y.transpose(1, 2), c := _classes(t), 1 / (1.0 + c.flatten().bincount(None, 3))),
        "weighs classes by what is counted",
    ),
    "a term of some": (
        lambda y, t, m: F.mse_loss(y, t) + (F.l1_loss(y[m], t[m]) if m.any() else 0),
        "adds up 1 and 2 averages",
    ),
    "a norm besides": (lambda y, t, m: F.mse_loss(y, t) + 0.1 * (y - t).norm(), "`norm`"),
    "a sum besides": (lambda y, t, m: F.mse_loss(y, t) + _squares(y, t).sum(), "`mse_loss`, `sum`"),
}


class Lit(LightningModule):
    """Blocks, a loss of a user's, and what it logs of it."""

    def __init__(self, loss: Loss, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        self.criterion = Criterion(loss) if inside else loss

    def step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, t, m = batch
        y = self.net(x)
        loss: Tensor = self.criterion(y, t, m)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": len(x)}
        self.log(f"{stage}_loss", loss, **options)
        self.log(f"{stage}_all", F.l1_loss(y, t), **options)
        self.log(f"{stage}_marked", F.l1_loss(y[m], t[m]).item(), **options)
        self.log(f"{stage}_number", (y.argmax(-1) == _classes(t))[m].sum(), **options)
        self.log(f"{stage}_share", (y.argmax(-1) == _classes(t))[m].to(y).mean(), **options)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Criterion(nn.Module):
    """A loss with a parameter: a unit of the pipeline."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.scale = loss, nn.Parameter(torch.full((), 1.5))

    def forward(self, y: Tensor, t: Tensor, m: Tensor) -> Tensor:
        return self.loss(y * self.scale, t, m)


def _data(marked: int = 0) -> DataLoader:
    """The last batch is of two unequal microbatches."""
    torch.manual_seed(2)
    x, t = torch.randn(2, 19, 5, 3, dtype=torch.float64)
    m = torch.rand(19, 5) < torch.linspace(0, 1, 19)[:, None]  # the first rows, and so a microbatch, have none
    m[:4] = False
    m[:marked] = True
    return DataLoader(TensorDataset(x, t, m), batch_size=8)


def _fit(layout: Layout, names: list[str], inside: bool = False, marked: int = 0) -> dict[str, Any]:
    """Fit with each loss.

    Args:
        marked: samples of which all is marked, the first ones.
    """
    found = {}
    for name in names:
        module, losses = Lit(SAME[name] if name in SAME else OTHERS[name][0], inside), Losses()
        trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[losses])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, _data(marked), _data(marked))
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        said = [str(w.message) for w in caught if "microbatch" in str(w.message) and "step" in str(w.message)]
        found[name] = losses.seen, logged, said
    return found


@pytest.mark.parametrize(
    ("layout", "inside", "some"),
    [
        *((PP2, False, slice(first, None, 4)) for first in range(2)),
        *(pytest.param(PP2, False, slice(first, None, 4), marks=pytest.mark.extended) for first in (2, 3)),
        (PP2, True, slice(0, None, 6)),
        (Layout(pp=2, schedule="zb_v"), False, slice(1, None, 6)),
        (TP2_PP2, False, slice(2, None, 8)),
    ],
    ids=[*(f"pp2-{i}" for i in range(4)), "in a unit", "zb_v", "tp2-pp2"],
)
def test_averages_are_of_the_batch(layout: Layout, inside: bool, some: slice) -> None:
    names = [name for name in list(SAME)[some] if not (inside and name in BY_NUMBERS)]
    (expected,) = run_program(PLAIN, _fit, names, inside)
    wrong = {}
    for found in run_program(layout, _fit, names, inside):
        for name in names:
            losses, logged, said = found[name]
            if losses != pytest.approx(expected[name][0], rel=1e-9) or said:
                wrong[name] = losses, expected[name][0], said
            if logged != pytest.approx(expected[name][1], rel=1e-6, nan_ok=True):
                wrong[f"{name}, logged"] = logged, expected[name][1]
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def test_what_a_unit_divides_is_said() -> None:
    (name,) = BY_NUMBERS
    assert any("by 10 in every microbatch" in text for text in run_program(PP2, _fit, [name], True)[0][name][2])


@pytest.mark.parametrize("some", [slice(0, None, 2), slice(1, None, 2)], ids=["even", "odd"])
def test_what_is_no_average_of_the_batch_is_said(some: slice) -> None:
    names = list(OTHERS)[some]
    for rank in zip(*(found.items() for found in run_program(PP2, _fit, names)), strict=True):
        texts = [text for _, (_, _, said) in rank for text in said]
        ((name, _), *_) = rank
        assert any(OTHERS[name][1] in text for text in texts), (name, texts)


def test_what_only_later_batches_show_is_said() -> None:
    """In the first one all microbatches hold as many targets."""
    names = ["mixed", "two entropies"]
    for found in run_program(PP2, _fit, names, False, 8):
        for name in names:
            assert not found[name][2] or OTHERS[name][1] in found[name][2][0]
    (_, _, said) = run_program(PP2, _fit, ["of pairs, some"], False, 8)[0]["of pairs, some"]
    assert any("(by `matmul`)" in text for text in said), said
    assert any(found[name][2] for found in run_program(PP2, _fit, names, False, 8) for name in names)


class Early(Lit):
    """Logs what it makes of hidden states of the first stage, beside a loss of marked tokens."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__(SAME["sum / count"], False)
        self.automatic_optimization = not by_hand

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x, t, m = batch
        early = self.net[0](x)
        loss = SAME["sum / count"](self.net[1:](early), t, m)
        self.log("mean", early.abs().mean())
        self.log("detached", early.detach().square().mean(-1).sqrt().mean())
        used = F.one_hot(early.argmax(-1).flatten(), 8).double().mean(0)
        self.log("perplexity", torch.exp(-(used * (used + 1e-10).log()).sum()))
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]
        return None

    validation_step = None  # type: ignore[assignment]


def _logs_early(layout: Layout, by_hand: bool) -> tuple[dict[str, float], str]:
    torch.manual_seed(2)
    x, t = torch.randn(2, 8, 5, 3, dtype=torch.float64)
    m = torch.rand(8, 5) < torch.linspace(0.3, 1, 8)[:, None]
    trainer = make_trainer(layout, strategy={"plan": None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Early(by_hand), DataLoader(TensorDataset(x, t, m), batch_size=8))
    return {k: float(v) for k, v in trainer.callback_metrics.items()}, " ".join(str(w.message) for w in caught)


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_an_early_stage_makes_is_logged_as_an_average_over_samples(by_hand: bool) -> None:
    ((expected, _),) = run_program(PLAIN, _logs_early, by_hand)
    (found, _), (_, said) = run_program(PP2, _logs_early, by_hand)  # said by the stage that makes it
    assert found.keys() == expected.keys() == {"mean", "detached", "perplexity"}
    assert {k: x for k, x in found.items() if k != "perplexity"} == pytest.approx(
        {k: x for k, x in expected.items() if k != "perplexity"}, rel=1e-9
    )
    assert "hands on a number, which is logged, maybe" in said and "(by `exp`)" in said
    assert found["perplexity"] != pytest.approx(expected["perplexity"], rel=1e-3)


def _of_other_copy(layout: Layout) -> list[str]:
    torch.manual_seed(2)
    x, t = torch.randn(2, 16, 5, 3, dtype=torch.float64)
    m = torch.rand(16, 5) < torch.linspace(0.2, 1, 16)[:, None]
    m[list(DistributedSampler(x, 2, 0))] = True  # what the first copy of the model gets
    trainer = make_trainer(layout, strategy={"plan": None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Lit(OTHERS["mixed"][0], False), DataLoader(TensorDataset(x, t, m), batch_size=4))
    return [str(w.message) for w in caught if OTHERS["mixed"][1] in str(w.message)]


def test_what_another_copy_of_the_model_finds_is_said() -> None:
    first, *others = run_program(Layout(pp=2, dp=2, microbatches=2), _of_other_copy)
    assert len(first) == 1 and not any(others)
