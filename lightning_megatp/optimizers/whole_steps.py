"""Steps of optimizers that look at whole tensors (Muon, LAMB, Adafactor), of which a rank holds parts.

A few parameters at a time are gathered, with their gradients and states; every rank steps them alike, and keeps its
part. Between steps a rank holds what it holds with AdamW: states of a parameter's shape are cut as it is, others
(Adafactor's rows and columns) are the same on all ranks. Megatron-LM's Muon calls this mode "duplicated".
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.containers import parameters_of
from lightning_megatp.module import ParallelModule
from lightning_megatp.optimizers.elementwise import check_tensorwise, coupled_parameters, unwrap
from lightning_megatp.optimizers.turns import Turn, step_in_turns
from lightning_megatp.shim.torch import replace_step

TURN_BYTES = 64 << 20
"""Whole parameters of one turn, if that is more than one."""


class WholeSteps:
    """Lets `optimizer.step()` find whole tensors where the parts that this rank holds don't do.

    Args:
        parallel: the module. Its `stepped_whole` says of which parameters that is so.

    Communication: in each step of such an optimizer, for each parameter of which it looks at the whole, an all-gather
        over tp where that is split, and one over dp where it is divided (zero > 0), of itself, of its gradient, and of
        each state of its shape. Memory: meanwhile these whole, of `TURN_BYTES` of parameters at a time.
    """

    def __init__(self, parallel: ParallelModule) -> None:
        self._parallel = parallel
        self._tried: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many parameters it had."""
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        parallel.stepped_whole.clear()

    def prepare(self, optimizer: Any) -> None:
        """See whether an optimizer can step the parts that this rank holds; if not, let it find whole ones. Once, and
        again when it was given more parameters.

        Args:
            optimizer: torch's, or Lightning's wrapper around it.

        Raises:
            ValueError: it looks at more than one tensor at a time.
        """
        optimizer = unwrap(optimizer)
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._tried.get(optimizer) == size:
            return
        self._tried[optimizer] = size
        held = (p for _, p in self._parallel.named_held())
        coupled = coupled_parameters(optimizer, [p for p in held if _axes(self._parallel, p)])
        if not coupled:
            return
        check_tensorwise(optimizer, coupled.values())
        if optimizer not in self._replaced:
            self._replaced.add(optimizer)
            replace_step(optimizer, functools.partial(self._step, optimizer))
        self._parallel.stepped_whole.update(coupled)
        axes = sorted({axis for p in coupled.values() for axis in _axes(self._parallel, p)}, reverse=True)
        rank_zero_info(
            f"MegaTPStrategy: {type(optimizer).__name__} looks at whole tensors. In each of its steps {len(coupled)}"
            f" parameters ({sum(map(self._parallel.whole_size, coupled.values())):,} numbers), their gradients and"
            f" states are gathered over {' and '.join(axes)}."
        )

    def _step(self, optimizer: Optimizer, once: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        step_in_turns(optimizer, once, _turns(optimizer, self._parallel))
        return loss


def _axes(parallel: ParallelModule, parameter: Tensor) -> list[str]:
    """Over which a parameter is cut."""
    cut = {"tp": parallel.spec(parameter) is not None, "dp": id(parameter) in parallel.divided}
    return [axis for axis, is_cut in cut.items() if is_cut]


def _turns(optimizer: Optimizer, parallel: ParallelModule) -> list[Turn]:
    """First the parameters that are stepped as they are, then the others by their sizes, in the order of the groups."""
    as_they_are: list[Tensor] = []
    parts: list[list[Tensor]] = []
    room = 0
    for parameter in parameters_of(optimizer):
        if id(parameter) not in parallel.stepped_whole or parameter.grad is None:
            as_they_are.append(parameter)
            continue
        size = parameter.element_size() * parallel.whole_size(parameter)
        if size > room:
            parts.append([])
            room = TURN_BYTES
        room -= size
        parts[-1].append(parameter)
    first: list[Turn] = [(as_they_are, contextlib.nullcontext)] if as_they_are or not parts else []
    return [*first, *((part, functools.partial(_whole, optimizer, parallel, part)) for part in parts)]


@contextlib.contextmanager
def _whole(optimizer: Optimizer, parallel: ParallelModule, members: Sequence[Tensor]) -> Iterator[None]:
    """Meanwhile parameters, their gradients and states are whole."""
    held = [(p, p.data, p.grad, tuple(parallel.whole_shape(p))) for p in members]

    def gather(parameter: Tensor, part: Tensor) -> Tensor:
        return parallel.whole_value(parameter, part).to(part.device)

    for parameter, part, gradient, _ in held:
        parameter.grad = None  # it has to have the parameter's shape
        parameter.data = gather(parameter, part)
        parameter.grad = None if gradient is None else gather(parameter, gradient)
        state = optimizer.state.get(parameter, {})
        state.update({key: gather(parameter, x) for key, x in state.items() if _has_shape(x, part.shape)})
    try:
        yield
    finally:
        for parameter, part, gradient, shape in held:
            part.copy_(parallel.part_of(parameter, parameter.data))
            parameter.grad = None
            parameter.data, parameter.grad = part, gradient
            state = optimizer.state.get(parameter, {})
            for key, x in state.items():
                if _has_shape(x, shape):
                    state[key] = parallel.part_of(parameter, x)
                elif _has_shape(x, part.shape):
                    raise RuntimeError(
                        f"MegaTPStrategy: {type(optimizer).__name__} keeps a state `{key}` of"
                        f" `{parallel.name_of(id(parameter))}` with the shape {tuple(x.shape)}, which is that of a"
                        f" rank's part, while the parameter is {shape}: these can't be told apart. Use another"
                        " optimizer for this parameter, or keep it whole (leave its layer out of the plan, zero=0)."
                    )


def _has_shape(x: Any, shape: Sequence[int]) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and tuple(x.shape) == tuple(shape)
