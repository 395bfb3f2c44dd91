"""One table of positions in all blocks: each stage makes its own, where that comes to the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.pipeline.slicing.errors import SliceError
from tests.crossing import crossed
from tests.unit.test_slicing import assert_same, backward, forward, loss_of, pipeline

WIDTH, VOCAB = 8, 11


@functools.lru_cache(maxsize=8)
def cached(length: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(length, dtype=dtype)[:, None] * torch.arange(WIDTH)).cos()


class Table:
    """No module."""

    def __init__(self) -> None:
        self.tables: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.tables:
            self.tables[length] = torch.arange(length).to(x)[:, None].sin().repeat(1, WIDTH)
        return self.tables[length]


class Rotary(nn.Module):
    """Makes a table for each new length, or finds it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rates = nn.Parameter(torch.arange(1.0, WIDTH + 1), requires_grad=how == "trained")
        self.length, self.table, self.cache = 0, None, {}
        self.register_buffer("anew", None, persistent=False)
        self.count = torch.zeros(())
        self.register_buffer("rows", torch.zeros(16, WIDTH), persistent=False)

    def make(self, x: Tensor) -> Tensor:
        rates = self.rates
        if self.how == "of the batch":
            rates = rates + x.detach().mean()
        elif self.how == "random":
            rates = rates + torch.rand(WIDTH)
        elif self.how == "random like":
            rates = torch.rand_like(rates)
        elif self.how == "by values" and x.detach().sum() > 0:
            rates = 2 * rates
        elif self.how == "filled":
            rates = torch.zeros_like(rates)
            rates[:1] += x.detach().mean()
        return (torch.arange(x.shape[1]).to(x)[:, None] * rates).cos()

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.how == "function":
            return cached(length, x.dtype)
        if self.how == "dict":
            if length not in self.cache:
                self.cache[length] = self.make(x), "made"
            return self.cache[length][0]
        if self.how == "buffer":
            if self.anew is None or len(self.anew) < length:
                self.register_buffer("anew", self.make(x), persistent=False)
            return self.anew[:length]
        if self.how == "in place":
            if self.length < length:
                self.rows[:length], self.length = self.make(x).detach(), length
            return self.rows[:length]
        if self.how in ("count", "count in place"):
            if self.how == "count":
                self.count = self.count + 1
            else:
                self.count += 1
            self.table = self.make(x) * self.count
        elif self.length != length:
            self.length, self.table = length, self.make(x)
        return self.table


class Lengths:
    """Of rows. The first block that asks makes the mask."""

    def __init__(self, lengths: Tensor, how: str) -> None:
        self.lengths, self.how = lengths, how
        self.cached: Tensor | None = None

    def mask(self, x: Tensor) -> Tensor:
        if self.cached is None:
            places = torch.arange(max(self.lengths.tolist()))
            mask = (places < self.lengths[:, None]).to(x)[..., None]
            if self.how == "hidden":
                mask = mask * x.detach().mean()
            elif self.how == "dropped":
                mask = F.dropout(mask)
            self.cached = mask
        return self.cached


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Lengths) -> Tensor:
        return x + self.linear(x * lengths.mask(x)).tanh()


class MaskedModel(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Masked() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        lengths = Lengths((batch > 2).sum(1).clamp(min=1), self.how)
        batch = batch[:, : int(lengths.lengths.max())]
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x, lengths=lengths)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class Block(nn.Module):
    def __init__(self, rotary: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rotary, self.linear = rotary, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.rotary(x)).tanh()


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        rotary = Table() if how == "kept object" else Rotary(how)
        self.how = how
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(rotary) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.how == "checkpointed" else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: nn.Module) -> Tensor:
        return x + self.linear(x * positions(x)).tanh()


class Handing(nn.Module):
    """Its module of positions, which has no parameters, is no block's: blocks are given it, one inside of another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        rotary = Rotary(how)
        rates = rotary.rates.detach()
        del rotary.rates
        rotary.register_buffer("rates", rates)
        self.positions = nn.Sequential(rotary)
        self.blocks = nn.ModuleList(Taking() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB)

    def training_step(self, batch: Any) -> Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x, positions=self.positions)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


def batch(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


TABLES = ["attribute", "dict", "buffer", "in place", "object", "kept object", "function", "checkpointed"]


@pytest.mark.parametrize(("how", "n"), crossed(list(TABLES), [4, 2]))
def test_each_stage_makes_its_own_table(how: str, n: int) -> None:
    torch.manual_seed(0)
    _compare((MaskedModel(how) if how == "object" else Model(how)).double(), n)


@pytest.mark.parametrize("how", ["attribute", "dict", "buffer"])
def test_of_a_module_that_they_are_given_too(how: str) -> None:
    torch.manual_seed(0)
    _compare(Handing(how).double(), 2)


def _compare(module: nn.Module, n: int) -> None:
    pipe = pipeline(module, batch(5), n)
    whole = copy.deepcopy(module)
    for length in (5, 5, 7, 4, 7):
        given = batch(length)
        pipe.plans = [s.plan(m.training_step, given) for s, m in zip(pipe.slicers, pipe.modules, strict=True)]
        assert len({plan.digest() for plan in pipe.plans}) == 1
        whole.zero_grad()
        loss = whole.training_step(given)
        loss.backward()
        runs = forward(pipe, given)
        backward(pipe, runs)
        assert_same(whole, pipe, loss_of(runs[-1][1].result), loss)
        for each in pipe.modules:
            each.zero_grad()


@pytest.mark.parametrize(
    "how", ["trained", "of the batch", "random", "random like", "by values", "filled", "count", "count in place"]
)
def test_a_table_that_stages_would_make_otherwise_is_refused(how: str) -> None:
    with pytest.raises(SliceError, match=r"came out of `blocks.[012]`.* by a side door|neither the module's own"):
        pipeline(Model(how).double(), batch(5), 2)


@pytest.mark.parametrize("how", ["of the batch", "random", "count"])
def test_so_is_one_of_a_module_that_they_are_given(how: str) -> None:
    with pytest.raises(SliceError, match=r"came out of `blocks.[012]`.* by a side door|neither the module's own"):
        pipeline(Handing(how).double(), batch(5), 2)


@pytest.mark.parametrize("n", [4, 2])
def test_a_mask_that_stages_would_make_otherwise_is_sent(n: int) -> None:
    """It is put on an object that all blocks are given."""
    torch.manual_seed(0)
    _compare(MaskedModel("hidden").double(), n)
