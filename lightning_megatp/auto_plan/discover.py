"""The plan of a whole model: the sources in order, for what a user's own plan leaves open."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_megatp.auto_plan.blocks import Block, find_blocks, is_linear, kinds_of_blocks
from lightning_megatp.auto_plan.capture import capture_calls
from lightning_megatp.auto_plan.changes import add_layer, drop_region, inside, related
from lightning_megatp.auto_plan.experts import LARGE, keep_whole_in_stacks, plan_stacks, say_refused, thin_stacks
from lightning_megatp.auto_plan.huggingface import own_plan, plan_of_block
from lightning_megatp.auto_plan.outside import SMALL_TABLE, OutsideBlocks, is_open, tables_of
from lightning_megatp.auto_plan.references import attentions_called, attentions_in
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.auto_plan.search import plan_block
from lightning_megatp.auto_plan.stacks import find_stacks, holds_stacks
from lightning_megatp.auto_plan.ties import agree_on_ties
from lightning_megatp.auto_plan.uses import weights_of_heads
from lightning_megatp.plan.convolutions import least_size
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.layer_styles import attention_plan
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name
from lightning_megatp.plan.specs import parameter_specs
from lightning_megatp.plan.styles import Style
from lightning_megatp.plan.units import is_in_list
from lightning_megatp.shim.autograd import transforms_are_active, unbind_functions
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.shim.transformers import is_conv1d


@dataclass
class Discovery:
    """What was found, for people to read; the plan itself is a ParallelPlan."""

    results: list[BlockResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What stays whole, or was not used, and why: to be said aloud."""


def look(
    model: nn.Module,
    plan: ParallelPlan,
    steps: Sequence[Callable[[], Any]],
    instead: Callable[[], Sequence[Callable[[], Any]]] = tuple,
) -> tuple[list[Block], list[str]]:
    """The kinds of blocks that a plan leaves open, with what a step calls them with.

    Args:
        model: the unsplit model.
        plan: what the user said; blocks with layers in it are left alone.
        steps: each calls the model once, e.g. its training step on one batch; none if there is no batch.
        instead: makes others, for where the first step fails before it has called all blocks.

    Returns:
        The kinds, and in words what went wrong.
    """
    unbind_functions()
    names = [name for name in find_blocks(model) if is_open(name, plan) and not _touched(name, plan)]
    said = [*plan.layers, *(attribute.module for attribute in plan.attributes)]
    stacks = [
        name
        for name in find_stacks(model)
        if is_open(name, plan) and not any(related(plain_name(name), other) for other in said)
    ]
    kinds = kinds_of_blocks(model, names) + kinds_of_blocks(model, stacks, stacks=True)
    if not steps:
        return kinds, []
    tables = {} if any(map(is_compiled, model.modules())) else tables_of(model)
    with called_in_transforms(model) as plan.transformed, weights_of_heads(model, tables) as plan.heads:
        errors = [capture_calls(model, kinds, step) for step in steps]
    if errors[0] is not None and not all(kind.calls or kind.stack for kind in kinds):
        if others := instead():
            return look(model, plan, others)
        return kinds, [f"the step that was tried out raised {type(errors[0]).__name__}: {errors[0]}"]
    return kinds, []


_TRANSFORMED = "torch.func or forward_ad runs it, which can't follow what ranks send each other"


@contextlib.contextmanager
def called_in_transforms(model: nn.Module) -> Iterator[set[str]]:
    """Note which modules torch.func's transforms (jvp, grad, vmap), or forward-mode differentiation, run.

    Returns:
        Their names, filled meanwhile.
    """
    names = {id(child): plain_name(name) for name, child in model.named_modules()}
    found: set[str] = set()

    def note(module: nn.Module, args: Any) -> None:
        if transforms_are_active() and id(module) in names:
            found.add(names[id(module)])

    handle = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def discover(model: nn.Module, tp: int, kinds: Sequence[Block], plan: ParallelPlan) -> Discovery:
    """Plan what a user's plan leaves open.

    Args:
        model: the unsplit model; parameters may be on meta.
        tp: size of the tensor axis, above 1.
        kinds: from `look`.
        plan: what the user said; it is extended.
    """
    found = Discovery()
    plan.compiled = any(map(is_compiled, model.modules()))
    own, problem = own_plan(model)
    # Each would break a compiled graph, and torch fails at in-place code behind some of these breaks.
    least = math.inf if plan.compiled else least_size(model)
    total = sum(p.numel() for p in model.parameters())
    found.problems += [problem] if problem else []
    blocks = [kind for kind in kinds if not kind.stack]
    layouts, refused = plan_stacks(plan, model, tp, kinds)
    for kind in blocks:
        if plan.transformed.intersection(map(plain_name, kind.names)):
            found.results.append(BlockResult(kind, problem=_TRANSFORMED))
            continue
        trusted = plan_of_block(own, kind.names[0], kind.module, tp) if own else None
        read = {
            n.removeprefix(f"{name}.") for n in plan.read_outside for name in kind.names if n.startswith(f"{name}.")
        }
        # In a list a block is one of many, and its tables are small beside it: biases by position, say.
        tables = math.inf if is_in_list(model, kind.names[0]) else SMALL_TABLE * total
        with thin_stacks(kind, layouts) as inside:
            result = plan_block(kind, tp, trusted, least, not plan.compiled, read, inside, tables)
        found.results.append(result)
        found.problems += _spread(plan, result, model)
        plan.proven += [] if result.problem else map(plain_name, kind.names)
        if not result.problem:
            plan.couplings |= dict.fromkeys(map(plain_name, kind.names), result.couplings)
    found.problems += _plan_attentions(plan, model, tp, kinds)
    keep_whole_in_stacks(plan, layouts, model)
    outside = OutsideBlocks(plan, model)
    outside.add_tables()
    outside.add_convolutions(least)
    agree_on_ties(plan, model)
    _keep_transformed_whole(plan, model, blocks)
    plan.parameters = parameter_specs(plan, model)
    found.problems += say_refused(plan, model, refused)
    found.problems += _what_stays_whole(found.results)
    found.problems += _multiplied_whole(plan, model, found.results, refused)
    return found


