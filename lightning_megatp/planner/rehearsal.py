"""A training step without data: which bytes a rank keeps for backward, and in which unit.

The module is copied with parameters that have shapes only (fake tensors), its layers are swapped by the plan as on a
real rank, and the user's step runs once. What autograd would save is counted, so nothing here knows how attention or a
norm works: kernels, autocast and the plan decide, as in training. No process group is needed, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import copy
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.auto_plan.blocks import without_logging
from lightning_megatp.auto_plan.copies import uncopied
from lightning_megatp.batches.example import indices
from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.units import find_units
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.random_states import random_state_kept
from lightning_megatp.recompute.blocks import recompute_blocks
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.shim.fakes import CopiesFakes, fake_tensor_mode
from lightning_megatp.shim.lightning import trainer_of
from lightning_megatp.shim.torch import DisableTorchFunctionSubclass, storage_id, tree_leaves, tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard
from lightning_megatp.tensor.random import RankStream


@dataclass
class SavedForBackward:
    """What one microbatch keeps for backward on one tensor rank, all pipeline stages together."""

    saved: dict[str, dict[int, int]] = field(default_factory=dict)
    """Unit -> storage -> bytes. What is saved between units counts to the one before, that before the first one to it.
    A storage that several units save is listed in each."""
    intercepted: Counter[str] = field(default_factory=Counter)
    """Unit -> operations on feature shards, each looked at in Python, where code needs the sizes of the whole."""

    def by_stage(self, stage_of_unit: Mapping[str, int], stages: int) -> list[int]:
        """Bytes that each stage keeps; each has its own copy of what crosses a boundary."""
        found: list[dict[int, int]] = [{} for _ in range(stages)]
        for unit, storages in self.saved.items():
            found[stage_of_unit.get(unit, 0)].update(storages)
        return [sum(storages.values()) for storages in found]

    def of_block(self, block: str) -> tuple[int, int]:
        """Bytes that one block keeps, and how many of its operations are intercepted."""
        units = [unit for unit in self.saved if f"{unit}.".startswith(f"{block}.")]
        storages = {storage: nbytes for unit in units for storage, nbytes in self.saved[unit].items()}
        return sum(storages.values()), sum(self.intercepted[unit] for unit in units)

    @property
    def order(self) -> list[str]:
        """The units in the order in which the step called them."""
        return [unit for unit in self.saved if unit]


def skeleton(module: Any) -> Any:
    """A copy of a module whose parameters and buffers are on meta: it takes no memory. Its Trainer is the same."""
    return _copy(module, lambda name, x: torch.empty_like(x, device="meta"))


def without_values(batch: Any) -> Any:
    """A copy of a batch whose tensors are on meta: it takes no memory."""
    return tree_map(lambda x: torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x, batch)


def rehearse(
    module: Any,
    plugin: ParallelismPlugin,
    plan: ParallelPlan,
    batch: Any,
    *,
    rank: int = 0,
    pipelined: bool = False,
    recompute: RecomputeOptions | None = None,
    stage_of_unit: Mapping[str, int] | None = None,
    device: str = "cpu",
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> SavedForBackward:
    """Run the training step once, without data.

    Args:
        module: a LightningModule, its layers not swapped; on meta, or not. It is not changed.
        batch: a microbatch; its values don't matter.
        rank: in the tensor group.
        pipelined: whether values are whole between units.
        recompute: what backward computes again; None for nothing.
        stage_of_unit: of the pipeline, if there is one: it may recompute a number of blocks of each stage.
        device: whose kernels are to be counted; torch has to be built for it.
        around: the precision's context of a step.

    Raises:
        Exception: of the user's step, which may depend on values.
    """
    specs = plan.parameters if plan.tp > 1 else {}
    mode = fake_tensor_mode(allow_non_fake_inputs=True)

    def fake(name: str, x: Tensor) -> Tensor:
        shape = specs[name].spec(rank).local_shape if name in specs else x.shape
        with mode:
            return torch.empty(shape, dtype=x.dtype, device=device)

    shadow = _copy(module, fake)
    with mode, random_state_kept():
        parallel = _swapped(shadow, plugin, plan, rank, pipelined)
        if recompute is not None and recompute.kind != "none":
            recompute_blocks(parallel, recompute)
            assert parallel.recomputation is not None
            parallel.recomputation.choose(recompute, stage_of_unit)
        own = tree_map(lambda x: torch.empty_like(x, device=device) if isinstance(x, Tensor) else x, batch)
        held = {storage_id(x) for x in (*shadow.parameters(), *shadow.buffers(), *tree_leaves(own)) if _is_plain(x)}
        step = parallel.step(watch=False)
        with (
            without_logging(shadow),
            around(),
            torch.enable_grad(),
            CopiesFakes(),
            _recorded(shadow, held) as found,
            step,
        ):
            shadow.training_step(own, *indices(shadow.training_step))
    return found


def interception_seconds() -> float:
    """What looking at one operation on a feature shard costs on this machine: a small sum, less that of plain tensors;
    the least of five measurements."""
    context = TensorContext(cast(dist.ProcessGroup, _Alone(0, 2)), rehearsal=True)
    plain = torch.ones(4, 8)
    shard = FeatureShard.wrap(plain, FeatureLayout(-1, (((0, 8),), ((8, 16),)), 16, context))

    def least(x: Tensor) -> float:
        return min(timeit.repeat(lambda: x + x, number=300)) / 300

    return max(least(shard) - least(plain), 0.0)


class _Alone:
    """Stands in for the process group of one tensor rank, to which nobody sends."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class _NoStream(RankStream):
    """Random numbers that nobody draws."""

    def enter(self, device: torch.device) -> None:
        pass


