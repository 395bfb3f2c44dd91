"""What is found where a batch is not that of one device: looked for in some batches, and said once."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.batches.split import batch_size
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_of_stage, warn_once_per_run
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.block_check import BlockCheck, Coupling, kind_of
from lightning_megatp.pipeline.own_values import ONE_BY_ONE
from lightning_megatp.pipeline.plans import Plans
from lightning_megatp.pipeline.remote.calls import Serving
from lightning_megatp.pipeline.results import Results, Step, loss_in
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.running import Taken
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.tail_check import End, Finding, TailCheck
from lightning_megatp.pipeline.told.aggregates import Aggregates
from lightning_megatp.pipeline.told.logs import Call, Logs
from lightning_megatp.pipeline.whole_loss import has_order
from lightning_megatp.random_states import host_seeded, is_random_state, random_state, seeded
from lightning_megatp.shim.compiler import uncompiled
from lightning_megatp.tensor.random import generators_on


class Findings:
    """Looks, on the last stage, for what a batch's loss and logs would be on one device, and says what differs.

    Args:
        parallel: the module.
        slicer: cuts its steps.
        plans: of these.
        mesh: who is where.
        logs: stands in for the module's `log`.
        metrics: stands in for what its metrics compute.
        aggregates: stands in for their updates.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        slicer: Slicer,
        plans: Plans,
        mesh: ParallelMesh,
        logs: Logs,
        metrics: LastStageMetrics,
        aggregates: Aggregates,
    ) -> None:
        self._parallel, self._slicer, self._plans, self._mesh = parallel, slicer, plans, mesh
        self._logs, self._metrics, self._aggregates = logs, metrics, aggregates
        self._found: list[Finding] = []
        """Of this batch, in this copy of the model."""
        self._said: set[str] = set()
        self._coupled: set[Any] = set()
        """The kinds of blocks of which that was said."""
        self._turns = itertools.count()
        """Of blocks to be tried."""

    def add(self, text: str) -> None:
        """Note a reason for which the batch's loss may be another one."""
        by_hand = not getattr(self._parallel.module, "automatic_optimization", True)
        self._found.append(Finding.of(f"{text} {_BY_HAND}" if by_hand and "whole_loss" in text else text))

    def check(
        self, step: Step, batch: Any, microbatches: Sequence[Any], plans: Sequence[SlicePlan], seed: int
    ) -> TailCheck | None:
        """What compares a batch with one device; None unless all copies of the model can do it, with as many samples,
        since the tails of their steps may communicate.

        Args:
            step: the user's, in its contexts.
            plans: one per microbatch.
            seed: of the batch.

        Communication: an object all-gather over dp.
        """
        if not self._mesh.is_last_stage or self._slicer.tail:
            return None
        check = None
        orders = self._parallel.split_batch is not None
        if len(plans) > 1 and (not orders or has_order(batch, microbatches)):
            whole = self._plans.of_whole(step, batch, plans, seed)
            coupled = "" if whole is None else whole.couples
            if coupled:  # its samples may be as many as something else
                part = self._plans.of_whole(step, microbatches[0], plans, seed)
                coupled = coupled if part is not None and part.couples else ""
            check = TailCheck.of(batch, whole, plans, coupled)
        samples = None if check is None else (len(plans), batch_size(batch))
        return check if len(set(self._of_copies(samples))) == 1 else None

    def block_check(
        self,
        step: Step,
        batch: Any,
        microbatches: Sequence[Any],
        plans: Sequence[SlicePlan],
        seed: int,
        units: Sequence[str],
    ) -> BlockCheck | None:
        """What tries blocks of this rank; None if there is one microbatch, or the batch can't be followed.

        Args:
            step: the user's, in its contexts.
            plans: one per microbatch, and one of the batch where its tail is a stage.
            seed: of the batch.
            units: of this rank's stages.
        """
        turn = next(self._turns)
        samples, of_microbatches = batch_size(batch), [batch_size(x) or 0 for x in microbatches]
        if len(plans) < 2 or len(microbatches) < 2 or not samples or not of_microbatches[0]:
            return None
        tail = self._slicer.tail
        whole = plans[-1] if tail else self._plans.of_whole(step, batch, plans, seed)
        if whole is None:
            return None
        module = self._parallel.module
        units = [name for name in units if kind_of(module.get_submodule(name)) not in self._coupled]
        return BlockCheck(module, units, whole.unit_rows, samples, of_microbatches, seed, turn)

    def try_blocks(self, check: BlockCheck | None, is_said: Callable[[nn.Module], bool] = lambda unit: False) -> None:
        """After a batch: find blocks, of all stages, of which it matters which samples are together. Nothing is left of
        the calls. All stages and copies of the model have to take part.

        Args:
            check: tries them.
            is_said: whether another warning says so of a block.

        Communication: an object all-gather over dp and tp, one over pp, and what blocks send, three times or nine.
        """
        found: dict[tuple[str, Coupling], tuple[str, int, int]] = {}
        """By the class of the block, and how it couples samples: its name, those of a microbatch, and those of all."""
        tried = None if check is None else check.tried
        everywhere = self._mesh.exchange(tried, "dp", "tp")
        if check is not None and all(x == tried for x in everywhere):
            for name, coupling in check.coupled(self._run_block).items():
                unit = self._parallel.module.get_submodule(name)
                self._coupled.add(kind_of(unit))
                if not is_said(unit):
                    found.setdefault((type(unit).__name__, coupling), (name, check.microbatch, check.samples))
        every = ChainMap(*reversed(self._mesh.exchange(found, "pp")))  # the first rank has the last stage
        for (kind, coupling), (name, *samples) in every.items() if self._mesh.is_last_stage else ():
            text = _COUPLED[coupling].format(name, kind, *samples, ONE_BY_ONE)
            self._found.append(Finding((f"block {kind} {coupling.name}",), text))

    def _run_block(self, call: Callable[[], Any], seed: int) -> Any:
        """Call a block; of that nothing is left."""
        sharding = self._parallel.sharding
        with (
            self._metrics.apart(),
            self._aggregates.paused(),
            self._slicer.undone(),
            self._slicer.decided_by(Serving()),
            uncompiled(),  # for a shape that is met once, maybe
            self._logs.recording(),
            self._parallel.user_code(),
            host_seeded(seed),
            seeded(seed, generators_on(self._mesh.device)),
        ):
            return call() if sharding is None else sharding.between_steps(call)

    def all_are(self, so: bool) -> bool:
        """Whether something is so in all copies of the model.

        Communication: an object all-gather over dp.
        """
        return all(self._of_copies(so))

    def compare(self, check: TailCheck, step: Step, seed: int, loss: Tensor | None, results: Results) -> None:
        """After a batch run its step's tail on all samples, which leaves no trace, and compare; once more if Python
        numbers differ, which may be times.

        Args:
            step: in its contexts.
            seed: of the batch.
            loss: the batch's, by its microbatches; None in evaluation.
            results: of these.

        Communication: an object all-gather over dp, and one over dp and tp.
        """
        ways: list[list[Tensor]] = []
        with contextlib.suppress(Exception):  # of what nobody asked for: it may be no part of a batch's
            ways = check.join()
        counts = self._of_copies(len(ways))  # each runs as many tails
        ends: list[End | None] = []
        if all(counts):
            with contextlib.suppress(Exception):  # it may take gradients
                leaves = [ways[min(i, len(ways) - 1)] for i in range(max(counts))]
                ends = [self._end(check, step, seed, x, check.taken_by(len(check.kept))) for x in leaves]
        early: Sequence[Finding] = []
        with contextlib.suppress(Exception):
            early = check.before_tail()
        self._found += early
        known = [end for end in ends if end is not None]
        others: list[tuple[Call, Call]] = []
        compared: Sequence[Call] = ()
        if not early and known and len(known) == len(ends):
            end = functools.reduce(End.known, known)
            if loss is not None:
                losses = list(results.loss.losses.values())
                self._found[:] = check.of_loss(end.loss, loss, losses, self._found)
            compared = end.calls
            others = check.other_logs(compared, results.of_batch)
        again: End | None = None
        asks = any(not isinstance(x.given, Tensor) for x, _ in others)
        if any(self._mesh.exchange(asks, "dp", "tp")):
            with contextlib.suppress(Exception):
                again = self._end(check, step, seed, ways[0])
        self._found += check.of_logs(others, again.calls if again is not None else None)
        self._found += check.of_sums(results.logged, compared)

    def _end(
        self, check: TailCheck, step: Step, seed: int, leaves: Sequence[Tensor], taken: Taken | None = None
    ) -> End | None:
        """What the tail makes of values that are put together; None if it draws random numbers."""
        group, sharding = self._parallel.default_group, self._parallel.sharding if check.takes_parameters else None
        run = self._slicer.run
        tail = functools.partial(run, check.plan, check.stage, step, check.batch, leaves, seed, taken=taken)
        with (
            self._metrics.apart(),
            self._aggregates.paused(),
            self._slicer.undone(),
            uncompiled(),  # for a shape that is met once
            self._logs.recording() as calls,
            contextlib.nullcontext() if group is None else group.used(),
            torch.no_grad(),
        ):
            before = random_state()
            done = sharding.between_steps(tail) if sharding is not None else tail()
            draws = not is_random_state(before)
        return None if draws else End(loss_in(done.result), calls)

    def say(self) -> None:
        """Say what the copies of the model have found in their parts of this batch: each once, though it may be so in
        several batches. Of stages before the last one, where rank 0 is, the first rank says what they have found.

        Communication: an object all-gather over dp.
        """
        found, self._found = self._found, []
        is_first = self._mesh.rank("dp") == self._mesh.rank("tp") == 0
        for known, text in itertools.chain(*self._of_copies(found)):
            if not self._said.issuperset(known):
                self._said.update(known)
                if self._mesh.is_last_stage:
                    warn_once_per_run(text)
                elif is_first:
                    warn_of_stage(text)

    def _of_copies(self, x: Any) -> Sequence[Any]:
        """What each copy of the model has, on this stage."""
        return self._mesh.exchange(x, "dp") if self._mesh.size("dp") > 1 else [x]


_BY_HAND = (
    "(Steps that optimize by hand can't take whole_loss=True: let the loss be an average over samples, or use"
    " microbatches=1.)"
)
_COUPLED = {
    Coupling.SAMPLES: (
        "`{}` ({}) makes something else of a sample when other samples are with it: it takes a statistic of all, has"
        " places for some of them, or mixes them. With pp > 1 these are those of a microbatch, here {} of the batch's"
        " {}. {}"
    ),
    Coupling.NUMBER: (
        "`{}` ({}) makes a number of all its samples, which the loss may take, and which is no average over them: by"
        " shares of experts, an entropy, a product of means. With pp > 1 it makes one of each microbatch, here of {} of"
        " the batch's {}. {}"
    ),
}
