"""What layers inside of a unit hand to the model around them, without returning it.

Asked for hidden states or attention weights, Hugging Face's models let hooks of their layers append these to lists.
Here a unit returns what was appended as well, so that it is a value like any other; the lists get it after the unit, on
all stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_megatp.shim.torch import tree_map
from lightning_megatp.shim.transformers import collecting
from lightning_megatp.tensor.shards import gathered


def with_collected(carry_out: Callable[..., Any], function: Callable[..., Any], *told: Any) -> Any:
    """The result of a call.

    Args:
        carry_out: makes the result of a function of the call's arguments, by whatever means.
        function: what is called.
        told: what else `carry_out` is given.
    """
    lists = collecting()
    if not lists:
        return carry_out(function, *told)

    def with_added(*args: Any, **kwargs: Any) -> Any:
        lengths = {name: len(entries) for name, entries in lists.items()}
        out = function(*args, **kwargs)
        added = {name: entries[lengths[name] :] for name, entries in lists.items()}
        for name, entries in lists.items():
            del entries[lengths[name] :]
        return out, tree_map(gathered, added)

    out, added = carry_out(with_added, *told)
    for name, entries in added.items():
        lists[name] += entries
    return out
