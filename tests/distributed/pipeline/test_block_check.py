"""Blocks that make something else of a sample where others are with it: a pipeline gives them a microbatch, one device
the batch, and a warning says so. All others are silent."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import fewer
from tests.distributed.training import DP2_PP2, PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program

WIDTH, TOKENS = 8, 4
ONE_BY_ONE = Layout(pp=2, microbatches=8)
"""Microbatches of one sample."""
ODD = Layout(pp=2, microbatches=2)
"""With batches of 6: microbatches of three."""


class Places(nn.Module):
    """Experts with room for some of the batch's tokens: those that come first have it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTH: Tensor) -> Tensor:
        rows_NH = x_BTH.flatten(0, 1)
        gate_NE = self.router(rows_NH).softmax(-1)
        place_NE = F.one_hot(gate_NE.argmax(-1), 2).cumsum(0)
        has_room_N = place_NE.gather(1, gate_NE.argmax(-1, keepdim=True)) <= len(rows_NH) // 4
        return x_BTH + (self.expert(rows_NH) * gate_NE[:, :1] * has_room_N).view_as(x_BTH)


class Statistic(nn.Module):
    """Norms by all samples, or a largest number of all; in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTH: Tensor) -> Tensor:
        y_BTH = self.linear(x_BTH)
        match self.way:
            case "mean":
                return y_BTH - y_BTH.mean(0)
            case "largest":
                return y_BTH / y_BTH.abs().max()
            case "others":
                return y_BTH + 0.1 * y_BTH.roll(1, 0)
            case "mixed":
                return y_BTH + 0.5 * x_BTH[torch.randperm(len(x_BTH))]
            case "attention":  # over samples: `batch_first` forgotten
                return F.scaled_dot_product_attention(*[y_BTH.transpose(0, 1)] * 3).transpose(0, 1)
            case "deviation":  # as a StyleGAN's discriminator has it
                return y_BTH + y_BTH.std(0).mean()
            case "none":
                return y_BTH
            case _:
                raise AssertionError(self.way)


class Cache:
    """What a block has seen before, as Hugging Face's models keep keys and values: nothing yet, in training."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, x_BTH: Tensor) -> Tensor:
        """All it has seen by now: (B, S, H)."""
        self.keys.append(x_BTH)
        return torch.cat(self.keys, 1)


