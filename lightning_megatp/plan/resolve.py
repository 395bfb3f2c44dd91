"""From a plan and a model to what exactly is split where. Pure: reads names, types and shapes, changes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_megatp.plan.convolutions import convolution_plan, is_convolution, is_weight_normed
from lightning_megatp.plan.experts import check_parameters, looks_like_experts, usual_parameters
from lightning_megatp.plan.layer import LayerPlan, Split
from lightning_megatp.plan.ranges import Ranges, deal_units, length, shard_ranges, show
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.plan.styles import Style, StyleLike, matches, read_plan
from lightning_megatp.shim.torch import is_compiled
from lightning_megatp.shim.transformers import is_conv1d

_LINEAR = {"column", "column_gather", "row", "row_split"}
_EMBEDDING = {"vocab", "hidden"}
_SPLIT_DIM = {"column": 0, "column_gather": 0, "row": 1, "row_split": 1, "vocab": 0, "hidden": 1}


@dataclass(frozen=True)
class AttributePlan:
    """One int attribute to replace by each rank's share."""

    module: str
    attribute: str
    by_rank: tuple[int, ...]


@dataclass
class ParallelPlan:
    """What the plan means for one model at one tensor-parallel size."""

    tp: int
    source: Mapping[str, StyleLike] = field(default_factory=dict)
    """What the user wrote."""
    sequence_parallel: bool = True
    layers: dict[str, LayerPlan] = field(default_factory=dict)
    attributes: list[AttributePlan] = field(default_factory=list)
    sequences: dict[str, Style] = field(default_factory=dict)
    token_local: list[str] = field(default_factory=list)
    parameters: dict[str, ShardedTensorSpec] = field(default_factory=dict)
    """Every name of every sharded parameter (tied parameters have several) -> its shards."""
    open: list[str] = field(default_factory=list)
    """Patterns of what is left to be planned automatically."""
    compiled: bool = False
    """Whether the model has compiled modules, which can't take shards that report whole sizes."""
    how: dict[str, str] = field(default_factory=dict)
    """Layers that were planned automatically -> how, in words."""
    used_twice: set[str] = field(default_factory=set)
    """Modules in sequence regions that use a parameter more than once, perhaps on whole values too."""
    whole_sequences: list[str] = field(default_factory=list)
    """Modules of the style `sequence` that meet compiled code, where their tokens stay whole."""
    whole: dict[str, str] = field(default_factory=dict)
    """Linear layers that were probed and stay whole -> why."""


def resolve(plan: Mapping[str, StyleLike], model: nn.Module, tp: int, sequence_parallel: bool = True) -> ParallelPlan:
    """Match a plan against a model and check everything that can be known before a step.

    Args:
        plan: see `lightning_megatp.plan.styles`.
        model: the unsplit model; parameters may be on meta.
        tp: size of the tensor axis.
        sequence_parallel: False ignores the plan's `sequence` and `token_local` entries.

    Raises:
        ValueError: a pattern that matches nothing, a style on a module that can't take it, sizes or heads that can't be
            divided, tied parameters with different styles, a column layer that no row layer consumes.
    """
    found = ParallelPlan(tp, dict(plan), sequence_parallel)
    modules = {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}
    compiled = [plain_name(name) for name, module in model.named_modules() if is_compiled(module)]
    for style in read_plan(plan):
        if style.style == "auto":
            found.open.append(style.pattern)
        elif style.style in ("sequence", "token_local") and not sequence_parallel:
            _names(style.pattern, modules)
        elif style.style == "divide":
            found.attributes += _divide(style, modules, tp)
        elif style.style == "sequence":
            names = _names(style.pattern, modules)
            found.whole_sequences += [name for name in names if any(_nested(name, other) for other in compiled)]
            found.sequences |= {name: style for name in names if name not in found.whole_sequences}
        elif style.style == "token_local":
            found.token_local += _names(style.pattern, modules)
        else:
            for name in _names(style.pattern, modules):
                if name in found.layers:
                    other = found.layers[name].style.pattern
                    raise ValueError(
                        f"MegaTPStrategy: both `{other}` and `{style.pattern}` of the plan match `{name}`."
                    )
                found.layers[name] = _layer(name, style, modules, tp)
    _check_heads(found, modules)
    found.attributes += expert_counts(found, modules)
    _place(found)
    found.parameters = parameter_specs(found, model)
    return found


