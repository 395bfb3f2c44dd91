"""A parameter of which each data-parallel rank holds some rows."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.origins import module_of_frame
from lightning_megatp.shim.autograd import functorch_is_active
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import with_local
from lightning_megatp.steps import StepKind
from lightning_megatp.tensor.shards import LayerWeight, WeightMatrix


@dataclass(eq=False)
class DividedParameter:
    """One parameter of this rank's stages, divided over data-parallel ranks by rows (dim 0)."""

    name: str
    sharded: nn.Parameter
    """FSDP2's, a DTensor."""
    whole: nn.Parameter
    """What the module computes with; without memory unless it is gathered."""
    local: nn.Parameter
    """This rank's rows, plain: what the optimizer steps, and where the gradient ends."""
    rows: tuple[int, int]
    """The first of them, and one past the last, in this tensor rank's shard of the parameter."""
    owners: Sequence[tuple[nn.Module, str]]
    """Where the module finds it."""
    together: bool
    """Gathered for the length of a step, not by its unit."""
    first_copy: bool
    """Whether other ranks with the same rows (`dp_replicate`) leave them to this one to save."""

    @property
    def shape(self) -> Size:
        """On this tensor rank, before it was divided."""
        return self.sharded.shape

    @property
    def is_trained(self) -> bool:
        """What was last said of it to the module, which shows `sharded`, or `whole` while it is gathered."""
        owner, leaf = self.owners[0]
        shown = owner._parameters[leaf]  # in a step `getattr` of a split layer would hand out a `WholeParameter`
        assert shown is not None
        return shown.requires_grad

    @property
    def replaced(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Where the module has another tensor in its place, for a call (`torch.func.functional_call`): the dict and the
        name that hold it, and that tensor."""
        own = (self.sharded, self.whole, self.local)
        places: list[tuple[dict[str, Any], str]] = [(owner._parameters, leaf) for owner, leaf in self.owners]
        held = [(at, leaf, dict.__getitem__(at, leaf)) for at, leaf in places]
        return [(at, leaf, x) for at, leaf, x in held if all(x is not form for form in own)]

    @property
    def is_gathered(self) -> bool:
        """Whether the module shows the whole."""
        owner, leaf = self.owners[0]
        return dict.__getitem__(owner._parameters, leaf) is self.whole

    def agree_on_trained(self) -> None:
        """Let all its forms be trained, or frozen, as the module's is. FSDP2 goes by `sharded`, and what a step freezes
        or thaws while `whole` is shown would be forgotten."""
        trained = self.is_trained
        for form in (self.sharded, self.whole, self.local):
            if form.requires_grad != trained:
                form.requires_grad_(trained)

    def gather(self, rows: Tensor) -> Tensor:
        """The whole of something of which this rank has rows, on this tensor rank.

        Args:
            rows: the shape of `local`.

        Communication: one all-gather over the ranks that divide it; each of them has to call.
        """
        held = self.sharded.data
        assert isinstance(held, DTensor)
        whole: Tensor = self.as_divided(rows.to(held.device_mesh.device_type)).full_tensor()
        return whole

    def as_divided(self, rows: Tensor) -> DTensor:
        """Rows of something as the module shows them: a DTensor, in the same memory."""
        held = self.sharded.data
        assert isinstance(held, DTensor)
        if rows.device.type != held.device_mesh.device_type:  # offloaded
            return with_local(held, rows.detach())
        return DTensor.from_local(
            rows.detach(),
            held.device_mesh,
            held.placements,
            run_check=False,
            shape=held.shape,
            stride=held.stride(),
        )

    def take(self, whole: Tensor) -> Tensor:
        """This rank's rows of something of the whole's shape."""
        return whole[slice(*self.rows)].clone()

    def put(self, values: Tensor) -> None:
        """Take other values.

        Args:
            values: the whole's, or a DTensor of them.
        """
        held = self.sharded.data
        assert isinstance(held, DTensor)
        if isinstance(values, DTensor):
            rows = values.redistribute(placements=held.placements).to_local()
        else:
            rows = self.take(values)
        self.local.data.copy_(rows)

    def __deepcopy__(self, memo: dict[int, object]) -> DividedParameter:
        """What a copy of the module holds is not what is trained here."""
        return self


def replace_parameters(optimizer: Optimizer, new: Callable[[Tensor], Tensor]) -> None:
    """Let an optimizer step others than it was given.

    Args:
        new: what to step in place of a parameter. States that are there already (Adagrad makes them when it is built)
            become those of the new one, of which a DTensor's are this rank's rows.
    """
    for group in optimizer.param_groups:
        before, group["params"] = group["params"], [new(p) for p in group["params"]]
        for old, p in zip(before, group["params"], strict=True):
            if p is not old and (made := optimizer.state.pop(old, None)) and p not in optimizer.state:
                rows = {key: x.to_local().to(p.device) for key, x in made.items() if isinstance(x, DTensor)}
                optimizer.state[p] = {**made, **rows}


def load_rows(parameters: Iterable[DividedParameter]) -> None:
    """Let `load_state_dict` of the modules that hold them take whole values: of these, this rank's rows."""
    by_owner: dict[nn.Module, dict[str, DividedParameter]] = {}
    for parameter in parameters:
        for owner, leaf in parameter.owners:
            by_owner.setdefault(owner, {})[leaf] = parameter
    for owner, held in by_owner.items():
        owner.register_load_state_dict_pre_hook(functools.partial(_take_loaded, held))


def _take_loaded(
    held: Mapping[str, DividedParameter], module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    for leaf, parameter in held.items():
        given = state_dict.get(prefix + leaf)
        if isinstance(given, DTensor) or module._parameters.get(leaf) is not parameter.sharded:
            continue
        if isinstance(given, Tensor) and given.shape == parameter.shape:
            state_dict[prefix + leaf] = parameter.as_divided(parameter.take(given).to(parameter.local))


def rows_of(size: int, place: int, ranks: int) -> tuple[int, int]:
    """Which rows FSDP2 gives to a rank: equal parts, the last ones smaller or empty."""
    each = -(-size // ranks)
    return min(place * each, size), min((place + 1) * each, size)


def finds_rows(error: BaseException) -> bool:
    """Whether an operation failed on a divided parameter that nobody has gathered. DTensor says so of most (torch 2.11
    to 2.13); a bare assertion or a wrong shape comes from inside of it."""
    if "mixed torch.Tensor and DTensor" in str(error):
        return True
    return not isinstance(error, torch.OutOfMemoryError) and any(
        module_of_frame(frame).startswith("torch.distributed.tensor")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def used_outside_forward(kind: StepKind, level: int) -> RuntimeError:
    """The error for it.

    Args:
        kind: of the step.
        level: of zero.
    """
    return RuntimeError(
        f"MegaTPStrategy: the {kind} step uses a parameter that zero={level} has divided outside of the forward of its"
        " module, and the batch that was looked at before training did not show it. Use it inside of a module's"
        " forward, or take zero=0."
    )


def own_part(x: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def address_of(x: Tensor) -> int:
    """Where what this rank has of it lies; 0 for nowhere, and for what code sees as whole. Gradients may share the
    storage of a bucket."""
    if isinstance(x, LayerWeight | WeightMatrix):
        return 0
    if x.layout is not torch.strided or x.is_meta or is_fake(x) or functorch_is_active():
        return 0
    return own_part(x).data_ptr()
