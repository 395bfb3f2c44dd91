"""How each style splits a layer: its features for every rank, and which parameters they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_megatp.messages import with_article
from lightning_megatp.origins import is_torchs
from lightning_megatp.plan.convolutions import convolution_plan, is_convolution, is_weight_normed
from lightning_megatp.plan.embeddings import looks_up
from lightning_megatp.plan.experts import check_parameters, usual_parameters
from lightning_megatp.plan.layer import TRANSPOSED, BareLinear, LayerPlan, MatrixDims, Split, StackLayout
from lightning_megatp.plan.parallel_plan import AttributePlan, ParallelPlan
from lightning_megatp.plan.ranges import length, shard_ranges
from lightning_megatp.plan.styles import Style
from lightning_megatp.shim.transformers import is_conv1d

_LINEAR = {"column", "column_gather", "row", "row_split"}
_SPLIT_DIM = {"column": 0, "column_gather": 0, "row": 1, "row_split": 1, "vocab": 0, "hidden": 1}


def layer_plan(name: str, style: Style, modules: Mapping[str, nn.Module], tp: int) -> LayerPlan:
    """What a style means for a layer, before its region is known.

    Raises:
        ValueError: the style can't be given to that kind of module, or its features can't be dealt to the ranks.
    """
    module = modules[name]
    if style.style == "attention":
        return attention_plan(name, style, module, tp)
    if style.style == "experts":
        return experts_plan(name, style, modules, tp)
    if style.style == "column_gather" and (is_convolution(module) or is_weight_normed(module)):
        return convolution_plan(name, style, module, tp)
    _check_type(name, style, module)
    size = module.get_parameter("weight").shape[_weight_dim(style, module)]
    unit = unit_of(name, style, modules)
    try:
        by_rank = shard_ranges(size, tp, style.parts if isinstance(style.parts, int) else list(style.parts), unit)
    except ValueError as error:
        raise ValueError(
            f"MegaTPStrategy: `{name}` ({style.style}, {size} features) can't be split over tp={tp}: {error}. Change"
            " `parts` or `unit` in the plan, or tp, or leave the layer (and its region) out of the plan."
        ) from None
    if style.style in ("row", "row_split", "vocab", "hidden"):
        if sum(map(length, by_rank)) > size:
            raise ValueError(
                f"MegaTPStrategy: `{name}` has {size // unit} units of {unit} for tp={tp} ranks, and a `{style.style}`"
                f" layer can't repeat units. Use tp <= {size // unit}, or leave this region out of the plan."
            )
        if style.style in ("vocab", "hidden") and min(map(length, by_rank)) == 0:
            what = "rows" if style.style == "vocab" else "features"
            raise ValueError(f"MegaTPStrategy: `{name}` has {size} {what} for tp={tp} ranks; each needs one or more.")
    return LayerPlan(name, style, by_rank, unit)


_PROJECTIONS = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1, "in_proj_bias": 3}
"""Parameters of an nn.MultiheadAttention split on dim 0 -> how many projections lie in them one after another."""


def attention_plan(name: str, style: Style, module: nn.Module, tp: int) -> LayerPlan:
    """The style `attention`: whole heads of an `nn.MultiheadAttention`.

    Raises:
        ValueError: another module, weights that are no parameters of its own, fewer heads than ranks.
    """
    if type(module) is not nn.MultiheadAttention:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` the style `attention`, but it"
            f" {_other_kind(module, nn.MultiheadAttention)}. Give the linear layers of another attention `column` and"
            " `row`, or leave it out of the plan."
        )
    out = module.out_proj
    weights = ["in_proj_weight"] if module._qkv_same_embed_dim else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    own = all(module._parameters.get(leaf) is not None for leaf in weights)
    if not own or type(out) is not NonDynamicallyQuantizableLinear or out._parameters.get("weight") is None:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` the style `attention`, but some weight of it is no parameter of"
            " its own (weight_norm, a parametrization or pruning replaces it). Leave it out of the plan."
        )
    heads, width, head = module.num_heads, module.embed_dim, module.head_dim
    if heads < tp:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has {heads} heads for tp={tp} ranks, and each needs one or more. Use"
            f" tp <= {heads}, or leave this attention out of the plan."
        )
    by_rank = shard_ranges(width, tp, 1, head)
    packed = {parts: shard_ranges(parts * width, tp, parts, head) for parts in (1, 3)}
    splits = [Split(leaf, 0, packed[parts]) for leaf, parts in _PROJECTIONS.items()]
    splits += [Split("bias_k", 2, by_rank), Split("bias_v", 2, by_rank)]
    held = [split for split in splits if module._parameters.get(split.leaf) is not None]
    return LayerPlan(name, style, by_rank, head, splits=(*held, Split("out_proj.weight", 1, by_rank)))


def experts_plan(name: str, style: Style, modules: Mapping[str, nn.Module], tp: int, proven: bool = False) -> LayerPlan:
    """The style `experts`: of every expert in stacked parameters a share of the features inside.

    Args:
        proven: whether it is known that what the parts compute adds up.

    Raises:
        ValueError: parameters that don't fit each other, or fewer units of features than ranks.
    """
    module, unit = modules[name], unit_of(name, style, modules)
    parameters = style.parameters or usual_parameters(name, module)
    check_parameters(name, module, parameters, proven)
    splits, sizes = [], {}
    for entry in parameters:
        if entry.dim is not None:
            size = module.get_parameter(entry.name).shape[entry.dim]
            parts = entry.parts if isinstance(entry.parts, int) else list(entry.parts)
            try:
                by_rank = shard_ranges(size, tp, parts, entry.unit * unit)
            except ValueError as error:
                raise ValueError(
                    f"MegaTPStrategy: `{name}.{entry.name}` (experts, {size} features) can't be split over tp={tp}:"
                    f" {error}. Change `parameters` or `unit` in the plan, or tp, or leave these experts out of it."
                ) from None
            splits.append(Split(entry.name, entry.dim, by_rank))
            sizes[entry.name] = {part // entry.unit for part in pieces(size, entry.parts)}
    inside = set.union(*sizes.values())
    if len(inside) > 1:
        raise ValueError(
            f"MegaTPStrategy: the split parameters of `{name}` have different numbers of features inside each expert:"
            f" {', '.join(f'{leaf} {sorted(found)}' for leaf, found in sizes.items())}. Change `parts` and `unit` of"
            " its `parameters` in the plan."
        )
    (features,) = inside
    if features // unit < tp:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has {features // unit} units of {unit} features inside each expert for tp={tp}"
            " ranks, and each needs one or more. Use a smaller tp or unit, or leave these experts out of the plan."
        )
    by_rank = shard_ranges(features, tp, 1, unit)
    return LayerPlan(name, style, by_rank, unit, region=name, splits=tuple(splits), stack=StackLayout(parameters))


COUNTS = {"intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_dim", "ffn_hidden_size"}
"""Attributes of experts that count the features inside of each."""


def expert_counts(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> Iterator[AttributePlan]:
    """The attributes of experts that become those of this rank."""
    for name, layer in plan.layers.items():
        if layer.style.style == "experts":
            yield from counts_of(name, layer, modules)


def counts_of(name: str, layer: LayerPlan, modules: Mapping[str, nn.Module]) -> Iterator[AttributePlan]:
    """The attributes of one stack of experts that become those of this rank."""
    sizes = tuple(map(length, layer.by_rank))
    assert layer.stack is not None
    counts = layer.stack.counts
    for count in usual_counts(modules[name], sum(sizes)) if counts is None else counts:
        inner, _, attribute = f"{name}.{count}".rpartition(".")
        yield AttributePlan(inner, attribute, sizes)


def usual_counts(experts: nn.Module, features: int) -> tuple[str, ...]:
    """The attributes that by their names count the features inside of each expert."""
    return tuple(name for name in sorted(COUNTS) if vars(experts).get(name) == features)


def _weight_dim(style: Style, module: nn.Module) -> int:
    dim = _SPLIT_DIM[style.style]
    return 1 - dim if is_conv1d(module) else dim


def split_parameters(layer: LayerPlan, module: nn.Module) -> tuple[Split, ...]:
    """The split parameters of a layer; the others are whole on every rank.

    Args:
        module: its owner.
    """
    if layer.splits:
        return layer.splits
    bare = layer.bare or BareLinear("weight", "bias", TRANSPOSED if is_conv1d(module) else MatrixDims())
    found = bare.dims.split(_SPLIT_DIM[layer.style.style], layer.by_rank, bare.shape)
    assert found is not None
    weight = Split(bare.weight, *found)
    if _SPLIT_DIM[layer.style.style] == 1 or "bias" in layer.whole or module._parameters.get(bare.bias or "") is None:
        return (weight,)  # a row's bias is whole
    assert bare.bias is not None
    return weight, Split(bare.bias, 0, layer.by_rank)


def unit_of(name: str, style: Style, modules: Mapping[str, nn.Module]) -> int:
    """How many features stay together: a number, or an attribute of the module around."""
    if isinstance(style.unit, int):
        return style.unit
    parent = name.rpartition(".")[0]
    value = getattr(modules[parent], style.unit, None)
    if not isinstance(value, int):
        raise ValueError(
            f"MegaTPStrategy: `unit: {style.unit}` of `{style.pattern}`: `{parent or 'the LightningModule'}` has no"
            f" int attribute of that name (found {value!r}). Give the number instead."
        )
    return value


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether it is of a class, or of a user's subclass that is called like it: with another constructor, say."""
    of: Any = type(module)
    if of is kind:
        return True
    same = isinstance(module, kind) and of.forward is kind.forward and of.__call__ is nn.Module.__call__
    return same and not is_torchs(of) and "forward" not in vars(module)


