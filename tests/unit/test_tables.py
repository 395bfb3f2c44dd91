"""Tables for people: what shares a row, and where names are folded."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from lightning_megatp.commands.show import print_plan
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.planner.report import MemoryReport, RankMemory
from lightning_megatp.planner.sizes import Bytes
from lightning_megatp.tables import grouped, layers_table, share


def test_names_share_a_row_if_all_else_is_alike() -> None:
    keys = {f"blocks.{i}.mlp.{j}": "row" if j == 2 else "column" for i in range(3) for j in (0, 2, 4)}
    assert list(grouped(keys)) == ["blocks.*.mlp.{0,4}", "blocks.*.mlp.2"]
    assert list(grouped({f"layers.{i}.up": i < 4 for i in range(12)})) == ["layers.{0..3}.up", "layers.{4..11}.up"]
    assert list(grouped({"head": 1, "blocks.0.up": 1})) == ["head", "blocks.0.up"]


def llama(layers: int) -> nn.Module:
    block = {"q_proj": (8, 8), "o_proj": (8, 8), "gate_proj": (8, 384), "up_proj": (8, 384), "down_proj": (384, 8)}
    model = nn.Module()
    model.model = nn.ModuleDict()
    of = lambda: nn.ModuleDict({name: nn.Linear(*sizes) for name, sizes in block.items()})  # noqa: E731
    model.model.layers = nn.ModuleList(of() for _ in range(layers))
    return model


def llama_plan(model: nn.Module) -> ParallelPlan:
    row = {"o_proj": "row", "down_proj": "row"}
    plan = {f"model.layers.*.{name}": row.get(name, "column") for name in ("q_proj", "o_proj", "gate_proj", "up_proj")}
    return resolve(plan | {"model.layers.*.down_proj": "row"}, model, 2)


def rendered(what: object, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [50, 80, 160])
def test_names_and_ranges_are_whole_at_any_width(width: int) -> None:
    plan = llama_plan(llama(32))
    text = rendered(layers_table("", plan.layers.values(), 0, "on rank 0", {}), width)
    for name in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert text.count(f" {name}") == 1
    assert "[0:192]" in text and "(x32)" in text


def test_a_note_of_most_rows_stands_once() -> None:
    plan = llama_plan(llama(2))
    how = dict.fromkeys(plan.layers, "as the model's own plan says")
    assert rendered(layers_table("", plan.layers.values(), 0, "on rank 0", how), 80).count("own plan says") == 1
    how |= {name: "as it is" for name in how if name.endswith("q_proj")}
    text = " ".join(rendered(layers_table("", plan.layers.values(), 0, "on rank 0", how), 160).split())
    assert "Layers without a note: as the model's own plan says." in text and text.count("runs as it is") == 1


def test_a_plan_of_ones_own_has_a_row_per_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(32)
    print_plan(model, llama_plan(model), [], [])
    text = capsys.readouterr().out
    assert "What is split over tp=2" in text and "Outside" not in text and "the user's plan" not in text
    assert "192 of 384: [0:192]" in text and text.count("\n") < 30


def test_stages_are_shown_with_their_true_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    print_plan(model, ParallelPlan(1), [], [], {str(unit): unit // 3 for unit in range(4)})
    text = capsys.readouterr().out
    assert "stage 0 │ 0, 1, 2 │         60 │" in text and "stage 1 │ 3       │         20 │" in text


def test_ranges_break_between_them_only() -> None:
    assert share(((0, 32), (64, 96)), 192) == "64 of 192: [0:32], [64:96]"


def test_memory_is_predicted_in_one_row_and_measured_in_another() -> None:
    held = Bytes(2**30, 0, 2**30, 2**31, 2**20)
    text = rendered(MemoryReport((RankMemory(0, 0, held, held),)).table(), 100)
    assert " / " not in text
    assert sum(line.count("GiB") for line in text.splitlines() if "predicted │" in line) == 4
    assert sum(line.count("GiB") for line in text.splitlines() if "measured  │" in line) == 4
