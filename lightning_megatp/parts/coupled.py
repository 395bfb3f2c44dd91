"""What a hook has computed of several elements of a part, and all that it makes of that: other ranks have others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.shim.torch import tree_leaves


class Coupled:
    """Tensors that were made so, as long as they live."""

    def __init__(self) -> None:
        self._made: Any = WeakIdKeyDictionary()

    def note(self, operation: str, results: Any, by: str) -> None:
        """These are such tensors.

        Args:
            operation: of which they came.
            results: a tensor, or several in any container.
            by: the operation that first looked at several elements.
        """
        if not operation.endswith("_like") and not operation.startswith("new_"):  # those take a shape
            self._made.update((x, by) for x in tree_leaves(results) if isinstance(x, Tensor))

    def of(self, given: Iterable[Any]) -> str | None:
        """The operation that first looked at several elements, for what one of these was made of; None if none was."""
        if not self._made:
            return None
        return next(
            (self._made[x] for x in tree_leaves(list(given)) if isinstance(x, Tensor) and x in self._made), None
        )
