"""Which blocks of a model recompute, and how: installed once per model, chosen by each Trainer."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_megatp.detour import Detour
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.units import find_units
from lightning_megatp.recompute.core import recomputing_core
from lightning_megatp.recompute.full import FullRecompute, InputShares
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.shim.autograd import checkpoint_region, current_backward_node, functorch_is_active
from lightning_megatp.shim.compiler import entry_of, is_compiled
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.context import TensorContext

Call = functools.partial[Any]


def blocks_to_recompute(module: nn.Module) -> list[str]:
    """The blocks of a model: of what its lists hold, the modules that have parts, and stand there with others of their
    class or alone. Embeddings, norms and heads are no blocks."""
    lists: dict[str, dict[str, nn.Module]] = {}
    for name in find_units(module):
        if (outer := _outermost_list(module, name)) is not None:
            lists.setdefault(outer, {})[name] = module.get_submodule(name)
    found = []
    for blocks in lists.values():  # a list of lists is one: pairs of an attention and an MLP
        classes = Counter(map(type, blocks.values()))
        alone = classes.total() == 1
        found += [name for name, x in blocks.items() if any(x.children()) and (classes[type(x)] > 1 or alone)]
    return found


def _outermost_list(module: nn.Module, name: str) -> str | None:
    """The name of the outermost list that holds a unit, if nothing but lists is between them."""
    outer = None
    while name := name.rpartition(".")[0]:
        if not isinstance(module.get_submodule(name), (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            break
        outer = name
    return outer


def recompute_blocks(parallel: ParallelModule, options: RecomputeOptions) -> None:
    """Prepare the blocks of a model, unless an earlier Trainer has.

    Raises:
        ValueError: it has no blocks, or was cut into pipeline stages without.
    """
    if options.kind == "none" or parallel.recomputation is not None:
        return
    if parallel.pipeline is not None:
        raise ValueError(
            "MegaTPStrategy: this LightningModule was already cut into pipeline stages by an earlier Trainer, with"
            ' recompute="none". Build a new module and load the checkpoint into it, or give `recompute` to the first'
            " Trainer too."
        )
    parallel.recomputation = Recomputation(parallel.module, parallel.context)


class Recomputation:
    """The blocks of a model, whose forwards it stands in for.

    Made before a pipeline intercepts its units: what is recomputed is the forward alone. Hooks, and what a pipeline
    does between units, happen once.

    Args:
        module: the whole, its layers already swapped.
        context: of the parallel layers.

    Raises:
        ValueError: the model has no blocks.
    """

    def __init__(self, module: nn.Module, context: TensorContext) -> None:
        shares = InputShares(context)
        names = blocks_to_recompute(module)
        if not names:
            raise ValueError(
                "MegaTPStrategy: `recompute` runs the blocks of a model again, and this one has none: no nn.ModuleList"
                " holds several modules of one class that have parts (a nn.Sequential in it is taken for a list). Make"
                ' its repeated blocks a class of their own, or use recompute="none".'
            )
        self.options = RecomputeOptions()
        self._divided = context.size > 1
        self._blocks = {name: _Block(module.get_submodule(name), context, shares) for name in names}

    def choose(self, options: RecomputeOptions, stage_of_unit: Mapping[str, int] | None = None) -> None:
        """Decide for every block.

        Args:
            options: what the user asks for.
            stage_of_unit: the pipeline stages, in the order of execution.

        Raises:
            ValueError: more blocks per stage than there are.
        """
        ranked: list[tuple[str, int]] = []
        counts: Counter[int] = Counter()
        order = [name for name in stage_of_unit or self._blocks if name in self._blocks]
        for name in order:
            stage = 0 if stage_of_unit is None else stage_of_unit[name]
            ranked.append((name, counts[stage]))
            counts[stage] += 1
        if options.kind != "none" and not ranked:
            raise ValueError(
                f"MegaTPStrategy: the step calls the parts of {next(iter(self._blocks))} and its like, and never their"
                ' forward, so there is nothing to run again. Call the blocks themselves, or use recompute="none".'
            )
        most = max(counts.values(), default=0)
        if options.first is not None and options.first > most:
            where = "the model has" if stage_of_unit is None else "no pipeline stage has more than"
            raise ValueError(
                f'MegaTPStrategy: recompute={{"blocks": {options.first}}}, but {where} {most} blocks. Use a smaller'
                ' number, or "full" for all of them.'
            )
        compiled = [name for name, _ in ranked if self._blocks[name].compiled]
        if options.kind == "selective" and compiled:
            warn_once_per_run(
                f'recompute="selective" leaves {compiled[0]} and its like as they are: they are compiled, and the'
                ' compiler decides what is kept. recompute="full" runs them again as a whole.'
            )
        self.options = options
        kinds = {name: options.of_block(index) for name, index in ranked}
        for name, block in self._blocks.items():
            block.kind = kinds.get(name, "none")

    def warn_if_unused(self) -> None:
        """After a step on the whole model: whether blocks were called at all."""
        chosen = [name for name, block in self._blocks.items() if block.kind != "none"]
        if chosen and not any(self._blocks[name].called for name in chosen):
            warn_once_per_run(
                f"`recompute` has no effect: the step calls the parts of {chosen[0]} and its like, and never their"
                " forward."
            )

    def describe(self) -> str:
        """One line for people."""
        chosen = [name for name, block in self._blocks.items() if block.kind != "none"]
        shown = ", ".join(chosen) if len(chosen) <= 3 else f"{chosen[0]}, ..., {chosen[-1]}"
        count = f"{len(chosen)} of {len(self._blocks)} blocks ({shown})"
        if self.options.kind == "selective":
            return f"Recomputed in backward: the attention core (scores, softmax, dropout) of {count}"
        divided = "; whole inputs are kept in shares, one per tensor rank" if self._divided else ""
        return f"Recomputed in backward: {count}, from their inputs{divided}"


class _Block:
    """One block."""

    def __init__(self, block: nn.Module, context: TensorContext, shares: InputShares) -> None:
        self.kind, self.called, self._context = "none", False, context
        self.compiled = any(map(is_compiled, block.modules()))
        full = FullRecompute(block, shares)
        core = functools.partial(recomputing_core, context)
        self._run: dict[str, Callable[[Call], Any]] = {"full": full, "selective": _plainly if self.compiled else core}
        Detour(block, entry_of(block), self._call)

    def _call(self, call: Call) -> Any:
        self.called = True
        if self.kind == "none" or not self._is_kept(call):
            return call()
        return self._run[self.kind](call)

    def _is_kept(self, call: Call) -> bool:
        """Whether a call keeps activations for a backward that is ours to serve: not in evaluation or a dry run, nor
        inside of the user's own checkpoint, or where one is run again."""
        if not torch.is_grad_enabled() or functorch_is_active():
            return False
        if checkpoint_region() is not None or current_backward_node() is not None:
            return False
        return not any(map(self._context.is_dry, tree_leaves((call.args, call.keywords))))


def _plainly(call: Call) -> Any:
    """The compiler decides what compiled code keeps."""
    return call()
