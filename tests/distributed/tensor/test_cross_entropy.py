"""Vocab-parallel cross-entropy on real ranks against F.cross_entropy on whole logits."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges, shard_ranges
from lightning_megatp.shim.torch import tensor_version
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.cross_entropy import cross_entropy_of_slices, vocab_parallel_cross_entropy
from lightning_megatp.tensor.layers import ColumnParallelLinear
from lightning_megatp.tensor.lineage import trace_regions
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.ranks import run_ranks

VOCAB = 11
SPLITS: dict[int, list[list[int]]] = {1: [[11]], 2: [[6, 5], [11, 0]], 4: [[3, 3, 3, 2], [0, 5, 0, 6]]}


def test_as_cross_entropy_says_in_its_documentation() -> None:
    """The other cases compare with F.cross_entropy; this one computes label smoothing by hand (Megatron-LM #737)."""
    logits, target = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([2])
    log_probability = logits.log_softmax(-1)[0]
    expected = -(0.9 * log_probability[2] + 0.1 / 3 * log_probability.sum())
    assert run_ranks(2, _smoothed, logits, target) == [pytest.approx(float(expected), abs=1e-6)] * 2


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_float64_values_and_gradients(world_size: int) -> None:
    """Every combination of reduction, weights, smoothing, ignored targets and shape, on even and uneven splits."""
    for result in run_ranks(world_size, _compare_all, torch.float64, 1e-12):
        assert result["worst"] <= 1e-12, result["case"]
        assert result["cases"] == len(SPLITS[world_size]) * 3 * 2 * 2 * 3 * 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_float32_values_and_gradients(world_size: int) -> None:
    for result in run_ranks(world_size, _compare_all, torch.float32, 1e-5):
        assert result["worst"] <= 1e-5, result["case"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_accumulate_in_float32(dtype: torch.dtype) -> None:
    """As exact as float64 on the same half logits, but for one rounding of the result."""
    for worst, result_dtype, gradient_dtype, autocast_dtype in run_ranks(2, _compare_half, dtype):
        assert worst <= torch.finfo(dtype).eps
        assert result_dtype == gradient_dtype == str(dtype)
        assert autocast_dtype == "torch.float32"


def test_a_slice_of_several_ranges() -> None:
    assert max(run_ranks(2, _several_ranges)) <= 1e-12


def test_a_group_that_is_not_the_world() -> None:
    assert max(run_ranks(4, _subgroups)) <= 1e-12


def test_extreme_logits() -> None:
    """No overflow at 1e4; classes masked with -inf; a nan stays a nan on every rank."""
    for large, masked, has_nan in run_ranks(2, _extremes):
        assert large <= 1e-12
        assert masked <= 1e-12
        assert has_nan


def test_inputs_untouched_graph_walkable_twice_and_attributes_set() -> None:
    assert all(run_ranks(2, _untouched))


def test_collectives() -> None:
    """One small all-gather forward, none backward, whatever the options."""
    for counts in run_ranks(2, _count_collectives):
        numbers = {"weighted": 6 * 3 + 2, "smoothed": 6 * 4 + 1, "no rows": 1}  # of each of two ranks
        assert counts == {"backward": {}} | {name: {"all-gather": 2 * 4 * n} for name, n in numbers.items()}


@pytest.mark.parametrize("gather_output", [False, True])
def test_training_a_split_head_equals_one_device(gather_output: bool) -> None:
    """Also for a head whose output is gathered: then the loss is F.cross_entropy's own."""
    assert max(run_ranks(2, _train, gather_output)) <= 1e-12


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("class dim 1", r"logits \(2, 11, 3\) don't fit the target \(2, 3\). The class dim is the last one"),
        ("probabilities", "only class indices"),
        ("gathered", r"the last dim of the logits is 11, but this rank's classes \[\(\d+, \d+\)\] are \d"),
        ("reduction", "reduction is 'average'. Use 'none', 'mean' or 'sum'"),
        ("smoothing", "label_smoothing is 1.5. It must be between 0 and 1"),
        ("weight", r"weight has shape \(6,\), the vocabulary 11 classes"),
        ("out of bounds", "target 11 is out of bounds for 11 classes"),
    ],
)
def test_bad_input(case: str, message: str) -> None:
    for text in run_ranks(2, _bad_input, case):
        assert re.search(message, text)


