"""MegaTPStrategy: the arguments, and the order of set-up and of the end. What is done lives in the other files."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatp.batches.example import Example
from lightning_megatp.batches.same import SameBatch
from lightning_megatp.calls import follow_handed_on
from lightning_megatp.checkpoint.outlines import Outlines
from lightning_megatp.commands import Done, requested, without_ranks
from lightning_megatp.commands.answer import answer
from lightning_megatp.commands.proof import prepare
from lightning_megatp.failure import FailureWatch
from lightning_megatp.gradients.precision import agree_on_precision, check_precision
from lightning_megatp.hooks.norms import watch_hooks
from lightning_megatp.mesh import AXES, MeshShape, ParallelMesh, check_sizes
from lightning_megatp.metrics import gather_metrics_over
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.build import open_pipeline
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.schedules.trace import StepTrace
from lightning_megatp.pipeline.settings import PipelineOptions
from lightning_megatp.plan.units import find_units
from lightning_megatp.planner.measure import MemoryAccount
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.recompute.blocks import recompute_blocks
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.shim.lightning import Namespace, summaries, without_sync_advice
from lightning_megatp.shim.sigterm import stop_together, tell_to_stop
from lightning_megatp.stopping import Stopping
from lightning_megatp.strategy.arguments import (
    check_backend,
    check_by_hand,
    check_schedule,
    check_stages,
    check_types,
    schedule_for,
    warn_of_unused,
    with_known_names,
)
from lightning_megatp.strategy.batch_norm import BatchNormGroups
from lightning_megatp.strategy.buffers import SentBuffers
from lightning_megatp.strategy.building import BuildingMethods, check_has_shapes, warn_of_shared_memory
from lightning_megatp.strategy.callbacks import (
    check_callbacks,
    count_replicas,
    without_inference_mode,
)
from lightning_megatp.strategy.checkpoint import CheckpointMethods
from lightning_megatp.strategy.dividing import divide
from lightning_megatp.strategy.exports import refuse_exports
from lightning_megatp.strategy.randomness import share_drawn, synchronize_random_state
from lightning_megatp.strategy.report import print_layout
from lightning_megatp.strategy.stepping import StepMethods
from lightning_megatp.strategy.verify import FirstBatch
from lightning_megatp.strategy.world import WorldMethods
from lightning_megatp.zero.options import ZeroOptions
from lightning_megatp.zero.sharding import ZeroSharding


class MegaTPStrategyBase(StepMethods, BuildingMethods, WorldMethods, CheckpointMethods):
    """Megatron's tensor, sequence, pipeline and data parallelism for an unmodified LightningModule.

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
        whole_loss: What a step does after the last block is done once, with what that made of all microbatches: the
            loss is that of one device whatever it is, contrastive losses and statistics of the batch included. All
            microbatches are kept until then (`schedule="gpipe"`).
        trace: A file for the timeline of one step of the pipeline (the second, and the last batch of it), to be opened
            at ui.perfetto.dev or drawn by `megatp trace FILE --png`.
        recompute: What backward computes again instead of keeping it: "selective", the attention core of every block
            (scores, softmax, dropout); "full", every block from its inputs; `{"blocks": n}`, the first n blocks of each
            pipeline stage from their inputs; "none".
        offload_activations: Keep what autograd saves in host memory until backward.
        parallelism: A ParallelismPlugin, or a subclass of your own.
        verify: Compare the first training batch with the unsplit model, which global rank 0 keeps a copy of until then:
            its loss and, at dp = 1 without accumulation, every gradient. A mismatch stops the run.
        strict: Raise where set-up would otherwise only warn about the plan: it splits nothing, leaves a number of heads
            undivided, meets compiled code with `sequence`, or, found automatically, left something whole or unproven.
        summary: Print at set-up who is where, what is split, and how many parameters rank 0 holds.
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

    @with_known_names
    def __init__(
        self,
        tp: int = 1,
        pp: int = 1,
        dp: int | None = None,
        plan: dict[str, str | dict[str, Any]] | str | None = "auto",
        sequence_parallel: bool = True,
        microbatches: int | None = None,
        schedule: Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"] = "1f1b",
        virtual_stages: int | None = None,
        stages: list[list[str]] | None = None,
        whole_loss: bool = False,
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
        checkpoint: Literal["file", "folder"] = "file",
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
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        check_types(
            microbatches=microbatches, virtual_stages=virtual_stages, bucket_mb=bucket_mb, zero=zero,
            dp_replicate=dp_replicate, timeout=timeout, parallelism=parallelism, sequence_parallel=sequence_parallel,
            offload_activations=offload_activations, verify=verify, strict=strict, summary=summary,
            async_save=async_save, memory=memory, trace=trace, whole_loss=whole_loss,
        )  # fmt: skip
        check_stages(stages)
        check_backend(process_group_backend)
        self._set_up_checkpoints(checkpoint, async_save)
        if plan not in (None, "auto") and parallelism is not None:
            raise ValueError("MegaTPStrategy: give the plan either as `plan` or inside `parallelism`, not both.")
        self._set_up_building()
        self._set_up_gradients(bucket_mb)
        self._set_up_steps(offload_activations)
        self.tp, self.pp, self.dp = tp, pp, dp
        order = schedule_for(schedule, whole_loss)
        self.pipeline_options = PipelineOptions(
            microbatches, order, virtual_stages, stages, splits_end=zero < 2, whole_loss=whole_loss
        )
        self.parallelism = parallelism or ParallelismPlugin(plan, strict)
        self.recompute = RecomputeOptions.of(recompute)
        self.sequence_parallel, self.summary = sequence_parallel, summary
        self.timeout = timeout or timedelta(minutes=30)
        self.process_group_backend = process_group_backend
        self.verify = verify
        self.zero = ZeroOptions(zero, offload, dp_replicate, reduce_dtype)
        self.memory = memory
        self._memory_account: MemoryAccount | None = None
        self._first_batch: FirstBatch | None = None
        self.num_nodes = 1
        check_sizes(tp=tp, pp=pp, **({} if dp is None else {"dp": dp}))  # where they are written
        check_schedule(pp, schedule, microbatches, virtual_stages, stages)
        warn_of_unused(
            pp,
            microbatches=microbatches,
            schedule=schedule if schedule != "1f1b" else None,
            whole_loss=whole_loss or None,
            virtual_stages=virtual_stages,
            stages=stages,
        )
        if pp == 1 and trace is not None:
            raise ValueError(
                f"MegaTPStrategy: trace={trace!r} is a timeline of pipeline stages, and pp={pp} has none. Use pp=2 or"
                " more; for a single stage use Trainer(profiler=...)."
            )
        self._trace = None if trace is None else StepTrace(trace)
        self.mesh: ParallelMesh | None = None
        self.parallel: ParallelModule | None = None
        self.pipeline: Pipeline | None = None
        self.sharding: ZeroSharding | None = None
        self._undivided = self._alone = False
        self._same_batch: SameBatch | None = None
        self._stopping: Stopping | None = None
        self._failure_watch: FailureWatch | None = None
        self._batch_norms: BatchNormGroups | None = None
        self._sent_buffers: SentBuffers | None = None

    # ---------------------------------------------------------------- the processes

    @property
    def root_device(self) -> torch.device:
        assert self._process_devices is not None
        return self._process_devices[self.process_local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this machine."""
        return len(self._process_devices or ())

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
        """Sizes of the axes for the Trainer's devices, before there are ranks.

        Raises:
            ValueError: the devices don't fit tp, pp and dp.
        """
        return MeshShape.fit(self.num_nodes * self.num_processes, tp=self.tp, pp=self.pp, dp=self.dp)

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        if without_ranks():
            return  # this process alone looks at the model
        check_precision(self.precision_plugin, self.pp)  # here, where one process says it
        _ = self.shape  # raises, where the devices don't fit tp, pp and dp
        self._launcher = self.namespace.launcher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        check_precision(self.precision_plugin, self.pp)
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
        self._same_batch = None
        if sharing.size() > 1:
            self._same_batch = SameBatch(sharing, self.root_device, self.mesh.hosts("pp", "tp"))
        self._set_up_copies()
        self._steps_of_epoch.clear()
        self._steps = 0
        self._building = self._before_building = None
        self._is_split = False
        self._leave_averages()

    # ---------------------------------------------------------------- set-up

    def setup(self, trainer: Any) -> None:
        """From the user's module to what this rank holds of it, and to its optimizers."""
        self._convert(trainer)
        follow_handed_on(trainer.lightning_module)
        if without_ranks():
            answer(self, trainer, self._example(trainer))
        mesh = self._mesh()
        if self._default_group is not None:
            self._default_group.stand_on(trainer.lightning_module)
        synchronize_random_state(mesh)  # before loaders draw their seed
        if self.parallelism.split_form(trainer.lightning_module) is None:
            share_drawn(trainer.lightning_module, mesh)
        self._keep_unsplit(trainer)
        example = self._example(trainer)
        shadows = self._find_shadows()
        outlines = self._outlines()
        parallel = self._split(mesh, example)
        parallel.outlines = outlines if not self._undivided else None
        parallel.default_group = self._default_group
        self._cut_averages(parallel)
        if trainer.state.fn == "fit":
            check_callbacks(trainer, mesh, self.zero.level)
        self._check_places(trainer)
        self._watch_exceptions(trainer)
        count_replicas(trainer, mesh)
        self._show_shadows(trainer, parallel, *shadows)
        self._watch_saving(trainer)
        if not self.is_distributed:
            without_sync_advice()
        if not self._undivided:
            without_inference_mode(trainer)
        self._as_hooks.clear()
        self._stand_in_for_hooks(trainer, parallel, mesh)
        self._watch_sigterm(trainer, example)
        self._load_split_model()
        synchronize_random_state(mesh)
        gather_metrics_over((parallel.module, *trainer.callbacks), mesh.group("dp"))
        self._batch_norms = BatchNormGroups(parallel.module, mesh.group("dp"))
        self._sent_buffers = None
        if mesh.size("dp") > 1 and trainer.state.fn == "fit":
            averages = () if parallel.shadows is None else parallel.shadows.modules
            self._sent_buffers = SentBuffers(parallel.module, mesh, averages)
        fitting = trainer.state.fn == "fit"
        if fitting:
            self._prepare_optimizers(trainer)
            self._check_optimizers()
            self._stand_in_for_fit_hooks(trainer, parallel, mesh)
        self.setup_precision_plugin()
        agree_on_precision(self.precision_plugin, parallel, mesh, self.optimizers)
        watch_hooks(self.precision_plugin, trainer, parallel, mesh, summed=lambda: not self._accumulating)
        if self.summary and fitting and self.is_global_zero:
            print_layout(parallel, mesh, self.pipeline, summarised=bool(summaries(trainer)))

    def _convert(self, trainer: Any) -> None:
        """What every strategy of Lightning does with a module first; here it is the last that is recorded of it."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, building = self._module(), self._building
        with nullcontext() if building is None else building.record():
            if trainer.state.fn == "fit" and self._layer_sync is not None and self._mesh().size("dp") > 1:
                self._layer_sync.apply(module)  # Trainer(sync_batchnorm=True)
            self.model = self.precision_plugin.convert_module(module)
        if building is not None:
            building.finish(module)
        check_has_shapes(module)
        if building and self.parallelism.split_form(module) is not None:
            raise ValueError(
                "MegaTPStrategy: configure_model creates the layers once more, of a LightningModule that an earlier run"
                " has split. Let it return where they exist: `if self.model is not None: return`."
            )

    def _keep_unsplit(self, trainer: Any) -> None:
        """Copies of the unsplit model, for what is compared with it or predicted from it later."""
        module = self._module()
        if trainer.state.fn == "fit" and not getattr(module, "automatic_optimization", True):
            check_by_hand(self.verify or requested() == "verify", self._trace is not None)
        if requested() == "verify":
            prepare(self, trainer, self._building)
            self._precision_plugin, self.verify = self.namespace.double(), True
        if self.verify and trainer.state.fn == "fit" and self.parallelism.split_form(module) is None:
            self._first_batch = FirstBatch(module, keep=self.is_global_zero, building=self._building)
        if self.memory and trainer.state.fn == "fit" and self.parallelism.split_form(module) is None:
            self._memory_account = MemoryAccount(module)

    def _outlines(self) -> Outlines | None:
        """Outlines of modules among the hyperparameters, before they are split; None where there are none."""
        module = self._module()
        split = self.parallelism.split_form(module)
        outlines = Outlines(module) if split is None else split.outlines
        return outlines if outlines else None

    def _split(self, mesh: ParallelMesh, example: Example) -> ParallelModule:
        """Over tp, pp and dp, in this order; and give this rank's part its values."""
        module, building = self._module(), self._building
        if building is None and self.parallelism.split_form(module) is None:
            if mesh.size("tp") > 1 or self.pp > 1 or self.zero.level:
                warn_of_shared_memory(module)
            self._remember_parameters(module)
            self._hold_back(module)
        parallel: ParallelModule = self.parallelism.parallelize(
            module, mesh, self.root_device, self.sequence_parallel, example=example, building=building,
            waiting=self._waiting, divided=self.zero.level > 0,
        )  # fmt: skip
        self.parallel = parallel
        self.model_to_device()
        recompute_blocks(parallel, self.recompute)  # stands in for forwards before a pipeline intercepts them
        if building is not None:  # what is outside of units belongs to all stages, and a dry run computes with it
            self._materialize(module, without=map(module.get_submodule, find_units(module)))
        self.pipeline = open_pipeline(parallel, mesh, self.pipeline_options, example)
        if self.pipeline is not None and self._failure_watch is not None:
            lockstep = self.pipeline.plans.lockstep
            lockstep.tell = functools.partial(self._failure_watch.tell, mesh.ranks("pp"))
            self._failure_watch.on_told = lockstep.hear
        if parallel.recomputation is not None:
            stages = None if self.pipeline is None else self.pipeline.stage_of_unit
            parallel.recomputation.choose(self.recompute, stages)
        self.sharding = divide(parallel, mesh, self.zero, self.pipeline, example, self._materialize)
        if building is not None or self._waiting:
            self._materialize_units(parallel)
        refuse_exports(module, mesh.size("tp"), self.pp, self.zero.level if self.sharding is not None else 0)
        self._undivided = mesh.size("tp") == self.pp == 1 and not self.sharding and not parallel.recomputation
        own_end = type(self.parallelism).finalize_gradients is not ParallelismPlugin.finalize_gradients
        extras = self.offload_activations, self.verify, self.memory, self.zero.reduce_dtype, own_end
        self._alone = self._undivided and self.world_size == 1 and not any(extras)
        return parallel

    def _watch_sigterm(self, trainer: Any, example: Example) -> None:
        """Let all ranks stop after the same batch when one gets SIGTERM."""
        if self.world_size == 1:
            return
        assert self._failure_watch is not None
        carried = self._mesh().size("dp") == 1 and not example.takes_iterator
        tell = self._failure_watch.ask_to_stop
        agreed = functools.partial(tell_to_stop, trainer)
        self._stopping = Stopping(self._mesh().hosts(*AXES), carried, tell, agreed)
        stop_together(trainer, self.namespace.sigterm, self._stopping)
        if self._same_batch is not None:
            self._same_batch.stopping = self._stopping
        self._failure_watch.on_ask = self._stopping.note

    # ---------------------------------------------------------------- the end

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._sent_buffers is not None:
            self._sent_buffers.before_evaluation()  # of `trainer.test`, which sets up anew
        if self._stopping is not None and self._stopping.meet(last=True):  # noted after the last batch had begun
            raise self.namespace.sigterm

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._failure_watch is not None and not isinstance(exception, Done):
            self._failure_watch.report(exception)

    def teardown(self) -> None:
        if without_ranks():
            return  # nothing was set up, and the model may be on meta
        self._leave_building()
        # set-up may have failed because the layers have no values, which nobody can move
        module = self.lightning_module
        without_values = module is not None and any(x.is_meta for x in module.parameters())
        if (self._undivided or self.parallel is None) and not without_values:
            super().teardown()
        else:  # module and optimizers stay on their device, where whoever saves them after the fit gathers them
            assert self.accelerator is not None and self.cluster_environment is not None
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
        if self.parallel is not None and self.parallel.expects_parts:
            self.parallel.expects_parts = False
        if self.pipeline is not None:
            self.pipeline.close()
        if self.sharding is not None:
            self.sharding.shown.hide()  # callbacks copy the module in `setup`, and torch no gradient that is a DTensor
        if self._batch_norms is not None:
            self._batch_norms.leave()
        self._leave_loaders()
        self._leave_averages()
        self._end_detours()
        self._leave_gradients()
        self._background.close()
        if self._failure_watch is not None:
            if self._failure_watch.active:
                self.barrier()  # as long as one rank still works, all of them watch
            self._failure_watch.stop()


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
        "megatp", made, description="Megatron's tensor, sequence, pipeline and data parallelism", override=True
    )
    return made
