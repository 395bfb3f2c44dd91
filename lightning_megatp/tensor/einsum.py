"""Equations of `torch.einsum`: what they say about each dim, and which of them are a linear layer's work."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.plan.layer import MatrixDims

Labels = list[Any]
"""One for each dim: letters, and numbers for what the dots stand for."""


def labels_of(equation: Any, ndims: Sequence[int]) -> tuple[list[Labels], Labels] | None:
    """The labels of each operand and of the result; None for what is no equation of so many operands.

    Args:
        ndims: numbers of dims of the operands.
    """
    if not isinstance(equation, str):
        return None
    terms, arrow, out = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(ndims):
        return None
    labels = [_letters(term, ndim) for term, ndim in zip(inputs, ndims, strict=True)]
    known = [own for own in labels if own is not None]
    if len(known) < len(labels):
        return None
    dots = max(sum(isinstance(label, int) for label in own) for own in known)
    if not arrow:
        letters = terms.replace(",", "").replace(".", "")
        out = "..." * (dots > 0) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    result = _letters(out, len(out.replace("...", "")) + dots)
    return None if result is None else (known, result)


def operands_of(args: Sequence[Any]) -> list[Any]:
    """The operands of `einsum(equation, *operands)`, which may be in one list."""
    operands = args[1:]
    return list(operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands)


@dataclass(frozen=True)
class LinearEinsum:
    """An einsum that is a linear layer's work: some dims of one operand, the weight, are summed over with those of the
    others, and the rest are dims of the result."""

    dims: MatrixDims
    """Of the weight."""
    before: list[Labels]
    """Of the other operands."""
    given: Labels
    """Of what the layer is given: those of the result that aren't the weight's, and the inputs."""
    made: Labels
    """Of what it returns, with the outputs behind."""
    out: Labels

    @staticmethod
    def of(equation: Any, operands: Sequence[Tensor], at: int) -> LinearEinsum | None:
        """What an equation is to its operand at a position, if it is that."""
        found = labels_of(equation, [x.dim() for x in operands]) if isinstance(equation, str) else None
        if found is None or len(operands) < 2:
            return None
        labels, out = found
        own, before, given = labels[at], [*labels[:at], *labels[at + 1 :]], [*operands[:at], *operands[at + 1 :]]
        others = set(itertools.chain.from_iterable(before))
        outputs = [label for label in own if label in out and label not in others]
        inputs = [label for label in own if label not in out and label in others]
        if len(set(own)) < len(own) or len(outputs) + len(inputs) < len(own) or not outputs or not inputs:
            return None
        if any(_size(label, before, given) != operands[at].shape[own.index(label)] for label in inputs):
            return None
        rest = [label for label in out if label not in outputs]
        dims = MatrixDims(tuple(map(own.index, outputs)), tuple(map(own.index, inputs)))
        return LinearEinsum(dims, before, rest + inputs, rest + outputs, out)

    def compute(self, linear: Callable[[Any], Any], shape: Sequence[int], others: Sequence[Any]) -> Any:
        """Let the layer compute it.

        Args:
            linear: the layer's work, on (..., inputs).
            shape: of the weight.
            others: the operands besides the weight.
        """
        x = others[0] if len(others) == 1 and sorted(map(str, self.before[0])) == sorted(map(str, self.given)) else None
        x = self._product(others) if x is None else _permuted(x, self.before[0], self.given)
        y = linear(x.flatten(-len(self.dims.inputs)) if len(self.dims.inputs) > 1 else x)
        if len(self.dims.outputs) > 1:
            y = y.unflatten(-1, tuple(shape[dim] for dim in self.dims.outputs))
        return _permuted(y, self.made, self.out)

    def _product(self, others: Sequence[Any]) -> Any:
        letters = {label for label in itertools.chain(*self.before) if isinstance(label, str)}
        spare = iter(sorted(set(string.ascii_letters) - letters))
        names = {label: next(spare) if isinstance(label, int) else label for label in itertools.chain(*self.before)}
        *terms, given = ("".join(names[label] for label in labels) for labels in (*self.before, self.given))
        return torch.einsum(f"{','.join(terms)}->{given}", *others)


def _size(label: Any, labels: Sequence[Labels], operands: Sequence[Tensor]) -> int:
    """How long a dim is; in operands that are repeated along it, it is 1."""
    return max(x.shape[own.index(label)] for own, x in zip(labels, operands, strict=True) if label in own)


def _permuted(x: Tensor, labels: Labels, wanted: Labels) -> Tensor:
    return x if labels == wanted else x.permute([labels.index(label) for label in wanted])


def _letters(term: str, ndim: int) -> Labels | None:
    before, dots, after = term.partition("...")
    spare = ndim - len(before) - len(after)
    if spare < 0 or (spare and not dots):
        return None
    return [*before, *range(-spare, 0), *after]
