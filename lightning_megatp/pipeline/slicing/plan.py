"""SlicePlan: which operation of a user's step runs on which stage, and which values cross between stages.

A plan is data, made by one dry run (dry_run/) and carried out by every stage on its own (running.py).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_megatp.pipeline.slicing.filled import Attribute
from lightning_megatp.pipeline.slicing.rows import CallRows
from lightning_megatp.pipeline.slicing.script import Script
from lightning_megatp.pipeline.slicing.state.put_back import Spot


class Read(NamedTuple):
    """A look at a value on the host."""

    before: int
    """How many operations came before."""
    answer: Any
    """What was seen; None if it can't be compared."""

    @classmethod
    def of(cls, before: int, answer: Any) -> Read:
        """What was seen, if it is plain."""
        return cls(before, answer if isinstance(answer, (bool, int, float, list)) else None)


class HostRead(NamedTuple):
    """A look at a value on the host, in a step that optimizes by hand."""

    name: str
    """Of the operation."""
    before: int
    """How many operations came before."""
    of_stage: bool
    """Whether it is a stage's value, or made of a parameter, so that the read is answered by what it was once."""
    is_fresh: bool
    """Whether it is made of parameters as they are in this part."""


class Key(NamedTuple):
    """A value of the step: the operation that made it, and which of its tensors it is.

    What an operation returns is counted first, then what it changed in place.
    """

    operation: int
    output: int


@dataclass(frozen=True)
class Relay:
    """A value that crosses a boundary between two stages."""

    key: Key
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    """Whether its gradient crosses back. False also where the value has one, but nothing behind the boundary that could
    use it."""
    has_graph: bool | None = None
    """Whether the value required a gradient when it was planned; None if that is not known."""
    rounds: int = 1
    """How often all samples follow each other along its rows; 0 where it holds a part of them. See `Interleaving`."""


@dataclass(frozen=True)
class Operation:
    """One operation of the step: a unit, a torch function between units, or an autograd function."""

    what: Any
    """How a run recognises it: a unit's name, or the function."""
    name: str
    where: str
    """The user's line, and the module it is in."""
    stage: int | None
    """None: replicated. It depends only on the batch, constants and glue parameters, and every stage computes it."""
    units: tuple[str, ...] = ()
    """The units called: itself, or those inside of an autograd function (activation checkpointing)."""
    inputs: tuple[Key, ...] = ()
    """The values of stages among its inputs."""
    checkpoint: int | None = None
    """The first operation of the activation checkpoint (use_reentrant=False) that it is in."""
    ghosts: Any = None
    """Its result without data, in the structure it returns."""
    outputs: tuple[Key | None, ...] = ()
    """The values that it returned, by position in its result; one of an earlier operation where it returned its input.
    None for values that aren't of a stage."""
    changed: tuple[tuple[int, Key], ...] = ()
    """What it changed in place: position among the tensors of its arguments, and the value that became."""
    random: bool = False
    """It draws random numbers, and is replicated: every stage has to draw the same."""
    own_generator: bool = False
    """It draws them from a generator that the step makes for itself, on every stage alike."""
    shape_only: bool = False
    """It reads nothing but shape and dtype of its tensors (`zeros_like`)."""
    recipe: str = ""
    """What it does to what: its plain arguments, and where its tensors come from. See `recipe_of`."""
    given: tuple[Any, ...] = ()
    """Shape and dtype of the tensors among its arguments; None for those that not every stage has."""
    copied: tuple[int, ...] = ()
    """Which tensors among its arguments it is given copies of: its backward may need what they hold now, and the next
    microbatch changes it in place."""


def last_unit(operations: Sequence[Operation]) -> int:
    """The index of the last call of a unit; -1 if there is none."""
    return max((i for i, operation in enumerate(operations) if operation.units), default=-1)


