"""Fits without a plan: the losses of one device, and nothing of the user's is used up by looking at a batch."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.ranks import RankError, run_ranks, run_reference
from tests.unit.auto_models import (
    HEADS,
    HIDDEN,
    Block,
    Conditioned,
    Fused,
    Joint,
    Model,
    OneOutput,
    Unnormed,
    ValueResidual,
)

QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Lit(LightningModule):
    """Counts what set-up must not touch."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.net, self.norm, self.data = Model(Fused, layers=2), nn.BatchNorm1d(HIDDEN), data
        self.asked, self.losses, self.seen = 0, [], []  # type: ignore[var-annotated]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["a"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (list, tuple)) else batch
        self.seen.append(ids.tolist())
        self.norm(self.net.tok(ids).flatten(0, 1))
        loss = self.net.step(ids) + nn.functional.dropout(torch.ones(8)).mean()
        self.log("loss", loss)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        self.asked += 1
        ids = torch.randint(0, 40, (24, 5), generator=torch.Generator().manual_seed(3))
        if self.data == "shuffled":
            order = torch.Generator().manual_seed(5)
            return DataLoader(TensorDataset(ids), batch_size=4, shuffle=True, generator=order)
        if self.data in ("iterable", "counting"):
            return DataLoader(Rows(ids) if self.data == "iterable" else Counting(ids), batch_size=4)
        if self.data == "own loader":
            return Counting(ids.split(4))
        return iter(ids.split(4)) if self.data == "once" else {"a": DataLoader(ids, batch_size=4)}


class Rows(IterableDataset[Tensor]):
    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.ids)


