"""Layers that share a weight."""

from __future__ import annotations

from torch import nn

from lightning_megatp.auto_plan.blocks import holders_of_parameters
from lightning_megatp.auto_plan.changes import add_layer, drop_region
from lightning_megatp.auto_plan.lookups import can_split
from lightning_megatp.plan.layer import LayerPlan, Split
from lightning_megatp.plan.layer_styles import runs_as, split_parameters
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name


def agree_on_ties(plan: ParallelPlan, model: nn.Module) -> None:
    """Layers that share a weight are split alike, or all stay whole."""
    modules = {plain_name(name): child for name, child in model.named_modules()}
    holders: dict[int, list[str]] = {}
    for name, child in modules.items():
        weight = child._parameters.get("weight")
        if weight is not None:
            holders.setdefault(id(weight), []).append(name)
    held = holders_of_parameters(model)
    for name, layer in list(plan.layers.items()):
        bare = layer.bare if name in plan.layers else None
        if bare is not None and held[id(modules[layer.owner]._parameters[bare.weight])] > 1:
            drop_region(plan, name, "another module has its weight, too")
    for names in holders.values():
        split = [name for name in names if name in plan.layers]
        if not split or len(names) == 1:
            continue
        styles = {name: _tied_style(modules[name]) for name in names}
        if all(styles.values()) and all(plan.layers[name].style.style in ("vocab", "column_gather") for name in split):
            rows = modules[names[0]].weight.shape[0]
            for name in names:
                if name not in split:  # the block that holds it was run with it whole
                    plan.proven = [block for block in plan.proven if not name.startswith(f"{block}.")]
                add_layer(plan, name, str(styles[name]), rows, "tied", head=True)
        elif len(split) < len(names) or len({_of_weight(plan.layers[n], modules[n]) for n in split}) > 1:
            for name in split:
                drop_region(plan, name, f"it shares its weight with {', '.join(n for n in names if n != name)}")


def _of_weight(layer: LayerPlan, module: nn.Module) -> Split | None:
    return next((split for split in split_parameters(layer, module) if split.leaf == "weight"), None)


def _tied_style(module: nn.Module) -> str | None:
    if isinstance(module, nn.Embedding) and can_split(module):
        return "vocab"
    return "column_gather" if runs_as(module, nn.Linear) else None
