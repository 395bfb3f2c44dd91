"""Is an optimizer element-wise? Only then does a step on shards equal the step on the whole parameter.

Not guessed from names: a twin of the optimizer steps a tiny parameter whole, another its halves, and the results are
compared. AdamW and SGD agree to rounding; Adafactor, LAMB, Muon, LBFGS, anything that takes a norm of a tensor, do not.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

STEPS = 12  # some preconditioners, and RAdam's rectification, only start after a few steps
TOLERANCE = 1e-5  # of the largest update in the same half: float64 leaves 1e-15, a float32 inside the optimizer 1e-7
GradientMaker = Callable[[Tensor], Tensor]


def check_elementwise(optimizer: Any, sharded: Iterable[Tensor] | None = None) -> None:
    """Raise if the optimizer's update couples the elements of a tensor. Costs some milliseconds, once.

    Neither the optimizer nor its state, its hooks or the random number generators are touched. Each distinct set of
    options among the parameter groups is tried, in float64 on the CPU, with `fused` and `capturable` off.

    Args:
        optimizer: a torch optimizer, or Lightning's wrapper around one.
        sharded: the parameters of which ranks hold shards; groups without any of them are not tried. All, if not given.

    Raises:
        ValueError: on halves of a parameter the optimizer does not do what it does on the whole one.

    Warns:
        UserWarning: no twin of the optimizer could be built or stepped, or its steps are random.

    Not seen: coupling that only sets in after a dozen steps, or only for tensors of more than 24 elements.
    """
    optimizer = _unwrap(optimizer)
    name = type(optimizer).__name__
    wanted = None if sharded is None else {id(parameter) for parameter in sharded}
    for shape, options in _cases(optimizer, wanted):
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user's optimizer has said it already
                coupled_dim = _coupled_dim(optimizer, options, shape)
        except _NoVerdict as reason:
            warnings.warn(
                f"MegaTPStrategy: could not check whether {name} is an element-wise optimizer: {reason}. If its update "
                "couples the elements of a tensor, as Adafactor's or LAMB's does, shards train differently from whole "
                "parameters.",
                stacklevel=2,
            )
            return
        if coupled_dim is not None:
            raise ValueError(
                f"MegaTPStrategy: {name} is not element-wise: it steps the halves of a {len(shape)}-dimensional "
                f"parameter (cut along dim {coupled_dim}) differently from the whole. Its update couples the elements "
                "of a tensor, so shards would silently train differently from one device. Use an element-wise "
                "optimizer such as AdamW, or tp=1, or keep this optimizer's parameters whole (leave their layers out "
                "of the plan)."
            )


class _NoVerdict(Exception):
    """The optimizer can't be tried; the message says why."""


