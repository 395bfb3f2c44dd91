"""Is an optimizer element-wise? Only then does a step on shards equal the step on the whole parameter.

Not guessed from names: a twin of the optimizer steps a tiny parameter whole, another its halves, and the results are
compared. AdamW and SGD agree to rounding; Adafactor, LAMB, Muon, LBFGS, anything that takes a norm of a tensor, do not.
Those that at least step each tensor by itself can be given whole ones in turn (`whole_steps.py`), which is tried, too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.optimizers.turns import is_plain, own_attributes, plain, step_in_turns

STEPS = 12  # some preconditioners, and RAdam's rectification, only start after a few steps
TOLERANCE = 1e-5  # of the largest update in the same half: float64 leaves 1e-15, a float32 inside the optimizer 1e-7
GradientMaker = Callable[[Tensor], Tensor]
Run = TypeVar("Run")
_Group = tuple[list[torch.nn.Parameter], dict[str, Any]]
"""A group of an optimizer: its parameters, and options."""


def coupled_parameters(optimizer: Any, sharded: Iterable[Tensor] | None = None) -> dict[int, Tensor]:
    """The parameters of which the optimizer's update couples the elements. Costs some milliseconds, once.

    Neither the optimizer nor its state, its hooks or the random number generators are touched. Each distinct set of
    options among the parameter groups is tried, in float64 on the CPU, with `fused` and `capturable` off.

    Args:
        optimizer: a torch optimizer, or Lightning's wrapper around one.
        sharded: the parameters of which ranks hold shards; groups without any of them are not tried. All, if not given.

    Returns:
        id -> parameter, of `sharded` alone.

    Warns:
        UserWarning: no twin of the optimizer could be built or stepped, or its steps are random.

    Not seen: coupling that only sets in after a dozen steps, or only for tensors of more than 24 elements.
    """
    optimizer = unwrap(optimizer)
    coupled: dict[int, Tensor] = {}
    for case in _cases(optimizer, sharded):
        try:
            with _apart():
                dim = _by_a_twin(functools.partial(_coupled_dim, optimizer), case)
        except _NoVerdict as reason:
            warnings.warn(
                f"MegaTPStrategy: could not check whether {_name(optimizer)} is an element-wise optimizer: {reason}. If"
                " its update couples the elements of a tensor, as Adafactor's or LAMB's does, shards train differently"
                " from whole parameters.",
                stacklevel=2,
            )
            break
        if dim is not None:
            coupled.update((id(p), p) for p in case.parameters)
    return coupled


def check_tensorwise(optimizer: Any, coupled: Iterable[Tensor]) -> None:
    """Raise if the optimizer can't step its tensors in turns (`step_in_turns`).

    Args:
        coupled: parameters that it would.

    Raises:
        ValueError: in turns it does something else than in one step, or that couldn't be tried.
    """
    optimizer = unwrap(optimizer)
    for case in _cases(optimizer, coupled):
        try:
            with _apart():
                alike = _by_a_twin(functools.partial(_are_stepped_in_turns, optimizer), case)
            why = "it does not step each tensor by itself"
        except (_NoVerdict, RuntimeError) as error:
            why, alike = str(error), False
        if not alike:
            raise ValueError(
                f"MegaTPStrategy: {_name(optimizer)} is not element-wise: its update couples the elements of a tensor,"
                f" of which ranks hold parts, and it can't be given whole tensors in turn: {why}. Use an element-wise"
                " optimizer such as AdamW, or keep this optimizer's parameters whole (tp=1 or their layers out of the"
                " plan, and zero=0)."
            )


def check_one_step(optimizer: Any) -> None:
    """Raise if an optimizer is used by more than its `step`: of what it does there nothing can be tried.

    Raises:
        ValueError: it has `first_step` and `second_step`, as sharpness-aware minimization does.
    """
    optimizer = unwrap(optimizer)
    if all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step")):
        raise ValueError(
            f"MegaTPStrategy: {_name(optimizer)} moves weights in `first_step` by a norm of the whole gradient, of"
            " which each rank holds a part: with tp > 1, pp > 1 or zero > 0 it would train differently from one device."
            " Use copies of the whole model (dp alone, zero=0), or another optimizer."
        )


def check_by_tensor(optimizer: Any, pp: int) -> None:
    """Raise if what an optimizer does to a tensor depends on others, of which each pipeline stage holds its own.

    Raises:
        ValueError: two tensors are stepped otherwise than each of them alone.

    Warns:
        UserWarning: that couldn't be tried, or its steps are random.
    """
    optimizer = unwrap(optimizer)
    for case in _cases(optimizer, None):
        try:
            with _apart():
                alike = _by_a_twin(functools.partial(_are_stepped_alone, optimizer), case)
        except _NoVerdict as reason:
            warnings.warn(
                f"MegaTPStrategy: could not check whether {_name(optimizer)} steps each tensor by itself: {reason}. If"
                " its update depends on all of them (a norm of the whole gradient, an estimate of the rate), it trains"
                f" differently from one device, since each of pp={pp} stages holds its own.",
                stacklevel=2,
            )
            break
        if not alike:
            raise ValueError(
                f"MegaTPStrategy: {_name(optimizer)} does not step each tensor by itself: what it does to one depends"
                f" on the others (a norm of the whole gradient, an estimate of the rate), and each of pp={pp} stages"
                " holds its own. Use another optimizer, such as AdamW, or pp=1; to clip, take gradient_clip_val."
            )


def reads_losses(optimizer: Any) -> bool:
    """Whether an optimizer's steps depend on what the closure returns: it searches along a line, or is done early where
    the loss hardly changes. What can't be tried does not. Costs some milliseconds."""
    optimizer = unwrap(optimizer)

    def differ(case: _Case) -> bool:
        make_gradient, told = _dense_or_sparse(lambda make: _trajectory(optimizer, case, None, make))
        return not torch.equal(told, _trajectory(optimizer, case, None, make_gradient, tells_losses=False))

    for case in _cases(optimizer, None)[:1]:  # of all its options alike
        with contextlib.suppress(_NoVerdict), _apart():
            return _by_a_twin(differ, case)
    return False


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's optimizer has said it already
        yield


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


