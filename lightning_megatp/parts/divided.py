"""Divided parameters (zero > 0) in hooks of the user: what would be lost there, or be of this rank's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.parts.mode import HookMode
from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.shim.torch import DisableTorchFunction, storage_id
from lightning_megatp.tensor.functions import is_in_place, operation_name, operation_names, sets_data

_VIEWS = operation_names(
    """
    __getitem__ select narrow split split_with_sizes chunk tensor_split unbind view flatten unflatten t transpose T mT
    permute movedim diagonal squeeze unsqueeze
    """
)
"""Operations that give views of a tensor, and of a DTensor copies, where ranks have to send rows for that."""
_NUMBERS = operation_names("item __float__ __int__ __bool__ tolist __index__ __complex__")
_ARRAYS = operation_names("numpy __array__")


class DataWatch(HookMode):
    """Active around hooks of the user, which find rows as DTensors: of these, `p.data = values` sets the shell alone,
    without an error (torch 2.11 to 2.13). Here the rows take the values. What is written to some of the rows
    (`p[:5].zero_()`) is written to a copy, and raises.

    Args:
        parameters: those that are divided.
    """

    def __init__(self, parameters: Iterable[DividedParameter]) -> None:
        super().__init__()
        self._parameters = {id(p.sharded): p for p in parameters}
        self._copies: Any = WeakIdKeyDictionary()
        """What would be a view of a plain tensor."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, of = operation_name(func), args[0] if args else None
        if isinstance(of, Tensor) and is_in_place(name) and of in self._copies:
            raise RuntimeError(
                f"MegaTPStrategy: a hook changes a part of a tensor (`{name}` on what `{self._copies[of]}` gave) of"
                " which each data-parallel rank holds some rows (zero > 0): here that is a copy, and the change would"
                " be lost. Change whole tensors (`p.grad.mul_(factor)`), or use zero=0."
            )
        parameter = self._parameters.get(id(of)) if sets_data(func) else None
        if parameter is None and sets_data(func) and isinstance(of, DTensor):  # a gradient
            with DisableTorchFunction(), torch.no_grad():
                of.copy_(args[1])
            return None
        if name in _ARRAYS and isinstance(of, DTensor):
            raise RuntimeError(
                f"MegaTPStrategy: a hook takes an array (`{name}`; a histogram does) of parameters or gradients of"
                " which each data-parallel rank holds some rows (zero > 0). Take `x.full_tensor()` first, on all ranks."
            )
        if name in _NUMBERS and isinstance(of, DTensor) and any(x.is_partial() for x in of.placements):
            warn_once_per_run(
                f"a hook takes a number (`{name}`) of what it has made of parameters or gradients of which each"
                " data-parallel rank holds some rows (zero > 0): it is of this rank's rows. Take `x.full_tensor()`"
                " first, on all ranks, or norms, as `grad_norm(self)` does."
            )
        if parameter is None:
            result = func(*args, **(kwargs or {}))
            if isinstance(of, DTensor) and name in _VIEWS:
                self._note_copies(name, of, args[1:], result)
            return result
        with DisableTorchFunction():
            parameter.put(args[1])
        return None

    def _note_copies(self, name: str, of: DTensor, rest: Sequence[Any], result: Any) -> None:
        if name == "__getitem__" and any(isinstance(x, (Tensor, list)) for x in (*rest, *_each(rest[:1]))):
            return  # a copy of plain tensors, too
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, DTensor) and storage_id(x.to_local()) != storage_id(of.to_local()):
                self._copies[x] = name


@contextlib.contextmanager
def explaining_written_rows(hook: str) -> Iterator[None]:
    """Around a hook that may write divided parameters to a file by itself.

    Raises:
        RuntimeError: it does, as safetensors do, which asks DTensors for their memory, or by pickling a module.
    """
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        if not any(sign in str(error) for sign in ("python storage", "pickle local object 'FSDPParam")):
            raise
        raise RuntimeError(_rows_written(hook)) from error


def _rows_written(hook: str) -> str:
    return (
        f"MegaTPStrategy: `{hook}` writes parameters to a file, of which each data-parallel rank holds some rows (zero"
        " > 0). `trainer.save_checkpoint(path, weights_only=True)`, on all ranks, writes the whole model (`megatp"
        " convert` makes safetensors of it); or take `.full_tensor()` of each, on all ranks."
    )


def _each(given: Sequence[Any]) -> Sequence[Any]:
    """The entries of an index that is a tuple."""
    return given[0] if given and isinstance(given[0], tuple) else ()
