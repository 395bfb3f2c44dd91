"""Tensor peers train on the same batch whatever the user's data does; only dp splits the data."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.distributed import all_gather as gather_all
from torch.distributed import get_world_size
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.distributed.training import (
    DP2,
    PLAIN,
    TP2,
    TP2_DP2,
    WEIGHTS_ONLY,
    Layout,
    make_trainer,
    run_program,
    shared_directory,
    tokens,
)
from tests.parity.models import GPT
from tests.parity.variants import variant

LENGTH = 6


class BatchRecorder(Callback):
    """Keeps the batches the training step is given."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


class Augmented(Dataset):
    """Random content, from whatever random stream the loading process has."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 32, (LENGTH + 1,))
        return ids[:-1], ids[1:]


class RankDependent(IterableDataset):
    """Each process streams something else."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(100 + int(os.environ["RANK"]))
        for _ in range(12):
            ids = torch.randint(0, 32, (LENGTH + 1,), generator=generator)
            yield ids[:-1], ids[1:]


class Nested(Dataset):
    """Batches that hold more than tensors."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 32, (LENGTH + 1,))
        weight = torch.rand((), dtype=torch.float32)
        return {
            "ids": ids,
            "meta": {"name": f"sample {int(ids[0])}", "weight": weight},
            "flags": [bool(ids[0] % 2), None],
        }


def _keep(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return samples


class NestedGPT(GPT):
    def loss(self, batch: list[dict[str, Any]]) -> Tensor:  # type: ignore[override]
        ids = torch.stack([sample["ids"] for sample in batch])
        weight = sum(sample["meta"]["weight"] for sample in batch)
        return weight * super().loss((ids[:, :-1], ids[:, 1:]))


def _fit(layout: Layout, loader: DataLoader, module: Any = None, **options: Any) -> list[Any]:
    torch.manual_seed(1234 + int(os.environ.get("RANK", "0")))  # what a program without a seed amounts to
    recorder = BatchRecorder()
    trainer = make_trainer(layout, callbacks=[recorder], **options)
    trainer.fit(module or variant("untied").build(), loader)
    return recorder.batches


def _shuffled(layout: Layout) -> list[Any]:
    torch.manual_seed(77 + int(os.environ["RANK"]))
    return [batch[0] for batch in _fit(layout, DataLoader(tokens(16), batch_size=4, shuffle=True), max_epochs=2)]


def _random_sampler(layout: Layout) -> list[Any]:
    data = tokens(16)
    sampler = WeightedRandomSampler([1.0] * 16, 16)
    return [batch[0] for batch in _fit(layout, DataLoader(data, batch_size=4, sampler=sampler))]


def _augmented(layout: Layout, workers: int) -> list[Any]:
    loader = DataLoader(Augmented(), batch_size=4, num_workers=workers)
    return [batch[0] for batch in _fit(layout, loader)]


def _streamed(layout: Layout, workers: int) -> list[Any]:
    loader = DataLoader(RankDependent(), batch_size=4, num_workers=workers)
    return [batch[0] for batch in _fit(layout, loader)]


class Batches:
    """Any iterable is a loader for Lightning."""

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(RankDependent(), batch_size=4)


def _generated(layout: Layout) -> list[Any]:
    return [batch[0] for batch in _fit(layout, Batches())]  # type: ignore[arg-type]


class StopAfterTwo(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


def _uneven(layout: Layout, options: dict[str, Any]) -> list[str]:
    """As many batches as a user's own split of the data leaves to a rank."""
    loader = DataLoader(tokens(4 * (3 + 2 * int(os.environ["RANK"]))), batch_size=4)
    options = {**options, "use_distributed_sampler": False, "callbacks": [StopAfterTwo()]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, **options).fit(variant("untied").build(), loader)
    return [str(x.message) for x in caught if "training batches" in str(x.message)]