class _NoVerdict(Exception):
    """The optimizer can't be tried; the message says why."""


def unwrap(optimizer: Any) -> Optimizer:
    """What Lightning has wrapped, or the optimizer itself."""
    # Lightning's wrapper makes a class per optimizer, in either of its namespaces: look for it among the bases.
    if any(base.__name__ == "LightningOptimizer" for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return cast(Optimizer, optimizer)


class _Case(NamedTuple):
    """A shape of a tiny parameter, options of a group, and the parameters that it stands for."""

    shape: tuple[int, ...]
    options: dict[str, Any]
    parameters: list[Tensor]
    full: bool = False
    """Whether its twin has as many groups and parameters as the optimizer, the others without a gradient."""


def _cases(optimizer: Optimizer, sharded: Iterable[Tensor] | None) -> list[_Case]:
    """The distinct ones among the parameter groups."""
    cases: dict[str, _Case] = {}
    wanted = None if sharded is None else {id(parameter) for parameter in sharded}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if wanted is None or id(p) in wanted]
        options = _options(group)
        for dims in sorted({min(p.dim(), 2) for p in parameters} - {0}, reverse=True):
            shape = (4, 6) if dims == 2 else (24,)
            case = cases.setdefault(f"{shape} {sorted(options.items())}", _Case(shape, options, []))
            case.parameters.extend(p for p in parameters if min(p.dim(), 2) == dims)
    return list(cases.values())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    if options.get("lr") is not None:
        # A warm-up may start at a learning rate of 0, where every optimizer is element-wise.
        options["lr"] = max(options["lr"], options.get("initial_lr") or 0.0, 1e-3)
    return options


def _by_a_twin(verdict: Callable[[_Case], Run], case: _Case) -> Run:
    """A verdict by twins of the parameters tried alone. Some optimizers keep something for each of their parameters
    (a list of names) and fail with fewer: if there is none, by twins that have as many."""
    try:
        return verdict(case)
    except _NoVerdict as reason:
        try:
            return verdict(case._replace(full=True))
        except _NoVerdict:
            raise reason from None


