"""The blocks of a model: the modules that repeat, each kind probed once, with the arguments one step gives them."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.detour import entries_replaced
from lightning_megatp.origins import is_frameworks, is_torchs, module_of
from lightning_megatp.plan.units import LISTS, PARAMETER_CONTAINERS, is_list
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.shim.transformers import is_conv1d
from lightning_megatp.tensor.functions import without_arguments

_FEW, _DEEP = 4096, 6
_LIBRARIES = ("transformers", "torchmetrics", "peft")
"""Whose hooks, beside those of frameworks, are part of what a module computes."""
_INTERNAL = frozenset(vars(nn.Module()))
"""What every module has: hooks, parameters, modules."""
_OF_LINEAR = frozenset(["weight", "bias", "in_features", "out_features", "forward", "training"])
"""What the code of a linear layer has to do with."""
_LAST_NUMBER = re.compile(r"\.\d+(?!.*\.\d+(\.|$))")
"""In a module's name with a dot before it: of the innermost list."""
PLAIN: tuple[type, ...] = (bool, int, float, str, type(None))


@dataclass
class Call:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def describe(self) -> Any:
        """The shapes and types of what is given."""
        return describe((self.args, {key: x for key, x in self.kwargs.items() if x is not None}))


@dataclass
class Block:
    """One kind of block."""

    module: nn.Module
    """The first of its kind."""
    names: list[str] = field(default_factory=list)
    """The names of all modules of its kind; the first is `module`'s."""
    calls: list[Call] = field(default_factory=list)
    """What each step that was tried out calls it with; none if they don't."""
    other_calls: list[Call] = field(default_factory=list)
    """Calls of blocks of its kind with other plain values (how deep it is, a flag), and tensors of the first call."""
    least_dims: int = sys.maxsize
    """How many dims the largest of the tensors that a call is given has, in the call where that are fewest."""
    stack: bool = False
    """Whether it is no block, but a stack of experts of the user's own, which is proven by itself."""
    counts: list[dict[str, int]] = field(default_factory=list)
    """For each of its names, the numbers by which blocks are counted: path of the attribute -> value."""


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer with a weight of its own: an nn.Linear, Hugging Face's Conv1D, or a subclass of
    nn.Linear that was seen to compute the same."""
    if module._parameters.get("weight") is None:
        return False
    return type(module) is nn.Linear or is_conv1d(module) or _computes_linear(module)


def _computes_linear(module: nn.Module) -> bool:
    """Try a subclass of nn.Linear on a few numbers. One that holds anything else is not tried, nor one whose code has
    attributes of its own: it may do something else later (quantization that a hook turns on)."""
    if not isinstance(module, nn.Linear) or set(module._parameters) - {"weight", "bias"}:
        return False
    if module._buffers or module._modules or is_torchs(type(module)):
        return False
    names = getattr(getattr(type(module).forward, "__code__", None), "co_names", ())
    if any(_is_own(module, name) for name in names):
        return False
    with contextlib.suppress(Exception), torch.enable_grad():
        return all(_is_as_linear(module, mode, many) for mode in (True, False) for many in (True, False))
    return False


def _is_as_linear(module: nn.Linear, training: bool, many: bool) -> bool:
    """Whether a layer makes of a few numbers, and gives them as gradients, what nn.Linear does. They lie on no grid,
    and some are small and some large: of others what rounds to so many levels, or limits, may make the same.

    Args:
        many: samples of several tokens, and not of one.
    """
    rows, tokens = torch.logspace(-3, 3, 5)[:, None], torch.logspace(-2, 2, 4)[:, None]
    weight = nn.Parameter(torch.arange(15.0).mul(1.7).sin().view(5, 3) * rows)
    bias = None if module.bias is None else nn.Parameter(torch.arange(5.0).cos() * rows[:, 0])
    x = torch.arange(24.0).mul(2.3).cos().view(2, 4, 3) * tokens
    x = (x if many else x[0]).requires_grad_()
    twin = copy.copy(module).train(training)
    twin.__dict__ |= {"_parameters": {"weight": weight, "bias": bias}, "in_features": 3, "out_features": 5}
    sizes = {x: tokens, weight: rows} | ({} if bias is None else {bias: rows[:, 0]})

    def ends(y: Tensor) -> list[Tensor]:
        y = y / (tokens * rows[:, 0])
        gradients = torch.autograd.grad((y * torch.arange(1.0, y.numel() + 1).sin().view_as(y)).sum(), list(sizes))
        return [y, *(gradient * size for gradient, size in zip(gradients, sizes.values(), strict=True))]

    pairs = zip(ends(twin(x)), ends(torch.nn.functional.linear(x, weight, bias)), strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether a linear layer has an attribute that nn.Linear has not, or another one."""
    if name in _OF_LINEAR:
        return False
    return name in vars(module) or getattr(type(module), name, None) is not getattr(nn.Linear, name, None)