def keep_whole(plan: ParallelPlan, model: nn.Module, used: Iterable[str]) -> None:
    """Drop the layers that were found, and whose parameters a step uses beside them: they would be gathered for good in
    the first step, which with stages or zero > 0 is too late.

    Args:
        plan: of a whole model; of its layers only those that were found are changed.
        model: the unsplit model.
        used: names of parameters.
    """
    modules = {plain_name(name): child for name, child in model.named_modules()}
    ids = {id(model.get_parameter(name)) for name in used}

    def is_used(layer: LayerPlan) -> bool:
        owner = modules[layer.owner]
        own = [] if layer.bare is None else [layer.bare.weight, layer.bare.bias]
        held = owner.parameters() if layer.bare is None else [owner._parameters[leaf] for leaf in own if leaf]
        return not ids.isdisjoint(map(id, held))

    while used_ones := [name for name, layer in plan.layers.items() if name in plan.how and is_used(layer)]:
        for name in used_ones:
            if name in plan.layers:
                ids |= set(map(id, modules[plan.layers[name].owner].parameters()))  # of layers tied to it, too
                drop_region(plan, name, "the step uses its weight beside it")
    plan.parameters = parameter_specs(plan, model)


def _keep_transformed_whole(plan: ParallelPlan, model: nn.Module, kinds: Sequence[Block]) -> None:
    """Drop what was found of the layers that torch.func runs. Of the blocks of a kind one was seen; what is outside of
    blocks was not, and is dropped where it runs a block."""
    names = set(plan.transformed)
    for kind in kinds:
        blocks = [plain_name(name) for name in kind.names]
        parts = {name[len(block) :] for block in blocks for name in plan.transformed if inside(name, [block])}
        names |= {block + part for block in blocks for part in parts}
    blocks = [plain_name(name) for name in find_blocks(model)]
    runs_blocks = not names.isdisjoint(blocks)
    for name, layer in list(plan.layers.items()):
        is_found = name in plan.layers and name in plan.how
        if is_found and (layer.owner in names or (runs_blocks and not inside(name, blocks))):
            drop_region(plan, name, _TRANSFORMED)


def suit_stages(plan: ParallelPlan, model: nn.Module, units: Iterable[str]) -> None:
    """Change what was found to what pipeline stages can do.

    Args:
        plan: of a whole model; of its layers only those that were found are changed.
        model: the unsplit model.
        units: modules that a pipeline never cuts. Of a region that reaches over several, layers are gathered one by
            one; a sequence stays whole there.
    """
    modules = {plain_name(name): child for name, child in model.named_modules()}
    units = [plain_name(unit) for unit in units]
    for name, layer in list(plan.layers.items()):
        if name not in plan.layers or name not in plan.how or layer.region is None or inside(layer.region, units):
            continue
        for cut in drop_region(plan, name, "its region reaches over pipeline units"):
            if cut not in modules:
                continue  # a weight that belongs to no layer
            outputs = modules[cut].get_parameter("weight").shape[1 if is_conv1d(modules[cut]) else 0]
            if is_linear(modules[cut]) and outputs >= plan.tp:
                add_layer(plan, cut, "column_gather", outputs, "gathered: its region is cut")
    for block in [block for block in plan.sequences if not inside(block, units)]:
        del plan.sequences[block]
        for name, layer in plan.layers.items():
            if inside(name, [block]):
                plan.layers[name] = replace(layer, sequence_dim=None)
    plan.parameters = parameter_specs(plan, model)


def _touched(block: str, plan: ParallelPlan) -> bool:
    """Whether the user's plan says something about a block's inside."""
    names = [*plan.layers, *(attribute.module for attribute in plan.attributes)]
    return any(f"{name}.".startswith(f"{block}.") for name in names)


