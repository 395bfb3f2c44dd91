"""Private names of torch's autograd. Seen in 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch.autograd import forward_ad

from lightning_megatp.detour import look_up_late
from lightning_megatp.origins import is_torchs
from lightning_megatp.shim.standing import Handle, Standing


def accumulated_parameter(node: Any) -> Tensor | None:
    """The leaf an AccumulateGrad node adds to, None for other nodes. `variable` has no public name (2.13)."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) else None


def accumulates_into(leaf: Tensor) -> bool:
    """Whether the backward that runs on this thread adds to the `.grad` of a leaf. False in `autograd.grad`, where the
    engine refuses to answer, and where `backward(inputs=...)` leaves it out. No public name (2.11-2.13)."""
    try:
        return _is_reached(leaf)
    except RuntimeError:
        return False


def wants_gradient(x: Tensor) -> bool:
    """Whether the backward that runs on this thread may ask for the gradient of a tensor. Where it keeps the graph, for
    others to come, the engine is asked; a last one is taken to want all, since asking takes 10 us. Of a leaf that
    `autograd.grad` wants, the engine refuses to tell. No public names (2.11-2.13)."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        return True
    try:
        return _is_reached(x)
    except RuntimeError:
        return True


def _is_reached(x: Tensor) -> bool:
    node: Any = torch.autograd.graph.get_gradient_edge(x).node
    return bool(torch._C._will_engine_execute_node(node))


def backward_id() -> int:
    """Which backward runs on this thread, -1 for none. No public name (2.11-2.13)."""
    return int(torch._C._current_graph_task_id())


def gradient_hooks(leaf: Tensor, but: type) -> bool:
    """Whether somebody registered a hook on the gradient of a leaf; no public name (2.11-2.13). Both kinds are called,
    with None, where a backward leaves the gradient undefined.

    Args:
        but: hooks of this class do not count.
    """
    held = (tensor_hooks(leaf), accumulation_hooks(leaf))
    return any(not isinstance(hook, but) for hooks in held for hook in hooks.values())


def tensor_hooks(x: Tensor) -> dict[int, Any]:
    """A tensor's hooks of `register_hook`, which of a leaf may be replaced there; no public name (2.11-2.13)."""
    return x._backward_hooks or {}


def hooks_held(leaf: Tensor) -> Any:
    """What a tensor holds hooks of `register_hook` in, and `handle.remove()` takes them out of; None before the
    first."""
    return leaf._backward_hooks


def hold_hooks(leaf: Tensor, held: Any) -> None:
    """Let a leaf call what another one holds, from now on."""
    leaf._backward_hooks = held


def accumulation_hooks(leaf: Tensor) -> dict[int, Any]:
    """A leaf's hooks of `register_post_accumulate_grad_hook`, which may be replaced there; no public name
    (2.11-2.13)."""
    return leaf._post_accumulate_grad_hooks or {}


def current_backward_node() -> object:
    """The autograd node whose backward runs on this thread, None outside of backward. No public name (2.11-2.13)."""
    return torch._C._current_autograd_node()


class DirectFunction(torch.autograd.Function):
    """A `torch.autograd.Function` whose `apply` goes straight to the engine, without the look at every argument that
    torch.func needs, and which is refused inside of its transforms. For those without `setup_context` and without
    keyword arguments (2.11-2.13)."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call it.

        Raises:
            RuntimeError: a transform is active.
        """
        if transforms_are_active():
            raise RuntimeError(
                "MegaTPStrategy: a layer that the plan splits, or a tensor of which each tensor rank holds a part, is"
                " used under torch.func (vmap, grad, jvp, ...) or torch.autograd.forward_ad, which can't follow what"
                " the ranks send each other."
                " Leave the layers that it runs out of the plan."
            )
        return super().apply(*args) if _functions.by_all else _function_apply(None, cls)(*args)


_function_apply = torch._C._FunctionBase.__dict__["apply"].__get__

APPLY_IS_PYTHON = inspect.ismethod(torch.autograd.Function.apply)
"""Whether `Function.apply` is Python code (2.11-2.13), not the engine's own (2.14)."""

_function_base: Any = torch.autograd.function._SingleLevelFunction if APPLY_IS_PYTHON else torch.autograd.Function
"""Whose `apply` is replaced by `handle_functions`."""


class _Functions(Standing):
    """Who stands for the calls of functions."""

    by_all = False
    """Whether somebody stands for calls of a DirectFunction, too."""


_functions = _Functions()


