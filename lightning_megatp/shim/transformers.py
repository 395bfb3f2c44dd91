"""What is known of Hugging Face's transformers without importing it: it is no dependency. Seen in 5.23."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is a `transformers.pytorch_utils.Conv1D` itself, no subclass. Whoever has one has imported it."""
    return type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of theirs. One notes on itself what it has done to its layers (hooks that it made)."""
    return isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()))


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a layer that will be run twice: without the cache of keys and values, which a call adds to.
    Hugging Face's own gradient checkpointing does the same, by the same names."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    if not any(isinstance(x, kind) for x in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if isinstance(x, kind) else x for x in args)
    kwargs = {name: None if isinstance(x, kind) else x for name, x in kwargs.items()}
    return args, {name: False if name == "use_cache" else x for name, x in kwargs.items()}


def collecting() -> dict[str, list[Any]]:
    """The lists to which hooks of a model's layers append what it was asked for (`output_hidden_states=True`), by name.
    A context variable without a public name holds them while the model runs (5.23)."""
    held = _collected()  # asked for each unit of a pipeline
    return {name: entries for name, entries in held.items() if isinstance(entries, list)} if held else {}


def collects_attentions() -> bool:
    """Whether a model runs that was asked for attention weights (`output_attentions=True`)."""
    return any("attentions" in name for name in _collected() or ())


def attention_recorders(module: nn.Module) -> list[tuple[nn.Module, int]]:
    """The modules of whose results models take attention weights when they are asked for them, and at which index. A
    registry without a public name has, by the class of a model, what it can record: by name a class, the name of one,
    or an `OutputRecorder`, or several (5.23)."""
    registry: Any = getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", None)
    found = {}
    for model in filter(is_pretrained, module.modules()) if registry is not None else ():
        for specs in (x for key, x in registry.get(model).items() if "attentions" in key):
            for kind, suffix, index in map(_recorder, specs if isinstance(specs, list) else [specs]):
                for name, part in model.named_modules():
                    if (kind and isinstance(part, kind)) or (suffix and name.endswith(suffix)):
                        found[id(part)] = part, index
    return list(found.values())


def _recorder(spec: Any) -> tuple[type | None, str | None, int]:
    """The class of a recorded module or what its name ends with, and the index of attention weights in its result."""
    if isinstance(spec, (type, str)):
        return (spec, None, 1) if isinstance(spec, type) else (None, spec, 1)
    return spec.target_class, spec.class_name, spec.index


def asked_for(around: Sequence[nn.Module]) -> tuple[dict[str, Any], int]:
    """What `collecting` is about, for `collected_for` in another process: lists without their entries, and which of the
    modules around a layer made its hooks, and those of all its parts."""
    held = _collected()
    if not held:
        return {}, 0
    maker = next((i for i, module in enumerate(around) if vars(module).get("_output_capturing_hooks_installed")), 0)
    return {name: [None] * len(x) if isinstance(x, list) else x for name, x in held.items()}, maker


@contextlib.contextmanager
def collected_for(asked: dict[str, Any], maker: int, around: Sequence[nn.Module]) -> Iterator[dict[str, list[Any]]]:
    """Let hooks append, where layers run without the model around them, to the lists that this gives. A model makes the
    hooks of its layers when it is first asked, which it was elsewhere.

    Args:
        asked, maker: `asked_for`.
        around: the modules around the layer.
    """
    variable = _collector()
    if not asked or variable is None:
        yield {}
        return
    sys.modules["transformers.utils.output_capturing"].maybe_install_capturing_hooks(around[maker])
    added: dict[str, list[Any]] = {}
    held = {name: list(x) if isinstance(x, list) else x for name, x in asked.items()}
    token = variable.set(held)
    try:
        yield added
    finally:
        variable.reset(token)
        added.update({name: held[name][len(x) :] for name, x in asked.items() if isinstance(x, list)})


def _collected() -> dict[str, Any] | None:
    variable = _collector()
    return None if variable is None else variable.get()


def _collector() -> Any:
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


@contextlib.contextmanager
def replaced_safe_open(replacement: Callable[..., Any]) -> Iterator[None]:
    """Let transformers open safetensors files by another function. It binds `safetensors.safe_open` in the module that
    loads models, when that is imported: before, or while this is active."""
    files: Any = importlib.import_module("safetensors")
    loader: Any = sys.modules.get("transformers.modeling_utils")
    original = files.safe_open
    for module in filter(None, (files, loader)):
        module.safe_open = replacement
    try:
        yield
    finally:
        for module in filter(None, (files, sys.modules.get("transformers.modeling_utils"))):
            module.safe_open = original


@contextlib.contextmanager
def loading_in_this_thread() -> Iterator[None]:
    """Let transformers convert weights where it was called, not in threads that know nothing of a dispatch mode."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
