"""Steps that optimize by hand, over pipeline stages: losses, logs and weights are those of one device."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.training import DP2_PP2, PLAIN, PP2, TP2_PP2, Layout, make_trainer, run_program
from tests.ranks import RankError

WIDTH, CLASSES = 12, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Logged(LightningModule):
    """Optimizes by hand, and keeps what it logs in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append({name: float(x) for name, x in self.trainer.logged_metrics.items()})


class Classifier(Logged):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.way, self.shown = globals()[kind], ""
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.zeros(()))
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean(1)

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return self.way(self, index, *batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.way in (two_optimizers, twice, in_turn):
            body = [*self.table.parameters(), *self.blocks.parameters()]
            return [torch.optim.AdamW(body, lr=0.02), torch.optim.SGD(self.head.parameters(), lr=0.1)]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def plain(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    optimizer = lit.optimizers()
    logits = lit(ids)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    lit.manual_backward(loss)
    optimizer.step()
    lit.lr_schedulers().step()
    lit.log("loss", loss)
    lit.log("accuracy", (logits.argmax(1) == y).double().mean())
    lit.log("lr", optimizer.param_groups[0]["lr"])


def cleared_first(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> Tensor:
    optimizer = lit.optimizers()
    optimizer.zero_grad()
    loss = F.cross_entropy(lit(ids), y, ignore_index=0)
    lit.log("loss", loss)
    lit.manual_backward(loss)
    optimizer.step()
    return loss


def accumulated(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    optimizer = lit.optimizers()
    loss = F.cross_entropy(lit(ids), y)
    lit.manual_backward(loss / 2)
    if (index + 1) % 2 == 0:
        lit.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
    lit.log("loss", loss)


def in_closure(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    optimizer = lit.optimizers()

    def closure() -> Tensor:
        loss = F.cross_entropy(lit(ids), y)
        optimizer.zero_grad()
        lit.manual_backward(loss)
        lit.log("loss", loss)
        return loss

    optimizer.step(closure=closure)


def by_step(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """A rate by the number of the step, an optimizer without Lightning's."""
    optimizer = lit.optimizers(use_pl_optimizer=False)
    optimizer.param_groups[0]["lr"] = 0.01 * (index + 1)
    optimizer.zero_grad()
    loss = F.cross_entropy(lit(ids), y)
    lit.manual_backward(loss)
    optimizer.step()
    lit.log_dict({"loss": loss.detach(), "sum": loss + 1})


def two_optimizers(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    first, second = lit.optimizers()
    loss = F.cross_entropy(lit(ids), y)
    lit.manual_backward(loss)
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    lit.log("loss", loss)


def twice(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """The second loss is that of updated weights; the number of the step goes up in between."""
    first, second = lit.optimizers()
    lit.log("before", float(lit.global_step))
    loss = F.cross_entropy(lit(ids), y)
    lit.manual_backward(loss)
    first.step()
    first.zero_grad()
    second.zero_grad()
    lit.log("between", float(lit.global_step))
    again = F.cross_entropy(lit(ids), y)
    lit.manual_backward(again)
    second.step()
    first.zero_grad()
    second.zero_grad()
    lit.log("after", float(lit.global_step))
    lit.log("loss", loss)
    lit.log("again", again)


def looked_at(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """Runs the model once more, when it was updated."""
    optimizer = lit.optimizers()
    loss = F.cross_entropy(lit(ids), y)
    optimizer.zero_grad()
    lit.manual_backward(loss)
    optimizer.step()
    with torch.no_grad():
        lit.log("updated", F.cross_entropy(lit(ids), y))


def read_early(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """Numbers of the loss are looked at before its backward, and between that and the optimizer's step."""
    optimizer = lit.optimizers()
    logits = lit(ids)
    loss = F.cross_entropy(logits, y)
    if torch.isnan(loss) or not torch.isfinite(loss):
        raise FloatingPointError
    lit.log("first", loss.item())
    lit.log("correct", (logits.argmax(1) == y).sum().item(), reduce_fx="sum")
    optimizer.zero_grad()
    lit.manual_backward(loss)
    number = loss.item()
    if number > 1.5:
        optimizer.step()
    lit.shown = f"{number:.3f}"
    lit.lr_schedulers().step()
    lit.log("loss", number)


def in_turn(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """Another optimizer in each step, and in one none."""
    first, second = lit.optimizers()
    if index % 3 == 0:
        loss = F.cross_entropy(lit(ids), y)
        lit.manual_backward(loss)
        first.step()
    elif index % 3 == 1:
        loss = lit(ids).square().mean()
        lit.manual_backward(loss)
        second.step()
        lit.log("loss", loss)
    for optimizer in (first, second):
        optimizer.zero_grad()
    if index % 2:
        again = F.cross_entropy(lit(ids), y)
        lit.manual_backward(again)
        second.step()
        second.zero_grad()
        first.zero_grad()


def graph_kept(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """What was made before is logged behind a second backward, and returned beside the loss."""
    optimizer = lit.optimizers()
    optimizer.zero_grad()
    logits = lit(ids)
    one = F.cross_entropy(logits, y)
    lit.manual_backward(one, retain_graph=True)
    two = F.cross_entropy(lit(ids.flip(1)), y)
    lit.manual_backward(two)
    optimizer.step()
    lit.log_dict({"one": one, "two": two, "norm": logits.detach().square().mean()})
    return {"loss": one + two.detach(), "logits": logits.detach()}


def rates_by_hand(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """A rate that is multiplied before and behind the step, and a scheduler that Lightning doesn't know."""
    optimizer = lit.optimizers()
    optimizer.param_groups[0]["lr"] *= 0.9
    loss = F.cross_entropy(lit(ids), y)
    lit.zero_grad()
    lit.manual_backward(loss)
    lit.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
    optimizer.step()
    lit.log("first", optimizer.param_groups[0]["lr"])
    optimizer.param_groups[0]["lr"] *= 0.5
    if index == 0:
        lit.own = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, 1.5)
    else:
        lit.own.step()
    lit.log("second", optimizer.param_groups[0]["lr"])


def added_up(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """A loss in the making is changed in place, by stages one after the other, and a parameter that no block holds
    weighs it: its number is that of before the step."""
    optimizer = lit.optimizers()
    total, x = torch.zeros(1, dtype=torch.float64), lit.table(ids)
    weight = lit.scale.exp()
    for i, block in enumerate(lit.blocks):
        x = block(x)
        total += x.square().mean() / (i + 1)
    total /= 4
    loss = F.cross_entropy(lit.head(x).mean(1), y) * weight + total
    lit.log("weight", weight.item())
    optimizer.zero_grad()
    lit.manual_backward(loss)
    optimizer.step()
    again = lit(ids).square().mean() * lit.scale.exp()
    lit.manual_backward(again)
    optimizer.step()
    lit.log("same", weight.item())
    lit.log("unchanged", weight * 2)
    lit.log("updated", lit.scale.exp())
    lit.log("read", lit.scale.exp().item())
    lit.log("loss", loss)
    lit.log("total", total)


def one_graph(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """Two losses go back through the same blocks, one after the other; a third one with what is new beside them."""
    optimizer = lit.optimizers()
    optimizer.zero_grad()
    x = lit.blocks[0](lit.table(ids))
    hidden = lit.blocks[1](x)
    logits = lit.head(lit.blocks[2](hidden)).mean(1)
    loss = F.cross_entropy(logits, y)
    lit.manual_backward(loss, retain_graph=True)
    lit.manual_backward(logits.square().mean() + hidden.square().mean(), retain_graph=True)
    lit.manual_backward(lit.blocks[3](x + hidden).square().mean())
    optimizer.step()
    lit.log("loss", loss)


def read_late(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """Numbers of both stages are read behind all, one of them used in two parts."""
    g, d = lit.optimizers()
    fake = lit.generator(noise)
    d_loss = real_or_not(lit.discriminator(x), True) + real_or_not(lit.discriminator(fake.detach()), False)
    d.zero_grad()
    lit.manual_backward(d_loss)
    if float(d_loss) > 0.1:
        d.step()
    distance = F.l1_loss(fake, x)
    g_loss = real_or_not(lit.discriminator(fake), True) + distance
    g.zero_grad()
    lit.manual_backward(g_loss)
    g.step()
    lit.log_dict({"d_loss": d_loss.item(), "g_loss": g_loss.item(), "distance": distance.item() / 2})


def hooked(lit: Hooked, index: int, ids: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(lit(ids), y)
    lit.zero_grad()
    lit.manual_backward(loss)
    lit.optimizers().step()
    lit.log("found", lit.found)


class Hooked(Classifier):
    """Its hooks, which run in what is done by hand, log and set numbers."""

    found = 0.0

    def on_after_backward(self) -> None:
        self.found += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found += 0.5
        self.log("in_hook", self.found)


class Gan(Logged):
    """The generator's blocks are the first stage's, the discriminator's the last one's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.way = globals()[kind]
        self.generator = nn.Sequential(*(Block() for _ in range(4)))
        self.discriminator = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.way(self, *batch)

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.9)) for part in parts]


class Reversed(Gan):
    """Its discriminator is defined before its generator, of which it keeps an average."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.average = copy.deepcopy(self.generator).requires_grad_(False)
        self.generator = self._modules.pop("generator")

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.generator.parameters(), strict=True):
                mean.lerp_(now, 0.1)


def real_or_not(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def toggled(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """As in Lightning's example: made twice."""
    g, d = lit.optimizers()
    lit.toggle_optimizer(g)
    g_loss = real_or_not(lit.discriminator(lit.generator(noise)), True)
    lit.log("g_loss", g_loss)
    lit.manual_backward(g_loss)
    g.step()
    g.zero_grad()
    lit.untoggle_optimizer(g)
    lit.toggle_optimizer(d)
    real = real_or_not(lit.discriminator(x), True)
    d_loss = (real + real_or_not(lit.discriminator(lit.generator(noise).detach()), False)) / 2
    lit.log("d_loss", d_loss)
    lit.manual_backward(d_loss)
    d.step()
    d.zero_grad()
    lit.untoggle_optimizer(d)


def made_once(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """What the generator makes is taken before and after the discriminator's step."""
    g, d = lit.optimizers()
    fake = lit.generator(noise)
    d_loss = real_or_not(lit.discriminator(x), True) + real_or_not(lit.discriminator(fake.detach()), False)
    d.zero_grad()
    lit.manual_backward(d_loss)
    d.step()
    g_loss = real_or_not(lit.discriminator(fake), True)
    g.zero_grad()
    lit.manual_backward(g_loss)
    g.step()
    lit.log_dict({"g_loss": g_loss, "d_loss": d_loss, "norm": fake.square().mean()})


def toggled_late(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """Parameters stop to learn behind what was computed with them, as in many a loop."""
    g, d = lit.optimizers()
    fake = lit.generator(noise)
    with g.toggle_model():
        g_loss = real_or_not(lit.discriminator(fake), True)
        g.zero_grad()
        lit.manual_backward(g_loss)
        g.step()
    real = real_or_not(lit.discriminator(x), True)
    lit.toggle_optimizer(d)
    d_loss = real + real_or_not(lit.discriminator(lit.generator(noise)), False)
    lit.untoggle_optimizer(d)
    d.zero_grad()
    lit.manual_backward(d_loss)
    d.step()
    lit.log_dict({"g_loss": g_loss, "d_loss": d_loss})


def frozen_by_hand(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """As pix2pix does: parameters are told by themselves whether to learn. Two steps of the discriminator, and in every
    second batch one of the generator."""
    g, d = lit.optimizers()
    fake = lit.generator(noise)
    for i in range(2):
        lit.discriminator.requires_grad_(True)
        d_loss = real_or_not(lit.discriminator(x), True) + real_or_not(lit.discriminator(fake.detach()), False)
        d.zero_grad()
        lit.manual_backward(d_loss)
        d.step()
        lit.log(f"d_loss_{i}", d_loss)
    if lit.global_step % 4 < 3:
        for parameter in lit.discriminator.parameters():
            parameter.requires_grad = False
        g_loss = real_or_not(lit.discriminator(fake), True) + (fake - x).abs().mean()
        g.zero_grad()
        lit.manual_backward(g_loss)
        g.step()


def frozen_for_the_other(lit: Gan, noise: Tensor, x: Tensor) -> None:
    """As actors are trained on a critic: the discriminator learns, but for the generator's loss."""
    g, d = lit.optimizers()
    d_loss = real_or_not(lit.discriminator(x), True) + real_or_not(lit.discriminator(lit.generator(noise)), False)
    d.zero_grad()
    lit.manual_backward(d_loss)
    d.step()
    lit.discriminator.requires_grad_(False)
    g_loss = real_or_not(lit.discriminator(lit.generator(noise)), True)
    g.zero_grad()
    lit.manual_backward(g_loss)
    g.step()
    lit.discriminator.requires_grad_(True)
    lit.log_dict({"g_loss": g_loss, "d_loss": d_loss})


CLASSIFIERS = (
    "plain", "cleared_first", "accumulated", "in_closure", "by_step", "two_optimizers", "twice", "looked_at",
    "read_early", "in_turn", "graph_kept", "one_graph", "rates_by_hand", "added_up", "hooked",
)  # fmt: skip
GANS = "toggled", "made_once", "toggled_late", "frozen_by_hand", "frozen_for_the_other", "read_late"


def train(
    layout: Layout, kind: str, reverse: bool = False, **strategy: Any
) -> tuple[list[dict[str, float]], dict[str, Tensor], int]:
    """What four steps log, the weights after them, and the number of the step."""
    torch.manual_seed(1)
    gan = Reversed if reverse else Gan
    lit = gan(kind) if kind in GANS else Hooked(kind) if kind == "hooked" else Classifier(kind)
    draw = torch.Generator().manual_seed(2)
    if kind in GANS:
        data = TensorDataset(*(torch.randn(32, 3, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)))
    else:
        y = torch.randint(0, CLASSES, (32,), generator=draw)
        data = TensorDataset(torch.randint(0, 9, (32, 4), generator=draw), y)
    rows = 8 // layout.dp
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, shuffle=True, seed=0)  # as Lightning's
    plan: dict[str, Any] = {"plan": "auto" if layout.tp > 1 else None, **strategy}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = make_trainer(layout, strategy=plan)
        trainer.fit(lit, DataLoader(data, batch_size=rows, sampler=sampler))
    whole = trainer.strategy.lightning_module_state_dict()  # on rank 0
    return lit.seen, {name: x.clone() for name, x in whole.items()}, trainer.global_step


@pytest.mark.parametrize("kind", [*CLASSIFIERS, *GANS])
@pytest.mark.parametrize("layout", [PP2, TP2_PP2, DP2_PP2], ids=str)
def test_trains_as_on_one_device(kind: str, layout: Layout) -> None:
    everywhere = "plain", "accumulated", "toggled", "made_once", "frozen_by_hand", "frozen_for_the_other"
    if layout is not PP2 and kind not in everywhere:
        pytest.skip("one layout is enough")
    (seen, weights, steps), *_ = run_program(PLAIN, train, kind)
    for rank, (found, held, at) in enumerate(run_program(layout, train, kind)):
        assert at == steps
        assert len(found) == len(seen) == 4
        for i, (own, expected) in enumerate(zip(found, seen, strict=True) if layout.dp == 1 else ()):
            assert own == pytest.approx(expected, rel=1e-9, abs=1e-12), f"step {i} on rank {rank}"
        assert held.keys() == (weights.keys() if rank == 0 else set())
        for name, x in held.items():
            torch.testing.assert_close(x, weights[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["toggled", "frozen_by_hand", "read_late"])
def test_units_are_in_the_order_of_the_step(kind: str) -> None:
    (_, weights, _), *_ = run_program(PLAIN, train, kind, True)
    _, held, _ = run_program(PP2, train, kind, True)[0]
    for name, x in held.items():
        torch.testing.assert_close(x, weights[name], rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("kind", ["plain", "accumulated", *GANS, "one_graph"])
def test_with_divided_parameters(kind: str, zero: int) -> None:
    (_, weights, steps), *_ = run_program(PLAIN, train, kind)
    _, held, at = run_program(dataclasses.replace(DP2_PP2, zero=zero), train, kind)[0]
    assert at == steps
    for name, x in held.items():
        torch.testing.assert_close(x, weights[name], rtol=1e-8, atol=1e-10)


REFUSED = {
    "gradients_read": "reads the gradient of a parameter",
    "own_backward": r"differentiates inside the step.*`self.manual_backward\(loss\)`",
    "stepped_by_tensor": r"`step` is given a tensor that one pipeline stage has.*`loss.item\(\)`",
    "step_by_microbatch": r"`__bool__` .* reads a value of one pipeline stage, in a step that optimizes by hand",
    "list_read": "reads values on the host by `item`, and when it was planned",
    "ended_early": "ended without a `manual_backward` that other microbatches come to",
}


def gradients_read(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    lit.manual_backward(F.cross_entropy(lit(ids), y))
    lit.log("norm", lit.head.weight.grad.norm())  # type: ignore[union-attr]


def own_backward(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    F.cross_entropy(lit(ids), y).backward()


def stepped_by_tensor(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(lit(ids), y)
    lit.manual_backward(loss)
    lit.lr_schedulers().step(loss)


def step_by_microbatch(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    losses = F.cross_entropy(lit(ids), y, reduction="none")
    lit.manual_backward(losses.mean())
    if losses[0] > losses[1]:
        lit.optimizers().step()


def list_read(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    logits = lit(ids)
    lit.shown = str(logits.argmax(1).tolist())
    lit.manual_backward(F.cross_entropy(logits, y))


def ended_early(lit: Classifier, index: int, ids: Tensor, y: Tensor) -> None:
    """As PPO does, by how far it has gone."""
    for _ in range(3):
        losses = F.cross_entropy(lit(ids), y, reduction="none")
        if losses.mean() > losses[0]:
            break
        lit.optimizers().zero_grad()
        lit.manual_backward(losses.mean())
        lit.optimizers().step()


@pytest.mark.parametrize("kind", REFUSED)
def test_is_refused(kind: str) -> None:
    with pytest.raises(RankError, match=f"(?s){REFUSED[kind]}"):
        run_program(PP2, train, kind)


@pytest.mark.parametrize("option", ["verify", "trace"])
def test_options_for_one_backward_are_refused(option: str, tmp_path: Path) -> None:
    chosen = {"verify": True} if option == "verify" else {"trace": tmp_path}
    with pytest.raises(RankError, match=f"{option}=.* looks at a step as one forward and one backward"):
        run_program(PP2, partial(train, **chosen), "plain")


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_h1", "zb_v"])
def test_every_schedule_is_run_in_parts(schedule: str) -> None:
    (seen, weights, _), *_ = run_program(PLAIN, train, "made_once")
    found, held, _ = run_program(dataclasses.replace(PP2, schedule=schedule), train, "made_once")[0]
    for own, expected in zip(found, seen, strict=True):
        assert own == pytest.approx(expected, rel=1e-9)
    for name, x in held.items():
        torch.testing.assert_close(x, weights[name], rtol=1e-8, atol=1e-10)
