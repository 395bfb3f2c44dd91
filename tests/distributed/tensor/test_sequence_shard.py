"""SequenceShard is the whole tensor, as far as anybody can tell.

Every operation of a table is run on a whole tensor and on shards of it: same values, types and gradients, whether a
sequence divides over the ranks or has fewer tokens than ranks. Gradients of parameters are summed where the lineage of
the loss says that they are partial, as a step does.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_megatp.shim.autograd import handle_checkpoints
from lightning_megatp.tensor import sequence
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.lineage import trace_regions
from lightning_megatp.tensor.saving import unwrapped
from lightning_megatp.tensor.sequence import SequenceShard
from lightning_megatp.tensor.user_functions import functions_take_whole
from tests.distributed.tensor import sequence_operations
from tests.distributed.tensor.sequence_operations import BATCH, OPERATIONS, REFUSED, D, Operation, Workshop
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.ranks import run_ranks

EVERY = list(itertools.product([0, 1], [1, 5, 8]))
"""Sequence dim and length: fewer tokens than ranks, uneven, even."""
RANKS = [2, pytest.param(4, marks=pytest.mark.extended)]
SOME = [(0, 1), (0, 5), (1, 5), (1, 8)]


@dataclasses.dataclass
class Run:
    """One operation, run once."""

    outputs: list[Any]
    loss: Tensor | None
    leaves: dict[str, Tensor]


def _workshop(dim: int, length: int, context: TensorContext | None) -> tuple[Tensor, Workshop, dict[str, Tensor]]:
    """The same numbers each time; shards if a context is given. Also the leaves that may get gradients."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(normal(*shape))

    def module(made: Any) -> Any:
        made = made.double()
        for p in made.parameters():
            p.data = normal(*p.shape)
        return made

    shape = (BATCH, length, D) if dim == 1 else (length, BATCH, D)
    tokens = [length if d == dim else 1 for d in range(2)]
    x, y, z = (normal(*shape).requires_grad_() for _ in range(3))
    shard = (lambda h: SequenceShard.shard(h, dim, context)) if context else (lambda h: h)
    workshop = Workshop(
        dim=dim, length=length, y=y * 1.0, z=shard(z * 1.0),
        mask=normal(*shape) > 0, rows=normal(*tokens, 1) > 0,
        weight=parameter(D), bias=parameter(D), matrix=parameter(D, D), wide=parameter(2 * D, D),
        narrow=parameter(D - 2, D), positions=parameter(*tokens, D), table=parameter(20, D), one=parameter(1, 1, D),
        scalar=parameter(), kernel=parameter(D, D, 3),
        attention=module(nn.MultiheadAttention(D, 2, batch_first=True)), norm=module(nn.LayerNorm(D)),
        rms=module(nn.RMSNorm(D)),
    )  # fmt: skip
    leaves: dict[str, Tensor] = {"x": x, "y": y, "z": z}
    for field in dataclasses.fields(Workshop):
        value = getattr(workshop, field.name)
        if isinstance(value, nn.Parameter):
            leaves[field.name] = value
        if isinstance(value, nn.Module):
            leaves |= {f"{field.name}.{name}": p for name, p in value.named_parameters()}
    return shard(x * 1.0), workshop, leaves


def _run(operation: Operation, dim: int, length: int, context: TensorContext | None) -> Run | Exception:
    """What it returns (and x afterwards) as plain values, and a loss that depends on every number in them."""
    x, workshop, leaves = _workshop(dim, length, context)
    try:
        with warnings.catch_warnings(), functions_take_whole(), handle_checkpoints(unwrapped):
            warnings.simplefilter("ignore")
            returned = operation(x, workshop)
            outputs = [_plain(value) for value in tree_flatten((returned, x, workshop.z, workshop.y))[0]]
    except Exception as error:
        return error
    terms = [(weight * value).sum() for value, weight in _weighted(outputs)]
    return Run(outputs, torch.stack(terms).sum() if terms else None, leaves)


