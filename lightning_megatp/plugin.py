"""ParallelismPlugin: from a plan and a LightningModule to its parallel form. The class a user subclasses."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import find_blocks
from lightning_megatp.auto_plan.discover import discover, keep_whole, look, suit_stages
from lightning_megatp.auto_plan.numbers import reads_outside
from lightning_megatp.batches.example import Example, untouched
from lightning_megatp.building.building import Building
from lightning_megatp.calls import around_forward
from lightning_megatp.mesh import ParallelMesh, alone
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.observed import used_beside
from lightning_megatp.plan.attributes import undivided_counts
from lightning_megatp.plan.convolutions import is_convolution, is_weight_normed
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.plan.styles import StyleLike, as_mapping, read_plan
from lightning_megatp.plan.units import find_units
from lightning_megatp.random_states import random_state_kept
from lightning_megatp.tensor.attention import ParallelAttention, no_fused_paths
from lightning_megatp.tensor.attention_maps import return_whole_maps
from lightning_megatp.tensor.bare import bare_layer, run_as_step
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.conv1d import column_kind, row_kind
from lightning_megatp.tensor.convolution import convolution_kind
from lightning_megatp.tensor.experts import expert_kind
from lightning_megatp.tensor.layers import (
    HiddenParallelEmbedding,
    HiddenParallelEmbeddingBag,
    ParallelLayer,
    VocabParallelEmbedding,
    of_subclass,
)
from lightning_megatp.tensor.loading import load_whole_values
from lightning_megatp.tensor.outside import LayerParameters
from lightning_megatp.tensor.parameters import shard_
from lightning_megatp.tensor.sequence_hooks import (
    SequenceEntry,
    leave_sequence,
    leave_whole,
    unwrap_tokens,
    whole_result,
    wrap_tokens,
)

_KEPT = "_lightning_megatp"
"""Attribute of the LightningModule that keeps its ParallelModule, so that another Trainer can go on with it."""


class ParallelismPlugin:
    """Splits a model over the tensor ranks by a plan.

    Override one step to change it: `resolve` (what is split where), `swap` (how one layer is replaced),
    `finalize_gradients` (what is summed at the end of backward).

    Args:
        plan: `{pattern: style}`, see `lightning_megatp.plan.styles`; "auto" is short for `{"**": "auto"}`. None leaves
            every layer whole on every rank.
        strict: raise where set-up would otherwise only warn about the plan.
    """

    def __init__(self, plan: Mapping[str, StyleLike] | str | None = None, strict: bool = False) -> None:
        self.plan = as_mapping(plan)
        read_plan(self.plan)  # what is misspelt is an error where it is written
        self.strict = strict

    def parallelize(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        device: torch.device,
        sequence_parallel: bool = True,
        example: Example | None = None,
        building: Building | None = None,
        waiting: Collection[int] = (),
        divided: bool = False,
    ) -> ParallelModule:
        """Give every rank rank 0's values, then swap the planned layers, in place.

        Args:
            module: the whole model, the same structure on every rank. One that was swapped before, by the same plan at
                the same tp, is taken as it is.
            device: where the parameters go, shard by shard.
            example: calls of the user's step on one batch; asked for if the plan leaves layers to `auto`.
            building: knows the parameters that have no values yet; they are cut now, and made later.
            waiting: ids of parameters that go back to the host's memory, once they are cut.
            divided: whether zero > 0 will divide what is left of them.

        Raises:
            ValueError: the plan does not fit the model (see `plan.resolve.resolve`).

        Communication: one broadcast over the world of every parameter and buffer that has values.
        """
        before = self.split_form(module)
        if before is not None:
            before.device = device
            return self._again(before, mesh, sequence_parallel)
        plan = self.resolve(module, mesh.size("tp"), sequence_parallel)
        if plan.open and mesh.size("tp") > 1:
            apart = mesh.size("pp") > 1 or divided  # a weight may not be where a head is that is no layer
            plan = self._fitting_the_step(module, plan, sequence_parallel, example, apart)
            if mesh.size("pp") > 1 and not plan.compiled:
                suit_stages(plan, module, find_units(module))
            gc.collect()  # a graph that lived on would remember the shapes of parameters before they are split
        elif mesh.size("tp") > 1:
            self._warn_undivided(plan, dict(module.named_modules()))
        if mesh.size("tp") > 1 and not plan.layers:
            self._warn_whole(module, mesh.size("tp"))
            plan.sequences, plan.token_local = {}, []  # between layers that aren't there
        if mesh.size("tp") > 1 and plan.whole_sequences:
            self._say(
                f"the plan has `sequence` for {', '.join(plan.whole_sequences[:4])}, which meets compiled code, where"
                " shards of a sequence can't go. There, tokens stay whole on every tensor rank. Don't compile these"
                " modules, or drop the style."
            )
        context = TensorContext(mesh.group("tp"))
        specs = plan.parameters if mesh.size("tp") > 1 else {}
        self._place_values(module, mesh, device, specs, building, waiting)
        if mesh.size("tp") > 1:
            self.swap_all(module, plan, context, whole_between=mesh.size("pp") > 1)
        parallel = ParallelModule(module, plan, context, specs)
        parallel.device = device
        load_whole_values(module, parallel.own_spec)
        module.__dict__[_KEPT] = parallel
        return parallel

    def _warn_undivided(self, plan: ParallelPlan, modules: dict[str, nn.Module]) -> None:
        for attribute, layer in list(undivided_counts(plan, modules).items())[:1]:
            self._say(
                f"`{layer}` is split by heads, whose number the forward beside it reads as `{attribute}`, and the plan"
                " does not divide that. If it shapes tensors by the number, it makes other heads of a rank's part,"
                f" without an error. Then add `{attribute}: divide` to the plan; `verify=True` compares the first"
                " batch."
            )

    def split_form(self, module: nn.Module) -> ParallelModule | None:
        """What an earlier `parallelize` made of this model; None if it is whole."""
        kept: ParallelModule | None = module.__dict__.get(_KEPT)
        return kept

    def resolve(self, module: nn.Module, tp: int, sequence_parallel: bool) -> ParallelPlan:
        """What is split where; pure."""
        return resolve(self.plan, module, tp, sequence_parallel)

    def discover(self, module: nn.Module, plan: ParallelPlan, example: Example | None) -> ParallelPlan:
        """Plan what the plan leaves to `auto`, on global rank 0, for all.

        Args:
            module: the whole model.
            plan: what `resolve` made.
            example: a batch to call the user's step on. Every rank does, since a step may communicate.

        Raises:
            ValueError: with `strict`, where something stays whole.

        Communication: one broadcast of the plan over the world.
        """
        steps = () if example is None else example.calls()
        kinds, problems = look(module, plan, steps, tuple if example is None else example.uncut_calls)
        if not steps:
            problems.append("no batch" if example is None else example.problem)
        found: list[Any] = [None, problems]
        if dist.get_rank() == 0:
            with alone(), random_state_kept(), untouched(module):
                problems += discover(module, plan.tp, kinds, plan).problems
            found = [plan, problems]
        dist.broadcast_object_list(found, src=0)
        plan, problems = found
        if problems and self.strict:
            raise ValueError(f"MegaTPStrategy: {'; '.join(problems)}. (strict=True)")
        for problem in problems:
            warn_once_per_run(problem)
        return plan

    def _fitting_the_step(
        self, module: nn.Module, plan: ParallelPlan, sequence_parallel: bool, example: Example | None, apart: bool
    ) -> ParallelPlan:
        """Plan what is left to `auto`, and again without what the step's code outside of blocks would notice: weights
        that it uses beside their layers, numbers of heads that it counts.

        Args:
            apart: whether a table of embeddings can't be split where it is also an output layer's weight.

        Communication: see `discover`, and one broadcast of names; twice if numbers are read.
        """
        mine = {attribute.name for attribute in plan.attributes}
        plan = self.discover(module, plan, example)
        if plan.compiled:
            return plan
        divided = {attribute.name for attribute in plan.attributes} - mine
        with reads_outside(module, divided, find_blocks(module)) as read:
            weights = used_beside(module, plan.outermost(), example)
        found = [sorted(weights), sorted(read)]
        dist.broadcast_object_list(found, src=0)
        if found[1]:
            plan = self.resolve(module, plan.tp, sequence_parallel)
            plan.read_outside = set(found[1])
            plan = self.discover(module, plan, example)
        keep_whole(plan, module, found[0] if apart else [name for name in found[0] if name not in plan.heads])
        for name, layer in plan.layers.items():
            if f"{name}.weight" in plan.heads:
                plan.layers[name] = replace(layer, by_function=True)
        return plan

    def swap(self, layer: nn.Module, plan: LayerPlan, context: TensorContext, region: Region | None) -> ParallelLayer:
        """Turn one layer into its parallel class, in place; its parameters are cut already."""
        style = plan.style.style
        common: dict[str, Any] = {"label": plan.name, "region": region}
        if plan.bare is not None:
            layer = bare_layer(layer, plan.bare, context)
        splits = {split.leaf: (split.dim, split.by_rank) for split in plan.splits}
        if is_convolution(layer) or is_weight_normed(layer):
            return convolution_kind(layer).adopt(layer, context, plan.by_rank, splits=splits, **common)
        if style in ("column", "column_gather"):
            gather = style == "column_gather"
            sizes: dict[str, Any] = {"gather_output": gather, "global_sizes": plan.global_sizes, "lazy": plan.lazy}
            return column_kind(layer).adopt(layer, context, plan.by_rank, **sizes, **common)
        if style in ("row", "row_split"):
            options: dict[str, Any] = {"split_input": style == "row_split", "sequence_dim": plan.sequence_dim}
            options["global_sizes"] = plan.global_sizes
            return row_kind(layer).adopt(layer, context, plan.by_rank, **options, **common)
        if style == "attention":
            return ParallelAttention.adopt(layer, context, plan.by_rank, sequence_dim=plan.sequence_dim, **common)
        if style == "experts":
            return expert_kind(layer).adopt(
                layer, context, plan.by_rank, splits=splits, stack_layout=plan.stack, **common
            )
        kind: type[nn.Module] = VocabParallelEmbedding if style == "vocab" else HiddenParallelEmbedding
        if isinstance(layer, nn.EmbeddingBag):
            kind = HiddenParallelEmbeddingBag
        return of_subclass(kind, layer).adopt(layer, context, plan.by_rank, **common)

    def finalize_gradients(self, parallel: ParallelModule) -> None:
        """After backward and the data-parallel reduction: sum what is partial over the tensor ranks."""
        parallel.partial.sum()

    def _place_values(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        device: torch.device,
        specs: Mapping[str, Any],
        building: Building | None,
        waiting: Collection[int],
    ) -> None:
        for name, tensor in _tensors(module):
            if not tensor.is_meta:
                tensor.data = _of_rank_zero(tensor.data.to(device))
            elif building is None or tensor not in building:
                raise ValueError(
                    f"MegaTPStrategy: `{name}` is on the meta device. Create the layers with values, in `__init__`, or"
                    ' in `configure_model` without `device="meta"`.'
                )
            if name in specs:
                assert isinstance(tensor, nn.Parameter)
                shard_(tensor, specs[name], mesh.rank("tp"))
            if id(tensor) in waiting:
                tensor.data = tensor.data.cpu()

    def swap_all(self, module: nn.Module, plan: ParallelPlan, context: TensorContext, whole_between: bool) -> None:
        """Swap the planned layers, whose parameters are cut already, in place.

        Args:
            whole_between: let `sequence` blocks return whole sequences, since pipeline stages send whole values.
        """
        modules = {plain_name(name): child for name, child in module.named_modules()}
        self._watch_tied(module, plan, context)
        regions = _regions(plan)
        for layer in plan.layers.values():
            region = None if layer.region is None else regions[layer.region]
            swapped = self.swap(modules[layer.owner], layer, context, region)
            swapped.whole_parameters = frozenset(layer.whole)
        run_as_step(module, [modules[layer.owner] for layer in plan.layers.values() if layer.by_function], context)
        no_fused_paths(module)
        return_whole_maps(module)
        for attribute in plan.attributes:
            setattr(modules[attribute.module], attribute.attribute, attribute.by_rank[context.rank])
        for name, style in plan.sequences.items():
            modules[name].register_forward_pre_hook(SequenceEntry(name, style, context), with_kwargs=True)
            if whole_between:
                modules[name].register_forward_hook(leave_sequence)
        if whole_between and context.feature_shards:
            for name in find_units(module):
                unit = module.get_submodule(name)
                unit.register_forward_hook(leave_whole)  # of compiled units, and of copies
                around_forward(unit, whole_result)
        if plan.open:
            context.kept_whole |= _used_anywhere(module, plan)
        for name in plan.token_local:
            modules[name].register_forward_pre_hook(unwrap_tokens, with_kwargs=True)
            modules[name].register_forward_hook(wrap_tokens, with_kwargs=True)

    def _watch_tied(self, module: nn.Module, plan: ParallelPlan, context: TensorContext) -> None:
        """A split parameter may also be an attribute of a module that is no layer (the bias of a head)."""
        for name in plan.parameters:
            owner = module.get_submodule(name.rpartition(".")[0])
            if (
                not isinstance(owner, (nn.Linear, nn.Embedding, nn.EmbeddingBag))
                and plain_name(name.rpartition(".")[0]) not in plan.layers
            ):
                owner.__dict__["_parameters"] = LayerParameters(owner._parameters, context, owner)

    def _again(self, before: ParallelModule, mesh: ParallelMesh, sequence_parallel: bool) -> ParallelModule:
        if before.context.size != mesh.size("tp") or before.context.rank != mesh.rank("tp"):
            raise ValueError(
                f"MegaTPStrategy: this LightningModule was already split for tp={before.context.size} by an earlier"
                f" Trainer, and now tp={mesh.size('tp')} is asked for. Build a new one and load the checkpoint into it."
            )
        same = before.plan.source == self.plan and before.plan.sequence_parallel == sequence_parallel
        if self.plan and mesh.size("tp") > 1 and not same:
            raise ValueError(
                "MegaTPStrategy: this LightningModule was already split by an earlier Trainer, with another plan or"
                " another `sequence_parallel`. Give the same ones, or build a new module."
            )
        return before

    def _warn_whole(self, module: nn.Module, tp: int) -> None:
        named = ((plain_name(name), child) for name, child in module.named_modules())
        found = {name: type(child) for name, child in named if isinstance(child, nn.Linear)}
        linears = [name for name, kind in found.items() if kind is nn.Linear]
        text = (
            f"tp={tp}, but the plan splits nothing: every tensor rank holds and computes the whole model, so the"
            " numbers are right and nothing is saved."
        )
        if linears:
            self._say(f"{text} Give plan={{pattern: style}} for its linear layers, e.g. {', '.join(linears[:4])}.")
        elif found:
            name, kind = next(iter(found.items()))
            self._say(
                f"{text} Its linear layers are of a class of their own (`{name}` is a {kind.__name__}), and a layer is"
                " split only if it computes what `nn.Linear` does. Use that class, or tp=1, and these devices for dp or"
                " pp."
            )
        else:
            self._say(
                f"{text} The model has no `nn.Linear`. If the plan can't name anything else (embeddings, convolutions),"
                " use tp=1, and these devices for dp or pp."
            )

    def _say(self, text: str) -> None:
        if self.strict:
            raise ValueError(f"MegaTPStrategy: {text} (strict=True)")
        warn_once_per_run(text)


def _used_anywhere(module: nn.Module, plan: ParallelPlan) -> set[int]:
    """id of the whole parameters that may be used on whole values as well as on shards, so that their gradients are
    completed at each use: those outside of `sequence` blocks (a last norm), and those that a block uses twice."""
    inside = tuple(f"{name}." for name in plan.sequences)
    named = [(plain_name(name), p) for name, p in module.named_parameters() if name not in plan.parameters]
    return {id(p) for name, p in named if not name.startswith(inside) or name.rpartition(".")[0] in plan.used_twice}


def _regions(plan: ParallelPlan) -> dict[str, Region]:
    """The regions of the plan's layers, by name."""
    columns = [layer for layer in plan.layers.values() if layer.style.style == "column"]
    names = dict.fromkeys(layer.region for layer in plan.layers.values() if layer.region is not None)
    tracked = {name: [layer.global_sizes for layer in columns if layer.region == name] for name in names}
    return {name: Region(name, tracked=bool(sizes) and all(sizes)) for name, sizes in tracked.items()}


def _of_rank_zero(value: Tensor) -> Tensor:
    """The first rank's value, of the same shape and dtype."""
    if value.layout is not torch.strided:
        held = [value.cpu()]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(held, src=0)
        return held[0].to(value.device)
    value = value.contiguous()
    if dist.get_world_size() > 1:
        dist.broadcast(value.reshape(-1).view(torch.uint8), src=0)  # bytes: gloo doesn't know every dtype
    return value


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
