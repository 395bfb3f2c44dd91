"""What lies beside the weights in a list or dict of the user's, put together from several pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_megatp.messages import warn_once_per_run


class Entry(NamedTuple):
    """A weight, or what follows one, in a list or dict of the user's."""

    key: Any
    name: str
    """The name of the weight."""
    value: Tensor


def merge_stages(stages: Sequence[Sequence[Entry]], order: Sequence[str], path: str) -> list[Entry]:
    """One list or dict of all stages' entries; of a weight on several stages, the last one's.

    Args:
        stages: of each its own, the last stage first.
        order: the names in the order of the whole.
        path: where it is, for people.

    Warns:
        UserWarning: a stage has its own in another order, so that those of others can't be put between them.
    """
    at = {name: i for i, name in enumerate(order)}

    def place(entry: Entry) -> int:
        return at.get(entry.name, len(at))

    places = [list(map(place, entries)) for entries in stages]
    if any(of_stage != sorted(of_stage) for of_stage in places):
        warn_once_per_run(
            f"`{path}` has weights of several pipeline stages in another order than the module's, and a checkpoint has"
            " them in the module's. Save them in a dict, by name."
        )
    merged = {entry.name: entry for entries in reversed(stages) for entry in entries}
    return sorted(merged.values(), key=place)
