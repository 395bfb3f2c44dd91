"""What `load_state_dict` of a split module takes: whole values, and what the ranks hold of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.tensor.outside import WholeParameter


def load_whole_values(module: nn.Module, own_spec: Callable[[Tensor], ShardSpec | None]) -> None:
    """Let `load_state_dict` of a split module, and of its parts, take whole values too: of these, this rank's.

    Args:
        own_spec: parameter -> what this rank owns of it; None for all of it.
    """
    for child in module.modules():
        parameters = child.named_parameters(recurse=False)
        specs = {leaf: spec for leaf, parameter in parameters if (spec := own_spec(parameter)) is not None}
        if specs:
            child.register_load_state_dict_pre_hook(functools.partial(_take_loaded, specs))


def _take_loaded(
    specs: Mapping[str, ShardSpec],
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: Sequence[str],
    errors: list[str],
) -> None:
    for leaf, parameter in module.named_parameters(recurse=False):
        name, spec = prefix + leaf, specs.get(leaf)
        given = state_dict.get(name)
        if spec is None or not isinstance(given, Tensor):
            continue
        if isinstance(parameter, WholeParameter):  # in a step, where it shows the whole shape and takes a part, too
            if given.shape == spec.local_shape and not isinstance(given, WholeParameter):
                state_dict[name] = WholeParameter.of(given, parameter.parameter, parameter.spec, parameter.context)
            continue
        if isinstance(given, WholeParameter):  # a step's clone
            given = state_dict[name] = given.shard
        if parameter.shape != spec.local_shape:
            continue
        if given.shape == spec.shape:
            state_dict[name] = spec.take(given)
        elif given.shape != spec.local_shape:
            errors.append(
                f"size mismatch for {name}: {tuple(given.shape)} was given, the whole model has {spec.shape}."
            )
            state_dict[name] = parameter.detach()  # torch would compare with the shape of this rank's part