def find_blocks(module: nn.Module) -> list[str]:
    """The names of a module's blocks: in its lists, what holds two or more linear layers; outside of lists, the
    outermost modules that do. A list inside of a block is opened if the block is little more than that list."""
    return list(_blocks("", module, in_list=False))


def kinds_of_blocks(module: nn.Module, names: Sequence[str] | None = None, stacks: bool = False) -> list[Block]:
    """Blocks by kind: same classes, shapes and settings. What differs in every block (its index, its own name) makes
    no kinds, nor does training or evaluation: an averaged copy is split as what it follows. A block of several names
    counts under the first.

    Args:
        names: of the blocks; None for all.
        stacks: whether they are stacks of experts.
    """
    shapes: dict[Any, dict[str, dict[str, str]]] = {}
    for block, name in _first_names(module, find_blocks(module) if names is None else names):
        shapes.setdefault(_shape(block), {})[name] = _settings(block, name)
    kinds: dict[Any, Block] = {}
    for shape, settings in shapes.items():
        indices = _indices(settings, stacks)
        for name, values in settings.items():
            key = shape, tuple((key, value) for key, value in values.items() if key not in indices)
            kind = kinds.setdefault(key, Block(uncompiled_part(module.get_submodule(name)), stack=stacks))
            kind.names.append(name)
            kind.counts.append({key: int(values[key]) for key in indices})
    return list(kinds.values())


def _first_names(module: nn.Module, names: Sequence[str]) -> list[tuple[nn.Module, str]]:
    blocks = {name: uncompiled_part(module.get_submodule(name)) for name in names}
    first = {id(block): name for name, block in reversed(blocks.items())}
    return [(block, name) for name, block in blocks.items() if first[id(block)] == name]


def _indices(settings: dict[str, dict[str, str]], stacks: bool) -> set[str]:
    """The settings that count blocks, by their names: whole numbers that go up by one from block to block, of all or of
    each list."""
    lists: dict[str, list[dict[str, str]]] = {}
    for name, values in settings.items():
        held_by = _LAST_NUMBER.sub(".*", f".{name}") if stacks else name.rpartition(".")[0]  # stacks: parts of blocks
        lists.setdefault(held_by, []).append(values)
    ways = [[list(settings.values())], list(lists.values())]
    return {
        key
        for key in next(iter(settings.values()))
        if any(all(_counts(key, blocks) for blocks in way) for way in ways) and len(settings) > len(lists)
    }


def _counts(key: str, settings: list[dict[str, str]]) -> bool:
    values = [held.get(key, "") for held in settings]
    numbers = [int(value) for value in values if value.isdecimal()]
    return len(numbers) == len(values) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides parameters, buffers, modules and hooks."""
    return {key: value for key, value in vars(module).items() if key not in _INTERNAL}


def tensors_anywhere_in(tree: Any, given: Any = None) -> list[Tensor]:
    """All tensors in what a module gets or returns, each once, at any depth of any objects.

    Args:
        given: what the module got. Objects of it that are returned, too, such as a cache, are not looked into.
    """
    return list(_tensors(tree, {id(x) for x in tree_leaves(given) if not isinstance(x, Tensor)}))


def _tensors(x: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(x, (*PLAIN, type, nn.Module)) or id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield x
    else:
        parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple, set)) else ()
        for part in (*parts, *getattr(x, "__dict__", {}).values()):
            yield from _tensors(part, seen)


def describe(tree: Any) -> Any:
    """The shapes and types in anything."""
    kinds = [type(x) for x in tree_leaves(tree) if x is not None and not isinstance(x, Tensor)]
    return kinds, [(tuple(x.shape), x.dtype) for x in tensors_anywhere_in(tree)]


def _blocks(name: str, module: nn.Module, in_list: bool) -> Iterator[str]:
    if _weight(module) < 2 or isinstance(module, PARAMETER_CONTAINERS):
        return
    children = [(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children()]
    opens = is_list(module)
    if name == "" or opens or (not in_list and _has_block_list(module)) or (in_list and _is_mostly_lists(module)):
        found = [block for child, part in children for block in _blocks(child, part, in_list=opens or in_list)]
        if found or name == "" or isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from found
            return
    yield name


def uncompiled_part(module: nn.Module) -> nn.Module:
    """What `torch.compile(module)` was given."""
    return module._modules.get("_orig_mod") or module


def unlooked(block: nn.Module) -> str | None:
    """Why a block can't be copied and run by itself: it has compiled parts under names of their own, or hooks of the
    user's own, which belong to real steps. (A copy of what `module.compile()` was called on is not compiled.)"""
    for name, child in block.named_modules():
        if uncompiled_part(child) is not child:
            return f"`{name}` in it is compiled"
        for hook in map(without_arguments, hooks_on(child)):
            if not (is_frameworks(type(hook), *_LIBRARIES) or is_frameworks(hook, *_LIBRARIES)):
                return f"{f'`{name}` in it' if name else 'it'} has a hook of {module_of(hook)}"
    return None


