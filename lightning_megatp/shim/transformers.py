"""What is known of Hugging Face's transformers without importing it: it is no dependency. Seen in 5.23."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a `transformers.pytorch_utils.Conv1D` itself, no subclass. Whoever has one has imported it."""
    return type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that will be run twice: without the cache of keys and values, which a call adds to.
    Hugging Face's own gradient checkpointing does the same, by the same names."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    if not any(isinstance(x, kind) for x in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if isinstance(x, kind) else x for x in args)
    kwargs = {name: None if isinstance(x, kind) else x for name, x in kwargs.items()}
    return args, {name: False if name == "use_cache" else x for name, x in kwargs.items()}
