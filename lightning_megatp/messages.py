"""What people read: warnings and notes, once, on global rank 0."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("lightning_megatp")


@rank_zero_only
def warn_once_per_run(text: str) -> None:
    """A warning on rank 0."""
    warnings.warn(f"MegaTPStrategy: {text}", UserWarning, stacklevel=3)


def warn_of_stage(text: str) -> None:
    """A warning of a rank that knows what rank 0 does not."""
    warnings.warn(f"MegaTPStrategy: {text}", UserWarning, stacklevel=3)


def is_explained(error: BaseException) -> bool:
    """Whether an error has this package's own text."""
    return str(error).startswith("MegaTPStrategy")


def with_article(noun: str) -> str:
    """`a Linear`, `an Embedding`; by sound, so `a UNet` and `an MLP`, whose first letters are spelled."""
    word = noun.lstrip("_`")
    spelled = re.match("[A-Z]{2}", word) is not None and word[:1] != "U"
    vowel = word[:1] in "AEFHILMNORSX" if spelled else word[:1] in "AEIOUaeiou" and not _SOUNDS_LIKE_YOU.match(word)
    return f"{'an' if vowel else 'a'} {noun}"


_SOUNDS_LIKE_YOU = re.compile("U[A-Z]|[Uu](ni(?!n)|se|til)|[Ee]u|[Oo]ne")


class OfOneRank:
    """Base of objects on the user's modules that belong to one rank of a run. A pickled module would be a part of
    itself, which no other run could do anything with."""

    def __reduce__(self) -> Any:
        """Refuse to be pickled.

        Raises:
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
