"""What data-parallel ranks divide among them (zero > 0): 20 AdamW steps are those of one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback

from tests.parity.compare import compare
from tests.parity.parallel import whole_gradients
from tests.parity.running import Run, Setting, fit
from tests.parity.variants import variant
from tests.ranks import run_ranks

Reference = Callable[[Setting], Run]


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    zero: int
    tp: int = 1
    pp: int = 1
    dp: int = 2
    schedule: str = "1f1b"
    microbatches: int = 2
    precision: str = "64-true"
    accumulate: int = 1
    clip: str = "none"
    length: int = 4
    sequence: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    large_ends: bool = False
    """Embeddings and heads are units of their own, as if their vocabulary were large."""

    def __str__(self) -> str:
        layout = f"pp{self.pp}-tp{self.tp}-dp{self.dp}" + ("-sequence" if self.sequence else "")
        parts = [f"zero{self.zero}", self.model, layout, self.precision, f"accumulate{self.accumulate}", self.clip]
        parts += [self.schedule] * (self.pp > 1) + ["large_ends"] * self.large_ends
        return "-".join([*parts, *(f"{k}_{v}" for k, v in self.options)])

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.precision, self.accumulate, self.clip, self.length)


CASES = [
    Case("untied", 1),
    Case("untied", 1, accumulate=2, clip="norm"),
    Case("tied", 2, accumulate=2, length=7),
    Case("tied", 3, clip="norm"),
    Case("untied", 3, accumulate=2, large_ends=True),
    Case("tied", 3, tp=2, clip="norm", sequence=True, length=7),
    Case("grouped", 1, tp=2, sequence=True),
    Case("torch_decoder", 3, tp=2, sequence=True),
    Case("head_outside", 2, tp=2, options=(("plan", "auto"),)),
    Case("deep", 3, pp=2, microbatches=2, clip="norm"),
    Case("tied", 3, precision="bf16-mixed"),
]
LEVELS = (1, 2, 3)
MORE = [
    *(Case("deep_tied", zero, pp=2, schedule="1f1b", microbatches=3, clip="norm", accumulate=2) for zero in LEVELS),
    *(Case("deep", zero, pp=2, schedule="interleaved", microbatches=4) for zero in LEVELS),
    *(Case("deep", zero, pp=2, microbatches=4, large_ends=True) for zero in LEVELS),
    *(Case("grouped", zero, tp=2, sequence=True, large_ends=True) for zero in LEVELS),
    *(Case("deep_tied", zero, pp=2, schedule="gpipe", microbatches=zero) for zero in LEVELS),
    *(Case("deep_tied", zero, tp=2, pp=2, clip="norm", sequence=True) for zero in LEVELS),
    *(Case("grouped_fused", zero, tp=4, length=7) for zero in LEVELS),
    *(Case("grouped", zero, tp=4, clip="norm", sequence=True) for zero in LEVELS),
    *(Case("manual", zero, tp=2) for zero in LEVELS),
    *(Case("uneven", zero, tp=2, sequence=True, clip="value") for zero in LEVELS),
    *(Case("unused", zero, accumulate=2) for zero in LEVELS),
    *(Case("regularised", zero) for zero in LEVELS),
    *(Case("head_outside", zero) for zero in LEVELS),
    *(
        Case("tied", zero, precision=precision, clip="norm")
        for zero in LEVELS
        for precision in ("bf16-true", "32-true", "16-mixed")
    ),
    *(Case("tied", zero, dp=4, options=(("dp_replicate", 2),), clip="norm") for zero in LEVELS),
    *(Case("tied", zero, options=(("offload", "optimizer"),), clip="norm") for zero in (1, 2)),
    Case("tied", 3, options=(("offload", "parameters"),)),
    Case("tied", 3, options=(("verify", True),), dp=2),
    Case("tied", 3, options=(("plan", "auto"),), tp=2),
    *(
        Case("deep", zero, pp=2, schedule=schedule, microbatches=4, options=(("recompute", kind),))
        for zero in LEVELS
        for schedule in ("1f1b", "gpipe", "interleaved")
        for kind in ("full", "selective")
    ),
    *(
        Case("tied", zero, tp=2, sequence=True, options=(("recompute", kind), ("offload_activations", True)))
        for zero in LEVELS
        for kind in ("full", "selective")
    ),
]


def _fit(rank: int, world_size: int, case: Case, callbacks: tuple[Callback, ...] = ()) -> Run:
    from lightning_megatp import MegaTPStrategy
    from lightning_megatp.zero import units

    pipeline: dict[str, Any] = {"microbatches": case.microbatches, "schedule": case.schedule} if case.pp > 1 else {}
    strategy = MegaTPStrategy(
        tp=case.tp, pp=case.pp, dp=case.dp, zero=case.zero, summary=False, sequence_parallel=case.sequence, **pipeline,
        **{"plan": variant(case.model).plan, **dict(case.options)},
    )  # fmt: skip
    small_end = 0 if case.large_ends else units._SMALL_END
    with mock.patch.object(units, "_SMALL_END", small_end):
        return fit(case.setting, strategy, world_size, case.dp, whole_gradients, callbacks)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.extended) for case in MORE)], ids=str)
def test_zero_is_one_device(case: Case, reference: Reference) -> None:
    runs = run_ranks(case.tp * case.pp * case.dp, _fit, case)
    compare(reference(case.setting), runs, case.tp, case.precision)
