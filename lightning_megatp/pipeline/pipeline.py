"""Pipeline: a user's own step over the microbatches of one batch, on the stages of this rank.

What a Trainer sees is one step per batch: one loss, one call of each hook, one value per logged name, the same on every
rank. What happens is a schedule of microbatches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatp.averaged_buffers import versions_of
from lightning_megatp.batches.split import check_dense, split_batch
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule, take_gradients
from lightning_megatp.pipeline.batch import Backward, BatchRun, Step
from lightning_megatp.pipeline.carried import CarriedState, OwnNumbers
from lightning_megatp.pipeline.executor import Executor
from lightning_megatp.pipeline.findings import Findings
from lightning_megatp.pipeline.hooks import cleared_unseen
from lightning_megatp.pipeline.last_stage import LastStage
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.pipeline.own_values import OwnValues
from lightning_megatp.pipeline.plans import Plans
from lightning_megatp.pipeline.remote.calls import RemoteCalls, warn_of_turns
from lightning_megatp.pipeline.remote.in_hooks import Together
from lightning_megatp.pipeline.remote.ways import Way, Ways
from lightning_megatp.pipeline.schedules.schedule import Schedule
from lightning_megatp.pipeline.seeds import shared_seed
from lightning_megatp.pipeline.settings import Settings
from lightning_megatp.pipeline.shared import Shared, SharedParameters
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.told.kept_values import KeptValues
from lightning_megatp.pipeline.told.logs import Logs
from lightning_megatp.pipeline.told.outputs import Outputs
from lightning_megatp.pipeline.whole_loss import WholeLoss, check_order
from lightning_megatp.plan.units import parts_of_one_stage
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.shim.transformers import is_pretrained
from lightning_megatp.snapshots.snapshot import FirstValues, Snapshot
from lightning_megatp.steps import StepKind
from lightning_megatp.user_hooks import mentions, users_hooks
from lightning_megatp.zero.sharding import ZeroSharding


class Pipeline:
    """The pipeline of one fit (or validate, test, predict) on one rank.

    Args:
        parallel: the module, its layers already swapped.
        slicer: cuts its steps.
        executor: runs schedules on this rank.
        mesh: who is where.
        settings: microbatches and schedules.
        logs: stands in for the module's `log`.
        metrics: stands in for what its metrics compute.
        shared: parameters that several stages hold, in the same order on all of them.
        loans: parameters that a plan uses on other stages than their own.
        stage_of_unit: unit name -> stage.
        stage_parameters: of each stage, before they are split over tensor ranks.
        compiled: modules whose weight gradients can't be put off, though the schedule would.
        touched: names of parameters that a step uses beside their units, as far as an example told.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        slicer: Slicer,
        executor: Executor,
        mesh: ParallelMesh,
        settings: Settings,
        logs: Logs,
        metrics: LastStageMetrics,
        shared: Sequence[Shared],
        loans: Loans,
        stage_of_unit: Mapping[str, int],
        stage_parameters: Sequence[int],
        compiled: Sequence[str] = (),
        touched: Collection[str] = (),
    ) -> None:
        self.parallel, self.slicer, self.executor = parallel, slicer, executor
        self.mesh, self.settings, self.logs, self.metrics = mesh, settings, logs, metrics
        self.loans = loans
        self.shared = SharedParameters(parallel, mesh, loans, shared)
        self.plans = Plans(parallel, slicer, mesh, loans, self.shared)
        self.outputs = Outputs(mesh)
        self.stage_of_unit, self.compiled = stage_of_unit, compiled
        self.stage_parameters, self.touched = stage_parameters, touched
        self.factor = 1.0
        """By what the gradients of the last batch have to be multiplied, since its weights add up to something else."""
        self._looks_for_carried = self._looks_for_numbers = True
        self._trained = 0
        """Batches of training so far."""
        self._evaluated: set[StepKind] = set()
        """The kinds of evaluation of which a batch was looked at."""
        self._is_first = True
        self._ways: dict[StepKind, Ways] = {}
        self._loss_units: set[str] = set()
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._parked: list[tuple[Tensor, Tensor]] = []
        self.last_stage = LastStage(parallel, slicer, mesh, logs, metrics, stage_of_unit, self._remote, self._run_unit)
        aggregates = self.last_stage.aggregates
        self.findings = Findings(parallel, slicer, self.plans, mesh, logs, metrics, aggregates)
        beside = [*self.last_stage.outside.values(), *(x for x in parallel.module.modules() if isinstance(x, Metric))]
        self._beside = [x for x in beside if not is_pretrained(x)]
        """What evaluation may change beside the units, metrics included."""

    @property
    def sharding(self) -> ZeroSharding | None:
        """What divides the parameters over the data-parallel ranks."""
        return self.parallel.sharding

    @property
    def reduces_each(self) -> bool:
        """Whether FSDP2 reduces the gradients of each microbatch by themselves, which takes the least memory. What all
        microbatches weigh has to be known before, and backwards have to leave no gradients for later."""
        if self.sharding is None or self.sharding.options.level < 2:
            return False
        return self.parallel.loss_weight is not None and not self._schedule(True, 1).defers_weights

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage: the loss, metrics, logs, and what a step leaves on the module."""
        return self.mesh.is_last_stage

    @property
    def own_stages(self) -> Sequence[int]:
        """The stages of this rank."""
        return self._schedule(True, 1).stages_of(self.executor.transport.rank)

    @functools.cached_property
    def own_values(self) -> OwnValues:
        """Gives microbatches their own of what units change."""
        units: dict[int, list[nn.Module]] = {stage: [] for stage in self.own_stages}
        for unit in self.own_units:
            units[self.stage_of_unit[unit]].append(self.parallel.module.get_submodule(unit))
        return OwnValues(units)

    @functools.cached_property
    def kept_values(self) -> KeptValues:
        """Tells the other stages what units set on themselves."""
        module, parts = self.parallel.module, parts_of_one_stage(self.parallel.module, self.stage_of_unit)
        modules = {name: module.get_submodule(name) for name in parts}
        modules = {name: part for name, part in modules.items() if not isinstance(part, Metric)}  # they count
        own = [name for name in modules if self.stage_of_unit[parts[name]] in self.own_stages]
        owners = (module, *self._trainer.callbacks)

        def is_named(attribute: str) -> bool:
            return any(mentions(owner, {attribute}, hook) for owner, hook in users_hooks(owners))

        return KeptValues(self.mesh, modules, own, is_named)

    @property
    def own_units(self) -> list[str]:
        """The units of this rank's stages."""
        return [unit for unit, stage in self.stage_of_unit.items() if stage in self.own_stages]

    @property
    def _trainer(self) -> Any:
        return self.parallel.module.trainer

    def units_of(self, stage: int) -> set[str]:
        """The units of a stage."""
        return {unit for unit, of in self.stage_of_unit.items() if of == stage}

    def part_of(self, stage: int) -> int:
        """The place of a stage in `by_stage`: later stages first, as their gradients are."""
        return sorted(self.own_stages, reverse=True).index(stage)

    def by_stage(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parameters of each stage of this rank; what several of them share, or is in no unit, is the last part."""
        stages: dict[int, set[int]] = {}
        for unit in self.own_units:
            for parameter in self.parallel.module.get_submodule(unit).parameters():
                stages.setdefault(id(parameter), set()).add(self.stage_of_unit[unit])
        parts: list[list[Tensor]] = [[] for _ in range(len(self.own_stages) + 1)]
        for tensor in parameters:
            of = stages.get(id(tensor), set())
            parts[self.part_of(*of) if len(of) == 1 else -1].append(tensor)
        return parts

    def use(self, settings: Settings) -> None:
        """Go on with other numbers of microbatches, or in another order."""
        self.settings = settings
        self._schedules.clear()

    def open(self) -> None:
        """Stand in for those methods of the module that mean something else on several stages, until `close`.

        Communication: see `Outputs.look_at`.
        """
        self.close()
        self.__dict__.pop("kept_values", None)  # another Trainer has other callbacks
        self.logs.open()
        self.metrics.open()
        self.last_stage.aggregates.open()
        self.outputs.look_at(self._trainer)
        self.last_stage.open()

    def close(self) -> None:
        """Give the module its own methods back. Its units stay intercepted: what other stages own is gone."""
        self.last_stage.close()
        self.last_stage.aggregates.close()
        self.metrics.close()
        self.logs.close()

    # ---------------------------------------------------------------- a batch

    def train(self, step: Step, batch: Any, backward: Backward) -> Any:
        """Run forward and backward of a batch. The gradients are parked, see `release`.

        Args:
            step: the user's training step on a microbatch, in its contexts.
            batch: the same on all ranks of one copy of the model.

        Returns:
            What the step returned for the batch: all of it on the last stage, the loss alone on the others, unless a
            callback asks for it.
        """
        if self.sharding is not None:
            self.sharding.begin()
            self.sharding.drop_old()
        run = self._prepared(StepKind.TRAIN, step, batch, backward)
        loss = self.go_backward(run, set(map(id, cleared_unseen(self.parallel.module.trainer))))
        more = self.outputs_of(StepKind.TRAIN, run)
        return {**(more or {}), "loss": loss} if more or run.results.are_mappings else loss

    def go_backward(self, run: BatchRun, cleared: Collection[int]) -> Tensor:
        """Run forward and backward of a batch, and park its gradients.

        Args:
            cleared: id of parameters whose gradients of earlier batches nobody needs.

        Returns:
            The loss of the batch.
        """
        if self.parallel.buffer_versions is None:
            self.parallel.buffer_versions = versions_of(self.parallel.module)
        parameters = self.parallel.undivided()
        held = [(p, gradient) for p, gradient in take_gradients(parameters) if id(p) not in cleared]
        self.execute(StepKind.TRAIN, run)
        concluded = self.last_stage.conclude(run)
        assert concluded is not None, "of training, a batch is run once"
        loss, self.factor = concluded
        self.kept_values.share()
        self._parked = take_gradients(parameters)
        if self.factor != 1.0 and self._parked:
            torch._foreach_mul_([gradient for _, gradient in self._parked], self.factor)
        for parameter, gradient in held:
            parameter.grad = gradient
        if self.sharding is not None:
            self._check_told()
            self.sharding.reduce_rest(run.factor)
            self.sharding.shown.park()
        if run.check is not None:
            self.findings.compare(run.check, run.step, run.seed, loss, run.results)
        if run.warns is not None and run.own_values is not None:
            for text in run.own_values.reasons(self.parallel.module):
                self.findings.add(text)
        if run.looks:
            self.findings.try_blocks(run.blocks, self.own_values.is_reason)
            self.findings.say()
        return loss

    def evaluate(self, kind: StepKind, step: Step, batch: Any) -> Any:
        """Run the forward of a batch. What the step returned, on the last stage; on the others None, unless a callback
        asks for it."""
        with contextlib.nullcontext() if self.sharding is None else self.sharding.evaluating():
            run = self._prepared(kind, step, batch, None)
            looks, check, blocks = run.looks, run.check, run.blocks
            ways = self._ways.setdefault(kind, Ways(self.slicer.tail))
            ways.enter((self._trainer.current_epoch, self._trainer.global_step, self._trainer.sanity_checking))
            way = ways.of_batch(bool(run.plans))
            run = run if way is Way.CUT else self._uncut(run, way, kind, batch)
            with self._undone_beyond_plan(run):
                self.execute(kind, run)
            if self.last_stage.conclude(run) is None:
                if run.beyond is not None:
                    warn_of_turns(kind, run.beyond)
                way = ways.instead
                run = self._uncut(run, way, kind, batch)
                self.execute(kind, run)
                self.last_stage.conclude(run)
        if check is not None and self.findings.all_are(run.check is check and run.beyond is None):
            self.findings.compare(check, step, run.seed, None, run.results)
        if looks:
            self.findings.try_blocks(blocks)
        if looks and self.is_last:
            self.findings.say()
        self.kept_values.share()
        ways.ran(way, self.last_stage.went_on)
        return self.outputs_of(kind, run)

    def _check_told(self) -> None:
        """After a batch, see whether its microbatches weighed what was said before.

        Raises:
            RuntimeError: gradients were summed over data-parallel ranks by weights that were others in the end.
        """
        if self.reduces_each and abs(self.factor - 1) > _ROUNDING:
            raise RuntimeError(
                "MegaTPStrategy: `loss_weight` returns another number after the step of a microbatch than before it, so"
                " it tells more than the batch that it is given. With zero=2 and zero=3 what microbatches weigh has to"
                " be known before. Count what is in the batch, or use zero=1."
            )

    def outputs_of(self, kind: StepKind, run: BatchRun) -> Any:
        """What a batch's steps returned beside the loss, where it is known."""
        if not self.last_stage.returned:
            return None
        taken = self.outputs.step_taken(kind, self.parallel.module)
        return self.outputs.sent(kind, run.results.merged(taken) if self.is_last else None)

    def release(self, except_for: Collection[int] = ()) -> None:
        """Give the gradients of the last batch back to the parameters, in addition to what was accumulated before.

        Lightning clears gradients between a training step and its backward; the pipeline's backward is over then.

        Args:
            except_for: id of parameters whose gradients come from elsewhere.
        """
        for parameter, gradient in self._parked:
            if id(parameter) in except_for:
                continue
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._parked = []

    def microbatches(self, batch: Any) -> Sequence[Any]:
        """The parts of a batch, by the user's `split_batch` or by the rule. Where each gathers parameters over the
        data-parallel ranks, all of them have as many parts as the one with the fewest rows.

        Raises:
            ValueError: `split_batch` returns no list, or more parts than there may be; the batch holds sparse tensors.

        Communication: one object all-gather over dp at zero=3, and at zero=2 where each part is reduced by itself.
        """
        check_dense(batch)
        microbatches = self._split(batch, self.settings.microbatches)
        if not (self.sharding is not None and (self.sharding.options.level == 3 or self.reduces_each)):
            return microbatches
        most = min(self.mesh.exchange(len(microbatches), "dp"))
        if most < len(microbatches):
            microbatches = self._split(batch, most)
        if len(microbatches) != most:
            raise ValueError(
                f"MegaTPStrategy: another data-parallel rank has a batch of {most} microbatches, and with"
                f" zero={self.sharding.options.level} all need as many; `split_batch(batch, {most})` returns"
                f" {len(microbatches)}. Let it return at most as many as it is asked for, use batches of the same size"
                " on all ranks, or zero=1."
            )
        return microbatches

    def _split(self, batch: Any, most: int) -> Sequence[Any]:
        microbatches = (self.parallel.split_batch or split_batch)(batch, most)
        if not isinstance(microbatches, Sequence) or not len(microbatches):
            raise ValueError("MegaTPStrategy: `split_batch` has to return a list of at least one microbatch.")
        return microbatches

    # ---------------------------------------------------------------- parts of it

    def _prepared(self, kind: StepKind, step: Step, batch: Any, backward: Backward | None) -> BatchRun:
        """A batch with its plans, about to be executed."""
        microbatches = self.microbatches(batch)
        if kind is StepKind.TRAIN:
            self.warn_of_one(len(microbatches))
        seed = shared_seed(self._trainer, kind)
        self.metrics.next_batch()
        with self.metrics.apart():
            plans = self.plans.of(kind, step, [*microbatches, *([batch] if self.slicer.tail else [])], seed)
        self.last_stage.expect(plans or ())
        whole = WholeLoss.of(batch, plans) if plans and self.slicer.tail else None
        if whole is not None and self.parallel.split_batch is not None:
            check_order(batch, microbatches)
        trains = kind is StepKind.TRAIN
        looks = self.begin_training() if trains else kind not in self._evaluated
        self._evaluated.add(kind)
        warns = self.reasons if looks and (trains or whole is not None) else None
        if whole is not None:
            whole.says = warns
        several = trains and len(microbatches) > 1
        return self.run_of(
            step,
            microbatches,
            (plans or [])[: len(microbatches)],
            seed,
            backward,
            whole=whole,
            warns=warns,
            carried=self._carried_state() if several else None,
            numbers=self.own_numbers() if several else None,
            own_values=self.own_values if several else None,
            looks=looks,
            check=self.findings.check(step, batch, microbatches, plans or [], seed) if looks else None,
            blocks=self.findings.block_check(step, batch, microbatches, plans or [], seed, self.own_units)
            if looks
            else None,
        )

    def begin_training(self) -> bool:
        """Count a batch of training.

        Returns:
            Whether it is looked at, for what is not one device's in its loss: microbatches may hold equal numbers of
            targets in one batch, and others in the next.
        """
        self._trained += 1
        return self._trained.bit_count() == 1

    @functools.cached_property
    def reasons(self) -> Callable[[str], None] | None:
        """Who is told why a loss may be another one; None for compiled code, which would be compiled anew for that."""
        return None if self._compiles else self.findings.add

    def warn_of_one(self, microbatches: int) -> None:
        """Look at the first batch: later ones may be what is left of a data set."""
        first, self._is_first = self._is_first, False
        if first and microbatches == 1 < self.settings.microbatches:
            warn_once_per_run(
                "a batch has one microbatch, so that the pipeline's stages wait for each other and never work at the"
                " same time: rows can't be divided further. Give the loader a batch_size of several rows (four per"
                " stage or more), or use pp=1."
            )

    def run_of(
        self,
        step: Step,
        microbatches: Sequence[Any],
        plans: Sequence[SlicePlan],
        seed: int,
        backward: Backward | None,
        **options: Any,
    ) -> BatchRun:
        """The stages of this rank on the microbatches of a batch. See `BatchRun`."""
        return BatchRun(
            parallel=self.parallel,
            slicer=self.slicer,
            logs=self.logs,
            device=self.mesh.device,
            step=step,
            microbatches=microbatches,
            plans=plans,
            seed=seed,
            backward=backward,
            opened=self.last_stage.opened,
            stages=self.own_stages,
            sharding=self.sharding,
            reduces_each=self.reduces_each,
            stage_of_unit=self.stage_of_unit,
            loss_units=self._loss_units,
            forwarded=self.kept_values.note,
            **options,
        )

    def _uncut(self, run: BatchRun, way: Way, kind: StepKind, batch: Any) -> BatchRun:
        """A run of the same batch in which the last stage runs its steps."""
        microbatches = [batch] if way is Way.WHOLE else run.microbatches
        return self.run_of(run.step, microbatches, run.plans, run.seed, None, remote=self._remote(kind))

    def _remote(self, kind: StepKind | None = None) -> RemoteCalls:
        return RemoteCalls(self.parallel.module, self.mesh, self.loans.rank_of_stage, kind)

    def running_units(self, hook: str) -> contextlib.AbstractContextManager[None]:
        """Around a hook that all stages run, between steps: the units that it calls run where they are."""
        return self.slicer.calls_decided_by(Together(self._remote(), hook, self._run_unit, self.parallel.context.meet))

    def _run_unit(self, call: Callable[[], Any]) -> Any:
        """One of this rank, between steps."""
        return call() if self.sharding is None else self.sharding.between_steps(call)

    @contextlib.contextmanager
    def _undone_beyond_plan(self, run: BatchRun) -> Iterator[None]:
        """On the last stage put back what steps of evaluation, and metrics, did to the module beside its units, if the
        batch has to be run once more."""
        if not self.is_last or run.remote is not None:
            yield
            return
        before = Snapshot(*self._beside, submodules=False)
        with FirstValues(before.tensors.values()) as values:
            yield
        if run.beyond is not None:
            before.restore()
            values.restore()

    def own_numbers(self) -> OwnNumbers | None:
        """What notes the numbers that steps set, and buffers, on the last stage in the first batch."""
        looks, self._looks_for_numbers = self._looks_for_numbers, False
        return OwnNumbers(self.last_stage.opened, self.last_stage.outside) if looks and self.is_last else None

    def _carried_state(self) -> CarriedState | None:
        """What looks for it in the first batch. Compiled code would be compiled twice, with it and without."""
        looks, self._looks_for_carried = self._looks_for_carried, False
        first_copy = self.mesh.rank("dp") == self.mesh.rank("tp") == 0
        return CarriedState(self.parallel.module) if looks and first_copy and not self._compiles else None

    @functools.cached_property
    def _compiles(self) -> bool:
        return any(map(is_compiled, self.parallel.module.modules()))

    def execute(self, kind: StepKind, run: BatchRun) -> None:
        """Run the schedule of a batch."""
        schedule = self._schedule(run.backward is not None, len(run.microbatches))
        group = self.parallel.default_group
        with (
            self.metrics.apart(),
            self.last_stage.noticing(run),
            self.kept_values.batch(kind, run.microbatches),
            self.slicer.batch(),
            contextlib.nullcontext() if run.own_values is None else run.own_values.batch(),
            contextlib.nullcontext() if group is None else group.used(),  # the step's, once for all microbatches
        ):
            if run.remote is not None:
                run.run_uncut()
            else:
                self.executor.run(schedule, run)

    def _schedule(self, training: bool, microbatches: int) -> Schedule:
        key = training, microbatches
        if key not in self._schedules:
            make = self.settings.schedule if training else self.settings.evaluation
            self._schedules[key] = make(microbatches)
        return self._schedules[key]


_ROUNDING = 1e-6
"""Larger than the rounding errors of sums of weights."""
