"""Stacks of experts: modules whose parameters hold the weights of several experts, one on top of the other.

Such a module's result is a sum over the features inside of its experts, y = sum_f down[:, f] act(up[f] x), whatever it
does to route tokens and to multiply (a loop, einsum, bmm). So each rank may run the module's own code on some of the
features, and what it returns is added up. What is split where is found by trying: the parts of a thin copy, which has
few features inside, have to add up to the whole.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.plan.auto.blocks import (
    PLAIN,
    Block,
    Call,
    find_blocks,
    is_linear,
    own_attributes,
    tensors_anywhere_in,
)
from lightning_megatp.plan.auto.exact import exact, exact_in_thread
from lightning_megatp.plan.auto.thin import block_copy, concrete_call, thin_copy
from lightning_megatp.plan.experts import looks_like_experts, usual_parameters
from lightning_megatp.plan.layer_styles import COUNTS, pieces
from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.plan.styles import ExpertParameter
from lightning_megatp.shim.torch import tree_flatten
from lightning_megatp.tensor.collectives import take_ranges

_CLOSE = 1e-8
_MOST = 2**26
"""Elements of what is not split, in a module that is tried out."""
_TRIALS, _SECONDS = 128, 2.0
"""How many ways, and for how long, are tried for one module."""
_MOST_WAYS = 4096
"""So many are looked at."""
_THIN, _THINNEST = 24, 3
"""Features inside of the experts of a thin copy, of which a third makes a part (some kernels want multiples of 8), and
if these have more than `_FEW` elements."""
_FEW = 2**23
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_UP = 2
"""So many modules around the one that holds the parameters may be what adds up."""


@dataclass(frozen=True)
class StackLayout:
    """How a stack of experts is split."""

    parameters: tuple[ExpertParameter, ...]
    counts: tuple[str, ...] = ()
    """Attributes that count the features inside, by their names from the module on."""
    returns: tuple[bool, ...] = ()
    """Of each tensor that it returns, whether it is a sum; the others are the same on every rank. Empty for one sum."""
    kept: tuple[str, ...] = ()
    """Attributes in which it leaves tensors with a graph that are the same on every rank."""
    draws_alike: bool = False
    """Whether random numbers are drawn for what is the same on every rank, and not for the features inside."""


class NotAdditive(Exception):
    """Why a module is not what this file is about."""


def of_transformers(module: nn.Module) -> bool:
    """Whether a module's code is that library's."""
    return type(module).__module__.partition(".")[0] == "transformers"


def find_stacks(model: nn.Module) -> list[str]:
    """The names of the modules that may be stacks of experts, and of those around them that may be it instead; inner
    ones first."""
    modules, blocks = dict(model.named_modules()), set(find_blocks(model))
    held = {name: len(_stacks_in(module)) for name, module in modules.items()}
    found: set[str] = set()
    for name in [name for name, count in held.items() if count]:
        around = name.split(".")
        for depth in range(len(around), max(len(around) - _UP - 1, 0), -1):
            candidate = ".".join(around[:depth])
            inside = sum(count for other, count in held.items() if f"{other}.".startswith(f"{candidate}."))
            if candidate in blocks and candidate != name:
                break
            if inside >= 2 and candidate and not isinstance(modules[candidate], _LISTS):
                found.add(candidate)
            if candidate in blocks:
                break
    return sorted(found, key=lambda name: -name.count("."))


def holds_stacks(module: nn.Module) -> list[str]:
    """The names of the parameters anywhere in a module that may be stacks."""
    return [f"{name}.{leaf}".lstrip(".") for name, child in module.named_modules() for leaf in _stacks_in(child)]


def usual_layout(module: nn.Module) -> StackLayout:
    """Of transformers' experts, by their parameters' names.

    Raises:
        ValueError: other names, or shapes that fit neither layout, or both.
    """
    parameters = usual_parameters("experts", module)
    inside = _inside(module, parameters)
    return StackLayout(parameters, tuple(key for key in sorted(COUNTS) if vars(module).get(key) == inside))


def layout_of(stack: Block) -> StackLayout:
    """How a module's parameters can be split, so that what its parts compute adds up.

    Args:
        stack: the module, with its calls.

    Raises:
        NotAdditive: in no way that was tried.
    """
    module = stack.module
    if of_transformers(module) and looks_like_experts(module):
        with contextlib.suppress(ValueError):
            return usual_layout(module)
    if not stack.calls:
        raise NotAdditive("the step that was tried out does not call it")
    calls, until, why = [*stack.calls, *stack.other_calls], time.monotonic() + _SECONDS, ""
    for layout in itertools.islice(_layouts(module), _TRIALS):
        if time.monotonic() > until:
            break
        try:
            return _proven(module, layout, calls)
        except NotAdditive as error:
            why = str(error)
        except Exception:  # it may be any code, and most sizes don't fit each other
            pass
    raise NotAdditive(why or "no way was found to split it so that what its parts compute adds up")


@contextlib.contextmanager
def thinned(module: nn.Module, layout: StackLayout) -> Iterator[int]:
    """Meanwhile a stack's experts have few features inside, and split parameters without values.

    Returns:
        How many.
    """
    inside = _few_inside(module, layout.parameters)
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(held: dict[str, Any], key: str, value: object) -> None:
        before.append((held, key, held[key]))
        held[key] = value

    for entry in layout.parameters:
        if entry.dim is not None:
            holder, leaf = _holder(module, entry.name)
            parameter = holder._parameters[leaf]
            assert parameter is not None
            dim, shape = entry.dim, list(parameter.shape)
            shape[dim] = inside * entry.unit * len(pieces(shape[dim], entry.parts))
            put(holder._parameters, leaf, nn.Parameter(parameter.new_empty(shape, device="meta")))
    for count in layout.counts:
        holder, key = _holder(module, count)
        put(vars(holder), key, inside)
    try:
        yield inside
    finally:
        for held, key, value in reversed(before):
            held[key] = value


def _few_inside(module: nn.Module, parameters: Sequence[ExpertParameter]) -> int:
    size = sum(module.get_parameter(entry.name).numel() for entry in parameters if entry.split)
    return _THIN if size // _inside(module, parameters) * _THIN <= _FEW else _THINNEST


def _inside(module: nn.Module, parameters: Sequence[ExpertParameter]) -> int:
    """Features inside of each expert."""
    entry = next(entry for entry in parameters if entry.split)
    size = module.get_parameter(entry.name).shape[entry.dim or 0]
    return pieces(size, entry.parts)[0] // entry.unit


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _stacks_in(module: nn.Module) -> list[str]:
    """Its own parameters that may hold the weights of several experts: of three dims or more, with the rows of all
    experts, or matrices of one shape in a list."""
    if isinstance(module, nn.ParameterList):
        matrices = [(key, p) for key, p in module._parameters.items() if p is not None and p.dim() == 2]
        return [key for key, _ in matrices] if len({p.shape for _, p in matrices}) == 1 and len(matrices) > 1 else []
    if _is_torchs(module):
        return []
    numbers = _experts(module)
    return [
        key
        for key, p in module._parameters.items()
        if p is not None
        and p.is_floating_point()
        and ((p.dim() >= 3 and p.shape[0] > 1) or (p.dim() == 2 and _rows_of(p.shape[0], numbers)))
    ]


def _is_torchs(module: nn.Module) -> bool:
    """Whether it is a layer of torch's, or a subclass of one."""
    return any(kind.__module__.startswith("torch.") and kind is not nn.Module for kind in type(module).__mro__)


