"""Steps of optimizers that look at whole tensors (Muon, LAMB, Adafactor), of which tensor ranks hold parts.

A few parameters at a time are gathered, with their gradients and states; every rank steps them alike, and keeps its
part. Between steps a rank holds what it holds with AdamW: states of a parameter's shape are cut as it is, others
(Adafactor's rows and columns) are the same on all ranks. Megatron-LM's Muon calls this mode "duplicated".
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.gradients.elementwise import (
    Turn,
    check_elementwise,
    check_tensorwise,
    coupled_parameters,
    is_plain,
    own_attributes,
    plain,
    unwrap,
)
from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import replace_step
from lightning_megatp.tensor.parameters import gather_shards

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
    check_tensorwise(optimizer, coupled.values(), step_in_turns)
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


def step_in_turns(optimizer: Optimizer, once: Callable[[], Any], turns: Sequence[Turn]) -> None:
    """One step of an optimizer by several calls, each of which finds other parameters. What it counts besides these and
    their states, it counts once.

    Args:
        once: a call of the optimizer.
        turns: of each the parameters, and what to be in meanwhile.

    Raises:
        RuntimeError: what the optimizer keeps besides (an estimate of its rate) depends on the parameters of a turn.
    """
    groups = optimizer.param_groups
    every = [group["params"] for group in groups]
    holders = [*groups, vars(optimizer)]
    before = [_numbers(holder, optimizer) for holder in holders]
    after: list[dict[str, Any] | None] = [None] * len(holders)
    try:
        for members, around in turns:
            chosen = {id(p) for p in members}
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = [p for p in parameters if id(p) in chosen]
            optimizer.param_groups = [group for group in groups if group["params"]]
            for holder, numbers in zip(holders, before, strict=True):
                _set_numbers(holder, numbers, optimizer)
            with around():
                once()
            for i, holder in enumerate(holders):
                if i == len(groups) or holder["params"]:
                    found = _numbers(holder, optimizer)
                    if after[i] not in (None, found):
                        raise RuntimeError("what it keeps besides the states of its parameters depends on all of them")
                    after[i] = found
    finally:
        for group, parameters in zip(groups, every, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups
    for holder, known in zip(holders, after, strict=True):
        if known is not None:
            _set_numbers(holder, known, optimizer)


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
    held = [(p, p.data, p.grad, spec) for p in members if (spec := parallel.spec(p)) is not None]

    def gather(part: Tensor, spec: ShardedTensorSpec) -> Tensor:
        return gather_shards(parallel.to_send(part), spec, parallel.context.group).to(part.device)

    for parameter, part, gradient, spec in held:
        parameter.grad = None  # it has to have the parameter's shape
        parameter.data = gather(part, spec)
        parameter.grad = None if gradient is None else gather(gradient, spec)
        state = optimizer.state.get(parameter, {})
        state.update({key: gather(x, spec) for key, x in state.items() if _has_shape(x, part.shape)})
    try:
        yield
    finally:
        for parameter, part, gradient, spec in held:
            own = spec.spec(parallel.context.rank)
            part.copy_(own.take(parameter.data))
            parameter.grad = None
            parameter.data, parameter.grad = part, gradient
            state = optimizer.state.get(parameter, {})
            for key, x in state.items():
                if _has_shape(x, spec.shape):
                    state[key] = own.take(x)
                elif _has_shape(x, part.shape):
                    raise RuntimeError(
                        f"MegaTPStrategy: {type(optimizer).__name__} keeps a state `{key}` of `{spec.name}` with the"
                        f" shape {tuple(x.shape)}, which is that of a tensor rank's part, while the parameter is"
                        f" {tuple(spec.shape)}: these can't be told apart. Leave this layer out of the plan."
                    )


def _has_shape(x: Any, shape: Sequence[int]) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and tuple(x.shape) == tuple(shape)


def _numbers(holder: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """What a group, or the optimizer itself, keeps besides parameters and states."""
    own = own_attributes(optimizer) if holder is vars(optimizer) else holder
    return {key: plain(x) for key, x in own.items() if key != "params" and is_plain(x)}


def _set_numbers(holder: dict[str, Any], numbers: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Where they have changed."""
    for key, found in _numbers(holder, optimizer).items():
        if key not in numbers:
            del holder[key]
        elif found != numbers[key] and isinstance(holder[key], Tensor):
            holder[key].fill_(numbers[key])
        elif found != numbers[key]:
            holder[key] = copy.deepcopy(numbers[key])
    holder.update((key, copy.deepcopy(x)) for key, x in numbers.items() if key not in holder)
