"""What a pipeline can't do raises before anything was trained, on each of four real ranks, and names what and how."""

from __future__ import annotations

import copy
import os
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.distributed.training import QUIET, Layout, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import variant
from tests.ranks import COLLECTIVE_TIMEOUT_S, RankError, run_ranks


class Base(GPT):
    """Fails the test if a step gets as far as the optimizer."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(GPTConfig(tied=False, layers=layers))
        self.cache: dict[str, Tensor] = {}

    def blocks_of(self, x_BLD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return x_BLD

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise AssertionError("a step was trained")


class ReadsOnHost(Base):
    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        if x_BLD.abs().mean().item() > 1e9:
            x_BLD = x_BLD / 2
        return self.norm(self.blocks_of(x_BLD))


class BranchesOnData(Base):
    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.blocks[0](self.tok(tokens_BL))
        x_BLD = x_BLD * 2 if (x_BLD > 0).any() else x_BLD
        return self.norm(self.blocks_of(x_BLD))


class LooksAtNumpy(Base):
    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        x_BLD = x_BLD + float(x_BLD.detach().numpy().mean())
        return self.norm(self.blocks_of(x_BLD))


class FlowsBack(Base):
    """What the head finds goes through the whole model again: no place is left for a cut."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        found_BL = self.head(self.norm(self.blocks_of(self.tok(tokens_BL)))).argmax(-1)
        return self.norm(self.blocks_of(self.tok(found_BL)))


LEAKED: list[Tensor] = []


class Leaking(nn.Module):
    """Passes a value on where nobody looks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BLD: Tensor) -> Tensor:
        LEAKED[:] = [x_BLD * 2]
        y_BLD: Tensor = self.inner(x_BLD)
        return y_BLD


class Leaks(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Leaking(self.blocks[0])

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.blocks_of(self.tok(tokens_BL))
        return self.norm(x_BLD + LEAKED[0])


class Appends(nn.Module):
    """Passes a value on by a queue it was given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BLD: Tensor, found: deque[Tensor]) -> Tensor:
        found.append(x_BLD * 2)
        return self.inner(x_BLD)


class MutatesContainer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Appends(self.blocks[0])

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        found: deque[Tensor] = deque()
        x_BLD = self.blocks[0](self.tok(tokens_BL), found)
        for block in self.blocks[1:]:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD + found[0])


class ChangesView(Base):
    """Changes a part of a value after another stage took it."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL) * 1.0
        y_BLD = self.blocks_of(x_BLD)
        x_BLD[:, 0].mul_(2.0)
        return self.norm(y_BLD + x_BLD)


class Differentiates(Base):
    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        (grad,) = torch.autograd.grad(loss, self.norm.weight, create_graph=True)
        return loss + grad.square().sum()


class CallsBackward(Base):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        loss.backward()
        return loss.detach()


class SelectsByData(Base):
    """A shape that depends on values."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.blocks[0](self.tok(tokens_BL))
        kept = x_BLD[x_BLD[..., 0] > 0]
        return self.norm(self.blocks_of(x_BLD + kept.mean()))


class Packs(Base):
    """A recurrent layer gets packed sequences, whose kernels read the lengths from memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.LSTM(32, 32, batch_first=True)

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        lengths_B = tokens_BL[:, 0].clamp(1, tokens_BL.shape[1])
        words_BLD = F.one_hot(tokens_BL, 32).to(torch.get_default_dtype())
        packed, _ = self.blocks[0](pack_padded_sequence(words_BLD, lengths_B, batch_first=True, enforce_sorted=False))
        x_BLD, _ = pad_packed_sequence(packed, batch_first=True, total_length=tokens_BL.shape[1])
        for block in self.blocks[1:]:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)


class TakesRowsForOthers(Base):
    """Knows how many rows the batch has."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        return super().trunk(tokens_BL) + tokens_BL[3].double().mean()


class UnpacksRows(Base):
    """Does too."""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        first_L, _, _, _ = tokens_BL
        return super().trunk(tokens_BL) + first_L.double().mean()


class ReadsAnAttribute(Base):
    """A block's forward would set it, on another stage."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) + self.blocks[0].penalty  # type: ignore[operator]


class PenaltyBehindACheck(Base):
    """Adds a norm of all parameters where the step can't be followed any more."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch)
        assert loss >= 0
        return loss + sum(p.abs().sum() for p in self.parameters())


