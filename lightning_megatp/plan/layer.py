"""What a plan means for one layer: which of its parameters are split, and where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_megatp.plan.ranges import Ranges, split_dim
from lightning_megatp.plan.styles import ExpertParameter, Style


@dataclass(frozen=True)
class Split:
    """One parameter of a layer that is split."""

    leaf: str
    """Its name in the layer."""
    dim: int
    by_rank: tuple[Ranges, ...]


@dataclass(frozen=True)
class MatrixDims:
    """Which dims of a weight are the rows, and which the columns, of the matrix (out, in) that a linear layer has."""

    outputs: tuple[int, ...] = (0,)
    inputs: tuple[int, ...] = (1,)

    @property
    def flipped(self) -> MatrixDims:
        """What they are if the matrix is (in, out)."""
        return MatrixDims(self.inputs, self.outputs)

    @property
    def order(self) -> tuple[int, ...]:
        """All dims, those of the outputs first."""
        return self.outputs + self.inputs

    def sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Numbers of outputs and inputs of a weight of that shape."""
        return math.prod(shape[dim] for dim in self.outputs), math.prod(shape[dim] for dim in self.inputs)

    def units(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many outputs, and inputs, lie behind one index of their first dim: the size of a head."""
        outputs, inputs = self.sizes(shape)
        return outputs // shape[self.outputs[0]], inputs // shape[self.inputs[0]]

    def matrix(self, weight: Tensor) -> Tensor:
        """(out, in)."""
        return weight.permute(self.order).flatten(0, len(self.outputs) - 1).flatten(1)

    def split(
        self, side: int, by_rank: tuple[Ranges, ...], shape: Sequence[int]
    ) -> tuple[int, tuple[Ranges, ...]] | None:
        """The dim of the weight that is split where rows (side 0) or columns (1) of the matrix are, and its ranges;
        None if no single one is."""
        dims = self.inputs if side else self.outputs
        if len(dims) == 1:
            return dims[0], by_rank
        found = split_dim(by_rank, tuple(shape[dim] for dim in dims))
        return None if found is None else (dims[found[0]], found[1])


TRANSPOSED = MatrixDims((1,), (0,))
"""Of a weight (in, out), as for `x @ weight`."""


@dataclass(frozen=True)
class BareLinear:
    """Parameters of a module that it gives to `F.linear` itself: a linear layer that is no module."""

    weight: str
    """Its name in the module that holds it."""
    bias: str | None = None
    """The bias's name there, (out); None where there is none, or it is used otherwise, too."""
    dims: MatrixDims = MatrixDims()
    """Of the weight."""
    shape: tuple[int, ...] = field(default=(), compare=False)
    """The weight's, of the whole."""


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
