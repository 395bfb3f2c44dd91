"""Arguments of the strategy that are of another type than they have to be are refused where they are written."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, FSDPPrecision, Precision

from lightning_megatp import MegaTPStrategy
from lightning_megatp.pipeline.schedules.generators import NAMES


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
            "stages=2, but it is a list with one list of module names per stage: [['embed', 'blocks.0'], ['blocks.1',"
            " 'head']]. Left out, `pp` stages are balanced by parameters.",
        ),
        ({"tp": True}, "tp=True is a bool, but every axis needs a whole number, such as 2."),
        ({"pp": None}, "pp=None is a NoneType, but every axis needs a whole number, such as 2."),
        ({"verify": "no"}, "verify='no' (str) has to be True or False."),
        (
            {"plan": "plan.yaml"},
            "plan='plan.yaml', but a plan is \"auto\" or a mapping {pattern: style}. Give what the file holds:"
            " plan=yaml.safe_load(open('plan.yaml')).",
        ),
        ({"pp": 2, "trace": True}, "trace=True (bool) has to be a file's name, such as 'run.json'."),
        (
            {"schedule": "banana"},
            "schedule='banana' is not known. Use one of gpipe, 1f1b, interleaved, zb_h1, zb_v.",
        ),
        ({"microbatches": 0}, "microbatches=0, but a batch needs 1 or more."),
        (
            {"pp": 2, "stages": [["a"]]},
            "stages lists 1 of 2 stages, one list of modules each: pp=2, with 1 of schedule='1f1b' on each rank"
            " (virtual_stages).",
        ),
        (
            {"pp": 2, "schedule": "zb_v", "stages": [["a"], ["b"]]},
            "stages lists 2 of 4 stages, one list of modules each: pp=2, with 2 of schedule='zb_v' on each rank"
            " (virtual_stages).",
        ),
        ({"plan": ["up"]}, "plan=['up'], but a plan is \"auto\" or a mapping {pattern: style}."),
        (
            {"pp": 2, "stages": ["blocks.0", "blocks.1"]},
            "stages=['blocks.0', 'blocks.1'], but it is a list with one list of module names per stage:"
            " [['blocks.0'], ['blocks.1']].",
        ),
    ],
    ids=lambda x: next(reversed(x)) if isinstance(x, dict) else "",
)
def test_arguments_of_other_types(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        MegaTPStrategy(**arguments)
    assert str(error.value) == f"MegaTPStrategy: {text}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tensor_parallel_size", "Did you mean `tp`?"),
        ("tp_size", "Did you mean `tp`?"),
        ("pipeline_parallel", "Did you mean `pp`?"),
        ("num_micro_batches", "Did you mean `microbatches`?"),
        ("activation_checkpointing", "Did you mean `recompute`?"),
        ("cpu_offload", "Did you mean `offload`?"),
        ("context_parallel_size", "There is no context parallelism;"),
        ("foo", "It has: tp, pp, dp, plan,"),
    ],
)
def test_unknown_arguments_are_told_what_is_meant(name: str, text: str) -> None:
    with pytest.raises(TypeError, match=rf"^MegaTPStrategy has no argument `{name}`\. {re.escape(text)}"):
        MegaTPStrategy(**{name: 2})


def test_a_misspelt_style_is_refused_where_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"the plan gives `a` the unknown style 'colum'. Did you mean `column`\?"):
        MegaTPStrategy(tp=2, plan={"a": "colum"})


def test_what_a_pipeline_takes_is_said_to_do_nothing_without_one() -> None:
    with pytest.warns(UserWarning, match="no effect at pp=1, where there is no pipeline: microbatches=4, schedule='gp"):
        MegaTPStrategy(tp=2, microbatches=4, schedule="gpipe")


@pytest.mark.parametrize("backend", ["mpi", "cpu:gloo,cuda:ncll"])
def test_backends_that_torch_does_not_have(backend: str) -> None:
    with pytest.raises(ValueError, match=rf"process_group_backend='{backend}', but this torch has no '.*gloo"):
        MegaTPStrategy(process_group_backend=backend)
    MegaTPStrategy(process_group_backend="cpu:gloo,cuda:gloo")


def test_a_config_s_choices_are_those_there_are() -> None:
    """LightningCLI names what the annotations list."""
    hints = get_type_hints(MegaTPStrategy.__init__)
    assert get_args(hints["schedule"]) == ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v")
    assert set(get_args(hints["schedule"])) == set(NAMES)
    assert get_args(hints["checkpoint"]) == ("file", "folder")


@pytest.mark.parametrize("plugin", [FSDPPrecision, DeepSpeedPrecision])
def test_precision_plugins_of_other_strategies(plugin: Any) -> None:
    """The first would leave the model in float32 without a word, the second would cast some of it."""
    with pytest.raises(ValueError, match=rf"{plugin.__name__} works with .* Use Trainer\(precision='bf16-mixed'\)"):
        Trainer(accelerator="cpu", devices=1, strategy=MegaTPStrategy(), plugins=[plugin("bf16-mixed")])


class Doubles(Precision):
    """A loss scale of one's own."""

    def pre_backward(self, tensor: Any, module: Any) -> Any:
        return super().pre_backward(2 * tensor, module)


def test_precision_plugins_with_a_backward_of_their_own() -> None:
    """At pp > 1 the loss would not be scaled, without a word."""
    with pytest.raises(ValueError, match="the precision plugin Doubles has its own `pre_backward`, which would not be"):
        Trainer(accelerator="cpu", devices=2, strategy=MegaTPStrategy(pp=2), plugins=[Doubles()])


def test_devices_that_do_not_fit_are_an_error_before_ranks_are_started() -> None:
    with pytest.raises(ValueError, match="world size 3 is not divisible by tp"):
        Trainer(accelerator="cpu", devices=3, strategy=MegaTPStrategy(tp=2))
