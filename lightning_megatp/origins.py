"""Whose code something is: torch's, Lightning's, this package's, another library's or the user's; by names of modules.

Most of what the strategy does to code concerns the user's alone: what it looks into, restores, names in messages or
runs elsewhere. Here is how the user's code is told from that of others, so that all agree.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from types import CodeType, FrameType
from typing import Any

THIS_PACKAGE = __name__.partition(".")[0]
LIGHTNING = frozenset(["lightning", "pytorch_lightning", "lightning_fabric"])
"""Lightning's packages: one with all, or one for the Trainer and one for Fabric."""
_FRAMEWORK = LIGHTNING | {"torch", THIS_PACKAGE}
_EMPTY_HOOKS = ("core.hooks", "core.module", "callbacks.callback")
"""Where Lightning defines what users override, behind the name of the Trainer's package."""


def module_of(x: Any) -> str:
    """The name of the module in which a class, a function, or the class of an object is defined."""
    return str(getattr(x, "__module__", None) or type(x).__module__)


def package_of(x: Any) -> str:
    """The top of `module_of`: `torch` for `torch.nn.modules.linear`."""
    return module_of(x).partition(".")[0]


def is_torchs(x: Any) -> bool:
    """Whether a class, a function, or the class of an object is torch's own."""
    return package_of(x) == "torch"


def is_lightnings(x: Any) -> bool:
    """Whether a class, a function, or the class of an object is Lightning's own."""
    return package_of(x) in LIGHTNING


def is_frameworks(x: Any, *besides: str) -> bool:
    """Whether a class, a function, or the class of an object is torch's, Lightning's or this package's.

    Args:
        besides: packages that count as well: whose objects the caller knows to be none of the user's.
    """
    package = package_of(x)
    return package in _FRAMEWORK or package in besides


def is_lightnings_default(method: Any) -> bool:
    """Whether a method of a LightningModule or a callback is that of Lightning's base class, which nobody overrode."""
    package, _, rest = module_of(method).partition(".")
    return package in LIGHTNING and rest.removeprefix("pytorch.") in _EMPTY_HOOKS


def module_of_frame(frame: FrameType) -> str:
    """The name of the module whose code runs in a frame."""
    return str(frame.f_globals.get("__name__", ""))


def package_of_frame(frame: FrameType) -> str:
    """The top of `module_of_frame`."""
    return module_of_frame(frame).partition(".")[0]


def is_frameworks_frame(frame: FrameType, *besides: str) -> bool:
    """Whether torch's, Lightning's or this package's code runs in a frame.

    Args:
        besides: packages that count as well.
    """
    package = package_of_frame(frame)
    return package in _FRAMEWORK or package in besides


def is_installed(code: CodeType) -> bool:
    """Whether code lies among installed packages."""
    return "site-packages" in code.co_filename


def is_librarys(code: CodeType) -> bool:
    """Whether code is Python's own, or lies among the packages that are installed beside this Python."""
    return code.co_filename.startswith(_libraries())


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (*(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen")


def callers_frame(frame: FrameType, *packages: str) -> FrameType:
    """The innermost frame, this one or one around it, that is of none of some packages; the outermost, if all are."""
    while frame.f_back is not None and package_of_frame(frame) in packages:
        frame = frame.f_back
    return frame
