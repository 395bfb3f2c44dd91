"""Every case trains 20 AdamW steps on real ranks and must be the one-device run of the same batches.

One case alone: `pytest tests/parity/test_parity.py --case tied-tp2-dp1-sequence-64-true-accumulate1-clip_none-length4`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import pytest

from tests.conftest import CASES
from tests.parity.cases import FEWER, FOUR, TYPICAL, Case, each_model, every_case, matrix, pairwise
from tests.parity.compare import ParityError, compare
from tests.parity.parallel import fit_case, fit_ddp, setting_of
from tests.parity.running import Run, Setting
from tests.parity.variants import VARIANTS
from tests.ranks import run_ranks

Reference = Callable[[Setting], Run]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        models, name = list(VARIANTS), metafunc.config.getoption("--case")
        if name:
            cases = [case for case in every_case(models) if str(case) == name]
            assert cases, f"no parity case is called {name}"
        else:
            pairs = pairwise(TYPICAL, among=FEWER)
            fewer = dict.fromkeys([*each_model(models), *pairs, *FOUR, Case("tied", precision="16-mixed")])
            cases = list(matrix(models)) if metafunc.config.getoption("--all-cases") else list(fewer)
        cases.sort(key=lambda case: case.tp * case.dp)  # stable: one pool of processes after the other
        metafunc.parametrize("case", cases, ids=str)


def test_parity(case: Case, reference: Reference, request: pytest.FixtureRequest) -> None:
    start = time.perf_counter()
    expected = reference(setting_of(case))
    runs = run_ranks(case.tp * case.dp, fit_case, case)
    found = compare(expected, runs, case.tp, case.precision)
    seconds = time.perf_counter() - start
    request.config.stash[CASES].append((str(case), *dataclasses.astuple(found), seconds))
    text = VARIANTS[case.model].warns
    if case.tp > 1 and text:
        assert all(any(text in warning for warning in run.warnings) for run in runs[:1]), f"no warning names {text}"


@pytest.mark.parametrize("clip", ["none", "norm"])
def test_the_harness_agrees_with_lightnings_own_data_parallelism(clip: str, reference: Reference) -> None:
    setting = Setting("untied", accumulate=2, clip=clip)
    compare(reference(setting), run_ranks(2, fit_ddp, setting), 1, setting.precision)


def test_the_harness_sees_another_run(reference: Reference) -> None:
    setting = Setting("untied")
    runs = run_ranks(2, fit_ddp, dataclasses.replace(setting, clip="norm"))
    with pytest.raises(ParityError, match="loss of batch"):
        compare(reference(setting), runs, 1, setting.precision)