def _unwrap(optimizer: Any) -> Optimizer:
    # Lightning's wrapper makes a class per optimizer, in either of its namespaces: look for it among the bases.
    if any(base.__name__ == "LightningOptimizer" for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return cast(Optimizer, optimizer)


def _cases(optimizer: Optimizer, wanted: set[int] | None) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The distinct (shape of a tiny parameter, options) among the parameter groups."""
    cases: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if wanted is None or id(p) in wanted]
        options = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        if options.get("lr") is not None:
            # A warm-up may start at a learning rate of 0, where every optimizer is element-wise.
            options["lr"] = max(options["lr"], options.get("initial_lr") or 0.0, 1e-3)
        for dims in sorted({min(p.dim(), 2) for p in parameters} - {0}, reverse=True):
            shape = (4, 6) if dims == 2 else (24,)
            cases.setdefault(f"{shape} {sorted(options.items())}", (shape, options))
    return list(cases.values())


def _coupled_dim(optimizer: Optimizer, options: dict[str, Any], shape: tuple[int, ...]) -> int | None:
    """The dim along which halves are stepped differently from the whole, None if there is none."""
    errors = []
    for make_gradient in (Tensor.clone, _sparse):
        try:
            whole = _trajectory(optimizer, options, shape, None, make_gradient)
            break
        except _NoVerdict as error:
            errors.append(str(error))
    else:
        raise _NoVerdict("; with sparse gradients: ".join(errors))
    if not whole.diff(dim=0).any():
        raise _NoVerdict("the steps of a small twin changed nothing")
    for dim in range(len(shape)):
        halves = _trajectory(optimizer, options, shape, dim, make_gradient)
        if not _agree(whole, halves, dim):
            again = _trajectory(optimizer, options, shape, None, make_gradient, seed=1)
            if not _agree(whole, again, dim):
                raise _NoVerdict("its steps draw random numbers")
            return dim
    return None


def _trajectory(
    optimizer: Optimizer,
    options: dict[str, Any],
    shape: tuple[int, ...],
    dim: int | None,
    make_gradient: GradientMaker,
    seed: int = 0,
) -> Tensor:
    """(steps + 1, *shape): a parameter as it is stepped whole (`dim` None), or as two halves along `dim`."""
    generator = torch.Generator().manual_seed(20)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = torch.randn((STEPS, *shape), generator=generator, dtype=torch.float64)
    # Unequal halves move any norm; scales from 1e-2 to 1e4 get across any threshold of clipping in between.
    gradients *= _unequal(shape) * torch.logspace(-2, 4, STEPS, dtype=torch.float64).view(-1, *(1,) * len(shape))

    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the devices, too
    pieces = [start] if dim is None else list(start.chunk(2, dim))
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    twins = [_twin(optimizer, options, parameter) for parameter in parameters]
    states = [start]
    for gradient in gradients:
        for twin, parameter, piece in zip(
            twins, parameters, [gradient] if dim is None else gradient.chunk(2, dim), strict=True
        ):
            parameter.grad = make_gradient(piece)
            _step(twin)
        values = [parameter.detach() for parameter in parameters]
        states.append(values[0].clone() if dim is None else torch.cat(values, dim))
    return torch.stack(states)


def _unequal(shape: tuple[int, ...]) -> Tensor:
    """Factors that make each half of each dim 30 times larger than the other."""
    factors = torch.ones(shape, dtype=torch.float64)
    for dim in range(len(shape)):
        factors.chunk(2, dim)[1].mul_(30.0)
    return factors


def _sparse(gradient: Tensor) -> Tensor:
    """As `nn.Embedding(sparse=True)` gives it: rows."""
    return gradient.to_sparse(1)


def _agree(whole: Tensor, halves: Tensor, dim: int) -> bool:
    """Equal updates in every step, each half measured by its own size."""
    for a, b in zip(whole.diff(dim=0).chunk(2, dim + 1), halves.diff(dim=0).chunk(2, dim + 1), strict=True):
        size = a.abs().flatten(1).amax(1)
        error = (a - b).abs().flatten(1).amax(1)
        rounding = 1e-12 * whole[:-1].flatten(1).abs().amax(1)
        # A trajectory that left the finite numbers says nothing from there on.
        if not bool(((error <= TOLERANCE * size + rounding) | ~size.isfinite()).all()):
            return False
    return True


def _twin(optimizer: Optimizer, options: dict[str, Any], parameter: Tensor) -> Optimizer:
    """An optimizer of the same class and options, of one parameter; by its constructor, else by its attributes."""
    errors = []
    for build in (_construct, _copy):
        try:
            return build(optimizer, options, parameter)
        except Exception as error:  # any class of any library: whatever it raises is the reason
            errors.append(f"{type(error).__name__}: {error}")
    raise _NoVerdict(f"no small twin of it could be built ({'; '.join(errors)})")


def _construct(optimizer: Optimizer, options: dict[str, Any], parameter: Tensor) -> Optimizer:
    signature = inspect.signature(type(optimizer)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    # An argument is kept in the group or, by convention, as an attribute of the same name.
    known = {**_attributes(optimizer), **options}
    chosen = {k: v for k, v in known.items() if k in signature or (takes_any and k in optimizer.defaults)}
    twin = type(optimizer)([parameter], **(chosen | _switched_off(chosen)))
    twin.__dict__.update(_attributes(optimizer))
    for group in twin.param_groups:
        group.update({key: value for key, value in options.items() if key not in group})  # options of this group only
    return twin


def _copy(optimizer: Optimizer, options: dict[str, Any], parameter: Tensor) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    strange = [key for key, value in _own_attributes(optimizer).items() if not _is_plain(value)]
    if strange:
        raise TypeError(f"its attributes {strange} can't be copied")
    twin.__dict__.update(_attributes(optimizer))
    Optimizer.__init__(twin, [{"params": [parameter], **options, **_switched_off(options)}], dict(optimizer.defaults))
    return twin


def _step(twin: Optimizer) -> None:
    try:
        closure = inspect.signature(type(twin).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            twin.step(lambda: 0.0)  # the gradients are there
        else:
            twin.step()
    except Exception as error:
        raise _NoVerdict(f"a step of a small twin failed ({type(error).__name__}: {error})") from error


def _switched_off(options: dict[str, Any]) -> dict[str, Any]:
    """Implementations that the CPU refuses or that need a graph; the mathematics is the same without."""
    return {key: False for key in ("fused", "capturable", "differentiable") if key in options}


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What the optimizer keeps outside its groups, but for torch's bookkeeping and methods patched on the instance."""
    torchs = Optimizer([torch.nn.Parameter(torch.zeros(1))], {}).__dict__
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key not in torchs and not callable(getattr(type(optimizer), key, None))
    }


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {key: _plain(value) for key, value in _own_attributes(optimizer).items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Numbers, text, functions, and containers of them: what a twin may hold without touching the original."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    if inspect.isfunction(value):
        return value.__closure__ is None  # a closure may hold the user's optimizer or parameters
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _plain(value: Any) -> Any:
    """A copy, with tensors of one number (a capturable learning rate) as numbers."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return tuple(map(_plain, value))  # betas
    return copy.deepcopy(value) if _is_plain(value) else value
