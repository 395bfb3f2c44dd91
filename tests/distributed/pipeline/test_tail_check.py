"""The tail of a step, once more for all samples: it says where a batch's loss or logs are not those of one device, and
leaves no trace."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassF1Score

from tests.crossing import fewer
from tests.distributed.training import DP2_PP2, PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program

# y: (B, 6) of the model, t: (B, 6), both float64
Loss = Callable[[Tensor, Tensor], Tensor]


def _eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def _order(t: Tensor) -> Tensor:
    return t[:, 0].argsort().argsort().double()


COUPLED: dict[str, Loss] = {
    "covariance": lambda y, t: torch.cov(y.T).square().mean(),
    "correlation": lambda y, t: torch.corrcoef(y.T).square().mean(),
    "spectrum": lambda y, t: torch.fft.rfft(y, dim=0).abs().mean(),
    "singular values": lambda y, t: torch.linalg.svdvals(y).mean(),
    "inverse": lambda y, t: torch.linalg.inv(y.T @ y + _eye(6)).diagonal().mean(),
    "differences": lambda y, t: torch.diff(y, dim=0).square().mean(),
    "trapezoids": lambda y, t: torch.trapezoid(y.square(), dim=0).mean(),
    "distances": lambda y, t: F.pdist(y).mean(),
    "ranks": lambda y, t: (_order(t) * y[:, 0]).mean(),
    "batch norm": lambda y, t: (F.batch_norm(y, None, None, training=True) * t).mean(),
    "layer norm over samples": lambda y, t: (F.layer_norm(y.T, (len(y),)) * t.T).mean(),
    "the largest sample": lambda y, t: F.mse_loss(y[t[:, 0].argmax()], t[0]),
    "running maximum": lambda y, t: y.cummax(0).values.mean(),
    "a little of a covariance": lambda y, t: F.mse_loss(y, t) + 0.01 * torch.cov(y.T).square().mean(),
    "products of samples": lambda y, t: torch.bmm(y.T[:, :, None], t.T[:, None]).square().mean(),
}
"""What no list of functions names: all of these were silent."""
KNOWN: dict[str, Loss] = {
    "cross-correlation": lambda y, t: (y.T @ t / len(y) - _eye(6)).square().sum(),
    "root": lambda y, t: F.mse_loss(y, t).sqrt(),
    "a root of ones": lambda y, t: (F.mse_loss(y, t) * 0 + 1).sqrt() + F.mse_loss(y, t),
}
"""What is seen to be no average, whether or not that matters."""
OWN: dict[str, Loss] = {
    "mse": lambda y, t: F.mse_loss(y, t),
    "sum": lambda y, t: F.mse_loss(y, t, reduction="sum"),
    "of each": lambda y, t: torch.einsum("bi,ij,bj->b", y, _eye(6), t).mean(),
    "norms": lambda y, t: torch.renorm(y, 2, 0, 1.0).square().mean(),
    "in place": lambda y, t: y.clone().mul_(2).sub_(t).square_().mean(),
    "drawn": lambda y, t: F.mse_loss(F.dropout(y, 0.5), t),
}


class Lit(LightningModule):
    """Blocks, a loss, and what is logged and kept of it."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss = loss
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.f1, self.seen = MulticlassF1Score(6, average="macro"), MeanMetric()
        self.kept: list[Tensor] = []
        self.calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        y = self.net(x)
        self.calls += 1
        loss = self.loss(y, t)
        self.kept.append(loss.detach())
        self.seen.update((y - t).square().mean())
        self.log("f1", self.f1(y, t.argmax(1)))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, t = batch
        y = self.net(x)
        self.log("val_mse", F.mse_loss(y, t))
        self.log("val_largest", y.max())
        self.log("val_nothing", F.layer_norm(y, (6,)).mean())  # but for rounding
        self.log("val_time", time.perf_counter())  # no tensor: nobody knows what it is of

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 32, 6, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(x, t), batch_size=8)


def _said(caught: list[warnings.WarningMessage]) -> list[str]:
    words = "on one device than its", "on one device, and", "and on one device", "losses are the same"
    return [str(w.message) for w in caught if any(x in str(w.message) for x in words)]


def _fit(layout: Layout, losses: dict[str, Loss], names: list[str], **options: Any) -> dict[str, Any]:
    found = {}
    for name in names:
        module, seen = Lit(losses[name]), Losses()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(layout, strategy={"plan": None, **options}, callbacks=[seen])
            trainer.fit(module, _data(), _data())
        last = dist.is_initialized() and module.trainer.strategy.mesh.is_last_stage
        counts = len(module.kept), module.calls, float(module.seen.compute()) if last or layout.plain else None
        found[name] = seen.seen, _said(caught), counts, float(trainer.callback_metrics["f1"])
    return found


