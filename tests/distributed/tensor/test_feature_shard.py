"""FeatureShard is the whole tensor, as far as anybody can tell.

Bodies of attentions and MLPs, written for one device, are run between split layers and compared with the one-device
result in float64: outputs and all gradients. Whole parameters are summed where the lineage of the loss says so.
"""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.plan.ranges import Ranges, shard_ranges
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.fakes import FakeTensorMode
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.collectives import take_ranges
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard
from lightning_megatp.tensor.layers import ColumnParallelLinear, ParallelLayer, RowParallelLinear
from lightning_megatp.tensor.lineage import trace_regions
from lightning_megatp.tensor.parameters import shard_
from lightning_megatp.tensor.shards import gathered
from lightning_megatp.tensor.user_functions import functions_take_whole
from lightning_megatp.tensor.watch import RegionWatch
from tests.crossing import fewer
from tests.distributed.tensor import feature_operations
from tests.distributed.tensor.feature_bodies import BODIES, FOUR_RANKS, THREE_RANKS, Split
from tests.distributed.tensor.feature_bodies import T as TOKENS
from tests.distributed.tensor.feature_operations import HEADS, D, Operation, T, Workshop
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.ranks import RankError, run_ranks

Specs = dict[str, ShardedTensorSpec]


def shard_of(x: Tensor, dim: int, owned: tuple[Ranges, ...], context: TensorContext) -> FeatureShard:
    """This rank's ranges of a dim of a whole tensor."""
    layout = FeatureLayout(dim % x.dim() - x.dim(), owned, x.shape[dim], context)
    return FeatureShard.wrap(context.exchange.scatter(x, layout.dim, owned), layout)


def _ranges(split: Split, size: int, ways: int) -> tuple[Ranges, ...]:
    return split(ways) if callable(split) else shard_ranges(size, ways, *split)


def split_body(body: nn.Module, context: TensorContext) -> tuple[nn.Module, Specs]:
    """A copy of a body with its layers split, and how its parameters are."""
    parallel, specs = copy.deepcopy(body), dict[str, ShardedTensorSpec]()
    region = Region("body")
    options: list[tuple[type[ParallelLayer], int, dict[str, Split], dict[str, Any]]] = [
        (ColumnParallelLinear, 0, getattr(body, "columns", {}), {"global_sizes": True, "region": region}),
        (ColumnParallelLinear, 0, getattr(body, "lazy", {}), {"gather_output": True, "lazy": True}),
        (RowParallelLinear, 1, getattr(body, "rows", {}), {"global_sizes": True, "region": region}),
    ]
    for kind, dim, layers, extra in options:
        for name, split in layers.items():
            layer = parallel.get_submodule(name)
            by_rank = _ranges(split, layer.weight.shape[dim], context.size)
            for own, parameter in layer.named_parameters():
                if parameter.dim() > dim:
                    spec = ShardedTensorSpec(f"{name}.{own}", tuple(parameter.shape), dim, by_rank)
                    specs[spec.name] = spec
                    shard_(parameter, spec, context.rank)
            kind.adopt(layer, context, by_rank, name, **extra)
    return parallel, specs