def _swapped(
    module: nn.Module, plugin: ParallelismPlugin, plan: ParallelPlan, rank: int, pipelined: bool
) -> ParallelModule:
    context = TensorContext(cast(dist.ProcessGroup, _Alone(rank, plan.tp)), rehearsal=True)
    context.stream = _NoStream(rank)
    if plan.tp > 1:
        plugin.swap_all(module, plan, context, whole_between=pipelined)
    return ParallelModule(module, plan, context, plan.parameters if plan.tp > 1 else {})


@contextlib.contextmanager
def _recorded(module: nn.Module, held: set[int]) -> Iterator[SavedForBackward]:
    """Record what is saved for backward, by unit.

    Args:
        held: storages that don't count: parameters, buffers, the batch.
    """
    found = SavedForBackward()
    where, current = "", found.saved.setdefault("", {})
    kept: list[Tensor] = []  # so that no storage's id is used twice

    def enter(unit: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            nonlocal where, current
            where, current = unit, found.saved.setdefault(unit, {})

        return hook

    def pack(x: Tensor) -> Tensor:
        with DisableTorchFunctionSubclass():
            storage = storage_id(x)
            if storage not in held:
                kept.append(x)
                current[storage] = x.untyped_storage().nbytes()
        return x

    for unit in find_units(module):
        module.get_submodule(unit).register_forward_pre_hook(enter(unit), prepend=True)

    def count() -> None:
        found.intercepted[where] += 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), _Interceptions(count):
        yield found
    if first := found.order:
        found.saved[first[0]].update(found.saved.pop(""))


class _Interceptions(TorchFunctionMode):
    """Calls `count` for every operation on a feature shard."""

    def __init__(self, count: Callable[[], None]) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FeatureShard) for kind in types):
            self.count()
        return func(*args, **(kwargs or {}))


def _copy(module: Any, make: Callable[[str, Tensor], Tensor]) -> Any:
    """A deep copy with other parameters and buffers; what is shared stays shared."""
    memo: dict[int, Any] = dict(uncopied(module))
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(make(name, parameter), requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        memo[id(buffer)] = make(name, buffer)
    made = copy.deepcopy(module, memo)
    if (trainer := trainer_of(module)) is not None:
        made.trainer = trainer  # Lightning leaves it out of copies
    return made


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided
