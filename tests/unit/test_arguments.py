"""Arguments of the strategy that are of another type than they have to be are refused where they are written."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, Precision

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
        (
            {"pp": 2, "stages": 2},
            "stages=2, but it lists a list of modules per stage: [['embed', 'blocks.0'], ['blocks.1', 'head']]. How"
            " many there are, `pp` says.",
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


@pytest.mark.parametrize("plugin", [FSDPPrecision, DeepSpeedPrecision])
def test_precision_plugins_of_other_strategies(plugin: Any) -> None:
    """The first would leave the model in float32 without a word, the second would cast some of it."""
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=MegaTPStrategy(), plugins=[plugin("bf16-mixed")], max_steps=1
    )
    with pytest.raises(ValueError, match=rf"{plugin.__name__} works with .* Use Trainer\(precision='bf16-mixed'\)"):
        trainer.fit(BoringModel())


class Doubles(Precision):
    """A loss scale of one's own."""

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(2 * tensor, module)


def test_precision_plugins_with_a_backward_of_their_own() -> None:
    """At pp > 1 the loss would not be scaled, without a word."""
    trainer = Trainer(accelerator="cpu", devices=1, strategy=MegaTPStrategy(pp=2), plugins=[Doubles()], max_steps=1)
    with pytest.raises(ValueError, match="the precision plugin Doubles has its own `pre_backward`, which would not be"):
        trainer.fit(BoringModel())
