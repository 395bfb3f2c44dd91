"""What steps and hooks do with divided parameters (zero > 0) that would be lost, or not be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.shim.torch import storage_id
from lightning_megatp.tensor.functions import (
    asks_gradient,
    check_caller,
    gradient_in_step,
    is_in_place,
    operation_name,
    sets_data,
)


def lost_change(name: str) -> str:
    """What is said of a write to a gathered parameter."""
    return (
        f"MegaTPStrategy: `{name}` was changed in place while it was gathered (zero > 0); the change would be lost."
        " Change parameters in `on_train_batch_end`, where `self.parameters()` are this rank's own rows, or use zero=0."
    )


class WriteWatch(TorchFunctionMode):
    """Active around a user's step: raises where it writes to a gathered parameter, or reads its gradient. Costs Python
    time at every operation, so it is for single steps.

    Args:
        parameters: those that are divided.
        of_user: whether the step's own code runs, and not a hook inside of it, which finds rows.
    """

    def __init__(self, parameters: Sequence[DividedParameter], of_user: Callable[[], bool]) -> None:
        super().__init__()
        self._of_user = of_user
        self._names = {storage_id(p.whole): p.name for p in parameters}
        self._parameters = {id(x): p.name for p in parameters for x in (p.whole, p.sharded)}
        self._gathered = {id(p.whole): p.name for p in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        if sets_data(func) and _is_same_memory(args[0], args[1]):
            return func(*args, **(kwargs or {}))  # `w.data = w.data.to(device)`
        if sets_data(func) and (name := self._parameters.get(id(args[0]))) is not None:
            raise RuntimeError(lost_change(name))  # of a DTensor, the shell alone would be set
        changes = is_in_place(operation_name(func)) or sets_data(func)
        if changes and args and type(args[0]) in (Tensor, nn.Parameter):
            name = self._names.get(storage_id(args[0]))
            if name is not None and operation_name(func) != "requires_grad_":
                raise RuntimeError(lost_change(name))
        lost = self._gathered if func == _SETS_GRADIENT and args[1] is None else self._parameters
        if func == _SETS_GRADIENT and self._of_user() and (name := lost.get(id(args[0]))) is not None:
            raise RuntimeError(
                f"MegaTPStrategy: the step sets the gradient of `{name}`, and with zero > 0 gradients lie with the"
                " rows that each rank trains. Clear them by `zero_grad()` of an optimizer or a module."
            )
        name = self._parameters.get(id(args[0])) if asks_gradient(func, args) and self._of_user() else None
        if name is not None:
            why = "With zero > 0 gradients lie with the rows that each rank trains, where no step finds them."
            raise RuntimeError(f"MegaTPStrategy: {gradient_in_step(f'`{name}`', why)}")
        return func(*args, **(kwargs or {}))


def _is_same_memory(x: Tensor, other: Any) -> bool:
    """Whether a tensor is set to what it is."""
    if not isinstance(other, Tensor) or isinstance(x, DTensor) is not isinstance(other, DTensor):
        return False
    alike = x.shape == other.shape and x.dtype == other.dtype and x.stride() == other.stride()
    x, other = (y.to_local() if isinstance(y, DTensor) else y for y in (x, other))
    return alike and storage_id(x) == storage_id(other) and x.storage_offset() == other.storage_offset()


_SETS_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]
