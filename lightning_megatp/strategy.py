"""MegaTPStrategy: the arguments and the order of set-up. What is done lives in the other files."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_megatp.building.building import Building
from lightning_megatp.checkpoint.averages import Averages
from lightning_megatp.checkpoint.methods import CheckpointMethods
from lightning_megatp.checkpoint.single import durable_checkpoint_io
from lightning_megatp.checkpoint.stages import user_order
from lightning_megatp.commands import Done, layers_to_keep, requested, without_ranks
from lightning_megatp.commands.estimate import print_estimate, rehearse_both
from lightning_megatp.commands.proof import prepare, shorten
from lightning_megatp.commands.show import print_plan
from lightning_megatp.data import SameBatch
from lightning_megatp.example import Example
from lightning_megatp.failure import FailureWatch, ParentWatch
from lightning_megatp.gradients.buckets import GradientBuckets
from lightning_megatp.gradients.elementwise import check_elementwise
from lightning_megatp.gradients.norm import clip_by_norm
from lightning_megatp.gradients.sharding import ZeroOptions, ZeroSharding
from lightning_megatp.gradients.wide import narrow, widen
from lightning_megatp.mesh import MeshShape, ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.metrics import gather_metrics_over
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.batch import Backward
from lightning_megatp.pipeline.build import (
    PipelineOptions,
    build_pipeline,
    check_pipelined,
    reuse_pipeline,
    units_in_use,
)
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.schedule import make_schedule
from lightning_megatp.pipeline.snapshot import Snapshot
from lightning_megatp.pipeline.trace import StepTrace
from lightning_megatp.pipeline.units import find_units
from lightning_megatp.plan.auto.discover import discover, look
from lightning_megatp.planner.live import predict_run
from lightning_megatp.planner.measure import MemoryAccount, measure
from lightning_megatp.planner.report import MemoryReport, RankMemory
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.randomness import random_state, set_random_state, share_random_state, synchronize_random_state
from lightning_megatp.recompute.blocks import recompute_blocks
from lightning_megatp.recompute.offload import OffloadActivations
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.report import print_layout
from lightning_megatp.shim.lightning import Namespace, around_clipping, averages, default_store, finetuning_callback
from lightning_megatp.shim.sigterm import stop_together
from lightning_megatp.shim.torch import is_fake
from lightning_megatp.stopping import Stopping
from lightning_megatp.tensor.parameters import gather_shards
from lightning_megatp.verify import FirstBatch


class MegaTPStrategyBase(CheckpointMethods):
    """Megatron's tensor, sequence and data parallelism for an unmodified LightningModule.

    Layers that the module creates in `configure_model` are never whole on any rank; see the documentation on large
    models.

    Args:
        tp: Tensor-parallel size: how many ranks share each layer. The product of `tp`, `pp` and `dp` is the number of
            devices (times nodes).
        pp: Pipeline-parallel size: how many ranks share the layers one after another.
        dp: Data-parallel size; by default what the devices leave.
        plan: How each layer is split: "auto" looks at one batch, probes the blocks of the model and proves what it
            finds; or `{pattern: style}`, see the documentation on plans, where the style `auto` leaves a part to be
            planned so; None splits nothing. Short for `parallelism=ParallelismPlugin(plan=...)`.
        sequence_parallel: False ignores the plan's `sequence` entries.
        microbatches: Into how many microbatches a batch is split when pp > 1; by default four per stage. More of them
            leave less of the time unused, and each of them less to compute at once.
        schedule: Order of the microbatches: "1f1b", "gpipe", "interleaved", "zb_h1" or "zb_v".
        virtual_stages: Stages per rank; by default what the schedule needs (1; for interleaved and zb_v 2).
        stages: The modules of each pipeline stage, as names or patterns; by default they are balanced by parameters.
        trace: A file for the timeline of one step of the pipeline (the second, and the last batch of it), to be opened
            at ui.perfetto.dev or drawn by `megatp trace FILE --png`.
        recompute: What backward computes again instead of keeping it: "selective", the attention core of every block
            (scores, softmax, dropout); "full", every block from its inputs; `{"blocks": n}`, the first n blocks of each
            pipeline stage from their inputs; "none".
        offload_activations: Keep what autograd saves in host memory until backward.
        parallelism: A ParallelismPlugin, or a subclass of your own.
        verify: Compare the first training batch with the unsplit model, which global rank 0 keeps a copy of until then:
            its loss and, at dp = 1 without accumulation, every gradient. A mismatch stops the run.
        strict: Raise where otherwise a warning says that something stays whole.
        summary: Print at set-up who is where and what is split.
        bucket_mb: Size of the data-parallel gradient buckets in MiB; 0 reduces after backward instead of during it.
        zero: What the data-parallel ranks divide among themselves, by FSDP2, instead of each holding all of it: 1 the
            optimizer's state, 2 also gradients, 3 also parameters between their uses; 0 nothing.
        offload: "optimizer" (zero=1 or 2) or "parameters" (zero=3): this rank's part of the parameters, gradients and
            optimizer's state stays in the host's memory, where the optimizer steps it.
        dp_replicate: Copies of what zero divides, among the data-parallel ranks (hybrid sharding).
        reduce_dtype: "float32" sums gradients of bf16 or fp16 parameters in float32: over microbatches and accumulated
            batches as long as they are not divided (zero=0 or 1), and over ranks. Optimizers get the parameters' dtype.
        checkpoint: How checkpoints are saved: "file", one .ckpt that any Trainer loads, or "folder", to which all ranks
            write their own parts at once. Either loads, at any layout.
        async_save: Folders are written while training goes on, from a copy in host memory. The next save and the end
            of fit wait for it.
        memory: Count in every training batch what is kept for backward, so that `memory_report()` can show it beside
            what is predicted.
        timeout: Of every collective; Lightning's usual 30 minutes by default.
        process_group_backend: "nccl" or "gloo"; by default what the devices need.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: As for any Lightning strategy.
        checkpoint_io: As for any Lightning strategy.
        precision_plugin: As for any Lightning strategy.

    Raises:
        ValueError: before any training, where sizes, plan and model don't fit together.
    """

    namespace: Namespace

    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        plan: dict[str, str | dict[str, Any]] | str | None = "auto",
        sequence_parallel: bool = True,
        microbatches: int | None = None,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        stages: list[list[str]] | None = None,
        trace: str | None = None,
        recompute: str | dict[str, int] = "none",
        offload_activations: bool = False,
        parallelism: ParallelismPlugin | None = None,
        verify: bool = False,
        strict: bool = False,
        summary: bool = True,
        bucket_mb: float = 25.0,
        zero: int = 0,
        offload: Literal["optimizer", "parameters"] | None = None,
        dp_replicate: int = 1,
        reduce_dtype: Literal["float32"] | None = None,
        checkpoint: str = "file",
        async_save: bool = False,
        memory: bool = False,
        timeout: timedelta | None = None,
        process_group_backend: str | None = None,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any | None = None,
        checkpoint_io: Any | None = None,
        precision_plugin: Any | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io or durable_checkpoint_io(self.namespace.checkpoint_io),
            precision_plugin=precision_plugin,
        )
        self._set_up_checkpoints(checkpoint, async_save)
        if plan not in (None, "auto") and parallelism is not None:
            raise ValueError("MegaTPStrategy: give the plan either as `plan` or inside `parallelism`, not both.")
        if bucket_mb < 0:
            raise ValueError(f"MegaTPStrategy: bucket_mb={bucket_mb}, but a size is 0 or more MiB.")
        self.tp, self.pp, self.dp = tp, pp, dp
        self.pipeline_options = PipelineOptions(microbatches, schedule, virtual_stages, stages)
        self.parallelism = parallelism or ParallelismPlugin(plan, strict)
        self.recompute, self.offload_activations = RecomputeOptions.of(recompute), offload_activations
        self.sequence_parallel, self.summary, self.bucket_mb = sequence_parallel, summary, bucket_mb
        self.timeout = timeout or timedelta(minutes=30)
        self.process_group_backend = process_group_backend
        self.verify = verify
        self.zero = ZeroOptions(zero, offload, dp_replicate, reduce_dtype)
        self.memory = memory
        self._memory_account: MemoryAccount | None = None
        self._first_batch: FirstBatch | None = None
        self._building: Building | None = None
        self._before_building: Snapshot | None = None
        self.num_nodes = 1
        MeshShape.fit(tp * pp * (dp or 1), tp=tp, pp=pp, dp=dp)  # sizes below 1 raise here, where they were written
        if pp > 1:
            made = make_schedule(schedule, pp, 1 if microbatches is None else microbatches, virtual_stages)
            self.zero.check_schedule(made.defers_weights, schedule)
        elif trace is not None:
            raise ValueError(
                f"MegaTPStrategy: trace={trace!r} is a timeline of pipeline stages, and pp={pp} has none. Use pp=2 or"
                " more; for a single stage use Trainer(profiler=...)."
            )
        self._trace = None if trace is None else StepTrace(trace)
        self.mesh: ParallelMesh | None = None
        self.parallel: ParallelModule | None = None
        self.pipeline: Pipeline | None = None
        self.sharding: ZeroSharding | None = None
        self._buckets: GradientBuckets | None = None
        self._window_open = False
        """Whether batches were accumulated since the gradients were averaged last."""
        self._walked: tuple[tuple[int, list[int]], list[nn.Parameter]] | None = None
        """When the module was walked last, and its parameters."""
        self._bucketed: tuple[list[nn.Parameter], list[bool], bool] | None = None
        """What the buckets were made for: the parameters, which of them are trained, and whether a window was open."""
        self._undivided = self._alone = False
        """Whether the model is on each rank as it is on one device; whether there is one rank, and nothing to add."""
        self._averages: Averages | None = None
        self._same_batch: SameBatch | None = None
        self._stopping: Stopping | None = None
        self._failure_watch: FailureWatch | None = None
        self._accumulating = False
        self._went_backward = False
        self._steps = 0
        self._seen: set[tuple[Any, ...]] = set()

    # ---------------------------------------------------------------- the processes

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether ranks see different samples. At dp = 1 Lightning then leaves the user's loader as it is."""
        assert self.parallel_devices is not None
        return self.num_nodes * self.num_processes > self.tp * self.pp

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if without_ranks():
            return {"num_replicas": self.shape.dp, "rank": 0}
        mesh = self._mesh()
        return {"num_replicas": mesh.size("dp"), "rank": mesh.rank("dp")}

    @property
    def shape(self) -> MeshShape:
        """Sizes of the axes for the Trainer's devices, before there are ranks."""
        return MeshShape.fit(self.num_nodes * self.num_processes, tp=self.tp, pp=self.pp, dp=self.dp)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if without_ranks():
            return  # this process alone looks at the model
        self._launcher = self.namespace.launcher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        environment = self.cluster_environment
        assert environment is not None
        if without_ranks():
            return
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        shape = MeshShape.fit(self.world_size, tp=self.tp, pp=self.pp, dp=self.dp)
        self._join_world(shape)
        if self.mesh is None or self.mesh.shape != shape:
            self.mesh = ParallelMesh(shape, self.root_device.type, self.timeout)
        sharing = self.mesh.group("pp", "tp")
        self._same_batch = SameBatch(sharing, self.root_device) if sharing.size() > 1 else None
        self._seen.clear()
        self._steps = 0
        self._building = self._before_building = None
        self._is_split = False

    def _join_world(self, shape: MeshShape) -> None:
        """Create the default process group, unless somebody has, and start to watch the other ranks."""
        environment = self.cluster_environment
        assert environment is not None
        name = shape.describe(self.global_rank)
        parent = ParentWatch(name)
        if not dist.is_initialized():
            parent.start()
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            device = self.root_device
            dist.init_process_group(
                self.process_group_backend or dist.get_default_backend_for_device(device),
                rank=self.global_rank,
                world_size=self.world_size,
                timeout=self.timeout,
                device_id=device if device.type == "cuda" else None,
            )
            atexit.register(self._leave_world)
        launcher = self._launcher
        describe = getattr(launcher, "describe_exit", lambda pid: None)
        self._failure_watch = FailureWatch(
            self.global_rank, self.world_size, default_store(), name, describe_exit=describe
        )
        self._failure_watch.start()
        parent.stop()
        if launcher is not None:
            launcher.failure_watch = self._failure_watch  # type: ignore[attr-defined]

    def _leave_world(self) -> None:
        """At exit: meet the other ranks once more, since gloo may abort where one leaves early (torch 2.13)."""
        if dist.is_initialized() and not self._interrupted():
            with contextlib.suppress(RuntimeError):  # a rank that is gone must not spoil the others' exit
                if dist.get_backend() == "gloo":
                    dist.barrier()
                dist.destroy_process_group()

    # ---------------------------------------------------------------- set-up

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: what creates layers there is recorded, and each rank makes only what it holds.

        If it can't be recorded, it is run once more on all ranks, as if this were one device.

        Communication: one object broadcast over the world, of the random state, and one all-reduce of an element.
        """
        module = self.lightning_module
        if module is None or module.trainer.state.status != "running":  # trainer.init_module(), outside of a run
            yield
            return
        if self.mesh is not None:
            share_random_state()
        before, state, building, problem = Snapshot(module), random_state(), Building(), ""
        try:
            with torch.device("cpu"), building.record():
                yield
            building.check()
        except Exception as error:  # the user's own will come again
            problem = f"{type(error).__name__}: {error}"
        if not (bool(problem) if self.mesh is None else self.reduce_boolean_decision(bool(problem), all=False)):
            self._building, self._before_building = building, before
            return
        warn_once_per_run(
            "configure_model can't be recorded, so that every rank creates the whole model before it is split:"
            f" {problem or 'another rank says why'}."
        )
        before.restore()
        set_random_state(state)
        with torch.device("cpu"), self.precision_plugin.module_init_context():
            module.configure_model()

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        building = self._building
        with nullcontext() if building is None else building.record():
            if trainer.state.fn == "fit" and self._layer_sync is not None:
                self._layer_sync.apply(module)  # Trainer(sync_batchnorm=True)
            self.model = self.precision_plugin.convert_module(module)
        if building is not None:
            building.finish(module)
        if building and self.parallelism.split_form(module) is not None:
            raise ValueError(
                "MegaTPStrategy: configure_model creates the layers once more, of a LightningModule that an earlier run"
                " has split. Let it return where they exist: `if self.model is not None: return`."
            )
        if without_ranks():
            self._print_plan(trainer)
        mesh = self._mesh()
        if requested() == "verify":
            self._prepare_to_verify(trainer)
        if self.verify and trainer.state.fn == "fit" and self.parallelism.split_form(module) is None:
            self._first_batch = FirstBatch(module, keep=self.is_global_zero, building=building)
        if self.memory and trainer.state.fn == "fit" and self.parallelism.split_form(module) is None:
            self._memory_account = MemoryAccount(module)
        example = self._example(trainer)
        self.parallel = self.parallelism.parallelize(
            module, mesh, self.root_device, self.sequence_parallel, example=example, building=building
        )
        self.model_to_device()
        recompute_blocks(self.parallel, self.recompute)  # stands in for forwards before a pipeline intercepts them
        if building is not None:  # what is outside of units belongs to all stages, and a dry run computes with it
            units = map(module.get_submodule, find_units(module))
            building.materialize(module, self.parallel.own_spec, self.root_device, without=units)
        self.pipeline = self._make_pipeline(self.parallel, mesh, example)
        if self.parallel.recomputation is not None:
            stages = None if self.pipeline is None else self.pipeline.stage_of_unit
            self.parallel.recomputation.choose(self.recompute, stages)
        self.sharding = self._divide(self.parallel, mesh, example)
        if building is not None:
            self._materialize_units(building, self.parallel)
        self._undivided = mesh.size("tp") == self.pp == 1 and not self.sharding and not self.parallel.recomputation
        extras = self.offload_activations, self.verify, self.memory, self.zero.reduce_dtype
        self._alone = self._undivided and self.world_size == 1 and not any(extras)
        self._averages = Averages(averages(trainer), self.parallel, mesh)
        if self.sharding is not None and (callback := finetuning_callback(trainer)) is not None:
            raise ValueError(
                f"MegaTPStrategy: the callback {callback} looks for the optimizer's parameters in the module, and with"
                " zero > 0 those are other tensors. Use zero=0, or freeze and unfreeze by `requires_grad_`."
            )
        self._check_places(trainer)
        self._watch_exceptions(trainer)
        self._watch_sigterm(trainer, example)
        self._load_split_model()
        synchronize_random_state(mesh)
        gather_metrics_over(module, mesh.group("dp"))
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.setup_optimizers(trainer)
            if self.sharding is not None:
                self.sharding.check_known(self.optimizers)
                self.sharding.give_to(self.optimizers)
            for optimizer in self.optimizers if self.parallel.sharded or self.sharding else ():
                check_elementwise(optimizer, self._sharded_parameters())
            self._refresh_buckets()
        self.setup_precision_plugin()
        self._agree_on_precision()
        if self.summary and fitting and self.is_global_zero:
            print_layout(self.parallel, mesh, self.pipeline)

    def _example(self, trainer: Any) -> Example:
        example = Example(trainer, self.precision_plugin)
        if self._building is not None:
            example.weights = functools.partial(self._building.on_demand, trainer.lightning_module)
        return example

    def _materialize(self, module: nn.Module) -> None:
        """Make what this rank holds of a module, as far as it was recorded."""
        if self._building is not None:
            self._building.materialize(module, self._parallel().own_spec, self.root_device)

    def _materialize_units(self, building: Building, parallel: ParallelModule) -> None:
        """Make, unit by unit, what this rank holds of the parameters that were recorded."""
        module = parallel.module
        units = find_units(module) if self.pipeline is None else list(self.pipeline.stage_of_unit)
        for unit in (*map(module.get_submodule, units), module):
            self._materialize(unit)
        self._building = self._before_building = None
        self.model_to_device()

    def _watch_sigterm(self, trainer: Any, example: Example) -> None:
        """Let all ranks stop after the same batch when one gets SIGTERM."""
        if self.world_size == 1:
            return
        assert self._failure_watch is not None
        carried = self._mesh().size("dp") == 1 and not example.takes_iterator
        tell = self._failure_watch.ask_to_stop
        self._stopping = stop_together(trainer, self.namespace.sigterm, self.root_device, carried, tell)
        if self._same_batch is not None:
            self._same_batch.stopping = self._stopping
        if self._stopping is not None:
            self._failure_watch.on_ask = self._stopping.note

    def _print_plan(self, trainer: Any) -> None:
        """For `megatp plan` and `megatp estimate`: what would be split, and the memory, without ranks; then the process
        ends."""
        module = self.lightning_module
        assert module is not None
        if self.tp == 1 and requested() == "plan":
            raise ValueError("megatp plan: tp=1 splits nothing. Add the size, e.g. --trainer.strategy.tp 2.")
        plan = self.parallelism.resolve(module, self.tp, self.sequence_parallel)
        results: list[Any] = []
        problems: list[str] = []
        if plan.open and self.tp > 1:
            example = self._example(trainer)
            steps = example.calls()
            kinds, problems = look(module, plan, steps)
            found = discover(module, self.tp, kinds, plan)
            results, problems = found.results, problems + found.problems + ([] if steps else [example.problem])
        if requested() == "estimate":
            print_estimate(self, trainer, plan, problems)
            raise Done(0)
        placement = make_schedule(self.pipeline_options.schedule, self.pp, 1, self.pipeline_options.virtual_stages)
        kept = rehearse_both(self, trainer, plan, problems)
        print_plan(module, plan, results, problems, placement.stages if self.pp > 1 else 1, kept)
        raise Done(0)

    def _prepare_to_verify(self, trainer: Any) -> None:
        """For `megatp verify`: the first training batch, in float64, is compared; then all processes end."""
        if self._mesh().size("dp") > 1:
            raise ValueError(
                f"megatp verify compares every gradient, at dp=1: use {self.tp * self.pp} devices (tp x pp), not"
                f" {self.world_size}."
            )
        assert self.lightning_module is not None
        if trainer.state.fn != "fit" or self.parallelism.split_form(self.lightning_module) is not None:
            raise ValueError("megatp verify compares a training step, and the script runs something else before fit.")
        layers = layers_to_keep()
        for name, had in (shorten(self.lightning_module, layers) if layers else {}).items():
            if self.is_global_zero:
                print(f"megatp verify --layers {layers}: `{name}` keeps the first of each kind of its {had} layers.")
        if self._building is not None:  # every weight is changed, and the whole is compared
            self._building.materialize(self.lightning_module, lambda parameter: None, torch.device("cpu"))
        prepare(trainer, self.lightning_module)
        self._precision_plugin = self.namespace.double()
        self.verify = True

    def _make_pipeline(self, parallel: ParallelModule, mesh: ParallelMesh, example: Example) -> Pipeline | None:
        if parallel.pipeline is not None:
            reuse_pipeline(parallel.pipeline, mesh, self.pipeline_options)
        elif self.pp > 1:
            check_pipelined(parallel)
            parallel.pipeline = build_pipeline(parallel, mesh, self.pipeline_options, self.timeout, example)
        pipeline: Pipeline | None = parallel.pipeline
        if pipeline is not None:
            pipeline.open()
        return pipeline

    def _divide(self, parallel: ParallelModule, mesh: ParallelMesh, example: Example) -> ZeroSharding | None:
        """Divide the parameters over the data-parallel ranks, as `zero` says."""
        before: ZeroSharding | None = parallel.sharding
        level = self.zero.level if mesh.size("dp") > 1 else 0
        if before is not None and (before.options != self.zero or before.mesh.shape != mesh.shape):
            raise ValueError(
                "MegaTPStrategy: this LightningModule was already divided over data-parallel ranks by an earlier"
                " Trainer, with other options or another layout. Give the same ones, or build a new module and load the"
                " checkpoint into it."
            )
        if before is None and level:
            if self.pipeline is None:
                units, touched = units_in_use(parallel.module, example, mesh.device)
            else:
                units, touched = self.pipeline.own_units, set(self.pipeline.touched)
            parallel.sharding = ZeroSharding(parallel, mesh, self.zero, units, touched, self._materialize)
        if self.pipeline is not None:
            self.pipeline.sharding = parallel.sharding
        sharding: ZeroSharding | None = parallel.sharding
        return sharding

    def setup_optimizers(self, trainer: Any) -> None:
        """Each pipeline stage optimizes what it holds, though `configure_optimizers` finds the parameters of all.

        Communication: at pp > 1 one all-reduce of one element over the world.
        """
        if self.pp == 1:
            super().setup_optimizers(trainer)
            return
        assert self.pipeline is not None
        with self.pipeline.slicer.present():  # so that the groups have the order of one device
            super().setup_optimizers(trainer)
            self._optimizer_order = user_order(self.optimizers, self._parallel())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                held = [not is_fake(parameter) for parameter in group["params"]]
                for fake in filter(is_fake, group["params"]):
                    optimizer.state.pop(fake, None)
                for key in group.keys() & {"params", "param_names"}:
                    group[key] = [item for item, keep in zip(group[key], held, strict=True) if keep]
        empty = not all(map(_parameters_of, self.optimizers))
        if self.reduce_boolean_decision(empty, all=False):
            raise ValueError(
                f"MegaTPStrategy: {self._mesh().describe() if empty else 'another pipeline stage'} holds no"
                " parameter to optimize. Every stage needs one that is trained: choose `stages` so that each has"
                " some, or use a smaller pp."
            )

    def model_to_device(self) -> None:
        """Everything but parameters that have no values yet."""
        assert self.model is not None
        if not any(parameter.is_meta for parameter in self.model.parameters()):
            self.model.to(self.root_device)
            return
        for part in self.model.modules():
            if not any(parameter.is_meta for parameter in part.parameters()):
                part.to(self.root_device)

    def _agree_on_precision(self) -> None:
        """Clip by the norm of the unsplit model, and let all ranks skip a step when one found inf or nan."""
        plugin = self.precision_plugin
        if self.sharding is not None:
            around_clipping(plugin, self.sharding.take_over)
        plugin.clip_grad_by_norm = functools.partial(_clip_grad_by_norm, self)  # type: ignore[method-assign]
        scaler = getattr(plugin, "scaler", None)
        if scaler is None or isinstance(scaler, ShardedGradScaler):
            return
        if type(scaler) is not torch.amp.GradScaler:
            raise ValueError(
                f"MegaTPStrategy: the precision plugin's scaler is a {type(scaler).__name__}, whose ranks would"
                " disagree on skipped steps. Use torch.amp.GradScaler or ShardedGradScaler."
            )
        plugin.scaler = ShardedGradScaler(  # type: ignore[attr-defined]
            self.root_device.type,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
            process_group=dist.group.WORLD,
        )

    def _refresh_buckets(self) -> None:
        """Make the gradient buckets for the parameters that now require a gradient (a callback may unfreeze some)."""
        mesh, module = self._mesh(), self.lightning_module
        assert module is not None
        if mesh.size("dp") == 1:
            return
        every = self._all_parameters(module)
        trained = [p.requires_grad for p in every]
        before, self._bucketed = self._bucketed, (every, trained, self._window_open)
        if before is not None and before[0] is every and before[1:] == (trained, self._window_open):
            return
        divided = self._parallel().divided
        # What was frozen between two accumulated batches has a gradient of its own on every rank.
        kept = {id(p) for p in self._buckets.parameters} if self._buckets is not None and self._window_open else set()
        wanted = [p for p in every if p.requires_grad or id(p) in kept]
        parameters = [p for p in wanted if id(p) not in divided]
        if self._buckets is not None:
            if {id(p) for p in parameters} == {id(p) for p in self._buckets.parameters}:
                return
            self._buckets.close()
        parts = [parameters] if self.pipeline is None else self.pipeline.by_stage(parameters)
        self._buckets = GradientBuckets(parts, mesh.group("dp"), self.bucket_mb, hooks=self.pipeline is None)

    def _all_parameters(self, module: Any) -> list[nn.Parameter]:
        """The module's; it is walked once per epoch, and when the optimizers hold others than before."""
        held = [id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        moment = module.trainer.current_epoch, held
        if self.pipeline is not None or self._walked is None or self._walked[0] != moment:
            self._walked = moment, list(module.parameters())
        return self._walked[1]

    # ---------------------------------------------------------------- a step

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self._same_batch is None else self._same_batch(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._random_states is not None:
            if self.lightning_module.trainer.fit_loop.batch_idx > 0:
                self._resume_random()  # in the middle of an epoch: starting the loader again has drawn numbers
            self._random_states = None
        if self._alone:
            return super().training_step(*args, **kwargs)
        if self._first("train") or self._steps == 1:  # after the first step, and once per epoch
            axes = ("dp", "tp") if self.sharding is None else ("tp",)
            self._parallel().check_replicas(self._mesh().group(*axes))
        self._steps += 1
        if self.pipeline is None:
            if self.sharding is not None:
                self.sharding.begin()
            outputs = self._watched("train", super().training_step)(*args, **kwargs)
            if self._steps == 1 and self._parallel().recomputation is not None:
                self._parallel().recomputation.warn_if_unused()
        else:
            step, batch = self._on_microbatch("train", super().training_step, args)
            self._change_gradients(widen)
            with self._parallel().user_code():  # activation checkpointing runs the user's forward again, in backward
                outputs = self.pipeline.train(step, batch, self._pipeline_backward())
        if self._first_batch is not None:
            with self.precision_plugin.train_step_context():
                self._first_batch.run_and_compare_loss(outputs, args, self.root_device, self.pipeline)
        return outputs

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validate", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict", super().predict_step, args, kwargs)

    def _evaluate(self, kind: str, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._alone:
            return step(*args, **kwargs)
        if self.pipeline is None:
            with contextlib.nullcontext() if self.sharding is None else self.sharding.evaluating():
                outputs = self._watched(kind, step)(*args, **kwargs)
        else:
            outputs = self.pipeline.evaluate(kind, *self._on_microbatch(kind, step, args))
        self._parallel().keep_whole_where_used_outside(self.optimizers)
        return outputs

    def _on_microbatch(self, kind: str, step: Callable[..., Any], args: Any) -> tuple[Callable[[Any], Any], Any]:
        """The user's step as a function of a microbatch, and the batch."""
        batch, *rest = args
        run = self._watched(kind, step)
        return lambda microbatch: run(microbatch, *rest), batch

    def _pipeline_backward(self) -> Backward:
        """How a pipeline's last stage scales its losses, and the hook before the first backward."""
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        accumulated, scaler = module.trainer.accumulate_grad_batches, getattr(plugin, "scaler", None)

        def scale(loss: Tensor) -> Tensor:
            loss = loss / accumulated
            return loss if scaler is None else scaler.scale(loss)

        def before(loss: Tensor) -> None:
            if scaler is not None:
                scaler.scale(torch.zeros((), device=self.root_device))  # makes its state, where no loss is scaled
            self.namespace.precision.pre_backward(plugin, loss, module)  # the hooks, without scaling again

        def complete(stage: int) -> None:
            if accumulated == 1 and self._buckets is not None and self.pipeline is not None:
                if not self._buckets.began:
                    self._refresh_buckets()  # a callback may have unfrozen some, the dry run may have lent some
                self._buckets.complete(self.pipeline.part_of(stage))

        return Backward(scale, before, complete)

    def _watched(self, kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """The user's step in its contexts. It is watched, with all its microbatches, if it is the first of its kind."""
        parallel, watch = self._parallel(), self._first(kind)
        if kind == "train" and self._memory_account is not None:
            step = self._memory_account.watching(step, parallel)
        self._seen.add(self._moment(kind))
        if self.sharding is not None:
            self.sharding.watches = watch

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with contextlib.nullcontext() if self._undivided else parallel.step(watch), self._offloading(kind):
                    return parallel.outputs(step(*args, **kwargs))
            except RuntimeError as error:
                if self.sharding is None or "mixed torch.Tensor and DTensor" not in str(error):
                    raise
                raise RuntimeError(
                    f"MegaTPStrategy: the {kind} step uses a parameter that zero={self.zero.level} has divided outside"
                    " of the forward of its module, and the batch that was looked at before training did not show it."
                    " Use it inside of a module's forward, or take zero=0."
                ) from error
            except StopIteration as error:  # Lightning would take it for the end of the data, on this rank alone
                raise RuntimeError(
                    f"MegaTPStrategy: the {kind} step raised StopIteration: some `next(...)` found nothing, such as"
                    " `next(module.parameters())` of a module whose parameters are all on other pipeline stages."
                ) from error

        if self.sharding is None or self.pipeline is not None:
            return run
        sharding = self.sharding
        return lambda *args, **kwargs: sharding.step(lambda: run(*args, **kwargs))

    def _offloading(self, kind: str) -> contextlib.AbstractContextManager[None]:
        if not self.offload_activations or kind != "train":
            return contextlib.nullcontext()
        parallel = self._parallel()
        with parallel.context.running(user_code=False):
            gathered = (divided.whole for divided in parallel.divided.values())
            held = [*parallel.module.parameters(), *parallel.module.buffers(), *gathered]
        return OffloadActivations(held, self.root_device.type == "cuda")

    def _first(self, kind: str) -> bool:
        """Whether this is the first step of its kind in this epoch: one is watched per epoch, since a step may
        change."""
        return self._moment(kind) not in self._seen

    def _moment(self, kind: str) -> tuple[Any, ...]:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return kind, trainer.current_epoch, kind == "validate" and trainer.sanity_checking

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's signal that gradients are only accumulated in this batch."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        parallel, module = self._parallel(), self.lightning_module
        assert module is not None
        self._went_backward = True
        if self._alone:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.pipeline is not None:
            return self._finish_pipeline(self.pipeline, closure_loss)
        self.pre_backward(closure_loss)
        with parallel.context.running(user_code=False):
            parallel.trace([closure_loss])
            if self.sharding is not None:
                self.sharding.drop_old()
            held = {} if module.automatic_optimization else self._set_aside_gradients()
            self._change_gradients(widen)
            self._refresh_buckets()
            if self._buckets is not None:
                self._buckets.enabled = not self._accumulating
            if self.sharding is not None:
                self.sharding.before_backward(last=not self._accumulating)
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            # activation checkpointing runs the user's forward again
            with contextlib.nullcontext() if self._undivided else parallel.user_code():
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if self.sharding is not None:
                self.sharding.collect()
                self.sharding.give_to(self.optimizers)
                if not module.automatic_optimization:
                    self.sharding.begin()  # the step goes on
            if not self._accumulating:
                if self._buckets is not None:
                    self._buckets.finish()
                self.parallelism.finalize_gradients(parallel)
                self._change_gradients(narrow)
                parallel.forget_traces()
            self._window_open = self._accumulating
            for parameter, grad in held.items():
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            if self.sharding is not None:
                self.sharding.show()
            self._verify_gradients()
            parallel.keep_whole_where_used_outside(self.optimizers)
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _change_gradients(self, to: Callable[[Iterator[Tensor]], None]) -> None:
        """With `reduce_dtype`, `widen` before backward what FSDP2 doesn't sum, and `narrow` it when it is summed."""
        if self.zero.reduce_dtype is not None:
            parallel = self._parallel()
            to(p for p in parallel.module.parameters() if id(p) not in parallel.divided)

    def _verify_gradients(self) -> None:
        first, self._first_batch = self._first_batch, None
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        if first is not None and self._mesh().size("dp") == 1 and not self._accumulating and not scaled:
            first.compare_gradients(self.full_gradients())
            if requested() == "verify":
                self.barrier()
                raise Done(first.unproven)

    def _finish_pipeline(self, pipeline: Pipeline, closure_loss: Tensor) -> Tensor:
        """The backward of a batch that went through the pipeline: its gradients are there, and are completed."""
        parallel, module = self._parallel(), self.lightning_module
        assert module is not None
        pipeline.release(() if self._buckets is None else self._buckets.early)
        if self.sharding is not None:
            self.sharding.collect(pipeline.factor)
            self.sharding.give_to(self.optimizers)
        if not self._accumulating:
            with pipeline.executor.recorded("gradients"):
                if not (self._buckets is not None and self._buckets.began):
                    self._refresh_buckets()
                if self._buckets is not None:
                    self._buckets.finish(pipeline.factor)
                self.parallelism.finalize_gradients(parallel)
                self._change_gradients(narrow)
                pipeline.sum_shared_gradients()
                parallel.forget_traces()
        elif self._buckets is None:
            self._refresh_buckets()
        self._window_open = self._accumulating
        if self.sharding is not None:
            self.sharding.show()
        self._verify_gradients()
        parallel.keep_whole_where_used_outside(self.optimizers)
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _set_aside_gradients(self) -> dict[Tensor, Tensor]:
        """Manual optimization may call backward several times before a step: what was reduced must not be summed
        again."""
        assert self.lightning_module is not None
        held: dict[Tensor, Tensor] = {p: p.grad for _, p in self._parallel().named_held() if p.grad is not None}
        for parameter in held:
            parameter.grad = None
        return held

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        no_closure = (
            getattr(closure, "__name__", "") == "do_nothing_closure"
        )  # LightningOptimizer.step() in manual mode
        if no_closure and not self._went_backward and any(p.grad is not None for p in _parameters_of(optimizer)):
            raise RuntimeError(
                "MegaTPStrategy: the optimizer is stepped, but no gradient came from `self.manual_backward(loss)`, so"
                " none was summed over the ranks. Use it instead of `loss.backward()`."
            )
        if self._alone:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if no_closure and self.sharding is not None:
            self.sharding.end()  # hooks find rows and their gradients
        traced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._trace is not None and self.pipeline is not None:
            traced = self._trace.step(self.pipeline, self._mesh())
        with traced, self._parallel().context.running(not no_closure and self._parallel().context.user_code):
            stepped = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.pipeline is not None:
            self.pipeline.loans.renew()
        if self.sharding is not None:
            self.sharding.end()  # what is gathered has the values from before
            if no_closure:  # a step of manual optimization goes on
                self.sharding.begin()
        return stepped

    # ---------------------------------------------------------------- all ranks together

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and not self._interrupted():
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self._apart():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src=src)
        return objects[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over the data-parallel ranks; at dp = 1 it comes back as it is, as on one device.

        `LightningModule.all_gather` passes the world where its caller named no group, so the world means dp here: the
        ranks of a tensor group hold the same value.
        """
        if group is None or group is dist.group.WORLD:
            group = self._mesh().group("dp")
        if group.size() == 1:
            return tensor
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks, by default to the mean; tensor ranks hold the same value already."""
        if not isinstance(tensor, Tensor) or self.mesh is None:
            return tensor
        group = group or self.mesh.group("dp")
        if group.size() == 1:
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = (
            reduce_op
            if not isinstance(reduce_op, str)
            else getattr(dist.ReduceOp, "SUM" if mean else reduce_op.upper())
        )
        total = tensor.clone()
        dist.all_reduce(total, op=op, group=group)
        return total / group.size() if mean else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes > 0)

    # ---------------------------------------------------------------- the end

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._stopping is not None and self._stopping.meet(last=True):  # noted after the last batch had begun
            raise self.namespace.sigterm

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._failure_watch is not None and not isinstance(exception, Done):
            self._failure_watch.report(exception)

    def teardown(self) -> None:
        if without_ranks():
            return  # nothing was set up, and the model may be on meta
        if self._before_building is not None:  # set-up failed: another run shall not find layers without values
            self._before_building.restore()
            self._building = self._before_building = None
        super().teardown()
        if self.pipeline is not None:
            self.pipeline.close()
        if self._averages is not None:
            self._averages.close()
        self._leave_exceptions()
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        self._walked = self._bucketed = None
        self._background.close()
        if self._failure_watch is not None:
            if self._failure_watch.active:
                self.barrier()  # as long as one rank still works, all of them watch
            self._failure_watch.stop()

    # ---------------------------------------------------------------- what people ask for

    def parameter_counts(self) -> tuple[int, int]:
        """Parameters of the whole model, and of this rank; tied ones once."""
        parallel = self._parallel()
        return parallel.whole_parameters, sum(held.numel() for _, held in parallel.named_held())

    def memory_report(self) -> MemoryReport:
        """What every rank holds, predicted and measured, in bytes; after a training batch. Every rank calls it.

        Activations, and what is predicted, are known with `MegaTPStrategy(memory=True)`.

        Communication: one object all-gather over the world.
        """
        mesh, parallel = self._mesh(), self._parallel()
        measured = measure(parallel, self.optimizers, self._memory_account)
        predicted, problem = predict_run(self, parallel, mesh, self._memory_account)
        peak = torch.cuda.max_memory_allocated(self.root_device) if self.root_device.type == "cuda" else None
        own = RankMemory(self.global_rank, mesh.stage, measured, predicted, peak), problem
        by_rank: list[Any] = [None] * self.world_size
        dist.all_gather_object(by_rank, own)
        return MemoryReport(tuple(rank for rank, _ in by_rank), problem)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of the whole model under canonical names, on every rank; for looking at them.

        Communication: one all-gather over tp per sharded parameter, one over dp per divided one, and an object gather
        over pp.
        """
        parallel = self._parallel()
        gradients = {}
        for name, parameter in parallel.named_held():
            if parameter.grad is not None:
                spec, group = parallel.spec(parameter), parallel.context.group
                grad = parallel.of_tensor_rank(parameter, parameter.grad)
                gradients[name] = grad.clone() if spec is None else gather_shards(grad, spec, group)
        if self.pipeline is None:
            return gradients
        by_stage: list[dict[str, Tensor]] = [{} for _ in range(self.pp)]
        dist.all_gather_object(by_stage, gradients, group=self._mesh().group("pp"))
        merged = {name: grad for stage in by_stage for name, grad in stage.items()}
        return {name: merged[name] for name in parallel.order if name in merged}

    def _sharded_parameters(self) -> list[Tensor]:
        parallel = self._parallel()
        return [p for _, p in parallel.named_held() if parallel.spec(p) is not None or id(p) in parallel.divided]

    def _mesh(self) -> ParallelMesh:
        if self.mesh is None:
            raise RuntimeError(
                "MegaTPStrategy: the mesh exists once a Trainer has started the processes (fit, test, ...)."
            )
        return self.mesh

    def _parallel(self) -> ParallelModule:
        if self.parallel is None:
            raise RuntimeError("MegaTPStrategy: the model is split once a Trainer has set it up (fit, test, ...).")
        return self.parallel


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clip_grad_by_norm(strategy: MegaTPStrategyBase, optimizer: Optimizer, clip_val: float) -> None:
    """Stands in for the precision plugin's method of that name: there is no hook of the strategy for it."""
    parameters = strategy.precision_plugin.main_params(optimizer)
    clip_by_norm(parameters, clip_val, strategy._parallel(), strategy._mesh())


def strategy_class(namespace: str, module: str) -> type[MegaTPStrategyBase]:
    """Complete the strategy for one copy of Lightning, and register it there as "megatp".

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning".
        module: where users import it from.
    """
    found = Namespace.load(namespace)
    body = {"__module__": module, "__doc__": MegaTPStrategyBase.__doc__, "namespace": found}
    made = type("MegaTPStrategy", (MegaTPStrategyBase, found.parallel_strategy), body)
    found.registry.register(
        "megatp", made, description="Megatron's tensor, sequence and data parallelism", override=True
    )
    return made