class PenaltyLater(Base):
    """Adds one from the second batch on."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(p.abs().sum() for p in self.parameters()) if batch_idx else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.trainer.fit_loop.batch_idx == 0, "another step was trained"


class LeavesThePlan(Base):
    """Does another thing from the second batch on."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.index = batch_idx
        return super().training_step(batch, batch_idx)

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        x_BLD = x_BLD.exp() if self.index == 1 else x_BLD
        return self.norm(self.blocks_of(x_BLD))


class GoesByTheProcess(Base):
    """As a step may that reads a file of its machine. (`self.global_rank` would be 0 on all stages.)"""

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        x_BLD = x_BLD.exp() if os.environ[_RANK] == "2" else x_BLD
        return self.norm(self.blocks_of(x_BLD))


class KnowsMore(Base):
    """One stage alone comes to know what its steps go by, and needs another plan; no hook is seen to change it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("limit", torch.zeros(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and os.environ[_RANK] == "1":
            self.limit.data.fill_(1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        x_BLD = x_BLD.exp() if self.limit > 0 else x_BLD
        return self.norm(self.blocks_of(x_BLD))


class Freezes(Base):
    """Trains the last stage only from the third batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(False)
            self.head.requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class Unfreezes(Base):
    """Trains the first stage from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[1:].requires_grad_(True)
        self.norm.requires_grad_(True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class FindsNothing(Base):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        next(x for x in [loss.item()] if x < 0)
        return loss


class Generates(Base):
    """Goes on until a token says that it is the last."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        tokens_BL = batch[0][:, :4]
        for _ in range(3):
            with torch.no_grad():
                next_B = self.head(self.trunk(tokens_BL))[:, -1].argmax(-1)
            tokens_BL = torch.cat((tokens_BL, next_B[:, None]), 1)
            if (next_B < 0).all():
                break
        return loss


class NoLoss(Base):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        return None


class OwnBackward(Base):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Swaps(Base):
    """Puts a copy of its blocks in their place, as callbacks that validate averaged weights may."""

    at = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            self.blocks = copy.deepcopy(self.blocks)


class SwapsLater(Swaps):
    at = 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.trainer.fit_loop.batch_idx == 0, "another step was trained"


class TooSmall(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        del self.tok, self.pos, self.blocks, self.norm, self.head

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0][:, :4].double()), batch[1][:, :4].double())


ERRORS: dict[str, tuple[type[Base], list[str]]] = {
    "a host read": (ReadsOnHost, ["item", "test_errors.py"]),
    "a branch on data": (BranchesOnData, ["__bool__", "test_errors.py"]),
    "numpy": (LooksAtNumpy, ["numpy"]),
    "data that flows back": (FlowsBack, ["`tok`", "on the later stage"]),
    "a global variable as a side door": (Leaks, ["side door", "blocks.0"]),
    "a container as a side door": (MutatesContainer, ["blocks.0"]),
    "a view that is changed": (ChangesView, ["in place"]),
    "gradients inside the step": (Differentiates, ["differentiates inside the step", "return the loss"]),
    "backward inside the step": (CallsBackward, ["differentiates inside the step"]),
    "a shape that depends on data": (SelectsByData, ["__getitem__"]),
    "packed sequences": (Packs, ["`blocks.0`", "reads values on the host", "`total_length`"]),
    "rows that are no samples": (TakesRowsForOthers, ["failed on a microbatch", "split_batch"]),
    "rows that are unpacked": (UnpacksRows, ["failed on a microbatch", "to unpack", "split_batch"]),
    "an attribute that is not there": (ReadsAnAttribute, ["AttributeError", "penalty", "return it from the forward"]),
    "another step in a process": (
        GoesByTheProcess,
        ["pp rank 2 does `exp` (", "test_errors.py", "pp rank 0 does `blocks.0`"],
    ),
    "an own backward": (OwnBackward, ["its own `backward`"]),
    "a copy in place of modules": (Swaps, ["`blocks.0` is another module", "WeightAveraging"]),
    "a copy in their place, later": (SwapsLater, ["`blocks.0` is another module", "WeightAveraging"]),
    "too few modules": (TooSmall, ["4 pipeline stages need at least as many units"]),
}


