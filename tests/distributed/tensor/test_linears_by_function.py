"""Layers whose weights a step gives to `F.linear` instead of calling them, and weights that belong to no layer: split
like others, by every layout."""

import contextlib
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
from tests.distributed.training import (
    PLAIN,
    TP2,
    TP2_PP2,
    Layout,
    Losses,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.ranks import RankError

WIDTH, HEADS, VOCAB = 24, 6, 32
SIZE = WIDTH // HEADS
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
    "containers": {
        **{f"attention.w.{name}": ((WIDTH, WIDTH), dim) for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1))},
        "attention.w.b": ((WIDTH,), 0),
        "mlp.w.0": ((WIDTH, 4 * WIDTH), 1),
        "mlp.w.1": ((4 * WIDTH,), None),
        "mlp.w.2": ((4 * WIDTH, WIDTH), 0),
    },
    "einsum": {
        "qk": ((2, HEADS, WIDTH, SIZE), 1),
        "v": ((WIDTH, HEADS, SIZE), 1),
        "shift": ((HEADS, SIZE), None),
        "o": ((HEADS, SIZE, WIDTH), 0),
        "up": ((4 * WIDTH, WIDTH), 0),
        "down": ((WIDTH, 4 * WIDTH), 1),
    },
    "fused": {
        "attention.qkv_w": ((3, WIDTH, WIDTH), 1),
        "attention.qkv_b": ((3, WIDTH), None),
        "attention.proj_w": ((WIDTH, HEADS, SIZE), 1),
        "mlp.up.weight": ((4 * WIDTH, WIDTH), 0),
    },
}
"""Of a block's parameters the shape, and along which dim it is split."""
FLAT, TP3 = Layout(tp=2, sequence=False), Layout(tp=3)
ZEROS = [Layout(tp=2, dp=2, zero=zero) for zero in (1, 2, 3)]
CASES = list(itertools.product([TP2, FLAT, TP3, TP2_PP2, *ZEROS], SHAPES))
USUAL = {
    TP2: set(SHAPES),
    FLAT: {"einsum"},
    TP3: {"computed bias"},
    TP2_PP2: {"matrices", "containers"},
    ZEROS[0]: {"fused"},
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
        down = self.down.weight.T
        assert (
            down.shape == (4 * WIDTH, WIDTH) and down.T.shape == (WIDTH, 4 * WIDTH) and down.dtype == self.shift.dtype
        )
        return x @ down + self.offset


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


class _HeldAttention(nn.Module):
    """Whose weights are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterDict({name: nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for name in "qkvo"})
        self.w["b"] = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, self.w[name], self.w["b"] if name == "q" else None) for name in "qkv")
        q, k, v = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ self.w["o"].T


class _HeldMlp(nn.Module):
    """Whose weights are in a list, as `_Matrices` has them."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(_Matrices().parameters())

    def forward(self, x: Tensor) -> Tensor:
        up, up_bias, down, down_bias = self.w
        return F.gelu(x @ up + up_bias) @ down + down_bias


class _FusedAttention(nn.Module):
    """Whose weights have a dim for what is fused, or for the heads, and become matrices first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w, self.qkv_b = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 5), nn.Parameter(torch.zeros(3, WIDTH))
        self.proj_w = nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 5)

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.qkv_w.view(3 * WIDTH, WIDTH), self.qkv_b.flatten())
        q, k, v = qkv.view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return y @ self.proj_w.flatten(1).T


class _Block(nn.Module):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        if body == "bare":
            self.attention: nn.Module = _Packed()
            self.mlp: nn.Module = nn.Sequential(_Adapted(WIDTH, 4 * WIDTH), nn.GELU(), _Adapted(4 * WIDTH, WIDTH))
        elif body == "matrices":
            self.attention, self.mlp = _Packed(), _Matrices()
        elif body == "fused":
            self.attention, self.mlp = _FusedAttention(), _Mlp()
        elif body == "containers":
            self.attention, self.mlp = _HeldAttention(), _HeldMlp()
        else:
            self.attention, self.mlp = _Attention(body == "own bias"), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class _Einsums(nn.Module):
    """A block whose weights have a dim for the heads. By itself its attention would be a sum over them, as a stack of
    experts is over what is inside of these."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qk = nn.Parameter(torch.randn(2, HEADS, WIDTH, SIZE) / WIDTH**0.5)
        self.v, self.shift = nn.Parameter(torch.randn(WIDTH, HEADS, SIZE) / 5), nn.Parameter(torch.zeros(HEADS, SIZE))
        self.o = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k = torch.einsum("b s d, c h d e -> c b h s e", h, self.qk)
        v = torch.einsum("...d,dhe->...he", h, self.v) + self.shift
        attended = torch.einsum("bhse,bhte->bhst", q, k).div(SIZE**0.5).softmax(-1)
        x = x + torch.einsum("bhst,bthe,hed->bsd", attended, v, self.o)
        h = F.gelu(torch.einsum("bsd,fd->bsf", self.norms[1](x), self.up))
        return x + torch.einsum("of,bsf->bso", self.down, h)


class ByFunction(LightningModule):
    def __init__(self, body: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(_Einsums() if body == "einsum" else _Block(body) for _ in range(4)))

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


class Halves(ByFunction):
    """Whose blocks take a weight of a dict in halves, beside a table that belongs to no block."""

    def __init__(self) -> None:
        super().__init__("own bias")
        self.blocks, self.places = (
            nn.Sequential(*(_Halved() for _ in range(2))),
            nn.Parameter(torch.zeros(VOCAB, WIDTH)),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) + self.places.square().mean()


class _Halved(_Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterDict({"gated": nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / WIDTH**0.5)})

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (F.linear(x, half) for half in self.w["gated"].chunk(2))
        return x + super().forward(gate.sigmoid() * up)


def train_halves(layout: Layout, strict: bool) -> tuple[list[float], list[str], str]:
    """The losses, warnings about weights, and what is said at set-up of what stays whole."""
    torch.manual_seed(0)
    module, losses = Halves(), Losses()
    strategy = {"plan": "auto", "strict": strict}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[losses])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train_loader(layout, 3))
    said = [str(x.message) for x in caught if "stays whole" in str(x.message)]
    if layout.plain:
        return losses.seen, said, ""
    from lightning_megatp.strategy.report import memory_remarks

    return losses.seen, said, "\n".join(memory_remarks(trainer.strategy.parallel, trainer.strategy.mesh))