def hooks_on(module: nn.Module) -> Iterator[Any]:
    """The forward and backward hooks on a module itself."""
    held = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return itertools.chain.from_iterable(hooks.values() for hooks in held)


def _weight(module: nn.Module) -> int:
    """Linear layers in a module, with what may be one; nn.MultiheadAttention counts as two."""
    return sum(
        2 if type(child) is nn.MultiheadAttention else is_linear(child) + len(matrices(child))
        for child in module.modules()
    )


def matrices(module: nn.Module) -> list[str]:
    """The own weights of a module that are matrices."""
    return [name for name in own_weights(module) if module.get_parameter(name).dim() == 2]


def own_weights(module: nn.Module) -> list[str]:
    """The names of a module's own parameters that may be weights of `F.linear`, or of an `einsum`, though it is no
    linear layer, no embedding and none of torch's, but for lists and dicts of parameters."""
    is_layer = is_linear(module) or isinstance(module, nn.Embedding) or is_torchs(type(module))
    if is_layer and not isinstance(module, PARAMETER_CONTAINERS):
        return []
    held = {name: p for name, p in module._parameters.items() if p is not None and p.dim() > 1}
    return [name for name, p in held.items() if p.is_floating_point()]


def holders_of_parameters(module: nn.Module) -> Counter[int]:
    """id of each parameter -> how many modules have it as their own."""
    return Counter(id(p) for child in module.modules() for p in child._parameters.values() if p is not None)


def _inner_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, LISTS):
            yield child
        else:
            yield from _inner_lists(child)


def _has_block_list(module: nn.Module) -> bool:
    return any(_weight(item) >= 2 for inner in _inner_lists(module) for item in inner.children())


def _is_mostly_lists(module: nn.Module) -> bool:
    """Whether a module has lists of blocks, and outside of its lists of modules at most one linear layer; or few,
    beside lists of whole transformer blocks."""
    lists = [inner for inner in _inner_lists(module) if not any(map(is_linear, inner.children()))]
    inside = sum(map(_weight, lists))
    outside = _weight(module) - inside
    items = [item for inner in lists for item in inner.children()]
    if outside < 2:
        return any(_weight(item) >= 2 for item in items)
    return any(map(_is_composed, items)) and _FEW_OUTSIDE * outside <= inside


def _is_composed(block: nn.Module) -> bool:
    """Whether it has several parts of several linear layers: attention and an MLP."""
    return sum(_weight(part) >= 2 for part in block.children()) >= 2


_FEW_OUTSIDE = 4
"""How many times as many linear layers the lists hold."""


def _shape(block: nn.Module) -> Any:
    modules = tuple((name, type(child)) for name, child in block.named_modules())
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
    return type(block), modules, parameters


def _settings(block: nn.Module, place: str) -> dict[str, str]:
    """What a block's modules hold besides parameters and modules, as texts that are the same for the same content. In
    them the block's own place in the model (of `net.blocks.0` at least `blocks.0`) is not told from another's."""
    found = {}
    *_, held_by, own = ["", "", *place.split(".")]
    itself = re.compile(rf"\b{re.escape(f'{held_by}.{own}')}\b") if held_by else None
    for name, child in block.named_modules():
        for key, value in vars(child).items():
            if key == "_buffers" or key not in _INTERNAL:
                text = _content(value, 0)
                found[f"{name}.{key}"] = text if itself is None else itself.sub("<block>", text)
    return found


def _content(value: Any, depth: int) -> str:
    """A text for any content. What can't be looked into counts as different everywhere."""
    if isinstance(value, (*PLAIN, type, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Tensor):
        small = value.numel() <= _FEW and not value.is_meta
        return f"{tuple(value.shape)} {value.dtype} {value.tolist() if small else ''}"
    if depth > _DEEP:
        return f"{type(value)} {id(value)}"
    if isinstance(value, functools.partial):
        return f"partial {_content((value.func, value.args, value.keywords), depth + 1)}"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return f"{id(value.__code__)} {_content((cells, value.__defaults__, value.__kwdefaults__), depth + 1)}"
    if isinstance(value, dict):
        return f"{[(str(key), _content(x, depth + 1)) for key, x in value.items()]}"
    if isinstance(value, (list, tuple)):
        entries = list(value) if isinstance(value, list) else list(tuple.__getitem__(value, slice(None)))
        if len(entries) <= _FEW:  # a tuple's class may refuse to tell its length, such as e3nn's
            return f"{[_content(x, depth + 1) for x in entries]}"
    inside = getattr(value, "__dict__", None)
    return f"{type(value)} {id(value) if inside is None else _content(inside, depth + 1)}"


def without_logging(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let `self.log` do nothing meanwhile."""
    return entries_replaced((vars(module), name, nothing) for name in ("log", "log_dict"))


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a function that is not to do anything."""
