"""What a plan means for one model: layers, attributes, sequence blocks, and the shards of every parameter."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_megatp.plan.layer import LayerPlan, UserOperation
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.plan.styles import Style, StyleLike, matches


@dataclass(frozen=True)
class AttributePlan:
    """One int attribute to replace by each rank's share."""

    module: str
    attribute: str
    by_rank: tuple[int, ...]

    @property
    def name(self) -> str:
        """With that of its module."""
        return f"{self.module}.{self.attribute}".lstrip(".")


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
    read_outside: set[str] = field(default_factory=set)
    """Names of numbers that the step reads outside of blocks, too, so that `auto` does not divide them."""
    transformed: set[str] = field(default_factory=set)
    """Names of modules that the step calls under torch.func, of which `auto` splits none."""
    heads: set[str] = field(default_factory=set)
    """Names of the weights of embeddings that the step also uses as those of an output layer, and for nothing else."""
    compiled: bool = False
    """Whether the model has compiled modules, which can't take shards that report whole sizes."""
    how: dict[str, str] = field(default_factory=dict)
    """Layers that were planned automatically -> how, in words."""
    proven: list[str] = field(default_factory=list)
    """Blocks that were run whole and split, and did the same with all that they use of their layers."""
    couplings: dict[str, frozenset[UserOperation]] = field(default_factory=dict)
    """Such a block -> what was seen in it that looks at several elements at once."""
    operations: dict[str, frozenset[UserOperation]] = field(default_factory=dict)
    """Stack of experts that was found to add up -> all operations that were seen in it."""
    used_twice: set[str] = field(default_factory=set)
    """Modules in sequence regions that use a parameter more than once, perhaps on whole values too."""
    whole_sequences: list[str] = field(default_factory=list)
    """Modules of the style `sequence` that meet compiled code, where their tokens stay whole."""
    whole: dict[str, str] = field(default_factory=dict)
    """Linear layers that were probed and stay whole -> why."""

    def outermost(self) -> list[str]:
        """The proven blocks, and the layers outside of them."""
        inside = tuple(f"{block}." for block in self.proven)
        return [*self.proven, *(name for name in self.layers if not f"{name}.".startswith(inside))]


def plain_name(name: str) -> str:
    """A module's name without what torch.compile puts around it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def _generalized(name: str) -> str:
    """A module's name as a pattern of all in its list."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def matching(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """The modules that a pattern matches by any of their names, each under its first name."""
    first: dict[int, str] = {}
    for name, module in modules.items():
        first.setdefault(id(module), name)
    found = (first[id(module)] for name, module in modules.items() if name and matches(pattern, name))
    return list(dict.fromkeys(found))


def named(pattern: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Like `matching`, but at least one.

    Raises:
        ValueError: there is none.
    """
    names = matching(pattern, modules)
    if not names:
        names = [_generalized(name) if "*" in pattern else name for name in modules if name]
        close = difflib.get_close_matches(pattern, dict.fromkeys(names), n=3, cutoff=0.3)
        hint = f" Close names: {', '.join(f'`{name}`' for name in close)}." if close else ""
        raise ValueError(
            f"MegaTPStrategy: the plan's pattern `{pattern}` matches no module of the LightningModule.{hint} Patterns"
            " are full names as in `named_modules()`; `*` is one component, `**` any number."
        )
    return names
