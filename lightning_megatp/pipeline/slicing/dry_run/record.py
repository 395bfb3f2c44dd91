"""The plan's operations, as a dry run finds them one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_megatp.containers import leaves_in, tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deeds, Moment, deed_of
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values
from lightning_megatp.pipeline.slicing.operations import LIKE_ANOTHER, SHAPE_ONLY
from lightning_megatp.pipeline.slicing.plan import Key, Operation, recipe_of
from lightning_megatp.shim.fakes import FakeTensorMode
from lightning_megatp.shim.torch import tree_map


class Record:
    """The operations of one step.

    Args:
        values: the tensors of the step.
        fake_mode: makes new objects of what units return.
    """

    def __init__(self, values: Values, fake_mode: FakeTensorMode) -> None:
        self._values, self._fake_mode = values, fake_mode
        self._moment = Moment.now()
        """Where generators were before the last operation."""
        self.operations: list[Operation] = []
        self.not_operations: set[Any] = set()
        """Functions that are none."""
        self.deeds: list[Deeds] = []
        """What each of them did."""
        self.touched: dict[int, int] = {}
        """id() of the units' parameters and buffers that operations between units take -> the first of these."""
        self.lasting_inputs: list[tuple[int, int, set[int]]] = []
        """Operations that gradients come back from, which tensor of their arguments, and id() of those that outlive the
        step and lie there."""
        self.stage = 0
        """Of the last operation that has one."""

    @property
    def next(self) -> int:
        """The index of the operation that comes next."""
        return len(self.operations)

    def use(self, value: Value, stage: int | None, by: str, made: Sequence[Value | None] = ()) -> None:
        """As `Values.use`; parameters and buffers of units are noted."""
        self._values.use(value, stage, by, made)
        if stage is not None and self._values.is_of_unit(value.tensor) and value.key is None:
            self._values.owners[id(value.tensor)].add(stage)
            self.touched.setdefault(id(value.tensor), self.next)

    def begin(self, call: Call) -> None:
        """Before an operation is carried out: what it does will be compared."""
        now = Moment.now()
        if now != self._moment:  # most draw nothing: kept once
            self._moment = now
        call.deeds = Deeds(self._moment, [deed_of(call.name, call.args, call.kwargs, self._values.name)])

    def add(self, call: Call, out: Any) -> Any:
        """Add an operation to the plan.

        Args:
            call: what was done.
            out: what it made.

        Returns:
            Its result as the step gets it.
        """
        stage, n_outputs = call.stage, len(tensors_in(out))
        origins = frozenset[int]().union(*(value.origins for value in call.inputs))
        became = {}
        for n, position in enumerate(call.changed):
            key = None if stage is None else Key(self.next, n_outputs + n)
            became[position] = self._values.change(call.inputs[position], stage, key, origins, call.by, self.next)
        known = [*call.inputs, *became.values()]
        out = self._name_outputs(out, call, known, origins)
        outputs = [value for value in map(self._values.get, tensors_in(out)) if value is not None]
        made = [v for v in [*outputs, *became.values()] if call.gradient and self._values.fake(v.tensor).requires_grad]
        given = call.inputs[: len(tensors_in(call.args, call.kwargs))]  # without what is found inside
        for position, value in enumerate(given if made else ()):
            if position not in became and (lasting := self._values.lasting_in(value)):
                self.lasting_inputs.append((self.next, position, lasting))
        for value in call.inputs:
            if value.stage is None or not call.shape_only:
                self.use(value, stage, call.by, made)
        leaves = leaves_in(call.args, call.kwargs)
        scalars = tuple(x for x in leaves if isinstance(x, (bool, int, float, str)))
        recipe = recipe_of(call.name, scalars, [value.identity for value in call.inputs])
        if stage is None:
            for i, value in enumerate([*outputs, *became.values()]):
                value.recipe = f"{recipe}.{i}" if value not in call.inputs else value.recipe
        self.stage = self.stage if stage is None else stage
        self.deeds.append(call.deeds)
        self.operations.append(
            Operation(
                what=call.what,
                name=call.name,
                where=call.where,
                stage=stage,
                units=tuple(call.units),
                inputs=tuple(value.key for value in call.inputs if value.key is not None),
                checkpoint=call.checkpoint,
                ghosts=None if stage is None else tree_map(self._ghost, out),
                outputs=tuple(value.key for value in outputs),
                changed=tuple((position, value.key) for position, value in became.items() if value.key is not None),
                random=call.random,
                shape_only=call.shape_only,
                recipe=recipe,
                given=call.given,
            )
        )
        return out

    def _name_outputs(self, out: Any, call: Call, known: list[Value], origins: frozenset[int]) -> Any:
        """Learn of the tensors of a result, and give those of a stage keys.

        What is an input of the same stage, unchanged or changed in place, stays what it is, and what is returned twice
        is one value. What a unit returns becomes a new object: if the unit also keeps it somewhere, that is not taken
        for what it returned.
        """
        given = {id(x): value for value in known for x in (value.tensor, value.fake)}
        constant = not call.random and all(x.constant for x in _read_by(call))
        named: dict[int, Tensor] = {}
        position = itertools.count()

        def name(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            key = Key(self.next, next(position))
            if id(x) not in named:
                named[id(x)] = name_once(x, key)
            return named[id(x)]

        def name_once(x: Tensor, key: Key) -> Tensor:
            value = given.get(id(x))
            if value is not None and value.stage == call.stage and not call.is_unit:
                return value.tensor
            if call.stage is None:
                made = self._values.add(x, None, call.by, origins=origins, constant=constant)
                made.made_at = key
                return x
            x = self._values.fake(x)
            if call.is_unit or value is not None:
                with self._fake_mode:
                    x = x.view_as(x)
            self._values.add(x, call.stage, call.by, key)
            return x

        return tree_map(name, out)

    def _ghost(self, x: Any) -> Any:
        value = self._values.get(x) if isinstance(x, Tensor) else None
        return x if value is None else value.ghost


def _read_by(call: Call) -> list[Value]:
    """The inputs whose data an operation reads."""
    if call.name in SHAPE_ONLY:
        return []
    return call.inputs[:1] if call.name in LIKE_ANOTHER and isinstance(call.args[0], Tensor) else call.inputs
