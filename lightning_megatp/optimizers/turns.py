"""One step of an optimizer by several calls of it, each with some of its parameters; and what it keeps besides them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Turn = tuple[Sequence[Tensor], Callable[[], AbstractContextManager[None]]]
"""Parameters for one call of an optimizer, and what to be in meanwhile."""


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


@functools.cache
def _torchs_attributes() -> frozenset[str]:
    return frozenset(Optimizer([torch.nn.Parameter(torch.zeros(1))], {}).__dict__)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps outside its groups, but for torch's bookkeeping and methods patched on the instance."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key not in _torchs_attributes() and not callable(getattr(type(optimizer), key, None))
    }


def is_plain(value: Any) -> bool:
    """Numbers, text, functions, and containers of them: what a twin may hold without touching the original."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(is_plain, value))
    if inspect.isfunction(value):
        return value.__closure__ is None  # a closure may hold the user's optimizer or parameters
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def plain(value: Any) -> Any:
    """A copy, with tensors of one number (a capturable learning rate) as numbers."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return tuple(map(plain, value))  # betas
    return copy.deepcopy(value) if is_plain(value) else value
