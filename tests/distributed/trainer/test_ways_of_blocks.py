"""Blocks that compute in several ways, of which a step's first call, or its numbers, show one: all come out right."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, TP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError


class Block(nn.Module):
    """Some ways couple the features of the hidden layer."""

    most = 1e9
    """The norm of a gradient."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(
        self, x: Any, depth: int = 0, couple: bool = False, how: str = "", own: bool = False, mask: Any = None
    ) -> Any:
        if isinstance(x, tuple):
            return self(x[0]), x[1] + 1
        h = F.gelu(self.up(self.norm(x)))
        if how == "moved":  # as mixtures of experts do that keep experts in the host's memory
            self.up.to(x.device)
        if how == "limit":
            h = h * 100 / h.norm(dim=-1, keepdim=True).clamp(min=100)
        if how == "branch" and h.amax() > 30:
            h = h.tanh()
        if mask is not None:
            h = torch.where(mask[:, None, None], F.layer_norm(h, h.shape[-1:]), h)
        if how == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        if how == "limit of gradients" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * (self.most / gradient.norm()).clamp(max=1))
        if how == "state":
            self.top = h.detach().amax()
        if depth == 2 or couple or how == "norm" or (own and self.index == 1):
            h = F.layer_norm(h, h.shape[-1:])
        return x + self.down(h)


class Model(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tok, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(map(Block, range(3)))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for block in self.blocks:
            block.most = 1e-4

    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.way == "depth":
                x = block(x, i)
            elif self.way == "keyword":
                x = block(x, couple=i > 0)
            elif self.way in ("limit", "branch", "state", "hook", "limit of gradients", "moved"):
                x = block(x, how=self.way)
            elif self.way == "mask":
                x = block(x, mask=torch.arange(len(x)) > 1)
            elif self.way == "rows" and i == 1:  # tokens of all samples, one after the other
                x = block(x.flatten(0, 1)).view_as(x)
            elif self.way == "tuple":
                x, _ = block((x, 0))
            elif self.way == "text":
                x = block(x, how="norm" if i == 1 else "")
            else:
                x = block(x, own=self.way == "own number")
        if self.way == "twice":
            y = x.tanh()
            for block in self.blocks:
                y = block(y, couple=True)
            x = x + y
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.head(self.body(self.tok(batch[:, :-1])))
        loss = F.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten())
        return loss * self.blocks[0].top if self.way == "state" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(layout: Layout, way: str) -> tuple[list[float], int]:
    torch.manual_seed(0)
    module, losses = Model(way), Losses()
    if way in ("limit", "branch"):  # more than the numbers with which plans are tried
        with torch.no_grad():
            [block.up.weight[:16].mul_(200) for block in module.blocks]
    ids: Any = torch.randint(0, 16, (12, 7), generator=torch.Generator().manual_seed(1))
    strategy = None if layout.plain else {"plan": "auto"}
    make_trainer(layout, strategy=strategy, callbacks=[losses]).fit(module, DataLoader(ids, batch_size=4))
    return losses.seen, module.blocks[0].up.weight.numel()


PATHS = ["plain", "depth", "keyword", "text", "own number", "twice", "moved", "rows"]
NUMBERS = ["limit", "branch", "mask", "state", "tuple", "hook", "limit of gradients"]


@pytest.mark.parametrize("way", PATHS + NUMBERS)
def test_as_on_one_device(way: str) -> None:
    ((expected, whole),) = run_program(PLAIN, _fit, way)
    for losses, own in run_program(TP2, _fit, way):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert own < whole