def _nested(one: str, other: str) -> bool:
    """Whether two names are of one module, or of one inside the other."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def whole_modules(model: nn.Module, tp: int) -> Iterator[tuple[LayerPlan | ValueError, str]]:
    """The modules that are split as a whole, nn.MultiheadAttention and stacks of experts, with their names; or why one
    of them can't be."""
    modules = dict(model.named_modules())
    for name, module in modules.items():
        try:
            if type(module) is nn.MultiheadAttention:
                yield _attention(name, Style(name, "attention"), module, tp), name
            elif looks_like_experts(module):
                yield _experts(name, Style(name, "experts"), modules, tp), name
        except ValueError as error:
            yield error, name


def plain_name(name: str) -> str:
    """A module's name without what torch.compile puts around it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _matching(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules that a pattern matches by any of their names, each under its first name."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        first.setdefault(id(module), name)
    found = (first[id(module)] for name, module in modules.items() if name and matches(pattern, name))
    return list(dict.fromkeys(found))


def _names(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    names = _matching(pattern, modules)
    if not names:
        close = difflib.get_close_matches(pattern, [name for name in modules if name], n=3, cutoff=0.3)
        hint = f" Close names: {', '.join(f'`{name}`' for name in close)}." if close else ""
        raise ValueError(
            f"MegaTPStrategy: the plan's pattern `{pattern}` matches no module of the LightningModule.{hint} Patterns"
            " are full names as in `named_modules()`; `*` is one component, `**` any number."
        )
    return names


def _layer(name: str, style: Style, modules: Mapping[str, nn.Module], tp: int) -> LayerPlan:
    module = modules[name]
    if style.style == "attention":
        return _attention(name, style, module, tp)
    if style.style == "experts":
        return _experts(name, style, modules, tp)
    if style.style == "column_gather" and (is_convolution(module) or is_weight_normed(module)):
        return convolution_plan(name, style, module, tp)
    _check_type(name, style, module)
    size = module.get_parameter("weight").shape[_weight_dim(style, module)]
    unit = _unit(name, style, modules)
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
        if style.style != "row" and style.style != "row_split" and min(map(length, by_rank)) == 0:
            raise ValueError(f"MegaTPStrategy: `{name}` has {size} features for tp={tp} ranks; each needs one or more.")
    return LayerPlan(name, style, by_rank, unit)


_PROJECTIONS = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1, "in_proj_bias": 3}
"""Parameters of an nn.MultiheadAttention split on dim 0 -> how many projections lie in them one after another."""


def _attention(name: str, style: Style, module: nn.Module, tp: int) -> LayerPlan:
    if type(module) is not nn.MultiheadAttention:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` the style `attention`, but it is a {type(module).__name__}; only"
            " exactly nn.MultiheadAttention is swapped, since a subclass may compute something else. Give the linear"
            " layers of another attention `column` and `row`, or leave it out of the plan."
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


def _experts(name: str, style: Style, modules: Mapping[str, nn.Module], tp: int) -> LayerPlan:
    module, unit = modules[name], _unit(name, style, modules)
    parameters = style.parameters or usual_parameters(name, module)
    check_parameters(name, module, parameters)
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
            sizes[entry.name] = {part // entry.unit for part in _pieces(size, entry.parts)}
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
    once = tuple(entry.name for entry in parameters if entry.once)
    return LayerPlan(name, style, by_rank, unit, region=name, splits=tuple(splits), once=once)


_COUNTS = {"intermediate_dim", "intermediate_size", "moe_intermediate_size", "expert_dim", "ffn_dim", "ffn_hidden_size"}
"""Attributes of experts that count the features inside of each."""


def expert_counts(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> Iterator[AttributePlan]:
    """The attributes of experts that become those of this rank."""
    for name, layer in plan.layers.items():
        if layer.style.style == "experts":
            sizes = tuple(map(length, layer.by_rank))
            held = vars(modules[name])
            counts = (attribute for attribute in sorted(_COUNTS & held.keys()) if held[attribute] == sum(sizes))
            yield from (AttributePlan(name, attribute, sizes) for attribute in counts)


def _weight_dim(style: Style, module: nn.Module) -> int:
    dim = _SPLIT_DIM[style.style]
    return 1 - dim if is_conv1d(module) else dim


def split_parameters(layer: LayerPlan, module: nn.Module) -> tuple[Split, ...]:
    """The split parameters of a layer; the others are whole on every rank."""
    if layer.splits:
        return layer.splits
    weight = Split("weight", _weight_dim(layer.style, module), layer.by_rank)
    if _SPLIT_DIM[layer.style.style] == 1 or module._parameters.get("bias") is None:
        return (weight,)  # a row's bias is whole
    return weight, Split("bias", 0, layer.by_rank)


def _unit(name: str, style: Style, modules: Mapping[str, nn.Module]) -> int:
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


def _check_type(name: str, style: Style, module: nn.Module) -> None:
    wanted = nn.Linear if style.style in _LINEAR else nn.Embedding
    kind = type(module).__name__
    why = None
    if type(module) is not wanted and not (wanted is nn.Linear and is_conv1d(module)):
        why = f"is a {kind}; only exactly nn.{wanted.__name__} is swapped, since a subclass may compute something else"
        if is_convolution(module):
            why = f"is a {kind}, which takes the style `column_gather` only"
        if kind == "NonDynamicallyQuantizableLinear":
            holder = name.rpartition(".")[0]
            why = (
                "belongs to nn.MultiheadAttention, which uses its weight without calling it: give"
                f" `{holder}` itself the style `attention`"
            )
    elif module._parameters.get("weight") is None:
        why = "has no parameter `weight` of its own (weight_norm, a parametrization or pruning replaces it)"
    elif isinstance(module, nn.Embedding):
        for option in ("sparse", "max_norm") + (("scale_grad_by_freq",) if style.style == "vocab" else ()):
            if getattr(module, option):
                why = f"has {option}={getattr(module, option)!r}, which needs the whole table on one rank"
    if why is not None:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` the style `{style.style}`, but it {why}. Leave it out of the"
            " plan."
        )


def _divide(style: Style, modules: Mapping[str, nn.Module], tp: int) -> list[AttributePlan]:
    parent, _, attribute = style.pattern.rpartition(".")
    names = [""] if parent == "" else _matching(parent, modules)
    owners = [name for name in names if attribute in vars(modules[name])]
    if not owners:
        raise ValueError(
            f"MegaTPStrategy: the plan's `{style.pattern}` (divide) matches no attribute: no module named `{parent}`"
            f" has an own attribute `{attribute}`. (A property is divided by dividing what it is made of.)"
        )
    plans = []
    for name in owners:
        value = vars(modules[name])[attribute]
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(
                f"MegaTPStrategy: `{name}.{attribute}` is {value!r}; only an int attribute can be divided."
            )
        unit = _unit(f"{name}.{attribute}" if name else attribute, style, modules)
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


def _check_heads(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> None:
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


def _place(plan: ParallelPlan) -> None:
    """Find the region of each column and row layer, and the rows inside sequence blocks."""
    columns = [name for name, layer in plan.layers.items() if layer.style.style == "column"]
    rows = [name for name, layer in plan.layers.items() if layer.style.style == "row"]
    for name, layer in list(plan.layers.items()):
        region = layer.region
        if layer.style.style in ("column", "row"):
            partners = rows if layer.style.style == "column" else columns
            region = next((a for a in _ancestors(name) if any(_inside(partner, a) for partner in partners)), None)
            if region is None:
                other, fix = ("row", "column_gather") if layer.style.style == "column" else ("column", "row_split")
                what = "output is split, and nothing consumes it" if other == "row" else "input is never split"
                raise ValueError(
                    f"MegaTPStrategy: `{name}` has the style `{layer.style.style}`, but its {what}: the plan has no"
                    f" `{other}` layer. Add one, or use `{fix}` for `{name}`."
                )
        blocks = [a for a in _ancestors(name) if a in plan.sequences]
        closes = layer.style.style in ("row", "row_split", "attention")
        dim = plan.sequences[blocks[0]].dim if blocks and closes else None
        tracked = layer.style.global_sizes
        if layer.style.style == "row":
            tracked = any(plan.layers[c].style.global_sizes and _inside(c, region or "") for c in columns)
        plan.layers[name] = replace(layer, region=region, sequence_dim=dim, global_sizes=tracked, lazy=layer.style.lazy)
    for name in rows:
        _check_row(plan, name)
    for name in columns:
        _check_column(plan, name)
    for region in dict.fromkeys(layer.region for layer in plan.layers.values()):
        if region is not None:
            _check_shared_heads(plan, region)


def _check_row(plan: ParallelPlan, name: str) -> None:
    """A row and the columns of its region must own the same features, or the product is silently wrong."""
    row = plan.layers[name]
    columns = [c for c in plan.layers.values() if c.style.style == "column" and c.region == row.region]
    left = [(column, part) for column in columns for part in _parts_of(column, plan.tp)]
    for part in _parts_of(row, plan.tp):
        if any(_feeds(column, other, row, part, plan.tp) for column, other in left):
            continue
        same_size = [other for _, other in left if _size(other) == _size(part)]
        if same_size:
            raise ValueError(
                f"MegaTPStrategy: `{name}` takes the features {', '.join(show(r) for r in part)} on ranks"
                f" 0..{plan.tp - 1}, but `{columns[0].name}` leaves {', '.join(show(r) for r in same_size[0])}. Give"
                " both the same `unit`."
            )
        sizes = ", ".join(f"`{column.name}` leaves {_part_sizes(column)}" for column in columns)
        raise ValueError(
            f"MegaTPStrategy: `{name}` takes {_size(part)} features in one piece, but {sizes}. Where a layer holds"
            " several projections one after another (q, k and v; gate and up), or takes several concatenated, each of"
            " them has to be split by itself: say so with `parts`, their number or their sizes."
        )


def _check_column(plan: ParallelPlan, name: str) -> None:
    """A column layer needs a row layer beside it, or one elsewhere in its region that takes what it leaves."""
    column = plan.layers[name]
    rows = [r for r in plan.layers.values() if r.style.style == "row" and r.region == column.region]
    beside = any(row.name.rpartition(".")[0] == name.rpartition(".")[0] for row in rows)
    parts = _parts_of(column, plan.tp)
    fed = any(_feeds(column, x, row, y, plan.tp) for row in rows for x in parts for y in _parts_of(row, plan.tp))
    if rows and not beside and not fed:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has the style `column`, but its output is split, and nothing consumes it: of the"
            f" plan's `row` layers, {', '.join(f'`{row.name}`' for row in rows)} take other features. Add the `row`"
            f" layer that follows it, or use `column_gather` for `{name}`."
        )


def _feeds(column: LayerPlan, left: tuple[Ranges, ...], row: LayerPlan, taken: tuple[Ranges, ...], tp: int) -> bool:
    """Whether a part that a column leaves can be the one a row takes: the same ranges, or, for projections that
    alternate head by head, the same share of the heads."""
    if left == taken:
        return True
    units, size = _size(left) // column.unit, _size(taken)
    if column.unit == 1 or _size(left) <= size or size % units or row.unit not in (1, size // units):
        return False
    return shard_ranges(size, tp, 1, size // units) == taken


def _check_shared_heads(plan: ParallelPlan, region: str) -> None:
    """Query heads must sit with the key-value heads they attend to."""
    columns = [c for c in plan.layers.values() if c.style.style == "column" and c.region == region and c.unit > 1]
    parts = [(column, part) for column in columns for part in _part_sizes(column)]
    if not parts:
        return
    queries = max(size // column.unit for column, size in parts)
    for column, size in parts:
        heads = size // column.unit
        if queries % heads:
            continue
        group = queries // heads
        for (q_start, q_stop), held in zip(deal_units(queries, plan.tp), deal_units(heads, plan.tp), strict=True):
            if q_stop > q_start and (q_start // group, (q_stop - 1) // group + 1) != held:
                raise ValueError(
                    f"MegaTPStrategy: over tp={plan.tp} the {heads} heads of `{column.name}` do not lie with the"
                    f" {queries} query heads that use them (rank with queries {q_start}..{q_stop - 1} would hold heads"
                    f" {held[0]}..{held[1] - 1}). Use a tp that divides {queries} and divides, or is divided by,"
                    f" {heads}, or leave this attention out of the plan."
                )


def _size(by_rank: tuple[Ranges, ...]) -> int:
    """Features that all ranks own together, repeated ones once."""
    return len({i for ranges in by_rank for start, stop in ranges for i in range(start, stop)})


def _part_sizes(layer: LayerPlan) -> list[int]:
    return _pieces(_size(layer.by_rank), layer.style.parts)


def _pieces(size: int, parts: int | tuple[int, ...]) -> list[int]:
    return [size // parts] * parts if isinstance(parts, int) else list(parts)


def _parts_of(layer: LayerPlan, tp: int) -> list[tuple[Ranges, ...]]:
    """The ranges of each fused part of a layer, counted from the part's start."""
    return [shard_ranges(part, tp, 1, layer.unit) for part in _part_sizes(layer)]


