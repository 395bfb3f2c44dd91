"""What exists on the last stage alone after a batch or a hook: found there, and told to the others.

Losses, logs, and what a step returns or leaves on the module, are the last stage's. After each batch the others learn
of it what they need: numbers, Python values, tensors outside of units, options of optimizers. Hooks that may read the
rest run on the last stage alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.detour import Detour, end_all
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.rows import own_part
from lightning_megatp.pipeline.batch import BatchRun
from lightning_megatp.pipeline.carried import Twice, counters, lists_on, warn_of_counters, warn_of_lists
from lightning_megatp.pipeline.hooks import Hook, hooks_after_steps
from lightning_megatp.pipeline.remote.calls import RemoteCalls, Run, Serving
from lightning_megatp.pipeline.remote.in_hooks import FromLast
from lightning_megatp.pipeline.seeds import mixed, shared_seed
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.slicing.state.lasting import UNNAMED
from lightning_megatp.pipeline.told.aggregates import Aggregates
from lightning_megatp.pipeline.told.held_tensors import Buffers, Change, HeldTensors, modules_outside
from lightning_megatp.pipeline.told.left import LeftState, given
from lightning_megatp.pipeline.told.logs import Logs, merge
from lightning_megatp.pipeline.told.telling import (
    Facts,
    Options,
    Telling,
    dtype_index,
    options_of,
    pickled,
    set_options,
)
from lightning_megatp.plan.units import modules_around, parts_of_one_stage
from lightning_megatp.random_states import seeded
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.snapshots.leftovers import Path, PlainValues
from lightning_megatp.tensor.random import generators_on
from lightning_megatp.user_hooks import codes_of, mentions, stored_in


@dataclass
class Changes:
    """What the steps on a batch left and set on the last stage, which the others are told."""

    left_state: bool = False
    """Whether something was left on the module."""
    values: dict[Path, bytes] = field(default_factory=dict)
    """Python values."""
    tensors: dict[Path, Change] = field(default_factory=dict)
    """Tensors that other stages have to be told: buffers that were replaced, those of the user's own objects in which
    the step set such values for the first time."""
    options: Options | None = None
    """The options of the optimizers, if some were changed."""


class LastStage:
    """One rank's side of what only the last stage has after a batch or a hook: that stage tells, the others adopt.

    Args:
        parallel: the module, cut over the stages.
        slicer: runs its units.
        mesh: who is where.
        logs: stands in for the module's `log`.
        metrics: stands in for what its metrics compute.
        stage_of_unit: unit name -> stage.
        remote: calls of other stages' units.
        run_unit: runs one of this rank's, between steps.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        slicer: Slicer,
        mesh: ParallelMesh,
        logs: Logs,
        metrics: LastStageMetrics,
        stage_of_unit: Mapping[str, int],
        remote: Callable[[], RemoteCalls],
        run_unit: Run,
    ) -> None:
        self.parallel, self.slicer, self.mesh, self.logs, self.metrics = parallel, slicer, mesh, logs, metrics
        self.aggregates = Aggregates(parallel.module, logs)
        self._stage_of_unit, self._remote, self._run_unit = stage_of_unit, remote, run_unit
        self.stateful = False
        """Whether a step left something on the module, which then exists on the last stage only."""
        self._left = LeftState(parallel)
        self.returned = False
        """Whether the last step returned something that exists on the last stage only."""
        self.has_loss = False
        """Whether the last step returned a loss."""
        self.went_on = False
        """Whether the last batch, which the last stage ran by itself, could not have been cut."""
        self.outside = modules_outside(parallel.module, stage_of_unit)
        self.opened = dict(self.outside)
        """The modules whose Python values the last stage tells: those in no unit, which any stage may read, and those
        on which steps set some when earlier stages have left."""
        self._around = frozenset(modules_around(stage_of_unit))
        self._set_by_hooks: dict[str, nn.Module] = {}
        """Parts of units on which the module's own hooks may set some, which run on the last stage alone at times."""
        self._told = ChainMap[str, nn.Module](self.opened, self._set_by_hooks)
        self._telling = Telling(mesh, logs, self._told, self.outside, self._set_options, slicer.tables)
        self._changes_tensors = False
        """Whether some step changes tensors outside of units in place, on one stage."""
        self._untold: set[Path] = set()
        """Large ones that the last stage has changed, and others have not been told of."""
        self._told_objects = set[Path]()
        """The user's own objects whose tensors the other stages were told, when a step first set a plain value there:
        it may say that they are filled."""
        self._counted = Twice()
        self._sets_options = False
        """Whether the module's code has to do with the options of optimizers, which a step may set."""
        self._hooks: list[Detour] = []

    @property
    def _trainer(self) -> Any:
        return self.parallel.module.trainer

    def open(self) -> None:
        """Stand in for the module's hooks after steps, until `close`."""
        module = self.parallel.module
        self._sets_options = mentions(module, {"param_groups"})
        after = list(hooks_after_steps(module))
        codes = (code for hook in after for code in codes_of(module, hook.name))
        stored = set[str]().union(*map(stored_in, codes))
        for name in parts_of_one_stage(module, self._stage_of_unit) if stored else ():
            if any(hasattr(module.get_submodule(name), attribute) for attribute in stored):
                self._set_by_hooks[name] = module.get_submodule(name)
        self._hooks = [Detour(module, hook.name, functools.partial(self._run_hook, hook)) for hook in after]

    def close(self) -> None:
        """Give the module its own hooks back."""
        end_all(self._hooks)

    def expect(self, plans: Sequence[SlicePlan]) -> None:
        """Before a batch: what its steps will change."""
        self._changes_tensors = self._changes_tensors or any(map(self._changes_outside, plans))
        for name in dict.fromkeys(name for plan in plans for name in plan.effects.set_late):
            self.opened[name] = self.parallel.module.get_submodule(name)

    @contextlib.contextmanager
    def noticing(self, run: BatchRun) -> Iterator[None]:
        """On the last stage find out what its steps leave and set there, which the others will be told. Whether
        anything is left on the module is no question any more, once something was."""
        if not self.mesh.is_last_stage:
            yield
            return
        self._changes = changes = Changes()
        before = self._left.attributes()
        plain, buffers = PlainValues(self.opened), Buffers(self.outside)
        held = HeldTensors(self.outside) if run.remote or self._changes_tensors else None
        options = options_of(self._trainer.optimizers) if self._sets_options else None
        counting = run.is_training and run.is_last_part and len(run.results.rows) > 1
        counts = self._counts(buffers) if counting else None
        lengths = {name: len(x) for name, x in lists_on(self.opened).items()}
        yield
        if run.numbers is not None:
            run.numbers.warn()
        if len(run.results.rows) > 1:
            warn_of_lists(lists_on(self.opened), lengths, run.microbatches)
        changes.left_state = self._left.note(before)
        now = PlainValues(self.opened)
        changes.values = now.changes(plain)
        objects = {path[:-1] for path in changes.values if len(path) > 2} - self._told_objects
        if objects:
            self._told_objects |= objects
            changes.tensors = HeldTensors(self.outside).of_objects(objects)
        if held is not None:  # other stages did not run the step, or not to its end
            held_now = HeldTensors(self.outside).changes(held)
            written = {path: x for path, x in held_now.items() if not x.replaced}
            told = {path: x for path, x in written.items() if x.value.nbytes <= _SMALL}
            if run.remote is not None:
                told = written | {path: x for path, x in held_now.items() if x.value.nbytes <= _OF_TABLES}
            changes.tensors = told | changes.tensors
            self._untold |= written.keys() - told.keys()
        changes.tensors = Buffers(self.outside).replaced(buffers, _SMALL) | changes.tensors
        if options is not None and (set_now := options_of(self._trainer.optimizers)) != options:
            changes.options = set_now
        if counts is not None:
            n, later = len(run.microbatches), self._counts(Buffers(self.outside)) or {}
            risen = [name for name, x in counts.items() if later.get(name, x) - x == n]
            warn_of_counters(self._counted.of([*counters(now, plain, run.microbatches), *risen]), n)

    def conclude(self, run: BatchRun) -> tuple[Tensor, float] | None:
        """Tell what only the last stage knows: the loss, the factor that makes the weights add up to 1, the logs, and
        whether more was left or returned there.

        Returns:
            The loss of the batch, and the factor; None if the batch has to be run once more, by the last stage.
        """
        if run.beyond is not None:
            self._telling.share([], Facts(again=1))
            return None
        if self.mesh.is_last_stage:
            total, weights = run.conclude()
            changes, results = self._changes, run.results
            divisor = results.loss.total_weight(weights)
            values = pickled(changes.values, changes.tensors, changes.options, self.slicer.tables.changes())
            known = Facts(
                loss=total.double(),
                factor=results.loss.factor(weights),
                dtype=dtype_index(total),
                left_state=changes.left_state,
                returns_more=run.returns_more,
                set_values=len(values),
                stop=self._trainer.should_stop,
                goes_on=run.goes_on,
                has_loss=run.has_loss,
            )
            merged = merge(results.logged, weights, results.loss.adds_up, divisor)
            results.of_batch = logged = self.aggregates.settle(results.logged, merged)
            facts = Facts(*self._telling.share(logged, known))
            self._telling.send_values(values)
        else:
            facts = Facts(*self._telling.share([], Facts()))
            if facts.again:
                return None
            total = facts.loss_on(self.mesh.device)
            late = self._telling.adopt(int(facts.set_values))
            self._telling.warn_late([path for path in late if path[0] in self._around])
            self._stop_if(facts.stop)
        self.went_on, self.has_loss = bool(facts.goes_on), bool(facts.has_loss)
        self.stateful, self.returned = self.stateful or bool(facts.left_state), bool(facts.returns_more)
        return total, facts.factor

    def _counts(self, buffers: Buffers) -> dict[str, float] | None:
        """Numbers that a step may count in, in the first two batches: buffers, attributes of optimizers."""
        if not self._counted.wanted:
            return None
        optimizers = {f"optimizer.{name}": x for o in self._trainer.optimizers for name, x in vars(o).items()}
        return buffers.numbers() | {name: x for name, x in optimizers.items() if type(x) is int}

    def _run_hook(self, hook: Hook, call: Callable[[], Any]) -> Any:
        """Run one of the user's hooks: on all stages, or if steps left or returned something that exists on the last
        stage, there alone. What it logs is logged everywhere."""
        if hook.gets_outputs and self.returned:
            return self._run_apart(hook, call)
        if self.stateful:
            return self._run_together(hook, call)
        if self._changes_tensors:
            self._tell_changed()
        return call()

    def _run_apart(self, hook: Hook, call: Callable[[], Any]) -> Any:
        return self._run_alone(hook, call) if self.mesh.is_last_stage else self._serve_hook(hook)

    def _run_together(self, hook: Hook, call: Callable[[], Any]) -> Any:
        """Run a hook that may read what was left: on all stages if it may move weights, and if what was left can be
        sent; else on the last one."""
        left, apart = self._tell_left() if hook.moves_weights else (b"", True)
        if apart:
            return self._run_apart(hook, call)
        if self._changes_tensors:
            self._tell_changed()
        with given(self.parallel.module, left, self.mesh.device) if left else contextlib.nullcontext():
            result = call()
        (still,) = self._telling.share([], [float(self.mesh.is_last_stage and self._left.remains())])
        self.stateful = bool(still)
        return result

    def _tell_left(self) -> tuple[bytes, bool]:
        """Before a hook that all stages should run: let the others know what steps left on the last one.

        Returns:
            That, on the others; and whether it is more than can be sent.

        Communication: see `Telling.share` and `send_values`.
        """
        if not self.mesh.is_last_stage:
            size, apart = self._telling.share([], [0.0, 0.0])
            return self._telling.receive_values(int(size)), bool(apart)
        values = self._left.packed()
        self._telling.share([], [float(len(values or b"")), float(values is None)])
        self._telling.send_values(values or b"")
        return b"", values is None

    def _drawing(self, hook: Hook) -> contextlib.AbstractContextManager[None]:
        """Around a hook that the last stage runs alone: each stage draws other numbers, and afterwards the generators
        are where they were, alike on all of them."""
        seed = mixed(shared_seed(self._trainer, hook.name), self.mesh.rank("pp"))
        return seeded(seed, generators_on(self.mesh.device))

    def _serve_hook(self, hook: Hook) -> None:
        """While the last stage runs a hook: run the units that it calls, and learn what it did."""
        if self.parallel.context.meeting is not None:
            self.parallel.context.meeting.answer()
        remote = self._remote()
        with self._drawing(hook), self.slicer.calls_decided_by(Serving(self._run_unit)):
            remote.answer()
        left, size, stop, *self.metrics.resets = self._telling.share([], [0.0, 0.0, 0.0, *self.metrics.resets])
        self.stateful = bool(left)
        self._stop_if(stop)
        self._telling.adopt(int(size))

    def _run_alone(self, hook: Hook, call: Callable[[], Any]) -> Any:
        """Run a hook on the last stage, and tell what it did.

        Raises:
            RuntimeError: it changed parameters.
        """
        remote, drawing = self._remote(), self._drawing(hook)
        before, norms, plain = self._left.attributes(), self._norms(), PlainValues(self._told)
        held, options = HeldTensors(self.outside), options_of(self._trainer.optimizers)
        calling = self.slicer.calls_decided_by(FromLast(remote, hook.name, self._run_unit, self.parallel.context.meet))
        with self.metrics.apart(counts_resets=True), self.logs.recording() as calls, drawing, calling:
            result = call()
        remote.over()
        after = self._norms()
        if len(after) != len(norms) or not torch.allclose(norms, after, rtol=0, atol=0, equal_nan=True):
            raise RuntimeError(
                f"MegaTPStrategy: `{hook.name}` changes parameters, or an average of them, and runs on the last"
                " pipeline stage only, since what steps returned or left on the module exists there. Move that part to"
                " a callback, which runs on all stages; or leave nothing there but tensors, arrays and numbers, in"
                " lists or dicts, of 256 MiB at most, which such a hook is then given on all stages."
            )
        self._left.note(before)
        self.stateful = self._left.remains()
        logged = merge([calls], torch.ones(1, dtype=torch.float64, device=self.mesh.device))
        merged = self.aggregates.settle([calls], logged)
        now = options_of(self._trainer.optimizers)
        changes = PlainValues(self._told).changes(plain), HeldTensors(self.outside).changes(held)
        values = pickled(*changes, now if now != options else None, self.slicer.tables.changes())
        stop = float(self._trainer.should_stop)
        self._telling.share(merged, [float(self.stateful), float(len(values)), stop, *self.metrics.resets])
        self._telling.send_values(values)
        return result

    def _changes_outside(self, plan: SlicePlan) -> bool:
        return any(name == UNNAMED or name.rpartition(".")[0] in self.outside for name in plan.changed)

    def _tell_changed(self) -> None:
        """Before a hook that runs on all stages: let it find large tensors as the last stage has them.

        Communication: see `Telling.share` and `send_values`.
        """
        if self.mesh.is_last_stage:
            values = pickled({}, HeldTensors(self.outside).at(self._untold) if self._untold else None)
            self._telling.share([], [float(len(values))])
            self._telling.send_values(values)
            self._untold.clear()
        else:
            (size,) = self._telling.share([], [0.0])
            self._telling.adopt(int(size))

    def _stop_if(self, stop: float) -> None:
        """The step or a hook has set `trainer.should_stop` on the last stage."""
        if stop:
            self._trainer.should_stop = True

    def _set_options(self, options: Options) -> None:
        set_options(self._trainer.optimizers, options)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Norms of what this rank has of the parameters, and of averages of them. Their versions would not tell what is
        done to their `.data`."""
        averages = () if self.parallel.shadows is None else self.parallel.shadows.tensors()
        own = map(own_part, (*self.parallel.module.parameters(), *averages))
        wide = ((p, torch.promote_types(p.dtype, torch.float32)) for p in own)
        with DisableTorchFunction():  # hooks are watched for what they make of weights
            found = [torch.linalg.vector_norm(p, dtype=dtype).double() for p, dtype in wide if p.numel()]
        return torch.stack(found) if found else torch.zeros(0)


_SMALL = 2**16
"""Bytes of a tensor that is told after each batch in which a step has changed it."""
_OF_TABLES = 2**24
"""Bytes of one that is told where the last stage alone has run a step: a table of positions that it made for later
steps, of all stages."""
