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
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_megatp.auto_plan.adding_up import NOT_A_SUM, NOT_USED, NotAdditive, check_numbered, proven
from lightning_megatp.auto_plan.blocks import Block, find_blocks, is_linear, own_attributes
from lightning_megatp.auto_plan.thin_stacks import features_inside, holder_of
from lightning_megatp.origins import is_torchs, package_of
from lightning_megatp.plan.experts import looks_like_experts, usual_parameters
from lightning_megatp.plan.layer import StackLayout
from lightning_megatp.plan.layer_styles import COUNTS, usual_counts
from lightning_megatp.plan.styles import ExpertParameter
from lightning_megatp.plan.units import PARAMETER_CONTAINERS

_MOST = 2**26
"""Elements of what is not split, in a module that is tried out."""
_TRIALS, _SECONDS = 256, 4.0
"""How many ways, and for how long, are tried for one module."""
_MOST_WAYS = 4096
"""So many are looked at."""
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, *PARAMETER_CONTAINERS)
_UP = 2
"""So many modules around the one that holds the parameters may be what adds up."""


def find_stacks(model: nn.Module) -> list[str]:
    """The names of the modules that may be stacks of experts, and of those around them that may be it instead; inner
    ones first."""
    modules, blocks = dict(model.named_modules()), set(find_blocks(model))
    held = {name: len(_stacks_in(module)) for name, module in modules.items()}
    found: dict[str, None] = {}  # in the order of the model
    for name in [name for name, count in held.items() if count]:
        around = name.split(".")
        holder = name.rpartition(".")[0] if isinstance(modules[name], PARAMETER_CONTAINERS) else name
        for depth in range(len(around), max(len(around) - _UP - 1, 0), -1):
            candidate = ".".join(around[:depth])
            inside = sum(count for other, count in held.items() if f"{other}.".startswith(f"{candidate}."))
            if not _is_mostly_stacks(modules[candidate]):
                break
            if candidate in blocks and candidate != holder:
                break
            if inside >= 2 and candidate and not isinstance(modules[candidate], _LISTS):
                found[candidate] = None
            if candidate in blocks:
                break
    return sorted(found, key=lambda name: -name.count("."))


def _is_mostly_stacks(module: nn.Module) -> bool:
    """Whether the linear layers in there, which may stay whole with it, have no more weights than the stacks."""
    linears = sum(child.get_parameter("weight").numel() for child in module.modules() if is_linear(child))
    return linears <= sum(module.get_parameter(name).numel() for name in holds_stacks(module))


def holds_stacks(module: nn.Module) -> list[str]:
    """The names of the parameters anywhere in a module that may be stacks."""
    return [f"{name}.{leaf}".lstrip(".") for name, child in module.named_modules() for leaf in _stacks_in(child)]


def usual_layout(module: nn.Module) -> StackLayout:
    """The layout of transformers' experts, by their parameters' names.

    Raises:
        ValueError: other names, or shapes that fit neither layout, or both.
    """
    parameters = usual_parameters("experts", module)
    return StackLayout(parameters, usual_counts(module, features_inside(module, parameters)))


def layout_of(stack: Block) -> StackLayout:
    """How a module's parameters can be split, so that what its parts compute adds up.

    Args:
        stack: the module, with its calls.

    Raises:
        NotAdditive: in no way that was tried.
    """
    module = stack.module
    if package_of(type(module)) == "transformers" and looks_like_experts(module):
        with contextlib.suppress(ValueError):
            return usual_layout(module)
    if not stack.calls:
        raise NotAdditive("the step that was tried out does not call it")
    calls, until = [*stack.calls, *stack.other_calls], time.monotonic() + _SECONDS
    reasons: dict[str, None] = {}
    for layout in itertools.islice(_layouts(module), _TRIALS):
        if time.monotonic() > until:
            break
        try:
            found = proven(module, layout, calls)
            first = stack.counts[0] if stack.counts else {}
            for numbers in {tuple(counts.items()) for counts in stack.counts} - {tuple(first.items())}:
                seen = check_numbered(module, found, calls[0], {name.lstrip("."): n for name, n in numbers})
                found = replace(found, done=found.done | seen)
            return found
        except NotAdditive as error:
            reasons[str(error)] = None
        except Exception:  # it may be any code, and most sizes don't fit each other
            pass
    usual = {NOT_A_SUM, NOT_USED}  # by which most ways of any module fail
    raise NotAdditive(next((why for why in reasons if why not in usual), next(iter(reasons), NOT_A_SUM)))


