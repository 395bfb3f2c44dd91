"""Why a step can't be cut, or left its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_megatp.tensor.functions import gradient_in_step

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.filled import Attribute


class SliceError(RuntimeError):
    """A step that can't be cut, or that left its plan: the text names the operation, the module and the remedy."""

    def __init__(self, text: str) -> None:
        super().__init__(f"MegaTPStrategy: {text}")


class KindError(SliceError):
    """The step does something that no assignment of units to stages can support."""


class BeyondPlan(SliceError):
    """The last stage, after all that the plan says, needs another stage again."""


class SideDoor(SliceError):
    """The step uses a tensor that a unit made and did not return (an attribute, a cache, what a hook keeps).

    Args:
        hook: code of the hook that was given it, or has made it; None if there is none.
        attribute: of a unit, in which it is; None if it is in none.
    """

    def __init__(self, text: str, hook: Any, attribute: Attribute | None) -> None:
        super().__init__(text)
        self.hook, self.attribute = hook, attribute


class ReadsValues(SliceError):
    """A unit reads values in its forward. Maybe only one of its parts does: it is tried again with the results of such
    parts made up."""


def gradient_read(by: str) -> KindError:
    """A step asks for the gradient of a parameter.

    Args:
        by: the operation, and where it is.
    """
    why = "With pp > 1 a stage has those of its own parameters, and backward of earlier microbatches has begun."
    return KindError(f"{by}: {gradient_in_step('a parameter', why)}")
