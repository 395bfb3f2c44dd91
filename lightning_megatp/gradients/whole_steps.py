"""Steps of optimizers that look at whole tensors (Muon, LAMB, Adafactor), of which tensor ranks hold parts.

A few parameters at a time are gathered, with their gradients and states; every rank steps them alike, and keeps its
part. Between steps a rank holds what it holds with AdamW: states of a parameter's shape are cut as it is, others
(Adafactor's rows and columns) are the same on all ranks. Megatron-LM's Muon calls this mode "duplicated".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.gradients.elementwise import check_elementwise, check_tensorwise, coupled_parameters, unwrap
from lightning_megatp.gradients.turns import Turn, step_in_turns
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.torch import replace_step
from lightning_megatp.tensor.parameters import gather_shards, whole_values

TURN_BYTES = 64 << 20
"""Whole parameters of one turn, if that is more than one."""


def let_step(optimizer: Any, parallel: ParallelModule) -> None:
    """See whether an optimizer can step the parts that this rank holds; if not, let `optimizer.step()` find whole ones.

    Args:
        optimizer: torch's, or Lightning's wrapper around it.

    Raises:
        ValueError: it looks at whole tensors with zero > 0, or at more than one tensor at a time.

    Communication: none now. In each step, for each parameter of which it looks at the whole, an all-gather over tp of
        itself, of its gradient, and of each state of its shape. Memory: meanwhile these whole, of `TURN_BYTES` of
        parameters at a time.
    """
    parts = [p for _, p in parallel.named_held() if parallel.spec(p) is not None or id(p) in parallel.divided]
    if parallel.divided:
        check_elementwise(optimizer, parts)
        return
    coupled = coupled_parameters(optimizer, parts)
    if not coupled:
        return
    check_tensorwise(optimizer, coupled.values())
    optimizer = unwrap(optimizer)

    def step(once: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        step_in_turns(optimizer, once, _turns(optimizer, parallel, coupled))
        return loss

    replace_step(optimizer, step)
    parallel.stepped_whole.update(coupled)
    sizes = [torch.Size(spec.shape).numel() for p in coupled.values() if (spec := parallel.spec(p)) is not None]
    rank_zero_info(
        f"MegaTPStrategy: {type(optimizer).__name__} looks at whole tensors. In each of its steps {len(sizes)} split"
        f" parameters ({sum(sizes):,} numbers), their gradients and states are gathered over tp."
    )


def _turns(optimizer: Optimizer, parallel: ParallelModule, coupled: Mapping[int, Tensor]) -> list[Turn]:
    """First the parameters that are stepped as they are, then the others by their sizes, in the order of the groups."""
    as_they_are: list[Tensor] = []
    parts: list[list[Tensor]] = []
    room = 0
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        spec = parallel.spec(parameter) if id(parameter) in coupled else None
        if spec is None or parameter.grad is None:
            as_they_are.append(parameter)
            continue
        size = parameter.element_size() * torch.Size(spec.shape).numel()
        if size > room:
            parts.append([])
            room = TURN_BYTES
        room -= size
        parts[-1].append(parameter)
    first: list[Turn] = [(as_they_are, contextlib.nullcontext)] if as_they_are or not parts else []
    return [*first, *((part, functools.partial(_whole, optimizer, parallel, part)) for part in parts)]


@contextlib.contextmanager
def _whole(optimizer: Optimizer, parallel: ParallelModule, members: Sequence[Tensor]) -> Iterator[None]:
    """Meanwhile parameters, their gradients and states are whole."""
    rank, group = parallel.context.rank, parallel.context.group
    split = [(p, spec) for p in members if (spec := parallel.spec(p)) is not None]
    held = [(p.shape, p.grad) for p, _ in split]
    for parameter, _ in split:
        parameter.grad = None  # it has to have the parameter's shape
    with whole_values(split, group):
        for (parameter, spec), (shape, gradient) in zip(split, held, strict=True):
            parameter.grad = None if gradient is None else gather_shards(gradient, spec, group)
            state = optimizer.state.get(parameter, {})
            state.update({key: gather_shards(x, spec, group) for key, x in state.items() if _has_shape(x, shape)})
        try:
            yield
        finally:
            for (parameter, spec), (shape, _) in zip(split, held, strict=True):
                parameter.grad = None
                state = optimizer.state.get(parameter, {})
                for key, x in state.items():
                    if _has_shape(x, spec.shape):
                        state[key] = spec.spec(rank).take(x)
                    elif _has_shape(x, shape):
                        raise RuntimeError(
                            f"MegaTPStrategy: {type(optimizer).__name__} keeps a state `{key}` of `{spec.name}` with"
                            f" the shape {tuple(x.shape)}, which is that of a tensor rank's part, while the parameter"
                            f" is {tuple(spec.shape)}: these can't be told apart. Leave this layer out of the plan."
                        )
    for (parameter, _), (_, gradient) in zip(split, held, strict=True):
        parameter.grad = gradient


def _has_shape(x: Any, shape: Sequence[int]) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and tuple(x.shape) == tuple(shape)
