"""Tensors that units change themselves in each forward (the vector of a spectral norm, a running scale) and use where
backward needs their values.

On one device the backward of a microbatch comes before the next forward, so it finds what its own forward left. In a
pipeline other forwards come in between. Where a forward changes such a tensor, each microbatch gets its own: the module
is given a copy before the next one's forward, and the graph of the last one keeps what it has.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatp.origins import is_torchs
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.places import Place, changeable, copy_of, is_same
from lightning_megatp.shim.compiler import is_compiled

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS: tuple[type[nn.Module], ...] = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
"""Of torch, which change running statistics in their forward."""


@contextlib.contextmanager
def explaining_changes(plans: Sequence[SlicePlan], stage: int) -> Iterator[None]:
    """Around a backward: explain what it says of tensors that were changed in place.

    Args:
        plans: of the batch's microbatches.
        stage: whose backward it is.
    """
    try:
        yield
    except RuntimeError as error:
        if len(plans) == 1 or "modified by an inplace operation" not in str(error):
            raise
        changed = dict.fromkeys(name for plan in plans for name, on in plan.changed.items() if on == stage)
        names = ", ".join(f"`{name}`" for name in changed)
        raise RuntimeError(
            "MegaTPStrategy: backward needs a tensor that was changed in place since the forward of its microbatch."
            f" With pp > 1 forwards of other microbatches lie in between, here of {len(plans)}"
            f"{f', and the step changes {names}' if names else ''}. Change it in `on_train_batch_start`, assign a new"
            f" tensor instead (`x = x * 0.9`), or use microbatches=1. torch says: {error}"
        ) from error


class OwnValues:
    """Gives each microbatch its own of the tensors that its stage's units change in place, from what the forwards of
    batches 1, 2, 4, 8, ... did.

    Batch norms of torch don't need it (in training, backward asks for the batch's statistics), and compiled units are
    left alone.

    Args:
        units: of each of this rank's stages.

    Memory: a copy of each such tensor per microbatch under way; in batches in which it looks, of all buffers.
    """

    def __init__(self, units: Mapping[int, Sequence[nn.Module]]) -> None:
        modules = {stage: list(dict.fromkeys(_modules(own))) for stage, own in units.items()}
        self._modules: Mapping[int, Sequence[nn.Module]] = modules
        self._changing: dict[int, list[Place]] = {stage: [] for stage in units}
        self._norms = [
            x for own in units.values() for unit in own for x in unit.modules() if isinstance(x, BATCH_NORMS)
        ]
        self._replaced: dict[Place, Tensor] = {}
        """What was there before the batch."""
        self._batches, self._looks = 0, False

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Around the forwards and backwards of one batch of several microbatches. What a module had before, it has
        afterwards, with the last values."""
        self._batches += 1
        self._looks = self._batches & (self._batches - 1) == 0
        try:
            yield
        finally:
            self._put_back()

    @contextlib.contextmanager
    def forward(self, stage: int, changed: Sequence[Place] = ()) -> Iterator[None]:
        """Around a stage's forward of a microbatch.

        Args:
            changed: by the step itself, between units; those in units count.
        """
        own = set(map(id, self._modules[stage])) if changed else ()
        self._renew(dict.fromkeys([*self._changing[stage], *(place for place in changed if id(place.module) in own)]))
        before = dict(itertools.chain(*map(changeable, self._modules[stage]))) if self._looks else {}
        copies = {id(x): copy_of(x) for x in before.values()}
        yield
        for place, x in before.items():
            if place.value is x and place not in self._changing[stage] and not is_same(x, copies[id(x)]):
                self._changing[stage].append(place)

    def reasons(self, module: nn.Module) -> Iterator[str]:
        """Why a batch is not that of one device, as far as batches that were looked at have shown.

        Args:
            module: whose names the units have.
        """
        names = {id(x): name for name, x in module.named_modules()}
        norms = [f"`{names[id(x)]}`" for x in self._norms if x.training and id(x) in names]
        if norms:
            yield f"{_named(norms)} normalises over the samples of a microbatch, not of the batch. {ONE_BY_ONE}"
        changed = [f"`{names[id(x.module)]}.{x.leaf}`" for x in self._changing_numbers() if id(x.module) in names]
        if changed:
            yield (
                f"a block changes {_named(changed)} in its forward: once in each microbatch, where one device does it"
                f" once for the batch, and the next microbatch finds what that left. {ONE_BY_ONE}"
            )

    def is_reason(self, unit: nn.Module) -> bool:
        """Whether a unit, or a part of it, is among these reasons."""
        named = {id(x) for x in self._norms if x.training} | {id(x.module) for x in self._changing_numbers()}
        return any(id(x) in named for x in unit.modules())

    def _changing_numbers(self) -> list[Place]:
        """Places of real numbers; others may count."""
        places = ((x, x.value) for x in itertools.chain(*self._changing.values()))
        return [x for x, value in places if value is not None and value.is_floating_point()]

    def _renew(self, places: Iterable[Place]) -> None:
        copies: dict[int, Tensor] = {}
        """id -> copy, of which several places may have one."""
        for place in places:
            value = place.value
            if value is None or value.requires_grad:
                continue
            if id(value) not in copies:
                copies[id(value)] = copy_of(value)
            self._replaced.setdefault(place, value)
            place.put(copies[id(value)])

    def _put_back(self) -> None:
        for place, old in self._replaced.items():
            now = place.value
            if now is None or now.requires_grad or now.dtype != old.dtype:
                continue
            if now.shape == old.shape:
                with torch.no_grad():
                    old.copy_(now)
            else:
                old.data = now.detach()
            place.put(old)
        self._replaced.clear()


ONE_BY_ONE = (
    "The loss and the weights are those of one device that takes the microbatches one by one"
    " (`accumulate_grad_batches`); with microbatches=1 they are the batch's."
)


def _named(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _modules(units: Sequence[nn.Module]) -> Iterator[nn.Module]:
    plain = (unit for unit in units if not any(map(is_compiled, unit.modules())))
    for module in itertools.chain.from_iterable(unit.modules() for unit in plain):
        norm = isinstance(module, NORMS) and is_torchs(type(module).forward)
        if not norm and not isinstance(module, Metric):
            yield module
