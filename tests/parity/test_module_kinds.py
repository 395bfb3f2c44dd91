"""Whole fits with nn.MultiheadAttention, gates, Conv1D and stacked experts split, against the one-device fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.cases import Case
from tests.parity.compare import compare
from tests.parity.parallel import fit_case, setting_of
from tests.parity.running import Run, Setting
from tests.parity.test_pipeline_parity import Case as PipelineCase
from tests.parity.test_pipeline_parity import fit_pipeline
from tests.ranks import run_ranks

KINDS = ("torch_encoder", "torch_decoder", "gated", "conv1d", "experts")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "clip": "norm", "length": 7},
        pytest.param({"dp": 2, "sequence": False}, marks=pytest.mark.extended),
        pytest.param({"tp": 4, "length": 7}, marks=pytest.mark.extended),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_parity(kind: str, options: dict[str, object], reference: Callable[[Setting], Run]) -> None:
    case = Case(kind, **options)  # type: ignore[arg-type]
    compare(reference(setting_of(case)), run_ranks(case.tp * case.dp, fit_case, case), case.tp, case.precision)


@pytest.mark.parametrize("kind", KINDS)
def test_in_pipelines(kind: str, reference: Callable[[Setting], Run]) -> None:
    case = PipelineCase(kind, tp=2, schedule="zb_h1", microbatches=2, sequence=True)
    compare(reference(case.setting), run_ranks(4, fit_pipeline, case, {}), case.tp, case.precision)