def _other_kind(module: nn.Module, wanted: type[nn.Module]) -> str:
    if isinstance(module, wanted):
        kind = with_article(f"subclass of nn.{wanted.__name__} ({type(module).__name__})")
        if wanted in (nn.Linear, nn.Embedding):
            return f"is {kind} with a call or forward of its own, which may compute something else: it is not swapped"
        return f"is {kind}; only exactly nn.{wanted.__name__} is swapped, since a subclass may compute something else"
    return f"is {with_article(type(module).__name__)}; that style is for nn.{wanted.__name__}"


def _check_type(name: str, style: Style, module: nn.Module) -> None:
    wanted: type[nn.Module] = nn.Linear if style.style in _LINEAR else nn.Embedding
    if style.style == "hidden" and isinstance(module, nn.EmbeddingBag):
        wanted = nn.EmbeddingBag
    kind = type(module).__name__
    why = None
    if not runs_as(module, wanted) and not (is_conv1d(module) if wanted is nn.Linear else looks_up(module)):
        why = _other_kind(module, wanted)
        if is_convolution(module):
            why = f"is {with_article(kind)}, which takes the style `column_gather` only"
        if kind == "NonDynamicallyQuantizableLinear":
            holder = name.rpartition(".")[0]
            why = (
                "belongs to nn.MultiheadAttention, which uses its weight without calling it: give"
                f" `{holder}` itself the style `attention`"
            )
    elif module._parameters.get("weight") is None:
        why = "has no parameter `weight` of its own (weight_norm, a parametrization or pruning replaces it)"
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        by_rows = style.style == "vocab" or isinstance(module, nn.EmbeddingBag)
        for option in ("sparse", "max_norm") + (("scale_grad_by_freq",) if by_rows else ()):
            if getattr(module, option):
                why = f"has {option}={getattr(module, option)!r}, which needs the whole table on one rank"
    if why is not None:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` the style `{style.style}`, but it {why}. Leave it out of the"
            " plan."
        )


def pieces(size: int, parts: int | tuple[int, ...]) -> list[int]:
    """The sizes of what lies fused in one dim."""
    return [size // parts] * parts if isinstance(parts, int) else list(parts)
