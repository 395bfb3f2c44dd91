"""The plans of one model's steps: made when a batch of a new signature comes, or one by whose values the step takes
another way; the same on all stages."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import is_explained, warn_once_per_run
from lightning_megatp.module import ParallelModule, take_gradients
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.pipeline.lockstep import Lockstep
from lightning_megatp.pipeline.remote.calls import warn_of_turns
from lightning_megatp.pipeline.results import Step, returning_a_loss
from lightning_megatp.pipeline.seeds import mixed
from lightning_megatp.pipeline.shared import Shared, SharedParameters
from lightning_megatp.pipeline.slicing.errors import KindError, SliceError
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.slicing.state.lasting import UNNAMED
from lightning_megatp.pipeline.told.trained import Trained
from lightning_megatp.steps import StepKind
from lightning_megatp.tensor.outside import used_outside


class _Uncut(SliceError):
    """A step that has no plan."""


class Plans:
    """Makes the plans of steps, and keeps them.

    Args:
        parallel: the module.
        slicer: cuts its steps.
        mesh: who is where.
        loans: lends the parameters that a plan uses on other stages than their own.
        shared: learns of them.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        slicer: Slicer,
        mesh: ParallelMesh,
        loans: Loans,
        shared: SharedParameters,
    ) -> None:
        self._parallel, self._slicer, self._mesh = parallel, slicer, mesh
        self._loans, self._shared = loans, shared
        self._made: dict[tuple[StepKind, Hashable], list[SlicePlan]] = {}
        self._whole: dict[Hashable, tuple[SlicePlan, SlicePlan | None]] = {}
        """By the identity of a microbatch's plan, and the batch's signature: that plan, and the one `of_whole`."""
        self.generation = 0
        """How often all were forgotten."""
        self._trained = Trained(parallel, slicer, mesh)
        self.lockstep = Lockstep()
        self._uncut: set[tuple[StepKind, Hashable]] = set()
        """Kinds of steps of evaluation, and signatures, that can't be cut."""
        self._changed: set[str] = set()
        """What steps change and was said."""
        self._of_rows_said: set[str] = set()
        """What of the ways in which steps take samples was said."""
        self._changed_on: dict[str, int] = {}
        """What outlives steps and some step changes -> the only stage that does."""
        self._used_on: dict[str, set[int]] = {}
        """What outlives steps -> the stages that use it in training."""

    def of(
        self, kind: StepKind, step: Step, microbatches: Sequence[Any], seed: int, part: Hashable = None
    ) -> list[SlicePlan] | None:
        """One per microbatch; None if it is a step of evaluation that can't be cut.

        Args:
            kind: of the step.
            step: the user's, in its contexts.
            microbatches: of a batch, and behind them the batch itself where the slicer has a tail.
            seed: of the batch, alike on all stages.
            part: of a step that goes backward by hand; None for others.

        Raises:
            SliceError: the step can't be cut.

        Communication: for each new plan an object all-gather over pp, and one broadcast per parameter that it lends.
        """
        self.lockstep.begin()
        signatures: list[Hashable] = [(part, signature) for signature in self._slicer.signatures(microbatches)]
        pairs = enumerate(zip(signatures, microbatches, strict=True))
        if any((kind, signature) in self._uncut for signature in signatures):
            return None
        try:
            with self._slicer.rehearsing():
                if kind is StepKind.TRAIN and part is None:
                    step = returning_a_loss(step)
                plans = [self._plan((kind, signature), step, x, mixed(seed, i), i == 0) for i, (signature, x) in pairs]
        except _Uncut:
            return None
        self.lockstep.end()
        steps = plans[:-1] if self._slicer.tail else plans
        if kind is StepKind.TRAIN and len(steps) > 1:
            self._warn_of_changes(steps)
            self._warn_of_rows(steps)
        return plans

    def _warn_of_changes(self, plans: Sequence[SlicePlan]) -> None:
        once = plans[0].n_stages - 1 if self._slicer.tail else None
        changed = (name for plan in plans for name, stage in plan.changed.items() if stage != once)
        for name in [name for name in changed if name not in self._changed][:1]:
            self._changed.add(name)
            warn_once_per_run(
                f"the step changes `{name}` in place. With pp > 1 it is called for each microbatch, here {len(plans)}"
                f" times a batch: an average of weights moves {len(plans)} times as often as on one device. Do that in"
                " `on_train_batch_start`, or use microbatches=1."
            )

    def _warn_of_rows(self, plans: Sequence[SlicePlan]) -> None:
        """Say where a step takes other samples of a microbatch than of the batch."""
        if by := next((plan.mixes for plan in plans if plan.mixes), ""):
            self._say_once(
                "mixes",
                f"the step puts samples beside others by {by}, as mixup does. With pp > 1 it is called for each"
                f" microbatch, here {len(plans)} times a batch: the others are of that microbatch, and numbers are"
                " drawn for each. Mix the whole batch in `on_after_batch_transfer` or in the loader's collate_fn, or"
                " use microbatches=1.",
            )
        if by := next((plan.divides for plan in plans if plan.divides), ""):
            self._say_once(
                "divides",
                f"the step takes some of its samples by {by}, for a module to learn of. With pp > 1 it is called for"
                f" each microbatch, here {len(plans)} times a batch, and takes some of that: others than of the batch,"
                " and maybe of fewer parts. If it matters which samples are together (halves that are pairs or have no"
                " labels, an optimizer's step for each part), hand them on as entries of the batch of their own, or use"
                " microbatches=1.",
            )

    def _warn_of_hooks(self, plan: SlicePlan) -> None:
        names = self._slicer.keeping_hooks(plan)
        if names:
            of = f"`{names[0]}`" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
            self._say_once(
                "hooks",
                f"a hook on {of} keeps what it sees. With pp > 1 it is called once for each microbatch, on the"
                " block's own stage: what it keeps of other stages' blocks is not on global rank 0, which logs. Put it"
                " together by `all_gather_object` in a callback, or return it from the block and log it in the step.",
            )

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._of_rows_said:
            self._of_rows_said.add(what)
            warn_once_per_run(text)

    def of_whole(self, step: Step, batch: Any, plans: Sequence[SlicePlan], seed: int) -> SlicePlan | None:
        """The plan of a batch's step whose tail is one more stage, for this rank alone; None if it can't be made.

        Args:
            plans: of its microbatches.
        """
        (signature,) = self._slicer.signatures([batch])
        key = id(plans[0]), signature
        if key not in self._whole:
            made = None
            try:
                with self._planning():
                    made = self._slicer.plan_with_tail(plans[0], step, batch, seed)
            except Exception as error:  # nobody asked for it
                self._say_once("whole", _not_compared(error))
            self._whole[key] = plans[0], made
        return self._whole[key][1]

    def forget(self) -> None:
        """On all stages: what steps do from now on may be something else."""
        self._made.clear()
        self._whole.clear()
        self.generation += 1

    def agree_on_trained(self) -> None:
        """At the start of an epoch: let all stages know what hooks have frozen and unfrozen.

        Communication: one object all-gather over pp.
        """
        if self._trained.agree():
            self.forget()

    def _plan(
        self, key: tuple[StepKind, Hashable], step: Step, microbatch: Any, seed: int, is_first: bool
    ) -> SlicePlan:
        """The plan of a kind of step, a signature, and the values that the step branches by."""
        made = self._made.setdefault(key, [])
        plan = self._slicer.fitting(made, step, microbatch, seed)
        if plan is None:
            new = self._new(key, step, microbatch, seed, is_first)
            made += new
            plan = new[0]
            self._slicer.fits(plan, step, microbatch, seed)  # for what it leaves to the microbatches behind
        return plan

    def _new(
        self, key: tuple[StepKind, Hashable], step: Step, microbatch: Any, seed: int, is_first: bool
    ) -> list[SlicePlan]:
        kind, _ = key
        try:
            with self._planning():
                plans = self._slicer.plans(step, microbatch, is_first, seed)
                for plan in plans:
                    self._check_lasting(kind, plan)
        except SliceError as error:
            if kind is StepKind.TRAIN or isinstance(error, KindError):
                raise
            self._agree([], str(error))
            self._uncut.add(key)
            warn_of_turns(kind, error)
            raise _Uncut("it has no plan") from error
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if is_explained(error):
                raise
            raise RuntimeError(
                f"MegaTPStrategy: the {kind} step failed on a microbatch: {error}. A batch is split along dim 0"
                " of its tensors. If that is not what its rows are (graphs in one long tensor), define"
                " `split_batch(self, batch, microbatches)` on the LightningModule, or use microbatches=1."
            ) from error
        for plan in plans:
            self._check_touched(plan)
        self._agree(plans)
        for plan in plans:
            self._lend(plan)
        if kind is StepKind.TRAIN:
            self._warn_of_hooks(plans[0])
        return plans

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """Around a dry run: without gradients on the parameters, which differ from stage to stage, and whose dtype may
        not be theirs."""
        sharding, held = self._parallel.sharding, take_gradients(self._parallel.undivided())
        try:
            with sharding.planning(self._slicer.fake_mode) if sharding else contextlib.nullcontext():
                yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient

    def _check_lasting(self, kind: StepKind, plan: SlicePlan) -> None:
        """What a step changes on one stage, steps of other kinds and shapes may use there alone. A step of evaluation
        that uses it elsewhere is run by the last stage, if that is where it is changed.

        Raises:
            SliceError: others would find old values; or stages that share a copy would each change it.
        """
        if plan.changed_alike and self._slicer.n_stages > self._mesh.size("pp"):
            raise KindError(
                f"the step changes `{plan.changed_alike[0]}` in place before its first block. Each stage does that on a"
                " copy of its own, but here a rank has several stages and one copy. Take a schedule with one stage per"
                " rank, or change it after the last block, or in a hook such as on_train_batch_start."
            )
        last = plan.n_stages - 1
        used = {name: set(stages) for name, stages in plan.used.items()}
        used.update((name, set(range(plan.n_stages))) for name in plan.changed_alike if name != UNNAMED)
        changed = {**plan.changed, **self._changed_on}
        for name in [name for name, stage in changed.items() if used.get(name, set()) - {stage}]:
            error = SliceError if kind is not StepKind.TRAIN and changed[name] == last else KindError
            raise error(_stale(name, changed[name], used[name]))
        for name, stage in plan.changed.items():
            if users := self._used_on.get(name, set()) - {stage}:
                raise KindError(_stale(name, stage, users))
        if not plan.changed.keys() <= self._changed_on.keys():
            self._changed_on.update(plan.changed)
            for key in [key for key in self._made if key[0] is not StepKind.TRAIN]:
                del self._made[key]  # they may use it
        for name, stages in used.items() if kind is StepKind.TRAIN else ():
            self._used_on.setdefault(name, set()).update(stages)

    def _lend(self, plan: SlicePlan) -> None:
        missing = self._loans.missing(plan.shared) if self._parallel.sharding is not None else {}
        if missing:
            raise SliceError(
                f"the step uses `{next(iter(missing))}` on another pipeline stage than its module's, and parameters"
                " divided by zero > 0 can't be lent. Keep both on one stage by `stages=[[...], ...]`, or use zero=0."
            )
        for name in self._loans.lend(plan.shared):
            self._shared.add(Shared.of(name, self._slicer.ownership.stand_in(name)))

    def _check_touched(self, plan: SlicePlan) -> None:
        split = sorted(plan.touched.keys() & self._parallel.plan.parameters.keys()) if self._mesh.size("tp") > 1 else []
        if split:
            raise SliceError(used_outside(split[0]))
        sharding = self._parallel.sharding
        apart = [] if sharding is None else sorted(plan.touched.keys() & sharding.by_unit)
        if apart:
            raise SliceError(
                f"the step uses `{apart[0]}` outside of its own module, and no batch could be looked at before training"
                " to learn that. Its rows can't be gathered there: use zero=0."
            )

    def _agree(self, plans: Sequence[SlicePlan], why: str = "") -> None:
        """All stages must have planned the same, or they would wait for messages that never come.

        Args:
            plans: of this rank; none if it found that the step can't be cut.
            why: then.

        Raises:
            SliceError: they have not.

        Communication: an object all-gather over pp; another one before it raises.
        """
        self.lockstep.agreeing()
        if len(set(self._mesh.exchange(tuple(plan.digest() for plan in plans), "pp"))) > 1:
            did = self._mesh.exchange([deed for plan in plans for deed in _deeds(plan)] or why, "pp")
            refused = next((f": on pp rank {i} it can't be cut ({x})" for i, x in enumerate(did) if type(x) is str), "")
            raise SliceError(
                f"the stages planned the same batch differently{refused or _first_difference(did)}. What a step does"
                " between modules may not depend on the rank, on Python's or NumPy's random numbers, on the order of a"
                " set, or on what steps before have kept on one stage; nor may parameters be frozen or unfrozen in the"
                " middle of an epoch."
            )


