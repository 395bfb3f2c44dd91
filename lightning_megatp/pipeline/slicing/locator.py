"""Where in a user's code something happens: for messages."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

from lightning_megatp.origins import THIS_PACKAGE, callers_frame

# torch with the libraries around it: what is said is the line that calls them.
_PASSED_OVER = ("torch", "torchmetrics", "torchvision", "torchaudio", THIS_PACKAGE)


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
        frame = callers_frame(sys._getframe(1), *_PASSED_OVER)
        code = frame.f_code
        module = frame.f_locals.get("self")
        name = self._names.get(id(module)) if isinstance(module, nn.Module) else None
        owner = "" if name is None else f" of `{name or self._top}`"
        return f"{Path(code.co_filename).name}:{frame.f_lineno}, in {code.co_name}{owner}"