class Counting(IterableDataset[Tensor]):
    """Goes on where it was left."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows, self.given = rows, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.given < len(self.rows):
            self.given += 1
            yield self.rows[self.given - 1]


def fit(rank: int, world_size: int, data: str, strict: bool = False) -> dict[str, Any]:
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, strict=strict, summary=False)
    torch.manual_seed(0)
    module = Lit(data)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_steps": 5, **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, max_epochs=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    return {
        "losses": module.losses,
        "seen": module.seen,
        "asked": module.asked,
        "calls": module.net.calls,
        "mean": module.norm.running_mean,
        "split": sum(p.numel() for p in module.parameters()),
        "warnings": [str(warning.message) for warning in caught],
    }


def fit_one(data: str) -> dict[str, Any]:
    return fit(0, 1, data)


@pytest.mark.parametrize("data", ["shuffled", "iterable", "several loaders", "counting", "own loader"])
def test_a_fit_without_a_plan_is_that_of_one_device(data: str) -> None:
    expected = run_reference(fit_one, data)
    for found in run_ranks(2, fit, data):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for what in ("seen", "asked", "calls"):
            assert found[what] == expected[what], what
        torch.testing.assert_close(found["mean"], expected["mean"], rtol=0, atol=1e-9)
        assert found["split"] < 0.6 * expected["split"]


def test_data_that_comes_only_once_is_not_touched() -> None:
    expected = run_reference(fit_one, "once")
    found = run_ranks(2, fit, "once")
    assert found[0]["seen"] == expected["seen"]
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-9)
    assert any("no batch could be looked at" in text for text in found[0]["warnings"])
    assert found[0]["split"] < 0.6 * expected["split"], "its layers are split one by one, and gathered"


class Awkward(LightningModule):
    """Regions that pipeline units cut, a head by a function, and parameters asked for their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(40, HIDDEN)
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))
            for _ in range(3)
        )
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.tok(ids) + next(self.parameters()).new_zeros(())
        for feed_forward in self.feed_forwards:
            y = feed_forward(x)
            x = x + (y.value if isinstance(y, Boxed) else y)
        return nn.functional.cross_entropy(nn.functional.linear(x, self.tok.weight).flatten(0, 1), ids.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Boxed:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(Awkward):
    """Its blocks return objects that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forwards = Chain(*(InABox(block) for block in self.feed_forwards))


class Chain(nn.Sequential):
    """No list: what it does is its own."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x).value
        return x


class InABox(nn.Sequential):
    def forward(self, x: Tensor) -> Boxed:
        return Boxed(super().forward(x))


class Averaging(Awkward):
    """Its blocks compare their input with the average over all devices, and its step sends what each has made of it."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        for source in range(dist.get_world_size() if dist.is_initialized() else 0):
            made = self.feed_forwards[0](self.tok(ids)).detach().sum()
            dist.broadcast(made if dist.get_rank() == source else torch.zeros(()), source)
        return super().training_step(ids, batch_idx)

    def __init__(self) -> None:
        super().__init__()
        self.feed_forwards = nn.ModuleList(Centered(*block) for block in self.feed_forwards)


class Centered(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return super().forward(x - mean)


def fit_awkward(rank: int, world_size: int, kind: type[Awkward]) -> tuple[list[float], int]:
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=2, pp=2, microbatches=2, summary=False)
    torch.manual_seed(0)
    module = kind()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    ids = torch.randint(0, 40, (12, 5), generator=torch.Generator().manual_seed(3))
    Trainer(devices=world_size, strategy=strategy, **options).fit(module, DataLoader(ids, batch_size=4))
    return module.losses, sum(p.numel() for p in module.feed_forwards.parameters())


def fit_awkward_alone(kind: type[Awkward]) -> tuple[list[float], int]:
    return fit_awkward(0, 1, kind)


@pytest.mark.parametrize("kind", [Awkward, Boxing])
def test_what_is_found_suits_stages(kind: type[Awkward]) -> None:
    expected, size = run_reference(fit_awkward_alone, kind)
    found = run_ranks(4, fit_awkward, kind)
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-9)
    assert sum(own for _, own in found) < 1.2 * size, "cut over stages, and split over tensor ranks"


class Shifted(Fused):
    """Is given a module that all blocks use; what it makes of it lives until the garbage is collected."""

    def forward(self, x: Tensor, shift: nn.Module) -> Tensor:  # type: ignore[override]
        cycle: list[Any] = [shift(torch.arange(x.shape[1]))]
        cycle.append(cycle)
        return super().forward(x + cycle[0])


class Factorized(LightningModule):
    """Narrow embeddings, projected to a width that is also the number of positions, so that the projection looks like a
    head, which is gathered on demand; and an embedding that blocks call."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.position = nn.Embedding(40, 12), nn.Embedding(HIDDEN, 12)
        self.project, self.head = nn.Linear(12, HIDDEN), nn.Linear(HIDDEN, 40)
        self.blocks, self.shift = nn.ModuleList(Block(Shifted(), i) for i in range(2)), nn.Embedding(40, HIDDEN)
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.project(self.tok(ids) + self.position.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x, shift=self.shift)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Adapted(LightningModule):
    """Frozen layers with low-rank adapters, which drop out of the whole input, beside the features of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(40, HIDDEN), nn.Linear(HIDDEN, 40)
        self.blocks = nn.ModuleList(Block(Gate(), i) for i in range(2))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("first" in name or "second" in name)
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    on_train_batch_end = Factorized.on_train_batch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.drop = base, nn.Dropout(0.3)
        self.first = nn.Linear(base.in_features, 2, bias=False)
        self.second = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.second(self.first(self.drop(x)))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Adapter(nn.Linear(HIDDEN, 48)), Adapter(nn.Linear(HIDDEN, 48))
        self.down = nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Perceptron(LightningModule):
    """Drops out behind layers that read the batch itself, which has no gradient."""

    share = 1.0

    def __init__(self) -> None:
        super().__init__()
        drop = nn.Dropout(self.share)
        self.net = nn.Sequential(
            nn.Linear(6, 48), nn.ReLU(), drop, nn.Linear(48, 48), nn.ReLU(), drop, nn.Linear(48, 8)
        )
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(ids / 40), ids[:, 0] % 8)

    on_train_batch_end = Factorized.on_train_batch_end
    configure_optimizers = Adapted.configure_optimizers


class HalfPerceptron(Perceptron):
    share = 0.5


class Tangents(Perceptron):
    """Its step differentiates blocks forward, as flows of averages do, maps a function over tokens, and trains another
    list of blocks as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.usual = (
            nn.ModuleList(nn.Sequential(nn.Linear(16, 32), kind(), nn.Linear(32, 16)) for _ in range(2))
            for kind in (nn.Tanh, nn.GELU)
        )
        self.start, self.end = nn.Linear(6, 16), nn.Linear(16, 8)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        def flow(x: Tensor) -> Tensor:
            for block in self.inside:
                x = block(x)
            return self.end(x)

        x = self.start(ids / 40)
        for block in self.usual:
            x = block(x)
        x = x + torch.vmap(lambda row: row.softmax(0))(x)
        y, speed = torch.func.jvp(flow, (x,), (torch.ones_like(x),))
        return nn.functional.cross_entropy(y, ids[:, 0] % 8) + speed.square().mean()


class TangentsByHand(Tangents):
    """The same, without torch.func."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.start(ids / 40)
        for block in self.usual:
            x = block(x)
        with forward_ad.dual_level():
            y = forward_ad.make_dual(x, torch.ones_like(x))
            for block in self.inside:
                y = block(y)
            y, speed = forward_ad.unpack_dual(self.end(y))
        return nn.functional.cross_entropy(y, ids[:, 0] % 8) + speed.square().mean()


class Ensemble(Tangents):
    """Its step maps one block over the weights of several, which is given what learns."""

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.start(ids / 40)
        for block in self.usual:
            x = block(x)
        members = [dict(block.named_parameters()) for block in self.inside]
        stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
        first = self.inside[0]
        y = torch.func.vmap(lambda weights: torch.func.functional_call(first, weights, (x,)))(stacked)
        return nn.functional.cross_entropy(self.end(y.mean(0)), ids[:, 0] % 8) + y.var(0).mean()


class Factors(nn.Module):
    """A recommender in one module: tables of which one row has no gradient, bags with weights that learn, or in which a
    row doesn't count, and factors beside a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(40, 6, padding_idx=3), nn.Embedding(41, 6)
        self.bias, self.net = nn.Embedding(41, 8), nn.Sequential(nn.Linear(12, 22), nn.ReLU(), nn.Linear(22, 8))
        self.sums, self.most = nn.EmbeddingBag(40, 8, mode="sum"), nn.EmbeddingBag(40, 8, mode="max", padding_idx=5)
        self.means, self.weigh = nn.EmbeddingBag(40, 8, include_last_offset=True), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x, y = self.first(ids[:, :3]), self.second(ids[:, 3:] + 1)
        bags = self.sums(ids, per_sample_weights=self.weigh(ids / 40)) + self.most(ids)
        bags = bags + self.means(ids.flatten(), torch.arange(len(ids) + 1) * 6)
        return self.net(torch.cat([x, x * y], -1)).mean(1) + self.bias(ids).sum(1) + bags


class Recommender(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net = Factors()

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(ids), ids[:, 0] % 8)


class AdagradByHand(Perceptron):
    """Asks in its step for an optimizer that makes its states of the weights when it is made."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(40, 6), nn.Sequential(nn.Linear(6, 22), nn.ReLU(), nn.Linear(22, 8))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = nn.functional.cross_entropy(self.net(self.table(ids)).mean(1), ids[:, 0] % 8)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


def fit_adagrad(rank: int, world_size: int) -> tuple[list[float], int]:
    """The losses, and the rows of the table here."""
    found: list[AdagradByHand] = []

    def kind() -> Any:
        found.append(AdagradByHand())
        return found[0]

    return fit_losses(rank, world_size, kind), found[0].table.weight.shape[0]  # type: ignore[arg-type]


class Conditioning(Perceptron):
    """Layers that could be a row of what stands before them, and are a column of what stands behind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, HIDDEN)
        self.net = nn.Sequential(
            *(body for _ in range(2) for body in (Unnormed(), Conditioned())), nn.Linear(HIDDEN, 40)
        )

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(self.tokens(ids)).mean(1), ids[:, 0])


