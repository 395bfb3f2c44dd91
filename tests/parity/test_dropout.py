"""Dropout: masks of whole values are the same on all tensor ranks, masks of sharded values differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.parity.cases import Case
from tests.parity.compare import compare
from tests.parity.parallel import fit_case
from tests.parity.running import Run, Setting
from tests.parity.test_parity import Reference
from tests.ranks import run_ranks


class MaskRecorder(Callback):
    """Keeps, for each named dropout, which elements its first calls zeroed."""

    def __init__(self, names: tuple[str, ...], calls: int = 3) -> None:
        self.names, self.calls = names, calls
        self.masks: dict[str, list[Tensor]] = {name: [] for name in names}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name in self.names:
            layer = pl_module.get_submodule(name)
            assert type(layer) is nn.Dropout
            layer.register_forward_hook(lambda _, inputs, output, name=name: self._record(name, inputs[0], output))

    def _record(self, name: str, x: Any, y: Any) -> None:
        x, y = (getattr(value, "plain", value) for value in (x, y))  # of a sequence shard this rank's tokens
        if len(self.masks[name]) < self.calls:
            self.masks[name].append((y == 0) & (x != 0))


def _masks(rank: int, world_size: int, case: Case, names: tuple[str, ...]) -> dict[str, list[Tensor]]:
    recorder = MaskRecorder(names)
    fit_case(rank, world_size, case, (recorder,))
    return recorder.masks


@pytest.mark.parametrize("tp", [2, 4])
def test_dropout_at_replicated_places_is_that_of_one_device(tp: int, reference: Reference) -> None:
    case = Case("dropout", tp=tp, sequence=False)
    expected = reference(Setting("dropout"))
    assert expected.losses != reference(Setting("tied")).losses, "dropout did nothing"
    compare(expected, run_ranks(tp, fit_case, case), tp, case.precision)


@pytest.mark.parametrize("names", [("drop", "blocks.0.drop", "blocks.1.drop")])
def test_replicated_masks_are_equal_on_all_ranks(names: tuple[str, ...]) -> None:
    by_rank = run_ranks(2, _masks, Case("dropout", sequence=False), names)
    for name in names:
        first, second = (masks[name] for masks in by_rank)
        assert all(mask.any() for mask in first)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not torch.equal(first[0], first[1]), "each step has its own mask"


def test_masks_of_sharded_features_differ_and_replicated_ones_after_them_agree() -> None:
    names = ("blocks.0.mlp.drop", "blocks.1.mlp.drop", "blocks.0.drop", "blocks.1.drop")
    by_rank = run_ranks(2, _masks, Case("both_dropouts", sequence=False), names)
    for name in names:
        first, second = (masks[name] for masks in by_rank)
        assert all(mask.any() for mask in first)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b) == (".mlp." not in name), name
        assert not torch.equal(first[0], first[1]), "each step has its own mask"


def test_masks_of_sequence_shards_differ() -> None:
    names = ("blocks.0.drop", "blocks.1.drop")
    by_rank = run_ranks(2, _masks, Case("dropout", sequence=True), names)
    for name in names:
        for a, b in zip(*(masks[name] for masks in by_rank), strict=True):
            assert a.shape == b.shape
            assert not torch.equal(a, b), name


def test_masks_of_data_parallel_ranks_differ() -> None:
    names = ("drop", "blocks.0.drop")
    by_rank = run_ranks(4, _masks, Case("dropout", tp=2, dp=2, sequence=False), names)
    for name in names:
        for a, b, c, d in zip(*(masks[name] for masks in by_rank), strict=True):
            assert torch.equal(a, b) and torch.equal(c, d), "tensor ranks agree"
            assert not torch.equal(a, c), "data-parallel ranks have their own samples, and their own masks"


@pytest.mark.parametrize("model", ["attention_dropout", "both_dropouts"])
def test_dropout_inside_regions_trains_and_replicas_agree(model: str, reference: Reference) -> None:
    """Other, equally valid masks: the losses are near those without dropout, and no replica drifts."""
    runs: list[Run] = run_ranks(2, fit_case, Case(model))
    assert runs[0].losses == pytest.approx(runs[1].losses, abs=1e-12)
    without = reference(Setting("tied")).losses
    assert runs[0].losses != pytest.approx(without, abs=1e-6)
    assert runs[0].losses[-1] < without[0]
    for name, value in runs[0].local.items():
        if value.shape == runs[0].parameters[name].shape:
            assert torch.equal(value, runs[1].local[name]), f"{name} drifted"


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (run_ranks(2, fit_case, Case("both_dropouts"))[0].losses for _ in range(2))
    assert first == second
