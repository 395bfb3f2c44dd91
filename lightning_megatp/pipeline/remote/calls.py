"""A step of evaluation that can't be cut: the last stage runs it, and has units run where they are.

What generates token by token, or reads values between blocks, has no order of stages. There the last stage executes the
user's step with real values. A unit of another stage is called there, on the arguments, and its result comes back: one
message each way. The other stages wait for calls until the step is over. So stages work in turn, not at the same time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.calls import Decides
from lightning_megatp.containers import tensors_in
from lightning_megatp.detour import Detour
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.ambient import Ambient
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.remote.messages import Contents, Table
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import WithoutMode, tree_map
from lightning_megatp.shim.transformers import asked_for, collected_for, collecting
from lightning_megatp.steps import StepKind
from lightning_megatp.tensor.functions import operation_name
from lightning_megatp.tensor.shards import gathered

Deciding = Callable[[Decides], contextlib.AbstractContextManager[None]]
"""Lets somebody decide about the calls of units in a step: `Slicer.decided_by`."""
Run = Callable[[Callable[[], Any]], Any]
"""Runs a unit of this rank."""


def warn_of_turns(kind: StepKind, error: SliceError) -> None:
    """Say that steps are run so.

    Args:
        kind: of the step.
        error: why it can't be cut.
    """
    why = str(error).removeprefix("MegaTPStrategy: ").partition(". ")[0]
    warn_once_per_run(
        f"the {kind} step can't be cut into pipeline stages, so the last one runs it, and has the others run their"
        f" modules for it: stages work in turn, not at the same time. Why: {why}."
    )


class RemoteCalls:
    """What a rank needs for such steps.

    Args:
        module: the LightningModule.
        mesh: who is where.
        rank_of_stage: stage -> global rank.
        kind: of the step, one of evaluation; None for a hook.
    """

    def __init__(
        self, module: nn.Module, mesh: ParallelMesh, rank_of_stage: Sequence[int], kind: StepKind | None
    ) -> None:
        self.module, self.mesh, self.rank_of_stage, self.kind = module, mesh, rank_of_stage, kind
        self.calls = 0
        """How many calls of units of other stages than the last there were, in the steps that this rank drove."""

    @property
    def _driver(self) -> int:
        return self.mesh.ranks("pp")[0]

    def table(self, keeps: bool) -> Table:
        """For the messages of one step, with one peer."""
        return Table(self.module, self.mesh.device, keeps)

    def drive(self, by: Deciding, step: Callable[[], Any], counting: Averages) -> Any:
        """On the last stage: run a step.

        Args:
            by: lets a mode decide about calls of units.
            step: the user's on a microbatch, in its contexts.
            counting: sees what averages losses.

        Returns:
            What it returned.

        Raises:
            SliceError: it needs a gradient, or a parameter of another stage outside of its unit.
        """
        mode = Driving(self, counting)
        with by(mode), mode:
            result = step()
        self.calls += mode.calls
        if any(map(is_fake, tensors_in(result))):
            raise SliceError(_foreign("its result"))
        self.over()
        return result

    def serve(self, by: Deciding, step: Callable[[], Any]) -> None:
        """On another stage: run units for the last one, until its step is over.

        Args:
            by: lets a mode decide about calls.
            step: the user's on a microbatch, in its contexts; its body is not executed.
        """
        assert self.kind is not None, "a hook runs on all stages"
        detour = Detour(self.module, self.kind.method, lambda call: self.answer())
        try:
            with by(Serving()):
                step()
        finally:
            detour.end()

    def over(self) -> None:
        """On the last stage: there are no more calls."""
        packed = self.table(keeps=False).packed(None)
        for rank in self.mesh.ranks("pp")[1:]:
            self.send(packed, rank)

    def answer(self) -> None:
        """On another stage: run units until there are no more calls."""
        table = self.table(keeps=True)
        while (request := table.unpacked(self.receive(self._driver))) is not None:
            unit, method, args, kwargs, ambient, (asked, maker), kinds = request
            given = Contents((args, kwargs))
            if given.kinds != kinds:
                raise SliceError(
                    f"`{unit}` is called by a step that can't be cut with objects that are others once they were"
                    " pickled. Give it tensors, lists, dicts, and objects that pickle keeps as they are."
                )
            function = getattr(self.module.get_submodule(unit), method)
            with ambient.again(), collected_for(asked, maker, self.around(unit)) as added:
                result = function(*args, **kwargs)
            answer = result, tree_map(gathered, added), given.changes(), table.changed()
            self.send(table.packed(answer, given.objects), self._driver)

    def around(self, unit: str) -> list[nn.Module]:
        """The modules around a unit, the outermost first."""
        parts = unit.split(".")
        return [self.module.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]

    def send(self, data: bytes, to: int) -> None:
        """To another stage's rank, host to host."""
        row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        group = self.mesh.hosts("pp")
        dist.send(torch.tensor([len(data)]), to, group)
        dist.send(row, to, group)

    def receive(self, source: int) -> bytes:
        """What another stage's rank sent."""
        size = torch.empty(1, dtype=torch.int64)
        group = self.mesh.hosts("pp")
        dist.recv(size, source, group)
        row = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(row, source, group)
        return row.numpy().tobytes()

    def broadcast(self, data: bytes | None, source: int) -> bytes:
        """Between the hosts of all stages.

        Args:
            data: of the rank that sends.
            source: its global rank.
        """
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, source, self.mesh.hosts("pp"))
        row = torch.empty(int(size), dtype=torch.uint8)
        if data is not None:
            row = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(row, source, self.mesh.hosts("pp"))
        return row.numpy().tobytes()


