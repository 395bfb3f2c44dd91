"""Which process this is to Lightning, and which copy of the model to the user's code that deals with samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatp.default_group import DefaultGroup
from lightning_megatp.hooks.around import set_up_among_copies
from lightning_megatp.shim.lightning import around_loader_hooks, around_training_step
from lightning_megatp.strategy.iteration import iterate_freely, iterate_in
from lightning_megatp.strategy.state import StrategyState


class CopyMethods(StrategyState):
    """What `trainer.global_rank`, `trainer.local_rank`, `trainer.world_size` and `trainer.num_devices` are."""

    _counted: tuple[int, int] | None = None
    """Rank and size on the dp axis, while copies are counted."""
    _process_devices: list[torch.device] | None = None
    """The devices of the processes on this machine."""
    _default_group: DefaultGroup | None = None
    """For what the user's code sends by itself; None where that is the world."""
    _loaders: tuple[Any, ...] = ()
    """Loaders that are read among copies."""

    def _set_up_copies(self) -> None:
        """When the mesh is made, and before loaders are."""
        copies = self._mesh().group("dp")
        self._default_group = None if copies is dist.group.WORLD else DefaultGroup(copies)
        around_loader_hooks(self._trainer(), self.among_copies)
        counting = None if self._default_group is None else self.counting_copies
        around_training_step(self._trainer(), counting)
        if self._default_group is not None:
            set_up_among_copies(self._trainer(), self.among_copies)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The user's loader. Data sets and samplers that ask for a rank when they are read are told the copy's."""
        loader = super().process_dataloader(dataloader)
        if self._default_group is not None:
            iterate_in(loader, self.among_copies)
            self._loaders += (loader,)
        return loader

    def _leave_loaders(self) -> None:
        """When the Trainer is done with them."""
        for loader in self._loaders:
            iterate_freely(loader)
        self._loaders = ()

    @property
    def global_rank(self) -> int:
        """The rank of the process; within `counting_copies`, of the copy of the model that it holds a part of."""
        return super().global_rank if self._counted is None else self._counted[0]

    @property
    def world_size(self) -> int:
        """The number of processes; within `counting_copies`, of copies of the model."""
        return super().world_size if self._counted is None else self._counted[1]

    @property
    def local_rank(self) -> int:
        """The rank of the process on its machine; within `counting_copies`, of the copy among those there."""
        if self._counted is None:
            return self.process_local_rank
        return self._counted[0] % len(self.parallel_devices or [None])

    @property
    def process_local_rank(self) -> int:
        """The rank of the process on its machine, at any time."""
        return super().local_rank

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of the processes on this machine; within `counting_copies`, one for each copy of the model on
        it."""
        if self._counted is None or self._process_devices is None:
            return self._process_devices
        return self._process_devices[: max(self._counted[1] // self.num_nodes, 1)]

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._process_devices = devices

    @property
    def process_rank(self) -> int:
        """The rank of the process, at any time."""
        return super().global_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of the processes, at any time: one writes files and logs."""
        return self.process_rank == 0

    @contextlib.contextmanager
    def counting_copies(self) -> Iterator[None]:
        """Around the user's steps. What these do by rank (which rows they take, the labels of a contrastive loss) is
        about ranks that see other samples. Those of tp and pp see the same, and have to do the same."""
        before = self._counted
        if self.mesh is not None:
            self._counted = self.mesh.rank("dp"), self.mesh.size("dp")
        try:
            yield
        finally:
            self._counted = before

    @contextlib.contextmanager
    def among_copies(self) -> Iterator[None]:
        """As `counting_copies`, where data is read, and around hooks that make loaders (samplers by rank) and
        optimizers (rates by the number of ranks); for torch.distributed and the environment, too. Every rank calls
        these; a step may be tried out by one alone."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.counting_copies())
            if self._default_group is not None:
                stack.enter_context(self._default_group.used())
                stack.enter_context(_in_environment(self._mesh().rank("dp"), self._mesh().size("dp")))
            yield


@contextlib.contextmanager
def _in_environment(rank: int, size: int) -> Iterator[None]:
    """What a launcher has put into the environment, for those who ask there (WebDataset, `split_dataset_by_node`)."""
    before = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    told = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ.update({name: told[name] for name in before})
    try:
        yield
    finally:
        os.environ.update(before)