def test_a_plain_head_means_one_device() -> None:
    """No process group: the same step runs without the strategy, with the class dim last."""
    logits, target = torch.randn(2, 3, VOCAB), torch.randint(VOCAB, (2, 3))
    for reduction in ("none", "mean", "sum"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
        ours = vocab_parallel_cross_entropy(logits, target, nn.Linear(4, VOCAB), **options)
        expected = F.cross_entropy(logits.movedim(-1, 1), target, **options)
        torch.testing.assert_close(ours, expected)


# What follows runs in the ranks.


@dataclasses.dataclass
class SplitHead:
    """What a swapped head shows of itself."""

    group: Any
    out_range: Ranges
    gather_output: bool = False


def _head(rank: int, sizes: list[int], group: Any = None) -> Any:
    start = sum(sizes[:rank])
    classes = ((start, start + sizes[rank]),) if sizes[rank] else ()  # a rank may hold none
    return SplitHead(group or dist.group.WORLD, classes)


def _slice(whole: Tensor, head: SplitHead) -> Tensor:
    return torch.cat([whole[..., :0], *(whole[..., start:stop] for start, stop in head.out_range)], -1)


def _difference(whole: Tensor, target: Tensor, head: Any, **options: Any) -> float:
    """The largest difference to F.cross_entropy, in the loss and in this rank's slice of the gradient."""
    whole = whole.detach().clone().requires_grad_()
    ours_in = _slice(whole, head).detach().requires_grad_()
    ours = vocab_parallel_cross_entropy(ours_in, target, head, **options)
    expected = F.cross_entropy(whole.movedim(-1, 1) if whole.dim() > 2 else whole, target, **options)
    assert ours.shape == expected.shape and ours.dtype == expected.dtype
    cotangent = torch.linspace(0.5, 2.0, expected.numel(), dtype=expected.dtype).reshape(expected.shape)
    (ours * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    assert ours_in.grad is not None and whole.grad is not None
    return max(_largest(ours, expected), _largest(ours_in.grad, _slice(whole.grad, head)))


def _largest(a: Tensor, b: Tensor) -> float:
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    finite = a.isfinite()
    return float((a - b)[finite].abs().max()) if finite.any() else 0.0


def _smoothed(rank: int, world_size: int, logits: Tensor, target: Tensor) -> float:
    head = _head(rank, [2, 1])
    return float(vocab_parallel_cross_entropy(_slice(logits, head), target, head, label_smoothing=0.1))


def _compare_all(rank: int, world_size: int, dtype: torch.dtype, tolerance: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    worst, worst_case, cases = 0.0, "", 0
    shapes: list[tuple[int, ...]] = [(), (6,), (2, 3)]
    reductions, ignorings = ("none", "mean", "sum"), ("none", "some", "all")
    grid = itertools.product(SPLITS[world_size], reductions, (False, True), (0.0, 0.2), ignorings, shapes)
    for sizes, reduction, weighted, smoothing, ignored, shape in grid:
        whole = torch.randn(*shape, VOCAB, dtype=dtype, generator=generator) * 3
        target = torch.randint(VOCAB, shape, generator=generator)
        ignore_index = 4  # a class like any other, so that "ignored" and "held by this rank" meet
        target[target == ignore_index] = 5
        if ignored != "none":
            chosen = torch.rand(shape, generator=generator) < (0.5 if ignored == "some" else 2.0)
            target = target.masked_fill(chosen, ignore_index)
        weight = torch.rand(VOCAB, dtype=dtype, generator=generator) + 0.1 if weighted else None
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
        difference = _difference(whole, target, _head(rank, sizes), **options)
        cases += 1
        if difference > worst:
            worst, worst_case = difference, f"{sizes} {shape} {ignored} ignored {options}"
    return {"worst": worst, "case": worst_case, "cases": cases}


def _compare_half(rank: int, world_size: int, dtype: torch.dtype) -> tuple[float, str, str, str]:
    head = _head(rank, [6, 5])
    whole = (torch.randn(32, VOCAB) * 3).to(dtype)
    target = torch.randint(VOCAB, (32,))
    exact_in = whole.double().requires_grad_()
    exact = F.cross_entropy(exact_in, target, label_smoothing=0.1)
    exact.backward()
    ours_in = _slice(whole, head).detach().requires_grad_()
    ours = vocab_parallel_cross_entropy(ours_in, target, head, label_smoothing=0.1)
    ours.float().backward()
    assert exact_in.grad is not None and ours_in.grad is not None
    expected = _slice(exact_in.grad, head)
    loss_error = float(((ours.double() - exact) / exact).abs())
    gradient_error = float(((ours_in.grad.double() - expected) / expected.abs().clamp_min(1e-4)).abs().max())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = vocab_parallel_cross_entropy(ours_in, target, head)
    return max(loss_error, gradient_error), str(ours.dtype), str(ours_in.grad.dtype), str(autocast.dtype)


def _several_ranges(rank: int, world_size: int) -> float:
    whole, target = torch.randn(40, VOCAB, dtype=torch.float64), torch.randint(VOCAB, (40,))
    head = SplitHead(dist.group.WORLD, (((0, 2), (7, 11)), ((2, 7),))[rank])
    weight = torch.rand(VOCAB, dtype=torch.float64)
    return _difference(whole, target, head, weight=weight, label_smoothing=0.3)


def _subgroups(rank: int, world_size: int) -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    whole, target = torch.randn(8, VOCAB, dtype=torch.float64), torch.randint(VOCAB, (8,))
    return _difference(whole, target, _head(rank % 2, [6, 5], groups[rank // 2]), label_smoothing=0.1)


def _extremes(rank: int, world_size: int) -> tuple[float, float, bool]:
    head = _head(rank, [6, 5])
    target = torch.randint(6, (4,))
    large = _difference(torch.randn(4, VOCAB, dtype=torch.float64) * 1e4, target, head)
    apart = torch.randn(4, VOCAB, dtype=torch.float64)
    apart[:, 6:] -= 1e4  # beside the first rank's, nothing
    large = max(large, _difference(apart, target, head), _difference(apart, target + 5, head))
    masked = torch.randn(4, VOCAB, dtype=torch.float64)
    masked[:, 6:] = -torch.inf  # all that the second rank holds
    broken = torch.randn(4, VOCAB)
    broken[0, 0] = torch.nan
    loss = vocab_parallel_cross_entropy(_slice(broken, head), target, head)
    return large, _difference(masked, target, head), bool(loss.isnan())


def _untouched(rank: int, world_size: int) -> bool:
    head = _head(rank, [6, 5])
    logits = torch.randn(4, VOCAB)[:, : 6 - rank].requires_grad_()  # not contiguous
    target = torch.tensor([3, 10, -100, 0])
    before = logits.detach().clone(), target.clone(), tensor_version(logits)
    loss = vocab_parallel_cross_entropy(logits, target, head, reduction="none", label_smoothing=0.1).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    second = torch.autograd.grad(loss, logits)[0]
    assert torch.equal(first, second) and not first[2].any()
    assert torch.equal(logits, before[0]) and torch.equal(target, before[1]) and tensor_version(logits) == before[2]
    rows = cross_entropy_of_slices(logits, target, group=head.group, out_range=head.out_range, reduction="none")
    found, queue = [], [rows.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None:
            if hasattr(node, "region_above"):
                found.append((node.region_above, node.region_below))  # type: ignore[attr-defined]
            queue += [parent for parent, _ in node.next_functions]
    return found == [("whole", "tensor")]


def _count_collectives(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    head = _head(rank, [6, 5])
    logits, target = torch.randn(2, 3, VOCAB), torch.randint(VOCAB, (2, 3))
    mine = _slice(logits, head).requires_grad_()
    with CollectiveCounter() as weighted:
        vocab_parallel_cross_entropy(mine, target, head, weight=torch.rand(VOCAB))
    with CollectiveCounter() as smoothed:
        loss = vocab_parallel_cross_entropy(mine, target, head, label_smoothing=0.1)
    with CollectiveCounter() as backward:
        loss.backward()
    with CollectiveCounter() as no_rows:
        empty = vocab_parallel_cross_entropy(mine[:0], target[:0], head)
    assert empty.isnan()  # as F.cross_entropy
    counters = {"weighted": weighted, "smoothed": smoothed, "backward": backward, "no rows": no_rows}
    assert all(counter.calls.keys() == counter.bytes.keys() for counter in counters.values())
    assert all(count == 1 for counter in counters.values() for count in counter.calls.values())
    return {name: dict(counter.bytes) for name, counter in counters.items()}


def _train(rank: int, world_size: int, gather_output: bool) -> float:
    """A few steps of an embedding and a head made by the package: the split model follows the whole one."""
    whole = nn.ModuleList([nn.Embedding(5, 4, dtype=torch.float64), nn.Linear(4, VOCAB, dtype=torch.float64)])
    mine = copy.deepcopy(whole)
    ids, target = torch.randint(5, (2, 8)), torch.randint(VOCAB, (2, 8))
    by_rank = shard_ranges(VOCAB, world_size)
    (start, stop) = by_rank[rank][0]
    head = mine[1]
    for name in ("weight", "bias"):
        setattr(head, name, nn.Parameter(getattr(head, name).detach()[start:stop].clone()))
    ColumnParallelLinear.adopt(head, TensorContext(dist.group.WORLD), by_rank, "head", gather_output=gather_output)
    models = [whole, mine]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = vocab_parallel_cross_entropy(model[1](model[0](ids)), target, model[1], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
    lineage = trace_regions([loss])
    assert lineage.crossings == set()
    assert lineage.regions == {id(mine[0].weight): {"whole"}, id(head.weight): {"tensor"}, id(head.bias): {"tensor"}}
    pairs = [(whole[0].weight, mine[0].weight), (whole[1].weight[start:stop], head.weight)]
    return max(float((a - b).abs().max()) for a, b in [*pairs, (whole[1].bias[start:stop], head.bias)])


def _bad_input(rank: int, world_size: int, case: str) -> str:
    head = _head(rank, [6, 5])
    logits, target = torch.randn(2, 3, VOCAB), torch.randint(VOCAB, (2, 3))
    mine, options = _slice(logits, head), {}
    if case == "class dim 1":
        mine = logits.movedim(-1, 1)
    elif case == "probabilities":
        target = torch.rand(2, 3)
    elif case == "gathered":
        mine = logits
    elif case == "reduction":
        options = {"reduction": "average"}
    elif case == "smoothing":
        options = {"label_smoothing": 1.5}
    elif case == "weight":
        options = {"weight": torch.rand(6), "label_smoothing": 0.1}
    elif case == "out of bounds":
        target[1, 1] = VOCAB
    try:
        vocab_parallel_cross_entropy(mine, target, head, **options)  # type: ignore[arg-type]
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return "no error"
