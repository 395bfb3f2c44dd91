"""The steps of MegaTPStrategy: a batch on its way through the user's training, validation, test or predict step."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_megatp.batches.lengths import refuse_lengths, warn_of_lengths
from lightning_megatp.batches.same import SameBatch
from lightning_megatp.gradients.in_steps import StepGradients
from lightning_megatp.gradients.wide import widen
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.optimizers.nested import with_inner
from lightning_megatp.parts.rows import finds_rows, used_outside_forward
from lightning_megatp.planner.measure import MemoryAccount
from lightning_megatp.recompute.offload import OffloadActivations
from lightning_megatp.shim.lightning import saves_averages_as_model
from lightning_megatp.shim.torch import inference_as_no_grad
from lightning_megatp.steps import StepKind
from lightning_megatp.strategy.around_hooks import HookMethods
from lightning_megatp.strategy.buffers import SentBuffers
from lightning_megatp.strategy.shadows import ShadowMethods


class StepMethods(HookMethods, ShadowMethods):
    """What Lightning calls for a batch. With a pipeline, its whole schedule runs within `training_step`."""

    _same_batch: SameBatch | None
    _sent_buffers: SentBuffers | None
    _memory_account: MemoryAccount | None
    _random_states: list[dict[str, Any]] | None
    _resume_random: Callable[[], None]

    def _set_up_steps(self, offload_activations: bool) -> None:
        self.offload_activations = offload_activations
        self._steps = 0
        """Steps of training that were made, in this run."""
        self._steps_of_epoch: Counter[tuple[Any, ...]] = Counter()
        """By kind and epoch."""
        self._as_hooks: set[StepKind] = set()
        """Kinds of evaluation whose steps put averages in the weights' place, in this run."""
        self._exchanges_averages = False
        """Whether a callback exchanges the module's values for averages before the next step."""

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self._same_batch is None else self._same_batch(batch)

    def on_train_start(self) -> None:
        super().on_train_start()
        warn_of_lengths(self._trainer(), self._mesh())

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._before_evaluation(StepKind.VALIDATE)

    def on_test_start(self) -> None:
        super().on_test_start()
        self._before_evaluation(StepKind.TEST)

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._before_evaluation(StepKind.PREDICT)

    def _before_evaluation(self, kind: StepKind) -> None:
        self._refuse_lengths(kind)
        if not self._undivided and kind not in self._as_hooks and (names := self._averages_in(kind)):
            self._run_as_hooks(kind, names)
        if self._sent_buffers is not None:
            self._sent_buffers.before_evaluation()
            self._exchanges_averages = any(map(saves_averages_as_model, self._trainer().callbacks))

    def _run_as_hooks(self, kind: StepKind, averages: Sequence[str]) -> None:
        """From now on run steps of a kind as hooks are: on all ranks, each with its part of the weights.

        Args:
            averages: attributes that they put in the weights' place.
        """
        self._as_hooks.add(kind)
        trainer, parallel, hooks = self._trainer(), self._parallel(), [(self._module(), kind.method)]
        if parallel.shadows is not None:
            self._detours += parallel.shadows.around(trainer, hooks)
        self._detours += self._in_contexts(parallel, hooks)
        self._detours += self._with_weights(trainer, parallel, hooks)
        if self.pipeline is not None:
            warn_once_per_run(
                f"`{kind.method}` has to do with averages of the weights (`{averages[0]}`), so it is run as hooks are:"
                " pipeline stages work in turn, not at the same time. For a long validation let"
                f" `{kind.hook('epoch_start')}` and `{kind.hook('epoch_end')}` put averages in the weights' place."
            )

    def _refuse_lengths(self, kind: StepKind) -> None:
        if self.sharding is None:
            return
        trainer = self._trainer()
        validation = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        batches = {
            StepKind.VALIDATE: validation,
            StepKind.TEST: trainer.num_test_batches,
            StepKind.PREDICT: trainer.num_predict_batches,
        }
        refuse_lengths(kind, batches[kind], self.zero.level, self._mesh())

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._random_states is not None:
            if self._trainer().fit_loop.batch_idx > 0:
                self._resume_random()  # in the middle of an epoch: starting the loader again has drawn numbers
            self._random_states = None
        if self._alone:
            return super().training_step(*args, **kwargs)
        if self._first(StepKind.TRAIN) or self._steps == 1:  # after the first step, and once per epoch
            axes = ("dp", "tp") if self.sharding is None else ("tp",)
            self._parallel().adopt_copies()
            self._parallel().check_replicas(self._mesh().group(*axes))
            if self.pipeline is not None:
                self.pipeline.shared.check_alike()
                self.pipeline.plans.agree_on_trained()
        self._steps += 1
        if self._sent_buffers is not None:
            self._sent_buffers.before_training_step()
        if self.pipeline is None:
            if self.sharding is not None:
                self._forget_abandoned()
                self.sharding.begin()
            by_hand = not self._module().automatic_optimization
            gradients = StepGradients(self._parallel(), self._mesh())
            with gradients.changed_by_hand() if by_hand else contextlib.nullcontext():
                outputs = self._watched(StepKind.TRAIN, super().training_step)(*args, **kwargs)
            if self.sharding is not None and by_hand:
                self.sharding.end()
            if self._steps == 1 and (recomputation := self._parallel().recomputation) is not None:
                recomputation.warn_if_unused()
        else:
            step, batch = self._on_microbatch(StepKind.TRAIN, super().training_step, args)
            self._change_gradients(widen)
            if self._module().automatic_optimization:
                outputs = self.pipeline.train(step, batch, self._pipeline_backward())
            else:
                outputs = self._by_hand(self.pipeline).train(step, batch, self._pipeline_backward())
        if self._sent_buffers is not None:
            self._sent_buffers.after_training_step(accumulated=self._accumulating)
        if self._first_batch is not None:
            with self.precision_plugin.train_step_context():
                self._first_batch.run_and_compare_loss(outputs, args, self.root_device, self.pipeline)
        return outputs

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.VALIDATE, super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.TEST, super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(StepKind.PREDICT, super().predict_step, args, kwargs)

    def _evaluate(self, kind: StepKind, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._alone:
            return step(*args, **kwargs)
        if kind in self._as_hooks:
            with inference_as_no_grad():
                return self._parallel().outputs(step(*args, **kwargs))
        exchanged, self._exchanges_averages = self._exchanges_averages, False
        if exchanged and self._sent_buffers is not None:
            self._sent_buffers.before_averaged_step()
        if self.pipeline is None:
            with contextlib.nullcontext() if self.sharding is None else self.sharding.evaluating():
                outputs = self._watched(kind, step)(*args, **kwargs)
        else:
            outputs = self.pipeline.evaluate(kind, *self._on_microbatch(kind, step, args))
        self._parallel().keep_whole_where_used_outside(with_inner(self.optimizers))
        return outputs

    def _on_microbatch(self, kind: StepKind, step: Callable[..., Any], args: Any) -> tuple[Callable[[Any], Any], Any]:
        """The user's step as a function of a microbatch, and the batch."""
        batch, *rest = args
        run = self._watched(kind, step)
        return lambda microbatch: run(microbatch, *rest), batch

    def _watched(self, kind: StepKind, step: Callable[..., Any]) -> Callable[..., Any]:
        """The user's step in its contexts. Some are watched, with all their microbatches."""
        parallel, watch = self._parallel(), self._is_watched(kind)
        parallel.uncompiled = watch
        if watch:
            parallel.adopt_copies()
        if kind is StepKind.TRAIN and self._memory_account is not None:
            step = self._memory_account.watching(step, parallel)
        if self.sharding is not None:
            self.sharding.watches = watch

        def run(*args: Any, **kwargs: Any) -> Any:
            context = contextlib.nullcontext() if self._undivided else parallel.step(watch)
            try:
                with inference_as_no_grad(), self.counting_copies(), context, self._offloading(kind):
                    return parallel.outputs(step(*args, **kwargs))
            except (RuntimeError, AssertionError) as error:
                if self.sharding is None or not finds_rows(error):
                    raise
                raise used_outside_forward(kind, self.zero.level) from error
            except StopIteration as error:  # Lightning would take it for the end of the data, on this rank alone
                raise RuntimeError(
                    f"MegaTPStrategy: the {kind} step raised StopIteration: some `next(...)` found nothing."
                ) from error
            except AttributeError as error:
                if self.pipeline is None:
                    raise
                raise RuntimeError(
                    f"MegaTPStrategy: the {kind} step raised AttributeError: {error}. With pp > 1, what a module sets"
                    " on itself in its forward (an auxiliary loss, a cache) is there on its own pipeline stage only:"
                    " return it from the forward, or keep its module on the last stage by `stages=[[...], ...]`."
                ) from error

        if self.sharding is None or self.pipeline is not None:
            return run
        sharding = self.sharding
        return lambda *args, **kwargs: sharding.step(lambda: run(*args, **kwargs))

    def _offloading(self, kind: StepKind) -> contextlib.AbstractContextManager[None]:
        if not self.offload_activations or kind is not StepKind.TRAIN:
            return contextlib.nullcontext()
        parallel = self._parallel()
        with parallel.context.running(user_code=False):
            gathered = (divided.whole for divided in parallel.divided.values())
            held = [*parallel.module.parameters(), *parallel.module.buffers(), *gathered]
        return OffloadActivations(held, self.root_device.type == "cuda")

    def _first(self, kind: StepKind) -> bool:
        """Whether the step that begins is the first of its kind in this epoch."""
        return not self._steps_of_epoch[self._moment(kind)]

    def _is_watched(self, kind: StepKind) -> bool:
        """Whether the step that begins is one of those of its kind in this epoch that are watched, since a step may
        change: the first, second, fourth, eighth, ...; and those in which there are hooks that no plan knows of."""
        moment, parallel = self._moment(kind), self._parallel()
        self._steps_of_epoch[moment] += 1
        return self._steps_of_epoch[moment].bit_count() == 1 or (parallel.has_regions and parallel.late_hooks.any())

    def _moment(self, kind: StepKind) -> tuple[Any, ...]:
        trainer = self._trainer()
        return kind, trainer.current_epoch, kind is StepKind.VALIDATE and trainer.sanity_checking
