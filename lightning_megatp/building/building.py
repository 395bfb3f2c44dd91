"""Building: the layers of one `configure_model`, from the code that creates them to what each rank holds of them.

`record` is around the user's code: tensors have no data. `finish` leaves parameters on the meta device, to be planned
with, split and freed at no cost, and gives everything else its values. `materialize` makes the parameters that are
left, one at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.building.recorder import Recorder
from lightning_megatp.building.recording import View
from lightning_megatp.building.safetensors import lazy_safetensors
from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.shim.fakes import attributes_of_fakes
from lightning_megatp.shim.modules import weights_of_recurrent_layers_renewed

SpecOf = Callable[[Tensor], ShardSpec | None]
"""What this rank owns of a parameter; None for all of it."""


class Building:
    """The parameters of a module that have no values yet, and how to make them."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._pending: dict[int, tuple[nn.Parameter, View]] = {}

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Around code that creates layers, or changes them before `finish`."""
        with self._recorder, _NumpyValues(self._recorder), lazy_safetensors(self._recorder):
            yield

    def check(self) -> None:
        """See whether all that was created, and is still held, can be made.

        Raises:
            RuntimeError: something can't be.
        """
        for x in self._recorder.tensors():
            self._recorder.view(x)
            if x.grad_fn is not None:
                raise RuntimeError(
                    f"it leaves a tensor of shape {tuple(x.shape)} that was computed from parameters with a gradient"
                )

    def finish(self, module: nn.Module) -> None:
        """End the recording.

        Parameters of the module go to the meta device. Buffers, and whatever else was created, get their values.

        Memory: the buffers.
        """
        parameters = {id(p): p for p in module.parameters() if self._recorder.records(p)}
        others = [x for x in self._recorder.tensors() if id(x) not in parameters]
        made = list(zip(others, self._recorder.values(others), strict=True))
        made.sort(key=lambda pair: pair[0]._is_view())  # a view holds what it is a view of, until it is replaced
        while made:
            x, value = made.pop()
            _become(x, nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value)
        with weights_of_recurrent_layers_renewed(module):
            for parameter in parameters.values():
                view = self._recorder.view(parameter)
                empty = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="meta")
                _become(parameter, nn.Parameter(empty, parameter.requires_grad))
                self._pending[id(parameter)] = parameter, view

    def __bool__(self) -> bool:
        """Whether parameters without values are left."""
        return bool(self._pending)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._pending

    def materialize(
        self, module: nn.Module, spec_of: SpecOf, device: torch.device, without: Iterable[nn.Module] = ()
    ) -> None:
        """Give the parameters of a module, as far as it has some without values, those of this rank.

        Args:
            module: a part of the whole, such as a block, or the whole.
            spec_of: see `SpecOf`.
            device: where they go.
            without: modules inside of it that are left for later.

        Memory: one whole parameter, and what it is computed from, at a time.
        """
        if not self:
            return
        with weights_of_recurrent_layers_renewed(module):
            later = {id(p) for part in without for p in part.parameters()}
            for parameter in [p for p in module.parameters() if p in self and id(p) not in later]:
                value = self.value(parameter, spec_of(parameter)).to(device)
                _become(parameter, nn.Parameter(value, parameter.requires_grad))
                del self._pending[id(parameter)]

    def value(self, parameter: Tensor, spec: ShardSpec | None = None) -> Tensor:
        """A parameter, or a rank's part of it, on the CPU."""
        _, view = self._pending[id(parameter)]
        recording = self._recorder.recording
        found = recording.values([view])[0].contiguous() if spec is None else recording.part(view, spec)
        return found.to(parameter.dtype)

    @contextlib.contextmanager
    def on_demand(self, module: nn.Module) -> Iterator[None]:
        """Let the code of a step find whole parameters with values, each made when it is first asked for."""
        if not self:
            yield
            return
        made: dict[int, nn.Parameter] = {}

        def find(parameter: Any) -> Any:
            if parameter is None or id(parameter) not in self._pending:
                return parameter
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(self.value(parameter), parameter.requires_grad)
            return made[id(parameter)]

        before = [(child, child._parameters) for child in module.modules()]
        with weights_of_recurrent_layers_renewed(module):
            for child, parameters in before:
                child.__dict__["_parameters"] = _OnDemand(parameters, find)
        try:
            yield
        finally:
            with weights_of_recurrent_layers_renewed(module):
                for child, parameters in before:
                    child.__dict__["_parameters"] = parameters

    def fill(self, copied: nn.Module, module: nn.Module) -> None:
        """Give a copy of the module all values.

        Memory: the whole model.
        """
        with weights_of_recurrent_layers_renewed(copied):
            for parameter, twin in list(zip(module.parameters(), copied.parameters(), strict=True)):
                if parameter in self:
                    _become(twin, nn.Parameter(self.value(parameter), parameter.requires_grad))


class _OnDemand(dict[str, Any]):
    """`nn.Module._parameters` whose entries are looked up by a function."""

    def __init__(self, parameters: dict[str, Any], find: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self._find = find

    def __getitem__(self, name: str) -> Any:
        return self._find(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._find(super().get(name, default))

    def items(self) -> Any:
        return ((name, self._find(x)) for name, x in super().items())

    def values(self) -> Any:
        return map(self._find, super().values())


class _NumpyValues(TorchFunctionMode):
    """Gives numpy the values of recorded tensors, whose memory it can't share."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and self._recorder.records(args[0]):
            args = (self._recorder.value(args[0]).requires_grad_(args[0].requires_grad), *args[1:])
        return func(*args, **kwargs or {})


def _become(x: Tensor, value: Tensor) -> None:
    """Let a tensor, under all references to it, be another one with the attributes that somebody gave it."""
    own = attributes_of_fakes(x)
    value.__dict__.update({name: held for name, held in vars(x).items() if name not in own})
    try:
        torch.utils.swap_tensors(x, value)
    except RuntimeError as error:
        raise RuntimeError(
            f"MegaTPStrategy: a parameter of shape {tuple(x.shape)}, created in `configure_model`, can't be given its"
            f" values later: {error}. Something keeps a weak reference to it, or a graph that uses it. Create its layer"
            " in `__init__`."
        ) from error
