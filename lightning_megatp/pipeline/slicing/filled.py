"""Lists, dicts and objects that units are given, and put tensors into: `features.append(x)`, `losses["aux"] = loss`,
`context.hidden = h`; and what they set on themselves, where the step takes it: `self.aux_loss = loss`.

Stages that don't call the unit are given them, too. So a unit returns what it has put there as well, and it is put
there on all stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.given import Path, held_in
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.snapshots.leftovers import OF_MODULES
from lightning_megatp.tensor.shards import gathered


class _Result(NamedTuple):
    """What a unit returns, and what it has put into what it was given."""

    result: Any
    put: dict[Path, _Put]


class _Put(NamedTuple):
    """What was put into one of them."""

    entries: dict[Any, Any]
    """By keys; for a list, all from where it differs."""
    gone: list[Any]
    """Keys; for a list, from where on."""


def with_filled(
    carry_out: Callable[..., Any],
    function: Callable[..., Any],
    *told: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    unit: nn.Module | None = None,
) -> Any:
    """The result of a call.

    Args:
        carry_out: makes the result of a function of the call's arguments, by whatever means.
        function: what is called.
        told: what else `carry_out` is given.
        args: of the call.
        kwargs: of the call.
        unit: what it sets on itself and its parts counts, too.
    """
    found = dict(_held(args, kwargs, unit))
    if not found:
        return carry_out(function, *told)

    @functools.wraps(function)
    def and_put(*args: Any, **kwargs: Any) -> Any:
        before = [(path, held, held.copy()) for path, held in _held(args, kwargs, unit)]
        result = function(*args, **kwargs)
        put = {path: change for path, held, was in before if (change := _put(was, held))}
        return _Result(result, put) if put else result

    made = carry_out(and_put, *told)
    if not isinstance(made, _Result):
        return made
    for path, change in made.put.items():
        if path not in found:
            raise SliceError(
                f"a block puts tensors into a list, dict or object that it is given ({_name(path)}), which is not there"
                " on another pipeline stage. Let the forward of the module return them."
            )
        _do(change, found[path])
    return made.result


def _held(args: Sequence[Any], kwargs: Mapping[str, Any], unit: nn.Module | None) -> Iterator[tuple[Path, Any]]:
    """What may be filled, by the names that lead there."""
    yield from held_in(args, kwargs)
    for name, child in () if unit is None else unit.named_modules():
        own = vars(child)
        yield (name, "."), own
        inside = {key: x for key, x in own.items() if key not in OF_MODULES}
        yield from (((name, ".", *path), held) for path, held in held_in((), inside))


def _put(was: Any, held: Any) -> _Put | None:
    """What was put there; None if nothing with tensors was."""
    if isinstance(held, list):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], zip(was, held, strict=False)))
        entries = dict(enumerate(held[same:], same))
        gone = [same] if len(was) > same else []
    else:
        entries = {key: x for key, x in held.items() if (key not in was or was[key] is not x) and tensors_in(x)}
        gone = [key for key in was if key not in held]
    if not entries and not gone:
        return None
    return _Put(tree_map(gathered, entries), gone) if tensors_in(entries, was if gone else None) else None


def _do(change: _Put, held: Any) -> None:
    if isinstance(held, list):
        first = next(iter(change.entries), change.gone[0] if change.gone else len(held))
        held[first:] = change.entries.values()
        return
    for key in change.gone:
        held.pop(key, None)
    held.update(change.entries)


def _name(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)
