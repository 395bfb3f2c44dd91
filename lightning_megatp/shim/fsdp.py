"""Private names of torch's FSDP2 (torch 2.11-2.13)."""

from __future__ import annotations

from typing import Any


def is_post_backward(node: Any) -> bool:
    """Whether a node of an autograd graph is the one that FSDP2 hangs on all inputs of a unit together: each of its
    outputs is the input of the same position, and knows nothing of the others."""
    return type(node).__name__ == "RegisterPostBackwardFunctionBackward"
