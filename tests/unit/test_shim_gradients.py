"""Calls of torch's clipping are met under any name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_megatp.shim.gradients import ClipCall, clipping_by, zero_grad_by


def _parameters() -> list[Tensor]:
    found = [torch.ones(3, requires_grad=True) for _ in range(2)]
    for x in found:
        x.grad = torch.full((3,), 2.0)
    return found


def test_clipping_is_met_and_given_back() -> None:
    met: list[ClipCall] = []

    def clip(call: ClipCall) -> Tensor:
        met.append(call)
        return torch.tensor(7.0)

    parameters = _parameters()
    with clipping_by(clip):
        with clipping_by(lambda call: torch.tensor(8.0)):
            assert clip_grad_norm_(parameters, 1.0) == 8.0
        assert clip_grad_norm_((x for x in parameters), 1.0, norm_type="inf", error_if_nonfinite=True) == 7.0  # type: ignore[arg-type]
        torch.nn.utils.clip_grad_value_(parameters[0], clip_value=0.5)
    assert [(x.limit, x.order, x.has_to_be_finite, x.is_of_one, len(x.parameters)) for x in met] == [
        (1.0, float("inf"), True, False, 2),
        (None, 2.0, False, True, 1),
    ]
    assert all((x.grad == 2.0).all() for x in parameters), "nobody has clipped"
    assert clip_grad_norm_(parameters, 1.0) == pytest.approx(24**0.5)
    clip_grad_value_(parameters, 0.1)
    assert all((x.grad == 0.1).all() for x in parameters)


def test_a_call_can_be_done_as_torch_does() -> None:
    parameters = _parameters()
    with clipping_by(lambda call: call.of(call.parameters)):
        assert clip_grad_norm_(iter(parameters), 24**0.5 / 2) == pytest.approx(24**0.5)
    assert all(torch.allclose(x.grad, torch.ones(3)) for x in parameters if x.grad is not None)


def test_an_error_gives_clipping_back() -> None:
    with pytest.raises(KeyError), clipping_by(lambda call: {}["nothing"]):
        clip_grad_norm_(_parameters(), 1.0)
    assert clip_grad_norm_(_parameters(), 1.0) > 1


def test_any_module_clears_gradients_another_way() -> None:
    module, met = torch.nn.Linear(2, 2), list[object]()
    module(torch.ones(1, 2)).sum().backward()
    with zero_grad_by(lambda call: met.append(call.args[0])):
        module.zero_grad()
    assert met == [module] and module.weight.grad is not None
    module.zero_grad()
    assert module.weight.grad is None
