"""Full recomputation: a block keeps its inputs, and backward runs it again.

Source: Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost). Inputs divided over the tensor ranks:
Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatp.building.recording import default_dtype
from lightning_megatp.given import Holding
from lightning_megatp.messages import warn_once_per_run, with_article
from lightning_megatp.places import Place, changeable, copy_of, is_same
from lightning_megatp.plan.ranges import split_evenly
from lightning_megatp.shim.fakes import FakeTensor, is_fake
from lightning_megatp.shim.torch import tensor_version, tree_flatten, tree_unflatten
from lightning_megatp.shim.transformers import without_cache
from lightning_megatp.tensor.collectives import all_gather
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.lineage import enters_region
from lightning_megatp.tensor.saving import unwrapped


class InputShares:
    """This rank's shares of values that are the same on all tensor ranks.

    Args:
        context: of the parallel layers.

    Memory: 1 / t of each value; one that several blocks get has one share.
    Communication: (t - 1) / t * numel(x) elements received per value that is put together again.
    """

    def __init__(self, context: TensorContext) -> None:
        self.context = context
        self._known: Any = WeakTensorKeyDictionary()

    def take(self, x: Tensor) -> Tensor | None:
        """(ceil or floor of numel(x) / t,), a copy; None of what is too small, no activation, or not dense."""
        context = self.context
        divisible = type(x) in (Tensor, FakeTensor) and x.is_floating_point() and x.requires_grad and x.is_contiguous()
        if not divisible or context.open_region is not None or x.numel() < context.size or context.size == 1:
            return None
        version, share = self._known.get(x, (None, None))
        if version != tensor_version(x):
            start, stop = split_evenly(x.numel(), context.size)[context.rank]
            share = x.detach().view(-1)[start:stop].clone()
            self._known[x] = tensor_version(x), share
        return share

    def put_together(self, share: Tensor, shape: torch.Size) -> Tensor:
        """The whole value. Every tensor rank has to call it at the same point, as for the block's own collectives."""
        sizes = [stop - start for start, stop in split_evenly(shape.numel(), self.context.size)]
        return all_gather(share, self.context.group, 0, sizes).view(shape)


@dataclass
class Input:
    """A tensor that a block is called with."""

    kept: Tensor
    """What is kept of it until backward, a plain tensor without a graph."""
    needs_gradient: bool
    whole: Callable[[Tensor], Tensor] | None = None
    """Puts together what was kept as a share."""
    wrap: Callable[[Tensor], Tensor] | None = None
    """From a rank's own part to the shard that the block gets."""

    def restore(self, kept: Tensor) -> Tensor:
        """What the block gets in the recomputation: the same value, cut off from the graph it came from."""
        x = kept.detach() if self.whole is None else self.whole(kept)
        x = x.requires_grad_() if self.needs_gradient else x
        return x if self.wrap is None else self.wrap(x)


