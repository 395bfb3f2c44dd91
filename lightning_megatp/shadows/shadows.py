"""Tensors that a user keeps beside the weights, cut as these are where hooks treat both element by element.

An average that was made in `__init__` is one of the whole model. The hook that updates it, or puts it in the weights'
place, finds this rank's part of each weight, and of a pipeline's weights those of its stages. So meanwhile the lists
and dicts of such tensors hold the same parts. What no hook changes is whole again afterwards, and steps find it so (the
anchor of a penalty); of what hooks change a rank keeps its part alone, and checkpoints get the whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.detour import Detour
from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.replicas import sums_of
from lightning_megatp.shadows.entries import Entry, merge_stages
from lightning_megatp.shadows.finding import Found, Weights, find_shadows
from lightning_megatp.shadows.late import LateCopies
from lightning_megatp.shadows.shadow import Shadow
from lightning_megatp.user_hooks import STEP_IN_HOOK, Hook

Gathered = dict[str, list[Entry]]
"""By path."""


class Shadows:
    """The user's copies and averages of weights beside one module.

    Args:
        whole: the module's weights before it was split, without values.
        parallel: the module, cut into stages and divided.
        mesh: who is where.
    """

    def __init__(self, whole: Weights, parallel: ParallelModule, mesh: ParallelMesh) -> None:
        self.whole, self._parallel, self._mesh = whole, parallel, mesh
        self._kept: list[Shadow] = []
        self._late = LateCopies(self, parallel, mesh)
        self._in_hook = False

    def add(self, found: Sequence[Found]) -> None:
        """Keep what was found, of the whole module."""
        known = self.slots
        for x in found:
            cut = self._parallel.pipeline is not None or any(map(self._parallel.is_cut, x.names.values()))
            if cut and (id(x.holder), x.key) not in known:
                self._kept.append(Shadow(x, self._parallel))

    @property
    def slots(self) -> frozenset[tuple[int, Any]]:
        """Where they are: id of the dict or list that holds one, and its key there."""
        return frozenset(kept.slot for kept in self._kept)

    @property
    def paths(self) -> list[str]:
        """By which people know them: `ema.shadow_params`."""
        return [kept.path for kept in self._kept]

    def renew(self, found: Found) -> None:
        """Keep what was made anew, whole, in the place of what was there."""
        self._kept = [kept for kept in self._kept if kept.slot != (id(found.holder), found.key)]
        self.add([found])

    def around(self, trainer: Any, hooks: Iterable[Hook]) -> Iterator[Detour]:
        """Let the user's hooks, of the module and of callbacks, find parts."""
        module = self._parallel.module

        def run(owner: Any, hook: str, call: Callable[[], Any]) -> Any:
            with self.as_held(), contextlib.ExitStack() as ends:
                for name in STEP_IN_HOOK if hook == "optimizer_step" else ():
                    ends.callback(Detour(trainer.strategy, name, self._run_step).end)
                result = call()
            if owner is module:
                self._late.after(hook)
            return result

        for owner, hook in hooks if self._kept or self._late.names else ():
            yield Detour(owner, hook, functools.partial(run, owner, hook))

    @contextlib.contextmanager
    def as_held(self) -> Iterator[None]:
        """Meanwhile they are as this rank has the weights. No communication."""
        if self._in_hook:  # called by another
            yield
            return
        try:
            self._enter_hook()
            yield
        finally:
            self._leave_hook()

    def _run_step(self, call: Callable[[], Any]) -> Any:
        if not self._in_hook:  # called by another
            return call()
        self._leave_hook()
        try:
            return call()
        finally:
            self._enter_hook()

    def _enter_hook(self) -> None:
        self._in_hook = True
        for kept in self._kept:
            kept.show_part()

    def _leave_hook(self) -> None:
        self._in_hook = False
        for kept in self._kept:
            kept.show_whole()

    @contextlib.contextmanager
    def buffers_as_whole(self, loads: bool = False) -> Iterator[None]:
        """Meanwhile those among the module's buffers are whole, as its state dict has them. At pp > 1 a rank has the
        present values of its own weights'.

        Args:
            loads: values are put into them; into those that were made before the split, that is.

        Communication: one all-gather over tp, and one over dp with zero > 0, for each that is cut; before a state dict
        an object all-gather over the ranks of this stage, of names.
        """
        buffers = [kept for kept in self._kept if kept.in_buffers] + ([] if loads else self._late_buffers())
        before = [(kept, kept.put_whole(kept.gathered())) for kept in buffers]
        try:
            yield
        finally:
            for kept, value in before:
                was_part = value[1]
                if not loads:
                    kept.put_back(value)
                elif was_part:
                    kept.cut_anew()

    @contextlib.contextmanager
    def as_whole(self, owners: Mapping[str, Any]) -> Iterator[None]:
        """Meanwhile all are whole, those too that were made after the split; in the host's memory, and on the
        first tensor rank of the first copy of the model alone.

        Args:
            owners: by name, what is looked through for those.

        Communication: as above; an object all-gather over the ranks of this stage, of names, and at pp > 1 one over
        stages, of the tensors.

        Warns:
            UserWarning: some could belong to several modules.
        """
        kept_here = [*self._kept, *self._made_of_parts(owners)]
        keeps = self._mesh.rank("tp") == self._mesh.rank("dp") == 0
        gathered: Gathered = {kept.path: [] for kept in kept_here}
        for kept in kept_here:
            for key, name, x in kept.gathered():
                if keeps:
                    gathered[kept.path].append(Entry(key, name, x.cpu()))
        if keeps and self._mesh.size("pp") > 1:
            gathered = self._of_all_stages(gathered)
        before = [(kept, kept.put_whole(gathered[kept.path])) for kept in kept_here]
        try:
            yield
        finally:
            for kept, value in before:
                kept.put_back(value)

    def _late_buffers(self) -> list[Shadow]:
        return [kept for kept in self._made_of_parts({"": self._parallel.module}) if kept.in_buffers]

    def _made_of_parts(self, owners: Mapping[str, Any]) -> list[Shadow]:
        """Those that were made after the split, on all ranks of this stage alike."""
        known = self.slots
        found, unclear = find_shadows(owners, Weights(self._parallel.module))
        warn_unclear(unclear, "A checkpoint gets what global rank 0 has of it")
        found = agree([x for x in found if (id(x.holder), x.key) not in known], self._mesh, "dp", "tp")
        return [Shadow(x, self._parallel, is_part=True) for x in found]

    def _of_all_stages(self, gathered: Gathered) -> Gathered:
        stages = self._mesh.exchange(gathered, "pp")
        if elsewhere := sorted({path for stage in stages for path in stage} - gathered.keys()):
            warn_once_per_run(
                f"`{elsewhere[0]}` follows weights of other pipeline stages than this one, and a checkpoint gets what"
                " global rank 0 has of it: nothing. Make it in `__init__`."
            )
        known = {kept.path: list(kept.names.values()) for kept in self._kept}
        return {
            path: merge_stages([stage.get(path, []) for stage in stages], known.get(path, self._parallel.order), path)
            for path in gathered
        }

    @property
    def modules(self) -> set[int]:
        """id of `module.__dict__` of modules whose buffers are averages."""
        return {shadow.slot[0] for shadow in self._kept if shadow.in_buffers}

    def tensors(self) -> list[Tensor]:
        """All that are there now."""
        return [x for kept in self._kept for x in kept.tensors()]

    def keep_whole(self, name: str) -> None:
        """A weight is about to be whole on all tensor ranks from now on.

        Communication: one all-gather over tp for each tensor of this weight that is cut.
        """
        for kept in self._kept:
            kept.keep_whole(name)


def agree(found: Sequence[Found], mesh: ParallelMesh, *axes: str) -> list[Found]:
    """What all ranks have found alike. By chance the values of a rank's part may be those of another module's.

    Communication: one object all-gather over the axes, of names.
    """
    of_ranks = mesh.exchange({x.path: list(x.names.values()) for x in found}, *axes)
    return [x for x in found if all(names.get(x.path) == list(x.names.values()) for names in of_ranks)]


@torch.no_grad()
def synchronize(found: Sequence[Found], mesh: ParallelMesh) -> None:
    """Give all ranks rank 0's values, before the module is split: its weights get those as well.

    Communication: one object all-gather over the world, of sums; where these differ, one broadcast per tensor.
    """
    tensors = [x for each in found for x in each.tensors]
    sums = [sums_of(x).tolist() for x in tensors]
    for x, *of_ranks in zip(tensors, *mesh.exchange(sums, *AXES), strict=True):
        if any(of_rank != of_ranks[0] for of_rank in of_ranks):
            value = x.cpu().contiguous()
            dist.broadcast(value.reshape(-1).view(torch.uint8), src=0, group=mesh.hosts(*AXES))
            x.copy_(value)


def owners_of(trainer: Any) -> dict[str, Any]:
    """Whose lists and dicts are looked through, by name; the same names where some rank has a callback of its own."""
    counts = Counter[str]()
    callbacks = {}
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        callbacks[f"{kind} {counts[kind]}"] = callback
        counts[kind] += 1
    return {"": trainer.lightning_module, **callbacks}


def warn_unclear(paths: Sequence[str], what: str) -> None:
    """Say of which lists and dicts it can't be told whose weights they follow."""
    for path in paths:
        warn_once_per_run(
            f"`{path}` holds tensors of the shapes of several modules' parameters, with other values. {what}. If they"
            " follow the weights of one of them (averages, say), make them in `on_fit_start`."
        )
