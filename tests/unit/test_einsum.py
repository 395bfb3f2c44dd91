"""Which einsums are a linear layer's work, and that they come out the same as one."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from lightning_megatp.tensor.einsum import LinearEinsum

SIZES = {"b": 2, "s": 3, "t": 3, "d": 4, "h": 2, "e": 5, "f": 6}


def operand(term: str) -> torch.Tensor:
    shape = [SIZES[letter] for letter in term.replace("...", "bs").replace(" ", "")]
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("equation", "at", "outputs", "inputs"),
    [
        ("bsd,fd->bsf", 1, (0,), (1,)),
        ("bsd, df -> bfs", 1, (1,), (0,)),
        ("hde,bsd->bhse", 0, (0, 2), (1,)),
        ("...d,dhe->...he", 1, (1, 2), (0,)),
        ("...he,hed", 1, (2,), (0, 1)),
        ("bhst,bthe,hed->bsd", 2, (2,), (0, 1)),
        ("bse,efh,bsh->fsb", 1, (1,), (0, 2)),
        ("...e,se,ef->...f", 2, (1,), (0,)),
        ("bsd,df", 1, (1,), (0,)),
    ],
)
def test_a_linear_layers_work(equation: str, at: int, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> None:
    operands = [operand(term) for term in equation.partition("->")[0].split(",")]
    einsum = LinearEinsum.of(equation, operands, at)
    assert einsum is not None and (einsum.dims.outputs, einsum.dims.inputs) == (outputs, inputs)
    weight, others = operands[at], operands[:at] + operands[at + 1 :]
    found = einsum.compute(functools.partial(F.linear, weight=einsum.dims.matrix(weight)), weight.shape, others)
    torch.testing.assert_close(found, torch.einsum(equation, *operands), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "equation",
    ["bsd,bdf->bsf", "bsd,hde->bshd", "bsd,de->bs", "bsd,he->bshe", "bsd,dd->bs", "bs,st,bt->b", "bsd,d"],
)
def test_what_else_einsum_does(equation: str) -> None:
    """A dim of the weight is a batch's, is summed over alone, is there twice; or it has no inputs, or no outputs."""
    operands = [operand(term) for term in equation.partition("->")[0].split(",")]
    assert LinearEinsum.of(equation, operands, 1) is None


def test_what_is_repeated_along_the_inputs() -> None:
    x, weight = operand("bs"), operand("fd")
    assert LinearEinsum.of("bsd,fd->bsf", [x[..., None], weight], 1) is None
    assert LinearEinsum.of([0, 1], [x, weight], 1) is None