class LogsOthers(GPT):
    """Logs a weight's norm in a hook, which all stages run."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False, layers=4))

    def on_train_epoch_end(self) -> None:
        self.log("norm", self.tok.weight.norm())


_RANK = "RANK_OF_TEST"


def _fit(rank: int, world_size: int, name: str) -> None:
    os.environ[_RANK] = str(rank)
    kind = {
        "leaves": LeavesThePlan,
        "penalty": PenaltyBehindACheck,
        "penalty later": PenaltyLater,
        "generates": Generates,
        "no loss": NoLoss,
        "freezes": Freezes,
        "knows more": KnowsMore,
        "unfreezes": Unfreezes,
        "finds nothing": FindsNothing,
        "logs others": LogsOthers,
    }.get(name) or ERRORS[name][0]
    from lightning_megatp import MegaTPStrategy

    strategy = MegaTPStrategy(pp=world_size, microbatches=2, summary=False)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    Trainer(devices=world_size, strategy=strategy, **options).fit(kind(), train_loader(Layout(), 3))


def _messages(name: str, ranks: int = 4) -> list[str]:
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        run_ranks(ranks, _fit, name)
    assert time.monotonic() - start < COLLECTIVE_TIMEOUT_S, "nobody waits for a timeout"
    return [failure.message for failure in error.value.failures]


@pytest.mark.parametrize("name", ERRORS)
def test_what_can_not_be_done_raises_on_every_rank(name: str) -> None:
    messages = _messages(name)
    assert len(messages) == 4, "every rank says so"
    for message in messages:
        assert message.startswith("MegaTPStrategy: "), message
        for text in ERRORS[name][1]:
            assert text in message, f"{text!r} is not in: {message}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("leaves", "exp"),
        pytest.param("generates", "token by token", marks=pytest.mark.extended),
        ("freezes", "frozen or unfrozen since"),
        pytest.param("unfreezes", "frozen or unfrozen since", marks=pytest.mark.extended),
        pytest.param("no loss", "instead of a loss", marks=pytest.mark.extended),
        ("finds nothing", "StopIteration"),
        pytest.param("logs others", "self.log('norm', ...) was given a value without data", marks=pytest.mark.extended),
        ("penalty", "`abs`"),
        pytest.param("penalty later", "`abs`", marks=pytest.mark.extended),
    ],
)
def test_what_one_stage_finds_out_ends_all_ranks(name: str, text: str) -> None:
    messages = _messages(name, 4 if name in ("leaves", "logs others") else 2)
    assert any(text in message and "MegaTPStrategy" in message for message in messages), messages


def test_a_stage_that_plans_anew_alone_ends_all_ranks_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"failed first: .* another one needs a new plan"):
        run_ranks(2, _fit, "knows more")
    assert time.monotonic() - start < COLLECTIVE_TIMEOUT_S, "nobody waits for a timeout"


class Penalised(nn.Module):
    """Around the MLP of a block: uses a weight of it beside its layer."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mlp(x) + self.mlp.up.weight.data.pow(2).mean()
        return y


def _fit_split(rank: int, world_size: int, inside: bool) -> None:
    from lightning_megatp import MegaTPStrategy

    entry = variant("regularised")
    model, plan = entry.build(), dict(entry.plan)
    if inside:
        entry = variant("untied")
        model, plan = entry.build(), {name.replace(".mlp.", ".mlp.mlp."): at for name, at in entry.plan.items()}
        for block in model.blocks:
            block.mlp = Penalised(block.mlp)
    strategy = MegaTPStrategy(tp=2, pp=2, microbatches=2, plan=plan, sequence_parallel=False, summary=False)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    Trainer(devices=world_size, strategy=strategy, **options).fit(model, train_loader(Layout(), 1))


@pytest.mark.parametrize(("inside", "name"), [(False, "blocks.0.mlp.up"), (True, r"blocks.\d.mlp.mlp.up")])
def test_a_split_parameter_outside_its_layer(inside: bool, name: str) -> None:
    with pytest.raises(RankError, match=rf"the step uses `{name}.weight`, which the plan splits, outside"):
        run_ranks(4, _fit_split, inside)
