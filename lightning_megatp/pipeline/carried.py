"""What a step keeps on the module for the next one: states of its samples (hidden states, memories), counters.

On one device that is of the next batch. Here it is of the next microbatch, of other samples, and shapes agree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_megatp.batches.split import batch_size
from lightning_megatp.containers import tensors_in
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.own_values import NORMS
from lightning_megatp.pipeline.slicing.locator import Locator
from lightning_megatp.pipeline.told.held_tensors import HeldTensors
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.snapshots.leftovers import Path, PlainValues, is_own_object, name_of
from lightning_megatp.snapshots.snapshot import PLAIN, Snapshot
from lightning_megatp.tensor.functions import operation_name


class CarriedState(TorchFunctionMode):
    """Warns of operations that take what another microbatch has left on the module, if it has a row per sample and is
    replaced each time: a table that is made once, or a codebook, is nobody's state.

    Looks at every operation, inside of units too, and at the module before and after: it is for a first batch.

    Args:
        module: whose step it is.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._locator = module, Locator(module)
        self._left: dict[int, tuple[Tensor, int]] = {}
        """id -> what is on the module, and of which microbatch."""
        self._taken: dict[int, str] = {}
        self._microbatch = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(args, kwargs or {}) if tensors_in(out) else ():
            _, microbatch = self._left.get(id(x), (None, self._microbatch))
            if microbatch != self._microbatch:
                self._taken.setdefault(id(x), f"`{operation_name(func)}` ({self._locator.here()})")
        return out

    @contextlib.contextmanager
    def watching(self, microbatch: int, rows: int) -> Iterator[None]:
        """Around a stage's run of the step on a microbatch of so many rows."""
        before, metrics = Snapshot(self._module), _metric_states(self._module)
        self._microbatch, self._taken = microbatch, {}
        with self:
            yield
        after, metrics = Snapshot(self._module).tensors, metrics | _metric_states(self._module)
        for by in [by for taken, by in self._taken.items() if taken not in after][:1]:
            warnings.warn(
                f"MegaTPStrategy: {by} takes a tensor that the step keeps on the module for the next one, and which has"
                " a row for each sample. With pp > 1 that next one is of the same batch, and other samples: losses are"
                " not those of one device. Use microbatches=1, or let the batch bring what belongs to its samples.",
                stacklevel=2,
            )
        self._left |= {
            key: (x, microbatch)
            for key, x in after.items()
            if key not in before.tensors and key not in metrics and not is_fake(x)
            if x.dim() > 1 and rows in x.shape[:2]
        }  # fmt: skip


def _metric_states(module: nn.Module) -> set[int]:
    """id() of what metrics count in: they live on the last stage, and meet all samples."""
    states = (vars(child).values() for child in module.modules() if isinstance(child, Metric))
    return {id(x) for values in states for x in tensors_in(*values)}


def counters(now: PlainValues, before: PlainValues, microbatches: Sequence[Any]) -> list[str]:
    """Where a step has counted a batch's microbatches, and not their rows.

    Args:
        now: the Python values of modules after a batch.
        before: those before it.
        microbatches: several.
    """
    n = len(microbatches)
    return [] if sum(batch_size(x) or 0 for x in microbatches) == n else now.risen_by(n, before)


class Twice:
    """What has risen by the number of microbatches in the first two batches: a longest sequence may do so in one."""

    def __init__(self) -> None:
        self._first: set[str] | None = None
        self.wanted = True
        """Whether there was no second batch yet."""

    def of(self, names: Sequence[str]) -> list[str]:
        """What the second batch has of such names that the first had, too; nothing for others."""
        first, self._first = self._first, set(names)
        self.wanted = first is None
        return [name for name in names if name in (first or ())]


def warn_of_counters(names: Sequence[str], n: int) -> None:
    """Warn of `counters`, in so many microbatches."""
    for name in names[:1]:
        warn_once_per_run(
            f"the step counts its calls in `{name}`. With pp > 1 it is called for each microbatch, here {n} times a"
            f" batch. What goes by such a number (a warm-up, a schedule of a loss's weight) comes {n} times as early:"
            " take `self.global_step` or `batch_idx`, or count in `on_train_batch_end`."
        )


