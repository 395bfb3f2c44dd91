"""Tensor ranks as threads of one process: a block's shards, run in step.

The ranks' graphs are joined where they would communicate, so one backward gives the gradient of every shard. Where a
real rank puts its backward collectives is not seen here; the marks of the regions (`tensor.lineage`) are, and they
decide it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import Call, own_attributes, tensors_anywhere_in
from lightning_megatp.auto_plan.exact import exact_in_thread
from lightning_megatp.auto_plan.thin import ThinLinear, block_copy
from lightning_megatp.plan.convolutions import channel_dim, input_ranges, own_groups
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import AttributePlan
from lightning_megatp.plan.ranges import Ranges, everything, length
from lightning_megatp.shim.modules import weight_norm_of
from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.collectives import take_ranges
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard, own_features
from lightning_megatp.tensor.lineage import enters_region
from lightning_megatp.tensor.shards import gathered
from lightning_megatp.tensor.weight_norm import weight_of_parts


@dataclass
class BlockPlan:
    """What is split in one block; names are relative to it."""

    layers: dict[str, LayerPlan] = field(default_factory=dict)
    attributes: list[AttributePlan] = field(default_factory=list)

    def merged(self, other: BlockPlan) -> BlockPlan:
        return BlockPlan({**self.layers, **other.layers}, [*self.attributes, *other.attributes])


class Ranks:
    """Threads that exchange tensors in step.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Any] = [None] * size
        self._running = False
        self.summed = 0
        """How often they added up what they gave."""
        self.received = 0
        """Numbers that the first rank got from others, of sums its share, as with sequence regions."""

    def share(self, rank: int, x: Tensor) -> list[Tensor]:
        """What all ranks give, in order."""
        if not self._running:
            raise RuntimeError("its backward runs a layer again, where simulated ranks can't wait for each other")
        self._slots[rank] = x
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], Any]) -> BaseException | None:
        """Let every rank work; the first error, if there is one."""
        errors: list[BaseException | None] = [None] * self.size

        def body(rank: int) -> None:
            try:
                with torch.enable_grad():
                    work(rank)
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        self._running = True
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._running = False
        real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
        return next(iter(real), next((e for e in errors if e is not None), None))


