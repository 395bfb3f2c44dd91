"""A stage by itself does what it does where the units of all stages run; or an error says what it goes by."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.slicer import Slicer

N, WIDTH = 4, 8


class Block(nn.Module):
    """One that does what it is told to do with its hidden layer."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.i = i

    def act(self, h: Tensor, *given: Any) -> Tensor:
        return F.gelu(h)

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return x + self.down(self.act(self.up(x), *given))


class Model(nn.Module):
    """Of blocks, two on each of two stages."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(i) for i in range(N))
        self.head = nn.Linear(WIDTH, 1)
        self.prepare()

    def prepare(self) -> None:
        pass

    def given(self) -> tuple[Any, ...]:
        return ()

    def training_step(self, x: Tensor) -> Tensor:
        given = self.given()
        for block in self.blocks:
            x = block(x, *given)
        return self.head(x).mean()


class Counting(Block):
    def act(self, h: Tensor, *given: Any) -> Tensor:
        self.shared.n += 1
        return F.gelu(h) / self.shared.n


class SharedCounter(Model):
    block = Counting

    def prepare(self) -> None:
        self.shared = SimpleNamespace(n=0)
        for block in self.blocks:
            block.shared = self.shared

    def given(self) -> tuple[Any, ...]:
        self.shared.n = 0
        return ()


class UnusedCounter(SharedCounter):
    class block(Counting):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            self.shared.n += 1
            return F.gelu(h)


class HiddenCounter(SharedCounter):
    """Where no search of the module finds it."""

    def prepare(self) -> None:
        super().prepare()
        shared = self.__dict__.pop("shared")
        self.reset = lambda: setattr(shared, "n", 0)

    def given(self) -> tuple[Any, ...]:
        self.reset()
        return ()


class GivenDict(Model):
    class block(Block):
        def act(self, h: Tensor, d: dict[str, int]) -> Tensor:
            d["n"] += 1
            return F.gelu(h) / d["n"]

    def given(self) -> tuple[Any, ...]:
        return ({"n": 0},)


class OwnEntries(Model):
    """A dict in which each block looks for its own."""

    class block(Block):
        def act(self, h: Tensor, d: dict[int, int]) -> Tensor:
            d[self.i] = d.get(self.i, 1) + self.i
            return F.gelu(h) / d[self.i]

    def given(self) -> tuple[Any, ...]:
        return ({},)


class GivenIterator(Model):
    class block(Block):
        def act(self, h: Tensor, scales: Any) -> Tensor:
            return F.gelu(h) * next(scales)

    def given(self) -> tuple[Any, ...]:
        return (iter([0.5, 1.0, 1.5, 2.0]),)


class ChosenWeights(Model):
    """No number tells, but which weight is taken."""

    class block(Block):
        def __init__(self, i: int) -> None:
            super().__init__(i)
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(N))

        def act(self, h: Tensor, d: dict[str, int]) -> Tensor:
            d["n"] += 1
            return F.gelu(h) * self.scales[d["n"] - 1]

    def given(self) -> tuple[Any, ...]:
        return ({"n": 0},)


class OneGenerator(Model):
    class block(Block):
        def act(self, h: Tensor, generator: torch.Generator) -> Tensor:
            return h * torch.rand(h.shape[-1], generator=generator)

    def given(self) -> tuple[Any, ...]:
        return (torch.Generator().manual_seed(1),)


class EarlyEnd(Model):
    """The blocks behind the first two do less."""

    class block(Block):
        def act(self, h: Tensor, d: dict[str, int]) -> Tensor:
            d["n"] += 1
            return F.gelu(h) if d["n"] > 2 else F.gelu(h).tanh()

    def given(self) -> tuple[Any, ...]:
        return ({"n": 0},)


class DrawnBehind(Model):
    """The step draws from Python's numbers, behind blocks that do."""

    class block(Block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            return F.gelu(h) * (1 + random.random())

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x) * random.random()


class DrawnInBlocks(Model):
    block = DrawnBehind.block


@functools.lru_cache
def table(n: int) -> Tensor:
    return torch.arange(n) / n


