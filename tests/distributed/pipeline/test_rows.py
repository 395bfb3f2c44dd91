"""Batches whose samples do not lie in dim 0 of their first tensor: pipelines would cut them at another place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from tests.distributed.training import PP2, Layout, make_trainer, run_program
from tests.ranks import RankError

SAMPLES = [torch.arange(i, i + 6) % 10 for i in range(12)]


def time_first(samples: list[Tensor]) -> Tensor:
    return pad_sequence([sample[: 3 + int(sample[0]) % 4] for sample in samples])


def weights_first(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"weights": torch.linspace(1, 2, 10, dtype=torch.float64), "tokens": torch.stack(samples)}


def packed(samples: list[Tensor]) -> dict[str, Tensor]:
    """As attention of varying lengths takes them: one after another, with where each begins."""
    lengths = torch.tensor([0, *(3 + int(sample[0]) % 4 for sample in samples)])
    rows = [sample[:length] for sample, length in zip(samples, lengths[1:].tolist(), strict=True)]
    return {"tokens": torch.cat(rows), "cu_seqlens": lengths.cumsum(0)}


class Held:
    """A graph, say: nothing that default collation makes."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def with_an_object(samples: list[Tensor]) -> dict[str, Any]:
    return {"tokens": torch.stack(samples), "graph": Held(torch.cat(samples))}


def with_a_table(samples: list[Tensor]) -> dict[str, Any]:
    return {"tokens": torch.stack(samples), "table": Held(torch.arange(10))}


def two_views(samples: list[Tensor]) -> Tensor:
    return torch.stack([view for sample in samples for view in (sample, sample.flip(0))])


class Lit(LightningModule):
    """Takes what its loader makes."""

    def __init__(self, collate: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.collate, self.losses = collate, []  # type: ignore[var-annotated]
        self.tok, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(nn.GRU(8, 8, batch_first=True) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch["tokens"] if isinstance(batch, dict) else torch.stack(batch) if type(batch) is list else batch
        tokens = tokens.t() if self.collate is time_first else tokens
        weights = batch.get("weights") if isinstance(batch, dict) else None
        x = self.tok(tokens)
        for block in self.blocks:
            x, _ = block(x)
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), weight=weights)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def in_a_dict(samples: list[Tensor]) -> dict[str, Any]:
    """Samples of one length stay apart."""
    return {"of": ([{"tokens": x} for x in samples], "set")}


class Splits(Lit):
    """Says itself how its batches are split."""

    def split_batch(self, batch: Tensor, microbatches: int) -> list[Tensor]:
        return list(batch.chunk(microbatches, dim=1))

    def loss_weight(self, batch: Tensor) -> float:
        return float(batch[1:].numel())


def _fit(layout: Layout, collate: Callable[[list[Tensor]], Any], kind: type[Lit] = Lit) -> list[float]:
    module = kind(collate)
    trainer = make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None, "microbatches": 2}}))
    trainer.fit(module, DataLoader(SAMPLES, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    return module.losses


@pytest.mark.parametrize(
    ("collate", "texts"),
    [
        (time_first, ["dim 1", "has as many entries as samples"]),
        (list, ["list", "as many entries as samples"]),
        (in_a_dict, ["in a list with as many entries as samples"]),
        (weights_first, ["another tensor", "10 rows"]),
        (packed, ["another tensor", "where each begins"]),
        (with_an_object, ["inside of an object", "(18,)"]),
    ],
    ids=["time first", "a list of samples", "in a dict", "class weights first", "packed", "in an object"],
)
def test_samples_elsewhere_than_in_rows_are_refused(collate: Any, texts: list[str]) -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _fit, collate)
    assert len(error.value.failures) == 2
    for failure in error.value.failures:
        assert all(text in failure.message for text in (*texts, "split_batch")), failure.message


def sparse(samples: list[Tensor]) -> dict[str, Tensor]:
    tokens = torch.stack(samples)
    return {"tokens": tokens, "graph": torch.eye(len(tokens)).to_sparse()}


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _fit, sparse)
    for failure in error.value.failures:
        assert re.search(r"shape \(\d, \d\) and layout torch.sparse_coo.*have to be dense", failure.message)


def test_a_split_of_its_own_is_not_doubted() -> None:
    (expected,) = run_program(Layout(plain=True), _fit, time_first, Splits)
    for losses in run_program(PP2, _fit, time_first, Splits):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("collate", [torch.stack, two_views, with_a_table])
def test_rows_that_are_samples_or_views_of_them(collate: Any) -> None:
    (expected,) = run_program(Layout(plain=True), _fit, collate)
    for losses in run_program(PP2, _fit, collate):
        assert losses == pytest.approx(expected, rel=1e-9)


class Likelihood(Metric):
    """Sums up, as metrics do, what a step may average."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.total += F.cross_entropy(logits, targets, reduction="sum").detach() + F.cross_entropy(logits, targets)

    def compute(self) -> Tensor:
        return self.total


class Addends(LightningModule):
    """A cross-entropy of marked positions, and something besides."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.logged = what, list[float]()
        self.nll = Likelihood()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, targets = batch
        y = self.net(x)
        loss = F.cross_entropy(y.flatten(0, 1), targets.flatten())
        self.log("main", loss)
        of_samples = (y.sum((1, 2)) - x.sum((1, 2))).square().mean()
        if self.what == "in place":  # in what was logged
            loss += of_samples
            return loss
        if self.what == "a metric":
            self.nll(y.flatten(0, 1), targets.flatten().clamp(min=0))
            return loss
        if self.what == "of samples":
            return loss + of_samples
        return 0.5 * loss if self.what == "a factor" else loss + self.net[4].weight.norm()

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["main"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _addends(layout: Layout, what: str, aligned: bool = False) -> tuple[list[str], list[float], list[Tensor]]:
    torch.manual_seed(2)
    x, targets = torch.randn(8, 5, 4, dtype=torch.float64), torch.randint(0, 3, (8, 5))
    targets[:, 3:] = -100
    if not aligned:
        targets[:2, 1:] = targets[4:6, 2:] = -100
    module = Addends(what)
    trainer = make_trainer(layout, strategy={"plan": None, "microbatches": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(x, targets), batch_size=4))
    said = [str(w.message) for w in caught if "the step adds" in str(w.message)]
    return said, module.logged, [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize(
    ("what", "warned"),
    [("of samples", True), ("in place", True), ("a factor", False), ("of weights", False), ("a metric", False)],
)
def test_what_is_added_to_a_loss_of_targets_is_warned_of(what: str, warned: bool) -> None:
    said = [text for texts, *_ in run_program(PP2, _addends, what) for text in texts]
    assert len(said) == warned and all("averages over different numbers (`cross_entropy`, `mean`)" in x for x in said)


@pytest.mark.parametrize(("what", "aligned"), [("in place", True), ("a metric", False)])
def test_what_is_logged_is_what_it_was_then(what: str, aligned: bool) -> None:
    ((_, logged, weights),) = run_program(Layout(plain=True), _addends, what, aligned)
    for _, found, held in run_program(PP2, _addends, what, aligned):
        assert found == pytest.approx(logged, abs=1e-12)
        assert all(any(x.shape == w.shape and torch.allclose(x, w, atol=1e-12) for w in weights) for x in held)
