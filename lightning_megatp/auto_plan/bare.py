"""Parameters of a block's modules that its code gives to `F.linear` itself: linear layers that are no modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_megatp.auto_plan.blocks import Block, holders_of_parameters, own_weights
from lightning_megatp.auto_plan.changes import inside
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.thin import block_copy, concrete_call, thin_copy
from lightning_megatp.auto_plan.uses import Uses
from lightning_megatp.plan.layer import BareLinear

_SMALL = 0.02
"""Matrices with a smaller share of a block's parameters are left alone: a router's, say."""


@dataclass
class BareWeights:
    """The weights in a block that belong to no layer of torch's."""

    linears: dict[str, BareLinear] = field(default_factory=dict)
    """Name of a weight -> the linear layer that it is of, which is no module."""
    whole: dict[str, str] = field(default_factory=dict)
    """Name of another -> why it is of none."""
    multiplied: set[str] = field(default_factory=set)
    """Of these others what is multiplied with."""


def bare_weights(block: Block, stacks: Collection[str]) -> BareWeights:
    """What a block's code does with the weights that belong to no layer; nothing is found where it can't be run.

    Args:
        stacks: names of modules whose weights are left out; "" for the block.
    """
    names = [name for name in weights_of_no_layer(block.module) if not inside(name, stacks)]
    if not names or not block.calls or "" in stacks:
        return BareWeights()
    try:
        twin = thin_copy(block.module, seed=0)
        uses = Uses({id(twin.get_parameter(name)): name for name in (*names, *_vectors(twin))})
        call = concrete_call(block.calls[0], 0)
        with exact(), torch.no_grad(), uses:
            twin(*call.args, **call.kwargs)
    except Exception:  # it may be any code
        return BareWeights()
    found = BareWeights(multiplied=uses.multiplied.intersection(names))
    for name in names:
        if name in uses.otherwise:
            operation = uses.otherwise[name].strip("_")
            found.whole[name] = f"its code uses it otherwise than as the weight of one linear layer (`{operation}`)"
        elif name in uses.biases:
            biases = uses.biases[name]
            leaf, shape = name.rpartition(".")[2], tuple(block.module.get_parameter(name).shape)
            found.linears[name] = BareLinear(leaf, _own_bias(name, biases, uses), uses.dims[name], shape)
        else:
            found.whole[name] = "its code is not seen to use it as the weight of a linear layer"
    return found


def ways_to_take(block: Block, bare: Mapping[str, BareLinear]) -> Iterator[Mapping[str, BareLinear]]:
    """What to try one after the other, should a block fail with thin layers in place of its weights: all of them, those
    of the modules whose code bears it (one may look for a parameter where it was), none."""
    yield bare
    if not bare:
        return
    owners = dict.fromkeys(name.rpartition(".")[0] for name in bare)
    own = {owner: {name: x for name, x in bare.items() if name.rpartition(".")[0] == owner} for owner in owners}
    some = {name: x for owner in owners if _bears(block, own[owner]) for name, x in own[owner].items()}
    if 0 < len(some) < len(bare):
        yield some
    yield {}


def _bears(block: Block, bare: Mapping[str, BareLinear]) -> bool:
    """Whether a block runs, in training and in evaluation, with these weights replaced by thin layers."""
    try:
        twin = thin_copy(block.module, seed=0, bare=bare)
        for train in (True, False):
            call = concrete_call(block.calls[0], 0)
            with exact(), torch.no_grad():
                block_copy(twin, train)(*call.args, **call.kwargs)
    except Exception:
        return False
    return True


def _own_bias(weight: str, biases: set[str | None], uses: Uses) -> str | None:
    """The one that belongs to a weight: of the same module, and used by nothing else."""
    (bias, *others) = biases
    if others or bias is None or bias in uses.otherwise or bias.rpartition(".")[0] != weight.rpartition(".")[0]:
        return None
    others_biases = (used for name, used in uses.biases.items() if name != weight)
    return None if any(bias in used for used in others_biases) else bias.rpartition(".")[2]


def weights_of_no_layer(module: nn.Module) -> list[str]:
    """The names of the weights that belong to no layer of torch's, each of one module only, and large enough."""
    held = holders_of_parameters(module)
    least = _SMALL * sum(parameter.numel() for parameter in module.parameters())
    named = (f"{name}.{leaf}".lstrip(".") for name, child in module.named_modules() for leaf in own_weights(child))
    found = ((name, module.get_parameter(name)) for name in named)
    return [name for name, weight in found if held[id(weight)] == 1 and weight.numel() >= least]


def _vectors(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.dim() == 1]
