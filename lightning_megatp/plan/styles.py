"""The styles a plan can give to a module, with their options, and reading them from what a user wrote.

A plan is `{pattern: style}`. Patterns are module names relative to the LightningModule: `*` stands for one name
component, `**` for any number of them. A style is its name, or a mapping with `style` and options:

    plan:
      net.tok: vocab
      net.blocks.*.attn.qkv: {style: column, parts: 3}
      net.blocks.*.attn.proj: row
      net.blocks.*.attn.n_head: divide
      net.blocks.*.mlp.up: column
      net.blocks.*.mlp.down: row
      net.blocks.*: sequence
      net.head: column_gather
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

StyleLike = str | Mapping[str, Any]


@dataclass(frozen=True)
class ExpertParameter:
    """What one stacked parameter of a mixture of experts is: split on a dim, added once, or whole."""

    name: str
    dim: int | None = None
    parts: int | tuple[int, ...] = 1
    unit: int = 1
    """How many features belong to one of the features inside an expert: 2 where gate and up alternate."""
    once: bool = False
    """A bias after the last projection: one rank adds it."""

    @property
    def split(self) -> bool:
        return self.dim is not None


@dataclass(frozen=True)
class Style:
    """One entry of a plan."""

    pattern: str
    style: str
    parts: int | tuple[int, ...] = 1
    """column, row: how many equal pieces are fused one after another in the split dim, or their sizes."""
    unit: int | str = 1
    """column, row, divide, experts: features that stay together, the size of a head; or the name of an attribute of the
    parent module that holds it."""
    global_sizes: bool = False
    """column: code behind it sees the sizes of the whole, whatever numbers of heads and features it has."""
    lazy: bool = False
    """column_gather: gathered only where an operation needs all features; a cross-entropy does not."""
    dim: int = 1
    """sequence: the sequence dim of the hidden states."""
    input: int | str | None = None
    """sequence: position or keyword of the hidden states; by default the first floating tensor argument."""
    parameters: tuple[ExpertParameter, ...] = ()
    """experts: what its parameters are; by default found by their names and shapes."""


_OPTIONS = {
    "column": {"parts", "unit", "global_sizes"},
    "column_gather": {"parts", "unit", "lazy"},
    "row": {"parts", "unit"},
    "row_split": {"parts", "unit"},
    "attention": set(),
    "experts": {"parameters", "unit"},
    "vocab": set(),
    "hidden": {"unit"},
    "divide": {"unit"},
    "sequence": {"dim", "input"},
    "token_local": set(),
    "auto": set(),
}
STYLES = {
    "column": "nn.Linear: output features split; a `row` layer must consume them",
    "column_gather": "nn.Linear, a convolution: output features (channels) split, then gathered",
    "row": "nn.Linear: input features split, as a `column` layer left them; outputs summed",
    "row_split": "nn.Linear: input features split by the layer itself; outputs summed",
    "attention": "nn.MultiheadAttention: heads split; outputs summed",
    "experts": "a mixture of experts with stacked parameters: every expert's features split; outputs summed",
    "vocab": "nn.Embedding: rows split; outputs summed",
    "hidden": "nn.Embedding, nn.EmbeddingBag: hidden dim split, then gathered",
    "divide": "an int attribute (of heads or features): becomes this rank's share",
    "sequence": "a block: its hidden states are split along the sequence between the layers above",
    "token_local": "a module that treats every token alike (your own RMSNorm): runs on the sequence shard",
    "auto": "whatever the rest of the plan leaves open in there is probed and planned automatically; `**` for all",
}


def as_mapping(plan: object) -> dict[str, StyleLike]:
    """What a user may give for a plan, as a mapping.

    Raises:
        ValueError: it is something else than "auto", None or a mapping.
    """
    if plan == "auto":
        return {"**": "auto"}
    if plan is not None and not isinstance(plan, Mapping):
        is_file = isinstance(plan, str) and plan.endswith((".yaml", ".yml"))
        raise ValueError(
            f'MegaTPStrategy: plan={plan!r}, but a plan is "auto" or a mapping {{pattern: style}}.'
            + (f" Give what the file holds: plan=yaml.safe_load(open({plan!r}))." if is_file else "")
        )
    return dict(plan or {})


def read_plan(plan: Mapping[str, StyleLike]) -> list[Style]:
    """Check the form of a plan; what it matches is checked later, against a model.

    Raises:
        ValueError: an unknown style or option, or a value of the wrong kind.
    """
    return [_read(pattern, entry) for pattern, entry in plan.items()]


def _read(pattern: str, entry: StyleLike) -> Style:
    if not isinstance(pattern, str):
        raise ValueError(
            f"MegaTPStrategy: the plan's pattern {pattern!r} ({type(pattern).__name__}) is no module's name. Write it"
            f" as text: {str(pattern)!r}."
        )
    options: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"style": entry}
    if "style" not in options:
        written = ", ".join(f"{name}: {value}" for name, value in {"style": "column", **options}.items())
        raise ValueError(f"MegaTPStrategy: the plan's entry for `{pattern}` has no `style`: write {{{written}}}.")
    style = options.pop("style")
    if not isinstance(style, str) or style not in STYLES:
        listed = ", ".join(f"`{name}`" for name in STYLES)
        close = difflib.get_close_matches(str(style), STYLES, 1)
        meant = f" Did you mean `{close[0]}`?" if close else ""
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{pattern}` the unknown style {style!r}.{meant} There are {listed}."
        )
    unknown = set(options) - _OPTIONS[style]
    if unknown:
        allowed = ", ".join(sorted(_OPTIONS[style])) or "no options"
        raise ValueError(
            f"MegaTPStrategy: the plan's style `{style}` for `{pattern}` has no option {', '.join(sorted(unknown))}."
            f" It takes: {allowed}."
        )
    if isinstance(options.get("parts"), list):  # what YAML makes of a sequence
        options["parts"] = tuple(options["parts"])
    if style == "experts" and "parameters" in options:
        options["parameters"] = _read_parameters(pattern, options["parameters"])
    for name, value in options.items():
        if name == "parameters":
            continue
        wanted, fits = _VALUES[name]
        if not fits(value):
            raise ValueError(f"MegaTPStrategy: option {name}={value!r} of `{pattern}` in the plan is not {wanted}.")
    return Style(pattern, style, **options)


def _read_parameters(pattern: str, entries: Any) -> tuple[ExpertParameter, ...]:
    if not isinstance(entries, Mapping) or not entries or not all(isinstance(name, str) for name in entries):
        raise ValueError(
            f"MegaTPStrategy: option parameters={entries!r} of `{pattern}` in the plan is not a mapping of parameters'"
            " names to what they are."
        )
    return tuple(_read_parameter(pattern, name, entry) for name, entry in entries.items())


def _read_parameter(pattern: str, name: str, entry: Any) -> ExpertParameter:
    if entry in ("once", "whole"):
        return ExpertParameter(name, once=entry == "once")
    options: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"dim": entry}
    if isinstance(options.get("parts"), list):
        options["parts"] = tuple(options["parts"])
    fits = {"dim": lambda x: _is_count(x, 0), "parts": _are_parts, "unit": _is_count}
    if "dim" not in options or any(key not in fits or not fits[key](value) for key, value in options.items()):
        raise ValueError(
            f"MegaTPStrategy: parameter `{name}` of `{pattern}` in the plan is {entry!r}, which is neither the dim that"
            " is split, nor a mapping with `dim` and perhaps `parts` and `unit`, nor `once` or `whole`."
        )
    return ExpertParameter(name, **options)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_parts(value: object) -> bool:
    return _is_count(value) or (isinstance(value, tuple) and bool(value) and all(map(_is_count, value)))


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "parts": ("a number of equal parts, nor a list of their sizes (1 or more)", _are_parts),
    "unit": ("a number of features (1 or more), nor an attribute's name", lambda x: isinstance(x, str) or _is_count(x)),
    "global_sizes": ("true or false", lambda x: isinstance(x, bool)),
    "lazy": ("true or false", lambda x: isinstance(x, bool)),
    "dim": ("a dim counted from the front (0 or more)", lambda x: _is_count(x, 0)),
    "input": ("a position or a keyword", lambda x: x is None or isinstance(x, str) or _is_count(x, 0)),
}


def matches(pattern: str, name: str) -> bool:
    """Whether a module (or attribute) name fits a pattern."""
    regex = "".join(
        r"(?:[^.]+\.)*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") + r"\."
        for part in pattern.split(".")
    )
    return re.fullmatch(regex, name + ".") is not None