def _coupled(layout: Layout, names: list[str]) -> dict[str, Any]:
    return _fit(layout, COUPLED, names)


def _whole(layout: Layout, names: list[str]) -> dict[str, Any]:
    return _fit(layout, COUPLED, names, whole_loss=True)


def _known(layout: Layout, names: list[str]) -> dict[str, Any]:
    return _fit(layout, KNOWN, names)


def _own(layout: Layout, names: list[str]) -> dict[str, Any]:
    return _fit(layout, OWN, names)


def _between(net: nn.Sequential, x: Tensor, couple: Callable[[Tensor], Tensor]) -> Tensor:
    """With something between two layers."""
    for i, layer in enumerate(net):
        x = couple(layer(x)) if i == 2 else layer(x)
    return x


def _needed(x: Tensor) -> Tensor:
    """Without the last feature, where none of the samples has more than so much in it."""
    return x[:, : 6 if bool((x[:, 5] > 0.5).any()) else 5] * (x[:, 5:] > 0.5)


Step = Callable[[nn.Sequential, Tensor], Tensor]
EARLY: dict[str, tuple[str, Step]] = {
    "inputs by their mean": ("takes of a microbatch", lambda net, x: net((x - x.mean(0)) / x.std(0))),
    "inputs by their place": ("takes of a microbatch", lambda net, x: net(x * torch.linspace(1, 2, len(x))[:, None])),
    "neighbours of inputs": ("takes of a microbatch", lambda net, x: net(torch.cdist(x, x).softmax(1) @ x)),
    "a mean between": ("`mean` (", lambda net, x: _between(net, x, lambda h: h - h.mean(0))),
    "a batch norm between": (
        "`batch_norm` (",
        lambda net, x: _between(net, x, lambda h: F.batch_norm(h, None, None, training=True)),
    ),
    "as many features as some sample needs": ("", lambda net, x: net(F.pad(y := _needed(x), (0, 6 - y.shape[1])))),
    "each by itself": ("", lambda net, x: _between(net, x - x.mean(1, True), lambda h: h / h.std(1, keepdim=True))),
}
"""What is made of all samples before the tail, which takes what came of that; and how that is said."""


class Early(Lit):
    """As many features as samples in a batch, as it may be."""

    def __init__(self, name: str) -> None:
        super().__init__(F.mse_loss)
        self.step = EARLY[name][1]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.step(self.net, batch[0]), batch[1])


def _early(layout: Layout, names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(layout, strategy={"plan": None}).fit(Early(name), _data())
        found[name] = [str(w.message) for w in caught if "MegaTPStrategy" in str(w.message)]
    return found


def test_what_is_made_of_all_samples_before_the_tail_is_said() -> None:
    found = run_program(PP2, _early, list(EARLY))
    for name, (said, _) in EARLY.items():
        texts = [text for of_rank in found for text in of_rank[name]]
        assert not any("no difference" in text for text in texts), (name, texts)
        assert any(said in text for text in texts) if said else not texts, (name, texts)


@pytest.mark.parametrize("first", fewer(range(2), extended=[1]))
def test_losses_that_couple_samples_are_said_with_the_numbers(first: int) -> None:
    names = list(COUPLED)[first::2]
    (expected,) = run_program(PLAIN, _coupled, names)
    found = run_program(PP2, _coupled, names)
    for name in names:
        texts = [text for of_rank in found for text in of_rank[name][1] if "val_" not in text]
        assert len(texts) == 1, (name, texts)
        losses = expected[name][0][0], found[0][name][0][0]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-3)) == name.startswith("a little")
        digits = next(n for n in (4, 6) if f"{losses[0]:.{n}g}" != f"{losses[1]:.{n}g}")
        assert all(f"{loss:.{digits}g}" in texts[0] for loss in losses), (name, losses, texts)
    for name, (losses, said, *_) in run_program(PP2, _whole, names)[0].items():  # as the texts advise
        assert losses == pytest.approx(expected[name][0], rel=1e-9), name
        assert not said


def test_reasons_that_are_known_are_given_the_numbers() -> None:
    names = list(KNOWN)
    (expected,) = run_program(PLAIN, _known, names)
    found = run_program(PP2, _known, names)
    for name in names:
        texts = [text for of_rank in found for text in of_rank[name][1] if "val_" not in text]
        first, of_microbatches = expected[name][0][0], found[0][name][0][0]
        assert len(texts) == 1, (name, texts)
        if first == pytest.approx(of_microbatches):
            assert texts[0].endswith("For this batch the losses are the same; gradients may not be.")
        else:
            assert texts[0].endswith(f"This batch's is {of_microbatches:.4g}, and on one device {first:.4g}.")
    assert expected["a root of ones"][0] == pytest.approx(found[0]["a root of ones"][0])


