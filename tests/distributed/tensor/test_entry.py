"""The entry of a region: its backward starts to send, computes the gradients of weights meanwhile, and waits; whatever
a step does with its graph, the numbers are those of one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.tensor import entry
from lightning_megatp.tensor.collectives import Pending
from lightning_megatp.tensor.deferred import DeferredWeights
from lightning_megatp.tensor.sequence import SequenceShard
from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.test_layers import IN, SIBLINGS, Siblings
from tests.ranks import run_ranks

TOKENS = 5
"""Not divisible by the ranks."""


class Net(nn.Module):
    """Siblings behind a layer that makes their input depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(IN), Siblings()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.norm(x))


PLAN = {f"body.{name}": style for name, style in SIBLINGS.items()}


def _made(sequence: bool) -> tuple[nn.Module, nn.Module, Any]:
    """A model, its split form, and what makes the input of the split one."""
    torch.manual_seed(1)
    whole = Net().double()
    module = copy.deepcopy(whole)
    parallel = parallelize(module, PLAN)

    def given(x: Tensor) -> Tensor:
        return SequenceShard.shard(x, 1, parallel.context) if sequence else x

    return whole, module, (parallel, given)


def _input() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, TOKENS, IN, dtype=torch.float64)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


# ---------------------------------------------------------------- the order of a backward


@contextlib.contextmanager
def _late(events: list[str]) -> Iterator[None]:
    """What is under way is NaN until it is waited for, and everything is noted."""

    def slow(name: str) -> Callable[..., Pending]:
        begin = getattr(entry, name)

        def begun(*args: Any, **kwargs: Any) -> Pending:
            pending = begin(*args, **kwargs)
            complete = pending.wait().clone()
            events.append(name)

            def finish() -> Tensor:
                events.append(name.replace("begin", "wait"))
                return pending.result.copy_(complete)

            return Pending(pending.result.fill_(float("nan")), None, finish)

        return begun

    gradients = DeferredWeights.gradients

    def computed(*args: Any) -> Any:
        events.append("weights")
        return gradients(*args)

    names = ("begin_all_gather", "begin_all_reduce", "begin_reduce_scatter")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(entry, name, slow(name)))
        stack.enter_context(mock.patch.object(DeferredWeights, "gradients", computed))
        yield


def _order(rank: int, world_size: int, sequence: bool, kept: int) -> list[str]:
    whole, module, (parallel, given) = _made(sequence)
    x, x_whole = _input()
    with mock.patch.object(entry, "KEPT_BYTES", kept):
        loss = module(given(x)).square().sum()
    whole(x_whole).square().sum().backward()
    events: list[str] = []
    with _late(events):
        loss.backward()
    parallel.context.end_step()
    torch.testing.assert_close(x.grad, x_whole.grad)
    _same_gradients(whole, module, parallel, sequence)
    return events


def test_weights_are_computed_while_the_input_gradient_is_reduced() -> None:
    expected = ["begin_all_reduce", "weights", "weights", "weights", "wait_all_reduce"]
    assert run_ranks(2, _order, False, 0) == [expected] * 2


def test_a_sequence_is_gathered_again_while_input_gradients_are_computed() -> None:
    """Unless it is small: then it was kept."""
    size = 2 * TOKENS * IN * 8
    start = ["begin_all_gather", "begin_reduce_scatter", "wait_all_gather", *["weights"] * 3]
    assert run_ranks(2, _order, True, size - 1) == [[*start, "wait_reduce_scatter"]] * 2
    expected = ["begin_reduce_scatter", "weights", "weights", "weights", "wait_reduce_scatter"]
    assert run_ranks(2, _order, True, size) == [expected] * 2


# ---------------------------------------------------------------- what else a step does with its graph

Step = Callable[[nn.Module, Tensor, Callable[[Tensor], Tensor]], Any]


