"""Pipeline: a user's own step over the microbatches of one batch, on the stages of this rank.

What a Trainer sees is one step per batch: one loss, one call of each hook, one value per logged name, the same on every
rank. What happens is a schedule of microbatches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.pipeline.executor import Executor
from lightning_megatp.pipeline.hooks import Hook, hooks_after_steps
from lightning_megatp.pipeline.leftovers import Attributes
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.pipeline.logs import Call, Logs, merge
from lightning_megatp.pipeline.plan import Relay, SliceError, SlicePlan
from lightning_megatp.pipeline.schedule import Schedule
from lightning_megatp.pipeline.slicing import Slicer
from lightning_megatp.pipeline.split import batch_size, merge_outputs, split_batch
from lightning_megatp.pipeline.weights import TargetCount
from lightning_megatp.shim.torch import tensor_version

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Settings:
    """What a run needs to know beyond the batch.

    Args:
        microbatches: per batch, at most.
        schedule: number of microbatches -> the schedule of training.
        evaluation: the same for validation, test and predict.
        stages: the units of each stage, if the user chose them.
    """

    microbatches: int
    schedule: Callable[[int], Schedule]
    evaluation: Callable[[int], Schedule]
    stages: Sequence[Sequence[str]] | None = None


@dataclass
class Backward:
    """How the last stage starts a backward, and what every stage calls before its first.

    Args:
        scale: the loss's factor for gradient accumulation and for float16.
        before: called once per batch, with a scalar.
    """

    scale: Callable[[Tensor], Tensor]
    before: Callable[[Tensor], None]


@dataclass(frozen=True)
class Shared:
    """A parameter that several stages hold: a tied one, one outside of all units, or one that is lent."""

    name: str
    shape: torch.Size
    """On this tensor rank."""
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Shared:
        return cls(name, parameter.shape, parameter.dtype)


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
    ) -> None:
        self.parallel, self.slicer, self.executor = parallel, slicer, executor
        self.mesh, self.settings, self.logs, self.metrics = mesh, settings, logs, metrics
        self.loans = loans
        self.shared, self.stage_of_unit, self.compiled = shared, stage_of_unit, compiled
        self.stage_parameters = stage_parameters
        self.stateful = False
        """Whether a step left something on the module, which then exists on the last stage only."""
        self._returned = False
        """Whether the last step returned something that exists on the last stage only."""
        self._hooks: list[Detour] = []
        self._plans: dict[tuple[str, Hashable], SlicePlan] = {}
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._parked: list[tuple[Tensor, Tensor]] = []

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage: the loss, metrics, logs, and what a step leaves on the module."""
        return self.mesh.is_last_stage

    def use(self, settings: Settings) -> None:
        """Go on with other numbers of microbatches, or in another order."""
        self.settings = settings
        self._schedules.clear()

    def open(self) -> None:
        """Stand in for those methods of the module that mean something else on several stages, until `close`."""
        self.close()
        module = self.parallel.module
        self.logs.open()
        self.metrics.open()
        after = list(hooks_after_steps(module))
        self._hooks = [Detour(module, hook.name, functools.partial(self._run_hook, hook)) for hook in after]

    def close(self) -> None:
        """Give the module its own methods back. Its units stay intercepted: what other stages own is gone."""
        for detour in self._hooks:
            detour.end()
        self._hooks = []
        self.metrics.close()
        self.logs.close()

    # ---------------------------------------------------------------- a batch

    def train(self, step: Step, batch: Any, backward: Backward) -> Any:
        """Run forward and backward of a batch. The gradients are parked, see `release`.

        Args:
            step: the user's training step on a microbatch, in its contexts.
            batch: the same on all ranks of one copy of the model.

        Returns:
            What the step returned for the batch: all of it on the last stage, the loss alone on the others.
        """
        held = self._set_aside()
        run = self._run("train", step, batch, backward)
        loss, factor = self._conclude(run)
        self._park(held, factor)
        outputs = run.merged_results() if self.is_last else None
        return {**outputs, "loss": loss} if isinstance(outputs, Mapping) else loss

    def evaluate(self, kind: str, step: Step, batch: Any) -> Any:
        """Run the forward of a batch. What the step returned, on the last stage; None on the others."""
        run = self._run(kind, step, batch, None)
        self._conclude(run)
        return run.merged_results() if self.is_last else None

    def release(self) -> None:
        """Give the gradients of the last batch back to the parameters, in addition to what was accumulated before.

        Lightning clears gradients between a training step and its backward; the pipeline's backward is over then.
        """
        for parameter, gradient in self._parked:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._parked = []

    def sum_shared_gradients(self) -> None:
        """Sum over the stages the gradients of parameters that several of them hold.

        Communication: one all-reduce over pp per dtype, 2 (p - 1) / p of these parameters' elements and a flag each.
        """
        for dtype in dict.fromkeys(shared.dtype for shared in self.shared):
            group = [shared for shared in self.shared if shared.dtype == dtype]
            held = [self.parallel.names.get(shared.name) for shared in group]
            grads = [None if p is None else p.grad for p in held]
            flags = torch.tensor([grad is not None for grad in grads], dtype=dtype, device=self.mesh.device)
            parts = [
                torch.zeros(shared.shape, dtype=dtype, device=self.mesh.device) if grad is None else grad
                for shared, grad in zip(group, grads, strict=True)
            ]
            flat = torch.cat([*(part.reshape(-1) for part in parts), flags])
            dist.all_reduce(flat, group=self.mesh.group("pp"))
            *totals, flags = flat.split([*(part.numel() for part in parts), len(parts)])
            for shared, parameter, total, flag in zip(group, held, totals, flags.tolist(), strict=True):
                if parameter is not None:
                    lent = self.loans.is_lent(shared.name)  # its own stage has the sum, and the optimizer
                    parameter.grad = total.view(shared.shape) if flag > 0 and not lent else None

    def microbatches(self, batch: Any) -> Sequence[Any]:
        """The parts of a batch, by the user's `split_batch` or by the rule."""
        own_split = getattr(self.parallel.module, "split_batch", None)
        microbatches = (own_split or split_batch)(batch, self.settings.microbatches)
        if not isinstance(microbatches, Sequence) or not len(microbatches):
            raise ValueError("MegaTPStrategy: `split_batch` has to return a list of at least one microbatch.")
        return microbatches

    # ---------------------------------------------------------------- parts of it

    def _run(self, kind: str, step: Step, batch: Any, backward: Backward | None) -> _Run:
        microbatches = self.microbatches(batch)
        seed = self._shared_seed()
        self.metrics.next_batch()
        with self.metrics.apart():
            plans = [self._plan(kind, step, microbatch) for microbatch in microbatches]
            run = _Run(self, step, microbatches, plans, seed, backward)
            with self._noticing(run):
                self.executor.run(self._schedule(backward is not None, len(microbatches)), run)
        return run

    @contextlib.contextmanager
    def _noticing(self, run: _Run) -> Iterator[None]:
        """Find out whether anything is left on the module. Once something was, it is no question any more."""
        before = Attributes(self.parallel.module) if self.is_last and not self.stateful else None
        yield
        run.left_state = before is not None and Attributes(self.parallel.module).differ_from(before)

    def _run_hook(self, hook: Hook, call: Callable[[], Any]) -> Any:
        """Run one of the user's hooks: on all stages, or if steps left or returned something that exists on the last
        stage, there alone. What it logs is logged everywhere."""
        if not (self.stateful or (hook.gets_outputs and self._returned)):
            return call()
        seed = self._shared_seed()
        if not self.is_last:
            left, *self.metrics.resets = self._share([], [0.0, *self.metrics.resets])
            self.stateful = self.stateful or bool(left)
            return None
        before, versions = Attributes(self.parallel.module), self._versions()
        with self.metrics.apart(counts_resets=True), self.logs.recording() as calls, _seeded(seed):
            result = call()
        if versions != self._versions():
            raise RuntimeError(
                f"MegaTPStrategy: `{hook.name}` changes parameters, and runs on the last pipeline stage only, since"
                " what steps returned or left on the module exists there. Move that part to a callback, which runs on"
                " all stages."
            )
        self.stateful = self.stateful or Attributes(self.parallel.module).differ_from(before)
        merged = merge([calls], torch.ones(1, dtype=torch.float64, device=self.mesh.device))
        self._share(merged, [float(self.stateful), *self.metrics.resets])
        return result

    def _versions(self) -> list[int]:
        """Of the parameters: they count changes in place."""
        return [tensor_version(parameter) for parameter in self.parallel.module.parameters()]

    def _shared_seed(self) -> int:
        """Of the generator that is alike on all stages."""
        return int(torch.empty((), dtype=torch.int64).random_())

    def _plan(self, kind: str, step: Step, microbatch: Any) -> SlicePlan:
        key = kind, self.slicer.signature(microbatch)
        if key not in self._plans:
            plan = self.slicer.plan(_returning_a_loss(step) if kind == "train" else step, microbatch)
            self._check_touched(plan)
            self._check_alike(plan)
            self._lend(plan)
            self._plans[key] = plan
        return self._plans[key]

    def _lend(self, plan: SlicePlan) -> None:
        known = {shared.name for shared in self.shared}
        for name in self.loans.lend(plan.shared):
            if name not in known:
                self.shared = [*self.shared, Shared.of(name, self.slicer.stand_in(name))]

    def _check_touched(self, plan: SlicePlan) -> None:
        split = sorted(plan.touched & self.parallel.plan.parameters.keys()) if self.mesh.size("tp") > 1 else []
        if split:
            raise SliceError(
                f"the step uses `{split[0]}`, which the plan splits, outside of its own layer. With pp > 1 its parts"
                " can't be gathered there: take its layer out of the plan."
            )

    def _check_alike(self, plan: SlicePlan) -> None:
        """All stages must have planned the same, or they would wait for messages that never come."""
        digests: list[str] = [""] * self.mesh.size("pp")
        dist.all_gather_object(digests, plan.digest(), group=self.mesh.group("pp"))
        if len(set(digests)) > 1:
            raise SliceError(
                "the stages planned the same batch differently. What a step does between modules may not depend on the"
                " rank, on Python's or NumPy's random numbers, or on the order of a set; nor may parameters be frozen"
                " or unfrozen after fit began."
            )

    def _schedule(self, training: bool, microbatches: int) -> Schedule:
        key = training, microbatches
        if key not in self._schedules:
            make = self.settings.schedule if training else self.settings.evaluation
            self._schedules[key] = make(microbatches)
        return self._schedules[key]

    def _set_aside(self) -> list[tuple[Tensor, Tensor]]:
        held: list[tuple[Tensor, Tensor]] = [
            (p, p.grad) for p in self.parallel.module.parameters() if p.grad is not None
        ]
        for parameter, _ in held:
            parameter.grad = None
        return held

    def _park(self, held: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        parameters: list[Tensor] = [p for p in self.parallel.module.parameters() if p.grad is not None]
        self._parked = [(p, p.grad) for p in parameters if p.grad is not None]
        if factor != 1.0 and self._parked:
            torch._foreach_mul_([gradient for _, gradient in self._parked], factor)
        for parameter in parameters:
            parameter.grad = None
        for parameter, gradient in held:
            parameter.grad = gradient

    def _conclude(self, run: _Run) -> tuple[Tensor, float]:
        """Tell what only the last stage knows: the loss, the factor that makes the weights add up to 1, the logs, and
        whether more was left or returned there.

        Returns:
            The loss of the batch, and the factor.
        """
        if self.is_last:
            weights = run.weights()
            total = run.loss(weights)
            factor = float(run.provisional_total / weights.sum())
            facts = [float(total), factor, float(run.left_state), float(run.returns_more)]
            self._share(merge(run.logged, weights), facts)
        else:
            facts = self._share([], [0.0] * 4)
            total, factor = torch.tensor(facts[0], dtype=torch.float64, device=self.mesh.device), facts[1]
        self.stateful, self._returned = self.stateful or bool(facts[2]), bool(facts[3])
        return total, factor

    def _share(self, calls: Sequence[Call], facts: list[float]) -> list[float]:
        """Log everywhere what the last stage logged, and return its facts.

        Args:
            calls: of the last stage.
            facts: likewise; from the other stages their number counts.
        """
        group, source = self.mesh.group("pp"), self.mesh.ranks("pp")[0]
        if not self.is_last:
            received: list[float] = self.logs.receive(len(facts), group, source).tolist()
            return received
        self.logs.send(calls, torch.tensor(facts, dtype=torch.float64, device=self.mesh.device), group, source)
        return facts


@dataclass
class _Run:
    """One batch: what the executor drives."""

    pipeline: Pipeline
    step: Step
    microbatches: Sequence[Any]
    plans: Sequence[SlicePlan]
    seed: int
    backward: Backward | None
    results: dict[int, Any] = field(default_factory=dict)
    logged: list[list[Call]] = field(default_factory=list)
    """By microbatch, which the last stage runs in order."""
    left_state: bool = False
    _weights: dict[int, Tensor | float] = field(default_factory=dict)
    _counted: set[bool] = field(default_factory=set)
    _began_backward: bool = False

    def relays(self, boundary: int, microbatch: int) -> Sequence[Relay]:
        return self.plans[microbatch].relays[boundary]

    def forward(self, stage: int, microbatch: int, received: list[Tensor]) -> list[Tensor]:
        pipeline, plan = self.pipeline, self.plans[microbatch]
        last = stage == plan.n_stages - 1
        seed = _mixed(self.seed, microbatch)
        counting = TargetCount() if last else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_seeded(_mixed(seed, stage)))
            stack.enter_context(torch.set_grad_enabled(self.backward is not None and torch.is_grad_enabled()))
            if counting is not None:
                stack.enter_context(counting)
            calls = stack.enter_context(pipeline.logs.recording()) if last else []
            done = pipeline.slicer.run(plan, stage, self.step, self.microbatches[microbatch], received, seed)
        if not last:
            if self.backward is not None:
                needed = [x for x, r in zip(done.sent, plan.relays[stage + 1], strict=True) if r.requires_grad]
                pipeline.parallel.trace(needed, received)
            return list(done.sent)
        self.results[microbatch] = done.result
        self.logged.append(calls)
        self._weights[microbatch] = self._weight(counting, microbatch)
        if self.backward is None:
            return []
        return [self._root(_loss_of(done.result), microbatch, received)]

    def before_backward(self, stage: int, microbatch: int) -> None:
        if self.backward is not None and not self._began_backward:
            self._began_backward = True
            loss = _loss_of(self.results[microbatch]) if microbatch in self.results else torch.zeros(())
            with self.pipeline.logs.recording() as calls:
                self.backward.before(loss)
            if self.logged:
                self.logged[0] += calls

    def complete(self, stage: int) -> None:
        """Gradients of this stage are reduced with those of the others, in the strategy's backward."""

    @property
    def provisional_total(self) -> float:
        """By what the weights were divided in the losses, before their sum was known."""
        return self._reference() * len(self.microbatches)

    def weights(self) -> Tensor:
        """(m,) float64, of the microbatches.

        Raises:
            RuntimeError: some are numbers of targets, and others of samples.
        """
        if len(self._counted) > 1:
            raise RuntimeError(
                "MegaTPStrategy: the step averages one cross-entropy in some microbatches of a batch, and none or"
                " several in others, so what they weigh can't be told. Define `loss_weight(self, batch)` on the"
                " LightningModule."
            )
        device = self.pipeline.mesh.device
        order = [self._weights[i] for i in range(len(self.microbatches))]
        return torch.stack([torch.as_tensor(w, dtype=torch.float64, device=device) for w in order])

    def loss(self, weights: Tensor) -> Tensor:
        """The loss of the batch; nan for evaluation."""
        if self.backward is None:
            return torch.tensor(torch.nan)
        losses = torch.stack([_loss_of(self.results[i]).detach() for i in range(len(self.microbatches))])
        total: Tensor = (losses.double() * weights).sum() / weights.sum()
        return total.to(losses.dtype)

    @property
    def returns_more(self) -> bool:
        """Whether the step returns more than a loss."""
        result = self.results[0]
        if self.backward is None:
            return result is not None
        return isinstance(result, Mapping) and len(result) > 1

    def merged_results(self) -> Any:
        """What the steps returned, put together."""
        order = [self.results[i] for i in range(len(self.microbatches))]
        if order[0] is None:
            return None
        detached = [_detached(result) for result in order]
        return merge_outputs(detached, [float(w) for w in self.weights()])

    def _weight(self, counting: TargetCount | None, microbatch: int) -> Tensor | float:
        batch = self.microbatches[microbatch]
        own = getattr(self.pipeline.parallel.module, "loss_weight", None)
        if own is not None:
            weight: Tensor | float = own(batch)
            return weight
        assert counting is not None
        self._counted.add(len(counting.counts) == 1)
        if len(counting.counts) > 1:
            warn_once_per_run(
                "the step averages several cross-entropies, so its microbatches are weighted by their samples."
                " If they hold different numbers of targets, define `loss_weight(self, batch)` on the LightningModule."
            )
        if counting.own_reduction is not None and not counting.counts:
            warn_once_per_run(
                f"the step averages a cross-entropy by itself (reduction={counting.own_reduction!r}), so its"
                " microbatches are weighted by their samples. If they hold different numbers of targets, define"
                " `loss_weight(self, batch)` on the LightningModule. A loss that is a sum has to be divided by the"
                " step."
            )
        return counting.weight(batch_size(batch) or 1)

    def _root(self, loss: Tensor, microbatch: int, received: Sequence[Tensor]) -> Tensor:
        assert self.backward is not None
        self.pipeline.parallel.trace([loss], received)
        weight = torch.as_tensor(self._weights[microbatch], dtype=loss.dtype, device=loss.device)
        return self.backward.scale(loss * (weight / self.provisional_total))

    def _reference(self) -> float:
        """A typical weight, known before the first microbatch: so large numbers of targets don't blow up gradients."""
        return float(batch_size(self.microbatches[0]) or 1)


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"MegaTPStrategy: training_step returned {type(loss).__name__} instead of a loss. Under pipeline"
            " parallelism every step needs one: all stages take part in each batch. To skip a batch, leave it out of"
            " the data."
        )
    return loss


def _returning_a_loss(step: Step) -> Step:
    """For the dry run, which all stages make: a step without a loss is refused on all of them."""

    def checked(batch: Any) -> Any:
        result = step(batch)
        _loss_of(result)
        return result

    return checked


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, Mapping):
        return {key: _detached(value) for key, value in result.items()}
    if isinstance(result, (list, tuple)) and not hasattr(result, "_fields"):
        return type(result)(_detached(value) for value in result)
    return result


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers of one stage and microbatch; the generators go on afterwards as if nothing was drawn."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _mixed(seed: int, index: int) -> int:
    """Unrelated seeds for neighbouring indices."""
    x = (seed ^ (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return (x ^ (x >> 27)) % 2**63