@pytest.mark.parametrize(
    ("layout", "options", "ends_first"),
    [
        (TP2, {}, False),
        (DP2, {"max_steps": 2, "accumulate_grad_batches": 2}, False),
        (DP2, {"max_steps": 3}, True),
        (TP2, {"limit_train_batches": 2}, True),
    ],
    ids=str,
)
def test_loaders_of_different_lengths_are_said(layout: Layout, options: dict[str, Any], ends_first: bool) -> None:
    """Not where an epoch ends for all ranks before the shortest loader does."""
    said, other = run_program(layout, _uneven, options)
    assert not other and len(said) == (0 if ends_first else 1)
    texts = ("rank 0 has 3", "rank 1 has 5", "limit_train_batches=3")
    assert all(text in message for message in said for text in texts)


def _check_peers(by_rank: list[list[Tensor]], layout: Layout, batches: int) -> None:
    for first in range(0, len(by_rank), layout.tp):
        for peer in range(first, first + layout.tp):
            assert len(by_rank[peer]) == batches
            for step, (a, b) in enumerate(zip(by_rank[first], by_rank[peer], strict=True)):
                assert torch.equal(a, b), f"ranks {first} and {peer} differ at step {step}"
    for first in range(layout.tp, len(by_rank), layout.tp):
        assert not torch.equal(by_rank[0][0], by_rank[first][0]), "data-parallel ranks have other samples"


