"""Weight gradients that are put off: the same numbers as `F.linear`, later."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from lightning_megatp.tensor.deferred import DeferredWeights, defer_linears
from lightning_megatp.tensor.functions import OwnHook

Step = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    """Three linears, one used twice; a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(7, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for _ in range(2):
            x = self.norm(x + self.block(x))
        return self.head(x)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def made(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return kind().to(dtype)


def put_off(module: nn.Module) -> DeferredWeights:
    deferred = DeferredWeights()
    defer_linears(module, [name for name, _ in module.named_children()] or [""], deferred)
    return deferred


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def compare(kind: Callable[[], nn.Module], step: Step, x: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
    """Two microbatches with `F.linear`, and the same put off; the weights of both after the backwards of both.

    Returns:
        The gradients before anything that was put off is computed, and the module.
    """
    plain, module = made(kind), made(kind)
    deferred = put_off(module)
    for i in range(2):
        step(plain, x + i).backward()
    with deferred.batch(), deferred.halved():
        for i in range(2):
            loss = step(module, x + i)
            with deferred.put_off(i):
                loss.backward()
        before = gradients(module)
        for i in range(2):
            deferred.compute(i)
    expected, found = gradients(plain), gradients(module)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.dtype == found[name].dtype
        torch.testing.assert_close(found[name].to_dense(), gradient.to_dense(), rtol=1e-12, atol=1e-12)
    return before, module


def scalar(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


IDS = torch.arange(12).remainder(5).view(3, 4)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (3, 2, 2)], ids=str)
def test_gradients_of_any_input_shape(shape: tuple[int, ...]) -> None:
    before, module = compare(Net, scalar, IDS.reshape(shape))
    assert not {"up.weight", "up.bias", "down.weight", "down.bias"} & before.keys()
    assert {"norm.weight", "tok.weight"} <= before.keys(), "what is no linear's is computed at once"
    assert type(module.get_submodule("up")) is nn.Linear, "as users ask"


def test_a_vector() -> None:
    compare(lambda: nn.Sequential(nn.Linear(4, 3)), scalar, torch.arange(4.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    def step(module: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = module(ids)
            assert y.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype), "as autocast does"
            return y.float().square().mean()

    plain, module = made(Net, dtype), made(Net, dtype)
    deferred = put_off(module)
    expected_loss = step(plain, IDS)
    expected_loss.backward()
    with deferred.batch(), deferred.halved():
        loss = step(module, IDS)
        with deferred.put_off(0):
            loss.backward()
        assert module.get_parameter("up.weight").grad is None
        deferred.compute(0)
    assert torch.equal(loss, expected_loss)
    for name, expected in gradients(plain).items():
        found = module.get_parameter(name).grad
        assert found is not None and found.dtype == dtype
        scale = float(expected.abs().max())
        assert float((found - expected).abs().max()) <= 2**-8 * scale, f"{name}: one rounding of bfloat16"


@pytest.mark.parametrize("frozen", ["up.weight", "up.bias", "down.weight", "tok.weight"])
def test_frozen_parameters(frozen: str) -> None:
    def kind() -> nn.Module:
        net = Net()
        net.get_parameter(frozen).requires_grad_(False)
        return net

    before, _ = compare(kind, scalar, IDS)
    assert frozen not in before


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def step(module: Any, ids: Tensor) -> Tensor:
        x = module.tok(ids)
        x = x + checkpoint(module.block, x, use_reentrant=reentrant)
        return module.head(module.norm(x)).square().sum()

    before, _ = compare(Net, step, IDS)
    assert "up.weight" not in before


def test_gradients_of_gradients() -> None:
    def step(module: Any, ids: Tensor) -> Tensor:
        loss = module(ids).tanh().square().sum()
        wanted = [module.up.weight, module.norm.weight]
        penalty = sum(g.square().sum() for g in torch.autograd.grad(loss, wanted, create_graph=True))
        return loss + penalty

    compare(Net, step, IDS)


def test_autograd_grad_inside_a_backward() -> None:
    """Code that differentiates by itself, during backward, gets what it asked for."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Linear, weight: Tensor, bias: Tensor) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                inputs = (x, ctx.layer.weight, ctx.layer.bias)
                grad_x, *rest = torch.autograd.grad(ctx.layer(x), inputs, grad)
            return grad_x, None, *rest

    def step(module: Any, ids: Tensor) -> Tensor:
        x = module.tok(ids)
        return Own.apply(x, module.up, module.up.weight, module.up.bias).square().sum()

    before, _ = compare(Net, step, IDS)
    assert "up.weight" in before


def test_hooks_on_gradients_are_called_with_gradients() -> None:
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.1, 0.1)

    def kind() -> nn.Module:
        net = Net()
        net.up.weight.register_hook(lambda grad: grad * 2)
        net.down.weight.register_post_accumulate_grad_hook(clamp)
        return net

    before, _ = compare(kind, scalar, IDS)
    assert {"up.weight", "down.weight"} <= before.keys()


def test_hooks_of_this_package_put_nothing_before() -> None:
    told: list[Tensor] = []

    def kind() -> nn.Module:
        net = Net()
        for parameter in (net.up.weight, net.up.bias):
            parameter.register_post_accumulate_grad_hook(OwnHook(told.append))
        return net

    before, _ = compare(kind, scalar, IDS)
    assert not {"up.weight", "up.bias"} & before.keys()
    assert len(told) == 4 + 8, "once per backward, and once per call of what was put off"


def test_sparse_gradients_of_a_tied_embedding() -> None:
    def kind() -> nn.Module:
        net = Net()
        net.tok.sparse = True
        return net

    compare(kind, scalar, IDS)


@pytest.mark.parametrize(
    "change",
    [parametrizations.weight_norm, functools.partial(prune.random_unstructured, name="weight", amount=0.0)],
    ids=["parametrized", "pruned"],
)
def test_computed_weights(change: Callable[[nn.Module], nn.Module]) -> None:
    def kind() -> nn.Module:
        net = Net()
        change(net.up)
        return net

    compare(kind, scalar, IDS)


def test_torch_func() -> None:
    def step(module: Any, ids: Tensor) -> Tensor:
        x = module.tok(ids)
        return torch.func.vmap(module.up)(x).square().sum()

    compare(Net, step, IDS)


def test_outputs_may_be_changed_in_place() -> None:
    """Of any shape: with a bias, that of three dims is a view."""

    def step(module: Any, ids: Tensor) -> Tensor:
        return module.down(F.relu_(module.up(module.tok(ids)))).square().sum()

    before, _ = compare(Net, step, IDS)
    assert "up.weight" not in before


def test_complex_weights() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3, dtype=torch.complex128)

        def to(self, *args: Any) -> Any:  # `.to(torch.float64)` would take the imaginary parts away
            return self

    def step(module: Any, x: Tensor) -> Tensor:
        return module.layer(torch.complex(x, x + 1)).abs().square().sum()

    compare(Complex, step, torch.arange(4.0).double())


def test_forward_mode() -> None:
    def step(module: Any, ids: Tensor) -> Tensor:
        with forward_ad.dual_level():
            x = module.tok(ids)
            tangent = forward_ad.unpack_dual(module.up(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
            assert tangent is not None
        return (module.up(x) + tangent).square().sum()

    compare(Net, step, IDS)


def test_a_changed_input_is_noticed() -> None:
    layer = nn.Sequential(nn.Linear(3, 3))
    deferred, x = put_off(layer), torch.randn(2, 3)
    with deferred.batch(), deferred.halved():
        loss = layer(x).sum()
        with deferred.put_off(0):
            loss.backward()
        x.zero_()
        with pytest.raises(RuntimeError, match="was changed in place before the schedule"):
            deferred.compute(0)


def test_outside_of_a_batch_nothing_changes() -> None:
    net = made(Net)
    put_off(net)
    nodes, todo = set(), [net(IDS).sum().grad_fn]
    while todo:
        node = todo.pop()
        nodes.add(node.name())
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    assert not any("_Linear" in name for name in nodes)
    twin = copy.deepcopy(net)
    up: Any = twin.up
    assert up.forward.args[0] is up and twin.state_dict().keys() == net.state_dict().keys()


def test_an_exception_leaves_nothing_behind() -> None:
    layer = nn.Sequential(nn.Linear(3, 3))
    deferred = put_off(layer)
    with pytest.raises(ZeroDivisionError), deferred.batch(), deferred.halved():
        with deferred.put_off(0):
            layer(torch.randn(2, 3)).sum().backward()
        raise ZeroDivisionError
    deferred.compute(0)
    assert layer[0].weight.grad is None


def test_compiled_modules_are_left_alone() -> None:
    blocks = nn.ModuleDict({"plain": nn.Linear(3, 3), "by_function": nn.Linear(3, 3), "by_method": nn.Linear(3, 3)})
    blocks["by_function"] = torch.compile(blocks["by_function"], backend="eager")  # type: ignore[assignment]
    blocks["by_method"].compile(backend="eager")
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.blocks = blocks
    found = defer_linears(module, ["inner"], DeferredWeights())
    assert found == ["inner.blocks.by_function", "inner.blocks.by_method"]
    changed = ["forward" in vars(child) for child in module.modules() if isinstance(child, nn.Linear)]
    assert changed == [True, False, False]


def test_a_forward_of_somebody_else_is_left_alone() -> None:
    layer = nn.Sequential(nn.Linear(3, 3))
    layer[0].forward = lambda x: 2 * x
    deferred, x = put_off(layer), torch.ones(2, 3)
    with deferred.batch(), deferred.halved():
        assert torch.equal(layer(x), 2 * x)


def test_a_compiled_function_around_a_deferred_linear() -> None:
    def step(module: Any, ids: Tensor) -> Tensor:
        block = torch.compile(module.block, backend="eager", fullgraph=True)
        return block(module.tok(ids)).square().sum()

    before, _ = compare(Net, step, IDS)
    assert "up.weight" in before, "the compiler's code computes all gradients at once"
