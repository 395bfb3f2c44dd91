"""Int attributes that become each rank's share: counts of heads, and sizes made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import CodeType

from torch import nn

from lightning_megatp.plan.layer_styles import unit_of
from lightning_megatp.plan.parallel_plan import AttributePlan, ParallelPlan, matching
from lightning_megatp.plan.ranges import deal_units, length
from lightning_megatp.plan.styles import Style


def divide(style: Style, modules: Mapping[str, nn.Module], tp: int) -> list[AttributePlan]:
    """The style `divide`: every attribute that a pattern matches, dealt to the ranks.

    Raises:
        ValueError: it matches none, or one that is no int, or can't be dealt out.
    """
    parent, _, attribute = style.pattern.rpartition(".")
    names = [""] if parent == "" else matching(parent, modules)
    owners = [name for name in names if attribute in vars(modules[name])]
    if not owners:
        holder = f"no module named `{parent}` has" if parent else "the LightningModule has not"
        raise ValueError(
            f"MegaTPStrategy: the plan's `{style.pattern}` (divide) matches no attribute: {holder} an own attribute"
            f" `{attribute}`. (A property is divided by dividing what it is made of.)"
        )
    plans = []
    for name in owners:
        value = vars(modules[name])[attribute]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"MegaTPStrategy: `{name}.{attribute}` is {value!r}; only an int attribute can be divided."
            )
        unit = unit_of(f"{name}.{attribute}" if name else attribute, style, modules)
        if value % unit:
            raise ValueError(
                f"MegaTPStrategy: `{name}.{attribute}` = {value} is not a whole number of units of {unit}."
            )
        try:
            pieces = deal_units(value // unit, tp)
        except ValueError as error:
            raise ValueError(
                f"MegaTPStrategy: `{name}.{attribute}` = {value} can't be divided over tp={tp}: {error}. Use a tp that"
                f" divides {value}, or leave this region out of the plan."
            ) from None
        plans.append(AttributePlan(name, attribute, tuple((stop - start) * unit for start, stop in pieces)))
    return plans


def undivided_counts(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Numbers of heads that the forward of a layer's module reads, and the plan does not divide: an undivided number
    may fit shapes, and make other heads of them. Where parts are given as units, it is known by its value, else by its
    name.

    Returns:
        `module.attribute` -> the layer.
    """
    divided = {(x.module, x.attribute) for x in plan.attributes}
    found = {}
    for name, layer in plan.layers.items():
        owner = name.rpartition(".")[0]
        module = modules.get(owner)
        code = getattr(getattr(type(module), "forward", None), "__code__", None)
        parts = layer.style.parts
        split = layer.style.style in ("column", "row") and not layer.global_sizes
        if not split or code is None or not isinstance(parts, int):
            continue
        count = sum(map(length, layer.by_rank)) // (layer.unit * parts)
        for attribute in _names(code) if count > 1 else ():
            value = vars(module).get(attribute)
            if type(value) is not int or value < 2 or (owner, attribute) in divided:
                continue
            if value == count if layer.unit > 1 else _COUNTS_HEADS.search(attribute) and count % value == 0:
                found[f"{owner}.{attribute}".lstrip(".")] = name
    return found


_COUNTS_HEADS = re.compile(r"^(n|nb|num|number)(_of)?_?([a-z]+_)*heads?$|^heads?$|^nheads?$")


def _names(code: CodeType) -> Iterator[str]:
    """The names of attributes and functions in it, and in functions and comprehensions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def check_heads(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> None:
    """Heads that don't divide need a `unit` on the layers beside them: a cut through a head can keep all shapes."""
    for attribute in plan.attributes:
        value = vars(modules[attribute.module])[attribute.attribute]
        if value % plan.tp == 0:
            continue
        for name, layer in plan.layers.items():
            if name.rpartition(".")[0] == attribute.module and layer.unit == 1:
                fits = [n for n in range(1, value + 1) if value % n == 0]
                raise ValueError(
                    f"MegaTPStrategy: `{attribute.module}.{attribute.attribute}` = {value} is not divisible by"
                    f" tp={plan.tp}, and `{name}` would be cut inside a head. Give the size of a head as `unit` to the"
                    f" layers of `{attribute.module}` for uneven heads, or use tp in {fits}, or leave this region out"
                    " of the plan."
                )