def _experts(module: nn.Module) -> list[int]:
    """How many experts there are, as far as attributes tell."""
    held = own_attributes(module).items()
    return sorted({x for key, x in held if "expert" in key.lower() and type(x) is int and x > 1})


def _rows_of(rows: int, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if rows % n == 0 and rows > n]


def _layouts(module: nn.Module) -> Iterator[StackLayout]:
    """Ways to split a module's parameters, the most of them first, without those that leave much whole."""
    stacks = holds_stacks(module)
    own = {name: p for name, p in module.named_parameters() if not _is_torchs(_holder(module, name)[0])}
    own |= {name: module.get_parameter(name) for name in stacks}
    numbers = sorted({n for child in module.modules() for n in _experts(child)})
    others = [ExpertParameter(name) for name, _ in module.named_parameters() if name not in own]
    total = sum(p.numel() for p in module.parameters())
    ways = []
    for inside in _sizes([own[name] for name in stacks], numbers):
        groupings = [
            [_options(names, own[names[0]], inside, numbers) for names in groups] for groups in _groupings(module, own)
        ]
        cut = [own[entry.name].numel() for choices in groupings[0] for entry in choices[0] if entry.split]
        if len(cut) >= 2:
            ways.append((sum(cut), itertools.chain(*[_ways(module, inside, each) for each in groupings])))
    ways.sort(key=lambda way: way[0], reverse=True)
    for layout in itertools.islice(_in_turn([layouts for _, layouts in ways]), _MOST_WAYS):
        parameters = [entry for entry in layout.parameters if entry.split]
        if len(parameters) >= 2 and total - sum(own[entry.name].numel() for entry in parameters) <= _MOST:
            yield replace(layout, parameters=(*layout.parameters, *others))


