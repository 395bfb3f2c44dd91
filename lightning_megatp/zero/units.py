"""Which units (blocks, embeddings, heads) zero > 0 gathers by themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from lightning_megatp.plan.units import is_in_list

_SMALL = 1 / 32
"""Units smaller than this share of the largest one are gathered with what is in no unit: a message each would cost more
than it saves."""
_SMALL_END = 2**20
"""So are embeddings and heads of fewer bytes than this: to start a message takes as long as to send so much. Blocks are
not, of which there may be many."""


def in_several(module: nn.Module, units: Sequence[str]) -> set[int]:
    """id of the parameters of more than one unit, or of a unit and something else."""
    holders: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        holders.setdefault(id(parameter), set()).add(unit)
    return {parameter for parameter, found in holders.items() if len(found) > 1}


def large_units(module: nn.Module, units: Sequence[str], apart: Collection[int]) -> list[str]:
    """The units that are worth a message of their own."""
    held = {unit: [p for p in module.get_submodule(unit).parameters() if id(p) not in apart] for unit in units}
    sizes = {unit: sum(p.numel() * p.element_size() for p in parameters) for unit, parameters in held.items()}
    most = max(sizes.values(), default=0)
    return [
        unit
        for unit, size in sizes.items()
        if size > _SMALL * most and (size >= _SMALL_END or is_in_list(module, unit))
    ]
