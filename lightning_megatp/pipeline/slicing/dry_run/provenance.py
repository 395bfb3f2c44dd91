"""Where the tensors of a step come from: from before it, from an operation, or out of a unit by a side door."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.lineages import Lineage
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values
from lightning_megatp.pipeline.slicing.errors import SideDoor
from lightning_megatp.shim.fakes import is_fake


class Provenance:
    """Tells where each tensor comes from that an operation takes.

    Args:
        values: those that operations have made, or taken before.
        batch: its tensors.
        left: gives the tensors that the step has left on the module so far.
    """

    def __init__(self, values: Values, batch: Sequence[Tensor], left: Callable[[], list[Tensor]]) -> None:
        self._values, self._left = values, left
        self._batch = {id(x) for x in batch}
        self._inside = ByTensor[tuple[str, int | None]]()
        """What was made inside of units: by which, and of which stage."""
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
            maker = self.side_door(tensor)[0] or "an operation that torch functions don't show"
            raise SideDoor(
                f"{by} uses a tensor that came out of {maker} by a side door: an attribute, a changed argument, a"
                " cache, an object that it returned. Other stages don't have it. Let the module's forward return it,"
                " alone or in a tuple, list or dict.",
                self._hooks.get(id(tensor)),
            )
        origins = frozenset([id(tensor)] if self._values.is_persistent(tensor) and not is_of_unit else [])
        constant = id(tensor) not in self._batch
        return self._values.add(tensor, None, "the module, its caller or the batch", origins=origins, constant=constant)

    def _is_of_batch_apart(self, tensor: Tensor) -> bool:
        """Whether a unit of a stage before the last has made a tensor of the batch, and not returned it: later stages
        could have made it alike, but did not."""
        maker, stage = self.side_door(tensor)
        if maker is None or stage in (None, self._values.last_stage) or self._values.is_persistent(tensor):
            return False
        lineage = self.alike.get(tensor)
        return lineage is not None and lineage.of_batch

    def note_inside(self, made: Iterable[Tensor], stage: int | None, by: str) -> None:
        """A call of a stage has made tensors, and need not have returned them."""
        for x in made:
            self._inside[x] = by, stage

    def note_hook(self, tensor: Tensor, code: Any) -> None:
        """A hook was given a tensor inside of a unit, or has made it there."""
        self._hooks.setdefault(id(tensor), code)

    def side_door(self, tensor: Tensor) -> tuple[str | None, int | None]:
        """For a tensor that was made inside of a unit: of which unit, and its stage."""
        return self._inside.get(tensor) or (None, None)

    def hangs_on_the_module(self, tensor: Tensor) -> bool:
        """Whether a tensor that was made in this step is there, or on what hangs there."""
        return any(x is tensor for x in self._left())
