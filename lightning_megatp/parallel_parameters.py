"""ParallelParameters: what of each parameter of a split model this rank holds, and what the whole is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.plan.shard import ShardedTensorSpec, ShardSpec
from lightning_megatp.shim.modules import modules_in
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.outside import WholeParameter
from lightning_megatp.tensor.parameters import gather_shards


@dataclass(frozen=True)
class Role:
    """What is known of a parameter."""

    spec: ShardedTensorSpec | None
    kept_whole: bool
    counted_elsewhere: bool


class ParallelParameters:
    """The parameters of a model of which ranks hold parts: split over tp, divided over dp.

    Args:
        module: the swapped model.
        context: shared by its parallel layers.
        specs: canonical name -> shards, one entry per split parameter.
    """

    def __init__(self, module: nn.Module, context: TensorContext, specs: Mapping[str, ShardedTensorSpec]) -> None:
        self.module, self.context = module, context
        self.names = dict(module.named_parameters(remove_duplicate=False))
        self.sharded = context.sharded
        self.sharded.update((id(self.names[name]), spec) for name, spec in specs.items())
        self.divided: dict[int, DividedParameter] = {}
        """id of any of its tensors -> a parameter that is divided over data-parallel ranks (zero > 0)."""
        self.rows_group: dist.ProcessGroup | None = None
        """The ranks that hold different rows of these."""
        self.counted_elsewhere: set[int] = set()
        """id(parameter) of those that another pipeline stage holds too, and counts in norms."""
        self.device: torch.device | None = None
        """What its ranks send lies there; None: where the tensors are."""

    def whole_shape(self, parameter: Tensor) -> torch.Size:
        """The shape of a parameter before it was split."""
        spec, divided = self.spec(parameter), self.divided.get(id(parameter))
        whole = parameter.shape if divided is None else divided.shape
        return torch.Size(whole if spec is None else spec.shape)

    def whole_size(self, parameter: Tensor) -> int:
        """Elements of a parameter before it was split."""
        return self.whole_shape(parameter).numel()

    @property
    def sizes(self) -> dict[str, torch.Size]:
        """Name of a split parameter, of a tied one each -> the shape of the whole."""
        specs = ((name, self.sharded.get(id(parameter))) for name, parameter in self.names.items())
        return {name: torch.Size(spec.shape) for name, spec in specs if spec is not None}

    def held(self, parameter: Tensor) -> Tensor:
        """The plain tensor that this rank trains in place of a parameter: itself, or its rows if it is divided."""
        divided = self.divided.get(id(parameter))
        return parameter if divided is None else divided.local

    def clear_gradient(self, parameter: Tensor) -> None:
        """As `parameter.grad = None`."""
        for x in (parameter, self.held(parameter)):
            x.grad = None

    def leaf(self, x: Any) -> Any:
        """What collects the gradient of a parameter that a step sees; anything else as it is."""
        x = x.parameter if isinstance(x, WholeParameter) else x
        divided = self.divided.get(id(x))
        return x if divided is None else divided.whole

    def undivided(self) -> list[Tensor]:
        """The parameters whose gradients lie in the module: those of divided ones are collected later."""
        held = (child._parameters.values() for child in modules_in(self.module))
        found = {id(p): p for p in itertools.chain.from_iterable(held) if p is not None}
        return [p for key, p in found.items() if key not in self.divided]

    @torch.no_grad()
    def load_rows(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy values of divided parameters to this rank's rows.

        Args:
            state: by name; rows, or all of this tensor rank's.

        Returns:
            The values of the others.
        """
        rest = {}
        for name, value in state.items():
            divided = self.divided.get(id(self.names.get(name)))
            if divided is None or not isinstance(value, Tensor):
                rest[name] = value
            else:
                divided.local.copy_(value if value.shape == divided.local.shape else divided.take(value))
        return rest

    def named_held(self) -> Iterator[tuple[str, Tensor]]:
        """Name -> plain tensor, each parameter once."""
        for name, parameter in self.module.named_parameters():
            yield name, self.held(parameter)

    def of_tensor_rank(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The whole, on this tensor rank, of a value in the shape of the plain tensor: a gradient, say.

        Communication: one all-gather over the data-parallel ranks that divide the parameter, if some do.
        """
        divided = self.divided.get(id(parameter))
        return value if divided is None else divided.gather(value)

    def whole_value(self, parameter: Tensor, value: Tensor) -> Tensor:
        """The whole of a value in the shape of the plain tensor (a gradient, an optimizer's state), where ranks can
        send it.

        Communication: one all-gather over the data-parallel ranks that divide the parameter, if some do; one over tp
            if it is split.
        """
        spec, value = self.spec(parameter), self.to_send(self.of_tensor_rank(parameter, value))
        return value if spec is None else gather_shards(value, spec, self.context.group)

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of a value in the shape of the whole parameter (inverse of `whole_value`). No
        communication."""
        spec, divided = self.own_spec(parameter), self.divided.get(id(parameter))
        part = whole if spec is None else spec.take(whole)
        return part if divided is None else divided.take(part)

    def to_send(self, x: Tensor) -> Tensor:
        """A tensor where the ranks of a group can send it: what is offloaded, or averaged in the host's memory, NCCL
        can't."""
        return x.to(self.device)

    def is_cut(self, name: str) -> bool:
        """Whether this rank holds less of a weight than the whole."""
        parameter = self.names.get(name)
        return parameter is not None and (self.spec(parameter) is not None or id(parameter) in self.divided)

    @torch.no_grad()
    def part_like(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that is as large as a whole weight, cut as that is; rows as a DTensor.

        Args:
            name: of the weight; of anything else, or of what this rank doesn't hold, the tensor itself is returned.
        """
        parameter = self.names.get(name)
        if parameter is None:
            return whole
        part, divided = self.part_of(parameter, whole), self.divided.get(id(parameter))
        return part if divided is None else divided.as_divided(part)

    @torch.no_grad()
    def whole_like(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor that is cut as a weight, on the part's device (inverse of `part_like`).

        Communication: an all-gather over tp where the weight is split, one over dp for a DTensor.
        """
        parameter, device = self.names.get(name), part.device
        if parameter is None:
            return part
        if isinstance(part, DTensor):
            part = self.of_tensor_rank(parameter, part.to_local())
        spec = self.spec(parameter)
        return part if spec is None else gather_shards(self.to_send(part), spec, self.context.group).to(device)

    def roles(self) -> dict[str, Role]:
        """What is known of each parameter by its identity, before it is replaced by others."""
        return {
            name: Role(self.spec(p), id(p) in self.context.kept_whole, id(p) in self.counted_elsewhere)
            for name, p in self.module.named_parameters()
        }

    def adopt_divided(
        self, parameters: Iterable[DividedParameter], group: dist.ProcessGroup, roles: Mapping[str, Role]
    ) -> None:
        """The module's parameters were replaced by divided ones.

        Args:
            group: the ranks that hold different rows.
            roles: what `roles` said before.
        """
        self.rows_group = group
        self.names = dict(self.module.named_parameters(remove_duplicate=False))
        names = {name: [self.names[name]] for name in roles}
        for divided in parameters:
            tensors = [divided.sharded, divided.whole, divided.local]
            self.divided.update((id(tensor), divided) for tensor in tensors)
            names[divided.name] = tensors
        self.sharded.clear()
        self.context.kept_whole.clear()
        self.counted_elsewhere.clear()
        for name, role in roles.items():
            ids = [id(tensor) for tensor in names[name]]
            if role.spec is not None:
                self.sharded.update(dict.fromkeys(ids, role.spec))
            if role.kept_whole:
                self.context.kept_whole.update(ids)
            if role.counted_elsewhere:
                self.counted_elsewhere.update(ids)

    def forget_freed(self) -> None:
        """Other pipeline stages' parameters are gone: their Parameter objects, and so their ids, mean nothing now."""
        self.names = dict(self.module.named_parameters(remove_duplicate=False))
        held = {id(parameter) for parameter in self.names.values()}
        for parameter_id in [i for i in self.sharded if i not in held]:
            del self.sharded[parameter_id]

    def spec(self, parameter: Tensor) -> ShardedTensorSpec | None:
        """The shards of a parameter; None where it is whole."""
        return self.sharded.get(id(parameter))

    def own_spec(self, parameter: Tensor) -> ShardSpec | None:
        """What this rank owns of a parameter; None for all of it."""
        spec = self.spec(parameter)
        return None if spec is None else spec.spec(self.context.rank)

    def shard(self, name: str, parameter: Tensor) -> ShardSpec:
        """What this rank holds of a parameter, of its rows too.

        Args:
            name: what it shall be called.
            parameter: itself, or what stands for it.
        """
        split, divided = self.spec(parameter), self.divided.get(id(parameter))
        if split is None:
            spec = ShardSpec.of_whole(name, (parameter if divided is None else divided).shape)
        else:
            spec = split.renamed(name).spec(self.context.rank)
        return spec if divided is None else spec.rows(*divided.rows, writes=divided.first_copy)

    def parts(self) -> Iterator[tuple[Tensor, ShardSpec]]:
        """Weights and gradients of which this rank has a part, as hooks find them and as it trains them."""
        for name, parameter in self.names.items():
            if self.is_cut(name):
                shard = self.shard(name, parameter)
                for x in dict.fromkeys([parameter, self.held(parameter)]):
                    yield x, shard
                    if x.grad is not None:
                        yield x.grad, shard

    def spec_of(self, name: str) -> ShardedTensorSpec | None:
        """The shards of a parameter, looked up by any of its names in the state dict; None for whole parameters,
        buffers and unknown names."""
        parameter = self.names.get(name)
        spec = None if parameter is None else self.sharded.get(id(parameter))
        return None if spec is None else spec.renamed(name)

    def name_of(self, parameter_id: int) -> str:
        """The name of a parameter, by its identity, for messages."""
        if parameter_id in self.divided:
            return self.divided[parameter_id].name
        return next((name for name, p in self.names.items() if id(p) == parameter_id), "a tensor made by the step")
