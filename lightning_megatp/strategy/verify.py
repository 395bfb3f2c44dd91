"""`verify=True`: the first training batch, compared with the unsplit model on one device.

Global rank 0 keeps a copy of the whole model until then. That takes the memory of the whole model and of one step on
it: meant for a smaller version of a model, or for one that just fits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.copies import uncopied
from lightning_megatp.building.building import Building
from lightning_megatp.commands import requested
from lightning_megatp.commands.proof import print_errors
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.own_values import BATCH_NORMS
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.random_states import random_state_kept

_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest relative difference of losses: sums in another order over the layers of a deep model."""
_HALF = 2.0**-5
"""Largest relative difference in bfloat16 and float16, also under autocast: a few roundings of 2^-9 per layer."""


_PROOF = 1e-7
"""Largest difference in `megatp verify`: weights are float64, but a model may compute its loss or a norm in float32."""


class FirstBatch:
    """The unsplit model, and what it makes of the first batch.

    Args:
        module: the LightningModule, before it is split.
        keep: whether this rank has the copy, and compares; the others only help to gather.
        building: makes the copy's parameters, where the module's have no values yet.
    """

    def __init__(self, module: Any, keep: bool, building: Building | None) -> None:
        self.module = _copy(module) if keep else None
        if self.module is not None and building is not None:
            building.fill(self.module, module)
        self._loss: Tensor | None = None
        self._half = False

    def run_and_compare_loss(
        self, outputs: Any, args: tuple[Any, ...], device: torch.device, pipeline: Pipeline | None
    ) -> None:
        """Run forward and backward of the whole model, in the contexts of the step.

        Args:
            outputs: of the split model's step.
            args: of the training step, the batch first.
            device: where to run.
            pipeline: what splits the batch, for a model whose samples are coupled by BatchNorm.

        Raises:
            RuntimeError: the losses differ.
        """
        if self.module is None:
            return
        batch, *rest = args
        parts = pipeline.microbatches(batch) if pipeline is not None and _couples_samples(self.module) else [batch]
        if len(parts) > 1 and pipeline is not None and pipeline.slicer.tail:
            warn_once_per_run(
                "verify=True: BatchNorm normalises over microbatches, and whole_loss=True makes the loss of all of them"
                " at once. No batch of one device is the same, so it can't be compared. Use microbatches=1 to verify."
            )
            return
        self.module.to(device)
        with random_state_kept():
            losses = [_loss_of(self.module.training_step(part, *rest)) for part in parts]
            if not torch.equal(losses[0], _loss_of(self.module.training_step(parts[0], *rest))):
                warn_once_per_run(
                    "verify=True: the training step draws random numbers, so its first batch can't be compared with one"
                    " device. Switch dropout off to verify."
                )
                return
        expected = torch.stack(losses).mean()
        self._half = torch.is_autocast_enabled(device.type) or expected.dtype not in _RELATIVE
        with torch.autocast(device.type, enabled=False):
            expected.backward()
        self._loss = expected.detach()
        loss = _loss_of(outputs).detach()
        if not float((loss - self._loss).abs()) <= self._tolerance * max(float(self._loss.abs()), 1e-3):
            raise RuntimeError(
                f"MegaTPStrategy: verify=True: the first batch's loss is {float(loss)!r}, and on one device"
                f" {float(self._loss)!r}. If the plan is your own, take entries out of it until the losses agree; if it"
                " can't be the plan, this is a bug of the strategy."
            )

    def compare_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Compare the gradients of the first batch with those of the unsplit model.

        Args:
            gradients: of the whole model, by name.

        Raises:
            RuntimeError: a gradient differs; names the one that differs most.
        """
        if self.module is None or self._loss is None:
            return
        found = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        expected = {name: grad.to(torch.promote_types(grad.dtype, torch.float64)) for name, grad in found.items()}
        norms = {name: float(grad.norm()) for name, grad in expected.items()}
        least = 1e-3 * max(norms.values(), default=0.0)  # what is zero but for rounding says nothing
        errors = {
            name: float((gradients[name].to(grad) - grad).norm()) / max(norms[name], least)
            if name in gradients
            else float("inf")
            for name, grad in expected.items()
        }
        if requested() == "verify":
            print_errors(errors, 10 * self._tolerance)
        worst = max(errors, key=errors.__getitem__)
        if not errors[worst] <= 10 * self._tolerance:
            raise RuntimeError(
                "MegaTPStrategy: verify=True: the first batch's loss is that of one device, but the gradient of"
                f" `{worst}` is not (relative difference {errors[worst]:.2g}). If the plan is your own, take the"
                " entries around it out; if it can't be the plan, this is a bug of the strategy."
            )

    @property
    def unproven(self) -> int:
        """The exit code of `megatp verify`: 1 if this rank should have compared something and could not."""
        return int(self.module is not None and self._loss is None)

    @property
    def _tolerance(self) -> float:
        assert self._loss is not None
        if requested() == "verify":
            return _PROOF
        return _HALF if self._half else _RELATIVE[self._loss.dtype]


def _copy(module: Any) -> Any:
    """A copy that has the same trainer, and logs nothing."""
    copied = copy.deepcopy(module, dict(uncopied(module)))
    copied.trainer = module.trainer  # Lightning leaves it out of copies
    copied.log = copied.log_dict = lambda *args, **kwargs: None
    return copied


def _couples_samples(module: nn.Module) -> bool:
    return any(isinstance(child, BATCH_NORMS) for child in module.modules())


def _loss_of(result: Any) -> Tensor:
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss
