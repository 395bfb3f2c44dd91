"""Whether the shards of a block compute what the whole block does, by simulated ranks: outputs, gradients, regions."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import Call
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.numbers import reads_outside
from lightning_megatp.auto_plan.simulate import BlockPlan, Ranks, SimulatedRank, floating_in, left_on, owner_of
from lightning_megatp.auto_plan.thin import LARGE, ThinLinear, block_copy, concrete_call
from lightning_megatp.tensor.lineage import trace_regions
from lightning_megatp.tensor.user_functions import functions_take_whole

TOLERANCE = 1e-9
"""How far a float64 result may be off, relative to the largest entry; sums in another order differ by 1e-13 or less."""

_FELT = 1e-6
"""How large the largest entry of a gradient has to be, for a comparison to tell it from another."""


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
    received: int = 0
    """Numbers that a rank gets from others in forwards."""

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


class Gradients:
    """The gradients of a block's parameters, from its next backward. Of large ones no more is kept than two products
    with random vectors, by which they can be compared, and added up.

    Args:
        module: the block.
        cut: parameters of which it has a part.
    """

    def __init__(self, module: nn.Module, cut: Collection[str] = ()) -> None:
        self._parameters = dict(module.named_parameters())
        self._products: dict[str, Tensor] = {}
        for name, p in self._parameters.items():
            if p.numel() >= LARGE and p.dim() > 1 and p.requires_grad and name not in cut:
                p.register_post_accumulate_grad_hook(functools.partial(self._keep_products, name))

    def _keep_products(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad.flatten(1), None
        left, right = (
            torch.randn(n, generator=torch.Generator().manual_seed(i), dtype=grad.dtype)
            for i, n in enumerate(grad.shape)
        )
        self._products[name] = torch.cat([left @ grad, grad @ right])

    def by_name(self) -> dict[str, Tensor | None]:
        """Name -> gradient, or these products."""
        return {name: self._products.get(name, p.grad) for name, p in self._parameters.items()}


class Reference:
    """A whole block's results, to be compared with several plans.

    Args:
        twin: from `thin_copy`.
        call: what a step calls it with.
        train: the mode to run it in.
    """

    def __init__(self, twin: nn.Module, call: Call, train: bool = True) -> None:
        self.twin, self.call, self.train = twin, call, train
        whole = block_copy(twin, train)
        gradients = Gradients(whole)
        own = concrete_call(call, seed=0, noise=0.1)
        given = floating_in((own.args, own.kwargs))
        with torch.enable_grad(), functions_take_whole(), exact():
            self.outputs = floating_in(whole(*own.args, **own.kwargs), (own.args, own.kwargs))
            self.left = left_on(whole)
            self.outputs += self.left.values()
        self.functions = {name for name, child in _thin(whole) if child.is_function}
        """Layers by whose weights it calls `F.linear`."""
        self.other_biases = {name for name, child in _thin(whole) if child.has_other_bias}
        if not self.outputs:
            raise ValueError("it returns no floating-point numbers that could be compared")
        self.cotangents = [torch.randn_like(y) for y in self.outputs]
        if not all(bool(y.isfinite().all()) for y in self.outputs):
            raise NotFinite(whole)
        _backward(self.outputs, self.cotangents)
        self.outputs = [y.detach() for y in self.outputs]  # a graph would keep the copy
        self.left = {name: y.detach() for name, y in self.left.items()}
        self.inputs = [x.grad for x in given]
        self.parameters = gradients.by_name()

    def reads(self, numbers: Collection[str]) -> set[str]:
        """Which of these attributes the block's code reads; their names are behind those of their modules."""
        whole = block_copy(self.twin, self.train)
        with reads_outside(whole, numbers, ()) as read:
            self._run(whole)
        return read

    def feels(self, layer: str) -> bool | None:
        """Whether its results depend on a layer's weights, as far as a comparison would tell: scores do nothing to a
        softmax that a mask has decided. None of a layer that it does not run."""
        held = [grad for name, grad in self.parameters.items() if name.rpartition(".")[0] == layer]
        grads = [grad for grad in held if grad is not None and grad.numel()]
        return any(float(grad.abs().max()) > _FELT for grad in grads) if grads else None

    def uses(self, layer: str) -> bool:
        """Whether what a linear layer makes goes anywhere, whatever its values: the queries of tokens that the block
        does not return don't."""
        whole = block_copy(self.twin, self.train)
        child = whole.get_submodule(layer)
        assert isinstance(child, ThinLinear)
        child.left.data.fill_(math.nan)
        return not all(bool(y.isfinite().all()) for y in (*self._run(whole), *left_on(whole).values()))

    def _run(self, whole: nn.Module) -> list[Tensor]:
        own = concrete_call(self.call, seed=0, noise=0.1)
        with functions_take_whole(), exact():
            return floating_in(whole(*own.args, **own.kwargs), (own.args, own.kwargs))

    def compare(self, plan: BlockPlan, tp: int) -> Outcome:
        """Run the shards of a plan, and compare outputs and every gradient."""
        ranks = Ranks(tp)
        shards = [SimulatedRank(self.twin, plan, ranks, rank, self.train) for rank in range(tp)]
        calls = [concrete_call(self.call, seed=0, noise=0.1) for _ in range(tp)]
        given = [floating_in((call.args, call.kwargs)) for call in calls]
        with functions_take_whole(), exact():
            error = ranks.run(lambda rank: shards[rank].run(calls[rank]))
        if error is not None:
            return Outcome(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        outcome = Outcome(summed=ranks.summed, received=ranks.received)
        for rank in shards:
            outcome.error = outcome.error or self._compare_outputs(rank, outcome)
        if outcome.error is None:
            outcome.error = _crossing(shards[0].outputs, shards[0].module, given[0])
            if outcome.error is None and any(rank.context.misplaced for rank in shards):
                outcome.error = "random numbers are drawn for whole values and for parts of others"
            outcome.misplaced = outcome.error is not None
        if outcome.error is None:
            gradients = [Gradients(rank.module, rank.cuts) for rank in shards]
            _backward(shards[0].outputs, self.cotangents)
            self._compare_gradients(shards, gradients, given, outcome)
        outcome.gathers = dict(shards[0].context.gathers)
        return outcome

    def _compare_outputs(self, rank: SimulatedRank, outcome: Outcome) -> str | None:
        if rank.left.keys() != self.left.keys():
            return "it leaves other attributes"
        if [y.shape for y in rank.outputs] != [y.shape for y in self.outputs]:
            shapes = [tuple(y.shape) for y in rank.outputs], [tuple(y.shape) for y in self.outputs]
            return f"its outputs have the shapes {shapes[0]}, and should have {shapes[1]}"
        for i, (found, wanted) in enumerate(zip(rank.outputs, self.outputs, strict=True)):
            outcome.errors[f"output {i}"] = max(outcome.errors.get(f"output {i}", 0.0), _difference(found, wanted))
        return _worst(outcome.errors)

    def _compare_gradients(
        self,
        shards: Sequence[SimulatedRank],
        of_ranks: Sequence[Gradients],
        given: Sequence[list[Tensor]],
        outcome: Outcome,
    ) -> None:
        by_rank = [[x.grad for x in inputs] for inputs in given]
        for i, wanted in enumerate(self.inputs):
            outcome.errors[f"gradient of input {i}"] = _difference(_total([grads[i] for grads in by_rank]), wanted)
        held = [gradients.by_name() for gradients in of_ranks]
        for name, wanted in self.parameters.items():
            full: Tensor | None = None
            for rank, parameters in zip(shards, held, strict=True):
                grad = parameters[name]
                if grad is not None and wanted is not None:
                    full = torch.zeros_like(wanted) if full is None else full
                    rank.add(full, name, grad)
            outcome.errors[f"gradient of {name}"] = _difference(full, wanted)
        outcome.error = _worst(outcome.errors)


def _thin(module: nn.Module) -> list[tuple[str, ThinLinear]]:
    return [(name, child) for name, child in module.named_modules() if isinstance(child, ThinLinear)]


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
        if leaf in names and not isinstance(owner_of(module, names[leaf]), ThinLinear) and len(regions) > 1:
            return f"`{names[leaf]}` is used both where values are whole and where they are split"
    return None


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