class OwnNumbers:
    """Real numbers that a step sets on modules, another one in each microbatch of a batch (a sum of losses, the last
    one, a temperature that it multiplies), and buffers that it changes in each (a moving average, a queue).

    Args:
        opened: the modules whose Python values are looked at, by name.
        outside: those whose buffers are.
    """

    def __init__(self, opened: Mapping[str, nn.Module], outside: Mapping[str, nn.Module]) -> None:
        self._opened, self._outside = opened, outside
        self._before: tuple[PlainValues, HeldTensors] | None = None
        self._names: dict[str, None] = {}
        self._buffers: dict[str, None] = {}

    def note(self) -> None:
        """A step has ended."""
        now = PlainValues(self._opened), HeldTensors(self._outside)
        if self._before is not None:
            self._names.update(dict.fromkeys(now[0].reals_set(self._before[0])))
            changed = [path for path, x in now[1].changes(self._before[1]).items() if x.value.is_floating_point()]
            self._buffers.update(dict.fromkeys(name_of(path) for path in changed if self._is_buffer(path)))
        self._before = now

    def _is_buffer(self, path: Path) -> bool:
        """Whether a tensor is a module's buffer, and no statistic of a norm, of which another warning speaks."""
        module = self._outside[path[0]]
        return len(path) == 2 and path[1] in module._buffers and not isinstance(module, NORMS)

    def warn(self) -> None:
        """After the batch."""
        for name in list(self._names)[:1]:
            warn_once_per_run(
                f"the step sets `{name}` to another number in each microbatch. With pp > 1 it runs once for each: what"
                " it adds up or multiplies counts microbatches, and what it keeps of a loss is the last one's. Do that"
                " in `on_train_batch_end`, whose `outputs` are the batch's, or log the number."
            )
        for name in list(self._buffers)[:1]:
            warn_once_per_run(
                f"the step changes the buffer `{name}` in each microbatch. With pp > 1 it runs once for each: a moving"
                " average moves several times a batch, and a loss that goes by it is that of one device which takes the"
                " microbatches one by one. `MegaTPStrategy(whole_loss=True)` does once for a batch what comes after the"
                " last block."
            )


def lists_on(modules: Mapping[str, nn.Module]) -> dict[str, list[Any]]:
    """Lists by name: attributes of modules, and of the user's own objects there."""
    found: dict[str, list[Any]] = {}
    for name, module in modules.items():
        for key, x in vars(module).items():
            if type(x) is list:
                found[name_of((name, key))] = x
            elif type(x) not in _NO_OBJECTS and is_own_object(x):
                found |= {name_of((name, key, inner)): y for inner, y in vars(x).items() if type(y) is list}
    return found


_NO_OBJECTS = frozenset([*PLAIN, dict, set, OrderedDict])
"""Most of what a module's attributes are."""


def warn_of_lists(lists: Mapping[str, list[Any]], before: Mapping[str, int], microbatches: Sequence[Any]) -> None:
    """Warn of a list to which a step has appended a number for each microbatch, and not for each row.

    Args:
        before: the lengths before the batch.
        microbatches: several.
    """
    n = len(microbatches)
    if sum(batch_size(x) or 0 for x in microbatches) == n:
        return
    for name, x in lists.items():
        new = x[before.get(name, 0) :]
        if new and len(new) % n == 0 and all(map(_is_number, new)):
            warn_once_per_run(
                f"the step appends a number to the list `{name}`. With pp > 1 it does so for each microbatch, here"
                f" {n} times a batch, and a mean of the list weighs all of them alike, also those with fewer samples or"
                " targets. `self.log` and torchmetrics' MeanMetric have the batch's own number."
            )


def _is_number(x: object) -> bool:
    return isinstance(x, float) or (isinstance(x, Tensor) and x.dim() == 0)