def run_body(body: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Its outputs as whole values, and a loss that depends on every number in them."""
    with functions_take_whole():
        outputs = [gathered(y) for y in tree_leaves(body(x)) if isinstance(y, Tensor)]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(y.shape, dtype=torch.float64, generator=generator) for y in outputs]
    return outputs, torch.stack([(w * y).sum() for w, y in zip(weights, outputs, strict=True)]).sum()


def check_gradients(parallel: nn.Module, whole: nn.Module, specs: Specs, loss: Tensor, context: TensorContext) -> None:
    lineage = trace_regions([loss])
    assert not lineage.crossings
    loss.backward()
    for name, parameter in parallel.named_parameters():
        expected, spec = whole.get_parameter(name).grad, specs.get(name)
        assert parameter.grad is not None and expected is not None, name
        total = parameter.grad.clone()
        if spec is not None:
            assert lineage.regions[id(parameter)] == {"tensor"}, name
            total = torch.zeros_like(expected)
            spec.spec(context.rank).put(total, parameter.grad)
        regions = lineage.regions[id(parameter)]
        assert len(regions) == 1, f"{name} is used in {regions}"
        if regions == {"tensor"}:
            dist.all_reduce(total)
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")  # noqa: B023


def compare(
    make: Callable[[], Any], use: Callable[[nn.Module], nn.Module] = lambda body: body, copied: bool = False
) -> dict[str, int]:
    """Run a body whole and split (or a copy of the split one), compare them, and return what was gathered."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        whole, context = make(), TensorContext(dist.group.WORLD)
        parallel, specs = split_body(whole, context)
        parallel = copy.deepcopy(parallel) if copied else parallel
        x = torch.randn(2, TOKENS, whole.width)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, expected_loss = run_body(whole, theirs)
        found, loss = run_body(use(parallel), mine)
        for y, z in zip(found, expected, strict=True):
            torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10)
        expected_loss.backward()
        check_gradients(parallel, whole, specs, loss, context)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)
        return dict(context.gathers)
    finally:
        torch.set_default_dtype(torch.float32)


TABLES = {2: BODIES, 3: THREE_RANKS, 4: FOUR_RANKS}


def _wrong(rank: int, world_size: int) -> list[str]:
    """What is wrong with the bodies of a table, in words."""
    wrong = []
    for name, make in TABLES[world_size].items():
        try:
            gathers = compare(make)
            gathers.pop("whole", None)  # of the outputs, by this test
            if sum(gathers.values()) != make().gathers:
                wrong.append(f"{name}: gathers {gathers}, not {make().gathers}")
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc(limit=-6)}")
    return wrong


@pytest.mark.parametrize("world_size", fewer(TABLES, extended=[3]))
def test_bodies_written_for_one_device(world_size: int) -> None:
    found = run_ranks(world_size, _wrong)
    assert not any(found), "\n\n".join(itertools.chain(*found))


# ---------------------------------------------------------------- single operations

OWNED: dict[str, tuple[Ranges, ...]] = {
    "in pieces": (((0, 3), (5, 6)), ((3, 5), (6, 8))),
    "uneven": (((0, 7),), ((7, 8),)),
    "overlapping": (((0, 4), (6, 8)), ((2, 6),)),
    "everywhere": (((0, 8),), ((0, 8),)),
}


def _workshop(context: TensorContext | None, owned: tuple[Ranges, ...]) -> tuple[Tensor, Workshop, dict[str, Tensor]]:
    """x and the other operands, shards if there is a context, and the leaves that get gradients."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    leaves: dict[str, Tensor] = {name: normal(2, HEADS, T, D).requires_grad_() for name in "xyz"}
    leaves["row"] = normal(T, D).requires_grad_()
    shapes = {"per_head": (HEADS, 1, 1), "weight": (D,), "matrix": (D, D), "mix": (HEADS, HEADS)}
    parameters = {name: nn.Parameter(normal(*shape)) for name, shape in shapes.items()}
    x, z = leaves["x"] * 1.0, leaves["z"] * 1.0
    if context is not None:
        x, z = (shard_of(v, 1, owned, context) for v in (x, z))
    workshop = Workshop(z, leaves["y"] * 1.0, leaves["row"] * 1.0, normal(2, HEADS, T, D) > 0, **parameters)
    return x, workshop, leaves | parameters


def _try(operation: Operation, context: TensorContext | None, owned: tuple[Ranges, ...]) -> tuple[list[Any], Any]:
    """What an operation returns, x and z afterwards, and the gradients of all leaves with their regions."""
    x, workshop, leaves = _workshop(context, owned)
    with functions_take_whole(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        returned = tree_leaves(operation(x, workshop))
        gathers = 0 if context is None else sum(context.gathers.values())
        outputs = [_checked(y) for y in (*returned, x, workshop.z)]
    loss = torch.zeros((), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for y in outputs:
        if isinstance(y, Tensor) and y.requires_grad:
            y = torch.view_as_real(y) if y.is_complex() else y
            loss = loss + (torch.randn(y.shape, dtype=y.dtype, generator=generator) * y).sum()
    lineage = trace_regions([loss])
    assert not lineage.crossings
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))
    for name, grad in grads.items():
        regions = lineage.regions.get(id(leaves[name]), set())
        assert len(regions) < 2, f"{name} is used in {regions}"
        if context is not None and regions == {"tensor"} and grad is not None:
            dist.all_reduce(grad)
    return [*outputs, *grads.values()], gathers


def _checked(y: Any) -> Any:
    """The whole value, which is what the shard said it was."""
    if isinstance(y, FeatureShard):
        shape, dtype, requires_grad = y.shape, y.dtype, y.requires_grad
        y = y.whole()
        assert (type(y), y.shape, y.dtype, y.requires_grad) == (Tensor, shape, dtype, requires_grad)
    return y


def _differences(rank: int, world_size: int, table: str, owned: str) -> list[str]:
    wrong = []
    for name, operation in getattr(feature_operations, table).items():
        try:
            context = TensorContext(dist.group.WORLD)
            expected, _ = _try(operation, None, OWNED[owned])
            found, gathers = _try(operation, context, OWNED[owned])
            assert len(found) == len(expected)
            for y, z in zip(found, expected, strict=True):
                if isinstance(z, Tensor):
                    tolerance = 1e-10 if z.dtype == torch.float64 else 1e-5
                    torch.testing.assert_close(y.detach(), z.detach(), rtol=tolerance, atol=tolerance)
                else:
                    assert y == z
            assert table != "LOCAL" or gathers == 0, context.gathers
            assert table != "ADDED" or gathers == 0 or owned == "overlapping", context.gathers
            assert table != "GATHERS" or gathers > 0 or owned == "everywhere"
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc(limit=-8)}")
    return wrong


@pytest.mark.parametrize("owned", OWNED)
@pytest.mark.parametrize("table", ["LOCAL", "ADDED", "GATHERS", "IN_PLACE"])
def test_operations_give_what_they_give_on_the_whole_tensor(table: str, owned: str) -> None:
    found = run_ranks(2, _differences, table, owned)
    assert not any(found), "\n\n".join(itertools.chain(*found))


def _sixteen_bits(rank: int, world_size: int, autocast: bool) -> None:
    """No further from numbers in 64 bits than torch's own operations are, and of their dtype."""
    context, weight = TensorContext(dist.group.WORLD), torch.rand(64) + 0.5
    exact = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 4
    x = exact.bfloat16()
    weight = weight if autocast else weight.bfloat16()
    shard = shard_of(x, -1, (((0, 24),), ((24, 64),)), context)
    for operation in (
        lambda x: x.mean(-1),
        lambda x: x.sum(-1),
        lambda x: x.std(-1),
        lambda x: x.norm(dim=-1),
        lambda x: F.layer_norm(x, (64,), weight.to(x.dtype) if x.dtype.itemsize > 4 else weight),
        lambda x: F.rms_norm(x, (64,), weight.to(x.dtype) if x.dtype.itemsize > 4 else weight, 1e-6),
        lambda x: F.normalize(x, dim=-1),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, one_device = _checked(operation(shard)), operation(x)
        expected = operation(x.double())
        errors = [(y.double() - expected).abs().max().item() for y in (found, one_device)]
        assert found.dtype == one_device.dtype
        assert errors[0] <= errors[1] * 1.01 + 1e-6, errors


@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_of_all_features_in_sixteen_bits(autocast: bool) -> None:
    run_ranks(2, _sixteen_bits, autocast)


def _refusals(rank: int, world_size: int) -> list[str]:
    wrong = []
    for name, operation in feature_operations.REFUSED.items():
        x, workshop, _ = _workshop(TensorContext(dist.group.WORLD), OWNED["in pieces"])
        try:
            operation(x, workshop)
            wrong.append(f"{name} does not raise")
        except RuntimeError as error:
            if "MegaTPStrategy" not in str(error):
                wrong.append(f"{name}: {error!r}")
    return wrong


def test_what_gathering_cannot_help_raises() -> None:
    assert run_ranks(2, _refusals) == [[], []]


def _wrong_range(rank: int, world_size: int) -> list[str]:
    """A layout that says that the ranks own other heads than they have."""
    context = TensorContext(dist.group.WORLD)
    x, workshop, _ = _workshop(None, OWNED["uneven"])
    shard = shard_of(x, 1, (((0, 4),), ((4, 8),)), context)
    lying = FeatureShard.wrap(shard.plain, FeatureLayout(-3, (((4, 8),), ((0, 4),)), HEADS, context))
    return [
        name for name, op in {"as it is": shard, "wrong": lying}.items() if not _same(op + workshop.y, x + workshop.y)
    ]


def _same(y: Any, z: Tensor) -> bool:
    return torch.allclose(y.whole(), z)


def test_a_wrong_range_is_caught() -> None:
    """The comparison of these tests sees it."""
    assert run_ranks(2, _wrong_range) == [["wrong"], ["wrong"]]


def _exchange_keys(body: nn.Module) -> nn.Module:
    """Let the layer of the keys say that each rank has the other's heads."""
    layout = body.k._layout
    body.k._layout = layout.with_(-1, layout.by_rank[::-1], layout.size)
    return body


def _wrong_layer(rank: int, world_size: int) -> None:
    compare(BODIES["BERT"], _exchange_keys)


def test_a_layer_with_a_wrong_range_is_caught() -> None:
    with pytest.raises(RankError, match="Tensor-likes are not close"):
        run_ranks(2, _wrong_layer)


# ---------------------------------------------------------------- cross-entropy

VOCABULARY = 11
CLASSES: dict[str, tuple[Ranges, ...]] = {
    "even": (((0, 6),), ((6, 11),)),
    "in pieces": (((0, 3), (7, 9)), ((3, 7), (9, 11))),
    "all on one": (((0, 11),), ()),
}
Loss = Callable[[Any, Tensor, Tensor], Tensor]
"""Of logits (2, 5, VOCABULARY), targets (2, 5) and weights (VOCABULARY)."""


def _hugging_face(logits: Any, target: Tensor, weight: Tensor) -> Tensor:
    logits = logits.float()
    shifted, labels = logits[..., :-1, :].contiguous(), target[..., 1:].contiguous()
    labels = labels.view(-1).to(logits.device)
    loss = F.cross_entropy(shifted.view(-1, VOCABULARY), labels, ignore_index=-100, reduction="sum")
    return (loss / torch.tensor(8)).double()


LOSSES: dict[str, Loss] = {
    "rows": lambda x, t, w: F.cross_entropy(x.view(-1, x.size(-1)), t.view(-1)),
    "flattened": lambda x, t, w: nn.CrossEntropyLoss()(x.flatten(0, 1), t.flatten()),
    "Hugging Face": _hugging_face,
    "transposed": lambda x, t, w: F.cross_entropy(x.transpose(1, 2), t, reduction="none").sum(),
    "permuted": lambda x, t, w: F.cross_entropy(x.permute(0, 2, 1)[..., 1:], t[:, 1:], label_smoothing=0.1),
    "one token": lambda x, t, w: F.cross_entropy(x[0, 1], t[0, 1]),
    "weights": lambda x, t, w: F.cross_entropy(
        x[:, 1:].reshape(-1, VOCABULARY), t[:, 1:].reshape(-1), w, reduction="mean"
    ),
    "all options": lambda x, t, w: F.cross_entropy(
        x[:, -2], t[:, -2], weight=w, ignore_index=3, reduction="sum", label_smoothing=0.2
    ),
    "masked rows": lambda x, t, w: F.cross_entropy(x[t != 4], t[t != 4]),
    "scaled": lambda x, t, w: F.cross_entropy((x / 2.0 + w).mT, t),
}


def _best_of_two(x: Any, t: Tensor, w: Tensor) -> Tensor:
    """Preferences, of chosen log-probabilities."""
    chosen = torch.gather(x.log_softmax(-1), 2, t.unsqueeze(-1)).squeeze(-1).sum(-1)
    return -F.logsigmoid(chosen[0] - chosen[1])


def _distilled(x: Any, t: Tensor, w: Tensor) -> Tensor:
    """From a teacher whose logits are whole, and from one whose are split."""
    teacher, own = (w * torch.arange(5.0)[:, None]).expand(2, 5, VOCABULARY), F.log_softmax(x / 2, dim=-1)
    first = F.kl_div(own, teacher.softmax(-1), reduction="batchmean") * 4
    with torch.no_grad():
        split = F.log_softmax(x * w.flip(0), -1)
    return first + F.kl_div(own.flatten(0, 1), split.view(-1, VOCABULARY), reduction="sum", log_target=True)


ADDED_LOSSES: dict[str, Loss] = {
    "log_softmax": lambda x, t, w: F.nll_loss(x.log_softmax(-1)[0], t[0]),
    "left out": lambda x, t, w: nn.NLLLoss(ignore_index=3)(F.log_softmax(x.flatten(0, 1), dim=1), t.flatten()),
    "log_softmax, transposed": lambda x, t, w: F.nll_loss(x.mT.log_softmax(1), t, reduction="none").sum() + x.mean(),
    "entropy": lambda x, t, w: -(x.softmax(-1) * x.log_softmax(dim=-1)).sum(-1).mean(),
    "preferences": _best_of_two,
    "selected": lambda x, t, w: (x.gather(-1, t[..., None]).squeeze(-1) - torch.logsumexp(x, dim=-1)).square().mean(),
    "distilled": _distilled,
    "mean divergence": lambda x, t, w: F.kl_div(x.log_softmax(-1), x.mT.softmax(1).mT.detach()) + x.logsumexp(2).sum(),
    "accuracy": lambda x, t, w: (x.argmax(-1) == t).double().mean() + (x.argmin(-1, True) * w).sum() + x.sum(),
    "confidence": lambda x, t, w: x.softmax(-1).max(-1).values.square().sum() * (x.max(dim=-1)[1] + 1).prod(),
    "margin": lambda x, t, w: (x.detach().amax(-1, True) - x).square().mean() + x.min(-1, keepdim=True)[0].sum(),
    "ties": lambda x, t, w: (
        (x.round().argmax(-1) * w[:5] + x.round().max(-1).values).sum() + x.clamp(0, 0).argmin(-1).sum()
    ),
    "nothing known": lambda x, t, w: x.sum() + x.detach().masked_fill(x > -99, -torch.inf).logsumexp(-1).exp().sum(),
    "in 32 bits": lambda x, t, w: torch.softmax(x, -1, dtype=torch.float32).square().sum().double(),
}
"""Ranks exchange numbers per token, and no logits."""
GATHERED_LOSSES: dict[str, Loss] = {
    "probabilities": lambda x, t, w: F.cross_entropy(x[0], F.one_hot(t[0], VOCABULARY).double()),
    "class dim elsewhere": lambda x, t, w: F.cross_entropy(x[:, :, :5], t.clamp(max=4)),
    "legacy reduction": lambda x, t, w: F.cross_entropy(x[0], t[0], size_average=False),
    "class weights": lambda x, t, w: F.nll_loss(x.log_softmax(-1)[0], t[0], w),
    "gradient of the largest": lambda x, t, w: (x.clamp(max=0.5).amax(-1) * w[:5]).sum(),
}


def _losses(rank: int, world_size: int, classes: str, table: list[str]) -> list[str]:
    wrong = []
    for name in table:
        try:
            local = name not in GATHERED_LOSSES
            collectives = _compare_loss((LOSSES | ADDED_LOSSES | GATHERED_LOSSES)[name], CLASSES[classes], local)
            if name in LOSSES and collectives != {"all-gather": 1}:
                wrong.append(f"{name}: {collectives}")
        except Exception:
            wrong.append(f"{name}: {traceback.format_exc(limit=-8)}")
    return wrong


def _compare_loss(loss: Loss, owned: tuple[Ranges, ...], local: bool) -> dict[str, int]:
    """The collectives of its forward and backward."""
    context = TensorContext(dist.group.WORLD)
    torch.manual_seed(2)
    logits, weight = torch.randn(2, 5, VOCABULARY, dtype=torch.float64), torch.rand(VOCABULARY, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (2, 5))
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = loss(theirs, target, weight)
    expected.backward()
    own = take_ranges(mine, -1, owned[context.rank]) * 1.0
    shard = FeatureShard.wrap(own, FeatureLayout(-1, owned, VOCABULARY, context))
    with CollectiveCounter() as counter:
        found = loss(shard, target, weight)
        assert type(found) is Tensor
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    dist.all_reduce(mine.grad)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    assert bool(context.gathers) != local
    return dict(counter.calls)


@pytest.mark.parametrize("classes", CLASSES)
def test_cross_entropy_never_gathers_the_logits(classes: str) -> None:
    found = run_ranks(2, _losses, classes, list(LOSSES))
    assert not any(found), "\n\n".join(itertools.chain(*found))


@pytest.mark.parametrize("classes", CLASSES)
def test_losses_of_what_ranks_exchange_about_each_token(classes: str) -> None:
    found = run_ranks(2, _losses, classes, list(ADDED_LOSSES))
    assert not any(found), "\n\n".join(itertools.chain(*found))


def _unknown_class(rank: int, world_size: int, index: int) -> None:
    x, *_ = _workshop(TensorContext(dist.group.WORLD), OWNED["uneven"])
    with pytest.raises(RuntimeError, match="out of bounds"):
        x.gather(1, torch.full((2, 1, T, D), index))


@pytest.mark.parametrize("index", [-1, HEADS])
def test_a_class_that_there_is_not_is_no_rank_s(index: int) -> None:
    run_ranks(2, _unknown_class, index)


def test_losses_without_a_rule_gather_them() -> None:
    found = run_ranks(2, _losses, "in pieces", list(GATHERED_LOSSES))
    assert not any(found), "\n\n".join(itertools.chain(*found))


# ---------------------------------------------------------------- beside plain training


class Checkpointed(nn.Module):
    """A body under activation checkpointing; or the code between its layers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def _checkpointed(rank: int, world_size: int) -> None:
    for name in ("nanoGPT by hand", "OLMo2", "in place", "Llama eager", "mixed heads", "per-head parameters"):
        compare(BODIES[name], Checkpointed)
        compare(BODIES[name], copied=True)


def test_activation_checkpointing_and_copies() -> None:
    run_ranks(2, _checkpointed)


def _modes(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    for make in (BODIES["nanoGPT by hand"], BODIES["OLMo2"], BODIES["Llama sdpa"]):
        whole, context = make(), TensorContext(dist.group.WORLD)
        parallel, _ = split_body(whole, context)
        x = torch.randn(2, TOKENS, whole.width)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(parallel(x), whole(x), rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = parallel(x), whole(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05)


def test_without_gradients_and_under_autocast() -> None:
    run_ranks(2, _modes)


def _gather_once(rank: int, world_size: int) -> list[int]:
    context = TensorContext(dist.group.WORLD)
    x, *_ = _workshop(context, OWNED["in pieces"])
    counts = []
    with CollectiveCounter() as counter:
        for use in (
            lambda: x.prod() + x.flip(1),  # one gather for both
            lambda: x.cumsum(1),  # and another use
            lambda: x.mul_(2.0),
            lambda: x.prod(),  # changed: again
            lambda: torch.no_grad()(lambda: x.prod())(),  # in another mode: again
        ):
            use()
            counts.append(sum(counter.calls.values()))
    return counts


def test_a_shard_is_gathered_once() -> None:
    assert run_ranks(2, _gather_once) == [[1, 1, 1, 2, 3]] * 2


class Double(torch.autograd.Function):
    """A user's own function, which needs whole shapes in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.heads = x.shape[1]
        return x * x.shape[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.heads


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * x.shape[1]


@torch.jit.script
def doubled_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def _function(rank: int, world_size: int) -> None:
    context = TensorContext(dist.group.WORLD)
    for function in (Double.apply, scripted):
        (expected, *_), _ = _try(lambda x, o, f=function: f(x * 2.0) + o.z, None, OWNED["uneven"])
        (found, *_), _ = _try(lambda x, o, f=function: f(x * 2.0) + o.z, context, OWNED["uneven"])
        torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r"`doubled_in_place`.* changes in place"):
        _try(lambda x, o: doubled_in_place(x * 2.0), context, OWNED["uneven"])


def test_functions_of_the_user_get_whole_tensors() -> None:
    run_ranks(2, _function)


def _random(rank: int, world_size: int) -> tuple[Tensor, Tensor, bool, Tensor, bool]:
    context = TensorContext(dist.group.WORLD)
    x = torch.ones(4, HEADS, 8, 8)
    own, shared = (shard_of(x, 1, OWNED[name], context) for name in ("uneven", "overlapping"))
    torch.manual_seed(5)
    dropped = F.dropout(own, 0.25)
    repeated = F.dropout(shared, 0.25)
    after = torch.rand(3)
    context.open_region = Region("attention")
    with context.running(True), RegionWatch(context, {}, {}, nn.Module()):
        scores = FeatureShard.wrap(context.exchange.copy(x[:, : 7 if rank == 0 else 1].requires_grad_()), own.features)
        F.dropout(scores, 0.5)
        active = context.stream.active
    context.end_step()
    return (
        dropped.whole(),
        after,
        type(dropped) is FeatureShard,
        gathered(repeated),
        active and context.gathers["dropout"] == 1,
    )


def test_dropout_draws_other_masks_on_each_rank() -> None:
    found = run_ranks(2, _random)
    for dropped, after, local, repeated, active in found:
        assert local and active
        assert torch.equal(dropped, found[0][0]) and torch.equal(repeated, found[0][3])
        assert torch.equal(after, found[0][1]), "the replicated stream goes on alike"
        assert 0.15 < (dropped == 0).float().mean() < 0.35
        assert not torch.equal(dropped[:, 0], dropped[:, 7])


def _dry(rank: int, world_size: int) -> None:
    for name, make in BODIES.items():
        whole, context = make(), TensorContext(dist.group.WORLD)
        parallel, _ = split_body(whole, context)
        with FakeTensorMode(allow_non_fake_inputs=True), CollectiveCounter() as counter:
            outputs = tree_leaves(parallel(torch.randn(2, TOKENS, whole.width)))
        assert outputs[0].shape == (2, TOKENS, whole.width) and not counter.calls, name
        assert not any(isinstance(y, FeatureShard) for y in outputs)
        assert outputs[0].requires_grad


def test_a_dry_run_sees_whole_tensors() -> None:
    run_ranks(2, _dry)


def _double_backward(rank: int, world_size: int) -> None:
    """The gradient penalty of what passes an exchange both ways."""
    for owned in OWNED.values():
        penalties = []
        for context in (None, TensorContext(dist.group.WORLD)):
            x = torch.randn(2, HEADS, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            y = x * 1.0 if context is None else shard_of(x * 1.0, 1, owned, context)
            (grad,) = torch.autograd.grad((gathered(y * y * y) ** 2).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((grad**2).sum(), x)
            penalties.append((grad.detach(), second))
        torch.testing.assert_close(penalties[0], penalties[1])


def test_gradients_of_gradients() -> None:
    run_ranks(2, _double_backward)


def _rows(rank: int, world_size: int) -> None:
    """A row layer takes its own features of shards that lie otherwise, and of whole values."""
    torch.manual_seed(0)
    context = TensorContext(dist.group.WORLD)
    row = nn.Linear(HEADS, 3).double()
    x = torch.randn(2, HEADS, dtype=torch.float64)
    expected, owned = row(x), (((0, 5),), ((5, 8),))
    shard_(row.weight, ShardedTensorSpec("weight", (3, HEADS), 1, owned), rank)
    layer = RowParallelLinear.adopt(row, context, owned, "row", global_sizes=True)
    for other in (owned, *OWNED.values()):
        torch.testing.assert_close(layer(shard_of(x, 1, other, context)), expected)
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ValueError, match="style `row`"):
        layer(x[:, :4])


def test_a_row_layer_takes_shards_and_whole_values() -> None:
    run_ranks(2, _rows)
