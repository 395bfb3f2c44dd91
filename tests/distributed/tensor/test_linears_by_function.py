"""Layers whose weights a step gives to `F.linear` instead of calling them, and weights that belong to no layer: split
like others, by every layout."""

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.crossing import crossed, fewer
from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program, train_loader

WIDTH, HEADS, VOCAB = 24, 6, 32
SHAPES: dict[str, dict[str, tuple[tuple[int, ...], int | None]]] = {
    "own bias": {
        "attention.qkv.weight": ((3 * WIDTH, WIDTH), 0),
        "attention.qkv.bias": ((3 * WIDTH,), 0),
        "attention.proj.weight": ((WIDTH, WIDTH), 1),
        "mlp.up.weight": ((4 * WIDTH, WIDTH), 0),
        "mlp.down.weight": ((WIDTH, 4 * WIDTH), 1),
    },
    "computed bias": {"attention.qkv.weight": ((3 * WIDTH, WIDTH), 0), "attention.qkv.bias": ((3 * WIDTH,), None)},
    "bare": {
        "attention.in_proj_weight": ((3 * WIDTH, WIDTH), 0),
        "attention.in_proj_bias": ((3 * WIDTH,), 0),
        "mlp.0.weight": ((4 * WIDTH, WIDTH), 0),
        "mlp.0.bias": ((4 * WIDTH,), 0),
        "mlp.0.b.weight": ((4 * WIDTH, 4), 0),
        "mlp.2.weight": ((WIDTH, 4 * WIDTH), 1),
        "mlp.2.bias": ((WIDTH,), None),
    },
    "matrices": {
        "attention.out_proj.weight": ((WIDTH, WIDTH), 1),
        "mlp.w1": ((WIDTH, 4 * WIDTH), 1),
        "mlp.b1": ((4 * WIDTH,), None),
        "mlp.w2": ((4 * WIDTH, WIDTH), 0),
    },
}
"""Of a block's parameters the shape, and along which dim it is split."""
FLAT, TP3 = Layout(tp=2, sequence=False), Layout(tp=3)
ZEROS = [Layout(tp=2, dp=2, zero=zero) for zero in (1, 2, 3)]
CASES = list(itertools.product([TP2, FLAT, TP3, TP2_PP2, *ZEROS], SHAPES))
USUAL = {
    TP2: set(SHAPES),
    FLAT: {"bare"},
    TP3: {"computed bias"},
    TP2_PP2: {"computed bias", "matrices"},
    ZEROS[0]: {"own bias"},
    ZEROS[2]: {"bare"},
}


