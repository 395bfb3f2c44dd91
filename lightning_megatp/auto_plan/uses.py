"""What code does with parameters: whether it uses them as `F.linear` uses a weight, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lightning_megatp.plan.layer import MatrixDims
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.einsum import LinearEinsum, operands_of
from lightning_megatp.tensor.functions import called_by_this_package, is_in_place, multiplies, operation_name
from lightning_megatp.tensor.shards import NO_VALUES, PRODUCTS, VIEWS, as_product, reshaped, transposes


class Uses(TorchFunctionMode):
    """While code runs.

    Args:
        names: id of a parameter -> its name.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._matrices: dict[int, tuple[str, MatrixDims, Tensor]] = {}
        """id of a matrix made of a parameter -> its name, the dims that are rows and columns, and itself."""
        self.biases: dict[str, set[str | None]] = {}
        """Weight of an `F.linear`, or of `x @ weight.T` -> the biases that come with it, None for no parameter."""
        self.dims: dict[str, MatrixDims] = {}
        """Which dims of these are outputs, and which inputs."""
        self.otherwise: dict[str, str] = {}
        """What something else used -> the operation."""
        self.multiplied: set[str] = set()
        """Of these what is multiplied with, whole or in parts."""
        self._views: dict[int, tuple[str, Tensor]] = {}
        """id of what views made of these -> the name, and itself."""
        self.inside: set[str] = set()
        """Weights whose own layers run, which may do as they like."""
        self.depth = 1
        """How many modules run that a hook of a step's code could call, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        matrix = self._matrix(args[0]) if args else None
        if matrix is not None and (made := _made_of(matrix[1], name, func, args, kwargs)) is not None:
            result = func(*args, **kwargs)
            self._matrices[id(result)] = matrix[0], made, result
            return result
        product, factors = as_product(name, args, kwargs)
        if name == "linear":
            self._linear(*args, **kwargs)
        elif product in PRODUCTS and len(args) > 1 and self._is_matrix(factors[1]):
            self._note(name, factors[0])
            bias = self._names.get(id(factors[2])) if len(factors) > 2 else None
            self._multiplied(name, factors[1], bias, transposed=True)
        elif name == "einsum" and (found := self._einsum(args)) is not None:
            self._note(name, found[1])
            self._count(name, *found[0], None)
        elif name not in NO_VALUES and not called_by_this_package():
            result = func(*args, **kwargs)
            if matrix is None or result is not args[0] or is_in_place(name):
                self._note(name, args, kwargs)
            viewed = self._viewed(args[0]) if args and name in VIEWS else None
            if viewed is not None:
                self._views |= {id(x): (viewed, x) for x in tree_leaves(result) if isinstance(x, Tensor)}
            return result
        return func(*args, **kwargs)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        self._note("linear", input)
        if self._is_matrix(weight):
            self._multiplied("linear", weight, self._names.get(id(bias)), transposed=False)
        else:
            self._note("linear", weight, bias)

    def _multiplied(self, operation: str, weight: Any, bias: str | None, transposed: bool) -> None:
        """Count a product with a weight.

        Args:
            transposed: whether it was taken as (in, out).
        """
        matrix = self._matrix(weight)
        assert matrix is not None
        self._count(operation, matrix[0], matrix[1].flipped if transposed else matrix[1], bias)

    def _count(self, operation: str, name: str, dims: MatrixDims, bias: str | None) -> None:
        if not self.depth:
            self.otherwise[name] = operation
        if self.dims.setdefault(name, dims) != dims:
            self.otherwise[name] = operation
            self.multiplied.add(name)
        self.biases.setdefault(name, set()).add(bias)

    def _einsum(self, args: tuple[Any, ...]) -> tuple[tuple[str, MatrixDims], list[Any]] | None:
        """The weight, and the other operands, of an einsum that is a linear layer's work."""
        operands = operands_of(args)
        at = [i for i, x in enumerate(operands) if id(x) in self._names]
        if len(at) != 1 or not all(isinstance(x, Tensor) for x in operands):
            return None
        einsum = LinearEinsum.of(args[0], operands, at[0])
        weight = operands.pop(at[0])
        return None if einsum is None else ((self._names[id(weight)], einsum.dims), operands)

    def _matrix(self, x: Any) -> tuple[str, MatrixDims] | None:
        """The parameter that this is, or is a matrix of, and which of its dims are rows and columns; of a parameter
        that is no matrix, those of one are made of nothing yet."""
        if id(x) in self._matrices:
            return self._matrices[id(x)][:2]
        if id(x) not in self._names:
            return None
        dims = tuple(range(x.dim()))
        return self._names[id(x)], MatrixDims(dims[:1], dims[1:])

    def _is_matrix(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() == 2 and self._matrix(x) is not None

    def _note(self, operation: str, *used: Any) -> None:
        for x in tree_leaves(used):
            name = self._viewed(x) if isinstance(x, Tensor) else None
            if name is not None and name not in self.inside:
                self.otherwise.setdefault(name, operation)
                self.multiplied.update([name] if operation == "linear" or multiplies(operation) else [])

    def _viewed(self, x: Any) -> str | None:
        """The parameter that this is, or is made of by views."""
        matrix = self._matrix(x)
        return matrix[0] if matrix is not None else self._views.get(id(x), (None,))[0]


def _made_of(
    dims: MatrixDims, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MatrixDims | None:
    """What an operation makes of a parameter, or of a matrix that it is, if that is a matrix as layers have it."""
    if args[0].dim() == 2:
        return dims.flipped if transposes(name, *args[1:], **kwargs) else None
    return reshaped(name, func, args[0].shape, args[1:], kwargs)


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
        found |= {name for name in uses.biases.keys() - uses.otherwise.keys() if uses.dims[name] == MatrixDims()}
