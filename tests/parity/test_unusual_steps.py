"""Steps that change, recompute, differentiate twice or run under torch's own modes: still the one-device run."""

from __future__ import annotations

import pytest

from tests.crossing import crossed
from tests.parity.cases import Case
from tests.parity.compare import compare
from tests.parity.parallel import fit_case, setting_of
from tests.parity.test_parity import Reference
from tests.ranks import RankError, run_ranks

MODELS = [
    "late_regulariser",
    "regularised_everywhere",
    "recomputed",
    "recomputed_parts",
    "recomputed_reentrant",
    "recomputed_by_function",
    "looked_at",
    "twice",
    "replaced",
    "in_place",
    "manual_accumulation",
    "computed",
    "adaptive_weights",
]


@pytest.mark.parametrize(("model", "regions"), crossed(MODELS, ["sequence", "replicated"]))
def test_an_unusual_step(model: str, regions: str, reference: Reference) -> None:
    case = Case(model, sequence=regions == "sequence")
    compare(reference(setting_of(case)), run_ranks(2, fit_case, case), 2, case.precision)


@pytest.mark.parametrize("model", ["late_regulariser", "twice", "manual_accumulation"])
def test_an_unusual_step_with_data_parallelism(model: str, reference: Reference) -> None:
    case = Case(model, tp=1, dp=2)
    compare(reference(setting_of(case)), run_ranks(2, fit_case, case), 1, case.precision)


def test_a_gradient_penalty(reference: Reference) -> None:
    case = Case("gradient_penalty", sequence=False)
    compare(reference(setting_of(case)), run_ranks(2, fit_case, case), 2, case.precision)


def test_a_gradient_penalty_on_a_parameter_of_a_sequence_region_is_refused() -> None:
    """Each rank's gradient of it is a part: what the step computes from it would be wrong."""
    with pytest.raises(RankError, match=r"MegaTPStrategy: the step differentiates .*`norm.weight`, with create_graph"):
        run_ranks(2, fit_case, Case("gradient_penalty", sequence=True))


def test_recomputed_dropout_draws_the_same_masks(reference: Reference) -> None:
    case = Case("recomputed_dropout", sequence=False)
    compare(reference(setting_of(case)), run_ranks(2, fit_case, case), 2, case.precision)