def parameter_specs(plan: ParallelPlan, model: nn.Module) -> dict[str, ShardedTensorSpec]:
    """The shards of every parameter name; tied names must agree."""
    modules = {plain_name(name): (name, module) for name, module in model.named_modules()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    specs: dict[str, ShardedTensorSpec] = {}
    for layer in plan.layers.values():
        raw, module = modules[layer.name]
        for split in split_parameters(layer, module):
            parameter = module.get_parameter(split.leaf)
            spec = ShardedTensorSpec(f"{raw}.{split.leaf}", tuple(parameter.shape), split.dim, split.by_rank)
            for name in names[id(parameter)]:
                if name in specs and specs[name].renamed("") != spec.renamed(""):
                    raise ValueError(_tied(name, spec.name, "split differently"))
                specs[name] = spec.renamed(name)
    swapped = {id(modules[name][1]): layer for name, layer in plan.layers.items()}
    planned = {
        f"{name}.{split.leaf}"
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in swapped
        for split in split_parameters(swapped[id(module)], module)
    }
    for parameter_names in names.values():
        sharded = [name for name in parameter_names if name in specs]
        for name in parameter_names:
            owner = model.get_submodule(name.rpartition(".")[0])
            is_layer = isinstance(owner, (nn.Linear, nn.Embedding)) or is_convolution(owner)
            if sharded and name not in planned and is_layer:
                source = next(n for n in sharded if n in planned)
                raise ValueError(_tied(name, source, "split by the plan only at one of them"))
    return specs


def _tied(one: str, other: str, what: str) -> str:
    return (
        f"MegaTPStrategy: `{one}` and `{other}` are one tied parameter, {what}. Give both layers matching styles, for"
        " an embedding and its head `vocab` and `column_gather`, or leave both out of the plan."
    )


def _ancestors(name: str) -> Iterator[str]:
    """blocks.0.attn.qkv -> blocks.0.attn, blocks.0, blocks, (root)."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _inside(name: str, ancestor: str) -> bool:
    return ancestor == "" or name.startswith(ancestor + ".")
