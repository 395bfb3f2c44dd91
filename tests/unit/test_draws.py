"""An operation that moves the default generator is known as one that draws random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.tensor.draws import DROPOUTS, LIKE_SHAPES, OF_TENSORS, draws_random
from lightning_megatp.tensor.functions import operation_name

X = torch.rand(2, 4, 6) * 0.8 + 0.1
IMAGE = torch.rand(2, 4, 6, 6)
SIXTH = torch.tensor([1, 2])
CALLS: list[Callable[[Tensor], Any]] = [
    *(lambda x, kind=kind: kind(x) for kind in (torch.rand_like, torch.randn_like, torch.bernoulli, torch.poisson)),
    *(lambda x, kind=kind: kind(x.clone(), 0.5, True) for kind in (torch.dropout, torch.dropout_)),
    *(lambda x, kind=kind: kind(x.clone(), 0.5, True) for kind in (torch.alpha_dropout, torch.alpha_dropout_)),
    *(lambda x, kind=kind: kind(x.clone(), 0.5, True) for kind in (torch.feature_dropout, torch.feature_dropout_)),
    lambda x: torch.feature_alpha_dropout(x, 0.5, True),
    lambda x: torch.feature_alpha_dropout_(x.clone(), 0.5, True),
    lambda x: torch.native_dropout(x, 0.5, True),
    *(
        lambda x, kind=kind: kind(x, 0.5, True)
        for kind in (F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout)
    ),
    lambda x: F.dropout2d(IMAGE, 0.5),
    lambda x: F.dropout3d(IMAGE[None], 0.5),
    lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    lambda x: torch.randint_like(x, 5),
    lambda x: torch.normal(x, 1.0),
    lambda x: torch.binomial(x.round() + 2, x),
    lambda x: torch.multinomial(x[0], 2),
    lambda x: F.gumbel_softmax(x),
    lambda x: F.rrelu(-x, training=True),
    lambda x: torch.rrelu_(-x, training=True),
    lambda x: torch._standard_gamma(x),
    lambda x: torch._sample_dirichlet(x),
    lambda x: x.clone().bernoulli_(),
    lambda x: x.clone().normal_(),
    lambda x: x.clone().uniform_(),
    lambda x: x.clone().random_(),
    lambda x: x.clone().exponential_(),
    lambda x: x.clone().log_normal_(),
    lambda x: x.clone().cauchy_(),
    lambda x: x.clone().geometric_(0.5),
    lambda x: torch.rand(3),
    lambda x: torch.randn(3),
    lambda x: torch.randint(5, (3,)),
]


class Seen(TorchFunctionMode):
    """The operations, and whether any is known to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.draws = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation_name(func)
        self.names.add(name)
        self.draws |= draws_random(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def moves_generator(call: Callable[[], Any]) -> bool:
    before = torch.get_rng_state().numpy().tobytes()
    call()
    return before != torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_what_moves_the_generator_is_known(number: int) -> None:
    with Seen() as seen:
        assert moves_generator(lambda: CALLS[number](X)), seen.names
    assert seen.draws, seen.names


def test_none_is_left_out() -> None:
    with Seen() as seen:
        for call in CALLS:
            call(X)
    assert (OF_TENSORS | LIKE_SHAPES) - seen.names == set()


def test_dropouts_that_do_nothing_draw_nothing() -> None:
    with Seen() as seen:
        assert not moves_generator(lambda: [F.dropout(X, 0.0), F.dropout(X, 0.5, False), torch.dropout(X, 0.5, False)])
    assert not seen.draws and seen.names <= {*DROPOUTS, "numpy"}


def test_probing_draws_nothing_to_choose_by() -> None:
    odds = X[0] / X[0].sum(-1, keepdim=True)
    with exact():
        assert not moves_generator(lambda: [F.gumbel_softmax(odds, hard=True), torch.multinomial(odds, 2)])
        assert torch.equal(torch.multinomial(odds, 2), odds.topk(2, -1)[1])
        assert torch.multinomial(odds, 9, replacement=True).shape == (4, 9)
        assert torch.equal(F.gumbel_softmax(odds, hard=True).argmax(-1), odds.argmax(-1))