def _coupled_dim(optimizer: Optimizer, case: _Case) -> int | None:
    """The dim along which halves are stepped differently from the whole, None if there is none."""
    make_gradient, whole = _dense_or_sparse(lambda make: _trajectory(optimizer, case, None, make))
    if not whole.diff(dim=0).any():
        raise _NoVerdict("the steps of a small twin changed nothing")
    for dim in range(len(case.shape)):
        halves = _trajectory(optimizer, case, dim, make_gradient)
        if not _agree(whole, halves, dim):
            again = _trajectory(optimizer, case, None, make_gradient, seed=1)
            if not _agree(whole, again, dim):
                raise _NoVerdict("its steps draw random numbers")
            return dim
    return None


def _are_stepped_alone(optimizer: Optimizer, case: _Case) -> bool:
    """Whether two tensors take the steps that each takes alone."""
    make_gradient, together = _dense_or_sparse(lambda make: _tensors(optimizer, case, (20, 21), make))
    alone = [_tensors(optimizer, case, (seed,), make_gradient)[0] for seed in (20, 21)]
    if _all_agree(together, alone):
        return True
    if not _all_agree(together, _tensors(optimizer, case, (20, 21), make_gradient)):
        raise _NoVerdict("its steps draw random numbers")
    return False


def _are_stepped_in_turns(optimizer: Optimizer, case: _Case) -> bool:
    """Whether two tensors take the same steps in turns as together."""
    together, apart = (_tensors(optimizer, case, (20, 21), in_turns=turns) for turns in (False, True))
    return _all_agree(together, apart)


def _dense_or_sparse(run: Callable[[GradientMaker], Run]) -> tuple[GradientMaker, Run]:
    """What an optimizer can be given."""
    errors = []
    for make_gradient in (Tensor.clone, _sparse):
        try:
            return make_gradient, run(make_gradient)
        except _NoVerdict as error:
            errors.append(str(error))
    raise _NoVerdict("; with sparse gradients: ".join(errors))


def _trajectory(
    optimizer: Optimizer,
    case: _Case,
    dim: int | None,
    make_gradient: GradientMaker,
    seed: int = 0,
    tells_losses: bool = True,
) -> Tensor:
    """(steps + 1, *shape): a parameter as it is stepped whole (`dim` None), or as two halves along `dim`."""
    start, gradients = _drawn(case.shape, 20)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the devices, too
    pieces = [start] if dim is None else list(start.chunk(2, dim))
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    twins = [_twin(optimizer, case, [parameter]) for parameter in parameters]
    states = [start]
    for gradient in gradients:
        for twin, parameter, piece in zip(
            twins, parameters, [gradient] if dim is None else gradient.chunk(2, dim), strict=True
        ):
            _step(twin, _backward([parameter], [piece], make_gradient), tells_losses)
        values = [parameter.detach() for parameter in parameters]
        states.append(values[0].clone() if dim is None else torch.cat(values, dim))
    return torch.stack(states)


def _tensors(
    optimizer: Optimizer,
    case: _Case,
    seeds: Sequence[int],
    make_gradient: GradientMaker = Tensor.clone,
    in_turns: bool = False,
) -> list[Tensor]:
    """A tensor for each seed, (steps + 1, *shape): parameters of one optimizer, stepped together, or in turns."""
    starts, gradients = zip(*(_drawn(case.shape, seed) for seed in seeds), strict=True)
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    twin = _twin(optimizer, case, parameters)
    states = [[start] for start in starts]
    for step in range(STEPS):
        again = _backward(parameters, [of_parameter[step] for of_parameter in gradients], make_gradient)
        if in_turns:
            step_in_turns(twin, functools.partial(_step, twin), [([p], contextlib.nullcontext) for p in parameters])
        else:
            _step(twin, again)
        for parameter, of_parameter in zip(parameters, states, strict=True):
            of_parameter.append(parameter.detach().clone())
    return [torch.stack(of_parameter) for of_parameter in states]