class CachedTable(Model):
    """Made in the first dry run of the process."""

    class block(Block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            return F.gelu(h) * table(2 * WIDTH)


class Ever:
    n = 0


class CountedForEver(Model):
    """Each run of a step is another one anyway."""

    class block(Block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            Ever.n += 1
            return F.gelu(h) / Ever.n


class SharedMask(nn.Module):
    """Each stage has one for itself, whose count nobody needs."""

    calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return h * (self.calls > 0)


class OneMask(Model):
    class block(Block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            return self.mask(F.gelu(h))

    def prepare(self) -> None:
        mask = SharedMask()
        for block in self.blocks:
            block.mask = mask


class SameAsBefore(Model):
    """What a block sets is what was there."""

    class block(Block):
        def __init__(self, i: int) -> None:
            super().__init__(i)
            self.grid = (1, 2 * WIDTH)

        def act(self, h: Tensor, *given: Any) -> Tensor:
            self.grid = (1, h.shape[-1])
            return F.gelu(h)

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x) / self.blocks[0].grid[1]


class Profiled(Model):
    """A name for the profiler tells which layer this is."""

    class block(Block):
        def act(self, h: Tensor, d: dict[str, int]) -> Tensor:
            d["n"] += 1
            with torch.profiler.record_function(f"layer {d['n']}"):
                return F.gelu(h)

    def given(self) -> tuple[Any, ...]:
        return ({"n": 0},)


class PlainTensors(Model):
    """Neither parameters nor buffers."""

    class block(Block):
        def __init__(self, i: int) -> None:
            super().__init__(i)
            self.scales = [torch.full((), float(n)) for n in range(N)]

        def act(self, h: Tensor, d: dict[str, int]) -> Tensor:
            d["n"] += 1
            return F.gelu(h) * self.scales[d["n"] - 1]

    def given(self) -> tuple[Any, ...]:
        return ({"n": 0},)


class ReadsCount(Model):
    class block(Block):
        calls = 0

        def act(self, h: Tensor, *given: Any) -> Tensor:
            self.calls += 1
            return F.gelu(h)

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x) / self.blocks[0].calls


class ReadsUnseen(Model):
    """What the block reads on the host no dry run knows."""

    class block(Block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            self.largest = float(h.detach().abs().amax())
            return F.gelu(h)

    def prepare(self) -> None:
        for block in self.blocks:
            block.largest = 1.0

    def training_step(self, x: Tensor) -> Tensor:
        return super().training_step(x) / self.blocks[0].largest


class ReadsOwn(ReadsUnseen):
    """Of a block on the last stage."""

    def training_step(self, x: Tensor) -> Tensor:
        return Model.training_step(self, x) / self.blocks[3].largest


class ReadsWhatItSets(ReadsUnseen):
    def training_step(self, x: Tensor) -> Tensor:
        loss = Model.training_step(self, x)
        self.blocks[0].largest = 2.0
        return loss / self.blocks[0].largest


class ReadsWhatNobodySets(ReadsUnseen):
    def training_step(self, x: Tensor) -> Tensor:
        return Model.training_step(self, x) / (1 + self.blocks[0].i)


class BlockReads(ReadsUnseen):
    """A block reads what another one has."""

    class block(ReadsUnseen.block):
        def act(self, h: Tensor, *given: Any) -> Tensor:
            if self.i == 3:
                h = h / self.first[0].largest
            return super().act(h, *given)

    def prepare(self) -> None:
        super().prepare()
        self.blocks[3].first = [self.blocks[0]]


def plan(model: Model) -> None:
    stages = {f"blocks.{i}": i // 2 for i in range(N)} | {"head": 1}
    Slicer(model, stages, 2).plan(model.training_step, torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (SharedCounter, r"`blocks.2` does `div` with 3, and on pipeline stage 1,.* `div` with 1 \(test_stage_alone"),
        (HiddenCounter, r"`blocks.2` does `div` with 3, and on pipeline stage 1,.* `div` with 1"),
        (GivenDict, r"`blocks.2` does `div` with 3, and on pipeline stage 1,.* `div` with 1"),
        (GivenIterator, r"`blocks.2` does `mul` with 1.5, and on pipeline stage 1,.* `mul` with 0.5"),
        (ChosenWeights, r"`mul` with blocks.2.scales.2, and on pipeline stage 1,.* `mul` with blocks.2.scales.0"),
        (PlainTensors, r"`mul` with tensor \d+, and on pipeline stage 1,.* `mul` with tensor \d+"),
        (OneGenerator, r"`blocks.2` does `rand` with 16, a generator in state .* a generator of random numbers"),
        (EarlyEnd, r"`blocks.2` does `linear` with .*down.*, and on pipeline stage 1,.* `tanh`"),
        (DrawnBehind, r"the step does `mul` with 0.\d+, and on pipeline stage 1,.* `mul` with 0.\d+"),
        (ReadsCount, r"`blocks.0.calls` is read on pipeline stage 1 .*forward of `blocks.0` sets it on stage 0"),
        (ReadsUnseen, r"`blocks.0.largest` is read on pipeline stage 1 .*forward of `blocks.0` sets it on stage 0"),
        (BlockReads, r"`blocks.0.largest` is read on pipeline stage 1 .*in act of `blocks.3`"),
    ],
)
def test_what_no_tensor_tells(kind: type[Model], text: str) -> None:
    with pytest.raises(SliceError, match=text):
        plan(kind())


@pytest.mark.parametrize(
    "kind",
    [
        *(Model, UnusedCounter, OwnEntries, DrawnInBlocks, CachedTable, CountedForEver),
        *(OneMask, SameAsBefore, Profiled),
        *(ReadsOwn, ReadsWhatItSets, ReadsWhatNobodySets),
    ],
)
def test_what_each_stage_does_alike(kind: type[Model]) -> None:
    model = kind()
    before = {name: dict(vars(child)) for name, child in model.named_modules()}
    plan(model)
    for name, child in model.named_modules():
        kept = {key: x for key, x in vars(child).items() if key not in ("_call_impl", "forward")}
        assert kept.keys() == before[name].keys() and all(x is before[name][key] for key, x in kept.items())
