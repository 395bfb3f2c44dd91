"""The gradient methods of MegaTPStrategy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.commands import Done, requested
from lightning_megatp.containers import parameters_of
from lightning_megatp.gradients.accumulated import AccumulatedGradients
from lightning_megatp.gradients.buckets import GradientBuckets
from lightning_megatp.gradients.clipping import clip
from lightning_megatp.gradients.groups import Groups
from lightning_megatp.gradients.wide import narrow, widen
from lightning_megatp.hooks.around import explained
from lightning_megatp.optimizers.elementwise import check_by_tensor, check_one_step, reads_losses
from lightning_megatp.optimizers.nested import inner_optimizers, with_inner
from lightning_megatp.optimizers.shared_out import refuse_shared_out, shares_out
from lightning_megatp.optimizers.whole_steps import WholeSteps
from lightning_megatp.parts.rows import replace_parameters
from lightning_megatp.pipeline.actions import Actions
from lightning_megatp.pipeline.batch import Backward
from lightning_megatp.pipeline.by_hand import ByHand
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.schedules.trace import StepTrace
from lightning_megatp.strategy.copies import CopyMethods
from lightning_megatp.strategy.inspection import InspectionMethods
from lightning_megatp.user_hooks import users_hooks

_BETWEEN_BATCHES = ("on_train_batch_end", "on_train_batch_start", "on_validation_start", "on_validation_epoch_start")
"""Hooks that run after a batch that only accumulates."""


class GradientMethods(CopyMethods, InspectionMethods):
    """What Lightning calls from the loss to the optimizer's step: backward, and the sums over ranks."""

    _trace: StepTrace | None
    _whole_steps: WholeSteps

    def _set_up_gradients(self, bucket_mb: float) -> None:
        """Take the argument that is about gradients.

        Raises:
            ValueError: a size below 0.
        """
        if bucket_mb < 0:
            raise ValueError(f"MegaTPStrategy: bucket_mb={bucket_mb}, but a size is 0 or more MiB.")
        self.bucket_mb = bucket_mb
        self._before_split: list[tuple[weakref.ref[nn.Parameter], str]] = []
        self._buckets: GradientBuckets | None = None
        self._window_open = False
        """Whether batches were accumulated since the gradients were averaged last."""
        self._accumulated = AccumulatedGradients()
        self._walked: tuple[tuple[int, list[int]], list[nn.Parameter]] | None = None
        """When the module was walked last, and its parameters."""
        self._bucketed: tuple[list[nn.Parameter], list[bool], bool] | None = None
        """What the buckets were made for: the parameters, which of them are trained, and whether a window was open."""
        self._accumulating = False
        """Whether the optimizer steps after a later batch than this."""
        self._went_backward = False
        self._steps_by_hand: ByHand | None = None
        self._shares_out: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether optimizers talk to other ranks."""
        self._reads_losses: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether they go by what closures return."""
        self._looked_at_between = False
        """Whether hooks of the user's run between two batches, which may read and change parameters."""

    # ---------------------------------------------------------------- optimizers

    def setup_optimizers(self, trainer: Any) -> None:
        """Each pipeline stage optimizes what it holds, which may be nothing, though `configure_optimizers` finds the
        parameters of all."""
        self._groups = Groups(self._parallel(), self.pipeline, self.sharding, lambda: [*with_inner(self.optimizers)])
        explaining = explained("configure_optimizers") if self.pp > 1 else contextlib.nullcontext()
        with self._groups.whole(), self.among_copies(), explaining:
            super().setup_optimizers(trainer)
            self._give_new_parameters()
            if not self._undivided:
                self._groups.order_alike(self._mesh())
        for optimizer in with_inner(self.optimizers) if self.pp > 1 else ():
            if not inner_optimizers(optimizer):
                check_by_tensor(optimizer, self.pp)

    def _remember_parameters(self, module: nn.Module) -> None:
        """Before they are split: an optimizer may have been made of them, as LightningCLI does. Weakly, since most are
        let go of; and only those that nothing swaps later, which it couldn't then: recorded ones, and DTensors."""
        named = module.named_parameters(remove_duplicate=False)
        self._before_split = [(weakref.ref(parameter), name) for name, parameter in named]

    def _give_new_parameters(self) -> None:
        """In place of those from before the split, which the module does not hold any more."""
        now = dict(self._parallel().module.named_parameters(remove_duplicate=False))
        known = {id(parameter) for parameter in now.values()}
        alive = ((reference(), name) for reference, name in self._before_split)
        new = {id(parameter): now[name] for parameter, name in alive if id(parameter) not in known and name in now}
        for optimizer in with_inner(self.optimizers):
            replace_parameters(optimizer, lambda parameter: new.get(id(parameter), parameter))
        self._before_split = []

    def _prepare_optimizers(self, trainer: Any) -> None:
        """Make them, of what this rank holds; see whether they can step a part of a parameter; and make the buckets."""
        parallel = self._parallel()
        self.setup_optimizers(trainer)
        if self.sharding is not None:
            self.sharding.check_known(self.optimizers)
        self._looked_at_between = any(users_hooks((parallel.module, *trainer.callbacks), _BETWEEN_BATCHES))
        self._whole_steps = WholeSteps(parallel)
        if self.sharding is not None:
            refuse_shared_out(self.optimizers)
        self._try_optimizers(self.optimizers)
        self._refresh_buckets()

    def _try_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Whether they can step what this rank holds, or have to be given more."""
        optimizers = list(with_inner(optimizers))
        if self.sharding is not None:
            self.sharding.give_to(optimizers)
        divided = self._parallel().sharded or self.sharding
        for optimizer in optimizers if divided or self.pp > 1 else ():
            with self._ranks_of(optimizer):
                check_one_step(optimizer)
                if divided and not inner_optimizers(optimizer):
                    self._whole_steps.prepare(optimizer)

    def _ranks_of(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Around the step of an optimizer, which may talk to other ranks: these are copies of the model."""
        if self._default_group is None:
            return contextlib.nullcontext()
        if optimizer not in self._shares_out:
            self._shares_out[optimizer] = shares_out(optimizer)
        return self._default_group.used() if self._shares_out[optimizer] else contextlib.nullcontext()

    def _closure_loss(self, optimizer: Optimizer, loss: Any) -> Any:
        """What an optimizer is told that a closure returned. One that decides by it has to decide the same on all
        data-parallel ranks, as by the gradients: it is told the mean of their losses.

        Communication: where it does, one all-reduce of a number over dp.
        """
        if self._mesh().size("dp") == 1 or not isinstance(loss, Tensor):
            return loss
        if optimizer not in self._reads_losses:
            self._reads_losses[optimizer] = not shares_out(optimizer) and reads_losses(optimizer)
        return self.reduce(loss.detach()) if self._reads_losses[optimizer] else loss

    @contextlib.contextmanager
    def _as_on_one_device(self) -> Iterator[None]:
        """Around hooks that give parameters to optimizers."""
        with self._groups.whole():
            yield
        self._try_optimizers(self.optimizers)

    # ---------------------------------------------------------------- backward, and the optimizers' step

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's signal that gradients are only accumulated in this batch."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _begins_window(self) -> bool:
        """Whether this batch is the first of those whose gradients are accumulated."""
        trainer = self._trainer()
        return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        parallel, module = self._parallel(), self._module()
        self._went_backward = True
        if self._alone:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self.pipeline is not None:
            return self._finish_pipeline(self.pipeline, closure_loss)
        self.pre_backward(closure_loss)
        with parallel.context.running(user_code=False):
            parallel.partial.trace([closure_loss])
            if self.sharding is not None:
                if module.automatic_optimization and self._begins_window():
                    self.sharding.forget_unreduced()  # of the step's own backwards: Lightning has cleared them since
                self.sharding.drop_old()
            self._set_aside_summed()
            self._change_gradients(widen)
            self._refresh_buckets()
            if self._buckets is not None:
                self._buckets.enabled = not self._accumulating
            if self.sharding is not None:
                self.sharding.before_backward(last=not self._accumulating)
                closure_loss = self.sharding.from_step(closure_loss)
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            # activation checkpointing runs the user's forward again
            with contextlib.nullcontext() if self._undivided else parallel.user_code():
                self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            if self.sharding is not None:
                self.sharding.collect()
                self.sharding.give_to(with_inner(self.optimizers))
                if not module.automatic_optimization:
                    self.sharding.begin()  # the step goes on
                elif self._accumulating and self._looked_at_between:
                    self.sharding.end()
            self._sum_or_accumulate()
            closure_loss = self._show_gradients(closure_loss)
        self.post_backward(closure_loss)
        return closure_loss

    def _show_gradients(self, closure_loss: Tensor) -> Tensor:
        """Gradients are what they will be after this batch: to whoever looks at them."""
        self._window_open = self._accumulating
        if self.sharding is not None:
            self.sharding.shown.show()
        self._verify_gradients()
        self._parallel().keep_whole_where_used_outside(with_inner(self.optimizers))
        shown: Tensor = self.precision_plugin.post_backward(closure_loss, self._module())
        return shown

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

    def _pipeline_backward(self) -> Backward:
        """How a pipeline's last stage scales its losses, and the hook before the first backward."""
        module, plugin = self._module(), self.precision_plugin
        accumulated, scaler = module.trainer.accumulate_grad_batches, getattr(plugin, "scaler", None)
        # else gradients of earlier backwards may be there
        in_batch = accumulated == 1 and module.automatic_optimization

        def scale(loss: Tensor) -> Tensor:
            loss = loss / accumulated
            return loss if scaler is None else scaler.scale(loss)

        def before(loss: Tensor) -> None:
            if scaler is not None:
                scaler.scale(torch.zeros((), device=self.root_device))  # makes its state, where no loss is scaled
            self.namespace.precision.pre_backward(plugin, loss, module)  # the hooks, without scaling again

        def complete(stage: int, factor: Tensor) -> None:
            assert self.pipeline is not None
            if self.sharding is not None:
                reduced = self.pipeline.reduces_each
                self.sharding.reduce_units(self.pipeline.units_of(stage), None if reduced else factor)
            if in_batch and self._buckets is not None:
                if not self._buckets.began:
                    self._refresh_buckets()  # a callback may have unfrozen some, the dry run may have lent some
                self._buckets.complete(self.pipeline.part_of(stage), factor)

        early = self._mesh().size("dp") > 1 and (self.sharding is not None or in_batch)
        return Backward(scale, before, complete if early else None)

    def _by_hand(self, pipeline: Pipeline) -> ByHand:
        """What runs the module's steps, if they optimize by hand."""
        if self._steps_by_hand is None:
            opened = pipeline.last_stage.opened
            clipping = functools.partial(clip, parallel=pipeline.parallel, mesh=pipeline.mesh)
            actions = Actions(pipeline.parallel, pipeline.slicer, opened, self._groups.order, clipping)
            self._steps_by_hand = ByHand(pipeline, actions)
        return self._steps_by_hand

    def _finish_pipeline(self, pipeline: Pipeline, closure_loss: Tensor) -> Tensor:
        """The backward of a batch that went through the pipeline: its gradients are there, and are completed."""
        self._set_aside_summed()
        pipeline.release(() if self._buckets is None else self._buckets.early)
        if self.sharding is not None:
            self.sharding.collect()
            self.sharding.give_to(with_inner(self.optimizers))
        if self._buckets is None or not (self._accumulating or self._buckets.began):
            self._refresh_buckets()
        with pipeline.executor.recorded("gradients"):
            self._sum_or_accumulate()
        closure_loss = self._show_gradients(closure_loss)
        self.post_backward(closure_loss)
        return closure_loss

    def _sum_or_accumulate(self) -> None:
        """After a backward: sum its gradients over the ranks, and those that were accumulated before; or wait for a
        later one."""
        if not self._accumulating:
            self._sum_gradients()
        elif self._sets_aside:
            self._accumulated.leave(self._held_parameters())

    def _sum_gradients(self) -> None:
        parallel = self._parallel()
        if self._buckets is not None:
            self._buckets.finish()
        self.parallelism.finalize_gradients(parallel)
        self._change_gradients(narrow)
        if self.pipeline is not None:
            self.pipeline.shared.sum_gradients()
        parallel.partial.forget()
        self._accumulated.give_back()

    def _set_aside_summed(self) -> None:
        if self._sets_aside:
            self._accumulated.set_aside(self._held_parameters())

    @property
    def _sets_aside(self) -> bool:
        """Whether gradients that were summed may meet others that were not."""
        return not (self._module().automatic_optimization and self.tp == self.pp == 1)

    def _held_parameters(self) -> list[Tensor]:
        parallel = self._parallel()
        every = self._all_parameters(self.lightning_module) if self.pipeline is None else parallel.names.values()
        return [parallel.held(parameter) for parameter in every]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        no_closure = getattr(closure, "__name__", "") == "do_nothing_closure"  # of LightningOptimizer.step(), manually
        if no_closure and not self._went_backward and any(p.grad is not None for p in parameters_of(optimizer)):
            raise RuntimeError(
                "MegaTPStrategy: the optimizer is stepped, but no gradient came from `self.manual_backward(loss)`, so"
                " none was summed over the ranks. Use it instead of `loss.backward()`."
            )
        if self._alone:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        module, context = self._module(), self._parallel().context
        self._try_optimizers([optimizer])  # hooks may have given it more parameters
        by_hand = None if module.automatic_optimization else self.sharding
        of_step = context.user_code  # in manual optimization: a closure is the step's code, and hooks are not

        def run() -> Any:  # twice, for an optimizer that asks for the gradients elsewhere, too (SAM)
            if self.sharding is not None:
                self.sharding.take_back_rows()
            if by_hand is not None and not no_closure:
                by_hand.begin()
            with context.running(of_step):
                result = closure()
            if self._accumulated.wait_for(parameters_of(optimizer)):  # its last backward was told not to
                self._sum_gradients()
            if by_hand is not None:
                by_hand.end()  # hooks find rows and their gradients
            return self._closure_loss(optimizer, result)

        traced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._trace is not None and self.pipeline is not None:
            traced = self._trace.step(self.pipeline, self._mesh())
        with traced, context.running(user_code=False), self._ranks_of(optimizer):
            stepped = super().optimizer_step(optimizer, run, model, **kwargs)
        if self.pipeline is not None:
            self.pipeline.loans.renew()
        if self.sharding is not None:
            self.sharding.take_back_rows()
            self.sharding.end()  # what is gathered has the values from before
        if by_hand is not None:
            by_hand.begin()  # the step goes on
        return stepped

    # ---------------------------------------------------------------- data-parallel buckets

    def _refresh_buckets(self) -> None:
        """Make the gradient buckets for the parameters that now require a gradient (a callback may unfreeze some)."""
        mesh, module = self._mesh(), self._module()
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
        held = [id(p) for optimizer in self.optimizers for p in parameters_of(optimizer)]
        moment = module.trainer.current_epoch, held
        if self.pipeline is not None or self._walked is None or self._walked[0] != moment:
            self._walked = moment, list(module.parameters())
        return self._walked[1]

    def _forget_abandoned(self) -> None:
        """A batch begins to accumulate while the one before waited for another: their epoch was ended."""
        automatic = self._module().automatic_optimization
        if self._window_open and self._begins_window() and automatic and self.sharding is not None:
            self.sharding.forget_unreduced()

    def _leave_gradients(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None
        if self.sharding is not None:
            self.sharding.forget_unreduced()
        self._walked = self._bucketed = self._steps_by_hand = None
        self._accumulated.clear()
        self._window_open = False
