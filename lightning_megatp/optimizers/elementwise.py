"""Is an optimizer element-wise? Only then does a step on shards equal the step on the whole parameter.

That is known of most of torch's own. Of others it is not guessed from names: a twin of the optimizer steps a tiny
parameter whole, another its halves, and the results are compared. AdamW and SGD agree to rounding; Adafactor, LAMB,
Muon, LBFGS, anything that takes a norm of a tensor, do not. Those that at least step each tensor by itself can be given
whole ones in turn (`whole_steps.py`), which is tried, too.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.optimizers.twin import Case, GradientMaker, NoVerdict, Twin, cases_of

STEPS = 12  # some preconditioners, and RAdam's rectification, only start after a few steps
TOLERANCE = 1e-5  # of the largest update in the same half: float64 leaves 1e-15, a float32 inside the optimizer 1e-7
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
        torch.optim.SGD,
    }
)  # fmt: skip
"""Those of torch that are so with all of their options, and need no trial, which takes tens of milliseconds. Classes
derived from them do."""
Run = TypeVar("Run")


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
    if type(optimizer) in ELEMENTWISE:
        return coupled
    for case in cases_of(optimizer, sharded):
        try:
            with _apart():
                dim = _by_a_twin(functools.partial(_coupled_dim, optimizer), case)
        except NoVerdict as reason:
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
    for case in cases_of(optimizer, coupled):
        try:
            with _apart():
                alike = _by_a_twin(functools.partial(_are_stepped_in_turns, optimizer), case)
            why = "it does not step each tensor by itself"
        except (NoVerdict, RuntimeError) as error:
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
    if type(optimizer) in ELEMENTWISE:
        return
    for case in cases_of(optimizer, None):
        try:
            with _apart():
                alike = _by_a_twin(functools.partial(_are_stepped_alone, optimizer), case)
        except NoVerdict as reason:
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
    if type(optimizer) in ELEMENTWISE:
        return False

    def differ(case: Case) -> bool:
        make_gradient, told = _dense_or_sparse(lambda make: _trajectory(optimizer, case, None, make))
        return not torch.equal(told, _trajectory(optimizer, case, None, make_gradient, tells_losses=False))

    for case in cases_of(optimizer, None)[:1]:  # of all its options alike
        with contextlib.suppress(NoVerdict), _apart():
            return _by_a_twin(differ, case)
    return False


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's optimizer has said it already
        yield


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def unwrap(optimizer: Any) -> Optimizer:
    """What Lightning has wrapped, or the optimizer itself."""
    # Lightning's wrapper makes a class per optimizer, in either of its namespaces: look for it among the bases.
    if any(base.__name__ == "LightningOptimizer" for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return cast(Optimizer, optimizer)


def _by_a_twin(verdict: Callable[[Case], Run], case: Case) -> Run:
    """A verdict by twins of the parameters tried alone. Some optimizers keep something for each of their parameters
    (a list of names) and fail with fewer: if there is none, by twins that have as many."""
    try:
        return verdict(case)
    except NoVerdict as reason:
        try:
            return verdict(case._replace(full=True))
        except NoVerdict:
            raise reason from None


def _coupled_dim(optimizer: Optimizer, case: Case) -> int | None:
    """The dim along which halves are stepped differently from the whole, None if there is none."""
    make_gradient, whole = _dense_or_sparse(lambda make: _trajectory(optimizer, case, None, make))
    if not whole.diff(dim=0).any():
        raise NoVerdict("the steps of a small twin changed nothing")
    for dim in range(len(case.shape)):
        halves = _trajectory(optimizer, case, dim, make_gradient)
        if not _agree(whole, halves, dim):
            again = _trajectory(optimizer, case, None, make_gradient, seed=1)
            if not _agree(whole, again, dim):
                raise NoVerdict("its steps draw random numbers")
            return dim
    return None


def _are_stepped_alone(optimizer: Optimizer, case: Case) -> bool:
    """Whether two tensors take the steps that each takes alone."""
    make_gradient, together = _dense_or_sparse(lambda make: _tensors(optimizer, case, (20, 21), make))
    alone = [_tensors(optimizer, case, (seed,), make_gradient)[0] for seed in (20, 21)]
    if _all_agree(together, alone):
        return True
    if not _all_agree(together, _tensors(optimizer, case, (20, 21), make_gradient)):
        raise NoVerdict("its steps draw random numbers")
    return False


def _are_stepped_in_turns(optimizer: Optimizer, case: Case) -> bool:
    """Whether two tensors take the same steps in turns as together."""
    together, apart = (_tensors(optimizer, case, (20, 21), in_turns=turns) for turns in (False, True))
    return _all_agree(together, apart)


def _dense_or_sparse(run: Callable[[GradientMaker], Run]) -> tuple[GradientMaker, Run]:
    """What an optimizer can be given."""
    errors = []
    for make_gradient in (Tensor.clone, _sparse):
        try:
            return make_gradient, run(make_gradient)
        except NoVerdict as error:
            errors.append(str(error))
    raise NoVerdict("; with sparse gradients: ".join(errors))


def _trajectory(
    optimizer: Optimizer,
    case: Case,
    dim: int | None,
    make_gradient: GradientMaker,
    seed: int = 0,
    tells_losses: bool = True,
) -> Tensor:
    """(steps + 1, *shape): a parameter as it is stepped whole (`dim` None), or as two halves along `dim`."""

    def pieces(x: Tensor) -> Sequence[Tensor]:
        return [x] if dim is None else x.chunk(2, dim)

    start, gradients = _drawn(case.shape, 20)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the devices, too
    twins = [Twin(optimizer, case, [piece]) for piece in pieces(start)]
    states = [start]
    for gradient in gradients:
        pairs = zip(twins, pieces(gradient), strict=True)
        stepped = [twin.step([x], make_gradient, tells_losses=tells_losses)[0] for twin, x in pairs]
        states.append(torch.cat(stepped, dim or 0))
    return torch.stack(states)


def _tensors(
    optimizer: Optimizer,
    case: Case,
    seeds: Sequence[int],
    make_gradient: GradientMaker = Tensor.clone,
    in_turns: bool = False,
) -> list[Tensor]:
    """A tensor for each seed, (steps + 1, *shape): parameters of one optimizer, stepped together, or in turns."""
    starts, gradients = zip(*(_drawn(case.shape, seed) for seed in seeds), strict=True)
    twin = Twin(optimizer, case, starts)
    states = [starts, *(twin.step(of_step, make_gradient, in_turns) for of_step in zip(*gradients, strict=True))]
    return [torch.stack(of_parameter) for of_parameter in zip(*states, strict=True)]


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
