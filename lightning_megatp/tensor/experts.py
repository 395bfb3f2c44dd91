"""A mixture of experts whose parameters are stacks of all experts': every expert is split on the features inside it."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.messages import with_article
from lightning_megatp.plan.layer import StackLayout
from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.shim.torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_megatp.tensor.collectives import (
    added_once,
    copy_to_region,
    leave_alike,
    reduce_from_region,
    reduce_scatter_sequence,
)
from lightning_megatp.tensor.context import OpenStack
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.sequence import SequenceShard


class ParallelExperts(ParallelLayer):
    """Experts that run the module's own forward on this rank's features of every expert, and sum what comes out.

    Floating arguments (hidden states, routing weights) are whole or SequenceShards, others (the experts chosen) whole;
    the output is whole, or a SequenceShard if an argument of its shape was one. Which tokens go to which expert is
    decided by what is the same on every rank, outside or in there.

    Communication: `copy_to_region` or `gather_sequence` of each floating argument, `reduce_from_region` or
    `reduce_scatter_sequence` of the output; for each bias that is added once an all-reduce of its gradient. Nothing for
    what all ranks compute alike.
    """

    splits: dict[str, tuple[int, tuple[Ranges, ...]]]
    """Split parameter, by its name from this module on -> its dim and the ranges of every rank."""
    stack_layout: StackLayout

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.context.meet(self.label)
        context = self.context
        layout = self.stack_layout
        shards = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SequenceShard)]
        with context.running(user_code=False):
            inside = self._parameters_inside()
            args, kwargs = tree_map(self._enter, (args, kwargs))
        kept = [self._place(name) for name in layout.kept]
        before = [held.get(key) for held, key in kept]
        context.open_stack = OpenStack(self.label, tuple(x for x in inside.values() if isinstance(x, Tensor)))
        with self._in_place(inside):
            result = super(ParallelLayer, self).forward(*args, **kwargs)
        leaves, tree = tree_flatten(result)
        sums = self._sums(result, [x for x in leaves if isinstance(x, Tensor)])
        added = self._added(args, kwargs)
        with context.running(user_code=False):
            context.leave()
            for (held, key), earlier in zip(kept, before, strict=True):
                if isinstance(left := held.get(key), Tensor) and left is not earlier:
                    held[key] = leave_alike(left, self.group)
            for i, x in enumerate(leaves):
                if isinstance(x, Tensor) and not sums[id(x)]:
                    leaves[i] = leave_alike(x, self.group)
                elif isinstance(x, Tensor):
                    leaves[i] = self._leave(x if added is None else added_once(x, added, self.group), shards)
                    added = None
            return tree_unflatten(leaves, tree)

    def _added(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The argument that each rank has added to its part.

        Raises:
            ValueError: it was not given as when it was tried out.
        """
        at = self.stack_layout.adds
        given = dict([*enumerate(args), *kwargs.items()])
        if at is not None and not isinstance(given.get(at), Tensor):
            raise ValueError(
                f"MegaTPStrategy: the experts `{self.label}` add argument {at!r} to what they compute, as they did when"
                " they were tried out, and it is not given. Call them as then, or leave them out of the plan."
            )
        return None if at is None else given[at]

    def _sums(self, result: Any, tensors: list[Tensor]) -> dict[int, bool]:
        """id of a tensor that was returned -> whether it is a sum over the ranks.

        Raises:
            ValueError: forward returned something else than when it was tried out.
        """
        returns = self.stack_layout.returns
        if len(tensors) != (len(returns) or 1) or (not returns and result is not tensors[0]):
            wanted = f"{len(returns)} tensors, as it did when it was tried out" if returns else "one tensor"
            raise ValueError(
                f"MegaTPStrategy: `{self.label}` has the style `experts`, and its forward should return {wanted}, but"
                f" returned {with_article(type(result).__name__)}. Leave it out of the plan."
            )
        return dict(zip(map(id, tensors), returns or (True,), strict=True))

    def _enter(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        region = None if self.stack_layout.draws_alike else self.region
        return self.context.enter(x, self, region).value

    def _parameters_inside(self) -> dict[str, Any]:
        """The split parameters, and those that are added once, as the module's own forward sees them."""
        inside = {name: self._own(name, dim, by_rank) for name, (dim, by_rank) in self.splits.items()}
        for name in self.stack_layout.once:
            bias = copy_to_region(self._held(name), self.group)
            inside[name] = bias if self.context.rank == 0 else bias * 0.0
        return inside

    @contextlib.contextmanager
    def _in_place(self, inside: dict[str, Any]) -> Iterator[None]:
        """The module's own code, meanwhile, sees these parameters."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        places = {name: self._place(name) for name in inside}
        holders = [vars(self), *(held for held, _ in places.values())]
        for held in {id(held): held for held in holders}.values():
            before.append((held, "_parameters", held["_parameters"]))
            held["_parameters"] = dict(dict.items(held["_parameters"]))
        for name, value in inside.items():
            held, leaf = places[name]
            held["_parameters"][leaf] = value
            if leaf in held:  # what stands for a parameter of another pipeline stage
                before.append((held, leaf, held.pop(leaf)))
        try:
            yield
        finally:
            for held, key, value in before:
                held[key] = value

    def _held(self, name: str) -> Any:
        held, leaf = self._place(name)
        return super()._held(name) if leaf == name else dict.get(held["_parameters"], leaf)

    @property
    def any_weight(self) -> Tensor:
        weight: Tensor = self._held(next(iter(self.splits)))
        return weight

    def _names(self) -> Collection[str]:
        return {*self._parameters, *self.splits, *self.stack_layout.once}

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        """The attributes of the module that has a parameter or an attribute, and its name there."""
        path, _, leaf = name.rpartition(".")
        return vars(self.get_submodule(path)), leaf

    def _leave(self, x: Tensor, shards: list[SequenceShard]) -> Tensor:
        shard = next((shard for shard in shards if shard.shape == x.shape), None)
        if shard is None or self.context.is_dry(x):
            return reduce_from_region(x, self.group)
        layout = shard.tokens
        return SequenceShard.wrap(reduce_scatter_sequence(x, self.group, layout.dim), layout)


def expert_kind(module: nn.Module) -> type[ParallelExperts]:
    """The parallel class for a module's own class.

    Raises:
        ValueError: both have an attribute of one name.
    """
    held = (vars(module), module._parameters, module._buffers, module._modules)
    own = {*itertools.chain(*held)} | {x for kind in type(module).__mro__ if kind not in _COMMON for x in vars(kind)}
    annotated = ParallelLayer.__annotations__.keys() | ParallelExperts.__annotations__.keys()
    taken = annotated | {name for name in dir(ParallelExperts) if not hasattr(nn.Module, name)}
    clash = sorted(name for name in own & taken if not name.startswith("__"))
    if clash:
        raise ValueError(
            f"MegaTPStrategy: {with_article(type(module).__name__)} has the style `experts` and the attributes"
            f" {', '.join(clash)}, which this strategy needs there. Rename them, or leave it out of the plan."
        )
    kind: type[ParallelExperts] = _combined(type(module))  # type: ignore[arg-type]
    return kind


_COMMON = nn.Module.__mro__


@functools.cache
def _combined(original: Any) -> Any:
    return type(f"Parallel{original.__name__}", (ParallelExperts, original), {"__module__": __name__})
