"""`load_state_dict` of a module whose other stages' tensors are gone: of whole values it takes this stage's, and
compares the names and shapes of all, so that every rank finds the same errors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor, nn

from lightning_megatp.messages import OfOneRank


@dataclass
class _Loading(OfOneRank):
    """What the hooks of one module share."""

    gone: Mapping[str, Mapping[str, Size]]
    """Path of a submodule -> names of its tensors that other stages have, and their whole shapes."""
    whole: bool = False
    """Whether what is loaded right now has values of other stages; else it is what this one has saved itself."""


def load_own_stage(module: nn.Module, gone: Mapping[str, Mapping[str, Size]]) -> None:
    """Let `load_state_dict` of a module, and of its parts, pass over the values of other stages.

    Args:
        gone: path of a submodule -> names of the tensors that it had, and their whole shapes.
    """
    loading = _Loading(gone)
    for path, child in module.named_modules():
        child.register_load_state_dict_pre_hook(functools.partial(_pass_over, loading, path))


def _pass_over(
    loading: _Loading,
    path: str,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: Sequence[str],
    errors: list[str],
) -> None:
    if not prefix:  # it is this module's `load_state_dict` that was called
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        own = {name for name, _ in tensors}  # and what other stages have lent
        loading.whole = any(name in state_dict and name not in own for name in _names_under(path, loading.gone))
    for leaf, shape in loading.gone.get(path, {}).items():
        name, back = prefix + leaf, leaf in module._parameters or leaf in module._buffers
        if back or leaf in module._non_persistent_buffers_set:
            continue
        given = state_dict.pop(name, None)
        if isinstance(given, Tensor) and given.shape != shape:
            errors.append(
                f"size mismatch for {name}: {tuple(given.shape)} was given, the whole model has {tuple(shape)}."
            )
        elif given is None and strict and loading.whole:
            missing.append(name)


def _names_under(path: str, gone: Mapping[str, Mapping[str, Size]]) -> list[str]:
    """As a state dict of that submodule has them."""
    here = f"{path}." if path else ""
    paths = [other for other in gone if other == path or other.startswith(here)]
    return [f"{other}."[len(here) :] + leaf if other != path else leaf for other in paths for leaf in gone[other]]
