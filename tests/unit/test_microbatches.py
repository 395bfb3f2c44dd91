"""How batches become microbatches, and what microbatches gave becomes a batch's."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.batches.split import batch_size, check_columns, split_batch
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.loss.weighing import BatchLoss
from lightning_megatp.pipeline.merge import Merge
from lightning_megatp.snapshots.leftovers import Attributes

Pair = collections.namedtuple("Pair", ["x", "rest"])


@dataclasses.dataclass
class Record:
    x: Tensor
    tags: list[str]


@dataclasses.dataclass
class OfOneSize:
    """As a tensorclass: its tensors have as many rows as it was made with."""

    x: Tensor
    rows: int = 4

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and len(value) != getattr(self, "rows", len(value)):
            raise RuntimeError("batch dimension mismatch.")
        super().__setattr__(name, value)


@dataclasses.dataclass
class Checked:
    """As anomalib's batches."""

    x: Tensor
    tags: list[str]

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, (Tensor, list)):
            raise TypeError(f"{name} is {value}")
        super().__setattr__(name, value)


def _plain(value: Any) -> Any:
    """Tensors as lists, to compare."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(vars(value)) if dataclasses.is_dataclass(value) else value


X = torch.arange(3)


@pytest.mark.parametrize(
    ("batch", "first", "last"),
    [
        (X, [0, 1], [2]),
        ([X, X + 1], [[0, 1], [1, 2]], [[2], [3]]),
        ([X, [X, X, X]], [[0, 1], [[0, 1]] * 3], [[2], [[2]] * 3]),
        ({"x": X, "s": ["a", "b", "c"]}, {"x": [0, 1], "s": ["a", "b"]}, {"x": [2], "s": ["c"]}),
        ({"x": X, "l": [[1], [2, 3], [4]]}, {"x": [0, 1], "l": [[1], [2, 3]]}, {"x": [2], "l": [[4]]}),
        ((X, [{"b": X}, {"b": X[:1]}, {"b": X}]), [[0, 1], [{"b": [0, 1, 2]}, {"b": [0]}]], [[2], [{"b": [0, 1, 2]}]]),
        (Pair(X, (None, 7, "s", torch.tensor(5))), [[0, 1], [None, 7, "s", 5]], [[2], [None, 7, "s", 5]]),
        (Record(X, ["a", "b", "c"]), {"x": [0, 1], "tags": ["a", "b"]}, {"x": [2], "tags": ["c"]}),
        (Checked(X, ["a", "b", "c"]), {"x": [0, 1], "tags": ["a", "b"]}, {"x": [2], "tags": ["c"]}),
        ([X, torch.zeros(2)], [[0, 1], [0, 0]], [[2], [0, 0]]),
        ({"x": X, "l": [X[:1], X, X[:2]]}, {"x": [0, 1], "l": [[0], [0, 1, 2]]}, {"x": [2], "l": [[0, 1]]}),
        ((X, list(X)), [[0, 1], [0, 1]], [[2], [2]]),
        ((X, ("a", "b", "c"), ("a", X, 1)), [[0, 1], ["a", "b"], ["a", [0, 1], 1]], [[2], ["c"], ["a", [2], 1]]),
        ((X, ({"b": X}, {"b": X[:1]}, {})), [[0, 1], [{"b": [0, 1, 2]}, {"b": [0]}]], [[2], [{}]]),
        (
            (X, ({"b": X}, {"c": X}, {})),
            [[0, 1], [{"b": [0, 1]}, {"c": [0, 1]}, {}]],
            [[2], [{"b": [2]}, {"c": [2]}, {}]],
        ),
        (({"b": X}, {"c": X[:1]}, {}), [{"b": [0, 1]}, {"c": [0]}, {}], [{"b": [2]}, {"c": [0]}, {}]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_split(batch: Any, first: Any, last: Any) -> None:
    parts = split_batch(batch, 2)
    assert [_plain(part) for part in parts] == [first, last]
    assert all(type(part) is type(batch) for part in parts)
    assert len(split_batch(batch, 8)) == 3, "not more microbatches than rows"


def test_what_can_not_be_split() -> None:
    assert split_batch("text", 1) == ["text"]
    with pytest.raises(ValueError, match="split_batch"):
        split_batch(["a", "b"], 2)
    with pytest.raises(ValueError, match=r"\(OfOneSize\) can't be made anew .* mismatch\. To split it, define"):
        split_batch(OfOneSize(torch.zeros(4, 2)), 2)


@pytest.mark.parametrize(
    "batch", [Record([X, X[:2]], [0, 1]), [X[:1], X], ([{"x": X, "n": 1}, {"x": X[:1], "n": 0}], X[:2])], ids=str
)
def test_samples_of_different_lengths_are_not_taken_for_columns(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"different lengths.*`split_batch"):
        split_batch(batch, 2)
    assert batch_size(batch) == 2


ROWS = {n: torch.randn(n, 3) for n in (2, 3, 4)}


@pytest.mark.parametrize(
    "constant",
    [
        ["a", "b", "c", "d"],
        ("a", "b", "c", "d"),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        {"inner": [0.1, 0.2, 0.3, 0.4]},
    ],
    ids=["list", "tuple", "tensor", "inner"],
)
def test_a_column_that_only_looks_like_rows_is_refused(constant: Any) -> None:
    batches: dict[int, Any] = {n: (ROWS[n], ROWS[n] + 1, constant) for n in (2, 3)}
    with pytest.raises(ValueError, match="has 4 rows, and a column of 4 entries however many samples it is made of"):
        check_columns(batches, (ROWS[4], ROWS[4], constant))
    check_columns(batches, (ROWS[3], ROWS[3], constant))
    check_columns({n: (ROWS[n], ["a name"]) for n in (2, 3)}, (ROWS[3][:1], ["a name"]))  # one sample is not cut


@pytest.mark.parametrize(
    "make",
    [
        lambda n: {"x": ROWS[n], "size": (8, 8), "names": ["name"] * n, "pair": [ROWS[n], ROWS[n]]},
        lambda n: [ROWS[n], ("text",) * n, torch.zeros(())],
        lambda n: {"x": ROWS[n], "weights": torch.ones(5)},
    ],
)
def test_columns_that_grow_and_tables_of_other_sizes_are_taken(make: Any) -> None:
    check_columns({n: make(n) for n in (2, 3)}, make(2))


def test_merge() -> None:
    parts = [
        {"loss": torch.tensor(1.0), "y": torch.zeros(2, 3), "s": ["a"], "mean": 1.0, "ok": True, "pair": Pair(X, 1.0)},
        {"loss": torch.tensor(4.0), "y": torch.ones(1, 3), "s": ["b"], "mean": 4.0, "ok": False, "pair": Pair(X, 4.0)},
    ]
    merged = Merge([2.0, 1.0], [2, 1]).of(parts)
    assert (float(merged["loss"]), merged["mean"], merged["ok"], merged["s"]) == (2.0, 2.0, False, ["a", "b"])
    assert merged["y"].shape == (3, 3)
    assert merged["pair"].x.tolist() == [0, 1, 2, 0, 1, 2] and merged["pair"].rest == 2.0
    record = Merge([1.0, 1.0], [3, 3]).of([Record(X, ["a"]), Record(X, ["b"])])
    assert record.tags == ["a", "b"] and len(record.x) == 6


def test_lists_of_a_few_entries_are_no_lists_of_rows() -> None:
    pairs = [[torch.ones(4, 3) * i, torch.tensor([i] * 4)] for i in range(2)]
    predictions, targets = Merge([1.0, 1.0], [4, 4]).of(pairs)
    assert predictions.shape == (8, 3) and targets.tolist() == [0] * 4 + [1] * 4
    losses = [[torch.tensor(1.0), torch.tensor(2.0)], [torch.tensor(4.0), torch.tensor(2.0)]]
    counts = {id(loss): count for part, count in zip(losses, (2.0, 1.0), strict=True) for loss in part}
    assert Merge([1.0, 1.0], [4, 4], counts).of(losses) == [2.0, 2.0]
    boxes = [[torch.zeros(4, 2), torch.ones(3, 2)], [torch.zeros(1, 2), torch.ones(2, 2)]]
    assert [len(x) for x in Merge([1.0, 1.0], [4, 4]).of(boxes)] == [4, 3, 1, 2]
    with pytest.warns(UserWarning, match=r"a list \(`pair`\) of 2 tensors for 2 rows, .* joined. .* a tuple or a dict"):
        assert len(Merge([1.0, 1.0], [2, 2]).of([{"pair": [torch.ones(2), torch.ones(2)]}] * 2)["pair"]) == 4


def test_whole_numbers_are_counts() -> None:
    parts = [
        {"correct": torch.tensor(3), "n": 8, "classes": 10, "batch_idx": 4, "flag": torch.tensor(True), "sum": 1.5},
        {"correct": torch.tensor(5), "n": 8, "classes": 10, "batch_idx": 4, "flag": torch.tensor(True), "sum": 2.5},
    ]
    merge = Merge([1.0, 1.0], [4, 4])
    found = {key: float(value) for key, value in merge.of(parts).items()}
    assert found == {"correct": 8, "n": 16, "classes": 10, "batch_idx": 4, "flag": 1, "sum": 2}
    with pytest.warns(UserWarning, match=r"`test_step`.* added up, .* \(`correct`, `n`\) and others .*`sum`"):
        merge.warn("test_step")


@pytest.mark.parametrize(
    ("shapes", "rows", "merged"),
    [
        ([(5, 2, 3), (5, 2, 3)], [2, 2], (5, 4, 3)),
        ([(6, 2, 4), (6, 3, 4)], [2, 3], (6, 5, 4)),
        ([(6, 4), (9, 4)], [2, 3], (15, 4)),
        ([(2, 2), (2, 2)], [2, 2], (4, 2)),
        ([(1, 1), (1, 1)], [1, 1], (2, 1)),
        ([(2, 7, 7), (2, 5, 5)], [2, 2], None),
    ],
)
def test_rows_are_found_where_they_are(shapes: list[Any], rows: list[int], merged: Any) -> None:
    found = Merge([1.0, 1.0], rows).of([torch.zeros(shape) for shape in shapes])
    assert [x.shape for x in found] == shapes if merged is None else found.shape == merged


def test_rows_that_may_be_along_two_dims_are_said() -> None:
    with pytest.warns(UserWarning, match=r"shape \(6, 2\) for 2 rows.* along dim 0\. If dim 1 are the rows"):
        assert Merge([1.0, 1.0], [2, 2]).of([torch.zeros(6, 2)] * 2).shape == (12, 2)


def test_what_no_dim_of_is_rows_is_averaged() -> None:
    with pytest.warns(UserWarning, match=r"of shape \(3,\) for 2 rows, which are in none of its dims"):
        merged = Merge([3.0, 1.0], [2, 2]).of([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 4.0, 5.0])])
    assert merged.tolist() == [1.5, 2.5, 3.5]


def _weight(averages: Averages, loss: Any, rows: int = 4) -> float:
    batch = BatchLoss([rows], torch.device("cpu"))
    batch.add(0, loss, averages, None)
    return float(batch.weights())


def test_targets_are_counted() -> None:
    logits, targets = torch.randn(4, 5, requires_grad=True), torch.tensor([1, -100, 3, -100])
    with Averages() as twice:
        loss = F.cross_entropy(logits, targets) + nn.CrossEntropyLoss()(logits, targets)
    assert _weight(twice, loss) == 2.0, "the same targets count once"
    torch.testing.assert_close(loss, 2 * F.cross_entropy(logits, targets))
    with Averages() as two:
        loss = F.cross_entropy(logits, targets) + F.nll_loss(logits, targets.clone().clamp(min=0))
    assert _weight(two, loss) == _weight(two, None) == 4.0, "of different losses nobody knows: samples"
    with Averages() as none:
        loss = F.cross_entropy(logits, torch.full((4,), -100))
        loss.backward()
    assert _weight(none, loss) == 0.0 and logits.grad is not None and not logits.grad.any(), "no nan"
    with Averages() as weighted:
        loss = F.cross_entropy(logits, targets, weight=torch.arange(5.0))
    assert _weight(weighted, loss) == 4.0
    with Averages() as own:
        F.cross_entropy(logits, targets, reduction="none")
    assert _weight(own, None) == 4.0


def test_targets_inside_of_units_are_counted_where_there_are_some() -> None:
    logits, targets = torch.randn(4, 5), torch.tensor([1, -100, 3, -100])
    with Averages() as everywhere:
        with everywhere.inside("block"):
            logits.exp().mean()
        with everywhere.inside("head"):
            loss = F.cross_entropy(logits, targets)
    assert everywhere.units_of(loss) == everywhere.units_of(None) == {"head"} and _weight(everywhere, None) == 2.0
    with Averages(everywhere.units_of(loss)) as again:
        with again.inside("block"):
            F.cross_entropy(logits, targets.clone())  # not looked for
        with again.inside("head"):
            F.cross_entropy(logits, targets)
    assert _weight(again, None) == 2.0


def test_only_what_is_linear_is_followed() -> None:
    x, mask = torch.rand(6, requires_grad=True), torch.tensor([1, 1, 0, 1, 0, 0])
    with Averages() as seen:
        mean = (x * mask).sum() / mask.sum()
        same = [2 * mean - 1, torch.stack([mean, mean]).sum().float(), mean.item(), (mean + 0).detach()[None].squeeze()]
        counts = [made.count for number in same if (made := seen.made(number)) is not None]
        bent = [seen.made(number) for number in (mean.sqrt(), mean * mean, 1 / mean, mean.clamp(min=1))]
        other = seen.made(mean + x[0])
        kept = torch.ones(()).mul_(0.9).add_(0.1 * mean.detach())
        factors = [seen.made(number) for number in (mean / kept, mean / 7, mean / torch.tensor(3.0))]
        unknown = [seen.made(number) for number in (x, x[0], x.norm(), x.mean(0, keepdim=True))]
    assert counts == [3.0] * 4
    assert all(made is not None and made.bent for made in bent)
    assert [made.count for made in factors if made is not None] == [3.0] * 3, "no counts"
    assert other is not None and other.rest and not other.bent and not any(unknown)
    with Averages() as paused, paused.paused():
        assert paused.made(x.mean()) is None
    with Averages() as transformed:
        torch.func.grad(lambda v: transformed.made(v.mean()) or v.mean())(x.detach())
    assert not transformed._made, "nothing of a transform outlives it"


_CLASSES = torch.tensor([1, 0, 3, 2])
_JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda x: F.cross_entropy((x - x.mean(0)) / x.std(0), _CLASSES),
    "normalised, each": lambda x: F.cross_entropy(x - x.mean(0), _CLASSES, reduction="none").mean(),
    "batch norm": lambda x: F.cross_entropy(F.batch_norm(x, None, None, training=True), _CLASSES),
    "moments": lambda x: F.mse_loss(x.mean(0), torch.ones(5)),
    "above the mean": lambda x: (x * (x > x.mean().detach())).mean(),
    "above a quantile": lambda x: x[:, 0][x[:, 0] > x.detach()[:, 0].quantile(0.5)].mean(),
}
_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "layer norm": lambda x: F.cross_entropy(x - x.mean(1, keepdim=True), _CLASSES),
    "known statistics": lambda x: F.cross_entropy(F.batch_norm(x, torch.zeros(5), torch.ones(5)), _CLASSES),
    "a loop": lambda x: torch.stack([F.mse_loss(y.mean(), torch.ones(())) for y in x]).mean(),
    "above a number": lambda x: (x * (x > 0.5)).mean(),
    "weighted": lambda x: F.cross_entropy(x, _CLASSES, weight=torch.ones(5)),
}


@pytest.mark.parametrize("name", [*_JOINED, *_EACH])
def test_losses_of_statistics_are_no_averages(name: str) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with Averages(rows=4, compares=True) as seen:
        loss = (_JOINED | _EACH)[name](x)
        made = seen.made(loss)
    assert made is not None
    assert bool(made.bent) == (name in _JOINED), made.bent


def test_microbatches_that_weigh_alike_leave_nothing_to_correct() -> None:
    batch = BatchLoss([2, 2, 2], torch.device("cpu"))
    for i in range(3):
        batch.add(i, torch.zeros(()), Averages(), torch.tensor(7))
    assert batch.provisional_total == batch.weights().sum() == 21.0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep: dict[str, Any] = {"a": [1], "sums": {"x": 0.0}}
        self.own = Record(X, [])
        self.number = 1000.5
        self.loop: list[Any] = []
        self.loop.append(self.loop)
        self._hidden = collections.deque([X])
        self.register_buffer("kept", torch.zeros(2))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.deep["a"].append(2),
        lambda m: m.deep["sums"].update(x=1.5),
        lambda m: m.own.tags.append("b"),
        lambda m: setattr(m, "number", m.number + 1),
        lambda m: m._hidden.append(X),
        lambda m: setattr(m, "kept", torch.ones(2)),
        lambda m: setattr(m, "new", 1),
    ],
)
def test_what_a_step_leaves_is_seen(change: Any) -> None:
    module = Holder()
    before = Attributes(module)
    assert not Attributes(module).differing(before)
    change(module)
    assert Attributes(module).differing(before)
