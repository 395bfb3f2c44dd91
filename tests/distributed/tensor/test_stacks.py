"""Stacks of experts as people write them, without a plan: each expert is split on the features inside it, in every
layout, whatever the parameters are called and however they are multiplied."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.crossing import fewer
from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program, train_loader

WIDTH, INSIDE, EXPERTS, CHOSEN, VOCAB = 24, 36, 4, 2, 32
FLAT, TP3 = Layout(tp=2, sequence=False), Layout(tp=3)
ZEROS = [Layout(tp=2, dp=2, zero=zero) for zero in (1, 3)]


def _values(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / WIDTH**0.5)


class Experts(nn.Module):
    """What the kinds below share: which parameters there are, and which of their dims is split."""

    split: ClassVar[dict[str, int]]

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, _values(*shape))

    def each(self, x: Tensor, weights: Tensor, chosen: Tensor, run: Any) -> Tensor:
        """Expert by expert, on the rows that are for it."""
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            row, nth = torch.where(chosen == expert)
            y.index_add_(0, row, run(expert, x[row]) * weights[row, nth, None])
        return y

    def all(self, y: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Of what all experts made of all rows, (experts, n, width)."""
        dense = torch.zeros(y.shape[1], EXPERTS, dtype=y.dtype).scatter(1, chosen, weights)
        return torch.einsum("end,ne->nd", y, dense)


class Linear(Experts):
    """(out, in) with a bias inside and one behind, one expert at a time."""

    split: ClassVar = {"up": 1, "shift": 1, "down": 2}

    def __init__(self) -> None:
        up, down = (EXPERTS, INSIDE, WIDTH), (EXPERTS, WIDTH, INSIDE)
        super().__init__(up=up, shift=(EXPERTS, INSIDE), down=down, offset=(EXPERTS, WIDTH))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        def run(e: int, x: Tensor) -> Tensor:
            return F.linear(F.gelu(F.linear(x, self.up[e], self.shift[e])), self.down[e], self.offset[e])

        return self.each(x, weights, chosen, run)


