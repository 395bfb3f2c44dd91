"""What a step's Python code sets on the module, and blocks that are compiled, give the numbers of one device."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program, tokens, train_loader
from tests.parity.models import GPT
from tests.ranks import RankError

ONE_BY_ONE = [
    Layout(pp=2, microbatches=1),
    Layout(pp=2, microbatches=1, schedule="zb_v"),
    Layout(tp=2, pp=2, microbatches=1),
]


class Schedule:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.stretch = 1.0
        self.seen: list[float] = []


class Remembers(GPT):
    """Early code depends on what late code, and hooks, have set."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.epochs, self.plan = 0, {"done": 0}, Schedule()

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL) * (1 + 0.1 * self.calls) * self.plan.stretch
        self.calls += 1
        x_BLD = x_BLD + self.pos.weight.new_full((), 0.01 * len(self.plan.seen) + self.epochs["done"])
        if "loss" in (logged := self.trainer.callback_metrics):  # from the second batch on
            x_BLD = x_BLD / logged["loss"] if logged["loss"] > 7 else x_BLD.tanh()
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.plan.stretch = 1 / (1 + loss.item())
        self.plan.seen.append(loss.item())
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs["done"] += 1
        self.plan.seen.clear()


def _remembering(layout: Layout) -> tuple[list[float], list[Any], list[str], list[str]]:
    torch.manual_seed(3)
    losses, module = Losses(), Remembers()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, max_epochs=2, callbacks=[losses]).fit(module, DataLoader(tokens(12), batch_size=4))
    late = [name for x in said for name in re.findall(r"the step sets `(.+?)`", str(x.message))]
    left = [module.calls, module.epochs, module.plan.stretch, module.plan.seen]
    counted = [name for x in said for name in re.findall(r"counts its calls in `(.+?)`", str(x.message))]
    return losses.seen, left, sorted(set(late)), counted


@pytest.mark.parametrize("layout", ONE_BY_ONE, ids=str)
def test_all_stages_know_what_the_last_one_set(layout: Layout) -> None:
    ((losses, values, *_),) = run_program(PLAIN, _remembering)
    assert values[:2] == [6, {"done": 2}]
    for rank, (found, left, late, counted) in enumerate(run_program(layout, _remembering)):
        assert not counted, "one microbatch is a batch"
        assert found == pytest.approx(losses, abs=1e-9)
        assert left[:2] == values[:2] and left[2] == pytest.approx(values[2]) and left[3] == []
        if rank == layout.tp:
            assert late == ["plan.stretch"], "a counter is alike on all stages, and needs no warning"


def test_a_step_that_counts_its_calls_is_told_that_these_are_microbatches() -> None:
    found = run_program(Layout(pp=2, microbatches=2), _remembering)
    assert [counted for *_, counted in found] == [["calls"], []]
    assert all(left[0] == 12 for _, left, *_ in found)


class KeepsNumbers(GPT):
    """Args:
    how: its step keeps a number.
    by_hand: it optimizes by hand.
    """

    def __init__(self, how: str, by_hand: bool) -> None:
        super().__init__()
        self.how, self.automatic_optimization = how, not by_hand
        self.number, self.numbers, self.calls, self.longest = 1.0, {"loss": 0.0}, 0, 4

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.how == "sum":
            self.number += loss.item()
        elif self.how == "dict":
            self.numbers["loss"] = loss.item()
        elif self.how == "factor":
            self.number *= 0.9
        elif self.how == "calls":
            self.calls += 1
        elif self.how == "longest":
            self.longest = max(self.longest, batch[0].shape[1])
        else:
            self.number = 1.0 - 0.1 * self.global_step
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def _keeping(layout: Layout, how: str, by_hand: bool) -> list[str]:
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout).fit(KeepsNumbers(how, by_hand), DataLoader(tokens(8), batch_size=4))
    return [str(x.message) for x in said if "the step" in str(x.message)]


@pytest.mark.parametrize("by_hand", [False, True], ids=["automatic", "by hand"])
@pytest.mark.parametrize("how", ["sum", "dict", "factor", "calls", "longest", "schedule"])
def test_numbers_that_a_step_keeps_of_microbatches_are_warned_of(how: str, by_hand: bool) -> None:
    told = run_program(Layout(pp=2, microbatches=2), _keeping, how, by_hand)[0]
    of_batch = how == "dict" and by_hand  # behind its part, what is read of a loss is the batch's
    if of_batch or how in ("longest", "schedule"):
        assert told == []
    else:
        name = {"dict": "numbers", "calls": "calls"}.get(how, "number")
        wanted = "counts its calls in `calls`" if how == "calls" else f"sets `{name}` to another number in each micro"
        assert len(told) == 1 and wanted in told[0]


class Level:
    def __init__(self) -> None:
        self.level = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.level


class LevelModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.level


