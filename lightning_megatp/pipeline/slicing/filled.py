"""Lists, dicts and objects that units are given, and put tensors into: `features.append(x)`, `losses["aux"] = loss`,
`context.hidden = h`; and what they set on themselves, where the step takes it: `self.aux_loss = loss`.

Stages that don't call the unit are given them, too. So a unit returns what it has put there as well, and it is put
there on all stages.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.given import Path, held_in
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.snapshots.leftovers import OF_MODULES
from lightning_megatp.tensor.shards import gathered


class Attribute(NamedTuple):
    """An attribute that a unit, or a part of it, sets: looks like a dict with nothing else in it."""

    unit: str
    part: str
    name: str
    holder: nn.Module
    """The part."""

    def copy(self) -> dict[str, Any]:
        """A dict of its value, by its name; empty where it is not set."""
        held = vars(self.holder)
        return {self.name: held[self.name]} if self.name in held else {}

    def items(self) -> Collection[tuple[str, Any]]:
        """Its name and its value."""
        return self.copy().items()

    def __contains__(self, name: object) -> bool:
        return name in self.copy()

    def update(self, entries: Mapping[str, Any]) -> None:
        """Set the attribute."""
        vars(self.holder).update(entries)

    def pop(self, name: str, default: Any) -> Any:
        """Remove the attribute."""
        return vars(self.holder).pop(name, default)

    def tensors(self) -> list[Tensor]:
        """The tensors in its value."""
        return tensors_in(self.copy(), [held for _, held in held_in((), self.copy())])

    def of(self, name: str, unit: nn.Module) -> Attribute | None:
        """The attribute of another unit that has this name there; None if that has no such part."""
        holder = dict(unit.named_modules()).get(self.part)
        return None if holder is None else self._replace(unit=name, holder=holder)


def attribute_with(tensor: Tensor, name: str, unit: nn.Module) -> Attribute | None:
    """The attribute of a unit in which a tensor is."""
    for part, child in unit.named_modules():
        for key in [key for key in vars(child) if key not in OF_MODULES]:  # in order, on all ranks
            attribute = Attribute(name, part, key, child)
            if any(x is tensor for x in attribute.tensors()):
                return attribute
    return None


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
    attributes: Sequence[Attribute] = (),
) -> Any:
    """The result of a call.

    Args:
        carry_out: makes the result of a function of the call's arguments, by whatever means.
        function: what is called.
        told: what else `carry_out` is given.
        args: of the call.
        kwargs: of the call.
        attributes: which the unit sets, too.
    """
    found = dict(_held(args, kwargs, attributes))
    if not found:
        return carry_out(function, *told)

    @functools.wraps(function)
    def and_put(*args: Any, **kwargs: Any) -> Any:
        before = [(path, held, held.copy()) for path, held in _held(args, kwargs, attributes)]
        result = function(*args, **kwargs)
        put = {path: change for path, held, was in before if (change := _difference(was, held))}
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
        _apply(change, found[path])
    return made.result


def _held(
    args: Sequence[Any], kwargs: Mapping[str, Any], attributes: Sequence[Attribute]
) -> Iterator[tuple[Path, Any]]:
    """What may be filled, by the names that lead there."""
    yield from held_in(args, kwargs)
    for i, attribute in enumerate(attributes):
        yield (_OF_UNIT, i), attribute
        yield from (((_OF_UNIT, i, *path), held) for path, held in held_in((), attribute.copy()))


def _difference(was: Any, held: Any) -> _Put | None:
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


def _apply(change: _Put, held: Any) -> None:
    if isinstance(held, list):
        held[min([*change.entries, *change.gone]) :] = change.entries.values()
        return
    for key in change.gone:
        held.pop(key, None)
    held.update(change.entries)


def _name(path: Path) -> str:
    return "".join(f"[{part!r}]" for part in path)


_OF_UNIT = "an attribute of the unit"
"""No argument's name."""
