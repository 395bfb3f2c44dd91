"""Which plan a microbatch takes: its replicated operations are run as a plan has them, and compared with it.

Where a step branches by what all stages know, plans differ. The one that fits is found before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import HOST_READS, StepEnded, at_positions, cut_by_numbers, masks_read
from lightning_megatp.pipeline.slicing.plan import Operation, Read, SlicePlan
from lightning_megatp.pipeline.slicing.running import StageMode
from lightning_megatp.pipeline.slicing.script import Instruction
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.shim.fakes import fake_beside
from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.functions import operation_name


class Rehearsal(StageMode):
    """Runs what is replicated, as far as stages depend on each other. It stops earlier where all reads on the host have
    given the answers that they gave when the step was planned.

    Args:
        plan: of the batch's signature.
        seed: of the random numbers that all stages share.
        around: of the module.
        to_the_end: what the step saw is not all that it may branch by.
    """

    def __init__(self, plan: SlicePlan, seed: int, around: Surroundings, to_the_end: bool) -> None:
        super().__init__(plan, None, {}, seed, around)
        self._expected = [] if to_the_end else list(reversed(plan.early_reads))
        self.same_answers = False
        self.found: tuple[int, Any] | None = None
        """Which operation was given tensors of other shapes than planned, and of which."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def read(x: Tensor) -> int:
            return int(self.__torch_function__(torch.Tensor.__index__, types, (x,)))

        args = cut_by_numbers(func, args, read)
        masks_read(func, args, read)
        out = super().__torch_function__(func, types, args, kwargs)
        if self._expected and func in self._not_operations and operation_name(func) in HOST_READS:
            expected = self._expected.pop()
            if expected.answer is None or Read.of(self._index + 1, out) != expected:
                self._expected.clear()
            elif not self._expected:
                self.done = self.same_answers = True
                raise StepEnded
        return out

    def _compute(
        self, instruction: Instruction, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._compare(instruction.operation, args, kwargs)
        return super()._compute(instruction, function, args, kwargs)

    def _skip(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._compare(instruction.operation, args, kwargs)
        self._compare_made(instruction.operation, args, kwargs)
        return super()._skip(instruction, args, kwargs)

    def _compare_made(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Numbers and masks may tell the shape of what another stage makes of its values (`h[:, :n]`, `h[mask]`)."""
        ghosts = tensors_in(operation.ghosts)
        if isinstance(operation.what, (str, type)) or operation.changed or not ghosts:
            return
        masks = masks_read(operation.what, args, int)
        if not masks and not any(isinstance(x, (int, slice)) for x in tree_leaves((args, kwargs))):
            return
        args = at_positions(args) if masks else args
        try:
            with torch.no_grad():
                given = tree_map(lambda x: fake_beside(ghosts[0], x) if isinstance(x, Tensor) else x, (args, kwargs))
                made = tensors_in(operation.what(*given[0], **given[1]))
        except Exception:
            return  # where it runs it will fail, too
        if [x.shape for x in made] != [x.shape for x in ghosts]:
            self._error = SliceError(f"`{operation.name}` ({operation.where}) makes other shapes than planned.")
            raise self._error

    def _compare(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What is replicated has other shapes where they depend on values: other stages' results would, too."""
        pairs = zip(tensors_in(args, kwargs), operation.given, strict=False)
        given = tuple(None if planned is None else (tuple(x.shape), x.dtype) for x, planned in pairs)
        if given != operation.given[: len(given)]:
            self.found = self._index, given
            self._error = SliceError(f"`{operation.name}` ({operation.where}) takes other shapes than planned.")
            raise self._error

    def check(self, skipped: bool) -> None:
        """After the step, unless it saw the same."""
        if not self.same_answers:
            super().check(skipped)