@functools.cache
def _ask_always() -> None:
    """Ask `_functions` in all calls, for good."""
    apply = _function_base.__dict__.get("apply", torch._C._FunctionBase.__dict__["apply"])
    script = torch.jit.ScriptFunction.__call__
    _function_base.apply = classmethod(
        lambda cls, *args, **kwargs: _functions.call(cls, apply.__get__(None, cls), args, kwargs)
    )
    torch.jit.ScriptFunction.__call__ = lambda self, *args, **kwargs: _functions.call(  # type: ignore[method-assign]
        self, script.__get__(self), args, kwargs
    )


@contextlib.contextmanager
def handle_functions(handle: Handle, others_only: bool = False) -> Iterator[None]:
    """Let `handle(function, apply, args, kwargs)` stand for every `torch.autograd.Function.apply` (with `others_only`:
    of no DirectFunction), and for every call of a function that torch.jit made: neither asks `__torch_function__`, nor
    a TorchFunctionMode. `function` is the class, or what torch.jit made.

    `gelu = GeluFunction.apply` in a model file binds `Function.apply` before anything can replace it. In 2.11-2.13 that
    method calls its base class's, which is replaced here. In 2.14 it is one with the engine's own: `unbind_functions`.
    Contexts may be nested: the inner one is asked first. They hold in all threads, as backward has its own.
    """
    _ask_always()
    before, _functions.by_all = _functions.by_all, _functions.by_all or not others_only
    try:
        with _functions.by(handle):
            yield
    finally:
        _functions.by_all = before


def unbind_functions() -> None:
    """Let `gelu = GeluFunction.apply`, wherever a program keeps it, look `apply` up when it is called, or in 2.14
    `handle_functions` would not be asked."""
    if not APPLY_IS_PYTHON:
        look_up_late([x for x in gc.get_objects() if type(x) is types.BuiltinMethodType and _is_users_apply(x)])


def _is_users_apply(method: Any) -> bool:
    function = method.__self__
    is_apply = method.__name__ == "apply" and isinstance(function, type(torch.autograd.Function))
    return is_apply and not is_torchs(function)


def is_scripted(function: Any) -> bool:
    """Whether it is a function that `torch.jit.script` or `torch.jit.trace` made."""
    return isinstance(function, torch.jit.ScriptFunction)


def function_name(function: Any) -> str:
    """The name of a `torch.autograd.Function`, or of a function that torch.jit made."""
    return str(function.name if is_scripted(function) else function.__name__)


Engine = Callable[[Sequence[Any]], Sequence[Any]]
"""Gradients with respect to inputs."""


@contextlib.contextmanager
def handle_grad(
    handle: Callable[[Sequence[Any], Sequence[Any], bool, Engine], Sequence[Any]],
    leaf: Callable[[Any], Any],
    nested: Callable[[Sequence[Tensor]], None],
) -> Iterator[None]:
    """Let `handle(outputs, inputs, create_graph, engine)` stand for the engine in `torch.autograd.grad`, whatever name
    that is called by. `backward(inputs=...)` adds to `leaf(x)` in place of x. A backward inside of another, by an
    autograd function that makes a graph in it, is announced by `nested(outputs)`. No public name (2.11-2.13)."""
    original = torch.autograd._engine_run_backward

    def run(outputs: Any, given: Any, keep: Any, create: bool, inputs: Any, *rest: Any, **options: Any) -> Any:
        def engine(inputs: Sequence[Any]) -> Sequence[Any]:
            return original(outputs, given, keep, create, inputs, *rest, **options)

        if not options.get("accumulate_grad", True):
            return handle(outputs, inputs, create, engine)
        if backward_id() != -1:
            nested(outputs)
        return engine(tuple(map(leaf, inputs)))

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original


Keep = Callable[[Callable[..., Any], tuple[Any, ...]], Iterator[None]]
"""What surrounds a non-reentrant checkpoint's run of a function with arguments, and runs it again in backward."""


