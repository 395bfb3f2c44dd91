"""The shards of every parameter, under all of its names."""

from __future__ import annotations

from torch import nn

from lightning_megatp.plan.convolutions import is_convolution
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.layer_styles import split_parameters
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name
from lightning_megatp.plan.shard import ShardedTensorSpec


def parameter_specs(plan: ParallelPlan, model: nn.Module) -> dict[str, ShardedTensorSpec]:
    """The shards of every parameter name; tied names must agree."""
    modules = {plain_name(name): (name, module) for name, module in model.named_modules()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs: dict[str, ShardedTensorSpec] = {}
    for layer in plan.layers.values():
        raw, module = modules[layer.owner]
        for split in split_parameters(layer, module):
            parameter = module.get_parameter(split.leaf)
            spec = ShardedTensorSpec(f"{raw}.{split.leaf}", tuple(parameter.shape), split.dim, split.by_rank)
            for name in names[id(parameter)]:
                if name in specs and specs[name].renamed("") != spec.renamed(""):
                    raise ValueError(_tied(name, spec.name, "split differently"))
                specs[name] = spec.renamed(name)
    swapped: dict[int, list[LayerPlan]] = {}
    for layer in plan.layers.values():
        swapped.setdefault(id(modules[layer.owner][1]), []).append(layer)
    planned = {
        f"{name}.{split.leaf}"
        for name, module in model.named_modules(remove_duplicate=False)
        for layer in swapped.get(id(module), ())
        for split in split_parameters(layer, module)
    }
    for parameter_names in names.values():
        sharded = [name for name in parameter_names if name in specs]
        for name in parameter_names:
            owner = model.get_submodule(name.rpartition(".")[0])
            is_layer = isinstance(owner, (nn.Linear, nn.Embedding, nn.EmbeddingBag)) or is_convolution(owner)
            if sharded and name not in planned and is_layer:
                source = next(n for n in sharded if n in planned)
                raise ValueError(_tied(name, source, "split by the plan only at one of them"))
    return specs


def _tied(one: str, other: str, what: str) -> str:
    return (
        f"MegaTPStrategy: `{one}` and `{other}` are one tied parameter, {what}. Give both layers matching styles, for"
        " an embedding and its head `vocab` and `column_gather`, or leave both out of the plan."
    )
