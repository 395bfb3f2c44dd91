"""From what a probe found to a plan of one kind of block that was proven to compute the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from lightning_megatp.auto_plan.bare import bare_weights, ways_to_take, weights_of_no_layer
from lightning_megatp.auto_plan.blocks import Block, is_linear, unlooked
from lightning_megatp.auto_plan.changes import inside
from lightning_megatp.auto_plan.compare import NotFinite, Reference
from lightning_megatp.auto_plan.influence import probe
from lightning_megatp.auto_plan.lookups import HOW, tables_in
from lightning_megatp.auto_plan.references import couplings, looks_at_gradients, references_of
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.auto_plan.simulate import BlockPlan
from lightning_megatp.auto_plan.thin import ThinLinear, block_copy, name_in_copy, thin_copy
from lightning_megatp.auto_plan.tokens import sequence_dim, used_twice
from lightning_megatp.auto_plan.trials import SMALL, Trials, gathered
from lightning_megatp.plan.convolutions import convolution_plan, fits, weights
from lightning_megatp.plan.layer import BareLinear, LayerPlan
from lightning_megatp.plan.styles import Style
from lightning_megatp.shim.transformers import is_conv1d

_MOST_DENSE = 10**9
"""Numbers of a block's parameters that are tried out as they are, of the whole and of all simulated ranks together."""

OTHERWISE = "the block uses its weight otherwise than by calling it"
_NO_PLACE = "the block can't be run with a layer in its place"
_COMPILED = "its layer would need global sizes, which compiled code can't take"


def plan_block(
    block: Block,
    tp: int,
    trusted: BlockPlan | None = None,
    least_convolution: float = math.inf,
    global_sizes: bool = True,
    undivided: Collection[str] = (),
    stacks: Collection[str] = (),
    least_table: float = math.inf,
) -> BlockResult:
    """Find and prove a plan for one kind of block.

    Args:
        block: with its calls.
        tp: number of tensor ranks.
        trusted: what a model's own plan says about its layers; tried first, and proven like any other.
        least_convolution: convolutions with fewer weights stay whole.
        global_sizes: whether layers may hand out shards that report whole sizes, which compiled code can't take.
        undivided: names of attributes that stay those of the whole.
        stacks: names of modules in it that are split as one, with the linear layers that are in there.
        least_table: embeddings with fewer weights stay whole.

    Returns:
        What was found. Where a block can't be probed, its layers are split one by one and gathered, which computes the
        same whatever the block does with them.
    """
    convolutions = {
        name: convolution_plan(name, Style(name, "column_gather"), child, tp)
        for name, child in block.module.named_modules()
        if weights(child) >= max(least_convolution, 1) and fits(child, tp)
    }
    tables = tables_in(block.module, tp, least_table)
    result = BlockResult(block)
    layers = {name for name, child in block.module.named_modules() if is_linear(child)}
    others = {name for name in layers if inside(name, stacks)}
    one_by_one = functools.partial(_one_by_one, result, tp, convolutions, tables, layers - others)
    if not block.calls:
        return one_by_one("the step that was tried out does not call it")
    if why := unlooked(block.module) or _too_large(block.module, tp):
        return one_by_one(why)
    why = ""
    bare = bare_weights(block, stacks)
    for linears in ways_to_take(block, bare.linears if global_sizes else {}):
        try:
            result = _probed(
                BlockResult(block), tp, trusted, convolutions, tables, global_sizes, undivided, linears, others
            )
            left = bare.linears.keys() - linears.keys()
            result.whole |= dict.fromkeys(left, _NO_PLACE if global_sizes else _COMPILED) | bare.whole
            result.multiplied = bare.multiplied | left | {n for n in linears if result.whole.get(n) == OTHERWISE}
            return result
        except _NotTheSame as error:
            why = str(error)
        except Exception as error:  # a block may be any code
            text = str(error).splitlines()
            why = f"it can't be probed ({type(error).__name__}: {text[0] if text else ''})"
    return one_by_one(why)


def _too_large(module: nn.Module, tp: int) -> str | None:
    """Why a block can't be run in float64 by every simulated rank: of linear layers little is held there, of all else
    everything."""
    linears = {id(p) for child in module.modules() if is_linear(child) for p in child._parameters.values()}
    size = sum(p.numel() for p in module.parameters() if id(p) not in linears)
    return (
        None
        if size * (tp + 3) <= _MOST_DENSE
        else f"{size:,} of its parameters are in no linear layer, too many to try out"
    )


class _NotTheSame(Exception):
    """What was proven part by part does not compute the same together."""