class Anneals(GPT):
    """Scales early by a number that it sets at the end of its step.

    Args:
        where: that is kept: on a "module" that is in no block, in an object in a "list", in a "dict" beside a tensor.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.scale, self.scales = LevelModule(), [Level(), Level()]
        self.numbers = {"level": 1.0, "bias": torch.zeros(())}

    def level(self, factor: float = 1.0) -> float:
        if self.where == "dict":
            self.numbers["level"] *= factor
            return float(self.numbers["level"])
        holder: Any = self.scale if self.where == "module" else self.scales[1]
        holder.level *= factor
        return float(holder.level)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.tok(batch[0]) * self.level()
        for block in self.blocks:
            h = block(h)
        loss = F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), batch[1].flatten())
        self.level(0.8)
        return loss


def _annealing(layout: Layout, where: str) -> tuple[list[float], float, list[str]]:
    torch.manual_seed(3)
    losses, module = Losses(), Anneals(where)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, callbacks=[losses]).fit(module, DataLoader(tokens(12), batch_size=4))
    return losses.seen, module.level(), [str(x.message) for x in said if "the step sets" in str(x.message)]


@pytest.mark.parametrize("where", ["module", "list", "dict"])
def test_numbers_that_earlier_stages_go_by_are_told(where: str) -> None:
    ((losses, level, _),) = run_program(PLAIN, _annealing, where)
    for seen, found, _ in run_program(Layout(pp=2, microbatches=1), _annealing, where):
        assert seen == pytest.approx(losses, rel=1e-9)
        assert found == level
    name = {"module": "scale.level", "list": "scales.1.level", "dict": "numbers.level"}[where]
    last, _ = run_program(Layout(pp=2, microbatches=2), _annealing, where)
    assert any(f"`{name}` to another number in each microbatch" in text for text in last[2])


class Centred(GPT):
    """Its loss goes by a moving average of what comes out, as a teacher's centre, or by a table."""

    def __init__(self, average: bool) -> None:
        super().__init__()
        self.average = average
        self.register_buffer("centre", torch.zeros(32), persistent=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        y = self(batch[0])
        loss = F.cross_entropy((y - self.centre).flatten(0, 1), batch[1].flatten())
        if self.average:
            self.centre = 0.9 * self.centre + 0.1 * y.detach().mean((0, 1))
        return loss


def _centring(layout: Layout, average: bool, whole_loss: bool) -> tuple[list[str], list[float]]:
    losses = Losses()
    torch.manual_seed(3)
    module = Centred(average)
    options = {} if layout.plain else {"strategy": {"whole_loss": whole_loss}}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, callbacks=[losses], **options).fit(module, DataLoader(tokens(12), batch_size=4))
    return [str(x.message) for x in said if "changes the buffer" in str(x.message)], losses.seen


@pytest.mark.parametrize("whole_loss", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_buffers_that_move_in_each_microbatch_are_warned_of(average: bool, whole_loss: bool) -> None:
    [(_, expected)] = run_program(PLAIN, _centring, average, False)
    found = run_program(Layout(pp=2, microbatches=2), _centring, average, whole_loss)
    said = found[0][0]
    assert len(said) == int(average and not whole_loss) and all("`centre`" in text for text in said)
    assert all((losses == pytest.approx(expected, rel=1e-9)) is not bool(said) for _, losses in found)


class Memory(nn.Module):
    """Adds what it kept of the step before: its samples' states, their mean, or a table made once."""

    def __init__(self, block: nn.Module, kept: str) -> None:
        super().__init__()
        self.block, self.kept = block, kept
        self.memory: Tensor | None = None

    def forward(self, x_BLD: Tensor) -> Tensor:
        y_BLD = self.block(x_BLD)
        before = torch.zeros_like(y_BLD) if self.memory is None else self.memory * 0.5
        if self.kept == "states":
            self.memory = y_BLD.detach()
        elif self.kept == "mean":
            self.memory = y_BLD.detach().mean(0)
        elif self.memory is None:
            self.memory = before.cos()
        return y_BLD + before


def _remembering_samples(layout: Layout, kept: str, block: int) -> list[str]:
    module = GPT()
    module.blocks[block] = Memory(module.blocks[block], kept)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, max_epochs=1).fit(module, DataLoader(tokens(8), batch_size=4))
    return [str(x.message) for x in said if "a row for each sample" in str(x.message)]


@pytest.mark.parametrize(("kept", "block"), [("states", 0), ("states", 1), ("mean", 1), ("table", 1)])
def test_states_of_samples_that_meet_other_samples_are_warned_of(kept: str, block: int) -> None:
    found = run_program(Layout(pp=2, microbatches=2), _remembering_samples, kept, block)
    expected = [[], []]
    if kept == "states":
        expected[1 - block] = ["`mul` (test_values.py"]  # of the stage's rank; the last one is rank 0
    assert [[text.removeprefix("MegaTPStrategy: ").partition(":")[0] for text in texts] for texts in found] == expected
    assert not any(run_program(Layout(pp=2, microbatches=1), _remembering_samples, kept, block))


