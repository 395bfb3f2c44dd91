"""Optimizers' states, as hooks find them where parameters are divided over data-parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class StatesByParameter(MutableMapping[Any, Any]):
    """States that an optimizer keeps by the plain rows that it steps, found by the module's parameters, too.

    Args:
        states: the optimizer's.
        held: the rows of a parameter.
    """

    def __init__(self, states: Any, held: Callable[[Tensor], Tensor]) -> None:
        self.states, self._held = states, held

    def __getitem__(self, parameter: Any) -> Any:
        return self.states[self._held(parameter)]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self.states[self._held(parameter)] = state

    def __delitem__(self, parameter: Any) -> None:
        del self.states[self._held(parameter)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.states)

    def __len__(self) -> int:
        return len(self.states)

    # A `defaultdict` makes what it is asked for by `[]`, and by nothing else.

    def __contains__(self, parameter: Any) -> bool:
        return self._held(parameter) in self.states

    def get(self, parameter: Any, default: Any = None) -> Any:
        return self.states.get(self._held(parameter), default)

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        return self.states.setdefault(self._held(parameter), default)

    def pop(self, parameter: Any, *default: Any) -> Any:
        return self.states.pop(self._held(parameter), *default)

    def __reduce__(self) -> Any:
        """A copy is of the states alone."""
        return self.states.__reduce__()


@contextlib.contextmanager
def states_by_parameter(optimizers: Iterable[Optimizer], held: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Meanwhile `optimizer.state[p]` is that of this rank's rows of a parameter of the module."""
    shown: list[tuple[Any, StatesByParameter]] = []
    for optimizer in optimizers:
        if not isinstance(optimizer.state, StatesByParameter):  # as within another hook
            states = StatesByParameter(optimizer.state, held)
            optimizer.state = states  # type: ignore[assignment]
            shown.append((optimizer, states))
    try:
        yield
    finally:
        for optimizer, states in shown:
            if optimizer.state is states:
                optimizer.state = states.states
            else:  # which the hook has made anew
                for parameter in [p for p in optimizer.state if held(p) is not p]:
                    optimizer.state[held(parameter)] = optimizer.state.pop(parameter)
