"""FeatureShard is the whole tensor, as far as anybody can tell.

Bodies of attentions and MLPs, written for one device, are run between split layers and compared with the one-device
result in float64: outputs and all gradients. Whole parameters are summed where the lineage of the loss says so.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges, shard_ranges
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.layers import ColumnParallelLinear, ParallelLayer, RowParallelLinear
from lightning_megatp.tensor.lineage import trace_regions
from lightning_megatp.tensor.parameters import shard_
from lightning_megatp.tensor.shards import functions_take_whole, gathered
from tests.distributed.feature_bodies import BODIES, FOUR_RANKS, THREE_RANKS, Split, T
from tests.ranks import run_ranks

Specs = dict[str, ShardedTensorSpec]


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


def compare(make: Callable[[], Any], use: Callable[[nn.Module], nn.Module] = lambda body: body) -> dict[str, int]:
    """Run a body whole and split, compare them, and return what was gathered."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    try:
        whole, context = make(), TensorContext(dist.group.WORLD)
        parallel, specs = split_body(whole, context)
        x = torch.randn(2, T, whole.width)
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


@pytest.mark.parametrize("world_size", TABLES)
def test_bodies_written_for_one_device(world_size: int) -> None:
    found = run_ranks(world_size, _wrong)
    assert not any(found), "\n\n".join(itertools.chain(*found))