class Experts(nn.Module):
    """With the names of transformers' experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate_up_proj = nn.Parameter(0.3 * torch.randn(2, 8, 48))
        self.down_proj = nn.Parameter(0.3 * torch.randn(2, 24, 8))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, value = (
                (x @ up).chunk(2, -1) if self.kind != "alternating" else ((x @ up)[..., ::2], (x @ up)[..., 1::2])
            )
            h = F.silu(gate) * value
            h = F.layer_norm(h, h.shape[-1:]) if self.kind == "normed" else h
            total = total + (h @ down) * weights[..., i : i + 1]
        return total


class Quantised(nn.Linear):
    """Computes what a linear layer does, at first."""

    levels = 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.levels:
            weight = weight + ((weight * self.levels).round() / self.levels - weight).detach()
        return F.linear(x, weight, self.bias)


class Mixture(Model):
    def __init__(self, kind: str) -> None:
        super().__init__("")
        self.kind = kind
        self.experts, self.router = Experts(kind), nn.Linear(8, 2)
        if kind == "quantised":
            for block in self.blocks:
                block.up, block.down = Quantised(8, 32), Quantised(32, 8)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.modules():
            if isinstance(layer, Quantised):
                layer.levels = 4 * batch_idx

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        return x + self.experts(x, self.router(x).softmax(-1))


def _mixture(layout: Layout, kind: str) -> tuple[list[float], int, int]:
    torch.manual_seed(0)
    module, losses = Mixture(kind), Losses()
    ids: Any = torch.randint(0, 16, (12, 7), generator=torch.Generator().manual_seed(1))
    strategy = None if layout.plain else {"plan": "auto"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(layout, strategy=strategy, callbacks=[losses]).fit(module, DataLoader(ids, batch_size=4))
    return losses.seen, module.experts.down_proj.numel(), module.blocks[0].up.weight.numel()


@pytest.mark.parametrize("kind", ["halves", "alternating", "normed", "quantised"])
def test_what_looks_like_something_known(kind: str) -> None:
    """Stacks of experts are split if that is proven; a linear layer that may do something else later is not."""
    ((expected, experts, weight),) = run_program(PLAIN, _mixture, kind)
    for losses, own_experts, own_weight in run_program(TP2, _mixture, kind):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert (own_experts < experts) == (kind != "normed")
        assert (own_weight < weight) == (kind != "quantised")


class Adapted(Block):
    """With what a hook turns on after two steps: a norm of the hidden layer, or layers that read it."""

    on = ""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(index)
        if what == "adapter":
            self.a, self.b = nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: Any, **_: Any) -> Any:
        h = F.gelu(self.up(self.norm(x)))
        if self.on == "norm":
            h = F.layer_norm(h, h.shape[-1:])
        if self.on == "adapter":
            h = h + self.b(self.a(h))
        return x + self.down(h)


class Switched(Model):
    def __init__(self, what: str) -> None:
        super().__init__("plain")
        self.what = what
        self.blocks = nn.ModuleList(Adapted(i, what) for i in range(2))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        for block in self.blocks:
            block.on = self.what if batch_idx >= 2 else ""


def _switched(layout: Layout, what: str) -> None:
    ids: Any = torch.randint(0, 16, (32, 7), generator=torch.Generator().manual_seed(1))
    module = Switched(what)
    make_trainer(layout, strategy={"plan": "auto"}).fit(module, DataLoader(ids, batch_size=4))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("norm", r"`layer_norm` looks at several features in the tensor-parallel region `blocks.0"),
        ("adapter", r"`blocks.0.a` takes 32 features, and this rank has 16 of them: .* when the plan was made"),
    ],
)
def test_what_a_hook_turns_on_later(what: str, text: str) -> None:
    """Steps 1, 2, 4, 8, ... are looked at."""
    with pytest.raises(RankError) as raised:
        run_program(TP2, _switched, what)
    assert len(raised.value.failures) == 2
    for failure in raised.value.failures:
        assert re.search(text, failure.message)


class Backward(Model):
    """Limits gradients inside of its blocks by their norms, in hooks of modules."""

    def __init__(self, when: str, at: str) -> None:
        super().__init__("plain")
        self.when, self.at = when, at
        if when == "init":
            self.limit()

    def limit(self) -> None:
        for block in self.blocks:
            hooked = block.get_submodule(self.at)
            hooked.register_full_backward_hook(lambda _, given, __: [x / (1 + 9 * x.norm()) for x in given])
            hooked.register_full_backward_pre_hook(lambda _, given: [x / (1 + 9 * x.norm()) for x in given])

    def setup(self, stage: str) -> None:
        if self.when == "setup":
            self.limit()

    def on_train_start(self) -> None:
        if self.when == "start":
            self.limit()


def _limited(layout: Layout, when: str, at: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    ids: Any = torch.randint(0, 16, (16, 7), generator=torch.Generator().manual_seed(1))
    losses = Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
    trainer.fit(Backward(when, at), DataLoader(ids, batch_size=4))
    return losses.seen, trainer.strategy.lightning_module_state_dict()


@pytest.mark.parametrize("when", ["init", "setup"])
@pytest.mark.parametrize("at", ["up", "down"])
def test_backward_hooks_of_modules_are_given_whole_gradients(when: str, at: str) -> None:
    ((losses, weights),) = run_program(PLAIN, _limited, when, at)
    ranks = run_program(TP2, _limited, when, at)
    assert all(found == pytest.approx(losses, rel=1e-9) for found, _ in ranks)
    held = {name: x for _, state in ranks for name, x in state.items()}
    torch.testing.assert_close(held, weights, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("at", ["up", "down"])
def test_backward_hooks_that_would_be_given_parts_are_refused(at: str) -> None:
    with pytest.raises(RankError) as raised:
        run_program(TP2, _limited, "start", at)
    text = rf"`blocks.0.{at}`, in the .*region `blocks.0`, has a hook of `register_full_backward_hook`"
    assert all(re.search(text, failure.message) for failure in raised.value.failures)


def test_backward_hooks_beside_regions_may_come_late() -> None:
    ((losses, _),) = run_program(PLAIN, _limited, "start", "norm")
    assert run_program(Layout(tp=2, sequence=False), _limited, "start", "norm")[0][0] == pytest.approx(losses, rel=1e-9)


class OfTensors(Model):
    """Sees gradients inside of its blocks, by hooks of their layers."""

    def __init__(self, when: str, how: str) -> None:
        super().__init__("plain")
        self.when, self.how, self.kept = when, how, list[Tensor]()
        if when == "init":
            self.look()

    def look(self) -> None:
        for block in self.blocks:
            block.up.register_forward_hook(lambda _, __, y: self.note(y))  # type: ignore[union-attr]

    def note(self, y: Tensor) -> None:
        if y.requires_grad and self.how == "register_hook":
            y.register_hook(lambda gradient: gradient / (1 + 9 * gradient.norm()))
        if y.requires_grad and self.how == "retain_grad":
            y.retain_grad()
            self.kept.append(y)

    def on_train_start(self) -> None:
        if self.when == "start":
            self.look()

    def on_after_backward(self) -> None:
        for y in self.kept:
            assert y.grad is not None
            self.log("norm", y.grad.norm())
        self.kept.clear()


def _of_tensors(layout: Layout, when: str, how: str) -> tuple[list[float], float]:
    torch.manual_seed(0)
    ids: Any = torch.randint(0, 16, (16, 7), generator=torch.Generator().manual_seed(1))
    losses = Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
    trainer.fit(OfTensors(when, how), DataLoader(ids, batch_size=4))
    return losses.seen, float(trainer.callback_metrics.get("norm", 0.0))


@pytest.mark.parametrize("how", ["register_hook", "retain_grad"])
def test_gradients_inside_of_blocks_are_whole_or_refused(how: str) -> None:
    ((losses, norm),) = run_program(PLAIN, _of_tensors, "init", how)
    for found, found_norm in run_program(TP2, _of_tensors, "init", how):
        assert found == pytest.approx(losses, rel=1e-9) and found_norm == pytest.approx(norm, rel=1e-9)
    with pytest.raises(RankError) as raised:
        run_program(TP2, _of_tensors, "start", how)
    text = rf"`{how}` in the tensor-parallel region `blocks.0` would see the gradient"
    assert all(re.search(text, failure.message) for failure in raised.value.failures)


class LooksNow(Callback):
    """Looks at activations of the third batch, by hooks that it takes away.

    Args:
        at: what it looks at: values, or shapes alone.
    """

    def __init__(self, at: str) -> None:
        self.at, self.handles = at, list[Any]()
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2:
            self.handles = [block.up.register_forward_hook(self.look) for block in module.blocks]

    def on_train_batch_end(self, *args: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def look(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self.seen.append(float(out.norm()) if self.at == "values" else out.dim())


def _looking(layout: Layout, at: str) -> list[Any]:
    torch.manual_seed(3)
    looks = LooksNow(at)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[looks])
        trainer.fit(Model(""), DataLoader(torch.randint(0, 16, (16, 6)), batch_size=2))
    return looks.seen


@pytest.mark.parametrize("layout", [TP2, Layout(tp=2, sequence=False)], ids=str)
def test_hooks_of_single_steps_are_watched(layout: Layout) -> None:
    with pytest.raises(RankError, match=r"`norm` looks at several features in the tensor-parallel region `blocks\.0`"):
        run_program(layout, _looking, "values")
    assert run_program(layout, _looking, "shapes") == run_program(PLAIN, _looking, "shapes") * 2 == [[3, 3, 3]] * 2


class Attached(nn.Module):
    """Parameters, layers and buffers on layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.up.gain, self.down.gain = nn.Parameter(torch.full((32,), 1.2)), nn.Parameter(torch.full((8,), 0.8))
        self.up.beside = nn.Linear(8, 32, bias=False)
        self.down.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        h = F.gelu(self.up(x) * self.up.gain + self.up.beside(x))  # type: ignore[operator]
        return x + self.down(h) * self.down.gain + self.down.shift


def _attached(layout: Layout) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    torch.manual_seed(3)
    module, losses = Model("depth"), Losses()
    module.blocks = nn.ModuleList(Attached() for _ in range(2))
    module.way = "attached"
    module.body = lambda x: module.blocks[1](module.blocks[0](x))  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
        trainer.fit(module, DataLoader(torch.randint(0, 16, (16, 6)), batch_size=2))
    return losses.seen, {name: tuple(x.shape) for name, x in module.blocks[0].named_parameters()}


def test_parameters_on_layers() -> None:
    [(expected, _)] = run_program(PLAIN, _attached)
    for losses, shapes in run_program(TP2, _attached):
        assert losses == pytest.approx(expected, abs=1e-9)
        assert shapes["up.weight"] == shapes["up.beside.weight"] == (16, 8) and shapes["down.weight"] == (8, 16)