@pytest.mark.parametrize("layout", fewer([PP2, TP2_PP2], extended=[TP2_PP2]), ids=str)
def test_others_are_not_and_nothing_is_left(layout: Layout) -> None:
    names = list(OWN)
    (expected,) = run_program(PLAIN, _own, names)
    found = run_program(layout, _own, names)
    for name in names:
        texts = [text for of_rank in found for text in of_rank[name][1]]
        assert len(texts) == 1 and "over samples: `val_largest` 1.034 and 0.811." in texts[0], (name, texts)
        kept = [of_rank[name][2] for of_rank in found if of_rank[name][2][2] is not None]
        for n, calls, mean in kept:
            assert (n, calls) == (16, 16)  # 4 batches of 4 microbatches
            assert name == "drawn" or mean == pytest.approx(expected[name][2][2], rel=1e-6)
        for losses, _, _, f1 in (of_rank[name] for of_rank in found):
            assert name == "drawn" or losses == pytest.approx(expected[name][0], rel=1e-9)
            assert name == "drawn" or f1 == pytest.approx(expected[name][3], rel=1e-6)  # a number that it gave


class Scores(nn.Module):
    """Of all samples: a sum, by a unit (a CRF's)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return (self.scale * (y - t)).square().sum()


class Numbers(Lit):
    """Logs Python numbers and times, and what a unit adds up."""

    def __init__(self, how: str) -> None:
        super().__init__(F.mse_loss)
        self.scores, self.how = Scores(), how

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, t = batch
        y = self.net(x)
        if self.how == "numbers":
            hits = (y.argmax(1) == t.argmax(1))[t[:, 0] > 0].tolist()
            self.log("val_hits", sum(hits) / max(len(hits), 1))
            self.log("val_rows", float(len(x)))
            self.log("val_mean", F.mse_loss(y, t).item())
            self.log("val_time", time.perf_counter())
        elif self.how == "sums":
            self.log("val_sum", self.scores(y, t))
            self.log("val_third", self.scores(y, t) / 3.0)
        else:
            self.log("val_each", self.scores(y, t) / len(y))
            self.log("val_added", self.scores(y, t), reduce_fx="sum")


def _numbers(layout: Layout, how: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Numbers(how), _data(), _data())
    return " ".join(str(w.message) for w in caught if "is given" in str(w.message))


def test_python_numbers_are_compared_and_sums_of_units_are_said() -> None:
    numbers, *_ = run_program(PP2, _numbers, "numbers")
    assert "`val_hits` " in numbers and "`val_rows` 8 and 2" in numbers
    assert not any(name in numbers for name in ("val_mean", "val_time"))
    sums, *_ = run_program(PP2, _numbers, "sums")
    assert "`self.log('val_sum', ...)` is given a sum over" in sums
    assert "`self.log('val_third', ...)` is given a sum divided by 3 over" in sums and "4 times as large" in sums
    assert run_program(PP2, _numbers, "others")[0] == ""


CONSTANT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a table of as many rows": lambda lit, y, t: ((y - t) @ lit.table.T).square().mean(),
    "weights of terms": lambda lit, y, t: ((y - t)[:, :4].square() * lit.mix.softmax(0)).sum(1).mean(),
    "products of weights": lambda lit, y, t: ((y - t)[:, :2] @ (lit.table @ lit.table.T)).square().mean(),
    "a density": lambda lit, y, t: ((y - t).square().sum(1) - lit.scales.log().sum()).mean(),
}
"""What is made of weights and buffers, which have as many rows as a microbatch or a multiple of that."""


class Constant(Lit):
    def __init__(self, name: str) -> None:
        super().__init__(F.mse_loss)
        self.name, self.mix = name, nn.Parameter(torch.arange(4.0))
        self.register_buffer("table", torch.arange(12.0).view(2, 6) / 12)
        self.register_buffer("scales", torch.arange(1.0, 7))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return CONSTANT[self.name](self, self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass


def _constant(layout: Layout) -> dict[str, Any]:
    found = {}
    for name in CONSTANT:
        seen = Losses()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(layout, strategy={"plan": None}, callbacks=[seen]).fit(Constant(name), _data())
        found[name] = seen.seen, [str(w.message) for w in caught if "MegaTPStrategy" in str(w.message)]
    return found


def test_weights_and_buffers_are_no_samples() -> None:
    (expected,) = run_program(PLAIN, _constant)
    for found in run_program(PP2, _constant):
        for name, (losses, texts) in found.items():
            assert not texts, (name, texts)
            assert losses == pytest.approx(expected[name][0], rel=1e-9)


class Stacked(nn.Module):
    """Attention whose weights are stacks of heads, in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = (nn.Parameter(0.3 * torch.randn(shape)) for shape in ((3, 4, 8, 2), (4, 2, 8)))
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("btd,shde->sbhte", x, self.read)
        x = x + torch.einsum("bhte,hed->btd", (q @ k.mT).sigmoid() @ v, self.write)
        return x + self.down(self.up(x).relu())


