"""The plan of the stacks of experts in a model, before that of the blocks that hold them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_megatp.auto_plan.adding_up import NotAdditive
from lightning_megatp.auto_plan.blocks import Block
from lightning_megatp.auto_plan.changes import drop_region, inside, related
from lightning_megatp.auto_plan.stacks import holds_stacks, layout_of
from lightning_megatp.auto_plan.thin_stacks import thinned
from lightning_megatp.plan.layer import LayerPlan, StackLayout
from lightning_megatp.plan.layer_styles import counts_of, experts_plan
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name
from lightning_megatp.plan.styles import Style
from lightning_megatp.tensor.experts import expert_kind

LARGE = 0.02
"""Weights with such a share of the model's parameters are said to stay whole."""


def plan_stacks(
    plan: ParallelPlan, model: nn.Module, tp: int, kinds: Sequence[Block]
) -> tuple[dict[str, StackLayout], dict[str, tuple[Block, str]]]:
    """Stacks of experts, by the features inside of each.

    Returns:
        How those are split that are, and what can't be, with its kind and why.
    """
    layouts: dict[str, StackLayout] = {}
    refused: dict[str, tuple[Block, str]] = {}
    modules = dict(model.named_modules())
    plain = {plain_name(name): child for name, child in modules.items()}
    for kind in (kind for kind in kinds if kind.stack):
        names = [name for name in kind.names if not any(related(name, other) for other in layouts)]
        try:
            layout = layout_of(kind) if names else None
            planned = [] if layout is None else [_stack_plan(name, layout, modules, tp) for name in names]
        except (NotAdditive, ValueError) as error:
            refused |= dict.fromkeys(names, (kind, str(error).removeprefix("MegaTPStrategy: ")))
            continue
        for raw, layer in zip(names, planned, strict=True):
            name = plain_name(raw)
            assert layout is not None
            layouts[raw], plan.layers[name] = layout, replace(layer, name=name)
            plan.how[name] = "inside of each expert"
            if layout.done:
                plan.operations[name] = layout.done
            plan.attributes += counts_of(name, plan.layers[name], plain)
    for name in map(plain_name, layouts):
        if any(count.name in plan.read_outside for count in counts_of(name, plan.layers[name], plain)):
            drop_region(plan, name, "the step counts the features inside of its experts")
    outer = [name for name in refused if any(other.startswith(f"{name}.") for other in refused)]
    related_ones = [name for name in refused if any(related(name, other) for other in layouts)]
    return layouts, {name: found for name, found in refused.items() if name not in (*outer, *related_ones)}


def say_refused(plan: ParallelPlan, model: nn.Module, refused: Mapping[str, tuple[Block, str]]) -> list[str]:
    """Note of weights that may be experts', and are no layer's either, why they stay whole; where they are large, in
    words.

    Args:
        refused: from `plan_stacks`.
    """
    problems = []
    total = sum(p.numel() for p in model.parameters())
    for name, (kind, why) in refused.items():
        stacks = holds_stacks(kind.module)
        whole = [leaf for leaf in stacks if f"{name}.{leaf}" not in plan.parameters]
        for leaf in (f"{name}.{leaf}" for leaf in whole):
            plan.whole[leaf] = f"{plan.whole[leaf]}; and as experts: {why}" if leaf in plan.whole else why
        held = sum(kind.module.get_parameter(leaf).numel() for leaf in whole) * len(kind.names)
        if name == kind.names[0] and whole and held >= LARGE * total:
            said = name if whole == stacks else f"{name}.{whole[0]}"
            more = f" (and {len(kind.names) - 1} more)" if len(kind.names) > 1 else ""
            say = "If its experts can be split, say how by the style `experts`"
            problems.append(f"`{said}`{more} stays whole: {plan.whole[f'{name}.{whole[0]}'].removesuffix('.')}. {say}")
    return problems


def _stack_plan(name: str, layout: StackLayout, modules: dict[str, nn.Module], tp: int) -> LayerPlan:
    layer = experts_plan(name, Style(name, "experts", parameters=layout.parameters), modules, tp, bool(layout.done))
    expert_kind(modules[name])  # raises where that can't be
    return replace(layer, stack=layout)


@contextlib.contextmanager
def thin_stacks(block: Block, layouts: Mapping[str, StackLayout]) -> Iterator[list[str]]:
    """Meanwhile the experts in a block are small.

    Returns:
        Their names in the block.
    """
    name = block.names[0]
    stacks = {stack[len(name) + 1 :]: layout for stack, layout in layouts.items() if inside(stack, [name])}
    with contextlib.ExitStack() as thin:
        for stack, layout in stacks.items():
            thin.enter_context(thinned(block.module.get_submodule(stack), layout))
        yield list(stacks)


def keep_whole_in_stacks(plan: ParallelPlan, layouts: Iterable[str], model: nn.Module) -> None:
    """Drop what was found inside of experts that are split as one, but for what counts their features."""
    stacks = [name for name in map(plain_name, layouts) if name in plan.layers]
    plain = {plain_name(name): child for name, child in model.named_modules()}
    for name, layer in list(plan.layers.items()):
        if name in plan.layers and name not in stacks and name in plan.how and inside(layer.owner, stacks):
            drop_region(plan, name, "it is a part of experts that are split as one")
    plan.attributes = [a for a in plan.attributes if not inside(a.module, stacks)]
    plan.attributes += [count for name in stacks for count in counts_of(name, plan.layers[name], plain)]
