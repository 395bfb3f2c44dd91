"""Callbacks, and batch norms, of a model in parts: what is refused, what is counted and where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import BackboneFinetuning, BasePredictionWriter, ModelPruning
from torch import nn

from lightning_megatp.detour import Detour
from lightning_megatp.strategy.batch_norm import BatchNormGroups
from lightning_megatp.strategy.callbacks import check_callbacks, count_replicas, warn_of_writers


def test_batch_norms_work_over_the_data_parallel_ranks() -> None:
    module, dp, own = nn.Sequential(nn.SyncBatchNorm(4), nn.SyncBatchNorm(4), nn.ReLU()), object(), object()
    module[1].process_group = own
    groups = BatchNormGroups(module, dp)  # type: ignore[arg-type]
    assert [module[0].process_group, module[1].process_group] == [dp, own]
    groups.leave()
    assert [module[0].process_group, module[1].process_group] == [None, own]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_detours_end_in_any_order(order: tuple[int, ...]) -> None:
    class Owner:
        def name(self) -> str:
            return "own"

    owner, alive = Owner(), {0, 1, 2}
    detours = [Detour(owner, "name", lambda call, i=i: f"{i} {call()}") for i in range(3)]
    assert owner.name() == "2 1 0 own"
    for each in order:
        detours[each].end()
        detours[each].end()
        alive.remove(each)
        assert owner.name() == " ".join([*map(str, sorted(alive, reverse=True)), "own"])
    assert not vars(owner)


def test_what_is_behind_several_detours_is_one_look_away() -> None:
    class Owner:
        def name(self) -> str:
            return "own"

    owner = Owner()
    for _ in range(3):
        Detour(owner, "name", lambda call: call())
    assert owner.name.__wrapped__.__code__ is Owner.name.__code__  # type: ignore[attr-defined]


def test_throughput_counts_copies_of_the_model() -> None:
    counted = Throughput(available_flops=1000, world_size=12)
    trainer = SimpleNamespace(callbacks=[SimpleNamespace(_throughputs={"train": counted})], world_size=12)
    mesh: Any = SimpleNamespace(size={"pp": 2, "tp": 2, "dp": 3}.__getitem__)
    for _ in range(2):
        count_replicas(trainer, mesh)
    assert (counted.world_size, counted.available_flops) == (3, 4000)


@pytest.mark.parametrize(
    ("callback", "sizes", "zero", "text"),
    [
        (ModelPruning("l1_unstructured"), (2, 1), 0, "tp=2, pp=1, zero=0 a rank holds a part"),
        (ModelPruning("l1_unstructured"), (1, 2), 0, "tp=1, pp=2, zero=0 a rank holds a part"),
        (ModelPruning("l1_unstructured"), (1, 1), 3, "tp=1, pp=1, zero=3 a rank holds a part"),
        (ModelPruning("l1_unstructured"), (1, 1), 0, None),
        (BackboneFinetuning(), (2, 2), 1, None),
    ],
)
def test_callbacks_that_need_the_whole_model(callback: Any, sizes: tuple[int, int], zero: int, text: str) -> None:
    trainer, mesh = SimpleNamespace(callbacks=[callback]), SimpleNamespace(size={"tp": sizes[0], "pp": sizes[1]}.get)
    if text is None:
        check_callbacks(trainer, mesh, zero)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"MegaTPStrategy: the callback {type(callback).__name__} .*{text}"):
        check_callbacks(trainer, mesh, zero)  # type: ignore[arg-type]


class ByProcess(BasePredictionWriter):
    def write_on_epoch_end(self, trainer: Any, *args: Any) -> None:
        print(f"predictions_{trainer.global_rank}.pt")


class ByTensorRank(BasePredictionWriter):
    def write_on_epoch_end(self, trainer: Any, *args: Any) -> None:
        print(trainer.strategy.mesh.rank("tp"))


def test_predictions_that_tensor_ranks_write_several_times_are_said(recwarn: pytest.WarningsRecorder) -> None:
    trainer = SimpleNamespace(
        callbacks=[ByTensorRank("epoch"), ByProcess("epoch")], state=SimpleNamespace(fn="predict")
    )
    warn_of_writers(trainer, 2)
    assert [str(x.message).split(",")[0] for x in recwarn] == [
        "MegaTPStrategy: ByProcess writes by the rank of the process"
    ]