WHY = "its code uses it otherwise than as the weight of one linear layer (`chunk`)"


def test_what_stays_whole_is_said() -> None:
    ((expected, _, _),) = run_program(PLAIN, train_halves, False)
    results = run_program(TP2, train_halves, False)
    assert results[0][1] == [f"MegaTPStrategy: `blocks.0.w.gated` (and 1 more) stays whole: {WHY}"]
    for losses, _, remarks in results:
        assert losses == pytest.approx(expected, rel=1e-9)
        assert f"blocks.*.w.gated (2 of them, {2 * WIDTH * WIDTH:,} each): {WHY}" in remarks
        assert f"places ({VOCAB * WIDTH:,}): it belongs to no layer, and to no block" in remarks


def test_strict_raises_for_weights_of_no_layer() -> None:
    with pytest.raises(RankError, match=r"blocks\.0\.w\.gated` \(and 1 more\) stays whole: .* \(strict=True\)"):
        run_program(TP2, train_halves, True)


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


class _TiedNet(nn.Module):
    """Whose output layer is the table of its embeddings."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table, self.shift = way, nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.zeros(VOCAB))
        self.blocks = nn.Sequential(*(_Block("own bias") for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x, table = self.blocks(self.table(ids)), self.table.weight
        if self.way == "linear":
            return F.linear(x, table, self.shift)
        if self.way == "product":
            return x @ table.to(x.dtype).T + self.shift
        if self.way == "transpose":
            return torch.matmul(x, torch.transpose(table, 0, 1))
        return torch.einsum("bth,vh->btv", x, table)


class Tied(LightningModule):
    """Which scores tokens in a hook, too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.net, self.seen = _TiedNet(way), list[int]()
        self.calls = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        scores = self.net(batch[0])
        self.log("right", (scores.argmax(-1) == batch[1]).float().mean())
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    def on_train_epoch_end(self) -> None:
        if self.calls:
            with torch.no_grad():
                self.seen += self.net(torch.arange(6).view(1, 6)).argmax(-1).flatten().tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class TiedOutside(Tied):
    """Whose output layer is code around the modules, which a hook may call as well: the table stays whole."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        scores = F.linear(self.net.blocks(self.net.table(batch[0])), self.net.table.weight)
        return F.cross_entropy(scores.flatten(0, 1), batch[1].flatten())

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            x = self.net.blocks(self.net.table(torch.arange(6).view(1, 6)))
            self.seen += F.linear(x, self.net.table.weight).argmax(-1).flatten().tolist()


def train_tied(layout: Layout, way: str) -> tuple[list[float], list[int], int]:
    """Losses, tokens that a hook found, and rows of the table on this rank."""
    torch.manual_seed(0)
    module, losses = TiedOutside(way) if way == "outside" else Tied(way), Losses()
    module.calls = layout.pp == 1
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, callbacks=[losses])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(is kept whole|holds a part)")
        trainer.fit(module, train_loader(layout, 3))
    return losses.seen, module.seen, module.net.table.weight.shape[0] if layout.pp == 1 else VOCAB


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("linear", TP2),
        ("product", Layout(tp=3, sequence=False)),
        ("transpose", FLAT),
        ("outside", FLAT),
        ("einsum", TP2),
        ("einsum", ZEROS[0]),
        ("linear", TP2_PP2),
    ],
    ids=str,
)
def test_tables_are_split_where_they_are_output_layers(layout: Layout, way: str) -> None:
    ((expected, tokens, _),) = run_program(PLAIN, train_tied, way)
    results = run_program(layout, train_tied, way)
    of_batches = [sum(losses) / len(results) for losses in zip(*(losses for losses, _, _ in results), strict=True)]
    assert of_batches == pytest.approx(expected, rel=1e-9)
    split = layout.pp == 1 and not layout.zero and way != "outside"
    for _, found, rows in results:
        assert layout.pp > 1 or found == tokens
        assert layout.zero or abs(rows - (VOCAB / layout.tp if split else VOCAB)) < 1


BY_HAND = {
    **{"table": "vocab", "proj": "column_gather", "conv": "column_gather"},
    **{"blocks.*.up": "column", "blocks.*.down": "row"},
}


class Beside(LightningModule):
    """Whose steps use weights of layers, which are called, by function as well: outside of their regions, and of each
    other. A plan by hand splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.proj = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks, self.head = nn.Sequential(*(_Called() for _ in range(2))), nn.Linear(WIDTH, VOCAB)
        self.conv, self.seen = nn.Conv1d(WIDTH, WIDTH, 5), list[float]()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x = self.proj(self.table(batch[0]))
        loss = F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), batch[1].flatten())
        loss = loss + 0.1 * F.linear(x, self.blocks[0].up.weight).square().mean()
        loss = loss + 0.1 * (x.repeat(1, 1, 4) @ self.blocks[0].down.weight.T).square().mean()
        rows, taps = self.conv.weight.transpose(0, 1)[:3], self.conv.weight.transpose(1, 2)[:, 0]  # no matrix
        loss = loss + 0.1 * (rows.square().sum() + taps.sum() + self.conv(x.mT).square().mean())
        return loss + 0.01 * F.linear(self.table.weight, self.proj.weight).square().sum()

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x = self.table(batch[0])
        self.seen.append(float(F.linear(x, self.blocks[1].up.weight, self.blocks[1].up.bias).square().mean()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class _Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def train_beside(layout: Layout, plan: Any) -> list[float]:
    torch.manual_seed(0)
    module, losses = Beside(), Losses()
    trainer = make_trainer(layout, strategy={"plan": plan}, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 1))
    return [*losses.seen, *module.seen]


@pytest.mark.parametrize("plan", [BY_HAND, "auto"], ids=["by hand", "auto"])
def test_weights_by_function_outside_of_their_regions(plan: Any) -> None:
    (expected,) = run_program(PLAIN, train_beside, plan)
    for seen in run_program(TP2, train_beside, plan):
        assert len(seen) >= 5 and seen == pytest.approx(expected, rel=1e-9)


class Apart(ByFunction):
    """Whose hook calls a part of a block, what two blocks share, and a block with whole parameters; whose blocks copy
    themselves in their own way."""

    def __init__(self) -> None:
        super().__init__("own bias")
        self.blocks = nn.Sequential(*(_CopiesItself("own bias") for _ in range(2)))
        self.blocks[1].mlp = self.blocks[0].mlp = _Matrices()
        self.seen: list[float] = []

    def on_fit_start(self) -> None:
        self.teacher = [copy.deepcopy(self.blocks)]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss + 0.1 * self.teacher[0](self.table(batch[0])).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        x = torch.linspace(-1, 1, 6 * WIDTH, dtype=torch.float64).view(1, 6, WIDTH)
        whole = getattr(self.trainer.strategy, "whole_parameters", contextlib.nullcontext)
        with torch.no_grad():
            called = [self.blocks[0].mlp(x), self.blocks[1].attention(x), self.blocks[1](x)]
            with whole():
                called.append(self.blocks[0].mlp(x))
        self.seen += [float(y.square().mean()) for y in called]


class _CopiesItself(_Block):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def train_apart(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module, losses = Apart(), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3))
    return [*losses.seen, *module.seen]


