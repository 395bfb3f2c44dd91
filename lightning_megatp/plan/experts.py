"""Which parameters of a mixture of experts are split, and where, by the names and shapes that transformers gives them.

Every expert is an MLP, and all of one kind are stacked in one parameter. Shapes: E experts, I features inside of each
(what is split), H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from lightning_megatp.plan.styles import ExpertParameter

_UP = {"gate_up_proj": 2, "gate_proj": 1, "up_proj": 1}
"""Projections into an expert -> how many times I features they have."""


def looks_like_experts(module: nn.Module) -> bool:
    """Whether a module holds stacks of experts under the names that transformers gives them."""
    own = module._parameters
    stacks = [own.get(leaf) for leaf in ("down_proj", *_UP)]
    return stacks[0] is not None and sum(x is not None and x.dim() == 3 for x in stacks) >= 2


def usual_parameters(name: str, module: nn.Module) -> tuple[ExpertParameter, ...]:
    """How the parameters of a module are split if nothing else is said.

    `gate_up_proj` (E, 2I, H), or `gate_proj` and `up_proj` (E, I, H), and `down_proj` (E, H, I), or all of them with
    the last two dims exchanged; their biases (E, 2I), (E, I) and (E, H). Gate and up are halves, or alternate where
    the module says `is_concatenated=False`.

    Raises:
        ValueError: other names, or shapes that fit neither layout, or both.
    """
    own = dict(module.named_parameters())
    ups = [leaf for leaf in _UP if leaf in own]
    known = {*ups, "down_proj", *(f"{leaf}_bias" for leaf in (*ups, "down_proj"))}
    unknown = sorted(own.keys() - known)
    if not ups or "down_proj" not in own or unknown:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has the style `experts` and the parameters {sorted(own)}; by themselves only"
            f" gate_up_proj (or gate_proj and up_proj), down_proj and their biases are known. {_SAY}"
        )
    transposed = _transposed(name, module, ups, own)
    unit = 2 if _alternate(name, module, ups) else 1
    found = []
    for leaf in ups:
        parts = _UP[leaf] if unit == 1 else 1
        found.append(ExpertParameter(leaf, 2 if transposed else 1, parts, unit if leaf == "gate_up_proj" else 1))
        if f"{leaf}_bias" in own:
            found.append(ExpertParameter(f"{leaf}_bias", 1, parts, found[-1].unit))
    found.append(ExpertParameter("down_proj", 1 if transposed else 2))
    if "down_proj_bias" in own:
        found.append(ExpertParameter("down_proj_bias", once=True))
    return tuple(found)


def check_parameters(name: str, module: nn.Module, parameters: tuple[ExpertParameter, ...], proven: bool) -> None:
    """Compare a plan's entries for the parameters of experts with those of the module.

    Args:
        proven: whether what the parts compute is known to add up.

    Raises:
        ValueError: the entries and the parameters of the module are not the same, or experts that can't be split.
    """
    own = dict(module.named_parameters())
    for entry in parameters:
        parameter = own.get(entry.name)
        if parameter is None:
            raise ValueError(
                f"MegaTPStrategy: `parameters` of `{name}` names `{entry.name}`, but the module has the parameters"
                f" {sorted(own)}."
            )
        if entry.dim is not None and entry.dim >= parameter.dim():
            raise ValueError(
                f"MegaTPStrategy: `{name}.{entry.name}` has {parameter.dim()} dims and can't be split on dim"
                f" {entry.dim}. Change `parameters` in the plan."
            )
    missing = sorted(own.keys() - {entry.name for entry in parameters})
    if missing or not any(entry.split for entry in parameters):
        what = f"doesn't say what {', '.join(missing)} is" if missing else "splits nothing"
        raise ValueError(f"MegaTPStrategy: `parameters` of `{name}` {what}. {_SAY}")
    counts = {own[entry.name].shape[0] for entry in parameters if entry.dim and own[entry.name].dim() > 2}
    if len(counts) > 1 and not proven:
        raise ValueError(
            f"MegaTPStrategy: the split parameters of `{name}` are stacks of {sorted(counts)} experts: some experts do"
            " something else than others, which would be summed over the ranks. Leave them out of the plan."
        )
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"MegaTPStrategy: `{name}` normalises what each expert returns (has_post_expert_norm), which no rank has"
            " as a whole. Leave it out of the plan."
        )


def _transposed(name: str, module: nn.Module, ups: list[str], own: Mapping[str, Tensor]) -> bool:
    """Whether the weights are (E, in, out)."""
    said = getattr(module, "is_transposed", None)
    ways = (said,) if isinstance(said, bool) else (False, True)
    fits = [way for way in ways if _fits(way, ups, own)]
    if len(fits) != 1:
        shapes = ", ".join(f"{leaf} {tuple(own[leaf].shape)}" for leaf in (*ups, "down_proj"))
        raise ValueError(
            f"MegaTPStrategy: the shapes of `{name}`, {shapes}, fit {'both layouts' if fits else 'no layout'} of"
            f" experts: (experts, out, in) or (experts, in, out). {_SAY}"
        )
    return fits[0]


def _fits(transposed: bool, ups: list[str], own: Mapping[str, Tensor]) -> bool:
    def sizes(leaf: str) -> Iterator[int]:
        """Out and in."""
        shape = tuple(own[leaf].shape[1:])
        yield from reversed(shape) if transposed else shape

    if any(own[leaf].dim() != 3 for leaf in (*ups, "down_proj")):
        return False
    hidden, inside = sizes("down_proj")
    return all(tuple(sizes(leaf)) == (_UP[leaf] * inside, hidden) for leaf in ups)


def _alternate(name: str, module: nn.Module, ups: list[str]) -> bool:
    """Whether gate and up alternate: gate 0, up 0, gate 1, ..."""
    concatenated = getattr(module, "is_concatenated", None)
    if "gate_up_proj" in ups and concatenated is None and hasattr(module, "_apply_gate"):
        raise ValueError(
            f"MegaTPStrategy: `{name}` has a `_apply_gate` of its own and no `is_concatenated`: whether gate and up lie"
            f" in gate_up_proj as halves (`parts: 2`) or alternate (`unit: 2`) can't be known. {_SAY}"
        )
    return concatenated is False


_SAY = (
    "Say in the plan what each parameter is, e.g. `parameters: {w13: {dim: 1, parts: 2}, w2: 2, b2: once}`: the dim"
    " that is split, `once` for a bias added after the last projection, `whole` for what all ranks use as it is; or"
    " leave it out of the plan."
)
