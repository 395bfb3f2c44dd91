"""Families without a plan, on real ranks, beside one device. The whole sweep is `python -m tests.compat.sweep`."""

from __future__ import annotations

import pytest

from tests.compat.families import FAMILIES
from tests.compat.sweep import check, check_stages
from tests.crossing import fewer
from tests.ranks import run_ranks

SAMPLE = {
    "llama": 0.49,  # grouped queries, by the model's own plan
    "gpt2": 0.49,  # Conv1D, fused, sizes in attributes
    "bert": 0.48,  # a padding mask, a tied head with a bias of its own
    "t5": 0.49,  # encoder and decoder, relative biases per head
    "bloom": 0.49,  # alibi, queries, keys and values of each head beside each other
    "olmo2": 0.49,  # norms over all heads
    "deepseek_v3": 0.4,  # latent attention, experts
    "gpt_oss": 0.45,  # experts whose gates and ups alternate, sinks per head
    "mamba": 0.25,  # no attention
    "vit": 0.45,
    "nanogpt": 0.49,
    "torch_encoder": 0.45,  # nn.MultiheadAttention
}


@pytest.mark.parametrize("name", fewer(SAMPLE, extended=["bert", "gpt_oss", "vit", "torch_encoder"]))
def test_tensor_ranks(name: str) -> None:
    for result in run_ranks(2, check, name, True):
        assert result.status == "verified", result.why
        assert result.share >= SAMPLE[name]


@pytest.mark.extended  # repeats test_tensor_ranks in a further layout
@pytest.mark.parametrize("name", ["bert", "gpt2", "mixtral"])
def test_four_ranks_without_sequence_regions(name: str) -> None:
    result = run_ranks(4, check, name, False)[0]
    assert result.status == "verified", result.why
    assert result.share >= 0.7


@pytest.mark.parametrize("name", ["opt", "mixtral", pytest.param("t5", marks=pytest.mark.extended)])
def test_stages(name: str) -> None:
    """opt defines its last norm before its layers; the shapes inside of mixtral's experts depend on values."""
    result = run_ranks(2, check_stages, name, False, 1)[0]
    assert result.status == "verified", result.why


@pytest.mark.parametrize("name", fewer(["hubert", "mobilebert", "t5"], extended=["mobilebert", "t5"]))
def test_split_stages(name: str) -> None:
    result = run_ranks(4, check_stages, name, True, 2)[0]
    assert result.status == "verified", result.why
    assert result.share >= 0.65


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_is_wrong(name: str) -> None:
    assert run_ranks(2, check, name, True)[0].status == "verified"
