"""A tiny optimizer like a user's, with parameters of its own: what it does to these, the user's would do to its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_megatp.optimizers.turns import is_plain, own_attributes, plain, step_in_turns

GradientMaker = Callable[[Tensor], Tensor]
"""Puts a gradient into the form in which an optimizer takes it."""
_Group = tuple[list[Parameter], dict[str, Any]]
"""A group of an optimizer: its parameters, and options."""


class NoVerdict(Exception):
    """The optimizer can't be tried; the message says why."""


class Case(NamedTuple):
    """A shape of a tiny parameter, options of a group, and the parameters that it stands for."""

    shape: tuple[int, ...]
    options: dict[str, Any]
    parameters: list[Tensor]
    full: bool = False
    """Whether its twin has as many groups and parameters as the optimizer, the others without a gradient."""


def cases_of(optimizer: Optimizer, parameters: Iterable[Tensor] | None) -> list[Case]:
    """The distinct ones among the parameter groups.

    Args:
        parameters: which are of interest; all, if not given.
    """
    cases: dict[str, Case] = {}
    wanted = None if parameters is None else {id(parameter) for parameter in parameters}
    for group in optimizer.param_groups:
        members = [p for p in group["params"] if wanted is None or id(p) in wanted]
        options = _options(group)
        for dims in sorted({min(p.dim(), 2) for p in members} - {0}, reverse=True):
            shape = (4, 6) if dims == 2 else (24,)
            case = cases.setdefault(f"{shape} {sorted(options.items())}", Case(shape, options, []))
            case.parameters.extend(p for p in members if min(p.dim(), 2) == dims)
    return list(cases.values())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    if options.get("lr") is not None:
        # A warm-up may start at a learning rate of 0, where every optimizer is element-wise.
        options["lr"] = max(options["lr"], options.get("initial_lr") or 0.0, 1e-3)
    return options


class Twin:
    """An optimizer of the same class and options; by its constructor, else by its attributes.

    Args:
        optimizer: the user's.
        case: of that.
        starts: the values of its own parameters.

    Raises:
        NoVerdict: it can't be built.
    """

    def __init__(self, optimizer: Optimizer, case: Case, starts: Sequence[Tensor]) -> None:
        self._parameters = [Parameter(start.clone()) for start in starts]
        errors = []
        for build in (_construct, _copy):
            try:
                self._optimizer = build(optimizer, _groups(optimizer, case, self._parameters))
                return
            except Exception as error:  # any class of any library: whatever it raises is the reason
                errors.append(f"{type(error).__name__}: {error}")
        raise NoVerdict(f"no small twin of it could be built ({'; '.join(errors)})")

    def step(
        self,
        gradients: Sequence[Tensor],
        make_gradient: GradientMaker,
        in_turns: bool = False,
        tells_losses: bool = True,
    ) -> list[Tensor]:
        """Let the parameters take a step. Returns their values after it.

        Args:
            tells_losses: else a closure returns the same number each time.

        Raises:
            NoVerdict: it fails.
            RuntimeError: it can't be done in turns.
        """
        backward = _backward(self._parameters, gradients, make_gradient)
        if in_turns:
            turns = [([parameter], contextlib.nullcontext) for parameter in self._parameters]
            step_in_turns(self._optimizer, functools.partial(self._step, None), turns)
        else:
            self._step(backward, tells_losses)
        return [parameter.detach().clone() for parameter in self._parameters]

    def _step(self, backward: Callable[[], Tensor] | None, tells_losses: bool = True) -> None:
        """A call of the optimizer, with a closure where it needs one.

        Args:
            backward: for a closure, as Lightning gives one to each step.
        """

        def closure() -> Tensor:
            loss = torch.zeros(()) if backward is None else backward()
            return loss if tells_losses else torch.zeros(())

        try:
            argument = inspect.signature(type(self._optimizer).step).parameters.get("closure")
            needed = argument is not None and argument.default is inspect.Parameter.empty
            if needed or (argument is not None and backward is not None):
                self._optimizer.step(closure)  # type: ignore[arg-type]
            else:
                self._optimizer.step()
        except Exception as error:
            why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line  # of an `assert`, itself
            raise NoVerdict(f"a step of a small twin failed ({type(error).__name__}: {why})") from error


def _groups(optimizer: Optimizer, case: Case, parameters: list[Parameter]) -> list[_Group]:
    """The groups of a twin, the one with `parameters` among them: members, and options."""
    if not case.full:
        return [(parameters, case.options)]
    groups = []
    for group in optimizer.param_groups:
        members = parameters if any(p is case.parameters[0] for p in group["params"]) else []
        others = range(len(group["params"]) - len(members))
        fillers = [Parameter(torch.zeros(1, dtype=torch.float64)) for _ in others]
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
