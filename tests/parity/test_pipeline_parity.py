"""Pipelines on real ranks: 20 AdamW steps that must be those of one device, whatever the schedule and the layout.

Each rank holds its own stages only. One case alone: `pytest tests/parity/test_pipeline_parity.py -k <its id>`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import CASES
from tests.parity.compare import ParityError, compare
from tests.parity.parallel import whole_gradients
from tests.parity.running import Run, Setting, fit
from tests.parity.variants import variant
from tests.ranks import run_ranks

Reference = Callable[[Setting], Run]


@dataclasses.dataclass(frozen=True)
class Case:
    """One pipelined run."""

    model: str
    pp: int = 2
    tp: int = 1
    dp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 2
    precision: str = "64-true"
    accumulate: int = 1
    clip: str = "none"
    length: int = 4
    rows: int = 4
    sequence: bool = False

    def __str__(self) -> str:
        layout = f"pp{self.pp}-tp{self.tp}-dp{self.dp}" + ("-sequence" if self.sequence else "")
        parts = (self.model, layout, self.schedule, f"m{self.microbatches}", self.precision)
        return "-".join((*parts, f"accumulate{self.accumulate}", f"clip_{self.clip}", f"length{self.length}"))

    @property
    def setting(self) -> Setting:
        return Setting(self.model, self.precision, self.accumulate, self.clip, self.length, self.rows)


# With MORE, every pair of schedule and number of microbatches, of schedule and pp, and of layout and schedule occurs.
CASES_2 = [
    Case("untied", schedule="gpipe", microbatches=1),
    Case("tied", schedule="gpipe", microbatches=3, accumulate=2, clip="norm", length=7),
    Case("tied", schedule="1f1b", microbatches=1, length=1),
    Case("tied", schedule="1f1b", microbatches=4, precision="bf16-true"),
    Case("deep", schedule="interleaved", microbatches=1),
    Case("deep_tied", schedule="interleaved", microbatches=3, clip="norm"),
    Case("tied", schedule="zb_h1", microbatches=1, clip="norm"),
    Case("deep_tied", schedule="zb_h1", microbatches=4, precision="bf16-mixed"),
    Case("deep", schedule="zb_v", microbatches=1),
    Case("deep_tied", schedule="zb_v", microbatches=3, clip="norm"),
    *(
        Case(model, microbatches=microbatches, schedule=schedule)
        for model, microbatches, schedule in [
            ("encoder", 2, "1f1b"),
            ("regression", 2, "gpipe"),
            ("pooled", 4, "zb_h1"),
            ("unused", 3, "1f1b"),
            ("grouped", 2, "gpipe"),
            ("swiglu_rms", 4, "1f1b"),
            ("positions", 2, "zb_h1"),
            ("configured", 2, "1f1b"),
            ("regularised", 3, "1f1b"),
            ("recomputed", 4, "1f1b"),
            ("recomputed_parts", 2, "zb_h1"),
            ("twice", 2, "1f1b"),
            ("computed", 2, "gpipe"),
            ("in_place", 2, "1f1b"),
            ("head_outside", 2, "1f1b"),
        ]
    ),
]
CASES_4 = [
    Case("deep_tied", pp=4, schedule="interleaved", microbatches=4),
    Case("deep_tied", pp=4, schedule="zb_v", microbatches=4, clip="norm"),
    Case("uneven", tp=2, schedule="zb_h1", microbatches=4),
    Case("deep", tp=2, schedule="zb_v", microbatches=2, clip="value"),
    Case("tied", tp=2, sequence=True, schedule="1f1b", microbatches=2, length=7),
    Case("swiglu_own", tp=2, sequence=True, schedule="zb_h1", microbatches=4, clip="norm"),
    Case("tied", dp=2, schedule="1f1b", microbatches=2, clip="norm", accumulate=2),
    Case("deep", dp=2, schedule="zb_v", microbatches=3, rows=8),
    Case("head_outside", pp=4, schedule="gpipe", microbatches=3, clip="norm", accumulate=2),
]
MORE = [
    Case("untied", schedule="gpipe", microbatches=4, precision="bf16-mixed"),
    Case("untied", schedule="1f1b", microbatches=3, precision="32-true", clip="norm"),
    Case("tied", schedule="interleaved", microbatches=4, accumulate=2),
    Case("untied", schedule="zb_h1", microbatches=3, accumulate=2),
    Case("untied", schedule="zb_h1", microbatches=8, rows=8, length=7),
    Case("tied", schedule="zb_v", microbatches=4, accumulate=2, length=7),
    Case("deep", pp=4, schedule="gpipe", microbatches=4),
    Case("tied", pp=4, schedule="1f1b", microbatches=3, clip="norm"),
    Case("tied", tp=2, schedule="1f1b", microbatches=3, clip="norm"),
    Case("encoder", tp=2, sequence=True, schedule="gpipe", microbatches=2),
    Case("deep_tied", dp=2, schedule="interleaved", microbatches=2, precision="32-true"),
    Case("deep_tied", pp=4, tp=2, schedule="zb_h1", microbatches=4),
    Case("deep", schedule="gpipe", microbatches=8, rows=8, clip="value"),
    Case("deep_tied", schedule="1f1b", microbatches=8, rows=8, accumulate=2, clip="norm"),
    Case("deep", schedule="interleaved", microbatches=8, rows=8, precision="32-true"),
    Case("deep", schedule="zb_v", microbatches=8, rows=8, precision="32-true"),
    Case("deep_tied", pp=4, schedule="zb_h1", microbatches=8, rows=8, accumulate=2),
    Case("separate", tp=2, schedule="gpipe", microbatches=2, accumulate=2),
    Case("deep_tied", tp=2, schedule="interleaved", microbatches=4, precision="bf16-mixed"),
    Case("head_outside", dp=2, schedule="zb_h1", microbatches=2, clip="norm"),
    Case("deep_tied", pp=4, tp=2, sequence=True, schedule="zb_v", microbatches=2, length=7),
    Case("tied", tp=2, dp=2, schedule="1f1b", microbatches=2, clip="norm", accumulate=2),
]


def fit_pipeline(rank: int, world_size: int, case: Case, options: dict[str, Any]) -> Run:
    from lightning_megatp import MegaTPStrategy

    plan = variant(case.model).plan if case.tp > 1 else {}
    strategy = MegaTPStrategy(
        tp=case.tp, pp=case.pp, dp=case.dp, plan=plan, sequence_parallel=case.sequence, schedule=case.schedule,
        microbatches=case.microbatches, summary=False, **options,
    )  # fmt: skip
    return fit(case.setting, strategy, world_size, case.dp, whole_gradients)


@pytest.mark.parametrize(
    "case", [*CASES_2, *CASES_4, *(pytest.param(case, marks=pytest.mark.extended) for case in MORE)], ids=str
)
def test_pipeline_parity(case: Case, reference: Reference, request: pytest.FixtureRequest) -> None:
    start = time.perf_counter()
    expected = reference(case.setting)
    runs = run_ranks(case.pp * case.tp * case.dp, fit_pipeline, case, {})
    found = compare(expected, runs, case.tp, case.precision)
    seconds = time.perf_counter() - start
    request.config.stash[CASES].append((str(case), *dataclasses.astuple(found), seconds))
    if case.tp == 1:  # with tensor parallelism whole parameters of a rank are fewer for another reason too
        whole = sum(p.numel() for p in expected.parameters.values())
        held = [sum(p.numel() for p in run.local.values()) for run in runs]
        assert max(held) < whole, "every stage holds a part of the model"


def _wrong_gradients(rank: int, world_size: int, case: Case, kind: str) -> Run:
    """Break one thing on purpose."""
    from lightning_megatp.pipeline.executor import _Batch
    from lightning_megatp.pipeline.shared import SharedParameters

    send, summed, check = _Batch._send, SharedParameters.sum_gradients, SharedParameters.check_alike

    def corrupt(self: Any, action: Any, relays: Any) -> None:
        if str(action) == kind:
            self.outgoing[action] = [x * 1.01 for x in self.outgoing[action]]
        send(self, action, relays)

    _Batch._send = corrupt  # type: ignore[method-assign]
    if kind == "shared":
        SharedParameters.sum_gradients = lambda self: None  # type: ignore[method-assign]
        SharedParameters.check_alike = lambda self: None  # type: ignore[method-assign]  # the strategy would stop
    try:
        return fit_pipeline(rank, world_size, case, {})
    finally:
        _Batch._send = send  # type: ignore[method-assign]
        SharedParameters.sum_gradients, SharedParameters.check_alike = summed, check  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["SF0.1", "SB1.0", "shared"])
def test_breakage_is_seen(kind: str, reference: Reference) -> None:
    """A message that is slightly off, forward or backward, and a tied weight whose gradients are not summed."""
    case = Case("tied", microbatches=2)
    compare(reference(case.setting), run_ranks(2, fit_pipeline, case, {}), 1, case.precision)
    with pytest.raises(ParityError):
        compare(reference(case.setting), run_ranks(2, _wrong_gradients, case, kind), 1, case.precision)
