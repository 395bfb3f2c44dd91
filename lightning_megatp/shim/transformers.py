"""What is known of Hugging Face's transformers without importing it: it is no dependency. Seen in 5.23."""

from __future__ import annotations

import sys

from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a `transformers.pytorch_utils.Conv1D` itself, no subclass. Whoever has one has imported it."""
    return type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
