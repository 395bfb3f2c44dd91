"""Tensor ranks as threads of one process: a block's shards, run in step and compared with the whole block.

The ranks' graphs are joined where they would communicate, so one backward gives the gradient of every shard. Where a
real rank puts its backward collectives is not seen here; the marks of the regions (`tensor.lineage`) are, and they
decide it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.plan.auto.blocks import Call, own_attributes, tensors_in
from lightning_megatp.plan.auto.exact import exact, exact_in_thread
from lightning_megatp.plan.auto.numbers import reads_outside
from lightning_megatp.plan.auto.thin import ThinLinear, concrete_call, copy_of
from lightning_megatp.plan.convolutions import channel_dim, input_ranges, own_groups
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import AttributePlan
from lightning_megatp.plan.ranges import Ranges, everything, length
from lightning_megatp.shim.torch import tree_leaves, weight_norm_of
from lightning_megatp.tensor.collectives import take_ranges
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard, own_features
from lightning_megatp.tensor.functions import Done, couples, done_by_user, operation_name
from lightning_megatp.tensor.lineage import enters_region, trace_regions
from lightning_megatp.tensor.user_functions import functions_take_whole
from lightning_megatp.tensor.weight_norm import weight_of_parts

TOLERANCE = 1e-9
"""Of a float64 result, relative to the largest entry; sums in another order differ by 1e-13 or less."""

_FELT = 1e-6
"""Of a gradient: how large its largest entry has to be, for a comparison to tell it from another."""


@dataclass
class BlockPlan:
    """What is split in one block; names are relative to it."""

    layers: dict[str, LayerPlan] = field(default_factory=dict)
    attributes: list[AttributePlan] = field(default_factory=list)

    def merged(self, other: BlockPlan) -> BlockPlan:
        return BlockPlan({**self.layers, **other.layers}, [*self.attributes, *other.attributes])


@dataclass
class Outcome:
    """How the shards of a block compare with the whole."""

    error: str | None = None
    """What failed; None if all numbers agree."""
    misplaced: bool = False
    """Whether outputs agree, and what failed is where their values are whole and where they are split."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest relative difference of the outputs, and of the gradient of every input and parameter."""
    gathers: dict[str, int] = field(default_factory=dict)
    """Operations that needed all features of a rank's shard, and how often."""
    summed: int = 0
    """How often the ranks added something up, in forwards."""

    @property
    def holds(self) -> bool:
        return self.error is None


class NotFinite(ValueError):
    """A block's outputs are not finite.

    Args:
        ran: the block that was run.
    """

    def __init__(self, ran: nn.Module) -> None:
        super().__init__("its outputs are not finite")
        self.ran = ran


def path(twin: nn.Module, call: Call) -> list[Any]:
    """The operations by which a thin block in training computes a call, and the shapes of what they return."""
    return _watched(twin, call, train=True).found


def done_in(twin: nn.Module, call: Call, train: bool) -> set[Done]:
    """The same operations, each with the user's line that calls it."""
    return _watched(twin, call, train).done


def _watched(twin: nn.Module, call: Call, train: bool) -> _Operations:
    own = concrete_call(call, seed=0, noise=0.1)
    with exact(), _Operations() as seen:
        copy_of(twin, train)(*own.args, **own.kwargs)
    return seen


class _Operations(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.done: set[Done] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), operation_name(func)
        self.found.append((name, [tuple(x.shape) for x in tree_leaves(result) if isinstance(x, Tensor)]))
        if couples(name):
            self.done.add(done_by_user(name))
        return result