class FullRecompute:
    """Runs one block such that of each call only the inputs are kept.

    Args:
        block: whose forward it is.
        shares: divides inputs over the tensor ranks.

    Memory: the block's tensor inputs; 1 / t of those that are the same on all tensor ranks.
    """

    def __init__(self, block: nn.Module, shares: InputShares) -> None:
        self._name = type(block).__name__
        self._shares = shares
        self._changing = _Changing(block)
        self._inside: dict[int, bool] = {}
        """Which arguments are values of a tensor region, other ones on each rank; found out at the first call, by a
        walk of their graph."""

    def __call__(self, call: functools.partial[Any]) -> Any:
        first = without_cache(call.args, call.keywords)
        leaves, structure = tree_flatten(first)
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        inputs = {i: self.input(i, x) for i, x in tensors.items()}
        versions = [tensor_version(x) for x in tensors.values()]
        others = [None if i in tensors else x for i, x in enumerate(leaves)]
        given = [first]
        before, holding = self._changing.copies(), Holding(others)
        function, dtype = call.func, torch.get_default_dtype()  # 64-true and bf16-true set it for the step alone

        def run(*kept: Tensor) -> Any:
            if given:
                args, kwargs = given.pop()  # itself: the block may fill a list
                return function(*args, **kwargs)
            now = _restored(inputs, kept)
            args, kwargs = tree_unflatten([now.get(i, x) for i, x in enumerate(others)], structure)
            with self._again(dtype, before), holding.again():
                return function(*args, **kwargs)

        result = checkpoint(run, *(x.kept for x in inputs.values()), use_reentrant=False)
        for x in inputs.values():
            del x.kept  # the checkpoint has them
        self._check_unchanged(tensors, versions)
        self._changing.learn(before)
        return result

    @contextlib.contextmanager
    def _again(self, dtype: torch.dtype, before: dict[Place, Tensor]) -> Iterator[None]:
        with default_dtype(dtype), self._changing.as_before(before):
            yield

    def input(self, position: int, x: Tensor) -> Input:
        """What is kept of an argument."""
        if position not in self._inside:
            self._inside[position] = x.grad_fn is not None and enters_region(x)
        share = None if self._inside[position] else self._shares.take(x)
        if share is not None:
            return Input(share, True, whole=functools.partial(self._shares.put_together, shape=x.shape))
        plain, wrap = unwrapped(x)
        return Input(plain.detach(), x.requires_grad, wrap=wrap)

    def _check_unchanged(self, tensors: dict[int, Tensor], versions: list[int]) -> None:
        if [tensor_version(x) for x in tensors.values()] != versions:
            raise RuntimeError(
                f"MegaTPStrategy: {with_article(self._name)} changes its input in place (`x += ...`), so it can't be"
                ' run again from it. Write `x = x + ...`, or leave such blocks out: recompute="selective" or "none".'
            )


def _restored(inputs: dict[int, Input], kept: tuple[Tensor, ...]) -> dict[int, Tensor]:
    return {i: x.restore(saved) for (i, x), saved in zip(inputs.items(), kept, strict=True)}


class _Changing:
    """Tensors that a block's own forward changes (running statistics): running it again must neither see nor change
    their new values.

    Which modules do so is learned from the first call, of which all that are `changeable` are copied. Module by module,
    since not every change shows in a tensor's version.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._places: list[Place] | None = None
        """As the first call finds them that has their values: set-up, dry runs and rehearsals may not."""
        self._modules: set[nn.Module] | None = None
        self._versions: dict[Place, tuple[int, int]] = {}

    def copies(self) -> dict[Place, Tensor]:
        """Copies of what a call may change."""
        found = self._found()
        self._versions = {place: (id(x), tensor_version(x)) for place, x in found.items()}
        changing = self._modules
        return {place: copy_of(x) for place, x in found.items() if changing is None or place.module in changing}

    def learn(self, copies: dict[Place, Tensor]) -> None:
        """After the call: forget the copies of what it did not change."""
        if self._places is None:
            return
        if self._modules is None:  # by value: batch norm changes its statistics without telling their versions
            changed = {place for place, copy in copies.items() if not is_same(place.value, copy)}
        else:
            now = {place: (id(x), tensor_version(x)) for place, x in self._found().items()}
            changed = {place for place, version in now.items() if self._versions.get(place) != version}
        for place in changed - copies.keys():
            warn_once_per_run(
                f"`{place.leaf}` of {with_article(type(place.module).__name__)} changes in its forward from now on."
                " This once, the recomputation in backward sees the new value."
            )
        self._modules = (self._modules or set()) | {place.module for place in changed}
        for place in [place for place in copies if place.module not in self._modules]:
            del copies[place]

    def _found(self) -> dict[Place, Tensor]:
        if self._places is None:
            modules = list(self._block.modules())
            if any(is_fake(x) for m in modules for x in (*dict.values(m._parameters), *m._buffers.values())):
                return {}
            self._places = [place for module in modules for place, _ in changeable(module)]
        return {place: x for place in self._places if (x := place.value) is not None}

    @contextlib.contextmanager
    def as_before(self, copies: dict[Place, Tensor]) -> Iterator[None]:
        """Run with the old values, and throw away what becomes of them."""
        now = {place: place.value for place in copies}
        try:
            for place, copy in copies.items():
                place.put(copy_of(copy))
            yield
        finally:
            for place, x in now.items():
                if x is not None:
                    place.put(x)
