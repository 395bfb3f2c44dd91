"""What is known of a function by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lightning_megatp.tensor.draws import OF_TENSORS
from lightning_megatp.tensor.features.call import Rule
from lightning_megatp.tensor.features.rules.table import POINTWISE, RULES
from lightning_megatp.tensor.features.special import SPECIAL, Special
from lightning_megatp.tensor.functions import is_in_place, operation_name, operation_names


class Operation(NamedTuple):
    """What is known of a function by its name."""

    name: str
    rule: Rule | None
    special: Special | None
    pointwise: bool
    """Whether only the tensors among its arguments matter."""
    in_place: bool
    """Whether it changes its first argument."""
    draws: bool
    """Whether it may draw random numbers."""


@lru_cache(4096)
def operation_of(func: Callable[..., Any]) -> Operation:
    """What its name says of a function."""
    name = operation_name(func)
    in_place = is_in_place(name)
    base = name[:-1] if in_place and name[:-1] in POINTWISE else name
    special = SPECIAL.get(name) if func is not torch.autograd.grad else None
    return Operation(name, RULES.get(base), special, base in POINTWISE, in_place, name in OF_TENSORS)


NEED_GRADIENT = operation_names("register_hook retain_grad register_post_accumulate_grad_hook")
NEED_WHOLE = NEED_GRADIENT | operation_names(
    """
    backward grad requires_grad_ requires_grad data set_ share_memory_ numpy __array__ __deepcopy__ __reduce_ex__
    """
)
