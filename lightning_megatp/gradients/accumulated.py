"""Gradients of backwards that were told to wait for a later one, beside gradients that were summed over ranks already.

What was summed must not be summed again: manual optimization may call backward several times before a step, each
optimizer may accumulate by itself, and an `optimizer_zero_grad` of the user's may clear every other time. (An average
over data-parallel ranks stays what it is.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


class AccumulatedGradients:
    """An account of both, by the plain tensors that this rank trains."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        """Parameter -> its gradient that was summed, while it collects another one."""
        self._unsummed: set[Tensor] = set()
        """Parameters whose gradients wait for a later backward."""

    def set_aside(self, parameters: Iterable[Tensor]) -> None:
        """Before a backward: take away the gradients that were summed."""
        self._kept = {p: grad for p, grad in self._kept.items() if p.grad is not None}  # else both were cleared
        for parameter in parameters:
            if parameter.grad is not None and parameter not in self._unsummed:
                self._kept[parameter], parameter.grad = parameter.grad, None

    def leave(self, parameters: Sequence[Tensor]) -> None:
        """After a backward that waits for a later one. A gradient to which it added nothing is back at once: its
        optimizer may step it, or clear it, before that."""
        untouched = [p for p in self._kept if p.grad is None]
        self._unsummed = {p for p in parameters if p.grad is not None}
        for parameter in untouched:
            parameter.grad = self._kept.pop(parameter)

    def give_back(self) -> None:
        """All gradients were summed."""
        for parameter, grad in self._kept.items():
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        self.clear()

    def wait_for(self, parameters: Iterable[Tensor]) -> bool:
        """Whether some of the parameters have a gradient that was not summed."""
        return not self._unsummed.isdisjoint(parameters)

    def clear(self) -> None:
        """Forget them."""
        self._kept, self._unsummed = {}, set()