class Cached(nn.Module):
    """Looks at a cache of its own, which it fills."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.over = nn.Linear(WIDTH, WIDTH), {"samples": (0, 1), "tokens": (1,)}[way]

    def forward(self, x_BTH: Tensor, cache: Cache) -> Tensor:
        return self.linear(x_BTH) - cache.update(x_BTH)[:, :TOKENS].mean(self.over, keepdim=True)


class Shares(nn.Module):
    """Hands a number on, through the tensors: by the shares of two experts, as a Switch transformer has it, or a plain
    mean of squares."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(WIDTH, 2)

    def forward(self, x_BTH: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        gate_BTE = self.router(x_BTH).softmax(-1)
        if self.way == "experts":
            loss = loss + (gate_BTE.mean((0, 1)) * F.one_hot(gate_BTE.argmax(-1), 2).double().mean((0, 1))).sum()
        else:
            loss = loss + gate_BTE.square().mean() + 1e-2 * self.router.weight.square().sum()
        return x_BTH + gate_BTE.repeat(1, 1, WIDTH // 2), loss


class Apart(nn.Module):
    """Takes each sample by itself; in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(TOKENS)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("scale", torch.ones(()))
        self.seen: list[Tensor] = []

    def forward(self, x_BTH: Tensor) -> Tensor:
        match self.way:
            case "dropout":
                return F.dropout(self.linear(x_BTH), 0.5)
            case "attention":
                return x_BTH + self.attention(x_BTH, x_BTH, x_BTH)[0]
            case "tokens first":
                return self.linear(x_BTH.transpose(0, 1)).cumsum(0).transpose(0, 1)
            case "experts":  # each takes its rows together, however many they are
                rows_NH = x_BTH.flatten(0, 1)
                chosen_N = rows_NH.sum(-1) > 0
                y_NH = torch.zeros_like(rows_NH)
                y_NH[chosen_N] = self.linear(rows_NH[chosen_N])
                return x_BTH + y_NH.view_as(x_BTH)
            case "batch norm":  # which another warning is about
                return self.norm(self.linear(x_BTH))
            case "moving":  # what it changes, of which another warning is, doesn't count in its next forward
                y_BTH = self.linear(x_BTH) / self.scale
                self.scale.data.lerp_((x_BTH.detach().abs().mean() + 1).to(self.scale), 0.5)
                return y_BTH
            case "drops itself":
                return x_BTH if torch.rand(()) < 0.5 else self.linear(x_BTH)
            case "keeps":  # on itself, more in each forward
                self.seen.append(x_BTH.detach())
                self.seen[:] = self.seen[-2:]
                return self.linear(x_BTH)
            case "recurrent":
                return x_BTH + self.rnn(x_BTH)[0]
            case _:
                raise AssertionError(self.way)


class Told(nn.Module):
    """Is told how long its samples are beside its tensors: by a list or object, or a mask that it finds on itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)
        self.mask_BT1: Tensor | None = None

    def tell(self, lengths: list[int]) -> list[Any]:
        """What it is to be given then."""
        self.mask_BT1 = _mask(lengths) if self.way == "on itself" else None
        return {"on itself": [], "list": [lengths], "object": [SimpleNamespace(lengths=lengths)]}[self.way]

    def forward(self, x_BTH: Tensor, told: Any = None) -> Tensor:
        mask_BT1 = _mask(told if self.way == "list" else told.lengths) if self.mask_BT1 is None else self.mask_BT1
        return x_BTH + self.linear(x_BTH) * mask_BT1


def _mask(lengths_B: list[int]) -> Tensor:
    return (torch.arange(TOKENS) < torch.tensor(lengths_B)[:, None])[..., None]


class Draws(nn.Module):
    """Draws as many random numbers as what comes before asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return self.linear(x_BTH) + 0.1 * torch.poisson(x_BTH.detach().float().abs() * 9).to(x_BTH)


def _block(name: str) -> nn.Module:
    kind, _, way = name.partition(": ")
    of_ways = {"statistic": Statistic, "cached": Cached, "shares": Shares, "told": Told, "apart": Apart}
    return of_ways[kind](way) if way else {"places": Places, "draws": Draws}[kind]()


NUMBERS = ["shares: experts"]
COUPLED = [
    "places",
    "cached: samples",
    *(f"statistic: {x}" for x in ("mean", "largest", "others", "attention", "deviation")),
]
OWN_WAYS = ("dropout", "attention", "tokens first", "experts", "batch norm", "moving", "drops itself", "keeps")
TOLD = ["told: list", "told: object", "told: on itself"]
OWN = ["draws", "cached: tokens", "shares: means", *TOLD, *(f"apart: {x}" for x in (*OWN_WAYS, "recurrent"))]


class Lit(LightningModule):
    """Blocks of one kind, between linear layers; or by turns of some."""

    def __init__(self, name: str, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints = checkpoints
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        names = name.split(", ")
        self.blocks = nn.ModuleList([_block(names[i % len(names)]) for i in range(4)])

    def _loss(self, batch: list[Tensor]) -> Tensor:
        x_BTH, t_BTO = batch
        h_BTH, loss = self.first(x_BTH), x_BTH.new_zeros(())
        for block in self.blocks:
            if isinstance(block, Shares):
                h_BTH, loss = block(h_BTH, loss)
            elif isinstance(block, Cached):
                h_BTH = block(h_BTH, Cache())
            elif isinstance(block, Told):
                h_BTH = block(h_BTH, *block.tell([1 + 2 * i % TOKENS for i in range(len(x_BTH))]))
            else:
                h_BTH = checkpoint(block, h_BTH, use_reentrant=False) if self.checkpoints else block(h_BTH)
        return F.mse_loss(self.head(h_BTH), t_BTO) + loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def _loader(rows: int, batches: int = 3) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows * batches, TOKENS, WIDTH, generator=generator)
    t = torch.randn(rows * batches, TOKENS, 3, generator=generator)
    return DataLoader(TensorDataset(x, t), batch_size=rows)


def _said(caught: list[warnings.WarningMessage]) -> list[str]:
    words = "when other samples are with it", "makes a number of all its samples"
    return [str(w.message) for w in caught if any(x in str(w.message) for x in words)]


def _fit(layout: Layout, names: list[str], rows: int = 8, options: Any = None, **of_model: Any) -> dict[str, Any]:
    """What was said of blocks of each kind, and the losses."""
    found = {}
    for name in names:
        module, seen = Lit(name, **of_model), Losses()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[seen], **(options or {}))
            trainer.fit(module, _loader(rows))
        found[name] = _said(caught), seen.seen
    return found


def _validated(layout: Layout, name: str) -> tuple[list[str], float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": None})
        (logged,) = trainer.validate(Lit(name), _loader(8), verbose=False)
    return _said(caught), logged["val"]


@pytest.mark.parametrize("layout", [PP2, ONE_BY_ONE, ODD, DP2_PP2, TP2_PP2], ids=str)
def test_what_couples_samples_is_said_once(layout: Layout) -> None:
    names = [*COUPLED, *NUMBERS]
    ranks = run_program(layout, _fit, names, 6 if layout is ODD else 8)
    for name in names:
        texts = [text for found in ranks for text in found[name][0]]
        assert len(texts) == 1, (name, texts)
        assert "`blocks." in texts[0] and type(_block(name)).__name__ in texts[0]
        assert ("makes a number" in texts[0]) == (name in NUMBERS)


def test_blocks_of_a_kind_take_turns() -> None:
    """What only some of them do (experts run out of places) is found, too: here the second of each stage."""
    name = "statistic: none, statistic: mean"
    texts = [text for found in run_program(PP2, _fit, [name]) for text in found[name][0]]
    assert len(texts) == 1 and ("`blocks.1`" in texts[0] or "`blocks.3`" in texts[0])


def test_these_losses_are_others() -> None:
    """Otherwise there is nothing to say."""
    names = [*COUPLED, *NUMBERS]
    plain, cut = run_program(PLAIN, _fit, names)[0], run_program(PP2, _fit, names)[0]
    for name in names:
        assert abs(plain[name][1][0] - cut[name][1][0]) > 1e-6, name


@pytest.mark.parametrize("layout", [PP2, ONE_BY_ONE, ODD, DP2_PP2, TP2_PP2], ids=str)
def test_blocks_that_take_each_sample_by_itself_are_silent(layout: Layout) -> None:
    ranks = run_program(layout, _fit, OWN, 6 if layout is ODD else 8)
    assert [(name, found[name][0]) for found in ranks for name in OWN if found[name][0]] == []


def test_blocks_are_as_before() -> None:
    """The look leaves no trace: losses are those without it, where blocks draw, move and keep."""
    names = ["draws", *(f"apart: {x}" for x in ("dropout", "batch norm", "moving", "drops itself", "keeps"))]
    looked = run_program(PP2, _fit, names)[0]
    unlooked = run_program(PP2, _unlooked, names)[0]
    assert {name: x[1] for name, x in looked.items()} == {name: x[1] for name, x in unlooked.items()}


def _unlooked(layout: Layout, names: list[str]) -> dict[str, Any]:
    from lightning_megatp.pipeline.block_check import BlockCheck

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockCheck, "coupled", lambda self, run: {})
        return _fit(layout, names)


@pytest.mark.parametrize("precision", fewer(["32-true", "bf16-mixed", "bf16-true"], extended=["32-true", "bf16-true"]))
def test_rounding_is_no_coupling(precision: str) -> None:
    ranks = run_program(PP2, _in_precision, precision)
    assert [x for coupled, own in ranks for x in own] == []
    assert sorted({x for coupled, own in ranks for x in coupled}) == sorted([*COUPLED, *NUMBERS])


def _in_precision(layout: Layout, precision: str) -> tuple[list[str], list[str]]:
    found = _fit(layout, [*COUPLED, *NUMBERS, *OWN], options={"precision": precision})
    said = [name for name, (texts, _) in found.items() if texts]
    return [x for x in said if x not in OWN], [x for x in said if x in OWN]


def test_evaluation_is_looked_at_too() -> None:
    said = [text for texts, _ in run_program(PP2, _validated, "places") for text in texts]
    assert len(said) == 1
    assert [texts for texts, _ in run_program(PP2, _validated, "apart: experts") if texts] == []


def test_activation_checkpoints_are_looked_through() -> None:
    ranks = run_program(PP2, _fit_checkpointed, ["places", "apart: dropout"])
    assert [len(texts) for texts, _ in ranks[1].values()] + [len(texts) for texts, _ in ranks[0].values()] in (
        [1, 0, 0, 0],
        [0, 0, 1, 0],
    )


def _fit_checkpointed(layout: Layout, names: list[str]) -> dict[str, Any]:
    return _fit(layout, names, checkpoints=True)


class Pair(LightningModule):
    """A generator and a discriminator, which compares its samples, trained by hand."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        compares = _block(way)
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), compares, nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x_BTH, _ = batch
        generating, telling = self.optimizers()
        losses = (
            lambda: (
                F.softplus(-self.discriminator(x_BTH)).mean()
                + F.softplus(self.discriminator(self.generator(x_BTH.flip(-1)).detach())).mean()
            ),
            lambda: F.softplus(-self.discriminator(self.generator(x_BTH.flip(-1)))).mean(),
        )
        for optimizer, loss in zip((telling, generating), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(x.parameters(), 0.05) for x in (self.generator, self.discriminator)]


def _fit_pair(layout: Layout, way: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Pair(way), _loader(8))
    return _said(caught)


def test_steps_that_optimize_by_hand_are_looked_at_too() -> None:
    assert len([x for texts in run_program(PP2, _fit_pair, "statistic: deviation") for x in texts]) == 1
    assert run_program(PP2, _fit_pair, "apart: attention") == [[], []]


class Narrow(Lit):
    """Takes no more samples than a microbatch has."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > 4:
            raise ValueError("too many samples")
        return super().training_step(batch, batch_idx)


def _narrow(layout: Layout) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Narrow("statistic: mean"), _loader(8))
    return [str(w.message) for w in caught if "can't be compared" in str(w.message)]


def test_what_can_not_be_tried_is_said_once() -> None:
    texts = [text for texts in run_program(PP2, _narrow) for text in texts]
    assert len(texts) == 1 and "planned for all of its samples at once: too many samples. If blocks" in texts[0]
