"""The optimizers' groups. On a pipeline stage they hold what the stage does, with zero > 0 this rank's rows; who adds
some, or looks for the module's parameters in them, finds those of all stages, as on one device, and their sizes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.containers import parameters_of
from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.mode import PartsMode
from lightning_megatp.parts.rows import own_part
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.functions import couples, is_in_place, multiplies, operation_name, operation_names
from lightning_megatp.tensor.outside import size_of
from lightning_megatp.tensor.shards import SIZES
from lightning_megatp.zero.sharding import ZeroSharding


class Groups:
    """Shows the optimizers' groups as on one device, for a while, and knows the order of their parameters.

    Args:
        parallel: the module.
        pipeline: None at pp=1.
        sharding: None at zero=0.
        optimizers: those that there are now.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        pipeline: Pipeline | None,
        sharding: ZeroSharding | None,
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.parallel, self._pipeline, self._sharding = parallel, pipeline, sharding
        self._optimizers = optimizers
        self._names: dict[int, list[list[str]]] = {}
        """id(optimizer) -> the names of its parameters on all stages, group by group."""

    def order(self, optimizer: Optimizer) -> list[str]:
        """The names of the parameters of an optimizer on all stages, as they are numbered on one device."""
        return [name for group in self._names.get(id(optimizer), []) for name in group]

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Show them as on one device. Groups that are made meanwhile are there on every stage."""
        with contextlib.ExitStack() as stack:
            if self._pipeline is not None:
                stack.enter_context(self._pipeline.slicer.ownership.present())
            stack.enter_context(_Whole(self.parallel, self._shapes()))
            for optimizer in self._optimizers():
                self._show(optimizer)
            try:
                yield
            finally:
                if self._pipeline is not None:
                    self._names = {id(optimizer): self._keep_own(optimizer) for optimizer in self._optimizers()}
                if self._sharding is not None:
                    self._sharding.give_to(self._optimizers())
        for optimizer in self._optimizers():
            self._cut_states(optimizer)
            for holder in (vars(optimizer), *optimizer.param_groups):
                for key in holder.keys() - _HELD:
                    holder[key] = _own(holder[key])

    def order_alike(self, mesh: ParallelMesh) -> None:
        """Within `whole`: bring the parameters of groups into the module's order, where ranks have them in different
        ones. A `set` of parameters has another order in each process, and states are numbered by it.

        Communication: an object all-gather over the world, of a digest.
        """
        place = {id(p): i for i, p in enumerate(self.parallel.module.parameters())}
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        orders = [[place.get(id(p), -1) for p in group["params"]] for group in groups]
        digest = hashlib.blake2b(repr(orders).encode()).digest()
        if len(set(mesh.exchange(digest, *AXES))) == 1:
            return
        for group, order in zip(groups, orders, strict=True):
            sorted_ones = sorted(range(len(order)), key=order.__getitem__)
            for key in group.keys() & {"params", "param_names"}:
                group[key] = [group[key][i] for i in sorted_ones]

    def _shapes(self) -> dict[int, Sequence[int]]:
        """id(parameter) -> the whole one's shape, where tensor ranks hold parts."""
        parallel = self.parallel
        pairs = ((p, parallel.spec(parallel.held(p))) for p in parallel.module.parameters())
        return {id(p): spec.shape for p, spec in pairs if spec is not None}

    def _show(self, optimizer: Optimizer) -> None:
        if self._sharding is not None:
            self._sharding.take_from(optimizer)
        if self._pipeline is None:
            return
        for group, names in zip(optimizer.param_groups, self._names.get(id(optimizer), []), strict=False):
            group["params"] = [self._pipeline.slicer.ownership.stand_in(name) for name in names]
            if "param_names" in group:
                group["param_names"] = list(names)

    def _cut_states(self, optimizer: Optimizer) -> None:
        """Keep this rank's part of states that an optimizer makes when it is built (Adagrad), of the whole parameters'
        size."""
        parallel = self.parallel
        for p in parameters_of(optimizer):
            shape = parallel.whole_shape(p)
            for key, x in optimizer.state.get(p, {}).items() if shape != p.shape else ():
                if isinstance(x, Tensor) and x.shape == shape:
                    optimizer.state[p][key] = parallel.part_of(p, x).clone()

    def _keep_own(self, optimizer: Optimizer) -> list[list[str]]:
        assert self._pipeline is not None
        names = {id(p): name for name, p in self._pipeline.parallel.module.named_parameters()}
        found = []
        for group in optimizer.param_groups:
            found.append([names[id(p)] for p in group["params"] if id(p) in names])
            keep = [not (is_fake(p) or self._pipeline.loans.is_lent(names.get(id(p), ""))) for p in group["params"]]
            for fake in filter(is_fake, group["params"]):
                optimizer.state.pop(fake, None)
            for key in group.keys() & {"params", "param_names"}:
                group[key] = [item for item, kept in zip(group[key], keep, strict=True) if kept]
        return found


class _Whole(PartsMode):
    """Parameters of which a rank holds a part have the size of the whole ones, and norms, means, ... of them are the
    whole ones': rates are chosen by these. Those without data, or of which rows are here, are equal to themselves:
    BaseFinetuning compares by values what it adds.

    Communication: for each norm, mean, ... of a part an all-gather of it, which all ranks ask for.
    """

    def __init__(self, parallel: ParallelModule, shapes: Mapping[int, Sequence[int]]) -> None:
        super().__init__(parallel.parts)
        self.parallel, self._shapes = parallel, shapes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if func is torch.equal and any(is_fake(x) or isinstance(x, DTensor) for x in args):
            return args[0] is args[1]
        if args and name in _ASKS and (shape := self._shape(args[0])) is not None:
            return size_of(shape, func, *args[1:], **kwargs)
        if (couples(name) or multiplies(name)) and not is_in_place(name):
            args, kwargs = tree_map(self._gathered, (args, kwargs))
        result = func(*args, **kwargs)
        self.note(name, [x for x in args if isinstance(x, Tensor)], result)
        return result

    def _gathered(self, x: Any) -> Any:
        part = self.part(x) if isinstance(x, Tensor) and not is_fake(x) else None
        if part is None:
            return x
        return self.parallel.whole_value(self.parallel.names[part.shard.name], own_part(x.detach()))

    def _shape(self, x: Any) -> Sequence[int] | None:
        return self._shapes.get(id(x), x.shape if isinstance(x, DTensor) else None)


_ASKS = SIZES | operation_names("squeeze")
"""`len(p.squeeze().shape) > 1` tells weights, which decay, from biases of shape (1, 1, width)."""


_HELD = {"params", "param_groups", "state", "defaults"}
"""What is looked after otherwise."""


def _own(kept: Any) -> Any:
    """What an optimizer has made of parameters when it was built (the slow weights of a Lookahead, in lists): of other
    stages' nothing, of those that are divided this rank's rows."""
    if isinstance(kept, list):
        kept[:] = [_own(x) for x in kept if not is_fake(x)]
    elif isinstance(kept, dict):
        for key in [key for key, x in kept.items() if is_fake(x)]:
            del kept[key]
        kept.update({key: _own(x) for key, x in kept.items() if isinstance(x, (list, dict, DTensor))})
    return kept.to_local() if isinstance(kept, DTensor) else kept