class SimulatedContext:
    """Stands in for a `TensorContext`: what feature shards ask of it, and where a region of real ranks is open."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank, self.size = rank, ranks.size
        self.exchange = SimulatedExchange(ranks, rank)
        self.gathers: Counter[str] = Counter()
        self.kept_whole: set[int] = set()
        self.stream = self
        self.open = False
        """Whether random numbers would come from a stream of the rank's own."""
        self.misplaced = False
        """Whether a part of a value would draw what all ranks draw, or a whole one this rank's numbers."""

    def inside(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """The random stream of a region; nothing is random here."""
        return contextlib.nullcontext()

    def draw(self, x: Any) -> None:
        """A random operation is met. Shards draw their own numbers, wherever they are."""
        if isinstance(x, Tensor) and not isinstance(x, FeatureShard) and x.requires_grad:
            self.misplaced |= self.open != enters_region(x)


class SimulatedExchange:
    """What a parallel layer, and a feature shard, asks of its group, between threads."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def copy(self, x: Tensor) -> Tensor:
        return _Mark.apply(x, "tensor", "whole")

    def scatter(self, x: Tensor, dim: int, by_rank: Sequence[Ranges]) -> Tensor:
        own = x if _everything(by_rank) else take_ranges(x, dim, by_rank[self.rank])
        return _Mark.apply(own, "tensor", "whole")

    def gather(self, x: Tensor, dim: int, by_rank: Sequence[Ranges]) -> Tensor:
        """The whole of a split dim; of features on several ranks the first rank's."""
        parts = self.ranks.share(self.rank, x)
        if _everything(by_rank):
            return _Mark.apply(parts[0], "whole", "tensor")
        indices = [i for ranges in by_rank for start, stop in ranges for i in range(start, stop)]
        first = {index: at for at, index in reversed(list(enumerate(indices)))}
        if self.rank == 0:
            self.ranks.received += sum(part.numel() for part in parts[1:])
        order = torch.tensor([first[index] for index in sorted(first)])
        return _Mark.apply(torch.cat(parts, dim).index_select(dim, order), "whole", "tensor")

    def reduce(self, x: Tensor) -> Tensor:
        parts = self.ranks.share(self.rank, x)
        if self.rank == 0:
            self.ranks.summed += 1
            self.ranks.received += x.numel() * (self.size - 1) // self.size
        return _Mark.apply(sum(parts[1:], parts[0]), "whole", "tensor")


def _everything(by_rank: Sequence[Ranges]) -> bool:
    """Whether every rank owns everything; the dim then means nothing."""
    return everything(tuple(by_rank), max(stop for ranges in by_rank for _, stop in ranges))


class _Mark(torch.autograd.Function):
    """Identity, with the regions above and below it (see `tensor.lineage`). What real ranks receive is a tensor of its
    own, which code may change in place; what they only enter into a region with is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, above: str, below: str) -> Tensor:
        ctx.region_above, ctx.region_below = above, below
        return x.clone() if above == "whole" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class SimulatedRank:
    """One simulated rank's shards of a block."""

    def __init__(self, twin: nn.Module, plan: BlockPlan, ranks: Ranks, rank: int, train: bool) -> None:
        self.context, self.rank = SimulatedContext(ranks, rank), rank
        self.module = block_copy(twin, train)
        self.cuts: dict[str, tuple[int, Ranges]] = {}
        for name, layer in plan.layers.items():
            child = self.module.get_submodule(name)
            if isinstance(child, ThinLinear):
                self._cut(name, child, layer)
            elif isinstance(child, nn.Embedding | nn.EmbeddingBag):
                self._cut_table(name, child, layer)
            else:
                self._cut_convolution(name, child, layer)
        for attribute in plan.attributes:
            setattr(self.module.get_submodule(attribute.module), attribute.attribute, attribute.by_rank[rank])

    def run(self, call: Call) -> None:
        with exact_in_thread(self.context.draw):
            args, kwargs = _computed((call.args, call.kwargs))
            result = self.module(*args, **kwargs)
            self.left = left_on(self.module)
            outputs = [*floating_in(result, (args, kwargs)), *self.left.values()]
            self.outputs = [x.whole("return") if isinstance(x, FeatureShard) else x for x in outputs]

    def add(self, full: Tensor, name: str, grad: Tensor) -> None:
        """Add a shard's gradient to the whole one's place."""
        dim, ranges = self.cuts.get(name, (0, ()))
        if name not in self.cuts:
            full += grad
            return
        at = 0
        for start, stop in ranges:
            full.narrow(dim, start, stop - start).add_(grad.narrow(dim, at, stop - start))
            at += stop - start

    def _cut(self, name: str, child: ThinLinear, layer: LayerPlan) -> None:
        ranges, style = layer.by_rank[self.rank], layer.style.style
        column = style in ("column", "column_gather")
        leaves = ("left",) if child.has_other_bias else ("left", "bias")
        for leaf in leaves if column else ("right",):
            parameter = child._parameters[leaf]
            if parameter is not None:
                child._parameters[leaf] = nn.Parameter(take_ranges(parameter.detach(), 0, ranges).clone())
                self.cuts[f"{name}.{leaf}"] = 0, ranges
        child.split = _SPLITS[style](layer, self.context)

    def _cut_table(self, name: str, child: nn.Embedding | nn.EmbeddingBag, layer: LayerPlan) -> None:
        ranges, dim = layer.by_rank[self.rank], 0
        forward: Any
        if isinstance(child, nn.EmbeddingBag):
            dim, forward = 1, _Bags(child, layer, self.context.exchange)
        else:
            forward = _Table(child, ranges, self.context.exchange)
        child._parameters["weight"] = nn.Parameter(take_ranges(child.weight.detach(), dim, ranges).clone())
        self.cuts[f"{name}.weight"] = dim, ranges
        child.__dict__["forward"] = forward

    def _cut_convolution(self, name: str, child: Any, layer: LayerPlan) -> None:
        forward = _Convolution(child, layer, self.context.exchange)  # knows the numbers of the whole
        for split in layer.splits:
            ranges, whole = split.by_rank[self.rank], child.get_parameter(split.leaf)
            holder, leaf = owner_of(child, split.leaf), split.leaf.rpartition(".")[2]
            holder._parameters[leaf] = nn.Parameter(take_ranges(whole.detach(), split.dim, ranges).clone())
            self.cuts[f"{name}.{split.leaf}"] = split.dim, ranges
        child.__dict__["forward"] = forward


class _Column:
    def __init__(self, layer: LayerPlan, context: SimulatedContext) -> None:
        self.layer, self.context, self.exchange = layer, context, context.exchange
        size = max(stop for ranges in layer.by_rank for _, stop in ranges)
        self.layout = FeatureLayout(-1, layer.by_rank, size, context) if layer.global_sizes else None  # type: ignore[arg-type]

    def __call__(self, linear: ThinLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        x = x.whole("linear") if isinstance(x, FeatureShard) else x
        self.context.open = self.layer.style.style == "column" and self.layout is None
        if bias is not None and (bias is not linear.bias or linear.has_other_bias):
            bias = self.exchange.scatter(gathered(bias), 0, self.layer.by_rank)
        y = linear.compute(self.exchange.copy(x), bias)
        if self.layout is not None:
            return FeatureShard.wrap(y, self.layout)
        if self.layer.style.style == "column_gather":
            return self.exchange.gather(y, y.dim() - 1, self.layer.by_rank)
        return y


class _Row:
    def __init__(self, layer: LayerPlan, context: SimulatedContext) -> None:
        self.layer, self.context, self.exchange = layer, context, context.exchange
        self.size = max(stop for ranges in layer.by_rank for _, stop in ranges)

    def __call__(self, linear: ThinLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        own = self.layer.by_rank[self.exchange.rank]
        if self.layer.style.style == "row_split" or self.layer.global_sizes:
            x = self._split(x)
        if x.shape[-1] != length(own):
            raise ValueError(f"a row layer of {length(own)} features on this rank gets {x.shape[-1]}")
        self.context.open = False
        y = self.exchange.reduce(linear.compute(x))
        return y if bias is None else y + bias

    def _split(self, x: Tensor) -> Tensor:
        if isinstance(x, FeatureShard):
            found = own_features(x, self.layer.by_rank, self.size)
            if found is not None:
                return found
            x = x.whole("linear")
        return self.exchange.scatter(x, x.dim() - 1, self.layer.by_rank) if x.shape[-1] == self.size else x


class _Table:
    def __init__(self, module: nn.Embedding, ranges: Ranges, exchange: SimulatedExchange) -> None:
        self.module, self.exchange = module, exchange
        ((self.first, self.stop),) = ranges

    def __call__(self, ids: Tensor) -> Tensor:
        elsewhere, padding = (ids < self.first) | (ids >= self.stop), self.module.padding_idx
        padding = padding - self.first if padding is not None and self.first <= padding < self.stop else None
        found = nn.functional.embedding((ids - self.first).masked_fill(elsewhere, 0), self.module.weight, padding)
        return self.exchange.reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class _Bags:
    def __init__(self, module: nn.EmbeddingBag, layer: LayerPlan, exchange: SimulatedExchange) -> None:
        self.module, self.layer, self.exchange = module, layer, exchange

    def __call__(self, ids: Tensor, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        weights = None if per_sample_weights is None else self.exchange.copy(gathered(per_sample_weights))
        y = nn.EmbeddingBag.forward(self.module, ids, offsets, weights)
        return self.exchange.gather(y, 1, self.layer.by_rank)


class _Convolution:
    def __init__(self, module: Any, layer: LayerPlan, exchange: SimulatedExchange) -> None:
        self.module, self.layer, self.exchange = module, layer, exchange
        self.dim, self.inputs = channel_dim(module), input_ranges(module, layer.by_rank)
        module.groups = own_groups(module, layer.by_rank[exchange.rank])
        self.normed, splits = weight_norm_of(module), {split.leaf: split for split in layer.splits}
        if self.normed is not None:
            self.direction = splits[self.normed.direction]
            setattr(self.normed.norm, "compute_weight" if self.normed.is_hook else "forward", self._of_parts)

    def __call__(self, x: Tensor, *output_size: Any, **options: Any) -> Tensor:
        x = x.whole("convolution") if isinstance(x, FeatureShard) else x
        x = self.exchange.copy(x) if self.inputs is None else self.exchange.scatter(x, self.dim, self.inputs)
        y = type(self.module).forward(self.module, x, *output_size, **options)
        if self.normed is not None and self.normed.is_hook:  # left behind; real ranks compute it when asked
            self.module.weight = self.exchange.gather(self.module.weight, self.direction.dim, self.direction.by_rank)
        return self.exchange.gather(y, self.dim, self.layer.by_rank)

    def _of_parts(self, *given: Any) -> Tensor:
        """The weight that g and v make: these two are given, or the module that holds them."""
        g, v = given if len(given) == 2 else (given[0].weight_g, given[0].weight_v)
        assert self.normed is not None
        return weight_of_parts(g, v, self.normed.dim, self.direction.dim, self.exchange)


_SPLITS: dict[str, Callable[[LayerPlan, SimulatedContext], Any]] = {
    "column": _Column,
    "column_gather": _Column,
    "row": _Row,
    "row_split": _Row,
}


def _computed(arguments: Any) -> Any:
    """Arguments that need a gradient as a step computes them: no leaves, whose gradient may stay a part."""
    views: dict[int, Tensor] = {}

    def view(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.requires_grad or not x.is_leaf:
            return x
        return views.setdefault(id(x), x.view_as(x))

    return tree_map(view, arguments)


def left_on(module: nn.Module) -> dict[str, Tensor]:
    """What a run left on the modules as attributes, which others may read: an auxiliary loss, attention maps."""
    held = ((f"{name}.{key}", x) for name, child in module.named_modules() for key, x in own_attributes(child).items())
    named = ((f"{key} {i}", x) for key, tree in held for i, x in enumerate(tree_leaves(tree)))
    return {name: x for name, x in named if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad}


def owner_of(module: nn.Module, parameter: str) -> nn.Module:
    """The submodule that holds a parameter."""
    return module.get_submodule(parameter.rpartition(".")[0])


def floating_in(tree: Any, given: Any = None) -> list[Tensor]:
    """The tensors of `tensors_anywhere_in` that are of floating-point numbers."""
    return [x for x in tensors_anywhere_in(tree, given) if x.is_floating_point()]