def _drawn(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """A parameter, and (steps, *shape) gradients."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(shape, generator=generator, dtype=torch.float64)
    gradients = torch.randn((STEPS, *shape), generator=generator, dtype=torch.float64)
    # Unequal halves move any norm; scales from 1e-2 to 1e4 get across any threshold of clipping in between.
    scales = torch.logspace(-2, 4, STEPS, dtype=torch.float64).view(-1, *(1,) * len(shape))
    return start, gradients * (_unequal(shape) * scales)


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


def _all_agree(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(_agree(a, b, 0) for a, b in zip(some, others, strict=True))


def _twin(optimizer: Optimizer, case: _Case, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and options; by its constructor, else by its attributes."""
    errors = []
    for build in (_construct, _copy):
        try:
            return build(optimizer, _groups(optimizer, case, parameters))
        except Exception as error:  # any class of any library: whatever it raises is the reason
            errors.append(f"{type(error).__name__}: {error}")
    raise _NoVerdict(f"no small twin of it could be built ({'; '.join(errors)})")


def _groups(optimizer: Optimizer, case: _Case, parameters: list[torch.nn.Parameter]) -> list[_Group]:
    """The groups of a twin, the one with `parameters` among them: members, and options."""
    if not case.full:
        return [(parameters, case.options)]
    groups = []
    for group in optimizer.param_groups:
        members = parameters if any(p is case.parameters[0] for p in group["params"]) else []
        others = range(len(group["params"]) - len(members))
        fillers = [torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in others]
        groups.append(([*members, *fillers], _options(group)))
    return groups


def _construct(optimizer: Optimizer, groups: list[_Group]) -> Optimizer:
    signature = inspect.signature(type(optimizer)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    # An argument is kept in the group or, by convention, as an attribute of the same name.
    known = {**_attributes(optimizer), **groups[0][1]}
    chosen = {k: v for k, v in known.items() if k in signature or (takes_any and k in optimizer.defaults)}
    members = groups[0][0] if len(groups) == 1 else [{"params": own} for own, _ in groups]
    twin = type(optimizer)(members, **(chosen | _switched_off(chosen)))
    twin.__dict__.update(_attributes(optimizer))
    for group, (_, options) in zip(twin.param_groups, groups, strict=True):
        group.update(options | _switched_off(options))  # what a group has beside what the constructor takes
    return twin


def _copy(optimizer: Optimizer, groups: list[_Group]) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    strange = [key for key, value in own_attributes(optimizer).items() if not is_plain(value)]
    if strange:
        raise TypeError(f"its attributes {strange} can't be copied")
    twin.__dict__.update(_attributes(optimizer))
    Optimizer.__init__(
        twin,
        [{"params": own, **options, **_switched_off(options)} for own, options in groups],
        dict(optimizer.defaults),
    )
    return twin


def _step(twin: Optimizer, backward: Callable[[], Tensor] | None = None, tells_losses: bool = True) -> None:
    """Let a twin step, with a closure where it needs one.

    Args:
        backward: for a closure, as Lightning gives one to each step.
        tells_losses: else the closure returns the same number each time.
    """

    def closure() -> Tensor:
        loss = torch.zeros(()) if backward is None else backward()
        return loss if tells_losses else torch.zeros(())

    try:
        argument = inspect.signature(type(twin).step).parameters.get("closure")
        needed = argument is not None and argument.default is inspect.Parameter.empty
        if needed or (argument is not None and backward is not None):
            twin.step(closure)  # type: ignore[arg-type]
        else:
            twin.step()
    except Exception as error:
        why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # of an `assert`, itself
        raise _NoVerdict(f"a step of a small twin failed ({type(error).__name__}: {why})") from error


def _backward(
    parameters: Sequence[Tensor], drawn: Sequence[Tensor], make_gradient: GradientMaker
) -> Callable[[], Tensor]:
    """Gives parameters their gradients. Called again, as by a closure, it does so where the optimizer has cleared them
    or gone elsewhere, where gradients are others. What it has clipped it may find again: a closure may do nothing. It
    returns a loss that has these gradients, which a search along a line looks at."""
    before = [parameter.detach().clone() for parameter in parameters]

    def again() -> Tensor:
        loss = torch.ones((), dtype=torch.float64)
        for parameter, gradient, start in zip(parameters, drawn, before, strict=True):
            moved = parameter.detach() - start
            cleared = parameter.grad is None or not (parameter.grad.is_sparse or parameter.grad.any())
            if cleared or moved.any():
                parameter.grad = make_gradient(gradient + moved)
            loss += ((gradient + moved / 2) * moved).sum()
        return loss

    for parameter in parameters:
        parameter.grad = None
    again()
    return again


def _switched_off(options: dict[str, Any]) -> dict[str, Any]:
    """Implementations that the CPU refuses or that need a graph; the mathematics is the same without."""
    return {key: False for key in ("fused", "capturable", "differentiable") if key in options}


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {key: plain(value) for key, value in own_attributes(optimizer).items() if is_plain(value)}
