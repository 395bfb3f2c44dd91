"""examples/gpt/model.py: shapes, causality, the first loss, and a generate that stays inside the context."""

import math

import pytest
import torch
import torch.nn.functional as F

from model import GPT


@pytest.fixture
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(n_layer=2, n_head=2, d_model=16, context=8).eval()


@pytest.mark.parametrize("length", [1, 5, 8])
def test_logits_for_every_byte(gpt: GPT, length: int) -> None:
    assert gpt(torch.randint(256, (3, length))).shape == (3, length, 256)


def test_later_bytes_change_nothing_before_them(gpt: GPT) -> None:
    x = torch.randint(256, (2, 8))
    changed = x.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    torch.testing.assert_close(gpt(x)[:, :5], gpt(changed)[:, :5])
    assert not torch.allclose(gpt(x)[:, 5:], gpt(changed)[:, 5:])


def test_first_loss_is_eight_bits_per_byte(gpt: GPT) -> None:
    x, y = torch.randint(256, (2, 16, 8))
    loss = F.cross_entropy(gpt(x).flatten(0, 1), y.flatten())
    assert loss.item() / math.log(2) == pytest.approx(8.0, abs=0.05)


def test_generate_goes_on_past_the_context(gpt: GPT) -> None:
    prompt = torch.randint(256, (2, 3))
    written = gpt.generate(prompt, n_new=20)
    assert written.shape == (2, 23)
    assert torch.equal(written[:, :3], prompt)
    assert int(written.min()) >= 0 and int(written.max()) < 256


def test_heads_must_divide_channels() -> None:
    with pytest.raises(ValueError, match=r"d_model 16 is not a multiple of n_head 3\. Change one of them\."):
        GPT(n_head=3, d_model=16)