class _Attention(nn.Module):
    """As in torchvision's Swin: both layers by their weights, in its second version without a bias of the keys."""

    def __init__(self, own_bias: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.own_bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), own_bias

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        bias = self.qkv.bias
        if not self.own_bias:
            bias = bias.clone()
            bias[d : 2 * d].zero_()
        qkv = F.linear(x, self.qkv.weight, bias).view(b, t, 3, HEADS, d // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        return F.linear(input=y, weight=self.proj.weight, bias=self.proj.bias)


class _Mlp(nn.Module):
    """A bias of its own beside a layer that has none, and a layer's left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH)
        self.shift, self.offset = nn.Parameter(torch.zeros(4 * WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.linear(x, self.up.weight, self.shift * 2))
        return x @ self.down.weight.T + self.offset


class _Packed(nn.Module):
    """As in open_clip, and in torch's own: the module's own parameters are the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Adapted(nn.Module):
    """As torchtune's LoRALinear: a frozen weight that belongs to no layer, beside two layers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.a, self.b = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.b(self.a(x))


class _Matrices(nn.Module):
    """As written by hand: (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH), nn.Parameter(torch.zeros(4 * WIDTH))
        self.w2, self.b2 = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(F.gelu(x @ self.w1 + self.b1), self.w2) + self.b2


class _Block(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        if body == "bare":
            self.attention: nn.Module = _Packed()
            self.mlp: nn.Module = nn.Sequential(_Adapted(WIDTH, 4 * WIDTH), nn.GELU(), _Adapted(4 * WIDTH, WIDTH))
        elif body == "matrices":
            self.attention, self.mlp = _Packed(), _Matrices()
        else:
            self.attention, self.mlp = _Attention(body == "own bias"), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class ByFunction(LightningModule):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(_Block(body) for _ in range(4)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x = self.blocks(self.table(batch[0]))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(layout: Layout, body: str) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    """The losses of six steps, and the shapes that a block's parameters have on this rank."""
    torch.manual_seed(0)
    module, losses = ByFunction(body), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, callbacks=[losses])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is kept whole")
        trainer.fit(module, train_loader(layout, 3))
    held = (held for block in module.blocks for held in block.named_parameters())  # of other stages there are none
    return losses.seen, {name: tuple(p.shape) for name, p in held if name in SHAPES[body]}


@pytest.mark.parametrize(
    ("layout", "body"),
    fewer(CASES, extended=[(layout, body) for layout, body in CASES if body not in USUAL.get(layout, ())]),
    ids=str,
)
def test_they_are_split(layout: Layout, body: str) -> None:
    ((expected, _),) = run_program(PLAIN, train, body)
    results = run_program(layout, train, body)
    of_batches = [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]
    assert len(of_batches) == 6 and of_batches == pytest.approx(expected, rel=1e-9), "the mean over the data ranks"
    for _, shapes in results:
        own = {
            name: tuple(n // layout.tp if at == dim else n for at, n in enumerate(shape))
            for name, (shape, dim) in SHAPES[body].items()
        }
        assert layout.zero > 1 or shapes == own


class Watched(ByFunction):
    """Which draws samples in a hook, has a copy of its blocks, and penalises weights."""

    def __init__(self, body: str, penalty: bool) -> None:
        super().__init__(body)
        self.penalty, self.seen = penalty, list[float]()

    def on_fit_start(self) -> None:
        self.teacher = [copy.deepcopy(self.blocks)]  # no module of this one

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        loss = loss + 0.1 * self.teacher[0](self.table(batch[0])).square().mean()
        if self.penalty:
            loss = loss + 0.01 * sum(p.square().sum() for p in self.blocks[0].parameters())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.seen.append(float(self.blocks(self.table(torch.arange(6).view(1, 6))).square().mean()))


def train_watched(layout: Layout, body: str, penalty: bool) -> list[float]:
    torch.manual_seed(0)
    module, losses = Watched(body, penalty), Losses()
    make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses]).fit(module, train_loader(layout, 3))
    return [*losses.seen, *module.seen]


@pytest.mark.parametrize(("body", "penalty"), crossed(list(SHAPES), [True, False], extended=[("own bias", False)]))
def test_hooks_copies_and_penalties_see_whole_weights(body: str, penalty: bool) -> None:
    (expected,) = run_program(PLAIN, train_watched, body, penalty)
    for seen in run_program(TP2, train_watched, body, penalty):
        assert len(seen) == 6 and seen == pytest.approx(expected, rel=1e-9)


class Tied(ByFunction):
    """Whose output layer is the table of its embeddings."""

    def __init__(self, way: str) -> None:
        super().__init__("own bias")
        self.way, self.head, self.shift = way, None, nn.Parameter(torch.zeros(VOCAB))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        scores = self.scores(self.blocks(self.table(batch[0])), self.table.weight)
        self.log("right", (scores.argmax(-1) == batch[1]).float().mean())
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    def scores(self, x: Tensor, table: Tensor) -> Tensor:
        if self.way == "linear":
            return F.linear(x, table, self.shift)
        if self.way == "product":
            return x @ table.to(x.dtype).T + self.shift
        if self.way == "transpose":
            return torch.matmul(x, torch.transpose(table, 0, 1))
        return torch.einsum("bth,vh->btv", x, table)  # gathers the table


def train_tied(layout: Layout, way: str) -> tuple[list[float], int]:
    """Losses, and rows of the table on this rank."""
    torch.manual_seed(0)
    module, losses = Tied(way), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, callbacks=[losses])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is kept whole")
        trainer.fit(module, train_loader(layout, 3))
    return losses.seen, module.table.weight.shape[0] if module.table is not None else 0


@pytest.mark.parametrize(
    ("way", "layout"),
    crossed(["linear", "product", "transpose", "einsum"], [TP2, Layout(tp=3, sequence=False), TP2_PP2, ZEROS[0]]),
)
def test_tables_are_split_where_they_are_output_layers(layout: Layout, way: str) -> None:
    ((expected, _),) = run_program(PLAIN, train_tied, way)
    results = run_program(layout, train_tied, way)
    of_batches = [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]
    assert of_batches == pytest.approx(expected, rel=1e-9)
    if layout.pp == 1 and not layout.zero:
        assert sum(rows for _, rows in results) == VOCAB * (layout.tp if way == "einsum" else 1)
