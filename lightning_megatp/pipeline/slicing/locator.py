"""Where in a user's code something happens: for messages."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

_PASSED_OVER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


class Locator:
    """Names the user's line, and the module it is in.

    Args:
        module: whose submodules are named.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names = {id(child): name for name, child in module.named_modules()}
        self._top = type(module).__name__

    def here(self) -> str:
        """`model.py:57, in forward of `encoder`` for the innermost frame that is neither torch's nor this package's."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
            frame = frame.f_back
        code = frame.f_code
        module = frame.f_locals.get("self")
        name = self._names.get(id(module)) if isinstance(module, nn.Module) else None
        owner = "" if name is None else f" of `{name or self._top}`"
        return f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}{owner}"