@dataclass(frozen=True)
class SideEffects:
    """What a step does beside its operations: to its batch, its module and the generators of the host."""

    changes_batch: bool
    """It changes tensors of the batch in place, or its lists, dicts and objects."""
    leaves_ghosts: bool
    """It leaves values on the module that stages before the last know as ghosts."""
    lists_parameters: bool
    """It goes through the parameters of modules."""
    put_back: tuple[Spot, ...] = field(compare=False, repr=False)
    """What it sets, and puts back after stages before the last have left it."""
    set_late: tuple[str, ...]
    """The modules in units of stages before the last on which it sets Python values at its end."""
    changes_module: bool
    """It changes attributes of the module, of its submodules or of what hangs on them."""
    draws_on_host: bool
    """It draws from Python's or NumPy's generators, which then are alike on all stages."""
    drawn_apart: tuple[Spot, ...] = field(compare=False, repr=False)
    """Such generators on the module, of which stages would draw other numbers; see `OwnDraws`."""


@dataclass(frozen=True)
class Part:
    """A part of a step that goes backward by hand, between two backwards. Any other step is a single part."""

    number: int = 0
    """How many backwards come before it."""
    begins: int = 0
    """Its first operation. What stages compute before it, an earlier part has done."""
    acts_first: bool = False
    """Whether the step does something by hand before the part's first operation of stages."""
    host_reads: tuple[HostRead, ...] = ()
    """The step's reads on the host. See `Reads`."""
    recalled: frozenset[Key] = frozenset()
    """Values of earlier parts that this one takes: the stages that made them have kept them."""
    goes_backward: bool = False
    """Whether it ends with a backward by hand; else it is the last one."""
    retains_graph: bool = False
    """Whether that leaves the graph as it is, for another one."""
    learns: Mapping[str, bool] = field(default_factory=dict)
    """`requires_grad` at that backward of the parameters that the step has toggled so far, by name."""

    @property
    def answered(self) -> list[int]:
        """Before which operations the step reads stages' values."""
        return [read.before for read in self.host_reads if read.of_stage]


