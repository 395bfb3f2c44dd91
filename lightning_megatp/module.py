"""ParallelModule: a LightningModule after its layers were swapped, and what one step has to do for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.plan.ranges import length
from lightning_megatp.plan.resolve import ParallelPlan
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.lineage import Lineage, trace_regions
from lightning_megatp.tensor.parameters import gather_shards
from lightning_megatp.tensor.shards import functions_take_whole, gathered
from lightning_megatp.tensor.watch import RandomWatch


class ParallelModule:
    """The parallel form of a model: what is sharded, and which gradients are partial.

    Args:
        module: the swapped model.
        plan: what was done to it.
        context: shared by its parallel layers.
        specs: canonical name -> shards, one entry per sharded parameter.
    """

    def __init__(
        self, module: nn.Module, plan: ParallelPlan, context: TensorContext, specs: dict[str, ShardedTensorSpec]
    ) -> None:
        self.module, self.plan, self.context = module, plan, context
        self.names = dict(module.named_parameters(remove_duplicate=False))
        self.sharded = context.sharded
        self.sharded.update((id(self.names[name]), spec) for name, spec in specs.items())
        self.partial: dict[int, Tensor] = {}
        """id(parameter) -> whole parameters whose gradient is partial on every tensor rank, in the backwards since the
        last optimizer step."""
        self._full: set[int] = set()
        self.whole_parameters = sum(self.whole_size(parameter) for parameter in module.parameters())
        """Number of parameters of the whole model, tied ones once."""
        self.pipeline: Any = None
        """What cut it over the pp axis, so that another Trainer can go on with it."""
        self.order: tuple[str, ...] = ()
        """Names of the whole model's state dict in order, where pipeline stages hold parts of it."""
        self.averages: list[nn.Module] = []
        """Averaged copies of the module, of which this rank holds the same part."""
        self.counted_elsewhere: set[int] = set()
        """id(parameter) of those that another pipeline stage holds too, and counts in norms."""

    def whole_size(self, parameter: Tensor) -> int:
        """Elements of a parameter before it was split."""
        spec = self.spec(parameter)
        return parameter.numel() if spec is None else torch.Size(spec.shape).numel()

    def forget_freed(self) -> None:
        """Other pipeline stages' parameters are gone: their Parameter objects, and so their ids, mean nothing now."""
        self.names = dict(self.module.named_parameters(remove_duplicate=False))
        held = {id(parameter) for parameter in self.names.values()}
        for parameter_id in [i for i in self.sharded if i not in held]:
            del self.sharded[parameter_id]

    def spec(self, parameter: Tensor) -> ShardedTensorSpec | None:
        """The shards of a parameter; None where it is whole."""
        return self.sharded.get(id(parameter))

    def spec_of(self, name: str) -> ShardedTensorSpec | None:
        """The same by any of its names in the state dict; None for whole parameters, buffers and unknown names."""
        parameter = self.names.get(name)
        spec = None if parameter is None else self.sharded.get(id(parameter))
        return None if spec is None else spec.renamed(name)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the module is a module of its own, and would have to be split by itself."""
        return None

    @contextlib.contextmanager
    def step(self, watch: bool) -> Iterator[None]:
        """Around a user's step.

        Args:
            watch: look at every operation (RandomWatch); for the first step of a kind, and once per epoch.
        """
        watching = RandomWatch(self.context) if watch and self.sharded else contextlib.nullcontext()
        try:
            with self.user_code(), watching:
                yield
        except RuntimeError as error:
            region = self.context.open_region
            if type(error) is not RuntimeError or region is None or str(error).startswith("MegaTPStrategy"):
                raise
            raise RuntimeError(self._failed_inside(region, error)) from error
        finally:
            self.context.end_step()

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Around the user's code: a step, and what activation checkpointing runs of it again in backward."""
        functions = functions_take_whole() if self._has_shards else contextlib.nullcontext()
        with self.context.running(user_code=True), functions:
            yield

    def outputs(self, outputs: object) -> object:
        """What a step returns, with sequence and feature shards gathered."""
        return tree_map(gathered, outputs) if self._has_shards else outputs

    @property
    def _has_shards(self) -> bool:
        """Whether the step's code meets tensors of which this rank holds a part."""
        return bool(self.plan.sequences) or self.context.feature_shards

    def trace(self, outputs: Iterable[Tensor], received: Iterable[Tensor] = ()) -> None:
        """Read off the graph of a loss which gradients will be partial. Before every backward: steps may differ.

        Args:
            outputs: the loss, or what a pipeline stage sends on.
            received: leaves of the graph that come from another pipeline stage, and are nobody's parameters.

        Raises:
            RuntimeError: values cross into or out of a tensor region where no layer of the plan lets them.
        """
        if not self.sharded:
            return
        lineage = trace_regions(outputs)
        for leaf in received:
            lineage.regions.pop(id(leaf), None)
        if lineage.hidden:
            raise RuntimeError(_HIDDEN)
        for parameter_id, regions in lineage.regions.items():
            if parameter_id in self.sharded and regions != {"tensor"}:
                raise RuntimeError(self._escaped(self._name(parameter_id)))
        if lineage.crossings:
            raise RuntimeError(self._side_door(lineage))
        for parameter_id, regions in lineage.regions.items():
            parameter, name = lineage.leaves[parameter_id], self._name(parameter_id)
            if parameter_id in self.sharded:
                continue
            if "whole" in regions:
                self._full.add(parameter_id)
            if regions != {"whole"}:
                self.partial[parameter_id] = parameter
            if parameter_id in self.partial and parameter_id in self._full:
                raise RuntimeError(self._mixed(name, regions | {"whole"}))

    def forget_traces(self) -> None:
        """Gradients are complete: the next backward starts a new account of what is partial."""
        self.partial.clear()
        self._full.clear()

    def check_replicas(self, group: dist.ProcessGroup) -> None:
        """Compare the whole parameters of the ranks of a group, which must be the same.

        Raises:
            RuntimeError: on every rank, naming a parameter that differs.

        Communication: two all-reduces of two numbers per whole parameter; once per epoch and checkpoint.
        """
        whole = [(name, p) for name, p in self.module.named_parameters() if id(p) not in self.sharded]
        if group.size() == 1 or not whole:
            return
        sums = torch.stack(
            [torch.stack([p.detach().double().sum(), p.detach().double().abs().sum()]) for _, p in whole]
        )
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        # Atomic additions on GPUs round differently from rank to rank; what is looked for here is far larger.
        tolerance = 0.0 if sums.device.type == "cpu" else 1e-4
        differs = ((high - low) > tolerance * high[:, 1:].abs()).any(1).tolist()
        for (name, _), wrong in zip(whole, differs, strict=True):
            if wrong:
                raise RuntimeError(
                    f"MegaTPStrategy: `{name}` should be the same on all ranks of a group, and is not. Something"
                    " changed gradients or parameters on each rank by what that rank alone knows: clipping with"
                    " torch.nn.utils.clip_grad_norm_ (use self.clip_gradients), loss.backward() (use"
                    " self.manual_backward), random numbers or data that differ from rank to rank."
                )

    def sum_partial_gradients(self) -> None:
        """Sum over the tensor ranks the gradients of whole parameters that each rank used on other features or tokens,
        and of elements that several ranks own.

        Communication: one coalesced all-reduce per dtype, 2 (t - 1) / t of these parameters' elements; none if there
        are no such parameters.
        """
        pieces: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for parameter in self.partial.values():
            if parameter.grad is not None:
                pieces.setdefault(parameter.grad.dtype, []).append((parameter, parameter.grad))
        for parameter in self.module.parameters():
            spec = self.sharded.get(id(parameter))
            if spec is not None and spec.shared and parameter.grad is not None:
                full = parameter.grad.new_zeros(spec.shape)
                spec.spec(self.context.rank).put(full, parameter.grad)
                pieces.setdefault(full.dtype, []).append((parameter, full))
        for parts in pieces.values():
            flat = torch.cat([grad.reshape(-1) for _, grad in parts])
            dist.all_reduce(flat, group=self.context.group)
            for (parameter, grad), total in zip(parts, flat.split([grad.numel() for _, grad in parts]), strict=True):
                spec = self.sharded.get(id(parameter))
                total = total.view(grad.shape)
                parameter.grad = total if spec is None else spec.spec(self.context.rank).take(total)

    def keep_whole_where_used_outside(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Gather the parameters that this step used outside their layers; they stay whole from now on.

        Communication: one all-gather per such parameter, gradient and optimizer state, on every rank of the group.
        """
        for parameter, operation in self.context.outside.values():
            warn_once_per_run(
                f"`{self._name(id(parameter))}` is split by the plan, but the step also uses it outside its own layer"
                f" (in `{operation}`). It is kept whole on every tensor rank: the numbers are right, its memory is not"
                " divided. To save the memory, don't use it outside its layer; to lose this warning, take its layer"
                " out of the plan."
            )
            self._unshard(parameter, optimizers)
        self.context.outside.clear()

    def _unshard(self, parameter: Tensor, optimizers: Iterable[Optimizer]) -> None:
        spec = self.sharded.pop(id(parameter))
        group, local = self.context.group, parameter.shape
        full = {id(parameter): gather_shards(parameter.detach(), spec, group)}
        grad = None if parameter.grad is None else gather_shards(parameter.grad, spec, group)
        for optimizer in optimizers:
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == local and value.dim() > 0:
                    state[key] = gather_shards(value, spec, group)
        for average in self.averages:
            twin = average.get_parameter(self._name(id(parameter)))
            twin.data = gather_shards(twin.data, spec, group)
        parameter.grad = None
        parameter.data = full[id(parameter)]
        parameter.grad = grad
        self.context.kept_whole.add(id(parameter))
        for layer in self.module.modules():
            if isinstance(layer, ParallelLayer):
                own = {name for name, p in layer.named_parameters(recurse=False) if p is parameter}
                layer.whole_parameters |= own

    def _name(self, parameter_id: int) -> str:
        return next((name for name, p in self.names.items() if id(p) == parameter_id), "a tensor made by the step")

    def _escaped(self, name: str) -> str:
        return (
            f"MegaTPStrategy: the split output of `{name.rpartition('.')[0]}` reaches the loss without passing a `row`"
            " layer (or a gathering one), so every rank would train on its own part of the features. Give that layer"
            " the style `column_gather`, or add to the plan the `row` layer that consumes it."
        )

    def _failed_inside(self, region: Region, error: RuntimeError) -> str:
        makers = ("column", "experts")
        columns = [c for c in self.plan.layers.values() if c.region == region.name and c.style.style in makers]
        listed = ", ".join(f"`{c.name}` ({length(c.by_rank[self.context.rank])} features)" for c in columns[:3])
        return (
            f"MegaTPStrategy: the step failed inside the tensor-parallel region `{region.name}`, where this rank holds"
            f" a part of what the plan's column layers make: {listed}{', ...' if columns[3:] else ''}. The error was:"
            f" {error}. If that code counts heads or features, give their attribute the style `divide`; if a layer"
            " needs all features, give the column layer `column_gather`; if a layer takes split ones, make it `row`."
        )

    def _mixed(self, name: str, regions: set[str]) -> str:
        return (
            f"MegaTPStrategy: `{name}` is used both where values are whole and inside a tensor-parallel region"
            f" ({', '.join(sorted(regions))}); its gradient would be summed wrongly over the tensor ranks. A value"
            " enters such a region only through its `column` layers: take the region's layers out of the plan, or"
            f" compute what depends on `{name}` outside of it."
        )

    def _side_door(self, lineage: Lineage) -> str:
        found, used = sorted(lineage.crossings)[0]
        return (
            f"MegaTPStrategy: a {found} value is used where values are {used}: something passes into or out of a"
            " tensor-parallel region beside its `column` and `row` layers (a gate, a bias computed from the input),"
            " and gradients would be wrong. Leave the layers of that region out of the plan, or give the layer whose"
            " output escapes the style `column_gather`."
        )


_HIDDEN = (
    "MegaTPStrategy: the step uses reentrant activation checkpointing, which builds its graph during backward, so it"
    " can't be known which gradients are partial. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
