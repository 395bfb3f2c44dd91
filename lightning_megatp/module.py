"""ParallelModule: a LightningModule after its layers were swapped, and what one step has to do for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.averaged_buffers import Versions
from lightning_megatp.batches.own import own_split, own_weight
from lightning_megatp.default_group import DefaultGroup
from lightning_megatp.messages import is_explained, warn_once_per_run
from lightning_megatp.parallel_parameters import ParallelParameters
from lightning_megatp.parts.partial import PartialGradients
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import length
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.plan.units import common_end
from lightning_megatp.replicas import differing
from lightning_megatp.shim.autograd import handle_checkpoints, handle_grad, unbind_functions
from lightning_megatp.shim.compiler import uncompiled
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.bare import parallel_layers
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.late_hooks import LateHooks
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.parameters import gather_shards, replace_data
from lightning_megatp.tensor.saving import unwrapped
from lightning_megatp.tensor.shards import gathered
from lightning_megatp.tensor.user_functions import functions_take_whole
from lightning_megatp.tensor.watch import RegionWatch

if TYPE_CHECKING:
    from lightning_megatp.pipeline.pipeline import Pipeline
    from lightning_megatp.recompute.blocks import Recomputation
    from lightning_megatp.shadows.shadows import Shadows
    from lightning_megatp.zero.sharding import ZeroSharding


class ParallelModule(ParallelParameters):
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
        unbind_functions()
        super().__init__(module, context, specs)
        self.plan = plan
        self.partial = PartialGradients(self)
        self.whole_parameters = sum(self.whole_size(parameter) for parameter in module.parameters())
        """Number of parameters of the whole model, tied ones once."""
        self.default_group: DefaultGroup | None = None
        """For what the user's code sends by itself; None where that is the world."""
        self.pipeline: Pipeline | None = None
        """What cut it over the pp axis, so that another Trainer can go on with it."""
        self.sharding: ZeroSharding | None = None
        """What divided its parameters over the dp axis, likewise."""
        self.recomputation: Recomputation | None = None
        """What its blocks recompute in backward."""
        self.order: tuple[str, ...] = ()
        """Names of the whole model's state dict in order, where pipeline stages hold parts of it."""
        self.buffer_versions: Versions | None = None
        """Versions of the buffers of this rank's stages when training began, to see what hooks change; None before
        that."""
        self.averages: list[nn.Module] = []
        """Averaged copies of the module, of which this rank holds the same part."""
        self.expects_parts: bool | None = None
        """Whether who asks for a state dict expects parts: as long as a Trainer works with it. None before."""
        self.stepped_whole: set[int] = set()
        """id of the tensors held in parts that an optimizer finds whole (`optimizers.whole_steps`)."""
        self.saving: list[Any] = []
        """Detours around hooks that put something into checkpoints; after a run, too, until the next one."""
        self.shadows: Shadows | None = None
        """What users keep beside the weights, a tensor for each."""
        self.outlines: Any = None
        """Outlines of modules among the hyperparameters, for checkpoints."""
        self.late_hooks = LateHooks(module)
        """The user's on modules that were split before."""
        self.uncompiled = False
        """Whether compiled code runs as it was written: so it does in steps whose operations are looked at."""

    @functools.cached_property
    def split_batch(self) -> Callable[[Any, int], Any] | None:
        """How the user's module divides a batch into microbatches, if it says so."""
        return own_split(self.module)

    @functools.cached_property
    def loss_weight(self) -> Callable[[Any], Any] | None:
        """What a microbatch weighs, if the user's module says so."""
        return own_weight(self.module)

    @contextlib.contextmanager
    def parts_expected(self) -> Iterator[None]:
        """Around what asks for a state dict and expects parts, after a run too."""
        before, self.expects_parts = self.expects_parts, True
        try:
            yield
        finally:
            self.expects_parts = before

    def adopt_copies(self) -> None:
        """Learn of copies of split layers that hooks have put on the module since set-up (an average of a network that
        begins late): they are split as their originals. No communication.

        Raises:
            RuntimeError: what was copied is divided by zero > 0.
        """
        if self.pipeline is not None:  # which refuses them
            return
        found = dict(self.module.named_parameters(remove_duplicate=False))
        new = {name: p for name, p in found.items() if self.names.get(name) is not p and id(p) not in self.divided}
        if not new:
            return
        for name, parameter in new.items():
            if isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"MegaTPStrategy: `{name}` is a copy that was made after set-up, of a parameter that zero > 0 has"
                    " divided: it holds rows, and nobody gathers them. Make the copy in `__init__`, or use zero=0."
                )
            if (before := self.names.get(name)) is not None and all(before is not p for p in found.values()):
                self.sharded.pop(id(before), None)
        copies = [
            _without_common_end(path, layer.label)
            for path, layer in self.module.named_modules(remove_duplicate=False)
            if isinstance(layer, ParallelLayer) and any(f"{path}.{leaf}" in new for leaf in layer._parameters)
        ]
        for copy, original in dict.fromkeys(copies):
            for name, parameter in new.items():
                known = self.names.get(original + name.removeprefix(copy)) if name.startswith(f"{copy}.") else None
                spec = None if known is None else self.spec(known)
                if spec is not None and known is not None and known.shape == parameter.shape:
                    self.sharded[id(parameter)] = spec
        self.names.update(new)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copy of the module is a module of its own, and would have to be split by itself."""
        return None

    @contextlib.contextmanager
    def step(self, watch: bool) -> Iterator[None]:
        """Around a user's step.

        Args:
            watch: look at every operation (RegionWatch); for steps 1, 2, 4, 8, ... of a kind in each epoch.
        """
        watching: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if watch and self.has_regions:
            watching = RegionWatch(self.context, self.plan.couplings, self.plan.operations, self.module)
        try:
            with self.user_code(), watching:
                yield
        except RuntimeError as error:
            region = self.context.open_region
            if type(error) is not RuntimeError or region is None or is_explained(error):
                raise
            raise RuntimeError(self._failed_inside(region, error)) from error
        finally:
            self.context.end_step()

    @contextlib.contextmanager
    def user_code(self) -> Iterator[None]:
        """Around the user's code: a step, and what activation checkpointing runs of it again in backward."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.context.running(user_code=True))
            if self.default_group is not None:
                stack.enter_context(self.default_group.used())
            if self.uncompiled:
                stack.enter_context(uncompiled())
            if self.has_regions or self.divided:
                stack.enter_context(handle_grad(self.partial.differentiate, self.leaf, self.partial.trace_nested))
            if self.has_regions:
                stack.enter_context(functions_take_whole(self.context))
            if self._has_shards:
                stack.enter_context(handle_checkpoints(unwrapped))
            yield

    def outputs(self, outputs: object) -> object:
        """What a step returns, with sequence and feature shards gathered."""
        return tree_map(gathered, outputs) if self._has_shards else outputs

    @property
    def has_regions(self) -> bool:
        """Whether a layer's plan is carried out here: one whose parameters are whole by now slices them, and its
        region is the same."""
        return bool(self.sharded or self.context.kept_whole)

    @property
    def _has_shards(self) -> bool:
        """Whether the step's code meets tensors of which this rank holds a part."""
        return bool(self.plan.sequences) or self.context.feature_shards

    def check_replicas(self, group: dist.ProcessGroup) -> None:
        """Compare the whole parameters of the ranks of a group, which must be the same.

        Raises:
            RuntimeError: on every rank, naming a parameter that differs.

        Communication: see `differing`; once per epoch and checkpoint.
        """
        whole = {name: p for name, p in self.named_held() if id(p) not in self.sharded}
        # Atomic additions on GPUs round differently from rank to rank; what is looked for here is far larger.
        tolerance = 1e-4 if self.device and self.device.type != "cpu" else 0.0
        for name in differing(whole, group, self.device, tolerance):
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` should be the same on all ranks of a group, and is not. Something"
                " changed gradients or parameters on each rank by what that rank alone knows: clipping with"
                " torch.nn.utils.clip_grad_norm_ (use self.clip_gradients), loss.backward() (use"
                " self.manual_backward), random numbers or data that differ from rank to rank."
            )

    def keep_whole_where_used_outside(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Gather the parameters that this step used outside their layers; they stay whole from now on.

        Communication: one all-gather per such parameter, gradient and optimizer state, on every rank of the group.
        """
        outside = list(self.context.outside.values())
        optimizers = list(optimizers) if outside else ()
        if outside:
            names = [f"`{self.name_of(id(parameter))}`" for parameter, _ in outside]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            warn_once_per_run(
                f"the plan splits {', '.join(names[:3])}{more}, and the step also uses that outside of its own layer"
                f" (in `{outside[0][1]}`). It is kept whole on every tensor rank: the numbers are right, its memory is"
                " not divided. To save the memory, don't use it outside its layer; to lose this warning, take its layer"
                " out of the plan."
            )
        for parameter, _ in outside:
            self._unshard(parameter, optimizers)
        self.context.outside.clear()

    def _unshard(self, parameter: Tensor, optimizers: Iterable[Optimizer]) -> None:
        if id(parameter) in self.divided:
            raise RuntimeError(
                f"MegaTPStrategy: `{self.name_of(id(parameter))}` is split by the plan, divided by zero > 0, and used"
                " outside its own layer. Take its layer out of the plan, or use zero=0."
            )
        if self.shadows is not None:
            self.shadows.keep_whole(self.name_of(id(parameter)))
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
            twin = average.get_parameter(self.name_of(id(parameter)))
            twin.data = gather_shards(self.to_send(twin.data), spec, group).to(twin.device)
        parameter.grad = None
        replace_data(parameter, full[id(parameter)])
        parameter.grad = grad
        self.context.kept_whole.add(id(parameter))
        for layer in parallel_layers(self.module):
            layer.keep_whole(parameter)

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


def _without_common_end(copy: str, original: str) -> tuple[str, str]:
    """What is different in two paths: `ema.net.0` and `net.0` are of `ema.net` and `net`."""
    n = min(common_end(copy, original), copy.count("."), original.count("."))
    of_copy, of_original = (path.rsplit(".", n)[0] for path in (copy, original))
    return of_copy, of_original


def take_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Parameters with their gradients, which they have no more."""
    found = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in found:
        parameter.grad = None
    return found
