"""What messages are made of."""

from __future__ import annotations

import pytest

from lightning_megatp.messages import with_article


@pytest.mark.parametrize(
    "words",
    [
        "a Linear",
        "an Embedding",
        "a _Linear",
        "an _Adapter",
        "a UNet",
        "a UniformSampler",
        "an UninitializedParameter",
        "an MLP",
        "an RMSNorm",
        "a GRU",
        "an LSTM",
        "a OneHot",
        "an int",
        "a list",
    ],
)
def test_articles_go_by_sound(words: str) -> None:
    assert with_article(words.split()[1]) == words