class Momentum(GPT):
    """Moves an average of a weight on in each step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.average, self.how = copy.deepcopy(self.head).requires_grad_(False), how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.how == "data":
            self.average.weight.data.mul_(0.5).add_(self.head.weight.data, alpha=0.5)
        elif self.how == "no_grad":
            with torch.no_grad():
                self.average.weight.lerp_(self.head.weight, 0.5)
        x_BLD = self.trunk(batch[0])
        loss = nn.functional.cross_entropy(self.head(x_BLD).flatten(0, 1), batch[1].flatten())
        return loss + self.average(x_BLD).square().mean()


def _moving(layout: Layout, how: str) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, max_epochs=1).fit(Momentum(how), DataLoader(tokens(8), batch_size=4))
    return [str(x.message) for x in said if "moves 2 times as often" in str(x.message)]


@pytest.mark.parametrize("how", ["data", "no_grad", "not"])
def test_averages_that_move_on_in_each_microbatch_are_warned_of(how: str) -> None:
    last, first = run_program(Layout(pp=2, microbatches=2), _moving, how)
    assert len(last) == (how != "not") and all("`average.weight`" in text for text in last) and not first
    assert not any(run_program(Layout(pp=2, microbatches=1), _moving, how))


class Target(LightningModule):
    """A network that learns from a later copy of itself, which is not frozen: nothing but `no_grad` says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        layers = (nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        self.net, self.how = nn.Sequential(*layers), how
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BF = batch[0] / 32.0
        with torch.no_grad():
            later_B = self.target(x_BF.roll(1, 1)).amax(1)
        return nn.functional.mse_loss(self.net(x_BF)[:, 0], x_BF.sum(1) + 0.9 * later_B)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "loaded":
            self.target.load_state_dict(self.net.state_dict())
            return
        for own, target in zip(self.net.parameters(), self.target.parameters(), strict=True):
            target.data.mul_(0.5).add_(own.data, alpha=0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def _following(layout: Layout, how: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    losses, module = Losses(), Target(how)
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=2, callbacks=[losses])
    trainer.fit(module, DataLoader(tokens(12), batch_size=4))
    return losses.seen, dict(trainer.strategy.lightning_module_state_dict())


@pytest.mark.parametrize("how", ["moved", "loaded"])
def test_a_target_network_shares_the_stages_of_the_trained_one(how: str) -> None:
    ((losses, state),) = run_program(PLAIN, _following, how)
    results = run_program(Layout(pp=2, microbatches=2), _following, how)
    for found, _ in results:
        assert found == pytest.approx(losses, abs=1e-9)
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, atol=1e-9, rtol=0, msg=name)


class Rotary(nn.Module):
    """Cosines of positions, made anew for another length, and extended for a longer one: both habits are common."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.longest = 0, 0
        self.shift_L1 = self.cos_L1 = torch.zeros(0, 1)

    def forward(self, x_BLD: Tensor) -> Tensor:
        length = x_BLD.shape[1]
        if length != self.length:
            self.length, self.shift_L1 = length, torch.arange(length, device=x_BLD.device).div(length)[:, None]
        if length > self.longest:
            self.longest, self.cos_L1 = length, torch.arange(length, device=x_BLD.device).cos()[:, None]
        return self.cos_L1[:length] + self.shift_L1


class Turned(GPT):
    """Its table lies beside the blocks, and is made by whichever microbatch needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD * self.rotary(x_BLD))
        return self.norm(x_BLD)


class Shifted(GPT):
    """Its table is a buffer, beside a number that all stages learn, and only later stages than the first come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.register_buffer("shift_L1", None, persistent=False)

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD, length = self.blocks[1](self.blocks[0](self.tok(tokens_BL))), tokens_BL.shape[1]
        if self.shift_L1 is None or self.length != length:
            self.length, self.shift_L1 = length, torch.arange(length).div(length)[:, None]
        return self.norm(x_BLD * self.shift_L1)


def _with_tables(layout: Layout, kind: type[GPT], *lengths: int) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(3)
    losses, module = Losses(), kind()
    batches = [batch for length in lengths for batch in DataLoader(tokens(8, length=length), batch_size=4)]
    evaluated = DataLoader(tokens(4, length=lengths[0] if len({*lengths}) == 1 else 5, seed=4), batch_size=4)
    trainer = make_trainer(layout, max_epochs=2, callbacks=[losses])
    trainer.fit(module, DataLoader(batches, batch_size=None), evaluated)  # type: ignore[arg-type]
    return losses.seen, {name: float(x) for name, x in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("layout", "kind", "lengths"),
    [
        (Layout(pp=2, microbatches=2), Turned, (4, 6, 4)),
        (Layout(tp=2, pp=2, microbatches=2), Turned, (4, 6, 4)),
        (Layout(pp=2, microbatches=2, schedule="interleaved"), Turned, (6, 6)),  # a rank runs the step for each stage
        (Layout(pp=2, microbatches=2), Shifted, (6, 6)),
        (Layout(pp=2, microbatches=2), Shifted, (4, 6, 4)),
    ],
    ids=str,
)
def test_tables_beside_the_blocks_are_made_once_and_found_by_the_next(
    layout: Layout, kind: type[GPT], lengths: tuple[int, ...]
) -> None:
    ((losses, metrics),) = run_program(PLAIN, _with_tables, kind, *lengths)
    for found, logged in run_program(layout, _with_tables, kind, *lengths):
        assert found == pytest.approx(losses, abs=1e-9)
        assert logged == pytest.approx(metrics, abs=1e-9)


class LogsNumbers(GPT):
    """Reads all its losses on the host, to log them; early blocks make one of them, and what is only logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        early_BLD = self.blocks[0](self.tok(batch[0]))
        spread = early_BLD.square().mean()
        predicted = self.loss(batch)
        losses = {"loss": predicted + 0.1 * spread, "predicted": predicted.detach(), "spread": -spread.detach()}
        self.log_dict({name: value.item() for name, value in losses.items()}, on_step=False, on_epoch=True)
        return losses["loss"]