def splits(module: LightningModule) -> bool:
    """Whether it is split over ranks."""
    return "MegaTP" in type(module.trainer.strategy).__name__


class SubNormed(nn.Module):
    """A norm of its own before each layer that goes back to the block's width, as Magneto and BitNet have it;
    one of them without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.norm_of_heads, self.drop = nn.LayerNorm(HIDDEN), nn.Dropout(0.0)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(self.drop(self.norm_of_heads(y)))
        y = nn.functional.gelu(self.up(self.norm2(x)))
        return x + self.down(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6))


class Tokens(nn.Embedding):
    """With a constructor and a method of its own."""

    def __init__(self) -> None:
        super().__init__(40, HIDDEN)

    def scaled(self, ids: Tensor) -> Tensor:
        return self(ids) * HIDDEN**0.5


class Head(nn.Linear):
    """So has this one, which casts, too."""

    def scores(self, x: Tensor) -> Tensor:
        return self(x) / HIDDEN**0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Magneto(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = Tokens(), Head(HIDDEN, 40)
        self.net = nn.Sequential(*(SubNormed() for _ in range(2)))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        logits = self.head.scores(self.net(self.tokens.scaled(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())

    def on_train_start(self) -> None:
        layers = dict(self.named_modules())
        assert isinstance(self.tokens, Tokens) and isinstance(self.head, Head)
        sizes = [len(layer._parameters["weight"]) for layer in (self.tokens, self.head)]
        assert not splits(self) or sizes == [20, 20]
        kinds = {name: type(layers[f"net.1.{name}"]).__name__ for name in ("q", "k", "v", "out", "up", "down")}
        parts = {"out": "RowParallelLinear", "down": "RowParallelLinear"}
        expected = {name: parts.get(name, "ColumnParallelLinear") for name in kinds}
        assert not splits(self) or kinds == expected


class Streams(Perceptron):
    """Blocks of diffusion transformers: two streams that attend to each other, the last of which returns one, and
    blocks with one output layer for attention and MLP; then one that mixes earlier values into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, HIDDEN), nn.Linear(HIDDEN, 40)
        self.net = nn.ModuleList([Joint(), Joint(), Joint(returns_both=False)])
        self.single = nn.ModuleList([OneOutput(fused) for fused in (False, True)])
        self.mixing = nn.ModuleList([ValueResidual()])

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(ids)
        x, other = x[:, :4], x[:, 4:]
        for block in self.net[:2]:
            x, other = block(x, other)
        x = self.net[2](x, other)
        for block in self.single:
            x = block(x)
        x = self.mixing[0](x, x.unflatten(-1, (HEADS, -1)).transpose(1, 2))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, :4].flatten())

    def on_train_start(self) -> None:
        if not splits(self):
            return
        kinds = {name: type(child).__name__ for name, child in self.named_modules() if name.count(".") > 1}
        row, column = "RowParallelLinear", "ColumnParallelLinear"
        assert kinds["net.0.out"] == kinds["net.0.out2"] == kinds["net.2.out"] == row
        assert kinds["single.0.out"] == kinds["single.1.out"] == kinds["mixing.0.out"] == row
        assert kinds["net.0.q2"] == kinds["net.2.k2"] == kinds["single.1.all"] == kinds["mixing.0.v"] == column