def _spread(plan: ParallelPlan, result: BlockResult, model: nn.Module) -> list[str]:
    """Give every block of a kind what was found for the first; what can't be, in words. A module that several blocks
    share is planned once, under its first name."""
    problems = []
    first = {id(child): plain_name(name) for name, child in reversed(list(model.named_modules(remove_duplicate=False)))}
    whole = {plain_name(name): child for name, child in model.named_modules(remove_duplicate=False)}
    dim = result.sequence_dim if plan.sequence_parallel and not plan.compiled else None
    if dim is not None and result.block.least_dims <= dim + 1:
        dim = None  # some of its kind are called with tokens one after the other, without a dim for them

    def named(block: str, inner: str) -> str:
        return first[id(whole[plain_name(f"{block}.{inner}".rstrip("."))])]

    for block in result.block.names:
        own = [replace(a, module=named(block, a.module)) for a in result.plan.attributes]
        numbers = [vars(result.block.module.get_submodule(a.module))[a.attribute] for a in result.plan.attributes]
        if any(vars(whole[a.module])[a.attribute] != n for a, n in zip(own, numbers, strict=True)):
            problems.append(f"`{block}` stays whole: it has other numbers than `{result.block.names[0]}`")
            continue
        if dim is not None:
            plan.sequences[plain_name(block)] = Style(plain_name(block), "sequence", dim=dim)
            plan.used_twice |= {named(block, inner) for inner in result.used_twice}
            plan.token_local += [named(block, inner) for inner in result.token_local]
        for name, layer in result.plan.layers.items():
            full = named(block, name) if layer.bare is None else f"{named(block, layer.owner)}.{layer.bare.weight}"
            region = None if layer.region is None else plain_name(f"{block}.{layer.region}").rstrip(".")
            rows_dim = dim if layer.style.style == "row" else None
            found = replace(layer, name=full, region=region, style=replace(layer.style, pattern=full))
            before = plan.layers.setdefault(full, replace(found, sequence_dim=rows_dim))
            if (before.style.style, before.by_rank) != (found.style.style, found.by_rank):
                drop_region(plan, full, "blocks that share it are of different kinds")
                continue
            plan.how[full] = result.how[name]
        plan.attributes += [a for a in own if a.name not in {b.name for b in plan.attributes}]
        for name, why in result.whole.items():
            plan.whole[f"{block}.{name}"] = why
    return problems


def _plan_attentions(plan: ParallelPlan, model: nn.Module, tp: int, kinds: Sequence[Block]) -> list[str]:
    """nn.MultiheadAttention by its heads; what can't be, in words."""
    problems = []
    unused = {
        plain_name(f"{name}.{inner}"): kind
        for kind in kinds
        if not kind.stack
        for inner in attentions_in(kind.module) - attentions_called(kind)
        for name in kind.names
    }
    modules = dict(model.named_modules())
    for raw, module in modules.items():
        name = plain_name(raw)
        if type(module) is not nn.MultiheadAttention or name in plan.layers or not is_open(name, plan):
            continue
        try:
            layer = attention_plan(raw, Style(raw, "attention"), module, tp)
        except ValueError as error:
            problems.append(str(error).removeprefix("MegaTPStrategy: "))
            continue
        if name in unused:
            first, *others = unused[name].names
            if name.startswith(f"{plain_name(first)}."):  # said once for all blocks of a kind
                more = f" (and {len(others)} more)" if others else ""
                problems.append(f"`{name}`{more} stays whole: its block uses its weights without calling it")
            continue
        blocks = [block for block in plan.sequences if name.startswith(f"{block}.")]
        dim = plan.sequences[blocks[0]].dim if blocks else None
        plan.layers[name] = replace(layer, name=name, sequence_dim=dim)
        plan.how[name] = "by its heads"
    return problems


def _what_stays_whole(results: Iterable[BlockResult]) -> list[str]:
    said = []
    for result in results:
        if result.problem is not None:
            count = f" (and {len(result.block.names) - 1} more)" if len(result.block.names) > 1 else ""
            done = "is split layer by layer, and gathered" if result.plan.layers else "stays whole"
            said.append(f"`{result.block.names[0]}`{count} {done}: {result.problem}")
    return said


def _multiplied_whole(
    plan: ParallelPlan, model: nn.Module, results: Iterable[BlockResult], refused: Mapping[str, tuple[Block, str]]
) -> list[str]:
    """Large weights of no layer that blocks multiply with, and that stay whole, in words.

    Args:
        refused: what can't be split as experts, of which it was said.
    """
    problems = []
    said = {f"{name}.{leaf}" for name, (kind, _) in refused.items() for leaf in holds_stacks(kind.module)}
    total = sum(p.numel() for p in model.parameters())
    for result in results:
        for leaf in sorted(result.multiplied):
            first, *others = (f"{name}.{leaf}" for name in result.block.names)
            held = model.get_parameter(first).numel() * len(result.block.names)
            if first not in plan.parameters and held >= LARGE * total and first not in said:
                more = f" (and {len(others)} more)" if others else ""
                problems.append(f"`{first}`{more} stays whole: {plan.whole[first]}")
    return problems
