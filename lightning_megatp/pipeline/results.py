"""What the steps on the microbatches of a batch come to, on the last stage: their losses, logs and what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.batches.split import batch_size
from lightning_megatp.messages import with_article
from lightning_megatp.pipeline.loss.averages import Averages, scalar
from lightning_megatp.pipeline.loss.weighing import BatchLoss
from lightning_megatp.pipeline.merge import Merge
from lightning_megatp.pipeline.told.logs import Call

Step = Callable[[Any], Any]


@dataclass
class Results:
    """What the steps on a batch returned and logged, and its loss.

    Args:
        batches: its microbatches; or the batch itself, of which the steps' tail is made.
        device: of weights that are plain numbers.
        loss_weight: what the user says a microbatch weighs, if he does.
        weighs_first: all weights are needed before the first backward.
        loss_units: the units inside of which steps were seen to average losses, in any batch; kept up.
        warns: says what in the loss is not that of one device; None where nobody looks.
    """

    batches: Sequence[Any]
    device: torch.device
    loss_weight: Callable[[Any], Tensor | float] | None
    weighs_first: bool
    loss_units: set[str]
    warns: Callable[[str], None] | None
    returned: dict[int, Any] = field(default_factory=dict)
    """By microbatch, which the last stage runs in order."""
    logged: list[list[Call]] = field(default_factory=list)
    """What each microbatch logs."""
    of_batch: Sequence[Call] = ()
    """What is logged of the batch, after it."""
    with_losses: set[str] | None = None
    """The units inside of which the first microbatch that averaged losses did; None until one does. In later ones of
    the batch the others are not looked at: a loss in another unit that only some microbatches compute is missed."""
    _counts: dict[int, Tensor | float] = field(default_factory=dict)
    """By the identity of a number in the results, see `Merge`."""

    @functools.cached_property
    def rows(self) -> list[int]:
        """The samples of each microbatch that a step is made of to its end."""
        return [batch_size(batch) or 1 for batch in self.batches]

    @functools.cached_property
    def loss(self) -> BatchLoss:
        """That of the batch."""
        if self.loss_weight is None or not self.weighs_first:
            return BatchLoss(self.rows, self.device)
        told = [scalar(self.loss_weight(batch), self.device) for batch in self.batches]
        return BatchLoss(self.rows, self.device, torch.stack(told).sum())

    def add(self, microbatch: int, result: Any, counting: Averages, calls: Sequence[Call]) -> None:
        """After the end of a step.

        Args:
            result: what it returned.
            counting: has seen what it averages.
            calls: what it logs.
        """
        self.returned[microbatch] = result
        loss = loss_in(result)
        averages = counting if len(self.rows) > 1 else None
        for number in _numbers(result) if averages is not None else ():
            if (count := counting.count_of(number)) is not None:
                self._counts[id(number)] = count
        own_loss = loss if isinstance(loss, Tensor) else None
        rows = self.rows[microbatch], sum(self.rows)
        self.logged.append([call.beside(own_loss, averages, *rows) for call in calls])
        own = None if self.loss_weight is None else self.loss_weight(self.batches[microbatch])
        self.loss.add(microbatch, loss, counting, own)
        units = counting.units_of(loss)
        self.with_losses = self.with_losses or units or None
        self.loss_units |= units

    def conclude(self) -> tuple[Tensor, Tensor]:
        """After all microbatches, if they have losses.

        Returns:
            The loss of the batch; and the weights of its microbatches, (m,) float64.
        """
        weights = self.loss.weights()
        if self.warns is not None and len(self.rows) > 1:
            self.loss.warn(weights, self.warns)
        return self.loss.value(weights), weights

    @property
    def are_mappings(self) -> bool:
        """Whether the step returns a mapping, here."""
        return bool(self.returned) and isinstance(self.returned[0], Mapping)

    @property
    def hold_loss(self) -> bool:
        """Whether the step returns a loss, which it need not."""
        loss = loss_in(self.returned[0])
        return isinstance(loss, Tensor) and loss.numel() == 1

    def merged(self, step: str) -> Any:
        """What the steps returned, put together.

        Args:
            step: the name of a step that somebody takes this of; "" if nobody does.
        """
        order = [self.returned[i] for i in range(len(self.rows))]
        if order[0] is None:
            return None
        counts = dict(self._counts)
        detached = [_detached(result, counts) for result in order]
        merge = Merge(self.loss.weights().tolist(), self.rows, counts)
        merged = merge.of(detached)
        if step and len(self.rows) > 1:
            merge.warn(step)
        return merged


def loss_in(result: Any) -> Any:
    """What a step returns for a loss."""
    return result.get("loss") if isinstance(result, Mapping) else result


def loss_of(result: Any) -> Tensor:
    """The loss that a step of training returns.

    Raises:
        RuntimeError: it returns none, or not one number.
    """
    loss = loss_in(result)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, Tensor):
        found = f"a loss of shape {tuple(loss.shape)}: return one number, such as `loss.mean()`"
    elif isinstance(result, Mapping) and "loss" not in result:
        found = f"a dict without `loss` (it has {', '.join(map(str, result)) or 'nothing'})"
    else:
        found = f"{'None' if loss is None else with_article(type(loss).__name__)} instead of a loss"
    skipped = " To skip a batch, leave it out of the data." if result is None else ""
    raise RuntimeError(
        f"MegaTPStrategy: training_step returned {found}. Under pipeline parallelism every step needs one: all stages"
        f" take part in each batch.{skipped}"
    )


def returning_a_loss(step: Step) -> Step:
    """For the dry run, which all stages make: a step without a loss is refused on all of them."""

    def checked(batch: Any) -> Any:
        result = step(batch)
        loss_of(result)
        return result

    return checked


def _detached(result: Any, counts: dict[int, Tensor | float]) -> Any:
    """Without a graph.

    Args:
        counts: by the identity of tensors; what is known of one is known of it without its graph.
    """
    if isinstance(result, Tensor):
        x = result.detach()
        if id(result) in counts:
            counts[id(x)] = counts[id(result)]
        return x
    if isinstance(result, Mapping):
        return {key: _detached(value, counts) for key, value in result.items()}
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_detached(value, counts) for value in result)
    return result


def _numbers(result: Any) -> Iterator[Tensor | float]:
    """The floating numbers in what a step returned."""
    if isinstance(result, Mapping):
        for value in result.values():
            yield from _numbers(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _numbers(value)
    elif type(result) is float or (isinstance(result, Tensor) and not result.dim()):
        yield result