@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_shuffling_without_a_seed(layout: Layout) -> None:
    _check_peers(run_program(layout, _shuffled), layout, batches=8 // layout.dp)


@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_a_random_sampler_without_a_seed(layout: Layout) -> None:
    _check_peers(run_program(layout, _random_sampler), layout, batches=4 // layout.dp)


class ByRank(GPT):
    """Written for DDP: its loader's samples, its labels, a weight of its loss and its rate go by the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def train_dataloader(self) -> DataLoader:
        data, size, rank = tokens(32), self.trainer.world_size, self.global_rank
        sampler = DistributedSampler(data, size, rank, shuffle=False)
        if dist.is_initialized():
            by_default = DistributedSampler(data, shuffle=False)
            assert list(by_default) == list(sampler)
        return DataLoader(data, batch_size=8 // size, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        copies = dist.get_world_size() if dist.is_initialized() else 1
        ranks = self.trainer.world_size + self.trainer.num_devices + copies
        return torch.optim.SGD(self.parameters(), lr=0.1 * ranks)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        size, rank = self.trainer.world_size, self.global_rank
        every = self.all_gather(batch[0]).flatten(0, -2)
        rows = torch.arange(len(batch[0]), device=self.device) + rank * len(batch[0])  # of a contrastive loss's labels
        assert torch.equal(every[rows], batch[0]) and len(every) == size * len(batch[0])
        return (1 + (batch_idx * size + rank) % 3) * super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def _by_rank(layout: Layout) -> tuple[list[float], bool]:
    trainer, module = make_trainer(layout, max_steps=4), ByRank()
    trainer.fit(module)
    return module.losses, trainer.world_size == trainer.num_devices == layout.ranks


@pytest.mark.parametrize(
    ("layout", "like"),
    [
        (TP2, PLAIN),
        (Layout(pp=2, microbatches=1), PLAIN),
        (TP2_DP2, Layout(dp=2)),
    ],
    ids=str,
)
def test_what_goes_by_the_rank_goes_by_the_copy_of_the_model(layout: Layout, like: Layout) -> None:
    expected = [losses for losses, _ in run_program(like, _by_rank)]
    for rank, (losses, counts_processes) in enumerate(run_program(layout, _by_rank)):
        assert losses == pytest.approx(expected[rank // layout.tp % layout.dp], abs=1e-9)
        assert counts_processes


class DividesItself(IterableDataset):
    """Takes every so many-th sample, by the rank it finds when it is read: in the environment, as WebDataset does, or
    from torch.distributed, as it does elsewhere."""

    def __init__(self, asks_environment: bool) -> None:
        self.asks_environment = asks_environment

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self.asks_environment:
            rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        worker = get_worker_info()
        parts, part = (
            (size, rank) if worker is None else (size * worker.num_workers, rank * worker.num_workers + worker.id)
        )
        for n in range(part, 32, parts):
            yield tokens(32)[n]


def _divides_itself(layout: Layout) -> list[list[Tensor]]:
    found = []
    for workers in 0, 2:
        for asks_environment in False, True:
            os.environ["WORLD_SIZE"] = str(layout.ranks)  # as launchers do
            loader = DataLoader(DividesItself(asks_environment), batch_size=4, num_workers=workers)
            before = type(loader)
            found.append([batch[0] for batch in _fit(layout, loader, max_epochs=1)])
            assert type(loader) is before
    return found


@pytest.mark.parametrize(("layout", "like"), [(TP2, PLAIN), (Layout(pp=2), PLAIN), (TP2_DP2, Layout(dp=2))], ids=str)
def test_data_divided_by_rank_while_it_is_read(layout: Layout, like: Layout) -> None:
    expected = run_program(like, _divides_itself)
    for rank, found in enumerate(run_program(layout, _divides_itself)):
        for batches, wanted in zip(found, expected[rank // layout.tp % layout.dp], strict=True):
            assert len(batches) == len(wanted) and all(map(torch.equal, batches, wanted))


class Gather(torch.autograd.Function):
    """As contrastive losses have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        dist.all_reduce(grad := grad.clone())
        return grad[dist.get_rank() * ctx.rows :][: ctx.rows]


class Contrastive(ByRank):
    """Communicates by itself, in forward and backward."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        own = F.normalize(self.trunk(batch[0]).mean(1), dim=-1)
        every, scale = own, torch.tensor(float(self.global_rank + 2), dtype=own.dtype)
        if dist.is_initialized():
            every = Gather.apply(own) if batch_idx % 2 else torch.cat(torch.distributed.nn.functional.all_gather(own))
            dist.broadcast(scale, src=dist.get_world_size() - 1)
            dist.all_reduce(scale, op=dist.ReduceOp.SUM)
            scale = scale / dist.get_world_size()
        labels = torch.arange(len(own)) + self.global_rank * len(own)
        return F.cross_entropy(scale * own @ every.T, labels)


class ManualContrastive(Contrastive):
    """Communicates after a backward, too."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]
        total = torch.ones(())
        if dist.is_initialized():
            dist.all_reduce(total)
        assert total == self.trainer.world_size
        return loss


class Ring(ByRank):
    """Sends to its neighbours, calls torch's functions by names of its own, and names no first rank."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        own = F.normalize(self.trunk(batch[0]).mean(1), dim=-1)
        size, rank = (get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        other = torch.zeros_like(own) if size > 1 else own.detach()
        if size > 1:
            after, before = (rank + 1) % size, (rank - 1) % size
            if batch_idx % 2:
                sends, receives = dist.P2POp(dist.isend, own.detach(), after), dist.P2POp(dist.irecv, other, before)
                for work in dist.batch_isend_irecv([sends, receives]):
                    work.wait()
            else:
                sending = dist.isend(own.detach(), after)
                assert dist.recv(other, before) == before
                sending.wait()
            every = [torch.empty_like(own) for _ in range(size)]
            gather_all(every, own.detach())
            assert torch.equal(every[before], other)
            told = [rank]
            dist.broadcast_object_list(told)
            assert told == [0]
            dist.gather(own.detach(), every if rank == 0 else None)
            assert rank or torch.equal(every[before], other)
        return (own - other.flip(0)).square().mean()


def _contrastive(layout: Layout, kind: type[ByRank]) -> list[float]:
    trainer, module = make_trainer(layout, max_steps=4), kind()
    trainer.fit(module)
    return module.losses


@pytest.mark.parametrize(
    ("layout", "like", "kind"),
    [
        (TP2, PLAIN, Contrastive),
        (TP2_DP2, DP2, Contrastive),
        (TP2_DP2, DP2, ManualContrastive),
        (TP2, PLAIN, Ring),
        (TP2_DP2, DP2, Ring),
        (Layout(pp=2, microbatches=1), PLAIN, Contrastive),
        (Layout(pp=2, dp=2, microbatches=1), DP2, Contrastive),
    ],
    ids=str,
)
def test_messages_of_a_step_go_between_copies_of_the_model(layout: Layout, like: Layout, kind: type[ByRank]) -> None:
    expected = run_program(like, _contrastive, kind)
    for rank, losses in enumerate(run_program(layout, _contrastive, kind)):
        assert losses == pytest.approx(expected[rank // layout.tp % layout.dp], abs=1e-9)


class AtStart(Callback):
    """Seeds, or draws, between set-up and the first batch."""

    def __init__(self, seeds: bool) -> None:
        self.seeds = seeds
        self.noise = torch.empty(0)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.seeds:
            torch.manual_seed(9)
        else:
            self.noise = torch.rand(3)


def _random_at_start(layout: Layout, seeds: bool) -> list[Tensor]:
    torch.manual_seed(77)
    recorder, at_start = BatchRecorder(), AtStart(seeds)
    trainer = make_trainer(layout, callbacks=[recorder, at_start], strategy={"plan": "auto"})
    trainer.fit(variant("untied").build(), DataLoader(tokens(16), batch_size=4, shuffle=True))
    return [at_start.noise, *(batch[0] for batch in recorder.batches), torch.get_rng_state()]


@pytest.mark.parametrize("seeds", [True, False])
def test_random_numbers_between_set_up_and_the_first_batch_are_those_of_one_device(seeds: bool) -> None:
    expected = run_program(PLAIN, _random_at_start, seeds)[0]
    for found in run_program(TP2, _random_at_start, seeds):
        assert all(map(torch.equal, found, expected)), "a plan was looked for, which starts the loader early"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_random_augmentations(layout: Layout, workers: int) -> None:
    _check_peers(run_program(layout, _augmented, workers), layout, batches=2 // layout.dp)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_a_stream_that_depends_on_the_rank(layout: Layout, workers: int) -> None:
    _check_peers(run_program(layout, _streamed, workers), layout, batches=3)


def test_an_iterable_that_depends_on_the_rank() -> None:
    _check_peers(run_program(TP2, _generated), TP2, batches=3)


def _nested(layout: Layout) -> list[Any]:
    torch.manual_seed(5)
    return _fit(layout, DataLoader(Nested(), batch_size=4, collate_fn=_keep), NestedGPT(), model="tied")


def test_nested_batches_with_text_and_flags() -> None:
    first, second = run_program(TP2, _nested)
    assert len(first) == len(second) == 2
    for samples, peers in zip(first, second, strict=True):
        for a, b in zip(samples, peers, strict=True):
            assert torch.equal(a["ids"], b["ids"]) and a["meta"] == b["meta"] and a["flags"] == b["flags"]


def _samplers(layout: Layout, kind: str) -> tuple[str, int, int, bool, bool]:
    data = tokens(16)
    given = {
        "sequential": SequentialSampler(data),
        "random": RandomSampler(data),
        "weighted": WeightedRandomSampler([1.0] * 16, 16),
    }[kind]
    trainer = make_trainer(layout)
    trainer.fit(variant("untied").build(), DataLoader(data, batch_size=4, sampler=given))
    used = trainer.train_dataloader.sampler  # type: ignore[union-attr]
    ours = isinstance(used, DistributedSampler)
    return type(used).__name__, getattr(used, "num_replicas", 0), getattr(used, "rank", 0), ours, used is given


@pytest.mark.parametrize("kind", ["sequential", "random", "weighted"])
def test_at_dp_1_the_users_sampler_is_untouched(kind: str) -> None:
    for _, _, _, distributed, same in run_program(TP2, _samplers, kind):
        assert same and not distributed


@pytest.mark.parametrize("kind", ["sequential", "random", "weighted"])
@pytest.mark.parametrize("layout", [DP2, TP2_DP2], ids=str)
def test_at_dp_2_samples_are_split_over_dp_alone(layout: Layout, kind: str) -> None:
    for rank, (_, replicas, index, distributed, _) in enumerate(run_program(layout, _samplers, kind)):
        assert distributed
        assert (replicas, index) == (2, rank // layout.tp)


class Noisy(Dataset):
    """Noise from generators of its own."""

    def __init__(self) -> None:
        self.inputs, self.targets = tokens(8).tensors
        self.drawn, self.generators = 0, {"python": random.Random(1), "numpy": np.random.default_rng(2)}
        self.old, self.torch = np.random.RandomState(3), torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.drawn += 1
        drawn = self.generators["python"].randrange(32), self.generators["numpy"].integers(32), self.old.randint(32)
        noise = torch.randint(0, 32, (LENGTH,), generator=self.torch) + sum(int(x) for x in drawn)
        return (self.inputs[index] + noise) % 32, self.targets[index]


class NoisyData(LightningDataModule):
    """More noise on the way, of a generator that the datamodule has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.data, self.generator = 0, Noisy(), torch.Generator().manual_seed(5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Subset(self.data, range(8)), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.rows += len(batch[0])
        noise = torch.randint(0, 32, batch[0].shape, generator=self.generator)
        return (batch[0] + noise) % 32, batch[1]


class NoisyGPT(GPT):
    """And in the step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chance = random.Random(6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.chance.random()
        self.log("noisy", loss)
        return loss


def _noisy(layout: Layout) -> tuple[list[Any], dict[str, float], int, int]:
    torch.manual_seed(0)
    recorder, data = BatchRecorder(), NoisyData()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[recorder])
    trainer.fit(NoisyGPT(), datamodule=data)
    return recorder.batches, {k: float(v) for k, v in trainer.callback_metrics.items()}, data.rows, data.data.drawn


@pytest.mark.parametrize("layout", [TP2, Layout(pp=2, microbatches=1)], ids=str)
def test_generators_and_counts_of_the_datas_own_are_put_back(layout: Layout) -> None:
    batches, logged, *counts = run_program(PLAIN, _noisy)[0]
    for found, metrics, *counted in run_program(layout, _noisy):
        assert all(torch.equal(a, b) for x, y in zip(found, batches, strict=True) for a, b in zip(x, y, strict=True))
        assert metrics == pytest.approx(logged, rel=1e-9)
        assert counted == counts


class ByEpoch(LightningDataModule):
    """Other data in each epoch, as the Trainer counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        self.asked.append((self.trainer.current_epoch, self.trainer.global_step))
        return DataLoader(tokens(12, seed=self.asked[-1][0]), batch_size=4)


def _by_epoch(layout: Layout, every: int, root: str) -> tuple[list[tuple[int, int]], list[Any], int]:
    """Resumed in the middle of the second epoch."""
    file, recorder, data = shared_directory(layout, "by_epoch", root) / "middle.ckpt", BatchRecorder(), ByEpoch()
    options = {"strategy": {"plan": "auto"}, "reload_dataloaders_every_n_epochs": every}
    first = make_trainer(layout, **options, max_steps=5, max_epochs=-1)
    first.fit(GPT(), datamodule=ByEpoch())
    first.save_checkpoint(file)
    second = make_trainer(layout, **options, max_epochs=6, callbacks=[recorder])
    second.fit(GPT(), datamodule=data, ckpt_path=file, **WEIGHTS_ONLY)
    return data.asked, recorder.batches, second.global_step


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("layout", [TP2, Layout(pp=2)], ids=str)
def test_resumed_loaders_are_those_of_the_epoch(layout: Layout, every: int, tmp_path: Path) -> None:
    asked, batches, steps = run_program(PLAIN, _by_epoch, every, str(tmp_path))[0]
    assert [epoch for epoch, _ in asked] == ([2] if every == 0 else [2, 4])
    for found, given, taken in run_program(layout, _by_epoch, every, str(tmp_path)):
        assert (found, taken) == (asked, steps)
        assert all(torch.equal(a, b) for x, y in zip(given, batches, strict=True) for a, b in zip(x, y, strict=True))
