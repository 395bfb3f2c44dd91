"""What operations of a dry run make of tensors without data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in, with_tensors
from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.values import Values
from lightning_megatp.pipeline.slicing.operations import HOST_READS, NeedsValues
from lightning_megatp.shim.autograd import handle_transforms
from lightning_megatp.shim.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
    missed_data,
)
from lightning_megatp.shim.modules import modules_convert_without_data
from lightning_megatp.shim.torch import DisableTorchFunction, tensor_version


class Fakes:
    """Computes without data, where there is none.

    Args:
        values: the tensors of the step.
        mode: makes those without data.
    """

    def __init__(self, values: Values, mode: FakeTensorMode) -> None:
        self._values, self.mode = values, mode
        self._filled = ByTensor[Tensor]()
        """Tensors that a unit made, and put values without data into; with what stands for them."""
        self._is_inside = False
        """Whether a unit is looked into."""

    def evaluate(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, on fakes if any of the tensors is one, or belongs to a unit.

        Raises:
            NeedsValues: the operation asks for the data of a fake.
        """
        if not any(self.is_without_data(x) for x in tensors_in(args, kwargs)):
            out = function(*args, **kwargs)
            if name == "requires_grad_" and (known := self._values.get(args[0])) is not None:
                known.follow()
            return out
        if name in HOST_READS:
            raise NeedsValues("it reads a value on the host")
        real = [x for x in tensors_in(args, kwargs) if not self.is_without_data(x)]
        before = [tensor_version(self._values.fake(x)) for x in real]
        args, kwargs = with_tensors(self._values.fake, (args, kwargs))
        out = self._compute(name, function, args, kwargs)
        for x, version in zip(real, before, strict=True):
            if tensor_version(self._values.fake(x)) != version and self._values.get(x) is None:
                self._filled[x] = self._values.fake(x)
        return out

    def _compute(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with self.mode:
                return function(*args, **kwargs)
        except DataDependentOutputException as error:
            raise NeedsValues(f"`{name}` reads a value on the host") from error
        except DynamicOutputShapeException as error:
            raise NeedsValues(f"the shape of what `{name}` returns depends on values") from error
        except UnsupportedOperatorException as error:
            raise NeedsValues(f"`{name}` can't tell the shape of its result without computing it") from error
        except RuntimeError as error:
            if missed_data(error):
                raise NeedsValues(f"`{name}` reads values on the host") from error
            raise

    def is_without_data(self, x: Tensor) -> bool:
        """Whether nobody knows its values in a dry run."""
        known = self._values.get(x)
        known_to_be = known is not None and known.stage is not None
        if is_fake(x) or self._values.is_of_unit(x) or known_to_be or x in self._filled:
            return True
        return self._is_inside and x.requires_grad  # or what comes of it would have no graph, where it meets weights

    def needs_values(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether an operation that was done on values can't be done without."""
        try:
            with self.mode, torch.no_grad():
                args, kwargs = with_tensors(_empty, (args, kwargs))
            with torch.no_grad():
                self._compute(name, function, args, kwargs)
        except NeedsValues:
            return True
        except Exception:
            return False  # these share no memory, and may have other shapes by now: it was done on the real ones
        return False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around a call that is looked into: what torch functions don't show."""

        def on_fakes(name: str, function: Callable[..., Any], given: Any) -> tuple[Callable[..., Any], Any]:
            with DisableTorchFunction():
                return function, with_tensors(self._values.fake, given)

        before, self._is_inside = self._is_inside, True
        try:
            with modules_convert_without_data(), handle_transforms(on_fakes):
                yield
        finally:
            self._is_inside = before


def _empty(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
