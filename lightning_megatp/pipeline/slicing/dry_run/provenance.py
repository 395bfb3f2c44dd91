"""Where the tensors of a step come from: from before it, from an operation, or out of a unit by a side door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.lineages import Lineage
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values
from lightning_megatp.pipeline.slicing.errors import SideDoor, SliceError
from lightning_megatp.pipeline.slicing.filled import Attribute, attribute_with
from lightning_megatp.shim.fakes import is_fake


class Maker(NamedTuple):
    """A unit, or an autograd function."""

    text: str = ""
    """What it is, for messages; empty if nobody knows."""
    stage: int | None = None
    unit: str = ""
    """Its name, if it is one."""


class Provenance:
    """Tells where each tensor comes from that an operation takes.

    Args:
        module: whose step it is.
        values: those that operations have made, or taken before.
        batch: its tensors.
        left: gives the tensors that the step has left on the module so far.
        last_step: tensors that may not be read.
    """

    def __init__(
        self,
        module: nn.Module,
        values: Values,
        batch: Sequence[Tensor],
        left: Callable[[], list[Tensor]],
        last_step: Sequence[Tensor] = (),
    ) -> None:
        self._module, self._values, self._left = module, values, left
        self._last_step = {id(x) for x in last_step}
        self._batch = {id(x) for x in batch}
        self._inside = ByTensor[Maker]()
        """What was made inside of units."""
        self.alike = ByTensor[Lineage]()
        """What of that every stage would make alike; also tensors of the module that were overwritten by such."""
        self._hooks: dict[int, Any] = {}
        """id() of what a hook was given inside of a unit, or has made there -> the hook's code."""

    def find(self, tensor: Tensor, by: str) -> Value:
        """The value of a tensor; those that were there before the step are replicated.

        Raises:
            SideDoor: it came from nowhere the dry run has seen.
        """
        value = self._values.get(tensor)
        if value is not None:
            return value
        is_of_unit = self._values.is_of_unit(tensor)
        if (is_fake(tensor) and not is_of_unit) or self._is_of_batch_apart(tensor):
            maker = self.side_door(tensor).text or "an operation that torch functions don't show"
            raise SideDoor(
                f"{by} uses a tensor that came out of {maker} by a side door: an attribute, a changed argument, a"
                " cache, an object that it returned. Other stages don't have it. Let the module's forward return it,"
                " alone or in a tuple, list or dict.",
                self.hook_of(tensor),
                self.attribute_with(tensor),
            )
        origins = frozenset([id(tensor)] if self._values.is_persistent(tensor) and not is_of_unit else [])
        constant = id(tensor) not in self._batch
        return self._values.add(tensor, None, "the module, its caller or the batch", origins=origins, constant=constant)

    def _is_of_batch_apart(self, tensor: Tensor) -> bool:
        """Whether a unit of a stage before the last has made a tensor of the batch, and not returned it: later stages
        could have made it alike, but did not."""
        maker, stage, _ = self.side_door(tensor)
        if not maker or stage in (None, self._values.last_stage) or self._values.is_persistent(tensor):
            return False
        lineage = self.alike.get(tensor)
        return lineage is not None and lineage.of_batch

    def note_inside(self, made: Iterable[Tensor], maker: Maker) -> None:
        """A call of a stage has made tensors, and need not have returned them."""
        for x in made:
            self._inside[x] = maker

    def note_hook(self, tensor: Tensor, code: Any) -> None:
        """A hook was given a tensor inside of a unit, or has made it there."""
        self._hooks.setdefault(id(tensor), code)

    def check_is_of_step(self, tensor: Tensor, by: str) -> None:
        """Before a tensor is read inside of a unit.

        Raises:
            SliceError: it is one of those that may not be.
        """
        if id(tensor) in self._last_step:
            raise SliceError(f"{by} reads what a block has set on itself in the last step.")

    def hook_of(self, tensor: Tensor) -> Any:
        """The code of a hook that was given a tensor inside of a unit, or has made it there."""
        return self._hooks.get(id(tensor))

    def attribute_with(self, tensor: Tensor) -> Attribute | None:
        """The attribute of the unit that made a tensor, in which that is."""
        unit = self.side_door(tensor).unit
        return attribute_with(tensor, unit, self._module.get_submodule(unit)) if unit else None

    def side_door(self, tensor: Tensor) -> Maker:
        """Where a tensor was made inside of a unit."""
        return self._inside.get(tensor) or Maker()

    def hangs_on_the_module(self, tensor: Tensor) -> bool:
        """Whether a tensor that was made in this step is there, or on what hangs there."""
        return any(x is tensor for x in self._left())
