"""The tensors of a step as the dry run knows them: the stage of each, who uses it, and who shares its memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.parts import Parts
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Key
from lightning_megatp.pipeline.slicing.state.lasting import UNNAMED, Changed, LastingChanges
from lightning_megatp.shim.autograd import is_transformed
from lightning_megatp.shim.fakes import FakeTensorMode, fake_of, is_fake
from lightning_megatp.shim.torch import DisableTorchFunction, storage_id, tensor_version

StandIns = MutableMapping[Tensor, tuple[Tensor, Any]]
"""By the identity of tensors, as long as these are there: one without data, and the form that it was made for."""


@dataclass(eq=False)
class Value:
    """A tensor of the step."""

    tensor: Tensor
    fake: Tensor | None
    """Stands for it in computations without data; itself, where it has none. Made when needed."""
    stage: int | None
    """None: replicated, every stage has it."""
    key: Key | None
    maker: str
    origins: frozenset[int] = frozenset()
    """id() of the tensors outside of units, there before the step, that a replicated value depends on."""
    constant: bool = False
    """It depends neither on the batch nor on chance."""
    consumers: set[int] = field(default_factory=set)
    """Later stages that use it."""
    by_change: bool = False
    """It came about by a change in place."""
    became: list[tuple[int, Value | None]] = field(default_factory=list)
    """What differentiable operations made of it, with their stages; None: it is the loss."""
    became_before: list[tuple[int, Value]] = field(default_factory=list)
    """The same, in earlier parts of a step that goes backward by hand."""
    reaches_loss: bool = False
    """Whether it has a gradient. Known at the end of the step."""
    changed_elsewhere: tuple[int | None, str] | None = None
    """Another tensor in the same memory was changed in place: on which stage, and by what."""
    made_at: Key | None = None
    """Where a replicated value was made: the operation, and which of its tensors it is."""
    recipe: str = ""
    """How a replicated value came about: the same on all ranks that computed the same."""
    ghost: Tensor | None = None
    """What a run returns for it on the stages that don't have it: no data, no graph."""

    @property
    def identity(self) -> str:
        """What a value is called: the same on all ranks, whatever the order of operations that don't depend on each
        other."""
        return self.recipe or repr(self.key or (self.maker, tuple(self.tensor.shape), self.tensor.dtype))

    def follow(self) -> None:
        """Let what stands for the value require a gradient if the value does now."""
        if self.fake is not None and self.fake.requires_grad != self.tensor.requires_grad:
            self.fake.requires_grad_(self.tensor.requires_grad)

    def has_gradient(self, stage: int = 0) -> bool:
        """Whether one comes back from operations of a stage or of later ones."""
        return any(x is None or x.reaches_loss for user, x in self.became if user >= stage)