def _probed(
    result: BlockResult,
    tp: int,
    trusted: BlockPlan | None,
    convolutions: dict[str, LayerPlan],
    tables: dict[str, LayerPlan],
    global_sizes: bool,
    undivided: Collection[str],
    bare: Mapping[str, BareLinear],
    others: Collection[str],
) -> BlockResult:
    block = result.block
    twin, references = _thin_references(block, result, global_sizes, bare, others)
    result.couplings = frozenset(couplings(references))
    if looks_at_gradients(references):
        raise _NotTheSame("its code looks at gradients inside of it, by `register_hook` or `retain_grad`")
    influence = probe(block_copy(twin), block.calls[0], tp)
    trials = Trials(twin, references, tp, result, global_sizes, undivided, influence.outputs)
    if trusted is not None:
        trials.accept_trusted(trusted)
    trials.regions(influence)  # of what it leaves open
    trials.regions_across_norms(block.calls[0])
    trials.gather_the_rest()
    trials.convolutions(convolutions)
    trials.tables(tables)
    outcome = trials.prove_together()
    if not outcome.holds and (added := [n for n in (*convolutions, *tables) if n in result.plan.layers]):
        # one may be called on what ranks hold of a region (a pool of each head's keys)
        others = {name: layer for name, layer in result.plan.layers.items() if name not in added}
        result.plan = BlockPlan(others, result.plan.attributes)
        result.how = {name: how for name, how in result.how.items() if name not in added}
        result.whole.update(dict.fromkeys(added, "with it split, the block would not compute the same"))
        outcome = trials.prove_together()
    if not outcome.holds:
        raise _NotTheSame(f"its parts together do not compute the same ({outcome.error})")
    result.errors, result.gathers = outcome.errors, outcome.gathers
    for name, layer in result.plan.layers.items():
        result.whole.pop(name, None)
        if name in trials.layers:
            kept: tuple[str, ...] = ("bias",) if trials.layers[name].has_other_bias else ()
            result.plan.layers[name] = replace(layer, whole=kept, by_function=name in trials.functions)
    result.sequence_dim = sequence_dim(block_copy(twin), block.calls[0], result.plan.layers)
    if result.sequence_dim is not None:
        result.used_twice = used_twice(twin, block.calls[0])
        whole = trials.layers.keys() - result.plan.layers.keys() - result.used_twice
        result.token_local = sorted(n for n in whole if trials.layers[n].in_features < trials.layers[n].out_features)
        for name in tables:  # what they return is of all tokens, and small beside these
            result.plan.layers.pop(name, None)
            result.how.pop(name, None)
    for name, leaves in bare.items():
        _name_after_weight(result, name, leaves)
    return result


def _name_after_weight(result: BlockResult, name: str, leaves: BareLinear) -> None:
    """Call a linear layer that is no module what its weight is called."""
    copied = name_in_copy(name)
    if (layer := result.plan.layers.pop(copied, None)) is not None:
        style = replace(layer.style, pattern=name)
        result.plan.layers[name] = replace(layer, name=name, style=style, bare=leaves)
        result.how[name] = result.how.pop(copied)
    if copied in result.whole:
        result.whole[name] = result.whole.pop(copied)
    if copied in result.used_twice:
        result.used_twice = result.used_twice - {copied} | {name.rpartition(".")[0]}
    result.token_local = [other for other in result.token_local if other != copied]


def _one_by_one(
    result: BlockResult,
    tp: int,
    convolutions: dict[str, LayerPlan],
    tables: dict[str, LayerPlan],
    names: Collection[str],
    why: str,
) -> BlockResult:
    """Split these layers of a block by their outputs, and gather them; and tables."""
    result.problem = why
    result.whole |= dict.fromkeys(weights_of_no_layer(result.block.module), why)
    result.plan.layers |= convolutions | tables
    result.how |= dict.fromkeys(convolutions, f"gathered: {why}") | {n: HOW[x.style.style] for n, x in tables.items()}
    layers = {name: child for name, child in result.block.module.named_modules() if name in names}
    sizes = {name: child.weight.numel() for name, child in layers.items()}
    for name, child in layers.items():
        outputs = child.weight.shape[1 if is_conv1d(child) else 0]
        if outputs >= tp and sizes[name] >= SMALL * sum(sizes.values()):
            result.plan.layers[name] = gathered(name, outputs, tp)
            result.how[name] = f"gathered: {why}"
    return result


def _thin_references(
    block: Block, result: BlockResult, functions: bool, bare: Mapping[str, BareLinear], others: Collection[str]
) -> tuple[nn.Module, list[Reference]]:
    """A thin copy, and what it computes. Where a block uses the weight of a linear layer otherwise than by calling it,
    that layer stays as it is.

    Args:
        functions: whether `F.linear` with the layer's weight may be such a call.
        bare: linear layers that are no modules.
        others: layers that stay as they are, too.
    """
    try:
        twin = thin_copy(block.module, seed=0, dense=others, bare=bare)
        references = references_of(twin, block)
        dense = set() if functions else set[str]().union(*(reference.functions for reference in references))
    except NotFinite as error:
        thin = {name: child for name, child in error.ran.named_modules() if isinstance(child, ThinLinear)}
        dense = {name for name, child in thin.items() if child.touched}
        # what is no function of torch's, such as one of torch.jit, is not seen to use it
        dense = dense or {name for name, child in thin.items() if child.was_read and not child.is_function}
        if not dense:
            raise
    if dense:
        result.whole.update(dict.fromkeys(dense, OTHERWISE))
        twin = thin_copy(block.module, seed=0, dense={*dense, *others}, bare=bare)
        references = references_of(twin, block)
    for name in set[str]().union(*(reference.other_biases for reference in references)):
        layer = twin.get_submodule(name)
        assert isinstance(layer, ThinLinear)
        layer.has_other_bias = True
    return twin, references