def _deeds(plan: SlicePlan) -> list[tuple[str, str]]:
    """What each operation of a plan does, as a digest and for messages; but for those that draw random numbers."""
    return [(f"{op.stage} {op.recipe}", f"`{op.name}` ({op.where})") for op in plan.operations if not op.random]


def _first_difference(did: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Between the first rank along pp and another, for a message; "" if it is none of an operation.

    Args:
        did: by rank, as `_deeds`.
    """
    known = [dict(operations) for operations in did]
    for rank in range(1, len(did)):
        missing = ((r, did[r], known[other]) for r, other in ((0, rank), (rank, 0)))
        found = [
            (at, r, text) for r, own, others in missing for at, (what, text) in enumerate(own) if what not in others
        ]
        earliest = min(found)[0] if found else 0
        first = [(r, text) for at, r, text in found if at == earliest]
        texts = {text for _, text in first}
        if len(texts) < len(first):
            return f": {texts.pop()} is given something else on pp rank {rank} than on pp rank 0"
        if first:
            does = ", ".join(f"pp rank {r} does {text}" for r, text in first)
            return f": {does}{'' if len(first) > 1 else ', another one does not'}"
    return ""


def _not_compared(error: Exception) -> str:
    why = str(error).removeprefix("MegaTPStrategy: ").split(". ")[0].rstrip(".")
    return (
        "the batch can't be compared with what one device makes of it, since the step can't be planned for all of its"
        f" samples at once: {why}. If blocks or the loss compute something over the samples of a batch (a norm, a"
        " contrast), each microbatch has its own, and no warning will say so."
    )


def _stale(name: str, changed_on: int, used_on: set[int]) -> str:
    return (
        f"a step changes `{name}` in place on pipeline stage {changed_on}, and a step uses it on stage"
        f" {min(used_on - {changed_on})}, which would not see the change. Keep what reads it and what changes it on one"
        " stage, or change it in a hook such as on_train_batch_start."
    )