class LearnsByMetric(GPT):
    """Its loss is a metric's value of the batch. The loss has nothing of others, which are of an early block."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = {"sizes": list[int]}  # as torch_geometric's layers keep those of their arguments
        both = {"mean": torchmetrics.MeanAbsoluteError(), "square": torchmetrics.MeanSquaredError()}
        self.both = torchmetrics.MetricCollection(both).set_dtype(torch.float64)
        self.error = torchmetrics.MeanSquaredError().set_dtype(torch.float64)
        self.early = torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        early_BLD = self.blocks[0](self.tok(batch[0]))
        self.early(early_BLD, torch.zeros_like(early_BLD))
        self.both.update(early_BLD, torch.zeros_like(early_BLD))
        self.log_dict(self.both, on_step=False, on_epoch=True)
        logits_BLV = self(batch[0])
        loss: Tensor = self.error(
            logits_BLV.softmax(-1), nn.functional.one_hot(batch[1], logits_BLV.shape[-1]).double()
        )
        self.log("error", loss, on_step=False, on_epoch=True)
        self.log("early", self.early, on_step=False, on_epoch=True)
        return loss


class Grouped(GPT):
    """Metrics of which some share their states, in batches of another size, too."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {"f1": torchmetrics.F1Score, "precision": torchmetrics.Precision, "recall": torchmetrics.Recall}
        self.scores = torchmetrics.MetricCollection(
            {name: kind("multiclass", num_classes=32, average="macro") for name, kind in kinds.items()}
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.scores.update(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute())
        self.scores.reset()


def _grouped(layout: Layout) -> dict[str, float]:
    torch.manual_seed(3)
    trainer = make_trainer(layout)
    trainer.fit(Grouped(), DataLoader(tokens(8), batch_size=8), DataLoader(tokens(20), batch_size=8))
    return {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_metrics_that_share_states_count_batches_of_any_size() -> None:
    (expected,) = run_program(PLAIN, _grouped)
    assert "f1" in expected
    for found in run_program(Layout(pp=2, microbatches=2), _grouped):
        assert found == pytest.approx(expected, rel=1e-6)


class OnSteps(GPT):
    """Metrics that are no mean over samples, logged for each batch."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"task": "multiclass", "num_classes": 32}
        f1, recall = torchmetrics.F1Score(average="macro", **options), torchmetrics.Recall(average="macro", **options)
        self.both = torchmetrics.MetricCollection([f1, recall])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits_BLV: Tensor = self(batch[0])
        self.both(logits_BLV.transpose(1, 2), batch[1])
        self.log_dict(self.both, on_step=True, on_epoch=True)
        loss: Tensor = nn.functional.cross_entropy(logits_BLV.transpose(1, 2), batch[1])
        return loss


class Logged(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({name: float(x) for name, x in trainer.callback_metrics.items()})


def _on_steps(layout: Layout) -> list[dict[str, float]]:
    torch.manual_seed(3)
    logged = Logged()
    trainer = make_trainer(layout, callbacks=[logged], max_epochs=2)
    trainer.fit(OnSteps(), DataLoader(tokens(13), batch_size=5))
    return logged.seen


def test_metrics_that_are_logged_on_steps_are_those_of_the_batch() -> None:
    (expected,) = run_program(PLAIN, _on_steps)
    assert len(expected) == 6 and "MulticlassF1Score_step" in expected[0]
    for found in run_program(Layout(pp=2, microbatches=2), _on_steps):
        for batch, of_one in zip(found, expected, strict=True):
            assert batch == pytest.approx(of_one, rel=1e-6)


class Counting(nn.Module):
    """Counts in its forward what it has been right about."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.right = block, torchmetrics.MeanMetric()

    def forward(self, x_BLD: Tensor, targets_BL: Tensor) -> Tensor:
        out_BLD: Tensor = self.block(x_BLD)
        self.right((out_BLD.argmax(-1) == targets_BL).double())
        return out_BLD


class CountsInABlock(GPT):
    """A metric is a part of its last block, or of its first."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at % len(self.blocks)
        self.blocks[at] = Counting(self.blocks[at])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BLD = self.tok(batch[0])
        for i, block in enumerate(self.blocks):
            x_BLD = block(x_BLD, batch[1]) if i == self.at else block(x_BLD)
        loss: Tensor = nn.functional.cross_entropy(self.head(x_BLD).transpose(1, 2), batch[1])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("right", self.get_submodule(f"blocks.{self.at}.right").compute())


def _counting_in_a_block(layout: Layout, at: int) -> tuple[float, list[str]]:
    torch.manual_seed(3)
    trainer = make_trainer(layout, strategy={"plan": None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(CountsInABlock(at), DataLoader(tokens(8), batch_size=4))
    return float(trainer.callback_metrics["right"]), [str(w.message) for w in caught if "counts" in str(w.message)]


def test_a_metric_may_be_a_part_of_the_last_block() -> None:
    ((expected, _),) = run_program(PLAIN, _counting_in_a_block, -1)
    for found, said in run_program(Layout(pp=2, microbatches=2), _counting_in_a_block, -1):
        assert found == pytest.approx(expected, rel=1e-6) and not said
    with pytest.raises(RankError, match=r"`blocks.0.right.forward`.*is called inside a module of pipeline stage 0"):
        run_program(Layout(pp=2, microbatches=2), _counting_in_a_block, 0)


def _learning_by_a_metric(layout: Layout) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(3)
    losses, module = Losses(), LearnsByMetric()
    trainer = make_trainer(layout, callbacks=[losses])
    trainer.fit(module, DataLoader(tokens(8), batch_size=4))
    state = trainer.strategy.lightning_module_state_dict()
    return losses.seen, state, {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_a_metric_may_be_the_loss() -> None:
    ((losses, state, metrics),) = run_program(PLAIN, _learning_by_a_metric)
    for found, weights, logged in run_program(Layout(pp=2, microbatches=2), _learning_by_a_metric):
        assert found == pytest.approx(losses, abs=1e-9)
        assert logged == pytest.approx(metrics, abs=1e-9)
        for name, value in weights.items():
            torch.testing.assert_close(value, state[name], atol=1e-9, rtol=0)


def _logging_numbers(layout: Layout) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(3)
    losses, module = Losses(), LogsNumbers()
    trainer = make_trainer(layout, callbacks=[losses])
    trainer.fit(module, DataLoader(tokens(8), batch_size=4))
    return losses.seen, {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_numbers_of_early_stages_are_there_to_be_read_on_the_last() -> None:
    ((losses, metrics),) = run_program(PLAIN, _logging_numbers)
    assert len(metrics) == 3
    for found, logged in run_program(Layout(pp=2, microbatches=2), _logging_numbers):
        assert found == pytest.approx(losses, abs=1e-9)
        assert logged == pytest.approx(metrics, abs=1e-9)


def _compiled(layout: Layout, wrap: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    losses, module = Losses(), GPT()
    trainer = make_trainer(layout, max_epochs=1, callbacks=[losses])
    for i, block in enumerate(module.blocks):
        if layout.plain:
            continue
        if wrap:
            module.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        else:
            block.compile(backend="aot_eager")
    trainer.fit(module, DataLoader(tokens(12), batch_size=4))
    state = trainer.strategy.lightning_module_state_dict()
    return losses.seen, {name.replace("_orig_mod.", ""): value for name, value in state.items()}


@pytest.mark.parametrize("wrap", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["in_place", "wrapped"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=2, schedule="zb_h1"),
        pytest.param(Layout(tp=2, pp=2, sequence=False), marks=pytest.mark.extended),
        pytest.param(Layout(tp=2, pp=2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_compiled_blocks(layout: Layout, wrap: bool) -> None:
    ((losses, state),) = run_program(PLAIN, _compiled, wrap)
    results = run_program(layout, _compiled, wrap)
    for found, _ in results:
        assert found == pytest.approx(losses, abs=1e-9)
    assert results[0][1].keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, atol=1e-9, rtol=0, msg=name)


class AsksForSizes(GPT):
    """Its code computes with the sizes of parameters, those of other stages and of split ones among them."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        of_head = next(self.head.parameters())  # as `module.dtype` of some libraries does
        x_BLD = self.tok(tokens_BL).to(of_head.dtype) / sum(1 for _ in self.parameters()) ** 0.5
        for block in self.blocks:
            x_BLD = block(x_BLD) / block.mlp.mlp.up.weight.shape[0] ** 0.5
        return self.norm(x_BLD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        sizes = sum(p.numel() for p in self.parameters() if p.requires_grad)
        shapes = sum(p.shape[-1] + len(p) for name, p in self.named_parameters() if isinstance(p, nn.Parameter))
        device = self.blocks[0].mlp.mlp.up.weight.device
        like = torch.ones(self.blocks[0].mlp.mlp.down.weight.shape, device=device)
        return loss * (sizes + shapes + like.sum()) / 10_000


class SizesInside(nn.Module):
    """Around the MLP of a block."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x_BLD: Tensor) -> Tensor:
        size: int = self.mlp.up.weight.numel() + sum(p.numel() for p in self.parameters())
        scaled: Tensor = self.mlp(x_BLD) * (100 / size)
        return scaled


def _asking(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    losses, module = Losses(), AsksForSizes()
    for block in module.blocks:
        block.mlp = SizesInside(block.mlp)
    strategy = {"plan": {"blocks.*.mlp.mlp.up": "column", "blocks.*.mlp.mlp.down": "row"}}
    trainer = make_trainer(layout, strategy=strategy, max_epochs=2, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3))
    return losses.seen


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), Layout(tp=2), Layout(tp=2, pp=2, sequence=False), Layout(pp=2, dp=2, microbatches=2, zero=2)],
    ids=str,
)
def test_sizes_of_parameters_are_those_of_one_device(layout: Layout) -> None:
    ((losses),) = run_program(PLAIN, _asking)
    by_rank = run_program(layout, _asking)
    mean = torch.tensor(by_rank, dtype=torch.float64).mean(0).tolist()  # a rank's loss is that of its samples
    for found in [mean] if layout.dp > 1 else by_rank:
        assert found == pytest.approx(losses, abs=1e-9)


class CountsParameters(GPT):
    """With a tied embedding, which is one parameter also where it is another stage's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * sum(p.numel() for p in self.parameters()) / 10_000


def _counting(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    losses = Losses()
    make_trainer(layout, "tied", callbacks=[losses]).fit(CountsParameters(), train_loader(layout, 2))
    return losses.seen


@pytest.mark.parametrize("layout", [Layout(pp=2, schedule="zb_v"), Layout(tp=2, pp=2, schedule="zb_v")], ids=str)
def test_split_parameters_that_other_stages_tie_are_one(layout: Layout) -> None:
    ((losses),) = run_program(PLAIN, _counting)
    for found in run_program(layout, _counting):
        assert found == pytest.approx(losses, abs=1e-9)


class Masked(GPT):
    """Makes a mask where there is something to hide, as Hugging Face's models do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens_BL, targets_BL = batch
        hidden_BL = tokens_BL < 2
        x_BLD = self.tok(tokens_BL)
        if hidden_BL.any():
            x_BLD = x_BLD.masked_fill(hidden_BL[..., None], 0.0)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        x_BLD = self.norm(x_BLD)
        odd_B = [i for i, total in enumerate(tokens_BL.sum(-1).tolist()) if total % 2]
        for i in odd_B:  # by now the last stage has all it needs
            x_BLD = x_BLD.index_fill(0, torch.tensor([i]), 1.0)
        return nn.functional.cross_entropy(self.head(x_BLD).flatten(0, 1), targets_BL.flatten())


def _masking(layout: Layout) -> tuple[list[float], int]:
    torch.manual_seed(3)
    losses, module = Losses(), Masked()
    trainer = make_trainer(layout, max_epochs=1, callbacks=[losses])
    data = tokens(12)
    hides = int((data.tensors[0] < 2).any(-1).sum())
    trainer.fit(module, DataLoader(data, batch_size=4))
    return losses.seen, hides


@pytest.mark.parametrize(
    "layout", [Layout(pp=2, microbatches=4), Layout(pp=2, schedule="zb_v", microbatches=4), Layout(pp=4)], ids=str
)
def test_steps_that_branch_by_values_of_the_batch(layout: Layout) -> None:
    ((losses, hides),) = run_program(PLAIN, _masking)
    assert 2 < hides < 10
    for found, _ in run_program(layout, _masking):
        assert found == pytest.approx(losses, abs=1e-9)


class Trims(GPT):
    """Gets texts, and makes rows of them that are as long as the longest."""

    stages: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = [torch.tensor([ord(letter) % 16 for letter in text]) for text in batch["text"]]
        tokens_BL = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        return nn.functional.cross_entropy(self(tokens_BL.clamp(0)).transpose(1, 2), tokens_BL)


class CutsLater(Trims):
    """The same of rows that are all as long, behind the first block."""

    stages = (("tok", "pos", "blocks.0"), ("blocks.[1-9]", "norm", "head"))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens_BL = torch.full((len(batch["text"]), 8), -100)
        for row_L, text in zip(tokens_BL, batch["text"], strict=True):
            row_L[: len(text)] = torch.tensor([ord(letter) % 16 for letter in text])
        most = (tokens_BL >= 0).sum(1).max()
        x_BLD = self.blocks[0](self.tok(tokens_BL.clamp(0)))[:, :most]
        for block in self.blocks[1:]:
            x_BLD = block(x_BLD)
        return nn.functional.cross_entropy(self.head(self.norm(x_BLD)).transpose(1, 2), tokens_BL[:, :most])


def _trimming(layout: Layout, kind: type[Trims]) -> list[float]:
    torch.manual_seed(3)
    losses = Losses()
    texts = [{"text": "abcdefgh"[: 2 + 5 * i % 7], "row": i} for i in range(12)]
    trainer = make_trainer(layout, max_epochs=1, callbacks=[losses], strategy={"stages": kind.stages})
    trainer.fit(kind(), DataLoader(texts, batch_size=4))
    return losses.seen


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(Layout(pp=2, microbatches=4), Trims), (Layout(tp=2, pp=2), Trims), (Layout(pp=2, microbatches=4), CutsLater)],
    ids=str,
)
def test_texts_of_different_lengths(layout: Layout, kind: type[Trims]) -> None:
    (losses,) = run_program(PLAIN, _trimming, kind)
    for found in run_program(layout, _trimming, kind):
        assert found == pytest.approx(losses, abs=1e-9)


class Detaches(GPT):
    """Trains its head alone, and a probe on the first block's output."""

    def __init__(self, until: int = 100) -> None:
        super().__init__()
        self.until = until
        self.probe = nn.Linear(self.norm.normalized_shape[0], self.head.out_features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BLD = self.tok(batch[0])
        middle_BLD = x_BLD = self.blocks[0](x_BLD)
        for block in self.blocks[1:]:
            x_BLD = block(x_BLD)
        probed = self.probe(middle_BLD.detach())
        if batch_idx < self.until:
            x_BLD = x_BLD.detach()
        heads = (probed, self.head(self.norm(x_BLD)))
        return sum(torch.nn.functional.cross_entropy(head.transpose(1, 2), batch[1]) for head in heads)


def _detaching(layout: Layout, until: int = 100) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Detaches(until)
    trainer = make_trainer(layout)
    trainer.fit(module, DataLoader(tokens(12), batch_size=4))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=3), Layout(tp=2, pp=2)], ids=str)
def test_what_does_not_reach_the_loss_has_no_gradient(layout: Layout) -> None:
    """Not zero: with that AdamW would let weights decay."""
    (expected,) = run_program(PLAIN, _detaching)
    found = run_program(layout, _detaching)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=name)


def test_a_gradient_that_was_not_planned_is_refused() -> None:
    with pytest.raises(RankError, match="nothing that was made of this value reached the loss"):
        run_program(Layout(pp=2), _detaching, 1)


class Factor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Uneven(LightningModule):
    """Units of 21, 2 and 19; of the first, tensor ranks have 21 and 17 by their own account."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 9), Factor(), nn.Linear(9, 2, bias=False))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _uneven(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    losses = Losses()
    trainer = make_trainer(layout, strategy={"plan": {"net.0": "column_gather"}}, callbacks=[losses])
    trainer.fit(Uneven(), DataLoader(torch.randn(8, 3, dtype=torch.float64), batch_size=4))
    return losses.seen


def test_tensor_ranks_with_uneven_parts_have_the_same_stages() -> None:
    (expected,) = run_program(PLAIN, _uneven)
    for found in run_program(Layout(tp=2, pp=2, microbatches=2), _uneven):
        assert found == pytest.approx(expected, abs=1e-12)


class Codebook(nn.Module):
    """Vectors in buffers, which move towards what they stand for (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("codes", torch.randn(5, 4, generator=generator))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x_BD: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(x_BD, self.codes).argmin(1)
        taken = self.codes[nearest]
        if self.training:
            chosen = nn.functional.one_hot(nearest, len(self.codes)).to(x_BD)
            self.counts.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.data.lerp_(chosen.T @ x_BD.detach() / chosen.sum(0).clamp(min=1)[:, None], 0.1)
        return x_BD + (taken - x_BD).detach(), (taken.detach() - x_BD).square().mean()


class Quantised(LightningModule):
    """Modules without parameters that change their buffers, in a list and beside others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4, affine=False))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        x_BD, apart = self.codebook(self.encoder(self.norm(batch)))
        loss: Tensor = (self.decoder(x_BD) - batch).square().mean() + apart
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _quantised(layout: Layout) -> tuple[dict[str, Tensor], float]:
    module = Quantised().double()
    rows = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]
    trainer = make_trainer(layout, strategy={"plan": None})
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    return dict(trainer.strategy.lightning_module_state_dict()), float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("layout", ONE_BY_ONE, ids=str)
def test_buffers_that_modules_without_parameters_change(layout: Layout) -> None:
    (expected,), (found, *_) = (run_program(each, _quantised) for each in (PLAIN, layout))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


class Projects(LightningModule):
    """Draws from generators that it makes in its step: a projection, a permutation in a second one beside it, and what
    is drawn where only the last stage goes on. Drawing from the default one in between changes none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator, order = torch.Generator().manual_seed(7), torch.Generator().manual_seed(batch_idx)
        x = batch @ torch.randn(8, 8, generator=generator, dtype=batch.dtype)
        torch.rand(3)
        x = self.blocks(x)[:, torch.randperm(8, generator=order)]
        target = torch.randn(8, generator=generator, dtype=batch.dtype)
        loss = (x - target).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, 5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _projects(layout: Layout) -> tuple[list[float], dict[str, Tensor], float]:
    rows, losses = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), Losses()
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[losses])
    trainer.fit(Projects(), loader, loader)
    state = dict(trainer.strategy.lightning_module_state_dict())
    return losses.seen, state, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("layout", ONE_BY_ONE, ids=str)
