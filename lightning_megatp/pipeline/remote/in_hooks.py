"""Units that a hook calls between steps.

All stages run a hook with the same values. A unit that it calls is computed by its own stage, and the others are sent
the result. A hook that the last stage runs alone, since a step has left something there, has the other stages run
their units for it, as a step of evaluation does that can't be cut (`calls`). Either way without a graph: a backward
would need all stages once more.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.remote.calls import Caller, RemoteCalls, Run
from lightning_megatp.pipeline.remote.messages import Contents
from lightning_megatp.random_states import is_random_state, random_state, set_random_state
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tensor_version, tree_leaves, tree_map
from lightning_megatp.shim.transformers import asked_for, collected_for, collecting
from lightning_megatp.tensor.shards import gathered

_ROUNDING = 1e-3
"""How far sums of the same numbers may be apart, that two devices computed: of the sum of their absolute values."""


class _InHook:
    """Decides about calls in a hook: those of units are not looked into, all others are as they are.

    Args:
        remote: who has which unit.
        hook: its name.
        run: runs a unit that is here.
        began: told before each outermost call of a unit, with its name.
    """

    def __init__(self, remote: RemoteCalls, hook: str, run: Run, began: Callable[[str], None]) -> None:
        self._remote, self._hook, self._run, self._began = remote, hook, run, began
        self._inside = False

    def unit(
        self, name: str, stage: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        if self._inside:
            return function(*args, **kwargs)
        self._began(name)
        if any(map(is_fake, tensors_in(args, kwargs))):
            raise RuntimeError(
                f"MegaTPStrategy: `{self._hook}` gives `{name}` a parameter or buffer of another pipeline stage's"
                " module, which has no value here. Let its own module compute with it."
            )
        self._inside = True
        try:
            with torch.no_grad():
                return self._call(name, self._remote.rank_of_stage[stage], function, args, kwargs)
        finally:
            self._inside = False

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method."""
        return function(*args, **kwargs)

    def log(self, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """`self.log` and `self.log_dict`."""
        original(*args, **kwargs)

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics."""
        return contextlib.nullcontext()

    def _call(
        self, unit: str, home: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        raise NotImplementedError


class Together(_InHook):
    """In a hook that all stages run, or a step that is run as such. Random numbers that a unit draws, the default
    generators of the other stages have drawn afterwards, too: what comes next draws the same on all of them.

    Communication per call: an object all-gather over pp of what the arguments are, and a broadcast of the result, both
    between hosts.
    """

    def _call(
        self, unit: str, home: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        args, kwargs = tree_map(gathered, (args, kwargs))
        given, tensors = Contents((args, kwargs)), tensors_in(args, kwargs)
        self._agree(unit, [unit, given.kinds, *map(_described, tree_leaves((args, kwargs)))])
        table = self._remote.table(keeps=False)
        if home != self._remote.mesh.global_rank:
            answer = table.unpacked(self._remote.broadcast(None, home), given.objects)
            result, added, objects, changed, drawn = answer
            given.adopt(objects)
            if drawn is not None:
                set_random_state(drawn)
            for place, value in changed:
                tensors[place].copy_(value)
        else:
            versions, around = [*map(tensor_version, tensors)], self._remote.around(unit)
            state = random_state()
            with collected_for(*asked_for(around), around) as added:
                result = tree_map(gathered, self._run(functools.partial(function, *args, **kwargs)))
            added = tree_map(gathered, added)
            now = enumerate(zip(tensors, versions, strict=True))
            changed = [(place, x.detach().clone()) for place, (x, before) in now if tensor_version(x) != before]
            drawn = None if is_random_state(state) else random_state()
            answer = result, added, given.changes(), changed, drawn
            self._remote.broadcast(table.packed(answer, given.objects), home)
        for name, entries in added.items():
            collecting()[name].extend(entries)
        return result

    def _agree(self, unit: str, described: list[Any]) -> None:
        every = self._remote.mesh.exchange(described, "pp")
        if all(described == other for other in every):
            return
        raise RuntimeError(
            f"MegaTPStrategy: `{self._hook}` calls `{unit}` with arguments that differ between the pipeline stages,"
            " which all run this hook. What only one of them has (by its rank, or what a step gave to one) can't be"
            " computed with here: do it in `validation_step` or `predict_step`, or use pp=1."
        )


class FromLast(_InHook):
    """In a hook that the last stage runs alone, while the others answer (`RemoteCalls.answer`).

    Communication per call of another stage's unit: a message each way.
    """

    def __init__(self, remote: RemoteCalls, hook: str, run: Run, began: Callable[[str], None]) -> None:
        super().__init__(remote, hook, run, began)
        self._caller = Caller(remote)

    def _call(
        self, unit: str, home: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if home == self._remote.mesh.global_rank:
            return self._run(functools.partial(function, *args, **kwargs))
        return self._caller.call(home, unit, function, args, kwargs)


@dataclass(eq=False)
class _Sums:
    """Sums of floating-point numbers, which are the same but for rounding."""

    total: float
    absolute: float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Sums):
            return NotImplemented
        return _near(self.total, other.total, self.absolute) and _near(self.absolute, other.absolute, self.absolute)


def _near(x: float, y: float, size: float) -> bool:
    return math.isclose(x, y, rel_tol=0, abs_tol=_ROUNDING * size) if math.isfinite(size) else str(x) == str(y)


def _described(x: Any) -> Any:
    """By what stages see that they have the same."""
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, (bool, int, float, str)) else None
    x = x.detach().cpu().resolve_conj()
    if x.is_floating_point():
        wide = x.double()
        return str(x.dtype), x.shape, _Sums(wide.sum().item(), wide.abs().sum().item())
    return str(x.dtype), x.shape, hashlib.blake2b(x.contiguous().numpy().tobytes()).digest()