def _plain(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    module(given(x)).square().sum().backward()


def _frozen(name: str) -> Step:
    def step(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
        for own, parameter in module.named_parameters():
            parameter.requires_grad_(not own.endswith(name))
        _plain(module, x, given)

    return step


def _hooks(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: 2 * grad)
    _plain(module, x, given)


def _input_first(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> Tensor:
    """A first backward that does not come to the weights leaves nothing behind for the second."""
    loss = module(given(x)).square().sum()
    (found,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return found


def _twice(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    loss = module(given(x)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _penalty(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradients of gradients."""
    loss = module(given(x)).square().sum()
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + found.square().sum()).backward()
    return found


def _penalty_on_a_weight(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    """What a rank computes of its own is a part of the whole: squares of parts add up."""
    loss = module(given(x)).square().sum()
    weights = [module.get_parameter(f"body.{name}.weight") for name in ("q", "v")]
    found = torch.autograd.grad(loss, weights, create_graph=True)
    torch.stack([grad.square().sum() for grad in found]).sum().backward()


def _other_readers(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    """Of one entry, a second backward comes to more layers than the first."""
    body, h = module.body, module.norm(given(x))
    q, k, v = body.q(h), body.k(h), body.v(h)
    body.out(q).square().sum().backward(retain_graph=True)
    body.out(q * k + v).square().sum().backward()


def _changed(change: Callable[[nn.Parameter], None]) -> Step:
    """A layer that changes its weight when it is called: after its siblings entered."""

    def step(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
        def hook(layer: Any, args: Any) -> None:
            change(layer._parameters["weight"])

        module.body.k.register_forward_pre_hook(hook)
        _plain(module, x, given)

    return step


@torch.no_grad()
def _in_place(weight: nn.Parameter) -> None:
    weight.clamp_(-0.1, 0.1)


def _rebound(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


def _checkpointed(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    checkpoint(module, given(x), use_reentrant=False).square().sum().backward()


def _checkpointed_within(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    checkpoint(module.body, module.norm(given(x)), use_reentrant=False).square().sum().backward()


def _anomalies(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        _plain(module, x, given)


def _without_a_sibling(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    body, h = module.body, module.norm(given(x))
    body.k.weight.register_hook(lambda grad: 2 * grad)  # is not called
    body.out(body.q(h) * body.v(h)).square().sum().backward()


def _an_output_not_used(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    """Of the layer that reads first, whose hooks are then not called."""
    body, h = module.body, module.norm(given(x))
    body.q.weight.register_hook(lambda grad: 2 * grad)
    body.q.bias.register_post_accumulate_grad_hook(lambda bias: bias.grad.mul_(2))
    body.out(body.q(h).detach() * body.k(h) + body.v(h)).square().sum().backward()


def _outputs_changed_in_place(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    body, h = module.body, module.norm(given(x))
    body.out(body.q(h).relu_() * body.k(h).tanh_() + body.v(h).mul_(2)).square().sum().backward()


def _a_layer_twice(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    body, h = module.body, module.norm(given(x))
    body.out(body.q(h) * body.k(h) + body.q(h) * body.v(h)).square().sum().backward()


def _two_inputs(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    """As cross-attention."""
    body, h, memory = module.body, module.norm(given(x)), module.norm(given(2 * x))
    body.out(body.q(h) * body.k(memory) + body.v(memory)).square().sum().backward()


def _input_without_gradient(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    module.body(given(x.detach())).square().sum().backward()


def _part_of_the_weights(module: nn.Module, x: Tensor, given: Callable[[Tensor], Tensor]) -> None:
    loss = module(given(x)).square().sum()
    loss.backward(retain_graph=True, inputs=[x, module.body.k.weight])
    loss.backward(inputs=[module.body.k.weight, module.body.v.bias, module.norm.weight])


STEPS: dict[str, Step] = {
    "plain": _plain,
    "frozen weights": _frozen("weight"),
    "frozen biases": _frozen("bias"),
    "frozen siblings": _frozen("q.weight"),
    "hooks": _hooks,
    "the input's gradient first": _input_first,
    "twice through a graph": _twice,
    "gradients of gradients": _penalty,
    "checkpointed": _checkpointed,
    "checkpointed within": _checkpointed_within,
    "anomaly detection": _anomalies,
    "without a sibling": _without_a_sibling,
    "an output not used": _an_output_not_used,
    "outputs changed in place": _outputs_changed_in_place,
    "a layer twice": _a_layer_twice,
    "two inputs": _two_inputs,
    "an input without gradient": _input_without_gradient,
    "part of the weights": _part_of_the_weights,
    "gradients of a weight's gradient": _penalty_on_a_weight,
    "other readers": _other_readers,
    "a weight changed in place": _changed(_in_place),
    "a weight's values exchanged": _changed(_rebound),
}


def _same_gradients(whole: nn.Module, module: nn.Module, parallel: Any, sequence: bool) -> None:
    for name, parameter in whole.named_parameters():
        found, spec = module.get_parameter(name).grad, parallel.spec_of(name)
        if parameter.grad is None:
            assert found is None, name
            continue
        assert found is not None, name
        if spec is not None:
            full = torch.zeros_like(parameter)
            spec.spec(parallel.context.rank).put(full, found)
            found = full
        if spec is not None or (sequence and "norm" in name):  # used on tokens of this rank
            found = found.clone()
            dist.all_reduce(found)
        assert torch.allclose(found, parameter.grad, rtol=1e-9, atol=1e-9), name


def _habits(rank: int, world_size: int, sequence: bool, kept: int, late: bool) -> None:
    for name, step in STEPS.items():
        whole, module, (parallel, given) = _made(sequence)
        x, x_whole = _input()
        with mock.patch.object(entry, "KEPT_BYTES", kept), _late([]) if late else contextlib.nullcontext():
            found = step(module, x, given)
        expected = step(whole, x_whole, lambda x: x)
        parallel.context.end_step()
        try:
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(x.grad, x_whole.grad)
            _same_gradients(whole, module, parallel, sequence)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{name}: {error}") from error


ENTRIES = {"whole": (False, 0), "sequence": (True, 0), "small sequence": (True, entry.KEPT_BYTES)}


@pytest.mark.parametrize("kind", ENTRIES)
def test_any_step_gives_the_gradients_of_one_device(kind: str) -> None:
    run_ranks(3, _habits, *ENTRIES[kind], True)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ENTRIES)
def test_any_step_with_real_collectives(kind: str) -> None:
    run_ranks(3, _habits, *ENTRIES[kind], False)


def _two_dtypes(rank: int, world_size: int) -> None:
    """One entry, read in bfloat16 and in float32."""
    whole, module, (parallel, given) = _made(True)
    found = []
    for model, take in ((module, given), (whole, lambda x: x)):
        torch.manual_seed(2)
        x, body, norm = torch.randn(2, TOKENS, IN, requires_grad=True), model.float().body, model.norm
        h = norm(take(x))
        with torch.autocast("cpu", torch.bfloat16):
            q, k = body.q(h), body.k(h)
        body.out(q.float() * k.float() + body.v(h)).square().sum().backward()
        found.append(x.grad)
    parallel.context.end_step()
    error = (found[0] - found[1]).abs().max() / found[1].abs().max()
    assert error < 0.02, f"more than bfloat16's rounding (2^-8, a few times): {error}"


def test_siblings_may_read_in_different_dtypes() -> None:
    run_ranks(2, _two_dtypes)