def _weighted(outputs: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for value in outputs:
        if isinstance(value, Tensor) and value.requires_grad:
            value = value.double()
            yield value, torch.randn(value.shape, dtype=value.dtype, generator=generator)


def _plain(value: Any) -> Any:
    if isinstance(value, SequenceShard):
        shape, dtype, requires_grad = value.shape, value.dtype, value.requires_grad
        value = value.whole()
        assert (value.shape, value.dtype, value.requires_grad) == (shape, dtype, requires_grad)
    return value


def _same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-2 if expected.element_size() == 2 else 1e-5
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance, equal_nan=True)
        assert found.requires_grad == expected.requires_grad, "requires_grad"
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected)
    else:
        assert type(found) is type(expected)
        assert found == expected


def _gradients(run: Run, context: TensorContext | None) -> dict[str, Tensor]:
    """Of every leaf; summed over the ranks where the lineage of the loss says that they are partial."""
    if run.loss is None:
        return {}
    lineage = trace_regions([run.loss])
    grads = torch.autograd.grad(run.loss, list(run.leaves.values()), allow_unused=True)
    found = {}
    for (name, leaf), grad in zip(run.leaves.items(), grads, strict=True):
        if grad is None:
            continue
        regions = lineage.regions[id(leaf)]
        assert len(regions) == 1, f"the step would be refused: {name} is used in {regions}"
        if context is not None and regions == {"sequence"}:
            dist.all_reduce(grad)
        found[name] = grad
    assert not lineage.crossings, f"the step would be refused: {lineage.crossings}"
    return found


def _compare(operation: Operation, dim: int, length: int, context: TensorContext, may_raise: bool) -> bool:
    """Whether it ran."""
    expected, found = _run(operation, dim, length, None), _run(operation, dim, length, context)
    if isinstance(expected, Exception):
        assert isinstance(found, Exception), f"on a whole tensor: {expected!r}"
        return False
    try:
        if isinstance(found, Exception):
            raise found
        grads = _gradients(found, context)
    except Exception:
        if may_raise:
            return False
        raise
    assert len(found.outputs) == len(expected.outputs)
    for mine, theirs in zip(found.outputs, expected.outputs, strict=True):
        _same(mine, theirs)
    expected_grads = _gradients(expected, None)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")  # noqa: B023
    return True


def _check(operations: dict[str, Operation], layouts: list[tuple[int, int]], may_raise: bool) -> list[str]:
    """What went wrong, in words; nothing if all is well."""
    context, wrong = TensorContext(dist.group.WORLD), []
    for name, operation in operations.items():
        ran = 0
        for dim, length in layouts:
            try:
                ran += _compare(operation, dim, length, context, may_raise)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                wrong.append(f"{name} (dim {dim}, {length} tokens): {error!r} in {where.filename}:{where.lineno}")
                break
        else:
            if ran == 0 and not may_raise:
                wrong.append(f"{name} runs nowhere")
    return wrong


def _layouts(world_size: int, config: pytest.Config) -> list[tuple[int, int]]:
    return EVERY if world_size == 2 or config.getoption("--all-cases") else SOME


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_operations_give_what_they_give_on_the_whole_tensor(
    kind: str, world_size: int, pytestconfig: pytest.Config
) -> None:
    found = run_ranks(world_size, _check_table, kind, _layouts(world_size, pytestconfig))
    assert not any(found), "\n\n".join(itertools.chain(*found))


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_give_the_same_raises(name: str, world_size: int, pytestconfig: pytest.Config) -> None:
    found = run_ranks(world_size, _check_refused, name, _layouts(world_size, pytestconfig))
    assert not any(found), "\n\n".join(itertools.chain(*found))


def _check_table(rank: int, world_size: int, kind: str, layouts: list[tuple[int, int]]) -> list[str]:
    return _check(OPERATIONS[kind], layouts, False)


def _check_refused(rank: int, world_size: int, name: str, layouts: list[tuple[int, int]]) -> list[str]:
    return _check({name: REFUSED[name]}, layouts, True)


# ---------------------------------------------------------------- the rule tables


def test_every_operation_of_the_rule_tables_is_tried() -> None:
    """By name, or by an operator that goes by another name."""
    source = Path(sequence_operations.__file__).read_text()
    operators = {"__add__": "x + ", "__radd__": "1.5 + x", "__sub__": "x - ", "__rsub__": "1 - x", "__mul__": "x * "}
    operators |= {"__rmul__": "o.weight * ", "__truediv__": "x / ", "__rtruediv__": "1 / (", "__neg__": "-x"}
    operators |= {"__pow__": "x**2", "__iadd__": "operator.iadd", "__isub__": "operator.isub"}
    operators |= {"__imul__": "operator.imul", "__itruediv__": "operator.itruediv"}
    python_2 = {"__div__", "__rdiv__"}
    names = (sequence._TOKEN_LOCAL.keys() | sequence._SHAPE) - python_2
    missing = {name for name in names if operators.get(name, name.strip("_")) not in source}
    assert not missing


