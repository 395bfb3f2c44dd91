"""Where a loss uses each parameter: partial gradients are summed, values beside the entries and exits are errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.tensor.lineage import trace_regions
from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.ranks import RankError, run_ranks

D, HIDDEN, VOCAB, TOKENS = 6, 8, 10, 5

Forward = Callable[["Net", Tensor], Tensor]


class Block(nn.Module):
    """norm, up, a scale of the hidden values, down, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        self.inner = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner * torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, two blocks, a head, and parts that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.gate = nn.Linear(D, 1)
        self.head = nn.Linear(D, VOCAB)
        self.unused = nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN: dict[str, Any] = {"blocks.*.up": "column", "blocks.*.down": "row"}
SEQUENCE: dict[str, Any] = {**PLAN, "blocks.*": "sequence"}


def _loss(net: Net, forward: Forward) -> Tensor:
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return forward(net, ids).pow(2).mean()


def _step(net: Any, parallel: Any, forward: Forward) -> None:
    """What the strategy does around a backward."""
    with parallel.step(watch=False):
        loss = _loss(net, forward)
    parallel.partial.trace([loss])
    with parallel.user_code():
        loss.backward()
    parallel.partial.sum()
    parallel.partial.forget()


def _nets() -> tuple[Net, Net]:
    torch.manual_seed(1)
    net = Net().double()
    return net, copy.deepcopy(net)


def _check_gradients(net: Net, whole: Net, parallel: Any) -> None:
    for name, parameter in net.named_parameters():
        expected, spec = whole.get_parameter(name).grad, parallel.spec(parameter)
        if expected is None:
            assert parameter.grad is None, name
            continue
        wanted = expected if spec is None else spec.spec(dist.get_rank()).take(expected)
        torch.testing.assert_close(parameter.grad, wanted, msg=lambda text: f"{name}: {text}")  # noqa: B023


# ---------------------------------------------------------------- what is found


def _regions(rank: int, world_size: int, plan: dict[str, Any]) -> dict[str, set[str]]:
    net, _ = _nets()
    parallelize(net, plan)
    lineage = trace_regions([_loss(net, Net.forward)])
    assert not lineage.crossings and not lineage.hidden
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert all(lineage.leaves[i] is net.get_parameter(names[i]) for i in lineage.regions)
    return {names[i]: regions for i, regions in lineage.regions.items()}


def _expected_regions(on_tokens: str) -> dict[str, set[str]]:
    found = {"tok.weight": {"whole"}, "head.weight": {"whole"}, "head.bias": {"whole"}}
    for block in ("blocks.0", "blocks.1"):
        found |= {f"{block}.{name}": {"tensor"} for name in ("up.weight", "up.bias", "down.weight", "inner")}
        found |= {f"{block}.{name}": {on_tokens} for name in ("norm.weight", "norm.bias", "down.bias")}
    return found


def test_uses_on_whole_values_and_inside_tensor_regions() -> None:
    assert run_ranks(2, _regions, PLAN) == [_expected_regions("whole")] * 2


def test_uses_on_shards_of_the_sequence() -> None:
    assert run_ranks(2, _regions, SEQUENCE) == [_expected_regions("sequence")] * 2


def _partial(rank: int, world_size: int, plan: dict[str, Any]) -> set[str]:
    net, whole = _nets()
    parallel = parallelize(net, plan)
    _loss(whole, Net.forward).backward()
    loss = _loss(net, Net.forward)
    parallel.partial.trace([loss])
    names = {name for name, parameter in net.named_parameters() if id(parameter) in parallel.partial}
    loss.backward()
    parallel.partial.sum()
    _check_gradients(net, whole, parallel)
    return names


@pytest.mark.parametrize("world_size", [2, 4])
def test_partial_gradients_are_summed(world_size: int) -> None:
    inner = {f"blocks.{i}.inner" for i in range(2)}
    on_tokens = {f"blocks.{i}.{name}" for i in range(2) for name in ("norm.weight", "norm.bias", "down.bias")}
    assert run_ranks(world_size, _partial, PLAN) == [inner] * world_size
    assert run_ranks(world_size, _partial, SEQUENCE) == [inner | on_tokens] * world_size