@dataclass(frozen=True)
class SlicePlan:
    """How the steps of one signature are cut.

    `relays[s]` is what crosses from stage s - 1 to stage s; `relays[0]` is empty.
    """

    n_stages: int
    operations: tuple[Operation, ...]
    relays: tuple[tuple[Relay, ...], ...]
    shared: Mapping[str, tuple[int, ...]]
    """Parameters used on several stages, with those stages: their gradients are summed over them."""
    glue: Mapping[str, tuple[int, ...]]
    """Parameters outside of all units, with the stages that use them. Every rank holds them."""
    changed: Mapping[str, int]
    """Buffers (and other tensors of the module) outside of units that the step changes in place, with the stage that
    does: only that stage's copy is up to date."""
    not_operations: frozenset[Any]
    """Functions that only ask for shapes, dtypes, modes, or values of the batch."""
    touched: Mapping[str, int]
    """The names of the units' parameters and buffers that operations between units take, and which is the first."""
    effects: SideEffects
    uses_functions: bool
    """Some operation between units is an autograd function, which no mode sees."""
    converts: bool
    """The step calls a module's `to(...)` or its like."""
    changed_alike: tuple[str, ...] = ()
    """As `changed`, but every stage does, on its own copy."""
    used: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """What outlives the step and is in no unit, with the stages that depend on it."""
    clones: frozenset[Key] = frozenset()
    """Relayed values that a later stage changes in place."""
    reads: tuple[Read, ...] = ()
    """Where the step looks at replicated values on the host, and may branch by them."""
    varies: bool = False
    """Batches of the same signature have other texts, arrays or logged values, by which the step may branch unseen."""
    mixes: str = ""
    """The operation by which the step puts samples beside others, if it does (mixup)."""
    divides: str = ""
    """The one by which it gives a module some of the samples, to learn of."""
    ended: str = ""
    """Where, on the last stage, the step could not be followed any more, and why."""
    ended_in: tuple[str, ...] = ()
    """The unit whose call that was; none for an operation between units."""
    late_hooks: frozenset[Any] = field(default=frozenset(), compare=False, repr=False)
    """Code of the hooks on units that are called after them, on all stages."""
    attributes: Mapping[str, tuple[Attribute, ...]] = field(default_factory=dict, compare=False, repr=False)
    """By units: those that they set, and of which the step takes tensors."""
    couples: str = ""
    """What makes something of all samples between blocks, where the tail of the step is a stage of its own."""
    unit_rows: Mapping[str, CallRows] = field(default_factory=dict, compare=False, repr=False)
    """Where samples lie in what units are given and return, there."""
    part: Part = Part()
    """Which part of the step the plan is of."""
    _scripts: dict[int | None, Script] = field(default_factory=dict, compare=False, repr=False)

    @property
    def first_of_stages(self) -> int:
        """The first operation of the plan's part that is some stage's; behind the last one if there is none."""
        own = (i for i in range(self.part.begins, len(self.operations)) if self.operations[i].stage is not None)
        return next(own, len(self.operations) + 1)

    @property
    def reads_first(self) -> bool:
        """Whether the part reads such values before its first operation of stages."""
        return any(self.part.begins <= before <= self.first_of_stages for before in self.part.answered)

    def is_idle(self, stage: int) -> bool:
        """Whether a stage before the last neither computes anything nor hands something on."""
        return self.script(stage).last < 0 and not self.relays[stage + 1]

    def is_earlier(self, operation: int) -> bool:
        """Whether an operation is one that an earlier part has done: not if every stage computes it."""
        return operation < self.part.begins and self.operations[operation].stage is not None

    def recalled_on(self, stage: int) -> set[Key]:
        """The values of earlier parts that a stage has kept."""
        every = stage == self.n_stages - 1  # what is replicated, it is that one alone that keeps it
        homes = {key: self.operations[key.operation].stage for key in self.part.recalled}
        return {key for key, home in homes.items() if home == stage or (every and home is None)}

    def script(self, stage: int | None) -> Script:
        """What one stage does, operation by operation; without one, what is replicated."""
        if stage not in self._scripts:
            self._scripts[stage] = Script.of(self, stage)
        return self._scripts[stage]

    @property
    def why_not_sent(self) -> str:
        """Why the last stage may lack a value of an earlier one, and what to do, for messages."""
        if not self.ended:
            return (
                "when the step was planned, this was not seen, or not on this stage. What a step computes from values"
                " of earlier stages may not depend on data or on the step's number."
            )
        return (
            f"a step is followed to where it does what depends on values, which is {self.ended}. Take what is needed of"
            " earlier stages before that line, or write it so that nothing depends on values: multiply by a mask, not"
            " `x[mask]`; `torch.where`, not `if`."
        )

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The operations of stages by their indices, numbered: alike where a step finds a table and where it makes
        one."""
        of_stages = (i for i, operation in enumerate(self.operations) if operation.stage is not None)
        return {index: number for number, index in enumerate(of_stages)}

    @functools.cached_property
    def early_reads(self) -> tuple[Read, ...]:
        """The reads while stages still depend on each other: another batch of the same shapes may need another plan."""
        last = self.script(None).last
        return tuple(read for read in self.reads if read.before <= last)

    def digest(self) -> str:
        """A digest, the same on all ranks that planned the same. What is replicated may come in another order: of a set
        of names each process has its own."""
        operations: list[Any] = []
        replicated: list[str] = []
        for i, op in enumerate(self.operations):
            if op.stage is None and not op.random:
                replicated.append(op.recipe)
            else:
                operations += [sorted(replicated), (i, op.recipe, op.stage, op.units, op.outputs, op.changed)]
                replicated = []
        text = repr(
            (
                operations,
                sorted(replicated),
                [[(r.key, r.shape, r.stride, r.dtype, r.requires_grad) for r in relays] for relays in self.relays],
                sorted(self.shared.items()),
                sorted(self.glue.items()),
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()


def recipe_of(name: str, scalars: Sequence[Any], inputs: Sequence[str]) -> str:
    """A digest of an operation: the same on all ranks, whatever the order of those that don't depend on each other.

    Args:
        name: what is done.
        scalars: its plain arguments, which have to be the same on all ranks.
        inputs: how its tensors came about.
    """
    return hashlib.blake2b(repr((name, *scalars, *inputs)).encode(), digest_size=8).hexdigest()
