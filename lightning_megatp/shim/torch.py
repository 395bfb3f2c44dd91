"""Private names of torch, beside those in modules of their own (autograd, fakes). Seen in 2.11 and 2.13 to 2.15."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.origins import package_of
from lightning_megatp.shim.autograd import untransformed
from lightning_megatp.shim.fakes import is_fake

# torch.utils._pytree is what torch's own containers go through (torch.func, export, FSDP2); the public alternative
# (torch.utils.pytree) does not exist before 2.14. DisableTorchFunctionSubclass is documented in "Extending PyTorch" but
# has no public home, nor has DisableTorchFunction, which ends modes too. TorchDispatchMode only has the one that
# "Extending PyTorch" names.
# WeakIdKeyDictionary has no underscore, and no page in the documentation.
# flatten and unflatten are torch.cat and split over any number of tensors in one call each, as DDP uses them; public
# are only the loops over parameters of torch.nn.utils.
__all__ = [
    "FOREACH_IN_PLACE",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "WeakIdKeyDictionary",
    "WithoutMode",
    "distributions_not_validated",
    "flatten",
    "foreach_norm",
    "inference_as_no_grad",
    "is_of_parameter",
    "is_parameter_view",
    "is_random",
    "is_view",
    "open_attributes",
    "open_class",
    "replace_step",
    "sdpa_is_fused",
    "storage_id",
    "tensor_version",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unflatten",
    "unscale_before_step",
    "with_attributes",
    "without_dispatch_modes",
    "written_arguments",
]

# What torch.nn.utils' clipping takes norms with (2.11-2.13).
foreach_norm = torch._foreach_norm

without_dispatch_modes = _disable_current_modes
"""Do what is inside as if no TorchDispatchMode were active (2.11-2.13)."""


def is_view(x: Tensor) -> bool:
    """Whether autograd follows changes in place of a tensor back to another."""
    return viewed(x) is not None


def viewed(x: Tensor) -> Tensor | None:
    """That other tensor (`Tensor._base`, 2.11-2.14). To ask is no use of it, which split ones refuse."""
    if type(x) is torch.Tensor:
        return x._base
    with DisableTorchFunctionSubclass():
        return x._base


def tensor_version(x: Tensor) -> int:
    """How often a tensor was modified in place. `Tensor._version` is what autograd's own check reads; inference tensors
    have none, and can't be modified outside inference mode."""
    if x.is_inference():
        return 0
    return int(x._version)