def _skip_first(net: Net, ids: Tensor) -> Tensor:
    return net.head(net.blocks[1](net.tok(ids)))


def _changing_steps(rank: int, world_size: int) -> None:
    """Layers dropped at random: a step may use parameters that no step before has used."""
    net, whole = _nets()
    parallel = parallelize(net, SEQUENCE)
    for forward in (_skip_first, Net.forward, _skip_first):
        net.zero_grad()
        whole.zero_grad()
        _step(net, parallel, forward)
        _loss(whole, forward).backward()
        _check_gradients(net, whole, parallel)


def test_steps_may_use_other_parameters_than_the_first() -> None:
    run_ranks(2, _changing_steps)


def _also_on_whole_values(net: Net, ids: Tensor) -> Tensor:
    h = net.tok(ids)
    return net(ids) + torch.stack([(i + 1) * block.norm(h).mean() for i, block in enumerate(net.blocks)]).sum()


def _used_anywhere(rank: int, world_size: int, forwards: list[Forward]) -> tuple[int, list[int]]:
    """Whole parameters of which a step may do anything: backwards that accumulate, and the all-reduces of each."""
    net, whole = _nets()
    parallel = parallelize(net, SEQUENCE)
    parallel.context.kept_whole |= {id(p) for block in net.blocks for p in block.norm.parameters()}
    sent = []
    for forward in forwards:
        with parallel.step(watch=False):
            loss = _loss(net, forward)
        _loss(whole, forward).backward()
        with CollectiveCounter() as counter:
            parallel.partial.trace([loss])
            loss.backward()
        sent.append(counter.calls["all-reduce"])
    with CollectiveCounter() as counter:
        parallel.partial.sum()
    parallel.partial.forget()
    _check_gradients(net, whole, parallel)
    return counter.calls["all-reduce"], sent


def test_a_norm_that_a_step_may_use_anywhere_is_summed_once_if_it_is_used_on_tokens_only() -> None:
    both, tokens = _also_on_whole_values, Net.forward
    assert run_ranks(2, _used_anywhere, [tokens, tokens]) == [(1, [0, 0])] * 2
    assert run_ranks(2, _used_anywhere, [both, tokens]) == [(1, [4, 4])] * 2, "weight and bias, where they are used"
    assert run_ranks(2, _used_anywhere, [tokens, both]) == [(1, [0, 8])] * 2, "what the first left is summed too"


def _checkpointed(net: Net, ids: Tensor) -> Tensor:
    x = net.tok(ids)
    for block in net.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return net.head(x)


def _shared_block(net: Net, ids: Tensor) -> Tensor:
    return net.head(net.blocks[0](net.blocks[0](net.tok(ids))))


def _detached(net: Net, ids: Tensor) -> Tensor:
    x = net.blocks[0](net.tok(ids)).detach()
    return net.head(net.blocks[1](x)) + net.head(x.mean(1, keepdim=True))


def _gated_on_data(net: Net, ids: Tensor) -> Tensor:
    """A whole gate inside a region is right as long as nothing but its own weights gets a gradient through it."""
    data, block = torch.nn.functional.one_hot(ids, VOCAB)[..., :D].double(), net.blocks[0]
    return net.head(block.down(torch.tanh(block.up(data)) * torch.sigmoid(net.gate(data))))


def _head_inside(net: Net, ids: Tensor) -> Tensor:
    """A parameter used on whole values and on split ones."""
    block, scale = net.blocks[0], net.gate.bias
    return net.head(block.down(block.up(net.tok(ids)) * scale) * scale)


def _regularised(net: Net, ids: Tensor) -> Tensor:
    return net.forward(ids) + net.blocks[0].norm.weight.pow(2).sum()