class Values:
    """All tensors of one step.

    Args:
        fake_mode: makes stand-ins.
        persistent: id() -> name of the tensors that outlive the step: parameters, buffers.
        owners: id(parameter or buffer of a unit) -> the stages of its units. Those of operations between units that use
            it are added.
        glue: id() -> name of the parameters that belong to no unit.
        n_stages: how many stages run the step.
        stand_ins: are kept there for tensors that are no values of the step.
    """

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        persistent: Mapping[int, str],
        owners: dict[int, set[int]],
        glue: Mapping[int, str],
        n_stages: int,
        stand_ins: StandIns,
    ) -> None:
        self._fake_mode, self._persistent, self.owners, self.glue = fake_mode, persistent, owners, glue
        self.n_stages, self.last_stage, self._stand_ins = n_stages, n_stages - 1, stand_ins
        self._known: dict[int, Value] = {}
        self._in_memory: dict[int, list[Value]] = {}
        self._lasting: dict[int, Value] = {}
        """storage_id() -> the persistent tensor that lies there, or in whose place a fake does."""
        self.by_key: dict[Key, Value] = {}
        self.uses: dict[int, set[int | None]] = {}
        """id(persistent tensor) -> stages that use it, or what replicated operations make of it; None: all."""
        self._lasting_changes = LastingChanges(persistent, n_stages)
        self.clones: set[Key] = set()
        self.parts = Parts(self.last_stage)

    def get(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it was met before."""
        return self._known.get(id(tensor))

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor without data in place of this one."""
        if is_fake(tensor) or is_transformed(tensor):  # those of torch.func, in a unit, are around fakes
            return tensor
        known = self.get(tensor)
        if known is None:
            return self._stand_in(tensor)
        if known.fake is None:
            known.fake = fake_of(self._fake_mode, tensor)
            if self.is_persistent(tensor):
                self._lasting[storage_id(known.fake)] = known
        elif self.is_persistent(tensor):
            known.follow()  # a step that optimizes by hand lets parameters learn, or not
        return known.fake

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """For a tensor that is no value of the step (a table, a mask that all layers take): made once, as long as the
        tensor has the same form."""
        with DisableTorchFunction():
            form = tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        fake, at = self._stand_ins.get(tensor, (None, None))
        if fake is None or at != form:
            self._stand_ins.pop(tensor, None)  # or the mode would find it again
            del fake
            fake = fake_of(self._fake_mode, tensor)
            with DisableTorchFunction():
                # The mode may have found one that is held elsewhere: of what an autograd function fills and returns.
                if tensor.grad_fn is not None and not fake.requires_grad:
                    fake.requires_grad_()
            self._stand_ins[tensor] = fake, form
        return fake

    def add(
        self,
        tensor: Tensor,
        stage: int | None,
        maker: str,
        key: Key | None = None,
        origins: frozenset[int] = frozenset(),
        constant: bool = False,
    ) -> Value:
        """Learn of a tensor."""
        before = self.get(tensor)
        value = Value(tensor, None if before is None else before.fake, stage, key, maker, origins, constant)
        value.recipe = self._persistent.get(id(tensor), "") if key is None else ""
        self._known[id(tensor)] = value
        if key is not None:
            self.by_key[key] = value
            fake = self.fake(tensor)
            value.ghost = fake.detach().requires_grad_(fake.requires_grad)
        for storage in self._storages(value):
            self._in_memory.setdefault(storage, []).append(value)
            if self.is_persistent(tensor):
                self._lasting[storage] = value
        return value

    def use(self, value: Value, stage: int | None, by: str, made: Sequence[Value | None] = ()) -> None:
        """An operation of a stage takes a value, and makes others of it that its gradient comes back from."""
        if stage is not None:
            self.use_origins(value, stage)
        if value.changed_elsewhere is not None:
            self._check_change(value, stage, by)
        self.parts.take(value, stage, by)
        if value.stage is not None and stage is not None and stage > value.stage:
            value.consumers.add(stage)
        value.became += [(stage, x) for x in made if x is not value] if stage is not None else []

    def use_origins(self, value: Value, stage: int | None) -> None:
        """A stage depends on a replicated value, and so on what that was made from."""
        for origin in value.origins:
            self.uses.setdefault(origin, set()).add(stage)

    def lasting_in(self, value: Value) -> set[int]:
        """id() of the persistent tensor that a value is, or a view of."""
        if self.is_persistent(value.tensor):
            return {id(value.tensor)}
        found = map(self._lasting.get, self._storages(value))
        return {id(lasting.tensor) for lasting in found if lasting is not None}

    def look_at(self, value: Value, before: int) -> None:
        """Each stage that comes so far depends on a replicated value.

        Args:
            before: which operation comes next.
        """
        self.use_origins(value, None)
        for origin in value.origins:
            self._lasting_changes.look(origin, before)

    def is_persistent(self, tensor: Tensor) -> bool:
        """Whether it was there before the step, and will be after."""
        return id(tensor) in self._persistent

    def is_of_unit(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or a buffer of a unit, or stands for one of another stage."""
        return id(tensor) in self.owners

    def is_of_module(self, tensor: Tensor) -> bool:
        """Whether it is one of the module's tensors, in a unit or not."""
        return self.is_persistent(tensor) or self.is_of_unit(tensor)

    def name(self, tensor: Tensor) -> str:
        """The name of a tensor of the module, or a number for one of a unit without name; "" for others."""
        name = self._persistent.get(id(tensor), "")
        has_none = name == UNNAMED or (not name and self.is_of_unit(tensor))
        return f"tensor {id(tensor)}" if has_none else name

    def change(
        self, value: Value, stage: int | None, key: Key | None, origins: frozenset[int], by: str, index: int
    ) -> Value:
        """An operation changed a tensor in place: it is another value from now on.

        Args:
            stage: the operation's; None if it is replicated.
            key: of what the tensor becomes.
            origins: of the same.
            by: what the operation is, for messages.
            index: its number in the step.

        Raises:
            SliceError: another stage would not see the change, or sees it though it should not.
        """
        self.parts.change(value, stage, by, lasts=bool(self.lasting_in(value)))
        for tensor_id in self.lasting_in(value):
            self._lasting_changes.note(tensor_id, stage, index, by, origins)
        if value.stage is not None and value.stage != stage and value.key is not None:
            self.clones.add(value.key)
        sharing = {id(other): other for storage in self._storages(value) for other in self._in_memory.get(storage, ())}
        for other in sharing.values():
            if other.stage is not None and other.stage == stage and other.consumers:
                raise SliceError(
                    f"{by} changes in place what {other.maker} made on pipeline stage {stage}, after stage"
                    f" {min(other.consumers)} used it; that stage would receive the changed values. Use the operation"
                    " that returns a new tensor."
                )
            if other.tensor is not value.tensor and (stage is not None or other.stage is not None):
                other.changed_elsewhere = (stage, by)
        changed = self.add(value.tensor, stage, by, key, origins)
        changed.by_change = True
        return changed

    def begin_part(self, operation: int) -> None:
        """The step has gone backward by hand: what was made so far takes part in what comes if that takes it anew.

        Args:
            operation: which comes next.

        Raises:
            SliceError: what every stage does up to here is not the same when it is done once more.
        """
        every = {id(value): value for value in (*self._known.values(), *self.by_key.values())}  # also what was changed
        self.parts.begin(operation, every.values(), self.glue)

    def early_numbers(self) -> list[Value]:
        """The tensors of a single number that earlier stages have made: losses, which a step that reads one on the host
        often reads all, to log them."""
        of_stages = [v for v in self.by_key.values() if v.stage not in (None, self.last_stage)]
        early = [v for v in of_stages if v.changed_elsewhere is None and self.get(v.tensor) is v]
        return [v for v in early if v.tensor.dim() == 0]

    def find_gradients(self) -> None:
        """At the end of the step: which values reach the loss. All that could, where the dry run did not: what the last
        stage has may go on into it."""
        values = list(self.by_key.values())[::-1]
        seen = any(x is None for value in values for _, x in value.became)
        for value in values:
            value.reaches_loss = not seen
            if not seen and self.last_stage in value.consumers:
                value.became.append((self.last_stage, None))
        found = seen
        while found:
            found = False
            for value in values:
                self.parts.go_back(value)
                if not value.reaches_loss and value.has_gradient():
                    value.reaches_loss = found = True

    def changed_for_good(self, ends: Sequence[int]) -> Changed:
        """At the end of the step: what outlives it and was changed in place. See `LastingChanges.decide`."""
        return self._lasting_changes.decide(self.uses, self.owners, ends)

    def _storages(self, value: Value) -> set[int]:
        return {storage_id(x) for x in (value.tensor, value.fake) if x is not None}

    def _check_change(self, value: Value, stage: int | None, by: str) -> None:
        assert value.changed_elsewhere is not None
        changed_on, change = value.changed_elsewhere
        if self.n_stages > 1 and (value.stage != changed_on or stage != changed_on):
            raise SliceError(
                f"{by} uses what {value.maker} made, and {change} changed its memory in place under another name (a"
                " view). Pipeline stages don't share memory, so one of them would see old values. Use the operation"
                " that returns a new tensor."
            )


def versions(values: list[Value]) -> list[tuple[int, int]]:
    """How often the tensors of values, and their stand-ins, were changed in place so far."""
    with DisableTorchFunction():
        return [(tensor_version(v.tensor), 0 if v.fake is None else tensor_version(v.fake)) for v in values]
