"""What people read: warnings and notes, once, on global rank 0."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("lightning_megatp")


@rank_zero_only
def warn_once_per_run(text: str) -> None:
    """A warning on rank 0."""
    warnings.warn(f"MegaTPStrategy: {text}", UserWarning, stacklevel=3)


def with_article(noun: str) -> str:
    """`a Linear`, `an Embedding`."""
    return f"{'an' if noun[:1] in 'AEIOUaeiou' else 'a'} {noun}"


class OfOneRank:
    """Base of objects on the user's modules that belong to one rank of a run. A pickled module would be a part of
    itself, which no other run could do anything with."""

    def __reduce__(self) -> Any:
        """Raises:
        RuntimeError: always.
        """
        raise RuntimeError(
            "MegaTPStrategy: a module is pickled whole (`torch.save(module, file)`), of which this rank holds a part."
            " `trainer.save_checkpoint(path, weights_only=True)`, on all ranks, writes the whole model (`megatp"
            " convert` makes safetensors of it)."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies of a module may have copies of them."""
        memo[id(self)] = copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