def test_generators_that_a_step_makes_draw_what_they_draw_on_one_device(layout: Layout) -> None:
    (expected,), (found, *_) = (run_program(each, _projects) for each in (PLAIN, layout))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


class Quantiles:
    """Makes a tensor when it is first called, and remembers that it did."""

    def __init__(self) -> None:
        self.first, self.levels = True, torch.zeros(0)

    def __call__(self, error: Tensor) -> Tensor:
        if self.first:
            self.levels, self.first = torch.tensor([0.1, 0.5, 0.9]).to(error), False
        return torch.maximum((self.levels - 1) * error, self.levels * error).mean()


class FilledLater(LightningModule):
    """A value is read before the object of the loss is called: stages go by what it did in earlier steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.quantiles = Quantiles()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.blocks(batch)[:, :1]
        if x.sum() > 1e9:
            print("large")
        return self.quantiles(x - batch[:, 1:2])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fills_later(layout: Layout) -> tuple[list[float], float]:
    rows, losses = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), Losses()
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    options = {"callbacks": [losses], "num_sanity_val_steps": 0, "max_epochs": 2}
    trainer = make_trainer(layout, strategy={"plan": None}, **options)
    trainer.fit(FilledLater(), loader, loader)
    return losses.seen, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("layout", [Layout(pp=2, microbatches=2), *ONE_BY_ONE], ids=str)
def test_objects_that_a_step_fills_are_filled_on_all_stages(layout: Layout) -> None:
    (expected,), (found, *_) = (run_program(each, _fills_later) for each in (PLAIN, layout))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


class Marked(torch.Tensor):
    """A class of tensors, as torchvision has them."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Marked:
        return data.as_subclass(cls)