class Graph(Perceptron):
    """Batches as the data set has them: edges name rows, and a number says how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        x = batch["x"]
        for body in self.net:
            found = x.new_zeros(batch["nodes"], 8).index_add(0, batch["target"], x[batch["source"]])
            x = x + body(found)
        return x.square().mean()

    def on_train_start(self) -> None:
        kinds = [type(layer).__name__ for layer in self.net.modules() if isinstance(layer, nn.Linear)]
        assert not splits(self) or kinds == ["ColumnParallelLinear", "RowParallelLinear"] * 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def train_dataloader(self) -> Any:
        return DataLoader(self.graphs(), batch_size=None)  # type: ignore[arg-type]

    def graphs(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(3)
        edges = torch.randint(0, 6, (3, 2, 6), generator=generator)
        rows = torch.randn(3, 6, 8, generator=generator, dtype=torch.float64)
        return [{"x": x, "source": a, "target": b, "nodes": 6} for x, (a, b) in zip(rows, edges, strict=True)]


class Packed(Graph):
    """A collator puts graphs one behind the other."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.graphs(), batch_size=1, collate_fn=lambda graphs: graphs[0])  # type: ignore[arg-type]


class FixedPoint(nn.Module):
    """An implicit layer: a leaf of its own, and a hook that solves for the gradient. Beside it a region."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + 0.3 * self.down(self.up(z).tanh()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(self.a(x).tanh())
        with torch.no_grad():
            z = self.step(self.step(torch.zeros_like(x), x), x)
        z = self.step(z, x)
        start = z.detach().requires_grad_()
        after = self.step(start, x)

        def solve(gradient: Tensor) -> Tensor:
            return torch.autograd.grad(after, start, gradient, retain_graph=True)[0] + gradient

        if z.requires_grad:
            z.register_hook(solve)
        return z


class Implicit(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.blocks = nn.Embedding(40, 16), nn.ModuleList(FixedPoint() for _ in range(2))
        self.net = nn.Sequential(nn.Linear(16, 8))

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.net(x.mean(1)), ids[:, 0] % 8)


def fit_losses(
    rank: int,
    world_size: int,
    kind: type[Factorized | Adapted | Averaging | Perceptron],
    sequence: bool = True,
    plan: Any = "auto",
) -> list[float]:
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, sequence_parallel=sequence, summary=False, plan=plan)
    torch.manual_seed(0)
    module = kind()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    ids = torch.randint(0, 40, (12, 6), generator=torch.Generator().manual_seed(3))
    gc.disable()
    try:
        loader = None if "train_dataloader" in vars(kind) else DataLoader(ids, batch_size=4)
        Trainer(devices=world_size, strategy=strategy, **options).fit(module, loader)
    finally:
        gc.enable()
    return module.losses


def fit_losses_alone(kind: type[Factorized | Adapted | Averaging | Perceptron]) -> list[float]:
    return fit_losses(0, 1, kind)


def test_features_gathered_on_demand_enter_sequence_regions() -> None:
    expected = run_reference(fit_losses_alone, Factorized)
    for losses in run_ranks(2, fit_losses, Factorized):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_tables_of_a_model_in_one_module() -> None:
    expected = run_reference(fit_losses_alone, Recommender)
    for tp in (2, 3):
        for losses in run_ranks(tp, fit_losses, Recommender):
            assert losses == pytest.approx(expected, rel=1e-9)


def test_states_that_an_optimizer_makes_at_once_are_no_use_of_weights() -> None:
    expected, _ = run_reference(fit_adagrad, 0, 1)
    for losses, rows in run_ranks(2, fit_adagrad):
        assert losses == pytest.approx(expected, rel=1e-9) and rows == 20


def test_projections_that_are_added_to_what_a_region_reads() -> None:
    expected = run_reference(fit_losses_alone, Conditioning)
    for losses in run_ranks(2, fit_losses, Conditioning):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", [Graph, Packed])
def test_a_batch_whose_first_rows_are_none_is_looked_at_as_a_whole(kind: type[Graph]) -> None:
    expected = run_reference(fit_losses_alone, kind)
    for losses in run_ranks(2, fit_losses, kind):
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sequence", [True, False])
def test_norms_between_pairs_of_layers(sequence: bool) -> None:
    expected = run_reference(fit_losses_alone, Magneto)
    for losses in run_ranks(2, fit_losses, Magneto, sequence):
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("ranks", "sequence"), [(2, True), (2, False), (3, True)])
def test_blocks_of_diffusion_transformers(ranks: int, sequence: bool) -> None:
    expected = run_reference(fit_losses_alone, Streams)
    for losses in run_ranks(ranks, fit_losses, Streams, sequence):
        assert len(losses) == 3 and losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("plan", ["auto", {"net.0": "column", "net.3": "row"}], ids=["auto", "by hand"])
def test_dropout_behind_layers_that_read_the_batch(plan: Any) -> None:
    expected = run_reference(fit_losses_alone, Perceptron)
    for losses in run_ranks(2, fit_losses, Perceptron, True, plan):
        assert losses == pytest.approx(expected, rel=1e-9), "nothing is left, on all devices"
    first, second = run_ranks(2, fit_losses, HalfPerceptron, True, plan)
    assert first == pytest.approx(second, abs=1e-12) and first != pytest.approx(expected, rel=1e-3)


def test_adapters_in_a_region_drop_out_the_same_on_all_ranks() -> None:
    expected = run_reference(fit_losses_alone, Adapted)
    for losses in run_ranks(2, fit_losses, Adapted, False):
        assert losses == pytest.approx(expected, rel=1e-9), "the masks of one device"
    first, second = run_ranks(2, fit_losses, Adapted, True)
    assert first == pytest.approx(second, abs=1e-12), "of tokens, each rank its own"


@pytest.mark.parametrize("kind", [Tangents, TangentsByHand])
def test_what_torch_func_runs_stays_whole(kind: type[Tangents]) -> None:
    expected = run_reference(fit_losses_alone, kind)
    for losses in run_ranks(2, fit_losses, kind):
        assert losses == pytest.approx(expected, rel=1e-12)
    with pytest.raises(RankError, match=r"MegaTPStrategy: a layer that the plan splits, .* under torch\.func"):
        run_ranks(2, fit_losses, kind, True, {"inside.*.0": "column", "inside.*.2": "row"})


def fit_ensemble(rank: int, world_size: int) -> tuple[list[float], int, int]:
    """The losses, and what a rank has of a mapped block and of a usual one."""
    found: list[Ensemble] = []

    def kind() -> Any:
        found.append(Ensemble())
        return found[0]

    losses = fit_losses(rank, world_size, kind)  # type: ignore[arg-type]
    mapped, usual = (sum(p.numel() for p in blocks.parameters()) for blocks in (found[0].inside, found[0].usual))
    return losses, mapped, usual


def test_a_step_that_maps_a_block_over_weights_is_looked_at() -> None:
    expected, whole, _ = run_reference(fit_ensemble, 0, 1)
    for losses, mapped, usual in run_ranks(2, fit_ensemble):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert (mapped, usual) == (whole, 2 * (16 * 16 + 16 + 16 * 16 + 16)), "the usual ones are split in the middle"


def test_blocks_that_ask_for_gradients_keep_their_tokens_whole() -> None:
    """Of tokens each rank would be given a part of them."""
    expected = run_reference(fit_losses_alone, Implicit)
    for losses in run_ranks(2, fit_losses, Implicit):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_blocks_that_communicate_are_probed_alone() -> None:
    """One rank looks at them, and nobody would answer."""
    expected = run_reference(fit_losses_alone, Averaging)
    for losses in run_ranks(2, fit_losses, Averaging, True):
        assert losses == pytest.approx(expected, rel=1e-9)


def evaluate(rank: int, world_size: int, what: str) -> tuple[Any, int]:
    class Evaluated(Lit):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("score", self.net.step(batch))

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net.step(batch)

    torch.manual_seed(0)
    module = Evaluated("list")
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, summary=False)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, **options)
    ids = torch.randint(0, 40, (8, 5), generator=torch.Generator().manual_seed(3))
    found = getattr(trainer, what)(module, DataLoader(ids, batch_size=4))
    return found, sum(p.numel() for p in module.parameters())


def evaluate_one(what: str) -> tuple[Any, int]:
    return evaluate(0, 1, what)


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_evaluation_of_a_fresh_module(what: str) -> None:
    expected, size = run_reference(evaluate_one, what)
    found, own = run_ranks(2, evaluate, what)[0]
    if what == "predict":
        torch.testing.assert_close(found, expected)
    else:
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
    assert own < 0.6 * size


def test_strict_raises_instead() -> None:
    with pytest.raises(RankError, match="no batch could be looked at"):
        run_ranks(2, fit, "once", True)


class ByHand(Lit):
    """Asks for optimizers and schedulers first; the second network comes after a step of the first one's."""

    def __init__(self) -> None:
        super().__init__("shuffled")
        self.automatic_optimization, self.other = False, Model(Fused, layers=2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        schedulers: Any = self.lr_schedulers()
        for optimizer, net in ((first, self.net), (second, self.other)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = net.step(batch[0])
            self.manual_backward(loss)
            self.losses.append(float(loss))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for scheduler in schedulers:
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.other)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(x, 0.5) for x in optimizers]


