"""Private names of torch's compiler. Seen in 2.11, 2.13 and 2.15."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returned, or `module.compile()` was called (2.11-2.13)."""
    return wraps_compiled(module) or module.__dict__.get("_compiled_call_impl") is not None


def wraps_compiled(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returned (2.11-2.13)."""
    return "_orig_mod" in module._modules


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Meanwhile compiled code runs as it was written. Where nothing was compiled, nothing is imported for it."""
    compiles = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()


def keep_compiler_out(*modules: str) -> None:
    """Let the compiler break its graphs at functions of these modules, instead of tracing them: it would inline the
    `__torch_function__` of an active mode, and keep what that knew of one microbatch for the next. Where nothing was
    compiled, nothing is done, or imported (`torch._dynamo.trace_rules.add`, 2.11-2.15)."""
    if "torch._dynamo" in sys.modules:
        _keep_out(modules)


@functools.cache
def _keep_out(modules: tuple[str, ...]) -> None:
    from torch._dynamo import trace_rules

    for module in modules:
        trace_rules.add(module)


def entry_of(module: nn.Module) -> str:
    """The method to replace in order to stand in for a module's forward. `module.compile()` puts a compiled call beside
    it, which runs instead, hooks included; the compiler must not meet a replaced forward (2.11-2.13)."""
    return "forward" if module.__dict__.get("_compiled_call_impl") is None else "_compiled_call_impl"
