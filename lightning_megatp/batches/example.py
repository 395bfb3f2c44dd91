"""One batch of a Trainer's own data, and one step on it: what a plan is probed with before training."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_megatp.auto_plan.blocks import without_logging
from lightning_megatp.batches.split import batch_size, is_ragged, split_batch
from lightning_megatp.containers import tensors_in
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.random_states import random_state_kept
from lightning_megatp.shim.compiler import uncompiled
from lightning_megatp.shim.fakes import real_again
from lightning_megatp.shim.gradients import clipping_by
from lightning_megatp.shim.lightning import batch_hook, first_loaders, idle_optimizers
from lightning_megatp.shim.torch import tensor_version, tree_leaves, tree_map
from lightning_megatp.snapshots.snapshot import FirstValues, Snapshot
from lightning_megatp.steps import StepKind

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Example:
    """The first rows of a Trainer's first batch, and its step; nothing is loaded before it is asked for.

    Args:
        trainer: about to run; its data is set up.
        precision: its precision plugin.
        rows: how many, at most; None for all of the batch.
    """

    def __init__(self, trainer: Any, precision: Any, rows: int | None = 2) -> None:
        self.trainer, self.precision, self.rows = trainer, precision, rows
        self.module = trainer.lightning_module
        self._step = getattr(self.module, StepKind.first_of(trainer.state.fn).method)
        self.problem = "no batch could be looked at"
        self._uncut: Any = None
        """The batch that `batch` is the first rows of, until that is looked at."""
        self.weights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """Where a step runs, so that it finds parameters that have no values yet."""

    @property
    def takes_iterator(self) -> bool:
        """Whether the step fetches batches itself."""
        return "dataloader_iter" in inspect.signature(self._step).parameters

    @functools.cached_property
    def batch(self) -> Any:
        """On the CPU, as the step gets it. None if there is none to look at: data that can be iterated once only, that
        is empty, or that could not be loaded here (`problem` says why)."""
        if self.takes_iterator:
            return None
        loaders = first_loaders(self.trainer)  # as the loop does it a moment later
        try:
            with self._left_alone(loaders):
                return self._load(loaders)
        except Exception as error:  # the data may need what exists during training only
            self.problem = f"loading a batch to look at raised {type(error).__name__}: {error}"
            return None

    def _load(self, loaders: Any) -> Any:
        batch = _first_batch(loaders, self.rows)
        if batch is None:
            return None
        of_few = isinstance(loaders, DataLoader) and _collates(loaders)  # samples, however they are put together
        rows = batch_size(batch) or 0
        if self.rows is not None and not of_few and rows > self.rows and not is_ragged(batch):
            self._uncut = _copy_of(batch)  # hooks may change the part in place
            batch = split_batch(batch, -(-rows // self.rows))[0]
        return self._as_the_step_gets(batch)

    def _as_the_step_gets(self, batch: Any) -> Any:
        return self.precision.convert_input(self._by_hooks(batch))

    def of_samples(self, *counts: int) -> dict[int, Any]:
        """What the loader makes of so many samples, for each count; nothing if there are fewer, or if it takes none."""
        loader = None if self.takes_iterator else first_loaders(self.trainer)
        if not isinstance(loader, DataLoader) or not _collates(loader):
            return {}
        try:
            with self._left_alone(loader):
                samples = _samples(loader, max(counts))
                if samples is None or len(samples) < max(counts):
                    return {}
                made = {n: loader.collate_fn(copy.deepcopy(samples[:n])) for n in counts}  # some change their samples
                return {n: self._by_hooks(batch) for n, batch in made.items()}
        except Exception:
            return {}  # what keeps batches from being loaded is told by who needs one

    @contextlib.contextmanager
    def _left_alone(self, loaders: Any) -> Iterator[None]:
        """While batches are made: data sets, collators and the datamodule may count, and draw from generators of their
        own, as the module may; training shall find them as they were."""
        before = Snapshot(self.trainer.datamodule, *tree_leaves(loaders))
        try:
            with random_state_kept(), untouched(self.module), torch.no_grad():
                yield
        finally:
            before.restore()

    def _by_hooks(self, batch: Any) -> Any:
        for hook in _HOOKS if not any(x.is_meta for x in tensors_in(batch)) else ():
            device = (torch.device("cpu"),) if hook == "transfer_batch_to_device" else ()
            batch = batch_hook(self.trainer, hook)(batch, *device, 0)
        if any(x.device.type not in ("cpu", "meta") for x in tensors_in(batch)):
            raise ValueError("the batch's hooks move it to a device of their own choice")
        return batch

    def step(self, batch: Any) -> Any:
        """The user's step on a copy of such a batch, in its contexts. It leaves nothing: no state, log, change of the
        batch or random number."""
        with contextlib.ExitStack() as stack:
            for context in (random_state_kept(), untouched(self.module), without_logging(self.module), self.weights()):
                stack.enter_context(context)
            return self.bare_step(_copy_of(batch))

    def bare_step(self, batch: Any) -> Any:
        """The user's step in its contexts, for who puts back by itself what a step leaves."""
        fits = self.trainer.state.fn == "fit"
        with contextlib.ExitStack() as stack:
            stack.enter_context(idle_optimizers(self.trainer) if fits else contextlib.nullcontext())
            if fits:
                stack.enter_context(clipping_by(lambda call: None if call.limit is None else torch.ones(())))
            for context in (self.trainer.strategy.counting_copies, self.precision.forward_context, uncompiled):
                stack.enter_context(context())
            return self._step(batch, *indices(self._step))

    def calls(self) -> list[Callable[[], Any]]:
        """The step on the batch; and, if that has a padding mask which hides nothing, on the same rows with some
        hidden, since models take another path then."""
        if self.batch is None:
            return []
        return [functools.partial(self.step, x) for x in (self.batch, *_padded(self.batch))]

    def uncut_calls(self) -> list[Callable[[], Any]]:
        """`calls` with the whole batch, which is `batch` from now on, where that was the first rows of one that a data
        set gave: numbers in it may mean all its rows (edges of a graph)."""
        if self.batch is None or self._uncut is None:
            return []
        whole, self._uncut = self._uncut, None
        with self._left_alone(first_loaders(self.trainer)):
            self.batch = self._as_the_step_gets(whole)
        return self.calls()