def _stacks_in(module: nn.Module) -> list[str]:
    """Its own parameters that may hold the weights of several experts: of three dims or more, with the rows of all
    experts, or matrices of one shape in a list."""
    if isinstance(module, PARAMETER_CONTAINERS):
        held = [(key, p) for key, p in module._parameters.items() if p is not None and p.dim() > 1]
        shapes = Counter(p.shape for _, p in held)
        return [key for key, p in held if p.dim() > 2 or shapes[p.shape] > 1]
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
    return any(is_torchs(kind) and kind is not nn.Module for kind in type(module).__mro__)


def _experts(module: nn.Module) -> list[int]:
    """How many experts there are, as far as attributes tell."""
    held = own_attributes(module).items()
    return sorted({x for key, x in held if "expert" in key.lower() and type(x) is int and x > 1})


def _rows_of(rows: int, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if rows % n == 0 and rows > n]


def _layouts(module: nn.Module) -> Iterator[StackLayout]:
    """Ways to split a module's parameters, the most of them first, without those that leave much whole."""
    stacks = holds_stacks(module)
    own = {name: p for name, p in module.named_parameters() if not _is_torchs(holder_of(module, name)[0])}
    own |= {name: module.get_parameter(name) for name in stacks}
    numbers = sorted({n for child in module.modules() for n in _experts(child)})
    others = [name for name, _ in module.named_parameters() if name not in own]
    total = sum(p.numel() for p in module.parameters())
    ways = []
    for inside in _sizes([own[name] for name in stacks], numbers):
        groupings = [
            [_options(names, own[names[0]], inside, numbers) for names in groups] for groups in _groupings(module, own)
        ]
        cut = [own[entry.name].numel() for choices in groupings[0] for entry in choices[0] if entry.split]
        if len(cut) >= 2:
            beside = _beside(module, others, inside)
            ways.append((sum(cut), itertools.chain(*[_ways(module, inside, each, beside) for each in groupings])))
    ways.sort(key=lambda way: way[0], reverse=True)
    for layout in itertools.islice(_in_turn([layouts for _, layouts in ways]), _MOST_WAYS):
        cut = [own[entry.name].numel() for entry in layout.parameters if entry.split and entry.name in own]
        if len(cut) >= 2 and total - sum(cut) <= _MOST:
            yield layout


def _ways(
    module: nn.Module,
    inside: int,
    options: Sequence[Sequence[Sequence[ExpertParameter]]],
    beside: Sequence[Sequence[ExpertParameter]],
) -> Iterator[StackLayout]:
    """With a number of features inside, each choice for each parameter, and for what counts them."""
    counts = [
        f"{name}.{key}".lstrip(".")
        for name, child in module.named_modules()
        if not _is_torchs(child)
        for key, value in own_attributes(child).items()
        if type(value) is int and value == inside
    ]
    usual = [name for name in counts if name.rpartition(".")[2] in COUNTS]
    for chosen in itertools.product(*options, beside):
        for names in dict.fromkeys(map(tuple, (counts, usual, (), *([name] for name in counts)))):
            yield StackLayout(tuple(itertools.chain.from_iterable(chosen)), names)


def _beside(module: nn.Module, names: Sequence[str], inside: int) -> list[list[ExpertParameter]]:
    """What the layers beside the stacks may be: whole; an expert that all tokens take, whose features are a multiple of
    the others'; or layers of one shape whose output is added once."""
    shapes = {name: tuple(child.weight.shape) for name, child in module.named_modules() if type(child) is nn.Linear}
    ways: list[dict[str, ExpertParameter]] = [{}]
    for features, width in dict.fromkeys(shapes.values()):
        up = [name for name, shape in shapes.items() if shape == (features, width)]
        down = [name for name, shape in shapes.items() if shape == (width, features)]
        up, down = (up[:-1], up[-1:]) if features == width else (up, down)
        if features % inside == 0 and up and down:
            unit = features // inside
            split = [ExpertParameter(f"{name}.{leaf}", 0, unit=unit) for name in up for leaf in ("weight", "bias")]
            split += [ExpertParameter(f"{name}.weight", 1, unit=unit) for name in down]
            split += [ExpertParameter(f"{name}.bias", once=True) for name in down]
            ways.append({entry.name: entry for entry in split})
    for shape in dict.fromkeys(shapes.values()):
        alike = [f"{name}.{leaf}" for name in shapes if shapes[name] == shape for leaf in ("weight", "bias")]
        ways.append({name: ExpertParameter(name, once=True) for name in alike})
    return [[way.get(name, ExpertParameter(name)) for name in names] for way in ways]


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
        in_list = isinstance(module.get_submodule(path), PARAMETER_CONTAINERS)
        by_list.setdefault(path if in_list else name, []).append(name)
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
    whole: list[dict[str, Any]] = [{"once": True}, {}] if p.dim() <= 2 else [{}]  # a matrix may be biases of experts
    found += reversed(whole) if p.dim() == 1 else whole
    return [[ExpertParameter(name, **options) for name in names] for options in found]
