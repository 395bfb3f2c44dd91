"""A model and the same model split, compared on the ranks of a test: outputs, every gradient, a step, the state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.checkpoint.full import full_state_dict
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.parameters import gather_shards
from lightning_megatp.tensor.sequence import SequenceShard
from tests.distributed.tensor.splitting import parallelize

Call = Callable[[nn.Module, list[Tensor]], Any]


def compare(
    make: Callable[[], nn.Module],
    plan: dict[str, Any],
    inputs: list[Tensor],
    call: Call,
    tolerance: float = 1e-10,
) -> ParallelModule:
    """Two steps of training and one evaluation, in the dtype of the first input.

    Args:
        make: the model; without randomness while it runs.
        plan: of the split one.
        inputs: what the model gets, the same on every rank; floating ones need a gradient.
        call: runs a model on the inputs and returns its outputs, nested as it likes.
        tolerance: the largest difference allowed, relative to the largest number of a tensor, or to 1.
    """
    torch.manual_seed(1)
    split = make().to(inputs[0].dtype)
    whole = copy.deepcopy(split)
    parallel = parallelize(split, plan)
    assert parallel.sharded, "the plan splits nothing"
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (whole, split)]
    for _ in range(2):
        expected, x_expected = _step(whole, inputs, call, None)
        found, x_found = _step(split, inputs, call, parallel)
        _close("outputs", found, expected, tolerance)
        _close("gradients of inputs", x_found, x_expected, tolerance)
        _same_gradients(whole, parallel, tolerance)
        for optimizer in optimizers:
            optimizer.step()
        _same_parameters(whole, parallel, tolerance)
    with torch.no_grad():
        whole.eval(), split.eval()
        found, expected = _outputs(split, inputs, call, parallel), _outputs(whole, inputs, call, None)
        _close("outputs of evaluation", found, expected, tolerance)
    return parallel


def _close(what: str, found: list[Any], expected: list[Any], tolerance: float) -> None:
    assert len(found) == len(expected), what
    for index, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert (x is None) == (y is None), f"{what} {index}"
        if x is not None and x.numel():
            assert x.shape == y.shape and x.dtype == y.dtype, f"{what} {index}: {x.shape} {x.dtype}"
            difference, most = float((x - y).abs().max()), tolerance * max(1.0, float(y.abs().max()))
            assert difference <= most, f"{what} {index} differs by {difference:.3g} > {most:.3g}"


def _step(
    model: nn.Module, inputs: list[Tensor], call: Call, parallel: ParallelModule | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The outputs, and the gradients of the inputs."""
    own = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    model.zero_grad()
    outputs = _outputs(model, own, call, parallel)
    loss = sum(((x * _weight(x)) ** 2).mean() for x in outputs if x.requires_grad)
    if parallel is not None:
        parallel.partial.trace([loss])
    loss.backward()
    if parallel is not None:
        parallel.partial.sum()
        parallel.partial.forget()
    return [x.detach() for x in outputs], [x.grad for x in own]


def _outputs(model: nn.Module, inputs: list[Tensor], call: Call, parallel: ParallelModule | None) -> list[Tensor]:
    if parallel is None:
        outputs = call(model, inputs)
    else:
        with parallel.step(watch=True):
            outputs = call(model, inputs)
    found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
    return [x.whole() if isinstance(x, SequenceShard) else x for x in found]


def _weight(x: Tensor) -> Tensor:
    """No output counts like another."""
    return torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)


def _same_gradients(whole: nn.Module, parallel: ParallelModule, tolerance: float) -> None:
    for name, parameter in parallel.module.named_parameters():
        expected, spec = whole.get_parameter(name).grad, parallel.spec(parameter)
        grad = parameter.grad
        if spec is not None and grad is not None:
            grad = gather_shards(grad, spec, parallel.context.group)
        _close(f"gradient of {name}", [grad], [expected], tolerance)


def _same_parameters(whole: nn.Module, parallel: ParallelModule, tolerance: float) -> None:
    state = full_state_dict(parallel.module.state_dict(), parallel, keep=True)
    assert list(state) == list(whole.state_dict())
    for name, value in whole.state_dict().items():
        _close(f"{name} after a step", [state[name]], [value], tolerance)