def _ways(
    module: nn.Module, inside: int, options: Sequence[Sequence[Sequence[ExpertParameter]]]
) -> Iterator[StackLayout]:
    """With a number of features inside, each choice for each parameter, and for what counts them."""
    counts = [
        f"{name}.{key}".lstrip(".")
        for name, child in module.named_modules()
        for key, value in own_attributes(child).items()
        if type(value) is int and value == inside
    ]
    usual = [name for name in counts if name.rpartition(".")[2] in COUNTS]
    for chosen in itertools.product(*options):
        for names in dict.fromkeys(map(tuple, (counts, usual, (), *([name] for name in counts)))):
            yield StackLayout(tuple(itertools.chain.from_iterable(chosen)), names)


def _in_turn(iterators: Sequence[Iterator[StackLayout]]) -> Iterator[StackLayout]:
    for layouts in itertools.zip_longest(*iterators):
        yield from (layout for layout in layouts if layout is not None)


def _groupings(module: nn.Module, own: Mapping[str, Tensor]) -> Iterator[list[list[str]]]:
    """Names of parameters that are split alike: first those of one shape, then those of one list."""
    by_shape: dict[Any, list[str]] = {}
    by_list: dict[Any, list[str]] = {}
    for name, p in own.items():
        path = name.rpartition(".")[0]
        by_shape.setdefault(p.shape, []).append(name)
        by_list.setdefault(path if isinstance(module.get_submodule(path), nn.ParameterList) else name, []).append(name)
    yield list(by_shape.values())
    yield list(by_list.values())


