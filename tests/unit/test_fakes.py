"""What tensors without data can do, beside torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from lightning_megatp.shim.fakes import GroupedProductsOnMeta, fake_tensor_mode, is_fake

OFFSETS = torch.tensor([3, 8], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("x", "y", "offsets"),
    [
        ((8, 16), (2, 16, 32), OFFSETS),
        ((2, 8, 16), (2, 16, 32), None),
        ((24, 8), (8, 32), OFFSETS),
        ((2, 24, 16), (16, 8), OFFSETS),
    ],
)
def test_grouped_products_have_the_shapes_of_real_ones(
    x: tuple[int, ...], y: tuple[int, ...], offsets: Tensor | None, dtype: torch.dtype
) -> None:
    def made() -> Tensor:
        return F.grouped_mm(torch.ones(x, dtype=dtype, requires_grad=True), torch.ones(y, dtype=dtype), offs=offsets)

    real = made()
    with fake_tensor_mode(allow_non_fake_inputs=True):
        fake = made()
    assert is_fake(fake) and (fake.shape, fake.dtype, fake.requires_grad) == (real.shape, dtype, True)
    with GroupedProductsOnMeta(), torch.device("meta"):
        meta = made()
    assert meta.is_meta and (meta.shape, meta.dtype, meta.requires_grad) == (real.shape, dtype, True)


def test_operations_of_higher_order_find_their_rules() -> None:
    with fake_tensor_mode(allow_non_fake_inputs=True):
        q = torch.ones(1, 2, 128, 16)
        assert is_fake(y := flex_attention(q, q, q)) and y.shape == q.shape  # type: ignore[union-attr]