@contextlib.contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Meanwhile `torch.inference_mode()` does what `torch.no_grad()` does: inference tensors don't tell whether they
    were changed (torch 2.11-2.13: the class has no switch for that, so its two methods are replaced)."""
    kind: Any = torch.inference_mode
    before = kind.__enter__, kind.__exit__
    kind.__enter__, kind.__exit__ = _enter_no_grad, _exit_no_grad
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = before


def _enter_no_grad(self: Any) -> None:
    self._without_grad = torch.set_grad_enabled(not self.mode)


def _exit_no_grad(self: Any, *raised: object) -> None:
    self._without_grad.__exit__(*raised)


class WithoutMode:
    """A context that takes a mode off the stack of modes, wherever in it it is; the others stay active. A class, since
    pipelines enter it for every unit and microbatch.

    `torch._C.DisableTorchFunction` disables all of them, `torch.set_default_device`'s too. The stack has no public
    interface (2.11-2.13).
    """

    __slots__ = ("_above", "_mode")

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._above: list[TorchFunctionMode] = []
        while (top := _pop_mode()) is not self._mode:
            self._above.append(top)
        for other in reversed(self._above):
            _push_mode(other)

    def __exit__(self, *raised: object) -> None:
        for _ in self._above:
            _pop_mode()
        _push_mode(self._mode)
        for other in reversed(self._above):
            _push_mode(other)


def is_parameter_view(x: Tensor) -> bool:
    """Whether this is a view of a leaf that collects a gradient; views have no public way to their base (2.11-2.13)."""
    base = x._base
    return base is not None and base.is_leaf and base.requires_grad


def is_of_parameter(x: Tensor) -> bool:
    """Whether this is a parameter or a view of one, frozen ones too."""
    return isinstance(x, torch.nn.Parameter) or isinstance(x._base, torch.nn.Parameter)


def sdpa_is_fused(*args: Any, **kwargs: Any) -> bool:
    """Whether `F.scaled_dot_product_attention` of these arguments takes a kernel that never builds the scores. What the
    function itself asks; 0 stands for SDPBackend.MATH (2.11-2.13). Of fake tensors it would always say that, though the
    function takes the kernel of their device: it is asked of real ones, whose memory nobody touches."""
    with unset_fake_temporarily():
        real = tree_map(_real_like, (args, kwargs))
        return int(torch._fused_sdp_choice(*real[0], **real[1])) != 0


def _real_like(x: Any) -> Any:
    if not is_fake(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def storage_id(x: Tensor) -> int:
    """A number that tensors which share memory have in common. Storages of fake tensors have no address to compare
    (2.13), sparse tensors have no storage, and torch.func hides that of what it maps over."""
    x = untransformed(x)
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else id(x)


def with_local(like: DTensor, local: Tensor) -> DTensor:
    """A DTensor of other values, in their own memory: `from_local` copies what is offloaded to the mesh's device, and
    the constructor is not documented (2.13)."""
    return DTensor(local, like._spec, requires_grad=False)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes in place. Its schema tells, which has no public name (2.11-2.13)."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _single(name: str) -> Any:
    of_one = name.removeprefix("_foreach_")
    return getattr(Tensor, {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}.get(of_one, of_one))


FOREACH_IN_PLACE: dict[Any, Any] = {
    getattr(torch, name): _single(name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")
}
"""Functions that change each tensor of a list in place -> the method that does it to one. torch gives them no public
names (2.11-2.13)."""


def replace_step(
    optimizer: torch.optim.Optimizer, step: Callable[[Callable[[], Any], Callable[[], Any] | None], Any]
) -> None:
    """Let `step(once, closure)` stand for `optimizer.step(closure)`, where `once()` is a bare call of it. Hooks on
    steps are called around the whole, and schedulers see that it was called: torch wraps `step` of every class for the
    former (`hooked`), and of an object for the latter (`_opt_called`), under private names (2.11-2.13)."""
    before, hooked = optimizer.step, type(optimizer).step
    bare = hooked.__wrapped__ if getattr(hooked, "hooked", False) else hooked  # type: ignore[attr-defined]
    takes_closure = "closure" in inspect.signature(bare).parameters

    def own(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        return step(functools.partial(bare, self, **({"closure": None} if takes_closure else {})), closure)

    with_hooks = torch.optim.Optimizer.profile_hook_step(own)

    @functools.wraps(before)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return with_hooks(optimizer, *args, **kwargs)

    optimizer.step = replaced  # type: ignore[method-assign]


def is_random(func: Any) -> bool:
    """Whether an operation draws from a generator. `torch.Tag` is public, the names of its members are not (2.13)."""
    return torch.Tag.nondeterministic_seeded in func.tags


@contextlib.contextmanager
def distributions_not_validated() -> Iterator[None]:
    """Let `torch.distributions` not look at the values they are given, if not told to. That would be a read on the host
    for each. Only the default's setter is public (2.11-2.13)."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def unscale_before_step(optimizer: Any) -> None:
    """Let a loss scaler unscale an optimizer's gradients, and look for inf and nan, before its step. Fused optimizers
    do it in their own kernels; a scaler, and Lightning, knows them by this private name (2.11-2.13)."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False


open_class = register_pytree_node
"""Let `tree_map` and `tree_leaves` look into the objects of a class: given the class, what flattens one to a list and a
context, and what makes one of these."""


def open_containers(*values: Any) -> None:
    """Let `tree_map` and `tree_leaves` look into the dataclasses of users among nested values, and into dicts of their
    own classes, from now on: as blocks may hand them to each other. They are made anew without `__init__`, which may
    check what it is given, or make more of it."""
    while new := {type(x) for x in tree_leaves(values) if _is_closed(x)}:
        for kind in new:
            if issubclass(kind, dict):
                open_class(kind, _items_of, functools.partial(_with_items, kind))
            else:
                open_attributes(kind)


def open_attributes(kind: type) -> None:
    """Let them look into the objects of a class, from now on, and make them anew of their attributes."""
    open_class(kind, _entries_of, functools.partial(with_attributes, kind))


def _is_closed(x: Any) -> bool:
    """Not opened yet: of what is registered, `tree_leaves` gives the entries."""
    of_library = package_of(type(x)) in ("torch", "transformers")
    is_container = isinstance(x, dict) or (dataclasses.is_dataclass(x) and not isinstance(x, type))
    return is_container and not of_library


def _entries_of(x: Any) -> tuple[list[Any], list[str]]:
    held = vars(x) if hasattr(x, "__dict__") else {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return list(held.values()), list(held)


def with_attributes(kind: type, entries: Iterable[Any], names: Iterable[str]) -> Any:
    """An object of a class with these attributes."""
    made: Any = (SimpleNamespace if issubclass(kind, SimpleNamespace) else object).__new__(kind)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(made, name, entry)  # also of a frozen one
    return made


def _items_of(x: dict[Any, Any]) -> tuple[list[Any], tuple[list[Any], list[str], bool]]:
    held: Any = getattr(x, "__dict__", {})
    own = {} if held is x else held  # `self.__dict__ = self` makes its entries its attributes
    return [*dict.values(x), *own.values()], (list(dict.keys(x)), list(own), held is x)


def _with_items(kind: type, entries: Iterable[Any], context: tuple[list[Any], list[str], bool]) -> Any:
    keys, names, is_own = context
    base: Any = next(base for base in (OrderedDict, defaultdict, dict) if issubclass(kind, base))
    made, given = base.__new__(kind), iter(entries)
    if is_own:
        made.__dict__ = made
    for key, entry in zip(keys, given):  # noqa: B905 (the rest are attributes)
        base.__setitem__(made, key, entry)
    for name, entry in zip(names, given, strict=True):
        made.__dict__[name] = entry
    return made
