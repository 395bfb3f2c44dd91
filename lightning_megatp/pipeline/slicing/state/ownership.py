"""The tensors of other stages: gone from memory, and still there for code that asks for their shape."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.kept_parameters import kept_parameters, replace_kept
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.state.loaded import load_own_stage
from lightning_megatp.shim.fakes import FakeTensorMode, fake_of, is_fake
from lightning_megatp.shim.modules import modules_in
from lightning_megatp.snapshots.snapshot import kept_by

_KINDS = ("_parameters", "_buffers")

Sizes = Mapping[str, Sequence[int]]
"""Name of a parameter of which each rank holds a part, each of a tied one -> the shape that a step's code sees."""


@dataclass
class _Emptied:
    """A module some of whose tensors were freed."""

    module: nn.Module
    kind: str
    order: tuple[str, ...]
    fakes: dict[str, Tensor]
    held: dict[str, Any] = field(default_factory=dict)
    """What the module has of them, while fakes are shown beside it."""


class Ownership:
    """Which stages each parameter and buffer of a module belongs to, and which of them this rank let go of.

    Args:
        module: the whole.
        stage_of_unit: unit name -> stage.
        fake_mode: makes what stands for freed tensors.
        sizes: of split parameters.
        device: where all of them will be, None for where they are.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_of_unit: Mapping[str, int],
        fake_mode: FakeTensorMode,
        sizes: Sizes,
        device: torch.device | None = None,
    ) -> None:
        self._module, self._stage_of_unit, self._fake_mode = module, stage_of_unit, fake_mode
        self._sizes, self._device = sizes, device
        self._emptied: list[_Emptied] = []
        self._is_present = False
        self._uses: dict[str, set[int]] = {}
        self._known: set[nn.Module] = set()
        """The modules that were there when tensors were freed."""

    @property
    def names(self) -> dict[int, str]:
        """id -> name of the parameters; of the first name, if it has several."""
        return {id(p): name for name, p in self._module.named_parameters()}

    def of_units(self) -> dict[int, set[int]]:
        """id(parameter or buffer of a unit, or a table that only units keep) -> the stages of its units, and of
        operations that were seen using it."""
        modules = dict(self._module.named_modules())
        inside = {unit: list(modules[unit].modules()) for unit in self._stage_of_unit}
        in_units = {child for children in inside.values() for child in children}
        others = {id(x) for x in kept_by(child for child in modules.values() if child not in in_units)}
        others |= {id(x) for x in (*self._module.parameters(), *self._module.buffers())}
        owners: dict[int, set[int]] = {}
        for unit, stage in self._stage_of_unit.items():
            tables = (x for x in kept_by(inside[unit]) if id(x) not in others)
            for tensor in (*modules[unit].parameters(), *modules[unit].buffers(), *tables):
                owners.setdefault(id(tensor), set()).add(stage)
        for tensor_id, name in self.names.items():
            if tensor_id in owners:
                owners[tensor_id] |= self._uses.get(name, set())
        return owners

    def learn(self, owners: Mapping[int, set[int]]) -> None:
        """Remember on which stages a plan uses the units' parameters.

        Raises:
            SliceError: it uses a unit's buffer on the stage of another one, where it is gone.
        """
        for tensor_id, name in self.names.items():
            self._uses.setdefault(name, set()).update(owners.get(tensor_id, set()))
        used = [(name, buffer) for name, buffer in self._module.named_buffers() if owners.get(id(buffer))]
        homes = self.of_units() if used else {}
        for name, buffer in used:
            homes_of = homes.get(id(buffer), set())
            if apart := owners[id(buffer)] - homes_of:
                raise SliceError(
                    f"the step uses the buffer `{name}` on pipeline stage {min(apart)}, and its module is on stage"
                    f" {min(homes_of)}. Make that module a child of those that use the buffer (`self.child = module` in"
                    " their `__init__`), or keep them on one stage, by `stages=[[...], ...]`."
                )

    def free(self, own: Collection[int]) -> None:
        """Let go of the parameters and buffers that belong to units of other stages only. Tied ones stay tied."""
        owners = self.of_units()
        freed: dict[int, tuple[Tensor, Tensor]] = {}
        kept, names = kept_parameters(self._module), self.names
        gone: dict[str, dict[str, torch.Size]] = {}
        for path, child in self._module.named_modules():
            for kind in _KINDS:
                held: dict[str, Tensor | None] = child.__dict__[kind]
                foreign = {
                    name: tensor
                    for name, tensor in held.items()
                    if tensor is not None and id(tensor) in owners and not owners[id(tensor)] & set(own)
                }
                if foreign:
                    self._empty(child, kind, path, foreign, freed)
                    gone.setdefault(path, {}).update((name, child.__dict__[name].shape) for name in foreign)
        load_own_stage(self._module, gone)
        fakes = {names[key]: fake for key, (_, fake) in freed.items() if key in names}
        replace_kept(self._module, {key: fakes[name] for key, name in kept.items() if name in fakes})
        self._known = set(modules_in(self._module))

    def refuse_copies(self) -> None:
        """Nobody may have copied modules of which this rank holds a part, and put the copies beside them.

        Raises:
            SliceError: somebody has.
        """
        if len(modules := modules_in(self._module)) <= len(self._known):
            return
        for copy in set(modules) - self._known if self._known else ():
            if any(is_fake(x) for x in vars(copy).values() if isinstance(x, Tensor)):
                path = next(name for name, child in self._module.named_modules() if child is copy)
                raise SliceError(
                    f"`{path}` is a copy, made after set-up, of a module of another pipeline stage, whose values are"
                    " not here. Make the copy in `__init__` (an average that begins later can start there, too), use"
                    " Lightning's WeightAveraging, or pp=1."
                )
        self._known.update(modules)

    def stand_in(self, name: str) -> Tensor:
        """What is there under a parameter's name: itself, or what stands for a freed one."""
        path, _, leaf = name.rpartition(".")
        found: Tensor = getattr(self._module.get_submodule(path), leaf)
        return found

    def hold(self, name: str, value: Tensor) -> nn.Parameter:
        """Take a freed parameter back, under all names it had: an operation of this rank's stages uses it.

        Args:
            value: its values.
        """
        fake = self.stand_in(name)
        parameter = nn.Parameter(value, requires_grad=fake.requires_grad)
        for emptied in self._emptied:
            for leaf in [leaf for leaf, other in emptied.fakes.items() if other is fake]:
                emptied.module.__dict__.pop(leaf, None)
                setattr(emptied.module, leaf, parameter)
        return parameter

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Put what stands for freed tensors where `module.parameters()` finds it, as it would on one device."""
        with self._shown(True):
            yield

    @contextlib.contextmanager
    def absent(self) -> Iterator[None]:
        """Within `present`: `module.parameters()` gives what this rank has."""
        with self._shown(False):
            yield

    @contextlib.contextmanager
    def _shown(self, shown: bool) -> Iterator[None]:
        before, self._is_present = self._is_present, shown
        if before != shown:
            self._show(shown)
        try:
            yield
        finally:
            self._is_present = before
            if before != shown:
                self._show(before)

    def take_back(self) -> None:
        """After a hook, which may have assigned what stands for a freed parameter where it found it (`layer.weight +=
        x`): that registers it."""
        for emptied in self._emptied if not self._is_present else ():
            held = emptied.module.__dict__[emptied.kind]
            for name in [name for name, fake in emptied.fakes.items() if dict.get(held, name) is fake]:
                emptied.module.__dict__[name] = dict.pop(held, name)

    def _show(self, shown: bool) -> None:
        """What a module holds itself may be exchanged meanwhile, by what divides it."""
        for emptied in self._emptied:
            if shown:
                emptied.held = emptied.module.__dict__[emptied.kind]
            held = emptied.held
            if not held:
                emptied.module.__dict__[emptied.kind] = emptied.fakes if shown else held
            elif shown:  # changed in place: those of split layers are no plain dicts
                _fill(held, {name: dict.get(held, name, emptied.fakes.get(name)) for name in emptied.order})
            else:
                _fill(held, {name: x for name, x in dict.items(held) if x is None or x is not emptied.fakes.get(name)})

    @contextlib.contextmanager
    def lists_noted(self) -> Iterator[ListsNoted]:
        """Note whether anybody goes through the parameters of modules."""
        noted = ListsNoted()
        before = [(child, child._parameters) for child in self._module.modules()]
        for child, held in before:
            child.__dict__["_parameters"] = _Noting(held, noted)
        try:
            yield noted
        finally:
            for child, held in before:
                child.__dict__["_parameters"] = held

    @contextlib.contextmanager
    def whole_as_fakes(self) -> Iterator[None]:
        """Let parameters that have no values yet, or not on the device, be what a dry run makes of those that have, and
        split ones whole, as the step's code has to see them (their layers take what they hold of such a one)."""
        changed = [
            (child, leaf, p, shape)
            for path, child in self._module.named_modules()
            for leaf, p in dict.items(child._parameters)
            if p is not None and ((shape := self._whole_shape(path, leaf, p)) != p.shape or self._is_absent(p))
        ]
        fakes = {id(p): self._fake(p, shape) for _, _, p, shape in changed}
        for child, leaf, parameter, _ in changed:
            setattr(child, leaf, fakes[id(parameter)])  # recurrent layers keep a list of their weights, and follow this
        try:
            yield
        finally:
            for child, leaf, parameter, _ in changed:
                setattr(child, leaf, parameter)

    @contextlib.contextmanager
    def buffers_aside(self) -> Iterator[None]:
        """Let the module run on copies of its buffers: without data those of units, real ones the others."""
        owners = self.of_units()
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        copies: dict[int, Tensor] = {}
        for child in self._module.modules():
            held = child.__dict__["_buffers"]
            if held:
                before.append((held, dict(held)))
                held.update({name: self._aside(x, owners, copies) for name, x in held.items()})
        try:
            yield
        finally:
            for held, buffers in before:
                held.clear()
                held.update(buffers)

    def _aside(self, x: Tensor | None, owners: dict[int, set[int]], copies: dict[int, Tensor]) -> Any:
        if is_fake(x):  # freed: the module finds it under its own name, and there is nothing to protect
            return x
        if x is not None and id(x) not in copies:
            copies[id(x)] = fake_of(self._fake_mode, x) if id(x) in owners else x.detach().clone()
        return None if x is None else copies[id(x)]

    def _empty(
        self,
        child: nn.Module,
        kind: str,
        path: str,
        foreign: dict[str, Tensor],
        freed: dict[int, tuple[Tensor, Tensor]],
    ) -> None:
        """Let go of tensors that a module holds, and put what stands for them in their places.

        Args:
            freed: id(tensor) -> one that is let go of, and what stands for it, in all modules; added to.
        """
        held = child.__dict__[kind]
        for name, x in foreign.items():
            if id(x) not in freed:
                freed[id(x)] = x, self._fake(x, self._whole_shape(path, name, x))
        fakes = {name: freed[id(x)][1] for name, x in foreign.items()}
        self._emptied.append(_Emptied(child, kind, tuple(held), fakes))
        for name, fake in fakes.items():
            setattr(child, name, fake)  # recurrent layers keep a list of their weights, and follow this
            child.__dict__[name] = child.__dict__[kind].pop(name)

    def _whole_shape(self, path: str, leaf: str, x: Tensor) -> torch.Size:
        """The shape of a tensor of a module as the step's code has to see it."""
        shape = self._sizes.get(f"{path}.{leaf}" if path else leaf) if self._sizes else None
        return x.shape if shape is None else torch.Size(shape)

    def _is_absent(self, x: Tensor) -> bool:
        """Whether a tensor has no values yet, or they wait in the host's memory."""
        return x.is_meta or (self._device is not None and x.device.type != self._device.type)

    def _fake(self, x: Tensor, shape: torch.Size) -> Tensor:
        """What stands for a tensor; for an absent one, as it will be on the device."""
        absent = self._is_absent(x)
        if not absent and x.shape == shape:
            return fake_of(self._fake_mode, x)
        expected: Any = self._device or getattr(self._module, "device", "cpu")
        device = expected if absent else x.device
        stride = x.stride() if x.shape == shape else torch.empty(shape, device="meta").stride()
        with self._fake_mode:
            like = torch.empty_strided(shape, stride, dtype=x.dtype, device=device)
            return nn.Parameter(like, requires_grad=x.requires_grad)


@dataclass
class ListsNoted:
    """Whether parameters were listed."""

    any: bool = False


class _Noting(dict[str, Any]):
    """`nn.Module._parameters` that says when it is gone through."""

    def __init__(self, held: Mapping[str, Any], noted: ListsNoted) -> None:
        super().__init__(held)
        self._noted = noted

    def items(self) -> Any:
        self._noted.any = True
        return super().items()


def _fill(held: dict[str, Any], entries: Mapping[str, Any]) -> None:
    held.clear()
    held.update(entries)
