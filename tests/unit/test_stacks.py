"""Stacks of experts: what is found, what is refused, and what a plan costs."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.auto_plan.adding_up import NotAdditive
from lightning_megatp.auto_plan.blocks import Block, Call
from lightning_megatp.auto_plan.discover import discover, look
from lightning_megatp.auto_plan.stacks import find_stacks, layout_of
from lightning_megatp.auto_plan.thin_stacks import thinned
from lightning_megatp.plan.layer import StackLayout
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.plan.styles import ExpertParameter

WIDTH, INSIDE, EXPERTS = 8, 12, 3
X = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Stack(nn.Module):
    """Two stacks, and what a test does with them."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        shapes = {"w1": (EXPERTS, WIDTH, INSIDE), "w2": (EXPERTS, INSIDE, WIDTH)} | shapes
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("load", torch.zeros(EXPERTS))
        self.gate = nn.Linear(WIDTH, EXPERTS)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(torch.einsum("nd,edf->enf", x, self.w1))

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.run(self, x, *more)


def plain(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("enf,efd,ne->nd", self.hidden(x), self.w2, self.gate(x).softmax(-1))


def halves(self: Any, x: Tensor) -> Tensor:
    gate, up = torch.einsum("nd,edf->enf", x, self.w13).chunk(2, -1)
    return torch.einsum("enf,efd->nd", F.silu(gate) * up, self.w2)


def pairs(self: Any, x: Tensor) -> Tensor:
    h = torch.einsum("nd,edf->enf", x, self.w13) + self.b13[:, None]
    return torch.einsum("enf,efd->nd", F.silu(h[..., ::2]) * h[..., 1::2], self.w2) + self.b2.sum(0)


def found(module: nn.Module) -> StackLayout:
    return layout_of(Block(module, ["stack"], [Call((X,), {})], stack=True))


def described(layout: StackLayout) -> dict[str, Any]:
    def of(entry: ExpertParameter) -> Any:
        return "once" if entry.once else (entry.dim, entry.parts, entry.unit) if entry.split else "whole"

    return {entry.name: of(entry) for entry in layout.parameters}


def test_parameters_are_told_by_what_they_do() -> None:
    gate = {"gate.weight": "whole", "gate.bias": "whole"}
    assert described(found(Stack(plain))) == {"w1": (2, 1, 1), "w2": (1, 1, 1)} | gate
    shapes: dict[str, Any] = {"w13": (EXPERTS, WIDTH, 2 * INSIDE)}
    module = Stack(halves, **shapes)
    del module.w1
    assert described(found(module)) == {"w2": (1, 1, 1), "w13": (2, 2, 1)} | gate
    module = Stack(pairs, **shapes, b13=(EXPERTS, 2 * INSIDE), b2=(EXPERTS, WIDTH))
    del module.w1
    assert described(found(module)) == {"w2": (1, 1, 1), "w13": (2, 1, 2), "b13": (1, 1, 2), "b2": "once"} | gate


def with_loss(self: Any, x: Tensor) -> Any:
    return {"y": plain(self, x), "loss": self.gate(x).softmax(-1).mean(0).square().sum(), "n": len(x)}


def balanced_in_training(self: Any, x: Tensor) -> Any:
    return plain(self, x), self.gate(x).square().mean() if self.training else x.new_zeros(())


def leaving(self: Any, x: Tensor) -> Tensor:
    self.loss = self.gate(x).square().mean()
    self.count = len(x)
    return plain(self, x)


def noisy(self: Any, x: Tensor) -> Tensor:
    scores = self.gate(x)
    return plain(self, x) * (scores + torch.randn_like(scores)).softmax(-1).amax(-1, keepdim=True)


def dropping(self: Any, x: Tensor) -> Tensor:
    h = F.dropout(self.hidden(x), 0.5, self.training)
    return torch.einsum("enf,efd->nd", h, self.w2)


def by_shape(self: Any, x: Tensor) -> Tensor:
    h = self.hidden(x)
    return torch.einsum("enf,efd->nd", h * (torch.rand(h.shape) > 0.1), self.w2)


def by_size(self: Any, x: Tensor) -> Tensor:
    noise = torch.randn(size=(len(x), EXPERTS), dtype=x.dtype)
    return plain(self, x) * (self.gate(x) + noise).softmax(-1).amax(-1, keepdim=True)


def test_what_each_rank_has_alike() -> None:
    assert found(Stack(by_size)).draws_alike and not found(Stack(by_shape)).draws_alike
    assert found(Stack(plain)).draws_alike, "what is drawn later chooses experts, for all that is known"
    assert found(Stack(with_loss)).returns == found(Stack(balanced_in_training)).returns == (True, False)
    assert found(Stack(leaving)).kept == ("loss",)
    assert found(Stack(noisy)).draws_alike and not found(Stack(dropping)).draws_alike


def normed(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("enf,efd->nd", F.layer_norm(self.hidden(x), [self.w1.shape[-1]]), self.w2)


def activated(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(plain(self, x))


def doubled_residual(self: Any, x: Tensor) -> Tensor:
    return 2 * x + plain(self, x)


def both_drawn(self: Any, x: Tensor) -> Tensor:
    return F.dropout(dropping(self, x), 0.5, self.training)


def returning_hidden(self: Any, x: Tensor) -> Any:
    return plain(self, x), self.hidden(x)


def leaving_hidden(self: Any, x: Tensor) -> Tensor:
    self.last = self.hidden(x).mean()
    return plain(self, x)


def leaving_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.losses = [self.gate(x).mean()]
    return plain(self, x)


def counting(self: Any, x: Tensor) -> Tensor:
    self.load += self.hidden(x).detach().sum((1, 2))
    return plain(self, x)


class _Adding(torch.autograd.Function):
    """As DeepSeek-MoE adds a loss to the gradient of what it returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.shape = loss.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.new_ones(ctx.shape)


def adding_to_gradients(self: Any, x: Tensor) -> Tensor:
    return _Adding.apply(plain(self, x), self.gate(x).square().mean())  # type: ignore[no-any-return]


def clamping_a_gradient(self: Any, x: Tensor) -> Tensor:
    scores = self.gate(x)
    scores.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return torch.einsum("enf,efd,ne->nd", self.hidden(x), self.w2, scores.softmax(-1))


def limited(self: Any, x: Tensor) -> Tensor:
    return plain(self, x).clamp(-200, 200)


def limited_inside(self: Any, x: Tensor) -> Tensor:
    h = self.hidden(x)
    return torch.einsum("enf,efd->nd", h / (h.norm() / 1e4).clamp(min=1), self.w2)


def overflowing(self: Any, x: Tensor) -> Tensor:
    """More than four of five tokens for one expert pass unchanged."""
    chosen = F.one_hot(self.gate(x).argmax(-1), EXPERTS)
    fits = ((chosen.cumsum(0) <= 4) * chosen).sum(-1, keepdim=True).bool()
    return torch.where(fits, torch.einsum("enf,efd,ne->nd", self.hidden(x), self.w2, chosen.double()), x)


def appending(self: Any, x: Tensor, losses: list[Tensor]) -> Tensor:
    losses.append(self.gate(x).mean())
    return plain(self, x)


def penalised_later(self: Any, x: Tensor) -> Any:
    return plain(self, x), 0.0 * self.hidden(x).abs().sum()


def another_in_evaluation(self: Any, x: Tensor) -> Any:
    return plain(self, x), self.hidden(x).sum() if self.training else x.new_ones(())


def self_normalising(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("enf,efd->nd", F.alpha_dropout(self.hidden(x), 0.2, self.training), self.w2)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: torch.einsum("enf,efd->nd", self.hidden(x), self.w2), x, use_reentrant=False)
    return y


def in_its_own_list(self: Any, x: Tensor) -> Tensor:
    self.all_losses.append(self.gate(x).mean())
    return plain(self, x)


def not_used(self: Any, x: Tensor) -> Tensor:
    return self.gate(x)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (normed, "does not add up"),
        (activated, "does not add up"),
        (doubled_residual, "does not add up"),
        (both_drawn, "draws random numbers for the features"),
        (returning_hidden, "something else than the whole"),
        (leaving_hidden, "leaves in `last`"),
        (leaving_in_a_list, "leaves tensors with a graph in `losses`"),
        (counting, "buffer `load`"),
        (not_used, "the same whatever its experts compute"),
        (adding_to_gradients, "gradients of its parts"),
        (clamping_a_gradient, "gradients of its parts"),
        (limited, "does not add up"),
        (limited_inside, "does not add up"),
        (overflowing, "does not add up"),
        (appending, "changes what it is given"),
        (penalised_later, "returns zeros"),
        (another_in_evaluation, "a sum for some inputs"),
        (self_normalising, "alpha dropout"),
        (checkpointed, "activation checkpoint inside"),
        (in_its_own_list, "leaves tensors with a graph in `all_losses`"),
    ],
)
def test_what_does_not_add_up_stays_whole(run: Any, why: str) -> None:
    module: Any = Stack(run)
    module.all_losses = []
    args = (X, []) if run is appending else (X,)
    with pytest.raises(NotAdditive, match=why):
        layout_of(Block(module, ["stack"], [Call(args, {})], stack=True))


class _Numbered(Stack):
    """Experts of a layer that knows its number."""

    def __init__(self, run: Callable[[Any, Tensor], Any], number: int) -> None:
        super().__init__(run)
        self.number = number


def last_normed(self: Any, x: Tensor) -> Tensor:
    y = plain(self, x)
    return F.normalize(y) if self.number == 2 else y


@pytest.mark.parametrize(("run", "split"), [(plain, 3), (last_normed, 0)])
def test_layers_that_know_their_number(run: Any, split: int) -> None:
    """They are of one kind, proven with all numbers."""

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.norm, self.experts = nn.LayerNorm(WIDTH), _Numbered(run, number)
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.down(F.gelu(self.up(self.norm(x))))
            return x + self.experts(x)

    model = nn.ModuleDict({"blocks": nn.ModuleList(Layer(i) for i in range(3))}).double()
    plan = resolve("auto", model, 2)
    kinds, _ = look(model, plan, [lambda: [block(X) for block in model["blocks"]]])  # type: ignore[attr-defined]
    assert [kind.names for kind in kinds if kind.stack] == [[f"blocks.{i}.experts" for i in range(3)]]
    discover(model, 2, kinds, plan)
    assert sum(layer.style.style == "experts" for layer in plan.layers.values()) == split


class _Named(Stack):
    """With a name that a split layer needs itself."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(run)
        self.linear = nn.Linear(WIDTH, WIDTH)


def one_by_one(self: Any, x: Tensor) -> Tensor:
    return x + sum(F.gelu(x @ self.w1[e]) @ self.w2[e] for e in range(EXPERTS))


def test_names_that_are_taken_are_said_beforehand() -> None:
    model = nn.ModuleDict({"experts": _Named(one_by_one)}).double()
    plan = resolve("auto", model, 2)
    kinds, _ = look(model, plan, [lambda: model["experts"](X)])
    assert "forward" not in vars(model["experts"]), "a block and a stack: what was recorded is gone twice"
    said = " ".join(discover(model, 2, kinds, plan).problems)
    assert "`experts` stays whole: its code uses it otherwise" in said and "the attributes linear" in said
    assert plan.whole["experts.w2"].startswith("its code uses it otherwise")
    assert all(layer.style.style != "experts" for layer in plan.layers.values())


def test_what_is_split_otherwise_is_not_said_to_be_no_experts() -> None:
    """In `plain` each weight is used as that of one linear layer, of the features of all experts."""
    model = nn.ModuleDict({"experts": _Named(plain)}).double()
    plan = resolve("auto", model, 2)
    kinds, _ = look(model, plan, [lambda: model["experts"](X)])
    assert discover(model, 2, kinds, plan).problems == []
    assert {"experts.w1": "column", "experts.w2": "row"}.items() <= {
        n: x.style.style for n, x in plan.layers.items()
    }.items()


def test_thin_stacks_are_put_back() -> None:
    module = Stack(plain)
    module.inner = INSIDE
    before = dict(module.named_parameters())
    layout = StackLayout((ExpertParameter("w1", 2), ExpertParameter("w2", 1)), ("inner",))
    with thinned(module, layout) as inside:
        assert module.w1.shape == (EXPERTS, WIDTH, inside) and module.w2.shape[1] == module.inner == inside
    after = dict(module.named_parameters())
    assert before.keys() == after.keys() and all(after[name] is p for name, p in before.items())
    assert module.inner == INSIDE


def test_candidates_are_what_holds_two_stacks_or_more() -> None:
    inner = nn.ModuleDict({"a": _One(), "b": _One()})
    model = nn.ModuleDict({"experts": Stack(plain), "pair": _Holding(inner), "alone": _One()})
    assert sorted(find_stacks(model)) == ["experts", "pair"]
    lists = nn.ParameterList(torch.zeros(4, 4) for _ in range(EXPERTS))
    assert find_stacks(nn.ModuleDict({"layers": nn.ModuleList([_Holding(lists)])})) == ["layers.0"]


class _One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 4, 4))


class _Holding(nn.Module):
    def __init__(self, parts: nn.Module) -> None:
        super().__init__()
        self.parts = parts


class _Large(nn.Module):
    """As wide as Mixtral's layers, without values."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.norm, self.experts = nn.LayerNorm(4096), Stack(plain, w1=(8, 4096, 14336), w2=(8, 14336, 4096))
            self.experts.gate = nn.Linear(4096, 8)
            self.up, self.down = nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x + self.experts(x)


def test_the_size_of_experts_hardly_matters() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(_Large() for _ in range(2))})
    x = torch.randn(4, 4096, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = resolve("auto", model, 2)
    kinds, problems = look(model, plan, [lambda: [block(x) for block in model["blocks"]]])  # type: ignore[attr-defined]
    found = discover(model, 2, kinds, plan)
    assert not problems and not found.problems
    assert {name: layer.style.style for name, layer in plan.layers.items() if ".0." in name} == {
        "blocks.0.experts": "experts",
        "blocks.0.up": "column",
        "blocks.0.down": "row",
    }
    assert plan.parameters["blocks.1.experts.w1"].shape == (8, 4096, 14336)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * 2**20, "KiB; the experts alone have 7.5 GB"