class Marks(GPT):
    """Makes one of what it computes; if `early`, also before its blocks."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early, self.kept = early, None

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL) + self.pos(torch.arange(tokens_BL.shape[1]))
        x_BLD = x_BLD * Marked(x_BLD.detach() > 0).as_subclass(Tensor) if self.early else x_BLD
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        marked = Marked(self.head(self.trunk(batch[0])) > 0)
        self.log("share", marked.as_subclass(Tensor).double().mean())
        return {"marked": marked}


def _marking(layout: Layout, early: bool, stages: list[list[str]] | None = None) -> float:
    torch.manual_seed(0)
    trainer = make_trainer(layout, strategy={"plan": None, "stages": stages})
    trainer.fit(Marks(early), train_loader(layout, 2), train_loader(layout, 2))
    return float(trainer.callback_metrics["share"])


@pytest.mark.parametrize("early", [False, True])
def test_classes_of_tensors_are_made_where_values_are(early: bool) -> None:
    """Before the blocks, too: the units before them are then dealt out so that the last stage does it."""
    (expected,) = run_program(PLAIN, _marking, early)
    assert run_program(Layout(pp=2), _marking, early) == pytest.approx([expected] * 2)


def test_classes_of_tensors_are_refused_where_no_values_are() -> None:
    stages = [["tok", "pos", "blocks.0"], ["blocks.1", "norm", "head"]]
    with pytest.raises(RankError, match=r"a value made into a `Marked`.*pipeline stage 1.*has not begun"):
        run_program(Layout(pp=2), _marking, True, stages)


class TiedHead(nn.Module):
    """Is given the embedding itself, and has a part of its own."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding, self.mix = embedding, nn.Linear(16, 16)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.mix(x_BLD) @ self.embedding.weight.T


class TiesModules(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.head = TiedHead(self.tok)


def _tying(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    losses, module = Losses(), TiesModules()
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=2, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 2))
    return losses.seen, dict(trainer.strategy.lightning_module_state_dict())


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, schedule="zb_v"), Layout(tp=2, pp=2)], ids=str)
def test_a_head_may_hold_the_embedding(layout: Layout) -> None:
    ((losses, state),) = run_program(PLAIN, _tying)
    results = run_program(layout, _tying)
    assert all(found == pytest.approx(losses, abs=1e-10) for found, _ in results)
    for name, value in state.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=0, atol=1e-9)