# ---------------------------------------------------------------- what runs on the shard


LOCAL: dict[str, Operation] = {
    "residual": OPERATIONS["norms and projections"]["residual"],
    "norm by hand": OPERATIONS["norms and projections"]["norm by hand"],
    "nn.LayerNorm": OPERATIONS["norms and projections"]["nn.LayerNorm"],
    "nn.RMSNorm": OPERATIONS["norms and projections"]["nn.RMSNorm"],
    "linear": OPERATIONS["norms and projections"]["linear"],
    "layer_norm by keywords": OPERATIONS["norms and projections"]["layer_norm by keywords"],
    "gelu": OPERATIONS["activations"]["gelu"],
    "mul": lambda x, o: x * o.weight * 2.0 * o.z + o.positions,
    "add in place": OPERATIONS["in place"]["add shard in place"],
    "metadata": lambda x, o: (x.shape, x.size(1), len(x), x.dtype, x.device, x.dim(), x.requires_grad, x._version),
    "types": lambda x, o: (x.to(torch.float32), x.half(), x.type_as(o.weight), x.to(o.z), x.detach(), x.clone()),
}


def _count(rank: int, world_size: int, name: str) -> dict[str, int]:
    x, workshop, _ = _workshop(1, 8, TensorContext(dist.group.WORLD))
    with CollectiveCounter() as counter:
        result = LOCAL[name](x, workshop)
    assert all(isinstance(y, SequenceShard) for y in tree_flatten(result)[0] if isinstance(y, Tensor))
    return dict(counter.calls)


@pytest.mark.parametrize("name", LOCAL)
def test_what_treats_all_tokens_alike_sends_nothing(name: str) -> None:
    assert run_ranks(2, _count, name) == [{}, {}]


def _dropout(rank: int, world_size: int, dim: int) -> tuple[Tensor, list[Tensor], bool]:
    context = TensorContext(dist.group.WORLD)
    x = torch.ones((64, 4, D) if dim == 0 else (4, 64, D))
    torch.manual_seed(5)
    once = F.dropout(SequenceShard.shard(x, dim, context), 0.25)
    again = F.dropout(SequenceShard.shard(x, dim, context), 0.25)
    after = torch.rand(3)
    torch.manual_seed(5)
    same = bool((F.dropout(SequenceShard.shard(x, dim, context), 0.25).whole() == once.whole()).all())
    assert type(once) is SequenceShard and not torch.equal(once.plain, again.plain)
    return after, list(once.whole().chunk(world_size, dim)), same


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_dropout_draws_other_masks_on_each_rank_and_repeats_with_the_seed(dim: int, world_size: int) -> None:
    found = run_ranks(world_size, _dropout, dim)
    for after, pieces, same in found:
        assert same
        assert torch.equal(after, found[0][0]), "the replicated stream goes on alike"
        for mine, theirs in zip(pieces, found[0][1], strict=True):
            assert torch.equal(mine, theirs)
        whole = torch.cat(pieces)
        assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert 0.15 < (whole == 0).float().mean() < 0.35
        assert not any(torch.equal(a, b) for a, b in itertools.combinations(pieces, 2))


def _describe(rank: int, world_size: int) -> tuple[Any, ...]:
    x = SequenceShard.shard(torch.randn(2, 5, D), 1, TensorContext(dist.group.WORLD))
    return type(x), x.tokens.dim, x.tokens.length, x.plain.shape, type(x.plain), type(x.whole()), x.whole().shape


def test_a_shard_knows_its_tokens() -> None:
    whole = (Tensor, Tensor, torch.Size([2, 5, D]))
    for rank, found in enumerate(run_ranks(4, _describe)):
        own = torch.Size([2, 2 if rank == 0 else 1, D])
        assert found == (SequenceShard, -2, 5, own, *whole)