def _sizes(stacks: Sequence[Tensor], numbers: Sequence[int]) -> list[int]:
    """What may be the number of features inside of each expert: sizes of dims, and halves of them (gate and up)."""
    sizes = Counter[int]()
    for p in stacks:
        dims = [n for size in p.shape for n in (size, *(size // k for k in _rows_of(size, numbers) if p.dim() == 2))]
        sizes.update(set(dims[p.dim() > 2 :]))
    halves = [size // 2 for size in sizes if size % 2 == 0 and size // 2 not in sizes]
    return [size for size in (*sizes, *halves) if size > 1]


def _options(names: Sequence[str], p: Tensor, inside: int, numbers: Sequence[int]) -> list[list[ExpertParameter]]:
    """What parameters of one shape may be, if experts have that many features inside."""
    found: list[dict[str, Any]] = []
    for dim in sorted(range(p.dim()), key=lambda dim: dim == 0):  # the first one counts experts, mostly
        size = p.shape[dim]
        if size == inside:
            found.append({"dim": dim})
        if size == 2 * inside:
            found += [{"dim": dim, "parts": 2}, {"dim": dim, "unit": 2}]
        if p.dim() == 2 and size // inside in numbers and size % inside == 0:
            found.append({"dim": dim, "parts": size // inside})
    if p.dim() <= 2:
        found.insert(len(found), {"once": True})
    found.insert(len(found) - (p.dim() == 1), {})
    return [[ExpertParameter(name, **options) for name in names] for options in found]


def _proven(module: nn.Module, layout: StackLayout, calls: Sequence[Call]) -> StackLayout:
    """Run the parts of a thin copy, and compare their sum.

    Raises:
        NotAdditive: it isn't.
        Exception: whatever the module raises.
    """
    linears = [name for name, child in module.named_modules() if is_linear(child)]
    with thinned(module, layout) as inside:
        whole = thin_copy(module, seed=0, dense=linears)
    shares = [_share(whole, layout, inside, own) for own in ((0, inside // 3), (inside // 3, inside))]
    verdicts, draws, single = [], set[bool](), False
    for train, call in itertools.product((True, False), calls):
        wanted, *parts = (_run(block_copy(part, train), call) for part in (whole, *shares))
        verdicts.append(_adds_up(wanted, parts))
        draws |= _drawn_alike(wanted, parts)
        single = isinstance(wanted.result, Tensor)
    returns = tuple(all(same) for same in zip(*(same for same, _ in verdicts), strict=True))
    if all(returns):
        raise NotAdditive("what it returns is the same whatever its experts compute")
    if len(draws) > 1:
        raise NotAdditive("it draws random numbers for the features inside of experts, and for what all ranks share")
    return replace(
        layout,
        returns=() if single else tuple(not same for same in returns),
        kept=tuple(sorted(set().union(*(names for _, names in verdicts)))),
        draws_alike=draws == {True},
    )


def _share(whole: nn.Module, layout: StackLayout, inside: int, own: tuple[int, int]) -> nn.Module:
    """What a rank has that computes with some of the features inside."""
    start, stop = own
    share = block_copy(whole)
    for entry in layout.parameters:
        holder, leaf = _holder(share, entry.name)
        parameter = share.get_parameter(entry.name)
        if entry.dim is not None:
            parts = range(0, parameter.shape[entry.dim], inside * entry.unit)
            ranges: Ranges = tuple((part + start * entry.unit, part + stop * entry.unit) for part in parts)
            holder._parameters[leaf] = nn.Parameter(take_ranges(parameter.detach(), entry.dim, ranges))
        elif entry.once and start:
            parameter.data.zero_()
    for count in layout.counts:
        holder, key = _holder(share, count)
        vars(holder)[key] = stop - start
    return share


@dataclass
class _Ran:
    """What a run of a module left."""

    result: Any
    kept: dict[str, Any]
    """Attributes that are others than before, by their names from the module on."""
    buffers: dict[str, Tensor]
    drew: list[Any]
    """Shapes of what random numbers were drawn for."""


def _run(module: nn.Module, call: Call) -> _Ran:
    given = concrete_call(call, 0, noise=0.1)
    drew: list[Any] = []
    before = _attributes(module)
    with exact(), exact_in_thread(lambda x: drew.append(tuple(x.shape) if isinstance(x, Tensor) else None)):
        result = module(*given.args, **given.kwargs)
    kept = {name: x for name, x in _attributes(module).items() if before.get(name) is not x}
    return _Ran(result, kept, dict(module.named_buffers()), drew)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}".lstrip("."): value
        for name, child in module.named_modules()
        for key, value in own_attributes(child).items()
    }


def _adds_up(wanted: _Ran, parts: Sequence[_Ran]) -> tuple[list[bool], set[str]]:
    """Of each tensor that is returned, whether it is the same in all parts, and not a sum; and the attributes with a
    graph that are.

    Raises:
        NotAdditive: anything is neither.
    """
    returned, trees = zip(*(tree_flatten(ran.result) for ran in (wanted, *parts)), strict=True)
    if any(tree != trees[0] for tree in trees):
        raise NotAdditive("its parts return something else than the whole")
    same = []
    for x, *of_parts in zip(*returned, strict=True):
        if _alike(x, of_parts):
            same += [True] if isinstance(x, Tensor) else []
        elif isinstance(x, Tensor) and x.is_floating_point() and all(_fits(x, part) for part in of_parts):
            if not torch.allclose(sum(of_parts[1:], of_parts[0]), x, rtol=_CLOSE, atol=_CLOSE):
                raise NotAdditive("what its parts compute does not add up")
            same.append(False)
        else:
            raise NotAdditive("its parts return something else than the whole")
    for name, buffer in wanted.buffers.items():
        if not _alike(buffer, [part.buffers.get(name) for part in parts]):
            raise NotAdditive(f"its buffer `{name}` would be another on each rank")
    left = set()
    for name, value in wanted.kept.items():
        if not _alike(value, [part.kept.get(name) for part in parts]):
            raise NotAdditive(f"what it leaves in `{name}` would be another on each rank")
        if isinstance(value, Tensor) and value.requires_grad:
            left.add(name)
        elif any(x.requires_grad for x in tensors_anywhere_in(value)):
            raise NotAdditive(f"it leaves tensors with a graph in `{name}`")
    return same, left


def _drawn_alike(wanted: _Ran, parts: Sequence[_Ran]) -> set[bool]:
    """Of each draw of random numbers, whether it is the same for the whole and all parts."""
    each = list(zip(wanted.drew, *(part.drew for part in parts), strict=True))
    return {all(shape == shapes[0] for shape in shapes) for shapes in each}


def _fits(x: Tensor, part: Any) -> bool:
    return isinstance(part, Tensor) and part.shape == x.shape


def _alike(x: Any, parts: Sequence[Any]) -> bool:
    """Whether parts have what the whole has."""
    if isinstance(x, Tensor):
        return all(_fits(x, y) and torch.allclose(x.double(), y.double(), rtol=_CLOSE, atol=_CLOSE) for y in parts)
    if isinstance(x, PLAIN):
        return all(type(x) is type(y) and x == y for y in parts)
    tensors = [tensors_anywhere_in(value) for value in (x, *parts)]
    return len(set(map(len, tensors))) == 1 and all(_alike(y, z) for y, *z in zip(*tensors, strict=True))