class Reference:
    """A whole block's results, to be compared with several plans.

    Args:
        twin: from `thin_copy`.
        call: what a step calls it with.
        train: the mode to run it in.
    """

    def __init__(self, twin: nn.Module, call: Call, train: bool = True) -> None:
        self.twin, self.call, self.train = twin, call, train
        whole = copy_of(twin, train)
        own = concrete_call(call, seed=0, noise=0.1)
        given = _floating((own.args, own.kwargs))
        with torch.enable_grad(), exact():
            self.outputs = _floating(whole(*own.args, **own.kwargs), (own.args, own.kwargs))
            self.left = _left(whole)
            self.outputs += self.left.values()
        if not self.outputs:
            raise ValueError("it returns no floating-point numbers that could be compared")
        self.cotangents = [torch.randn_like(y) for y in self.outputs]
        if not all(bool(y.isfinite().all()) for y in self.outputs):
            raise NotFinite(whole)
        _backward(self.outputs, self.cotangents)
        self.inputs = [x.grad for x in given]
        self.parameters = {name: p.grad for name, p in whole.named_parameters()}

    def reads(self, numbers: Collection[str]) -> set[str]:
        """Which of these attributes the block's code reads; their names are behind those of their modules."""
        whole = copy_of(self.twin, self.train)
        own = concrete_call(self.call, seed=0, noise=0.1)
        with reads_outside(whole, numbers, ()) as read, exact():
            whole(*own.args, **own.kwargs)
        return read

    def feels(self, layer: str) -> bool | None:
        """Whether its results depend on a layer's weights, as far as a comparison would tell: scores do nothing to a
        softmax that a mask has decided. None of a layer that it does not run."""
        held = [grad for name, grad in self.parameters.items() if name.rpartition(".")[0] == layer]
        grads = [grad for grad in held if grad is not None and grad.numel()]
        return any(float(grad.abs().max()) > _FELT for grad in grads) if grads else None

    def compare(self, plan: BlockPlan, tp: int) -> Outcome:
        """Run the shards of a plan, and compare outputs and every gradient."""
        ranks = Ranks(tp)
        shards = [_Rank(self.twin, plan, ranks, rank, self.train) for rank in range(tp)]
        calls = [concrete_call(self.call, seed=0, noise=0.1) for _ in range(tp)]
        given = [_floating((call.args, call.kwargs)) for call in calls]
        with functions_take_whole(), exact():
            error = ranks.run(lambda rank: shards[rank].run(calls[rank]))
        if error is not None:
            return Outcome(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        outcome = Outcome(summed=ranks.summed)
        for rank in shards:
            outcome.error = outcome.error or self._compare_outputs(rank, outcome)
        if outcome.error is None:
            outcome.error = _crossing(shards[0].outputs, shards[0].module, given[0])
            if outcome.error is None and any(rank.context.misplaced for rank in shards):
                outcome.error = "random numbers are drawn for whole values and for parts of others"
            outcome.misplaced = outcome.error is not None
        if outcome.error is None:
            _backward(shards[0].outputs, self.cotangents)
            self._compare_gradients(shards, given, outcome)
        outcome.gathers = dict(shards[0].context.gathers)
        return outcome

    def _compare_outputs(self, rank: _Rank, outcome: Outcome) -> str | None:
        if rank.left.keys() != self.left.keys():
            return "it leaves other attributes"
        if [y.shape for y in rank.outputs] != [y.shape for y in self.outputs]:
            shapes = [tuple(y.shape) for y in rank.outputs], [tuple(y.shape) for y in self.outputs]
            return f"its outputs have the shapes {shapes[0]}, and should have {shapes[1]}"
        for i, (found, wanted) in enumerate(zip(rank.outputs, self.outputs, strict=True)):
            outcome.errors[f"output {i}"] = max(outcome.errors.get(f"output {i}", 0.0), _difference(found, wanted))
        return _worst(outcome.errors)

    def _compare_gradients(self, shards: Sequence[_Rank], given: Sequence[list[Tensor]], outcome: Outcome) -> None:
        by_rank = [[x.grad for x in inputs] for inputs in given]
        for i, wanted in enumerate(self.inputs):
            outcome.errors[f"gradient of input {i}"] = _difference(_total([grads[i] for grads in by_rank]), wanted)
        held = [dict(rank.module.named_parameters()) for rank in shards]
        for name, wanted in self.parameters.items():
            full: Tensor | None = None
            for rank, parameters in zip(shards, held, strict=True):
                grad = parameters[name].grad
                if grad is not None and wanted is not None:
                    full = torch.zeros_like(wanted) if full is None else full
                    rank.add(full, name, grad)
            outcome.errors[f"gradient of {name}"] = _difference(full, wanted)
        outcome.error = _worst(outcome.errors)


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
        order = torch.tensor([first[index] for index in sorted(first)])
        return _Mark.apply(torch.cat(parts, dim).index_select(dim, order), "whole", "tensor")

    def reduce(self, x: Tensor) -> Tensor:
        parts = self.ranks.share(self.rank, x)
        self.ranks.summed += self.rank == 0
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


class _Rank:
    """One simulated rank's shards of a block."""

    def __init__(self, twin: nn.Module, plan: BlockPlan, ranks: Ranks, rank: int, train: bool) -> None:
        self.context, self.rank = SimulatedContext(ranks, rank), rank
        self.module = copy_of(twin, train)
        self.cuts: dict[str, tuple[int, Ranges]] = {}
        for name, layer in plan.layers.items():
            child = self.module.get_submodule(name)
            if isinstance(child, ThinLinear):
                self._cut(name, child, layer)
            else:
                self._cut_convolution(name, child, layer)
        for attribute in plan.attributes:
            setattr(self.module.get_submodule(attribute.module), attribute.attribute, attribute.by_rank[rank])

    def run(self, call: Call) -> None:
        with exact_in_thread(self.context.draw):
            result = self.module(*call.args, **call.kwargs)
            self.left = _left(self.module)
            outputs = [*_floating(result, (call.args, call.kwargs)), *self.left.values()]
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
        for leaf in ("left", "bias") if column else ("right",):
            parameter = child._parameters[leaf]
            if parameter is not None:
                child._parameters[leaf] = nn.Parameter(take_ranges(parameter.detach(), 0, ranges).clone())
                self.cuts[f"{name}.{leaf}"] = 0, ranges
        child.split = _SPLITS[style](layer, self.context)

    def _cut_convolution(self, name: str, child: Any, layer: LayerPlan) -> None:
        forward = _Convolution(child, layer, self.context.exchange)  # knows the numbers of the whole
        for split in layer.splits:
            ranges, whole = split.by_rank[self.rank], child.get_parameter(split.leaf)
            holder, leaf = _owner(child, split.leaf), split.leaf.rpartition(".")[2]
            holder._parameters[leaf] = nn.Parameter(take_ranges(whole.detach(), split.dim, ranges).clone())
            self.cuts[f"{name}.{split.leaf}"] = split.dim, ranges
        child.__dict__["forward"] = forward


class _Column:
    def __init__(self, layer: LayerPlan, context: SimulatedContext) -> None:
        self.layer, self.context, self.exchange = layer, context, context.exchange
        size = max(stop for ranges in layer.by_rank for _, stop in ranges)
        self.layout = FeatureLayout(-1, layer.by_rank, size, context) if layer.global_sizes else None  # type: ignore[arg-type]

    def __call__(self, linear: ThinLinear, x: Tensor) -> Tensor:
        x = x.whole("linear") if isinstance(x, FeatureShard) else x
        self.context.open = self.layer.style.style == "column" and self.layout is None
        y = linear.compute(self.exchange.copy(x))
        if self.layout is not None:
            return FeatureShard.wrap(y, self.layout)
        if self.layer.style.style == "column_gather":
            return self.exchange.gather(y, y.dim() - 1, self.layer.by_rank)
        return y


class _Row:
    def __init__(self, layer: LayerPlan, context: SimulatedContext) -> None:
        self.layer, self.context, self.exchange = layer, context, context.exchange
        self.size = max(stop for ranges in layer.by_rank for _, stop in ranges)

    def __call__(self, linear: ThinLinear, x: Tensor) -> Tensor:
        own = self.layer.by_rank[self.exchange.rank]
        if self.layer.style.style == "row_split" or self.layer.global_sizes:
            x = self._split(x)
        if x.shape[-1] != length(own):
            raise ValueError(f"a row layer of {length(own)} features on this rank gets {x.shape[-1]}")
        self.context.open = False
        y = self.exchange.reduce(linear.compute(x, bias=False))
        return y if linear.bias is None else y + linear.bias

    def _split(self, x: Tensor) -> Tensor:
        if isinstance(x, FeatureShard):
            found = own_features(x, self.layer.by_rank, self.size)
            if found is not None:
                return found
            x = x.whole("linear")
        return self.exchange.scatter(x, x.dim() - 1, self.layer.by_rank) if x.shape[-1] == self.size else x


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
        """Of g and v, or of the module that holds them."""
        g, v = given if len(given) == 2 else (given[0].weight_g, given[0].weight_v)
        assert self.normed is not None
        return weight_of_parts(g, v, self.normed.dim, self.direction.dim, self.exchange)


_SPLITS: dict[str, Callable[[LayerPlan, SimulatedContext], Any]] = {
    "column": _Column,
    "column_gather": _Column,
    "row": _Row,
    "row_split": _Row,
}


def _crossing(outputs: Sequence[Tensor], module: nn.Module, given: Sequence[Tensor]) -> str | None:
    """Whether values slip into or out of a region beside its layers, where real ranks would refuse or go wrong."""
    lineage = trace_regions(outputs)
    if lineage.crossings:
        found, used = sorted(lineage.crossings)[0]
        return f"a {found} value is used where values are {used}"
    if any(lineage.regions.get(id(x), {"whole"}) != {"whole"} for x in given):
        return "an input is used where values are split"
    names = {id(p): name for name, p in module.named_parameters()}
    for leaf, regions in lineage.regions.items():
        if leaf in names and not isinstance(_owner(module, names[leaf]), ThinLinear) and len(regions) > 1:
            return f"`{names[leaf]}` is used both where values are whole and where they are split"
    return None


def _left(module: nn.Module) -> dict[str, Tensor]:
    """What a run left on the modules as attributes, which others may read: an auxiliary loss, attention maps."""
    held = ((f"{name}.{key}", x) for name, child in module.named_modules() for key, x in own_attributes(child).items())
    named = ((f"{key} {i}", x) for key, tree in held for i, x in enumerate(tree_leaves(tree)))
    return {name: x for name, x in named if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad}


def _owner(module: nn.Module, parameter: str) -> nn.Module:
    return module.get_submodule(parameter.rpartition(".")[0])


def _floating(tree: Any, given: Any = None) -> list[Tensor]:
    return [x for x in tensors_in(tree, given) if x.is_floating_point()]


def _backward(outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if y.requires_grad]
    torch.autograd.backward([y for y, _ in pairs], [c for _, c in pairs])


def _total(grads: Sequence[Tensor | None]) -> Tensor | None:
    held = [grad for grad in grads if grad is not None]
    return sum(held[1:], held[0]) if held else None


def _difference(found: Tensor | None, wanted: Tensor | None) -> float:
    if found is None or wanted is None:
        other = found if wanted is None else wanted
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    if not found.numel():
        return 0.0
    difference = float(((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)).detach())
    return float("inf") if difference != difference else difference


def _worst(errors: dict[str, float]) -> str | None:
    name, error = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
    return f"{name} is off by {error:.1e} of its largest entry" if error > TOLERANCE else None
