"""Recorder: while it is active, tensors that are created have no data, and what is done to them is recorded.

To the code that creates a model they are tensors on the CPU: shapes, strides, dtypes and aliases are those of real ones
(they are fake tensors, as torch.compile plans with), random operations draw from the generators as real ones, and
where Python asks for a value (`x.item()`, `if mask.any()`) it is computed. So the same code takes the same path and
leaves the same random state as on one device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.building.recording import Given, Operation, Recording, Source, View
from lightning_megatp.shim.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    forget_fakes,
    know_grouped_products,
)
from lightning_megatp.shim.torch import (
    TorchDispatchMode,
    is_random,
    storage_id,
    tree_leaves,
    tree_map,
    without_dispatch_modes,
    written_arguments,
)

_FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        "normal",
        "uniform",
        "random",
        "bernoulli",
        "exponential",
        "geometric",
        "cauchy",
        "log_normal",
        "fill",
        "zero",
        "copy",
    )
)
"""In place, and nothing of what was there before matters."""


class Recorder(TorchDispatchMode):
    """Records what happens to CPU tensors that are created inside of it. May be entered several times.

    Tensors with values take part as they are: what only concerns them is done, and what is read of them is remembered.

    Raises:
        RuntimeError: at an operation that can't be done again later. Nothing is lost then: the code can be run anew,
            without a recorder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self._fake_mode = _FakeMode(allow_non_fake_inputs=True)
        know_grouped_products(self._fake_mode)
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._given: dict[int, list[Given]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # `x.device`: no operation on values
            with self._fake_mode:
                return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        recorded = [x for x in tensors if self.records(x)]
        if not recorded and not _creates_on_cpu(func, tensors, kwargs):
            self._keep_given(func, args, kwargs)
            return func(*args, **kwargs)
        written = written_arguments(func, args, kwargs)
        if any(not self.records(x) for x in written) or _leaves(func, kwargs):
            self._keep_given(func, args, kwargs)
            return func(*self._real(args), **self._real(kwargs))
        return self._record(func, args, kwargs, written)

    def records(self, x: object) -> bool:
        """Whether this is a tensor of the recording."""
        return isinstance(x, FakeTensor) and x.fake_mode is self._fake_mode

    def tensors(self) -> list[Tensor]:
        """All tensors of the recording that somebody still holds."""
        gc.collect()
        return [x for x in gc.get_objects() if type(x) is FakeTensor and x.fake_mode is self._fake_mode]

    def view(self, x: Tensor) -> View:
        """Where a tensor of the recording lies."""
        number, _ = self._storages.get(storage_id(x), (None, None))
        if number is None:
            raise RuntimeError(
                f"a tensor of shape {tuple(x.shape)} was made where it can't be seen (in another thread, or by a mode"
                " of its own)"
            )
        return View(number, x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()))

    def add(self, source: Source) -> Tensor:
        """A tensor of the recording that lies elsewhere."""
        with without_dispatch_modes(), self._fake_mode:
            made = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        view = self._new(made)
        storages = frozenset({view.storage})
        self.recording.add(Operation(source, writes=storages, whole=storages, made={0: view}))
        return made

    def value(self, x: Tensor) -> Tensor:
        """What a tensor of the recording holds now."""
        return self.values([x])[0]

    def values(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What tensors of the recording hold now; those that share memory still do."""
        with without_dispatch_modes():
            return self.recording.values(map(self.view, tensors))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]) -> Any:
        """Do an operation on tensors without data; on values, where what comes out depends on these."""
        entry_args, entry_kwargs = tree_map(self._entry, (args, kwargs))
        state = self._draw(func, args, kwargs, written) if is_random(func) else None
        results = self._without_data(func, args, kwargs)
        outputs = results if isinstance(results, (tuple, list)) else [results]
        if results is None or any(isinstance(x, Tensor) and x.layout != torch.strided for x in outputs):
            return self._with_data(func, args, kwargs, written, state)
        made = {i: self._new(x) for i, x in enumerate(outputs) if isinstance(x, Tensor) and not self._has(x)}
        reads, writes, whole = self._effects(func, args, kwargs, written)
        new = frozenset(view.storage for view in made.values())
        if new or writes:
            dtype = torch.get_default_dtype()
            effects = reads, writes | new, whole | new
            self.recording.add(Operation(func, entry_args, entry_kwargs, *effects, made, state, dtype))
        return results

    def _without_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of an operation; None if it takes values to know their shapes, or what they are."""
        if not any(str(x.type).startswith(("Tensor", "List[Tensor]")) for x in func._schema.returns):
            return None
        try:
            with self._fake_mode:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            return None
        finally:
            forget_fakes(self._fake_mode)

    def _with_data(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor], state: Tensor | None
    ) -> Any:
        """Do an operation on values. What it makes has values, too."""
        if written:
            raise RuntimeError(f"{func} changes a tensor in place, in a way that depends on values")
        if state is not None:  # it has drawn already, for who would look at the generator
            (kwargs.get("generator") or torch.default_generator).set_state(state)
        return func(*self._real(args), **self._real(kwargs))

    def _effects(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]
    ) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """The storages that an operation reads, changes, and writes all of."""
        targets = {id(x) for x in written}
        views = [(id(x) in targets, self.view(x)) for x in tree_leaves((args, kwargs)) if self.records(x)]
        reads = frozenset(view.storage for is_target, view in views if not is_target)
        writes = frozenset(view.storage for is_target, view in views if is_target)
        whole = frozenset(
            view.storage
            for is_target, view in views
            if is_target and _fills(func) and view.covers(self.recording.sizes[view.storage])
        )
        return reads, writes, whole - reads

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: Sequence[Tensor]) -> Tensor:
        """Let a generator advance as if the operation were done. Returns its state before.

        Memory: one tensor; for operations whose inputs matter these, too.
        """
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        if _fills(func) and len(written) == 1:  # what is drawn does not depend on what is there
            scratch = self._scratch_like(written[0])
            rest = self._real((args[1:], kwargs))
            func(scratch, *rest[0], **rest[1])
        else:
            func(*self._real(args), **self._real(kwargs))
        return state

    def _scratch_like(self, x: Tensor) -> Tensor:
        """Memory to draw into."""
        length = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
        spare = self.recording.spare(length * x.element_size())
        return View(0, x.dtype, tuple(x.shape), x.stride(), 0).of(spare)

    def _entry(self, x: Any) -> Any:
        """What stands for an argument in the recording."""
        if self.records(x):
            return self.view(x)
        if not isinstance(x, Tensor):
            return x
        given = Given(x)
        self._given.setdefault(storage_id(x), []).append(given)
        return given

    def _keep_given(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to change tensors with values that recorded ones have read."""
        for x in written_arguments(func, args, kwargs):
            for given in () if self.records(x) else self._given.pop(storage_id(x), ()):
                given.keep()

    def _real(self, tree: Any) -> Any:
        """A tree with values in the place of recorded tensors."""
        return tree_map(lambda x: self.value(x) if self.records(x) else x, tree)

    def _has(self, x: Tensor) -> bool:
        """Whether a tensor lies in a storage that is known.

        Raises:
            RuntimeError: the storage was resized, which is not followed.
        """
        number, _ = self._storages.get(storage_id(x), (None, None))
        if number is not None and x.untyped_storage().nbytes() != self.recording.sizes[number]:
            raise RuntimeError("it resizes a tensor in place")
        return number is not None

    def _new(self, x: Tensor) -> View:
        number = len(self._storages)
        self._storages[storage_id(x)] = number, x.untyped_storage()  # held: its id stays its own
        self.recording.sizes[number] = x.untyped_storage().nbytes()
        return self.view(x)


class _FakeMode(FakeTensorMode):
    def __deepcopy__(self, memo: dict[int, Any]) -> _FakeMode:
        return self  # a copy of a tensor belongs to the same recording


def _creates_on_cpu(func: Any, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation makes a dense tensor there, of nothing but numbers, or of tensors on meta."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    device = device or ("meta" if tensors else "cpu")
    returns_tensors = any(str(x.type) == "Tensor" for x in func._schema.returns)
    of_nothing = all(x.is_meta for x in tensors) and layout in (None, torch.strided)
    return returns_tensors and of_nothing and torch.device(device).type == "cpu"


def _leaves(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation takes tensors to another device or layout."""
    device, layout = kwargs.get("device"), kwargs.get("layout")
    elsewhere = device is not None and torch.device(device).type != "cpu"
    return elsewhere or layout not in (None, torch.strided)


def _fills(func: Any) -> bool:
    return func._schema.name in _FILLS