def _reentrant(net: Net, ids: Tensor) -> Tensor:
    return net.head(checkpoint(net.blocks[0], net.tok(ids), use_reentrant=True))


class CheckpointFunction(torch.autograd.Function):
    """As guided-diffusion has it: gradients of inputs and parameters, of a graph that backward makes."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: Any, *args: Any) -> Any:
        ctx.run, ctx.length, ctx.args = run, length, args
        with torch.no_grad():
            return run(*args[: int(length)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        n = int(ctx.length)
        inputs = [x.detach().requires_grad_() for x in ctx.args[:n]]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(out, [*inputs, *ctx.args[n:]], grads, allow_unused=True)


class Renamed(CheckpointFunction):
    """The same, as no name tells."""


class Reversible(torch.autograd.Function):
    """Makes its graph in backward, and adds to the gradients of parameters by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Any) -> Tensor:
        ctx.x, ctx.run = x, run
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(x), grad)
        return x.grad, None


class Times(torch.autograd.Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


def _by_function(net: Net, ids: Tensor) -> Tensor:
    x = net.tok(ids)
    for block in net.blocks:
        x = CheckpointFunction.apply(block, 1, x, *block.parameters())
    return net.head(x)


def _reversible(net: Net, ids: Tensor) -> Tensor:
    x = net.tok(ids)
    for block in net.blocks:
        x = Reversible.apply(x, block)
    return net.head(x)


def _reversible_inside(net: Net, ids: Tensor) -> Tensor:
    x, block = net.tok(ids), net.blocks[0]
    return net.head(block.down(Reversible.apply(block.up(x), lambda h: torch.tanh(block.inner * h))))


def _weight_of_a_function(net: Net, ids: Tensor) -> Tensor:
    x = net(ids)
    return x.mean() + Times.apply(net.tok(ids), net.blocks[0].up.weight)


UNUSUAL: dict[str, Forward] = {
    "checkpointed": _checkpointed,
    "a reentrant checkpoint": _reentrant,
    "a checkpoint function as diffusion models have it": _by_function,
    "a function that makes its graph in backward": _reversible,
    "the same inside of a region": _reversible_inside,
    "a split weight in a function": _weight_of_a_function,
    "a block used twice": _shared_block,
    "detached": _detached,
    "a gate computed from data": _gated_on_data,
    "a parameter on both sides of an entry": _head_inside,
    "a regulariser on what is used on tokens": _regularised,
}


ONLY: dict[str, list[dict[str, Any]]] = {"a function that makes its graph in backward": [PLAN]}
"""For which plans, if not for both."""


def _unusual(rank: int, world_size: int, name: str, plan: dict[str, Any]) -> None:
    net, whole = _nets()
    parallel = parallelize(net, plan)
    _step(net, parallel, UNUSUAL[name])
    _loss(whole, UNUSUAL[name]).backward()
    _check_gradients(net, whole, parallel)


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_graphs(name: str) -> None:
    for plan in ONLY.get(name, [PLAN, SEQUENCE]):
        run_ranks(2, _unusual, name, plan)


# ---------------------------------------------------------------- without ranks


def test_a_graph_without_marks_is_whole() -> None:
    a, b, c = (torch.ones(2, requires_grad=flag) for flag in (True, True, False))
    lineage = trace_regions([(a * b + c).sum(), (a * c).sum(), torch.ones(1)])
    assert lineage.regions == {id(a): {"whole"}, id(b): {"whole"}}
    assert lineage.leaves == {id(a): a, id(b): b}


def test_a_value_without_a_graph() -> None:
    assert trace_regions([torch.ones(3)]).regions == {}
    assert trace_regions([torch.ones(3, requires_grad=True)]).regions == {}, "a leaf itself has no graph"


def test_a_deep_graph_with_many_paths() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x
    for _ in range(3000):
        y = y + y.tanh()
    assert trace_regions([y]).regions == {id(x): {"whole"}}


# ---------------------------------------------------------------- errors


def _escape(net: Net, ids: Tensor) -> Tensor:
    """The column's output goes to the loss; its row is called on something else."""
    block = net.blocks[0]
    x = net.tok(ids)
    return block.up(x).sum(-1) + block(x).sum(-1)


def _escape_on_data(net: Net, ids: Tensor) -> Tensor:
    data = torch.nn.functional.one_hot(ids, VOCAB)[..., :D].double()
    return net.blocks[0].up(data).sum(-1)


def _gated(net: Net, ids: Tensor) -> Tensor:
    """A gate computed from whole values multiplies the split ones."""
    x, block = net.tok(ids), net.blocks[0]
    return net.head(block.down(torch.tanh(block.up(x)) * torch.sigmoid(net.gate(x))))


def _row_output_inside(net: Net, ids: Tensor) -> Tensor:
    """A value that left one region goes into the next beside its column layer."""
    first, second = net.blocks
    y = first.down(torch.tanh(first.up(net.tok(ids))))
    return net.head(second.down(second.up(y) * y[..., :1]))


def _unknown_checkpoint(net: Net, ids: Tensor) -> Tensor:
    x, block = net.tok(ids), net.blocks[0]
    return net.head(CheckpointFunction.apply(block, 1.0, x))


def _weights_of_its_layers(net: Net, ids: Tensor) -> Tensor:
    x, block = net.tok(ids), net.blocks[0]
    return net.head(Renamed.apply(block, 1, x, *block.parameters()))


def _part_of_a_region(net: Net, ids: Tensor) -> Tensor:
    """Runs a block up to its middle."""
    x, block = net.tok(ids), net.blocks[0]
    return net.head(block.down(Reversible.apply(x, block.up)))


ERRORS: dict[str, tuple[Forward, dict[str, Any], list[str]]] = {
    "a column output that no row consumes": (
        _escape,
        PLAN,
        ["output of `blocks.0.up` reaches the loss without passing a `row` layer", "style `column_gather`", "add to"],
    ),
    "a column output of data": (
        _escape_on_data,
        PLAN,
        ["output of `blocks.0.up` reaches the loss without passing a `row` layer", "style `column_gather`"],
    ),
    "a gate computed from whole values": (
        _gated,
        PLAN,
        ["`tok.weight` is used both where values are whole and inside a tensor-parallel region (tensor, whole)",
         "only through its `column` layers", "take the region's layers out of the plan"],
    ),
    "a whole value inside a region": (
        _row_output_inside,
        PLAN,
        ["a whole value is used where values are tensor", "beside its `column` and `row` layers", "a gate"],
    ),
    "a checkpoint function of an unknown kind": (
        _unknown_checkpoint,
        PLAN,
        ["a `CheckpointFunction` of an unknown kind", "Use torch.utils.checkpoint.checkpoint"],
    ),
    "a function that runs layers, and gets their weights": (
        _weights_of_its_layers,
        PLAN,
        ["`Renamed` runs layers that the plan splits", "`blocks.0.up.weight`", "would be lost"],
    ),
    "a function that returns tokens of a rank": (
        _reversible,
        SEQUENCE,
        ["`Reversible` runs layers that the plan splits and returns a value", "sequence_parallel=False"],
    ),
    "a function that makes a part of a region's graph in backward": (
        _part_of_a_region,
        PLAN,
        ["runs modules again in its backward", "(whole; the result: tensor)", "Let the function run whole blocks"],
    ),
}  # fmt: skip


def _wrong(rank: int, world_size: int, name: str) -> None:
    net, _ = _nets()
    forward, plan, _ = ERRORS[name]
    _step(net, parallelize(net, plan), forward)


@pytest.mark.parametrize("name", ERRORS)
def test_values_that_pass_beside_entries_and_exits(name: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, _wrong, name)
    assert len(error.value.failures) == 2, "every rank says so"
    for failure in error.value.failures:
        assert failure.type_name == "RuntimeError" and failure.message.startswith("MegaTPStrategy: ")
        for text in ERRORS[name][2]:
            assert text in failure.message