class Product(Experts):
    """(in, out), inner features as many as outer ones: shapes say nothing. Gate and up alternate."""

    split: ClassVar = {"w1": 2, "w2": 1}

    def __init__(self) -> None:
        super().__init__(w1=(EXPERTS, WIDTH, 2 * WIDTH), w2=(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        def run(e: int, x: Tensor) -> Tensor:
            h = x @ self.w1[e]
            return (F.silu(h[..., ::2]) * h[..., 1::2]) @ self.w2[e]

        return self.each(x, weights, chosen, run)


class Batched(Experts):
    """All experts at once; gate and up are halves, and dropout lies between, which does nothing here."""

    split: ClassVar = {"both": 2, "down": 1}

    def __init__(self) -> None:
        super().__init__(both=(EXPERTS, WIDTH, 2 * INSIDE), down=(EXPERTS, INSIDE, WIDTH), scale=(WIDTH,))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gate, up = torch.bmm((x * self.scale).expand(EXPERTS, *x.shape), self.both).chunk(2, -1)
        return self.all(torch.bmm(self.dropout(F.silu(gate) * up), self.down), weights, chosen)


class Capacity(Experts):
    """As in Switch Transformers and GShard: rows are dispatched to places, and combined again."""

    split: ClassVar = {"w1": 2, "w2": 1}

    def __init__(self) -> None:
        super().__init__(w1=(EXPERTS, WIDTH, INSIDE), w2=(EXPERTS, INSIDE, WIDTH))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        of = F.one_hot(chosen, EXPERTS)
        place = (of.flatten(0, 1).cumsum(0).view_as(of) - 1).clamp(0, 15)
        combine = (F.one_hot(place, 16) * of[..., None] * weights[..., None, None]).sum(1)
        dispatched = torch.einsum("nd,nec->ecd", x, (combine > 0).to(x.dtype))
        inner = F.relu(torch.einsum("ecd,edf->ecf", dispatched, self.w1))
        return torch.einsum("ecf,efd,nec->nd", inner, self.w2, combine)


class Taken(Experts):
    """The weights of each row's experts are taken out of the stack."""

    split: ClassVar = {"w1": 1, "w2": 2}

    def __init__(self) -> None:
        super().__init__(w1=(EXPERTS, INSIDE, WIDTH), w2=(EXPERTS, WIDTH, INSIDE))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        h = F.silu(torch.einsum("nkfd,nd->nkf", self.w1[chosen], x))
        return torch.einsum("nkdf,nkf,nk->nd", self.w2[chosen], h, weights)


class Rows(Experts):
    """As in Megablocks and DBRX: the rows of all experts in one matrix, counted by attributes."""

    split: ClassVar = {"w1": 0, "w2": 0}

    def __init__(self) -> None:
        super().__init__(w1=(EXPERTS * INSIDE, WIDTH), w2=(EXPERTS * INSIDE, WIDTH))
        self.num_experts, self.inner = EXPERTS, INSIDE

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        w1, w2 = (w.view(self.num_experts, self.inner, WIDTH) for w in (self.w1, self.w2))
        return self.each(x, weights, chosen, lambda e, x: F.gelu(x @ w1[e].T) @ w2[e])


class Lists(Experts):
    """A list of matrices for each projection."""

    split: ClassVar = {f"{name}.{e}": dim for e in range(EXPERTS) for name, dim in (("w1", 1), ("w2", 0))}

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.ParameterList(_values(WIDTH, INSIDE) for _ in range(EXPERTS))
        self.w2 = nn.ParameterList(_values(INSIDE, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.each(x, weights, chosen, lambda e, x: F.gelu(x @ self.w1[e]) @ self.w2[e])


class _Stack(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _values(EXPERTS, outputs, inputs)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([F.linear(part, self.weight[e]) for e, part in enumerate(x.split(counts))])


class Apart(Experts):
    """As in JetMoE and ScatterMoE: a module for each stack."""

    split: ClassVar = {"first.weight": 1, "second.weight": 2}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Stack(WIDTH, 2 * INSIDE), _Stack(INSIDE, WIDTH)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts, row = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist(), order // CHOSEN
        gate, up = self.first(x[row], counts).chunk(2, -1)
        y = self.second(F.silu(gate) * up, counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, row, y)


class Routed(Experts):
    """Which chooses experts itself, with noise, by a weight of its own, and returns what balances them."""

    split: ClassVar = {"w1": 2, "w2": 1}

    def __init__(self) -> None:
        super().__init__(w1=(EXPERTS, WIDTH, INSIDE), w2=(EXPERTS, INSIDE, WIDTH), gate=(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Any:
        scores = F.linear(x, self.gate)
        odds = (scores + 0.1 * torch.randn_like(scores)).softmax(-1)
        weights, chosen = odds.topk(CHOSEN, -1)
        y = self.each(x, weights, chosen, lambda e, x: F.gelu(x @ self.w1[e]) @ self.w2[e])
        return y, (odds.mean(0) * F.one_hot(chosen, EXPERTS).double().mean((0, 1))).sum()


class Remembering(Routed):
    """Which keeps that in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y, self.balance = super().forward(x)
        return y


class Beside(Routed):
    """With an expert beside the stacks that all rows take, of `features`, and a gate of its own."""

    split: ClassVar = {**Routed.split, "up.weight": 0, "up.bias": 0, "down.weight": 1}
    features = 2 * INSIDE

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, self.features), nn.Linear(self.features, WIDTH)
        self.weigh = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        y, balance = super().forward(x)
        return y + self.weigh(x).sigmoid() * self.down(F.silu(self.up(x))), balance


class BesideOthers(Beside):
    """Whose features fit those of the others in no way."""

    split: ClassVar = Routed.split
    features = 20


class Counting(Experts):
    """Which counts its features, and has a pair of matrices in its router that would be a region by themselves."""

    split: ClassVar = Routed.split

    def __init__(self) -> None:
        router = {"narrow": (64, WIDTH), "gate": (EXPERTS, 64)}
        super().__init__(**router, w1=(EXPERTS, WIDTH, INSIDE), w2=(EXPERTS, INSIDE, WIDTH))
        self.inner = INSIDE

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = F.linear(F.gelu(F.linear(x, self.narrow)), self.gate).softmax(-1).topk(CHOSEN, -1)
        h = torch.einsum("nd,edf->enf", x, self.w1).reshape(EXPERTS, -1, self.inner)
        return self.all(F.gelu(h) @ self.w2, weights, chosen)


class Residual(Routed):
    """With its norm, and what it was given added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y, balance = super().forward(self.norm(x))
        return x + y, balance


class Later(Product):
    """Which does something more as soon as somebody says so."""

    CHANGES: ClassVar = {
        "normalize": F.normalize,
        "clamp": lambda y: y.clamp(-0.01, 0.01),
        "tanh": torch.tanh,
        "add up": lambda y: 2 * y + y.flip(-1).reshape(y.shape).sum(-1, keepdim=True),
    }
    more = ""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = super().forward(x, weights, chosen)
        if self.more:
            weights.logsumexp(-1)  # what all ranks have alike
        return self.CHANGES[self.more](y) if self.more else y


_STACKS = (Linear, Product, Batched, Capacity, Taken, Rows, Lists, Apart)
_WITH_MORE = (Routed, Remembering, Beside, BesideOthers, Counting, Residual)
KINDS: dict[str, type[Experts]] = {kind.__name__: kind for kind in (*_STACKS, *_WITH_MORE)}


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


class Mixture(nn.Module):
    """Router and experts; what it returns beside rows balances experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.experts = (KINDS | {"Later": Later})[kind]()
        self.router = None if isinstance(self.experts, Routed | Counting) else Router()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, WIDTH)
        y = self.experts(rows) if self.router is None else self.experts(rows, *self.router(rows))
        y, balance = y if isinstance(y, tuple) else (y, getattr(self.experts, "balance", rows.new_zeros(())))
        return y.view_as(x), balance


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj, self.mixture = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Mixture(kind)

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (6, -1)).transpose(1, 2) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, more = self.mixture(self.norms[1](x))
        return x + y, balance + more


class Decoder(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x = self.table(batch[0])
        balance = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x, balance)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        return loss + 0.3 * balance

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(layout: Layout, kind: str) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    """The losses of six steps, and the shapes that the experts' parameters have on this rank."""
    torch.manual_seed(0)
    module, losses = Decoder(kind), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, callbacks=[losses])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*stays whole")
        trainer.fit(module, train_loader(layout, 3))
    return losses.seen, {
        name.partition(".experts.")[2]: tuple(p.shape)
        for name, p in module.named_parameters()
        if ".experts." in name and p.numel()
    }


CASES = list(itertools.product([TP2, FLAT, TP3, TP2_PP2, *ZEROS], KINDS))
USUAL = {
    TP2: set(KINDS),
    TP3: {"Product", "Lists", "Routed", "Beside", "Residual"},
    FLAT: {"Remembering", "Beside"},
    TP2_PP2: {"Rows", "Apart"},
    ZEROS[1]: {"Rows", "Routed"},
}
_BALANCED = {name for name, kind in KINDS.items() if issubclass(kind, Routed)}
_COUPLED = {TP2_PP2: {*_BALANCED, "Capacity"}, ZEROS[0]: {*_BALANCED, "Capacity"}}
_COUPLED[ZEROS[1]] = _COUPLED[ZEROS[0]]
"""What all rows of a batch decide: places, and what balances experts."""
CASES = [(layout, kind) for layout, kind in CASES if kind not in _COUPLED.get(layout, ())]


@pytest.mark.parametrize(
    ("layout", "kind"),
    fewer(CASES, extended=[(layout, kind) for layout, kind in CASES if kind not in USUAL.get(layout, ())]),
    ids=str,
)
def test_experts_of_any_kind_are_split(layout: Layout, kind: str) -> None:
    ((expected, whole),) = run_program(PLAIN, train, kind)
    results = run_program(layout, train, kind)
    of_batches = [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]
    assert len(of_batches) == 6 and of_batches == pytest.approx(expected, rel=1e-9), "the mean over the data ranks"
    split = KINDS[kind].split
    for _, shapes in results:
        assert layout.zero or shapes.keys() == whole.keys()
        for name, shape in shapes.items():
            own = tuple(n // layout.tp if at == split.get(name) else n for at, n in enumerate(whole[name]))
            assert layout.zero > 1 or shape == own


class Changed(Decoder):
    """Whose experts do something more from the second step on."""

    def __init__(self, more: str) -> None:
        super().__init__("Later")
        self.more = more

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        for block in self.blocks:
            block.mixture.experts.more = self.more if index else ""
        return super().training_step(batch, index)


def train_changed(layout: Layout, more: str) -> list[float]:
    module, losses = Changed(more), Losses()
    make_trainer(layout, strategy={"plan": "auto"}, max_epochs=1, callbacks=[losses]).fit(
        module, train_loader(layout, 3)
    )
    return losses.seen


def refuse(layout: Layout, more: str) -> str:
    with pytest.raises(RuntimeError) as refused:
        train_changed(layout, more)
    return str(refused.value)


@pytest.mark.parametrize("more", ["normalize", "clamp", "tanh"])
def test_what_experts_begin_to_do_later_is_noticed(more: str) -> None:
    for message in run_program(TP2, refuse, more):
        assert "0.mixture.experts` use" in message and f"`{more}`" in message and "test_stacks.py" in message


def test_what_adds_up_may_begin_later() -> None:
    (expected,) = run_program(PLAIN, train_changed, "add up")
    for found in run_program(TP2, train_changed, "add up"):
        assert found == pytest.approx(expected, rel=1e-9)