@pytest.mark.parametrize("layout", [TP2, FLAT], ids=str)
def test_parts_of_blocks_that_hooks_call_and_blocks_that_copy_themselves(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, train_apart)
    for seen in run_program(layout, train_apart):
        assert len(seen) == 15 and seen == pytest.approx(expected, rel=1e-9)


class InHalf(ByFunction):
    def __init__(self) -> None:
        super().__init__("own bias")
        self.seen: list[str] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        block, x = self.blocks[0], self.table(batch[0])
        made = [F.linear(x, block.attention.qkv.weight, block.attention.qkv.bias), block.attention(x), block.mlp(x)]
        made.append(F.linear(x.repeat(1, 1, 4), block.mlp.down.weight, block.mlp.offset))
        self.seen = [str(y.dtype) for y in made]
        return super().training_step(batch, index)


def train_in_half(layout: Layout) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    module, losses = InHalf(), Losses()
    make_trainer(layout, strategy={"plan": "auto"}, precision="bf16-mixed", callbacks=[losses]).fit(
        module, train_loader(layout, 2)
    )
    return losses.seen, module.seen


def test_autocast_is_followed() -> None:
    ((expected, dtypes),) = run_program(PLAIN, train_in_half)
    for losses, found in run_program(TP2, train_in_half):
        assert found == dtypes and losses == pytest.approx(expected, rel=2e-3), "rounding of bfloat16: 2^-9"
