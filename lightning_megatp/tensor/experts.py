"""A mixture of experts whose parameters are stacks of all experts': every expert is split on the features inside it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.messages import with_article
from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.collectives import copy_to_region, reduce_from_region, reduce_scatter_sequence
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.sequence import SequenceShard


class ParallelExperts(ParallelLayer):
    """Experts that run the module's own forward on this rank's features of every expert, and sum what comes out.

    Floating arguments (hidden states, routing weights) are whole or SequenceShards, others (the experts chosen) whole;
    the output is whole, or a SequenceShard if an argument of its shape was one. Which tokens go to which expert is
    decided outside, by what is the same on every rank.

    Communication: `copy_to_region` or `gather_sequence` of each floating argument, `reduce_from_region` or
    `reduce_scatter_sequence` of the output; for each bias that is added once an all-reduce of its gradient.
    """

    splits: dict[str, tuple[int, tuple[Ranges, ...]]]
    """Split parameter -> its dim and the ranges of every rank."""
    once: tuple[str, ...] = ()
    """Parameters that only the first rank adds."""

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.context.meet(self.label)
        context, held = self.context, self.__dict__["_parameters"]
        shards = [x for x in tree_leaves((args, kwargs)) if isinstance(x, SequenceShard)]
        with context.running(user_code=False):
            inside = self._parameters_inside()
            args, kwargs = tree_map(self._enter, (args, kwargs))
        self.__dict__["_parameters"] = inside  # the module's own code, meanwhile, sees shards
        try:
            partial = super(ParallelLayer, self).forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = held
        if not isinstance(partial, Tensor):
            raise ValueError(
                f"MegaTPStrategy: `{self.label}` has the style `experts`, and its forward should return one tensor, but"
                f" returned {with_article(type(partial).__name__)}. Leave it out of the plan."
            )
        with context.running(user_code=False):
            context.leave()
            return self._leave(partial, next((x for x in shards if x.shape == partial.shape), None))

    def _enter(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return self.context.enter(x, self._bring, self.region, self.training).value

    def _parameters_inside(self) -> dict[str, Any]:
        """The parameters as the module's own forward sees them."""
        inside: dict[str, Any] = dict(self._parameters)
        for name, (dim, by_rank) in self.splits.items():
            inside[name] = self._own(name, dim, by_rank)
        for name in self.once:
            bias = copy_to_region(inside[name], self.group)
            inside[name] = bias if self.context.rank == 0 else bias * 0.0
        return inside

    def _leave(self, partial: Tensor, shard: SequenceShard | None) -> Tensor:
        if shard is None or self.context.is_dry(partial):
            return reduce_from_region(partial, self.group)
        layout = shard.tokens
        return SequenceShard.wrap(reduce_scatter_sequence(partial, self.group, layout.dim), layout)


def expert_kind(module: nn.Module) -> type[ParallelExperts]:
    """The parallel class for a module's own class.

    Raises:
        ValueError: both have an attribute of one name.
    """
    own = vars(module).keys() | {name for kind in type(module).__mro__ if kind not in _COMMON for name in vars(kind)}
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