def fit_by_hand(rank: int, world_size: int) -> dict[str, Any]:
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, strict=True, summary=False)
    torch.manual_seed(0)
    module = ByHand()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(lr_scheduler|optimizer).step.*")
        Trainer(devices=world_size, strategy=strategy, **options).fit(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    return {"losses": module.losses, "split": sum(p.numel() for p in module.parameters()), "frozen": frozen}


def test_a_step_that_asks_for_optimizers_is_looked_at() -> None:
    expected = run_ranks(1, fit_by_hand)[0]
    for found in run_ranks(2, fit_by_hand):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["split"] < 0.6 * expected["split"]
        assert not found["frozen"]


class Grown(nn.Module):
    """A block that changes its own weights in its first forward, by what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.ready.item() == 0:
            with torch.no_grad():
                self.scale.mul_(0.5)
            self.ready = self.ready + 1
        return x + self.down(torch.relu(self.up(x))) * self.scale


class ChangesInPlace(LightningModule):
    """Its step is another one when it is called again: averages, a count, and weights that a block scales once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.student = nn.Sequential(Grown(), Grown()), nn.Parameter(torch.linspace(-1, 1, 8))
        self.teacher, self.older = (nn.Parameter(torch.ones(8), requires_grad=False) for _ in range(2))
        self.seen, self.losses = torch.zeros(()), []  # type: ignore[var-annotated]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += len(batch)
        self.teacher.data.mul_(0.9).add_(self.student.data, alpha=0.1)
        self.older.data = 0.5 * self.older.data + 0.5 * self.teacher.data
        difference = self.blocks(batch) + self.student - self.teacher - self.older
        loss = difference.square().mean() + self.seen
        self.losses.append(float(loss))
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(12, 8, generator=torch.Generator().manual_seed(3)), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_in_place(rank: int, world_size: int) -> dict[str, Any]:
    strategy: Any = "auto"
    if world_size > 1:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, summary=False)
    torch.manual_seed(0)
    module = ChangesInPlace()
    Trainer(accelerator="cpu", devices=world_size, strategy=strategy, precision="64-true", max_epochs=1, **QUIET).fit(
        module
    )
    kept = [module.seen, module.teacher, module.older, *(block.scale for block in module.blocks)]
    return {
        "losses": module.losses,
        "kept": [x.tolist() for x in kept],
        "split": sum(p.numel() for p in module.parameters()),
    }


def fit_in_place_on_one() -> dict[str, Any]:
    return fit_in_place(0, 1)


def test_what_a_step_changes_in_place_is_put_back_after_looking() -> None:
    expected = run_reference(fit_in_place_on_one)
    for found in run_ranks(2, fit_in_place):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for mine, theirs in zip(found["kept"], expected["kept"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)
        assert found["split"] < 0.6 * expected["split"]