class Caller:
    """Calls units of other stages' ranks, which `RemoteCalls.answer`.

    Args:
        remote: who has them.
    """

    def __init__(self, remote: RemoteCalls) -> None:
        self._remote = remote
        self._tables: dict[int, Table] = {}

    def call(
        self, home: int, unit: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a unit; what it changes of its arguments is changed here, too."""
        module = self._remote.module.get_submodule(unit)
        if any(map(is_fake, tensors_in(args, kwargs))):
            raise SliceError(_foreign(f"`{unit}`"))
        if torch.is_grad_enabled() and (
            any(x.requires_grad for x in tensors_in(args, kwargs)) or any(p.requires_grad for p in module.parameters())
        ):
            raise SliceError(
                f"a step that can't be cut calls `{unit}`, of another pipeline stage, where gradients are recorded, and"
                " its part of the graph would be missing. Do it under `torch.no_grad()`, or use pp=1."
            )
        if home not in self._tables:
            self._tables[home] = self._remote.table(keeps=False)
        table = self._tables[home]
        given = Contents((args, kwargs))
        method = next(name for name, held in vars(module).items() if getattr(held, "function", None) == function)
        request = unit, method, args, kwargs, Ambient.now(), asked_for(self._remote.around(unit)), given.kinds
        self._remote.send(table.packed(request), home)
        result, added, objects, tensors = table.unpacked(self._remote.receive(home), given.objects)
        given.adopt(objects)
        for name, entries in added.items():
            collecting()[name].extend(entries)
        for number, value in tensors:
            table.change(number, value)
        return result


class Driving(TorchFunctionMode):
    """Decides about calls of units while the last stage runs a step, as `StageMode` does where one was cut.

    Args:
        remote: who has them.
        counting: sees what averages losses.
    """

    def __init__(self, remote: RemoteCalls, counting: Averages) -> None:
        super().__init__()
        self._remote, self._counting, self._caller = remote, counting, Caller(remote)
        self._inside = False
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        foreign = any(map(is_fake, tensors_in(args, kwargs or {})))
        try:
            out = func(*args, **(kwargs or {}))
        except Exception as error:
            if foreign:
                raise SliceError(_foreign(f"`{operation_name(func)}`")) from error
            raise
        if foreign and any(map(is_fake, tensors_in(out))):
            raise SliceError(_foreign(f"`{operation_name(func)}`"))
        return out

    def unit(
        self, name: str, stage: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        if self._inside:
            return function(*args, **kwargs)
        home, last = self._remote.rank_of_stage[stage], len(self._remote.rank_of_stage) - 1
        self.calls += stage != last
        if home != self._remote.mesh.global_rank:
            with WithoutMode(self):
                return self._caller.call(home, name, function, args, kwargs)
        with self._outside(name):
            return function(*args, **kwargs)

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method."""
        with contextlib.nullcontext() if self._inside else self._outside(""):
            return function(*args, **kwargs)

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`self.log` and `self.log_dict`."""
        with contextlib.nullcontext() if self._inside else self._outside(""):
            original(*args, **kwargs)

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics."""
        return contextlib.nullcontext() if self._inside else self._outside("")

    @contextlib.contextmanager
    def _outside(self, unit: str) -> Iterator[None]:
        """Code that is not looked into."""
        self._inside = True
        try:
            with WithoutMode(self), self._counting.inside(unit):
                yield
        finally:
            self._inside = False


class Serving:
    """Decides about calls while a stage runs units for the last one: they run as they are, and only that one logs.

    Args:
        run: runs them.
    """

    def __init__(self, run: Run = lambda call: call()) -> None:
        self._run = run

    def unit(
        self, name: str, stage: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        return self._run(functools.partial(function, *args, **kwargs))

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method."""
        return function(*args, **kwargs)

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`self.log` and `self.log_dict`."""

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics."""
        return contextlib.nullcontext()


def _foreign(by: str) -> str:
    return (
        f"a step that can't be cut is run by the last pipeline stage, and {by} takes a parameter or buffer of another"
        " stage's module, beside that module. Let the module compute it in its forward, or keep it on the last stage by"
        " `stages=[[...], ...]`."
    )
