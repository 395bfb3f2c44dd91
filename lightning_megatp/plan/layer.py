"""What a plan means for one layer: which of its parameters are split, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.plan.styles import ExpertParameter, Style


@dataclass(frozen=True)
class Split:
    """One parameter of a layer that is split."""

    leaf: str
    """Its name in the layer."""
    dim: int
    by_rank: tuple[Ranges, ...]


@dataclass(frozen=True)
class BareLinear:
    """Parameters of a module that it gives to `F.linear` itself: a linear layer that is no module."""

    weight: str
    """Its name in the module that holds it: (out, in)."""
    bias: str | None = None
    """The bias's name there, (out); None where there is none, or it is used otherwise, too."""
    transposed: bool = False
    """Whether the weight is (in, out), as for `x @ weight`."""


UserOperation = tuple[str, str, int]
"""An operation's name, and file and line of the user's code that calls it."""


@dataclass(frozen=True)
class StackLayout:
    """How a stack of experts is split, on the features inside of each: what its parts compute adds up."""

    parameters: tuple[ExpertParameter, ...]
    counts: tuple[str, ...] | None = None
    """Attributes that count the features inside, by their names from the module on; None for the usual."""
    returns: tuple[bool, ...] = ()
    """Whether each tensor that it returns is a sum over the ranks; the others are the same on all ranks. Empty for one
    sum."""
    adds: int | str | None = None
    """Position or keyword of an argument that is added to the first sum besides: a residual."""
    kept: tuple[str, ...] = ()
    """Attributes in which it leaves tensors with a graph that are the same on all ranks."""
    draws_alike: bool = False
    """Whether the random numbers that it draws have to be the same on all ranks, as those that choose experts, and are
    not for the features inside."""
    done: frozenset[UserOperation] = field(default=frozenset(), compare=False)
    """All operations that were seen when it was found to add up; empty if that wasn't tried."""

    @property
    def once(self) -> list[str]:
        """Parameters that only the first rank adds."""
        return [entry.name for entry in self.parameters if entry.once]


@dataclass(frozen=True)
class LayerPlan:
    """One layer to swap."""

    name: str
    style: Style
    by_rank: tuple[Ranges, ...]
    unit: int = 1
    region: str | None = None
    """Name of the module that holds the columns and rows which belong together."""
    sequence_dim: int | None = None
    """For rows inside a `sequence` block: the dim their output is reduce-scattered along."""
    lazy: bool = False
    """For gathered columns: whether they are gathered only where an operation needs all features."""
    splits: tuple[Split, ...] = ()
    """Its split parameters, where they are not `weight` and `bias` as its style splits them."""
    stack: StackLayout | None = None
    """For experts."""
    whole: tuple[str, ...] = ()
    """Parameters that its style would split, and that stay whole, since code around it uses them otherwise."""
    by_function: bool = False
    """Whether code around it gives its weight to `F.linear`, instead of calling it."""
    bare: BareLinear | None = None
    """For a weight that belongs to no linear layer; the name is then that of the weight."""
    global_sizes: bool = False
    """Whether code between column and row sees the sizes of the whole (a `FeatureShard`)."""

    @property
    def owner(self) -> str:
        """Name of the module that holds its parameters: of the layer, mostly."""
        return self.name if self.bare is None else self.name.rpartition(".")[0]