def _copy_of(batch: Any) -> Any:
    """A copy of a batch, as far as there can be one: few steps change their batch."""
    try:
        return copy.deepcopy(batch)
    except Exception:  # what holds locks, or the graph of a computation
        return batch


def _padded(batch: Any) -> list[Any]:
    """The batch with the end of its first row hidden by a mask that hid nothing."""
    if not isinstance(batch, Mapping):
        return []
    masks = {k: x for k, x in batch.items() if "mask" in str(k) and isinstance(x, Tensor) and x.dim() == 2}
    if not masks or any(x.is_meta or x.shape[1] < 2 or not bool((x == 1).all()) for x in masks.values()):
        return []
    try:
        hidden: Any = copy.copy(batch)
        for key, mask in masks.items():
            hidden[key] = mask.clone()
            hidden[key][0, -(mask.shape[1] // 4 or 1) :] = 0
    except Exception:
        return []  # a mapping of its own kind
    return [hidden]


def indices(step: Callable[..., Any]) -> list[int]:
    """The batch's and the loader's index, as far as a step takes them; their names are the user's."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [x for x in inspect.signature(step).parameters.values() if x.kind in kinds]
    return [0] * max(min(len(named) - 1, 2), 0)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Leave a module as it was found: attributes, and the values of tensors among them, parameters, buffers, gradients,
    what is frozen, generators of its own."""
    snapshot = Snapshot(module)
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    gradients = [(p, p.grad, p.requires_grad, tensor_version(p)) for p in module.parameters()]
    values = FirstValues(snapshot.tensors.values())
    try:
        with values:
            yield
    finally:
        changed = [p for p, _, _, version in gradients if tensor_version(p) != version and not values.copied(p)]
        with real_again(), torch.no_grad():  # whoever looks at a step may let its rest run without data
            snapshot.restore()
            values.restore()
            for buffer, before in buffers:
                buffer.copy_(before)
            for parameter, grad, trained, _ in gradients:
                parameter.grad = grad
                parameter.requires_grad_(trained)
        if changed:
            warn_once_per_run(
                "the step changes parameters in place where Python can't see it, and it was called once more, to find a"
                " plan. Give a plan, or plan=None, for the very numbers of one device."
            )


def _first_batch(loaders: Any, rows: int | None) -> Any:
    """The batch of one loader, or of each in a collection of them; None where one can't be looked at without loss."""
    if isinstance(loaders, DataLoader):
        return _of_loader(loaders, rows)
    if isinstance(loaders, (dict, list, tuple)) and loaders and not _is_batches(loaders):
        batches: Any = tree_map(lambda loader: _first_batch(loader, rows), loaders)
        held = batches.values() if isinstance(batches, dict) else batches
        return None if any(batch is None for batch in held) else batches
    first = _first_of(loaders, 1) if isinstance(loaders, Iterable) else None
    return first[0] if first else None


def _first_of(iterable: Iterable[Any], most: int) -> list[Any] | None:
    """The first entries; None of an iterator, which would lose them."""
    entries = iter(iterable)
    return None if entries is iterable else list(islice(entries, most))


def _is_batches(loaders: Any) -> bool:
    """Whether this list holds batches rather than loaders."""
    return isinstance(loaders, (list, tuple)) and not all(isinstance(x, DataLoader) for x in loaders)


def _of_loader(loader: DataLoader[Any], most_rows: int | None) -> Any:
    """The first rows of a loader's data, collated here."""
    size = loader.batch_size or 1  # a batch sampler may sort by length: one row fits
    rows = _samples(loader, min(most_rows or size, size) if _collates(loader) else 1)
    if not rows:
        return None
    return loader.collate_fn(rows if _collates(loader) else rows[0])


def _collates(loader: DataLoader[Any]) -> bool:
    """Whether it makes batches of samples."""
    return loader.batch_size is not None or loader.batch_sampler is not None


def _samples(loader: DataLoader[Any], most: int) -> list[Any] | None:
    """The first of a loader's data. Neither its workers are started nor its sampler asked: the sampler's random numbers
    are the order of training."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return _first_of(dataset, most)
    indices = list(range(min(most, len(dataset))))
    fetch = getattr(dataset, "__getitems__", None)
    return fetch(indices) if fetch is not None else [dataset[index] for index in indices]