class OfStacks(Lit):
    def __init__(self) -> None:
        super().__init__(F.mse_loss)
        self.net = nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), Stacked(), Stacked(), nn.Linear(8, 2))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]).flatten(1), batch[1])


def _of_stacks(layout: Layout) -> list[float]:
    seen = Losses()
    make_trainer(layout, strategy={"plan": "auto"}, callbacks=[seen]).fit(OfStacks(), _data())
    return seen.seen


def test_to_look_at_split_weights_is_no_use_of_them() -> None:
    (expected,) = run_program(PLAIN, _of_stacks)
    for losses in run_program(TP2_PP2, _of_stacks):
        assert losses == pytest.approx(expected, rel=1e-9)


class Pairs(LightningModule):
    """Two networks, and samples of all copies of the model told apart."""

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gathers = gathers
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        y, others = self.net(x), t
        if self.gathers:
            parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, t)
            others = torch.cat([t, *parts])
        near = torch.linalg.vecdot(y[:, None], others) * self.scale
        return F.cross_entropy(near, torch.arange(len(y), device=y.device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit_pairs(layout: Layout, gathers: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Pairs(gathers), _data())
    return _said(caught)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("gathers", [False, True], ids=["own", "gathered"])
def test_copies_of_the_model_compare_together(zero: int, gathers: bool) -> None:
    layout = Layout(dp=2, pp=2, microbatches=2, zero=zero)
    texts = [text for of_rank in run_program(layout, _fit_pairs, gathers) for text in of_rank]
    assert len(texts) == 1 and "on one device" in texts[0], texts


class Sorted(Lit):
    """Has a rule of its own for microbatches, by which samples come in another order than in the batch."""

    def split_batch(self, batch: list[Tensor], microbatches: int) -> list[list[Tensor]]:
        return [[x[i::microbatches] for x in batch] for i in range(microbatches)]


def _fit_sorted(layout: Layout) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Sorted(OWN["mse"]), _data())
    return _said(caught)


def test_samples_in_an_order_of_the_users_are_not_compared() -> None:
    assert run_program(PP2, _fit_sorted) == [[], []]


def _fit_shuffled(layout: Layout) -> list[str]:
    from lightning_megatp.pipeline.whole_loss import WholeLoss

    join = WholeLoss.join

    def shuffled(whole: Any) -> list[Tensor]:
        return [x.flip(0) for x in join(whole)]

    WholeLoss.join = shuffled  # type: ignore[method-assign]
    try:
        return _own(layout, ["mse"])["mse"][1]  # type: ignore[no-any-return]
    finally:
        WholeLoss.join = join  # type: ignore[method-assign]


def test_the_test_sees_samples_in_another_order() -> None:
    texts = [text for of_rank in run_program(PP2, _fit_shuffled) for text in of_rank]
    assert any(text.count("the loss of a batch is") for text in texts)


class TwoNetworks(LightningModule):
    """Each has a term of the loss, as in NeRF; that of the first is made on the first stage."""

    def __init__(self, couples: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.couples = couples
        self.coarse = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.fine = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        y = self.coarse(x)
        coarse = F.mse_loss(y, t)
        z = self.fine(x + y)
        fine = F.mse_loss(z, t)
        if self.couples:
            fine = fine + torch.cov(z.T).square().mean()
        self.log_dict({"coarse": coarse, "fine": fine, "both": coarse + fine})
        self.log("coarse_decibels", -10 * coarse.log10())
        self.log("fine_decibels", -10 * fine.log10())
        return coarse + fine

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit_two(layout: Layout, couples: bool) -> tuple[list[float], list[str], dict[str, float]]:
    seen = Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[seen], max_steps=1)
        trainer.fit(TwoNetworks(couples), _data())
    return seen.seen, _said(caught), {name: float(x) for name, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", [PP2, DP2_PP2], ids=str)
@pytest.mark.parametrize("couples", [False, True], ids=["average", "coupled"])
def test_what_an_earlier_stage_makes_is_left_out_of_what_is_compared(layout: Layout, couples: bool) -> None:
    found = run_program(layout, _fit_two, couples)
    (texts,) = {tuple(text) for _, text, _ in found if text}
    assert len(texts) == 1 and "no averages over samples" in texts[0] and "coarse" not in texts[0], texts
    if layout is PP2:
        ((losses, _, logs),) = run_program(PLAIN, _fit_two, couples)
        own = logs["fine_decibels"], found[0][2]["fine_decibels"]
        others = [f"`fine` {logs['fine']:.4g} and {found[0][2]['fine']:.4g}, "] if couples else [""]
        assert f"{others[0]}`fine_decibels` {own[0]:.4g} and {own[1]:.4g}. Log" in texts[0], texts
        assert couples or found[0][0] == pytest.approx(losses, rel=1e-9)


Penalty = Callable[[Tensor, Tensor], Tensor]
PENALTIES: dict[str, tuple[Penalty, bool]] = {
    "mean": (lambda mu, w: mu.square().mean(), False),
    "of each": (lambda mu, w: mu.square().sum(1).clamp(min=0.5).mean(), False),
    "of weights": (lambda mu, w: w.square().sum().sqrt(), False),
    "root": (lambda mu, w: mu.square().mean().sqrt(), True),
    "free bits": (lambda mu, w: mu.square().mean(0).clamp(min=0.3).sum(), True),
    "largest": (lambda mu, w: mu.mean(0).square().max(), True),
    "deviation": (lambda mu, w: F.relu(1 - mu.std(0)).mean(), True),
}
"""What an encoder's output adds to the loss, on the first stage; and whether that is another thing in a microbatch."""


class Encoded(LightningModule):
    """An autoencoder with a penalty of its code."""

    def __init__(self, penalty: Penalty, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.penalty, self.automatic_optimization = penalty, not by_hand
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        code = self.encoder(x)
        loss = F.mse_loss(self.decoder(code), t) + self.penalty(code, self.encoder[0].weight)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach() if not self.automatic_optimization else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _fit_encoded(layout: Layout, names: list[str], by_hand: bool) -> dict[str, tuple[list[float], list[str]]]:
    found = {}
    for name in names:
        seen = Losses()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[seen])
            trainer.fit(Encoded(PENALTIES[name][0], by_hand), _data())
        texts = [str(w.message) for w in caught]
        found[name] = seen.seen, [x for x in texts if "a stage before the last one" in x or x in _said(caught)]
    return found


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
def test_terms_that_an_earlier_stage_makes_are_said_by_that(by_hand: bool) -> None:
    (expected,) = run_program(PLAIN, _fit_encoded, list(PENALTIES), by_hand)
    layout = PP2 if by_hand else DP2_PP2
    found = run_program(layout, _fit_encoded, list(PENALTIES), by_hand)
    for name, (_, differs) in PENALTIES.items():
        texts = [text for of_rank in found for text in of_rank[name][1]]
        assert len(texts) == differs and all("a stage before the last one" in x for x in texts), (name, texts)
        assert all(("Steps that optimize by hand can't take whole_loss" in x) == by_hand for x in texts)
        if layout is PP2:
            same = found[0][name][0] == pytest.approx(expected[name][0], rel=1e-9)
            assert same != differs, name


class OfEach(LightningModule):
    """Logs a metric itself, on steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.f1 = MulticlassF1Score(6, average="macro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, t = batch
        y = self.net(x)
        given = self.f1(y, t.argmax(1))
        self.log("itself", self.f1, on_step=True, on_epoch=False)
        self.log("number", given, on_step=True, on_epoch=False)
        return F.mse_loss(y, t)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def _fit_of_each(layout: Layout) -> tuple[float, float]:
    trainer = make_trainer(layout, strategy={"plan": None}, max_steps=1)
    trainer.fit(OfEach(), _data())
    return float(trainer.callback_metrics["itself"]), float(trainer.callback_metrics["number"])


def test_metrics_on_steps_are_of_the_copys_own_batch() -> None:
    """As without stages: nothing is gathered over the copies unless the user asks for it."""
    expected = run_program(Layout(dp=2), _fit_of_each)
    assert expected[0] != expected[1]
    found = run_program(DP2_PP2, _fit_of_each)
    for of_ranks, of_copies in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        assert sorted(of_ranks) == pytest.approx(sorted([*of_copies, *of_copies]))
