"""Private names of torch. Seen in 2.11, 2.13 and 2.14."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.tensor import DTensor
from torch.distributions import Distribution
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_megatp.origins import package_of
from lightning_megatp.shim.autograd import untransformed
from lightning_megatp.shim.fakes import fake_tensor_mode

# torch.utils._pytree is what torch's own containers go through (torch.func, export, FSDP2); the public alternative
# (torch.utils.pytree) does not exist before 2.14. DisableTorchFunctionSubclass is documented in "Extending PyTorch" but
# has no public home, nor has DisableTorchFunction, which ends modes too. TorchDispatchMode only has the one that
# "Extending PyTorch" names.
# flatten and unflatten are torch.cat and split over any number of tensors in one call each, as DDP uses them; public
# are only the loops over parameters of torch.nn.utils.
__all__ = [
    "FOREACH_IN_PLACE",
    "CopiesFakes",
    "DataDependentOutputException",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "WeightNormed",
    "WithoutMode",
    "all_gather_each",
    "all_gather_single",
    "as_subclass",
    "attributes_of_fakes",
    "collectives_begun",
    "compute_weight",
    "conversions_around",
    "distributions_not_validated",
    "failures_of_fakes_unlogged",
    "fake_beside",
    "fake_of",
    "fake_tensor_mode",
    "flatten",
    "foreach_norm",
    "forget_fakes",
    "inference_as_no_grad",
    "is_fake",
    "is_parameter_view",
    "is_random",
    "is_view",
    "making_fakes",
    "missed_data",
    "modules_convert_without_data",
    "modules_in",
    "real_again",
    "reduce_scatter_each",
    "reduce_scatter_single",
    "replace_step",
    "runs_own_convolution",
    "sdpa_is_fused",
    "storage_id",
    "subclassed_fake",
    "tensor_version",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unflatten",
    "unrecorded",
    "unscale_before_step",
    "weight_norm_of",
    "weights_of_recurrent_layers_renewed",
    "without_dispatch_modes",
    "written_arguments",
]

# What torch.nn.utils' clipping takes norms with (2.11-2.13).
foreach_norm = torch._foreach_norm

without_dispatch_modes = _disable_current_modes
"""Do what is inside as if no TorchDispatchMode were active (2.11-2.13)."""
T = TypeVar("T", bound=Tensor)

# torch 2.13 renames these two and warns at the names that 2.11 knows.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Several at once, which torch.distributed offers by `_coalescing_manager` alone (2.11-2.14): the methods that it calls.
# NCCL sends them by one kernel. 2.13 renames them, too.
def all_gather_each(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`all_gather_single` of each input into its output. All are contiguous."""
    begin = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return _begun(begin, outputs, inputs, AllgatherOptions(), async_op)


