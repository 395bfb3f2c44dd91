"""Which modules a pipeline never cuts (its units: blocks, embeddings, heads), and how they are spread over stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_megatp.shim.compiler import wraps_compiled

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
"""Modules that nobody calls: code takes parameters out of them."""


def find_units(module: nn.Module) -> list[str]:
    """The units of a module, in the order of definition.

    What a ModuleList, Sequential or ModuleDict holds are units; lists in lists are opened, and so is what has no
    forward; blocks are not, whatever they hold. Outside of lists, a module that has such lists somewhere in it is
    opened, and any other module with parameters is a unit: an embedding, a norm, a head. A model without any list is
    opened down to its layers; one with a parametrization (weight_norm) is a layer. Only modules with parameters count,
    and no layer is in two units: outside of lists, what holds another unit beside its own parts (a head that is given
    the embedding) is opened.
    """
    found = list(_units("", module, open_all=not _has_lists(module), in_list=False))
    while (opened := _without_holders(module, found)) != found:
        found = opened
    modules = {name: module.get_submodule(name) for name in found}
    inner = {id(part) for unit in modules.values() for part in unit.modules() if part is not unit}
    first_names = {id(unit): name for name, unit in reversed(modules.items())}
    return [name for name, unit in modules.items() if id(unit) not in inner and first_names[id(unit)] == name]


def _without_holders(module: nn.Module, units: Sequence[str]) -> list[str]:
    """The units; those outside of lists that hold a unit which has another name are replaced by their parts."""
    names: dict[int, str] = {}
    for unit in units:
        names.setdefault(id(module.get_submodule(unit)), unit)

    def holds(unit: str) -> bool:
        parts = [id(part) for part in module.get_submodule(unit).modules()][1:]
        return any(part in names and not names[part].startswith(f"{unit}.") for part in parts)

    opened = {unit: children_of(module, unit) for unit in units if not is_in_list(module, unit) and holds(unit)}
    return list(dict.fromkeys(part for unit in units for part in opened.get(unit) or [unit]))


def parts_of_one_stage(module: nn.Module, stage_of_unit: Mapping[str, int]) -> dict[str, str]:
    """The names of the modules in units, each of which only one stage has, with their units."""
    found: dict[int, tuple[str, str, set[int]]] = {}
    for unit, stage in stage_of_unit.items():
        for name, part in module.get_submodule(unit).named_modules():
            found.setdefault(id(part), (f"{unit}.{name}".rstrip("."), unit, set()))[2].add(stage)
    return {name: unit for name, unit, stages in found.values() if len(stages) == 1}


def common_end(name: str, other: str) -> int:
    """How many parts of two names are the same, counted from their ends."""
    pairs = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def children_of(module: nn.Module, unit: str) -> list[str]:
    """The units to try instead of one whose forward is never called, because the model calls its parts."""
    inner = [(f"{unit}.{name}", child) for name, child in module.get_submodule(unit).named_children()]
    return [part for name, child in inner for part in _units(name, child, open_all=False, in_list=True)]


def keepers_of(module: nn.Module, units: Sequence[str], changed: Iterable[str]) -> set[str]:
    """Modules without parameters, in no unit and with none inside, that can be called and own some of these buffers."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    found = {name.rpartition(".")[0] for name in changed if name in buffers}
    return {
        name
        for name in found - {""}
        if _has_forward(keeper := module.get_submodule(name))
        and next(keeper.parameters(), None) is None
        and not any(f"{name}.".startswith(f"{unit}.") or unit.startswith(f"{name}.") for unit in units)
    }


def in_definition_order(module: nn.Module, units: Collection[str]) -> list[str]:
    """As the module names them."""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name in units]


def is_in_list(module: nn.Module, unit: str) -> bool:
    """Whether a unit is one of many, such as a block, and no embedding, norm or head beside them."""
    return is_list(module.get_submodule(unit.rpartition(".")[0]))


def _units(name: str, module: nn.Module, open_all: bool, in_list: bool) -> Iterator[str]:
    inner = [(f"{name}.{child}".lstrip("."), part) for child, part in module.named_children()]
    inner = [(child, part) for child, part in inner if _is_callable(part)]
    opens = is_list(module)
    is_root = name == ""
    bare = not _has_forward(module)
    opened = opens or is_root or bare or (not in_list and _has_lists(module))
    opened |= open_all and not _own_parameters(module)
    if wraps_compiled(module) or _is_parametrized_layer(module) or not opened or not inner:
        if _is_callable(module) and not is_root:
            yield name
        return
    for child, part in inner:
        yield from _units(child, part, open_all, in_list=opens or (bare and in_list))


def modules_around(units: Iterable[str]) -> list[str]:
    """The names of the modules around the units, whose code runs on every stage; "" is the whole."""
    names = {""}
    for unit in units:
        parts = unit.split(".")
        names |= {".".join(parts[:depth]) for depth in range(1, len(parts))}
    return sorted(names)


def is_list(module: nn.Module) -> bool:
    """Whether a module holds others, each for its index or name, and computes nothing but them in turn."""
    return isinstance(module, LISTS) and type(module).forward in {kind.forward for kind in LISTS}


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called: an `nn.Module()` to which others were given, as levels of a VQGAN are, can't."""
    return type(module).forward is not nn.Module.forward


def _blocks(container: nn.Module) -> list[nn.Module]:
    return [child for child in container.children() if _is_callable(child)]


def _has_lists(module: nn.Module) -> bool:
    modules = list(module.modules())
    parametrizations = {id(child.parametrizations) for child in modules if is_parametrized(child)}
    lists = (child for child in modules if is_list(child) and id(child) not in parametrizations)
    return not wraps_compiled(module) and any(map(_blocks, lists))


def _is_parametrized_layer(module: nn.Module) -> bool:
    """A layer whose weight is computed from others (weight_norm), and which holds nothing else."""
    return is_parametrized(module) and len(module._modules) == 1


def _is_callable(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None and not isinstance(module, PARAMETER_CONTAINERS)


def _own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
