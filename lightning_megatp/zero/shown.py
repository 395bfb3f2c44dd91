"""The gradients that hooks find on a divided module's parameters, in place of those that FSDP2 reduces there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.shim.torch import storage_id


class ShownGradients:
    """What the module's parameters have for gradients. The optimizer's are those of the plain rows; hooks look at the
    module, and may change, replace or take away what they find.

    Args:
        parameters: all that are divided.
    """

    def __init__(self, parameters: Sequence[DividedParameter]) -> None:
        self._parameters = parameters
        self._shown: dict[str, Any] = {}
        """Name -> the gradient that the module's parameter was last given."""
        self._parked: dict[str, Any] = {}
        """Name -> what FSDP2 reduced, until it is collected."""

    @torch.no_grad()
    def show(self) -> None:
        """Let the module's parameters have the gradients that the optimizer will see, in the same memory: hooks may
        change them. Those that were summed over tensor ranks or stages are other tensors than FSDP2's."""
        for parameter in self._parameters:
            rows, shown = parameter.local.grad, parameter.sharded.grad
            if rows is None:
                parameter.sharded.grad = None
            elif not isinstance(shown, DTensor) or storage_id(shown.to_local()) != storage_id(rows):
                parameter.sharded.grad = parameter.as_divided(rows)
        self._shown = {p.name: p.sharded.grad for p in self._parameters}

    def hide(self) -> None:
        """Let the module's parameters have none. The next backward adds to those of the rows all the same."""
        self.take_over()
        self._shown = {}
        for parameter in self._parameters:
            parameter.sharded.grad = None

    @torch.no_grad()
    def take_over(self) -> None:
        """After hooks: gradients that they replaced, or took away."""
        for parameter in self._parameters:
            grad = parameter.sharded.grad
            if parameter.name in self._shown and grad is not self._shown[parameter.name]:
                parameter.local.grad = grad.to_local() if isinstance(grad, DTensor) else None
                self._shown[parameter.name] = grad

    def park(self) -> None:
        """After the last backward, where hooks run before `bring_back` that are meant for the gradients from before."""
        self._parked = {p.name: p.sharded.grad for p in self._parameters}
        self.show()

    def bring_back(self) -> None:
        """Let the module's parameters have what was parked, if something was."""
        if self._parked:
            self.take_over()
            for parameter in self._parameters:
                parameter.sharded.grad = self._parked[parameter.name]
            self._parked = {}
