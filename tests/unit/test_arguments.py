"""Arguments of the strategy that are of another type than they have to be are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_megatp import MegaTPStrategy


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pp": 2, "microbatches": "4"}, "microbatches='4' (str) has to be a whole number, such as 8."),
        ({"pp": 2, "virtual_stages": 2.0}, "virtual_stages=2.0 (float) has to be a whole number, such as 2."),
        ({"bucket_mb": "25"}, "bucket_mb='25' (str) has to be a number of MiB, such as 25."),
        ({"zero": True}, "zero=True (bool) has to be a whole number, such as 3."),
        ({"dp_replicate": "2"}, "dp_replicate='2' (str) has to be a whole number, such as 2."),
        ({"timeout": 60}, "timeout=60 (int) has to be a timedelta, such as timedelta(minutes=30)."),
        (
            {"parallelism": {"up": "column"}},
            "parallelism={'up': 'column'} (dict) has to be a plugin, such as ParallelismPlugin(plan={...}).",
        ),
        ({"plan": ["up"]}, "plan=['up'], but a plan is \"auto\" or a mapping {pattern: style}."),
        (
            {"pp": 2, "stages": ["blocks.0", "blocks.1"]},
            "stages=['blocks.0', 'blocks.1'], but it lists a list of modules per stage: [['blocks.0'], ['blocks.1']].",
        ),
    ],
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_arguments_of_other_types(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        MegaTPStrategy(**arguments)
    assert str(error.value) == f"MegaTPStrategy: {text}"
