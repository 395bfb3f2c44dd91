"""What code does with parameters: whether it uses them as `F.linear` uses a weight, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.functions import called_by_this_package, is_in_place, operation_name
from lightning_megatp.tensor.shards import NO_VALUES, PRODUCTS, transposes


class Uses(TorchFunctionMode):
    """While code runs.

    Args:
        names: id of a parameter -> its name.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._transposed: dict[int, tuple[str, Tensor]] = {}
        """id of a transposed parameter -> its name, and itself."""
        self.biases: dict[str, set[str | None]] = {}
        """Weight of an `F.linear`, or of `x @ weight.T` -> the biases that come with it, None for no parameter."""
        self.transposed: set[str] = set()
        """Weights (in, out): of `x @ weight`. They are in `biases`, too."""
        self.otherwise: set[str] = set()
        """What something else used."""
        self.inside: set[str] = set()
        """Weights whose own layers run, which may do as they like."""
        self.depth = 1
        """How many modules run that a hook of a step's code could call, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        first = self._names.get(id(args[0])) if args else None
        if first is not None and transposes(name, *args[1:], **kwargs):
            result = func(*args, **kwargs)
            self._transposed[id(result)] = first, result
            return result
        if name == "linear":
            self._linear(*args, **kwargs)
        elif name in PRODUCTS and len(args) > 1 and self._name(args[1]) is not None and args[1].dim() == 2:
            self._note(args[0])
            self._multiplied(args[1], None, transposed=True)
        elif name not in NO_VALUES and not called_by_this_package():
            result = func(*args, **kwargs)
            if first is None or result is not args[0] or is_in_place(name):
                self._note(args, kwargs)
            return result
        return func(*args, **kwargs)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> None:
        self._note(input)
        if self._name(weight) is None:
            self._note(bias)
        else:
            self._multiplied(weight, self._names.get(id(bias)), transposed=False)

    def _multiplied(self, weight: Any, bias: str | None, transposed: bool) -> None:
        """Args:
        transposed: whether it was taken as (in, out).
        """
        name = self._name(weight)
        assert name is not None
        if not self.depth:
            self.otherwise.add(name)
        is_transposed = transposed != (id(weight) in self._transposed)
        if name in self.biases and is_transposed != (name in self.transposed):
            self.otherwise.add(name)  # in both ways
        self.biases.setdefault(name, set()).add(bias)
        self.transposed.update([name] if is_transposed else [])

    def _name(self, x: Any) -> str | None:
        return self._names.get(id(x)) or self._transposed.get(id(x), (None,))[0]

    def _note(self, *used: Any) -> None:
        for x in tree_leaves(used):
            name = self._name(x)
            if name is not None and name not in self.inside:
                self.otherwise.add(name)


@contextlib.contextmanager
def weights_of_heads(model: nn.Module, tables: Mapping[str, nn.Embedding]) -> Iterator[set[str]]:
    """Note which embeddings' weights are also used as those of an output layer, and for nothing else: in the forward of
    some module, and not by the code around all modules, which hooks have in common with steps.

    Args:
        model: whose step runs.
        tables: name of a weight -> the embedding that has it.

    Returns:
        Their names, there at the end.
    """
    found: set[str] = set()
    if not tables:
        yield found
        return
    uses = Uses({id(table.weight): name for name, table in tables.items()})
    uses.depth = 0

    def count(change: int, module: nn.Module) -> None:
        uses.depth += change if module is not model else 0

    handles: list[Any] = [
        register_module_forward_pre_hook(lambda module, args: count(1, module)),
        register_module_forward_hook(lambda module, args, output: count(-1, module), always_call=True),
    ]
    for name, table in tables.items():
        handles.append(table.register_forward_pre_hook(lambda *_, name=name: uses.inside.add(name)))
        handles.append(table.register_forward_hook(lambda *_, name=name: uses.inside.discard(name), always_call=True))
    try:
        with uses:
            yield found
    finally:
        for handle in handles:
            handle.remove()
        found |= uses.biases.keys() - uses.otherwise - uses.transposed