def reduce_scatter_each(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`reduce_scatter_single` of each input, a sum, into its output. All are contiguous."""
    begin = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return _begun(begin, outputs, inputs, ReduceScatterOptions(), async_op)


def _begun(
    begin: Callable[..., dist.Work | None], outputs: list[Tensor], inputs: list[Tensor], options: Any, async_op: bool
) -> dist.Work | None:
    options.asyncOp = async_op
    work = begin(outputs, inputs, options)
    if async_op or work is None:
        return work
    work.wait()
    return None


def missed_data(error: RuntimeError) -> bool:
    """Whether a kernel failed since it reads the memory of a fake tensor; only torch's words tell (2.11-2.13)."""
    return "data is not allocated yet" in str(error) or "Cannot access data pointer of Tensor" in str(error)


@contextlib.contextmanager
def failures_of_fakes_unlogged() -> Iterator[None]:
    """Operations that fail on fake tensors are errors to who tries them; torch prints their tracebacks besides, by the
    logger of this module (2.11-2.13)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def subclassed_fake(error: Exception) -> str:
    """The class that somebody tried to make a fake tensor of (`Tensor.as_subclass`), which no mode sees; only torch's
    words tell (2.11-2.13)."""
    found = re.search(
        r"Creating a new Tensor subclass (\w+) but the raw .* python object of type FakeTensor", str(error)
    )
    return "" if found is None else found[1]


def is_view(x: Tensor) -> bool:
    """Whether autograd follows changes in place of a tensor back to another."""
    return viewed(x) is not None


def viewed(x: Tensor) -> Tensor | None:
    """That other tensor (`Tensor._base`, 2.11-2.14)."""
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


def modules_in(module: nn.Module) -> list[nn.Module]:
    """What `module.modules()` gives, in its order, a few times faster: that asks a generator per level for each of
    them, to name it. `_modules` are the children (2.11-2.13)."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if child not in found:
            found[child] = None
            waiting += [x for x in reversed(child._modules.values()) if x is not None]
    return list(found)


def is_fake(x: object) -> bool:
    """Whether this is a tensor without data, as a dry run has them. Collectives return one of the right shape for it:
    the c10d operations have no fake kernels for a real process group (2.13)."""
    return isinstance(x, FakeTensor)


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A tensor without data like x. In torch 2.14 that of a number would remember it, in `item_memo`."""
    fake: Any = mode.from_tensor(x)
    fake.item_memo = None
    return fake


def fake_beside(ghost: Tensor, x: Tensor) -> Tensor:
    """A tensor without data like x, that operations may take together with a ghost: `FakeTensor.fake_mode`, torch 2.11
    to 2.14, made it."""
    return x.detach() if is_fake(x) else fake_of(ghost.fake_mode, x)  # type: ignore[attr-defined]


def making_fakes(ghost: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile all that is made is without data, too, as numbers are that an operation takes for tensors."""
    mode: FakeTensorMode = ghost.fake_mode  # type: ignore[attr-defined]
    return mode


@contextlib.contextmanager
def real_again() -> Iterator[None]:
    """Tensors have data, though a FakeTensorMode was entered and not yet left: what a look at a step puts back is real.
    There is one slot for such modes, without a public name (2.11-2.13)."""
    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


def is_parameter_view(x: Tensor) -> bool:
    """Whether this is a view of a leaf that collects a gradient; views have no public way to their base (2.11-2.13)."""
    base = x._base
    return base is not None and base.is_leaf and base.requires_grad


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


def as_subclass(x: Tensor, kind: type[T]) -> T:
    """`x.as_subclass(kind)`, for fake tensors too: these are a subclass of Tensor already, and a view of one can become
    an object of both (2.11-2.13)."""
    if type(x) is Tensor or not is_fake(x):
        return x.as_subclass(kind)
    view: Any = x.view_as(x)
    view.__class__ = _fake_kind(kind)
    found: T = view
    return found


@functools.cache
def _fake_kind(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Fake{kind.__name__}", (kind, FakeTensor), {})


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


class CopiesFakes(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors inside of a FakeTensorMode (a new metric's defaults). There torch 2.13 sets a
    storage with data for a fake tensor or the other way round, and the process may end by a segmentation fault."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or not (is_fake(args[0]) or type(args[0]) is Tensor):
            return func(*args, **(kwargs or {}))
        x, memo = args
        if id(x) not in memo:
            memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return memo[id(x)]


def forget_fakes(mode: FakeTensorMode) -> None:
    """Let a mode forget the tensors it made. It keeps weak references to them (2.13), which `torch.utils.swap_tensors`
    refuses."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def attributes_of_fakes(x: Tensor) -> frozenset[str]:
    """The attributes that a fake tensor has by itself; whatever else it has, somebody gave it. They have no public
    names (2.13)."""
    if not is_fake(x):
        return frozenset()
    with fake_tensor_mode():
        return frozenset(vars(torch.empty(0)))


@contextlib.contextmanager
def weights_of_recurrent_layers_renewed(module: nn.Module) -> Iterator[None]:
    """Around a change of what a module's parameters are. Recurrent layers keep lists of theirs, one of weak references,
    which `torch.utils.swap_tensors` refuses; no public name makes these lists anew (2.11-2.13)."""
    layers = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for layer in layers:
        layer._flat_weights = layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


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


@contextlib.contextmanager
def modules_convert_without_data() -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like replace the parameters and buffers that they convert to another
    dtype or device, and leave others as they are. Of fakes, `nn.Module._apply` would swap the contents instead, which
    fails where something has a weak reference to them (2.11-2.13)."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.modules() if recurse else [self]:
            kinds: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for held in kinds:
                for name in list(held):
                    held[name] = None if held[name] is None else _converted(held[name], fn)
        return self

    with _conversions_by(apply):
        yield


@contextlib.contextmanager
def conversions_around(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like run in a context, and leave a module as it is if all of it has the
    dtype and the device that they ask for: the contents of fakes can't be swapped, see above."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with context():
            held = [*self.parameters(recurse), *self.buffers(recurse)]
            return self if all(_converted(x, fn) is x for x in held) else original(self, fn, recurse)

    with _conversions_by(apply):
        yield


@contextlib.contextmanager
def _conversions_by(apply: Callable[..., nn.Module]) -> Iterator[None]:
    original = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _converted(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        found = fn(x)
    if (found.dtype, found.device) == (x.dtype, x.device):
        return x
    return nn.Parameter(found, x.requires_grad) if isinstance(x, nn.Parameter) else found


_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def runs_own_convolution(module: nn.Module) -> bool:
    """Whether a module's forward is that of torch's convolution. The work is in `_conv_forward` (`_output_padding` for
    transposed ones), which a subclass may replace as well as `forward`: 2.11 and 2.13."""
    kind = next((kind for kind in _CONVOLUTIONS if isinstance(module, kind)), None)
    methods = ("forward", "__call__", "__getattr__", "_conv_forward", "_output_padding")
    return kind is not None and all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)


class WeightNormed(NamedTuple):
    """How torch computes a module's weight g v / |v|."""

    norm: Any
    """What does: a parametrization that takes g and v, or a hook before the forward."""
    length: str
    """Name of g, behind the module's."""
    direction: str
    """Name of v, behind the module's."""
    dim: int
    """The one that |v| is not taken over, counted from the first; -1 for none."""

    @property
    def is_hook(self) -> bool:
        """Whether the weight is an attribute, computed before each forward."""
        return isinstance(self.norm, WeightNorm)


def weight_norm_of(module: nn.Module) -> WeightNormed | None:
    """What `torch.nn.utils.parametrizations.weight_norm`, or the older `torch.nn.utils.weight_norm`, made of a
    module's weight, if nothing else computes it. The parametrization's class has no public name, nor has a module's
    list of hooks (2.11 and 2.13)."""
    held = getattr(module, "parametrizations", {})
    found = list(held["weight"]) if list(held) == ["weight"] else []
    if len(found) == 1 and type(found[0]) is _WeightNorm:
        return _weight_normed(
            module, found[0], "parametrizations.weight.original0", "parametrizations.weight.original1"
        )
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    if not held and len(hooks) == 1 and hooks[0].name == "weight":
        return _weight_normed(module, hooks[0], "weight_g", "weight_v")
    return None


def _weight_normed(module: nn.Module, norm: Any, length: str, direction: str) -> WeightNormed:
    """-1 is no dim to torch, and -2 the last but one."""
    dim = int(norm.dim)
    return WeightNormed(norm, length, direction, dim if dim >= -1 else dim + module.get_parameter(direction).dim())


def compute_weight(g: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    """g v / |v|, as both of torch's weight norms compute it; the operation has no public name (2.11 and 2.13)."""
    return torch._weight_norm(v, g, dim)


def collectives_begun(group: Any) -> int:
    """How many collectives this rank has begun in a group. Ranks that differ would meet each other's in the next one.
    torch's own debugging of desynchronised ranks compares it; there is no public name (2.11-2.13)."""
    return int(group._get_sequence_number_for_group())


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Profilers record nothing of what begins here, on this thread. For collectives that may end after the batch, and
    so after the profiler that was there when they began: the thread they end on writes when, to memory that is freed
    by then (seen: `malloc(): unsorted double linked list corrupted`). Always allowed again at the end, since it can't
    be asked whether it was before. No public name (2.11-2.13)."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def unscale_before_step(optimizer: Any) -> None:
    """Let a loss scaler unscale an optimizer's gradients, and look for inf and nan, before its step. Fused optimizers
    do it in their own kernels; a scaler, and Lightning, knows them by this private name (2.11-2.13)."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False


def open_dataclasses(*values: Any) -> None:
    """Let `tree_map` and `tree_leaves` look into the dataclasses of users among nested values, from now on: as blocks
    may hand them to each other. They are made anew without `__init__`, which may check what it is given, or make more
    of it."""
    while new := {type(x) for x in tree_leaves(values) if _is_closed_dataclass(x)}:
        for kind in new:
            register_pytree_node(kind, _entries_of, functools.partial(_with_entries, kind))


def _is_closed_dataclass(x: Any) -> bool:
    """Not opened yet: of what is registered, `tree_leaves` gives the entries."""
    of_library = package_of(type(x)) in ("torch", "transformers")
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and not of_library


def _entries_of(x: Any) -> tuple[list[Any], list[str]]:
    held = vars(x) if hasattr(x, "__dict__") else {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    return list(held.values()), list(held)


def _with_entries(kind: type, entries: Iterable[Any], names: Iterable[str]) -> Any:
    made: Any = object.__new__(kind)
    for name, entry in zip(names, entries, strict=True):
        object.__setattr__(made, name, entry)  # also of a frozen one
    return made
