"""What a step does around the calls of blocks, which each stage sees in part: hooks that hand something to the step,
and what is set for the forward and put back after it, when earlier stages have left the step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.crossing import crossed, fewer
from tests.distributed.training import (
    PLAIN,
    Layout,
    run_program,
    shared_directory,
    train_on_microbatches,
)
from tests.ranks import RankError

WIDTH, ROWS = 8, 8


class Block(nn.Module):
    """(b, WIDTH) -> (b, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.strength = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength * self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """(b, WIDTH) -> (b, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.factor, self.calls = 1.0, [0]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.factor * (1 + len(self.calls))
        for block in self.blocks:
            x = block(x)
        return x


class Model(LightningModule):
    """Its loss is that of the network's result and of what `feature` gives."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.net, self.project = Net(), nn.Linear(WIDTH, WIDTH)
        self.habit, self.kept, self.norms = habit, {}, []
        self.kept_numbers = {0: 1.0, 1: 1.0}
        self.setup_habit()

    def setup_habit(self) -> None:
        """Before training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with self.around():
            out = self.net(x)
            feature = self.feature(out)
        loss = F.mse_loss(out, y)
        return loss if feature is None else loss + F.mse_loss(self.project(feature), x)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the forward."""
        yield

    def feature(self, out: Tensor) -> Tensor | None:
        """For the second loss."""
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def keep(kept: dict[str, Tensor], name: str, module: nn.Module, given: Any, out: Tensor) -> None:
    kept[name] = out


class Hooked(Model):
    """Its hooks hand something to the step."""

    def setup_habit(self) -> None:
        block = self.net.blocks[1]
        match self.habit:
            case "kept by a block's":
                block.register_forward_hook(lambda module, given, out: self.kept.update(h=out))
            case "kept by a layer's":
                block.fc1.register_forward_hook(functools.partial(keep, self.kept, "h"))
            case "kept by a last layer's":
                block.fc2.register_forward_hook(functools.partial(keep, self.kept, "h"))
            case "kept by a method":
                block.register_forward_hook(self.keep)
            case "before":
                self.net.blocks[2].register_forward_pre_hook(lambda module, given: self.kept.update(h=given[0]))
            case "before, with an old value there":
                self.kept["h"] = torch.zeros(1, WIDTH)
                self.net.blocks[2].register_forward_pre_hook(lambda module, given: self.kept.update(h=given[0]))
            case "with keywords":
                block.register_forward_hook(lambda m, given, named, out: self.kept.update(h=out), with_kwargs=True)
            case "computed in the hook":
                block.register_forward_hook(lambda module, given, out: self.kept.update(h=out.detach().tanh() + out))
            case "of all blocks":
                for i, each in enumerate(self.net.blocks):
                    each.register_forward_hook(functools.partial(keep, self.kept, str(i)))
            case "beside one that reads":
                block.register_forward_hook(lambda module, given, out: self.norms.append(float(out.norm())))
                block.register_forward_hook(lambda module, given, out: self.kept.update(h=out))

    def keep(self, module: nn.Module, given: Any, out: Tensor) -> None:
        self.kept["h"] = out

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        hooks = []
        if self.habit == "kept in the step":
            hooks = [self.net.blocks[1].register_forward_hook(lambda module, given, out: self.kept.update(h=out))]
        if self.habit == "twice in the step":
            hooks = [self.net.blocks[i].register_forward_hook(self.keep) for i in (0, 1)]
        yield
        for hook in hooks:  # not in a `finally`
            hook.remove()

    def feature(self, out: Tensor) -> Tensor | None:
        found = [self.kept.pop(name) for name in sorted(self.kept)]
        if self.habit == "kept by a layer's":
            return found[0][:, :WIDTH]
        return sum(found[1:], start=found[0])


class Looks(Model):
    """Its hooks are for nobody's step."""

    def setup_habit(self) -> None:
        for i, block in enumerate(self.net.blocks):
            match self.habit:
                case "keeps":
                    block.fc1.register_forward_hook(functools.partial(keep, self.kept, str(i)))
                case "backward":
                    block.fc1.register_full_backward_hook(functools.partial(keep, self.kept, str(i)))
                case "counts":
                    block.register_forward_hook(self.count)
                case "changes":
                    block.register_forward_hook(self.change)

    def count(self, *args: Any) -> None:
        self.norms = [*self.norms, 1.0]

    def change(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        self.factor = 1.5
        return out * self.factor


def _looking(layout: Layout, habit: str) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        train_on_microbatches(layout, Looks(habit).double(), functools.partial(_loader, layout), ROWS)
    return "\n".join(str(x.message) for x in caught)


class PutsBack(Model):
    """It sets something for the forward, and puts it back."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        net, first = self.net, self.net.blocks[0]
        match self.habit:
            case "factor":
                net.factor = 2.0 * net.factor
                yield
                net.factor = 1.0
            case "list":
                net.calls.append(1)
                yield
                net.calls.pop()
            case "table":  # whose keys are no names
                self.kept_numbers[0] = 2.0 * self.kept_numbers[0]
                net.factor = self.kept_numbers[0]
                yield
                self.kept_numbers[0] = 1.0
            case "mode":
                net.factor = 2.0 if net.training else 1.0
                net.eval()
                yield
                net.train()
            case "attribute of a block":
                first.strength = 2.0 * first.strength
                yield
                first.strength = 1.0
            case "method":
                old = first.fc2.forward
                first.fc2.forward = lambda x: 2 * old(x)
                yield
                first.fc2.forward = old
            case "hook":
                hook = first.register_forward_hook(lambda module, given, out: 1.5 * out)
                yield
                hook.remove()
            case "second pass":
                for block in net.blocks:
                    block.strength = 0.0
                with torch.no_grad():
                    self.kept["reference"] = net(torch.ones(2, WIDTH, dtype=torch.float64))
                for block in net.blocks:
                    block.strength = 1.0
                yield
            case "forward of a block":
                for block in net.blocks:
                    block.forward = functools.partial(F.layer_norm, normalized_shape=(WIDTH,))
                with torch.no_grad():
                    self.kept["reference"] = net(torch.ones(2, WIDTH, dtype=torch.float64))
                for block in net.blocks:
                    block.forward = Block.forward.__get__(block)
                yield
            case "counter":  # which is not put back
                net.factor += 0.1
                yield
                self.kept["x"] = net.factor


def _loader(layout: Layout, rows: int) -> DataLoader:
    """Shuffled as Lightning does it for several ranks."""
    x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = TensorDataset(x, x.flip(1))
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, shuffle=True, seed=0)
    return DataLoader(data, batch_size=rows, sampler=sampler)


def _trained(
    layout: Layout, kind: Callable[[str], Model], habit: str, options: dict[str, Any], root: str
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = kind(habit).double()
    loader = functools.partial(_loader, layout)
    trainer, losses = train_on_microbatches(layout, module, loader, ROWS // layout.dp, **options)
    path = shared_directory(layout, "state", root) / "last.ckpt"
    trainer.save_checkpoint(path)
    return losses, torch.load(path)["state_dict"]


def _compare(layout: Layout, kind: Callable[[str], Model], habit: str, options: dict[str, Any], root: Path) -> None:
    plain = dataclasses.replace(PLAIN, microbatches=layout.microbatches)
    ((losses, state),) = run_program(plain, _trained, kind, habit, {}, str(root))
    runs = run_program(layout, _trained, kind, habit, options, str(root))
    assert [statistics.mean(each) for each in zip(*(run[0] for run in runs), strict=True)] == pytest.approx(losses)
    for _, saved in runs:
        for name, value in state.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("habit", "name"),
    [("keeps", "blocks.0.fc1"), ("counts", "blocks.0"), ("backward", "blocks.0.fc1"), ("changes", None)],
)
def test_hooks_that_keep_what_other_stages_do_not_see_are_named(habit: str, name: str | None) -> None:
    said, _ = run_program(Layout(pp=2), _looking, habit)
    assert (f"a hook on `net.{name}` (and 3 more) keeps what it sees" in said) == (name is not None)
    assert "a hook on" not in run_program(PLAIN, _looking, habit)[0]


HOOKED = [
    "kept in the step",
    "twice in the step",
    "kept by a block's",
    "kept by a layer's",
    "kept by a method",
    "before",
    "before, with an old value there",
    "with keywords",
    "computed in the hook",
    "of all blocks",
    "beside one that reads",
]
LAYOUTS = [
    ("kept in the step", Layout(pp=2, schedule="zb_v"), {}),
    ("kept in the step", Layout(tp=2, pp=2), {"plan": "auto"}),
    ("kept in the step", Layout(pp=2, dp=2, zero=3), {}),
    ("of all blocks", Layout(pp=2, schedule="zb_v"), {}),
    ("kept by a last layer's", Layout(tp=2, pp=2), {"plan": "auto"}),
    ("kept by a layer's", Layout(pp=2), {"recompute": "full"}),
    ("kept by a block's", Layout(pp=2), {"recompute": "full"}),
    ("kept by a block's", Layout(pp=2, microbatches=1), {}),
]


HANDED = [*((habit, Layout(pp=2), {}) for habit in HOOKED), *LAYOUTS]


@pytest.mark.parametrize(("habit", "layout", "options"), fewer(HANDED, extended=HANDED[1::2]), ids=str)
def test_hooks_of_blocks_hand_something_to_the_step(
    habit: str, layout: Layout, options: dict[str, Any], tmp_path: Path
) -> None:
    _compare(layout, Hooked, habit, options, tmp_path)


PUTS_BACK = [
    *("factor", "list", "table", "mode", "attribute of a block", "method", "hook", "counter"),
    *("second pass", "forward of a block"),
]


STAGES = [Layout(pp=2), Layout(pp=2, schedule="zb_v")]


@pytest.mark.parametrize(
    ("habit", "layout"), [*crossed(PUTS_BACK[:5], STAGES), *crossed(PUTS_BACK[5:], STAGES[::-1])], ids=str
)
def test_what_a_step_puts_back_is_put_back_on_all_stages(habit: str, layout: Layout, tmp_path: Path) -> None:
    _compare(layout, PutsBack, habit, {}, tmp_path)


class SetsLate(Model):
    """It sets something at its end, which stages before the last have left by then."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield
        for block in self.net.blocks:
            match self.habit:
                case "attribute":
                    block.strength *= 0.8
                case "object":
                    block.schedule.strength *= 0.8
                case "list":
                    block.seen.append(1)
                case "mode":
                    block.norm.eval()

    def setup_habit(self) -> None:
        for block in self.net.blocks:
            block.schedule, block.seen = Schedule(), []
            block.register_forward_pre_hook(self.scale)

    def scale(self, block: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        by = 1.0 if block.norm.training else 1.1
        return (given[0] * block.schedule.strength * (1 + 0.01 * len(block.seen)) * by,)

    def feature(self, out: Tensor) -> Tensor | None:
        if self.habit == "attribute":
            self.norms.append(float(out.norm()))  # from here on the step can't be followed
        return None


class Schedule:
    strength = 1.0


@pytest.mark.parametrize("habit", ["attribute", "object", "list", "mode"])
def test_what_a_step_sets_at_its_end_is_known_to_all_stages(habit: str, tmp_path: Path) -> None:
    _compare(Layout(pp=2, microbatches=1), SetsLate, habit, {}, tmp_path)


class Changing(Model):
    def setup_habit(self) -> None:
        def change(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            self.kept["h"] = out
            return 1.5 * out

        self.net.blocks[1].register_forward_hook(change)

    def feature(self, out: Tensor) -> Tensor | None:
        return self.kept["h"]


def test_a_hook_that_also_changes_the_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"came out of `net.blocks.1` .* by a side door"):
        run_program(Layout(pp=2), _trained, Changing, "", {}, str(tmp_path))


class Recycling(Model):
    """Its blocks run twice, so that they need one stage, which a look at its step tells; it also changes its batch."""

    def setup_habit(self) -> None:
        self.recycle, self.ends = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["pair"]
        batch["pair"] = None
        out = x
        for _ in range(2):
            out = self.net(x + self.recycle(out))
        for block in self.ends:
            out = block(out)
        return F.mse_loss(self.project(out), y)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"pair": tuple(batch)}


def test_looking_at_a_step_that_changes_its_batch(tmp_path: Path) -> None:
    _compare(Layout(tp=2, pp=2), Recycling, "", {"plan": "auto"}, tmp_path)


class Scaling(nn.Module):
    """Keeps numbers of the batch for later, in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.kept = nn.Parameter(torch.ones(WIDTH)), deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.std(-1, keepdim=True))
        return x / self.kept[0] * self.gain


class Undoing(Model):
    """What its first block has made of the batch is taken by its last stage, and by no tensor that was returned: the
    batch is known there, so that it seems to be."""

    def setup_habit(self) -> None:
        self.scaling = Scaling()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(self.scaling(x))
        return F.mse_loss(out * self.scaling.kept[0], y)


def test_what_a_block_keeps_for_itself_is_refused_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"`mul` .* came out of `scaling` .* by a side door"):
        run_program(Layout(pp=2), _trained, Undoing, "", {}, str(tmp_path))