@contextlib.contextmanager
def _around_checkpoints(
    around: Callable[[Keep, Callable[..., Any], tuple[Any, ...]], Iterator[None]],
) -> Iterator[None]:
    """Let `around(keep, function, args)` stand for what surrounds each activation checkpoint (use_reentrant=False), in
    all threads. The generator that does it takes (function, five settings, args) in 2.11-2.13, and (function, args,
    keyword arguments) in 2.14."""
    import torch.utils.checkpoint as checkpoints

    name = "_checkpoint_without_reentrant_generator"
    apart = hasattr(checkpoints, f"{name}_impl")
    name = f"{name}_impl" if apart else name
    original = getattr(checkpoints, name)

    def of_tuples(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any) -> Iterator[None]:
        return around(lambda run, given: original(run, given, kwargs, **settings), function, args)

    def of_all(function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        return around(lambda run, given: original(run, *rest[:5], *given, **kwargs), function, rest[5:])

    setattr(checkpoints, name, of_tuples if apart else of_all)
    try:
        yield
    finally:
        setattr(checkpoints, name, original)


def handle_checkpoints(
    unwrap: Callable[[Any], tuple[Any, Callable[[Any], Any] | None]],
) -> contextlib.AbstractContextManager[None]:
    """Let the user's non-reentrant checkpoints keep other tensors than they are called with.

    They keep their arguments as saved tensors. Inside of another checkpoint, or of other saved-tensor hooks, these come
    back as plain tensors, whatever subclass they were.

    Args:
        unwrap: from an argument to what is kept of it, and to what makes an argument of that again (None: the same).
    """

    def around(keep: Keep, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        unwrapped = [unwrap(x) for x in args]
        wraps = [wrap for _, wrap in unwrapped]

        def again(*args: Any, **named: Any) -> Any:
            args = tuple(x if wrap is None else wrap(x) for x, wrap in zip(args, wraps, strict=True))
            return function(*args, **named)

        return keep(again if any(wraps) else function, tuple(kept for kept, _ in unwrapped))

    return _around_checkpoints(around)


@contextlib.contextmanager
def checkpoints_ended() -> Iterator[None]:
    """On leaving, be outside of all activation checkpoints (use_reentrant=False) that were entered meanwhile. Where an
    error left them, their saved-tensor hooks stay in torch 2.11 until the error is collected; 2.13 ends them itself."""
    entered: list[Any] = []

    def around(keep: Keep, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        entered.append(keep(function, args))
        return entered[-1]

    try:
        with _around_checkpoints(around):
            yield
    finally:
        for each in reversed(entered):
            each.close()


def without_checkpoints(note: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[None]:
    """Activation checkpoints (use_reentrant=False) keep everything, in all threads: backward runs nothing again.

    Args:
        note: is called for each.
    """

    def around(keep: Keep, function: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
        if note is not None:
            note()
        yield

    return _around_checkpoints(around)


def functorch_is_active() -> bool:
    """Whether this is inside torch.func's grad, vmap, jvp, ...; no public name (2.13)."""
    return bool(torch._C._are_functorch_transforms_active())


def generator_bytes(generator: torch.Generator) -> bytes:
    """Where a generator is. Inside of torch.func's transforms the tensor that says so would be one of theirs, without
    memory; what keeps them out has no public name (2.11-2.13)."""
    with torch._C._DisableFuncTorch():
        return bytes(generator.get_state().numpy())


@contextlib.contextmanager
def handle_transforms(
    handle: Callable[[str, Callable[..., Any], Any], tuple[Callable[..., Any], Any]],
) -> Iterator[None]:
    """Let torch.func's transforms (vmap, grad, vjp, jvp, and what is made of them) take the function and the arguments
    that `handle(name, function, arguments)` returns. They look into tensors below `__torch_function__`, which is not
    asked, and the functions that do it have no public names (2.11-2.13)."""
    places = (
        (apis, "vmap_impl"),
        (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "_vjp_with_argnums"),
        (eager_transforms, "_jvp_with_argnums"),
    )
    originals = [getattr(module, name) for module, name in places]

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            function, (args, kwargs) = handle(name, function, (args, kwargs))
            return original(function, *args, **kwargs)

        return call

    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, replaced(name.split("_")[0] or name.split("_")[1], original))
    try:
        yield
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def is_transformed(x: Tensor) -> bool:
    """Whether it is one of torch.func's, around another; no public name (2.11-2.13)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def untransformed(x: Tensor) -> Tensor:
    """The tensor that torch.func hides in one that a function under `vmap` gets; no public name (2.11-2.13)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def forward_mode_is_active() -> bool:
    """Whether this is inside `torch.autograd.forward_ad.dual_level`; no public name (2.11-2.13)."""
    return forward_ad._current_level >= 0


def transforms_are_active() -> bool:
    """Whether this is inside torch.func's transforms, or of forward-mode differentiation by hand."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def checkpoint_region() -> object | None:
    """The innermost activation-checkpointing region (use_reentrant=False) whose forward runs now, as an object that is
    the same for all of it. Such a region is known by its saved-tensor hooks (2.11-2.13)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks and hooks[0].__module__ == "torch.utils.checkpoint" else None
