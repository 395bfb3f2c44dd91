"""Optimizer state by a twin, and the peak of a schedule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp import ParallelismPlugin
from lightning_megatp.pipeline.schedules.generators import NAMES, make_schedule
from lightning_megatp.planner.formula import by_formula, rehearse_or_estimate
from lightning_megatp.planner.optimizers import optimizers_in, states_of
from lightning_megatp.planner.sizes import peak
from lightning_megatp.recompute.options import RecomputeOptions
from tests.parity.models import GPT, GPTConfig


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        torch.optim.Adafactor,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_twin_tells_the_state(make: type[torch.optim.Optimizer], dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10)).to(dtype)
    module[1].bias.requires_grad_(False)
    optimizer = make(module.parameters())
    shapes = {id(p): p.shape for p in module.parameters()}
    predicted = sum(x.nbytes(shapes[i]) for i, found in states_of([optimizer]).items() for x in found)
    assert not optimizer.state, "the optimizer itself is as it was"
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    held = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert predicted == sum(x.nbytes for x in held)


def test_whatever_configure_optimizers_returns() -> None:
    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    for configured in ([first, second], ([first, second], [object()]), ({"optimizer": first}, {"optimizer": second})):
        assert optimizers_in(configured) == [first, second]
    assert optimizers_in(None) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_equal_stages_is_what_is_in_flight(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    for rank in range(4):
        assert peak(schedule, rank, [1] * schedule.stages) == schedule.in_flight[rank]


class Reading(GPT):
    """Its step looks at a value."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) < 1e9 else loss * 0


def test_the_formula_where_a_step_reads_values() -> None:
    module = Reading(GPTConfig(hidden=16, heads=4, layers=2))
    ids = torch.zeros(2, 8, dtype=torch.long)
    plugin = ParallelismPlugin(None)
    found, why = rehearse_or_estimate(module, plugin, plugin.resolve(module, 1, True), (ids, ids))
    assert found is not None and "DataDependent" in why and "Korthikanti" in why
    s, b, h, a = 8, 2, 16, 4
    assert found.by_stage({}, 1) == [2 * round(s * b * h * (34 + 5 * a * s / h))]
    for options, expected in (("full", 2 * 2), ("selective", 2 * 34), ({"blocks": 1}, 2 + 34 + 5 * a * s / h)):
        found = by_formula(module, plugin.resolve(module, 1, True), (ids, ids), RecomputeOptions.of(options))
        assert found.by_stage({}, 1) == [s * b * h * expected]
