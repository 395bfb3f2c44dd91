"""What the user's hooks put into a checkpoint: there weights are whole, as on one device.

`checkpoint["adapter"] = self.model.state_dict()` in `on_save_checkpoint` has this rank's parts of its stage's weights,
and one rank writes the file. So weights are followed through such a hook, up to what it has added to the checkpoint,
and are gathered there. Averages that the user keeps are shown whole meanwhile (`shadows/`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.detour import Detour
from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.divided import explaining_written_rows
from lightning_megatp.parts.rows import own_part
from lightning_megatp.parts.weights import part_written, writes
from lightning_megatp.shadows.entries import Entry, merge_stages
from lightning_megatp.shadows.shadows import owners_of
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.functions import operation_name, operation_names
from lightning_megatp.user_hooks import is_users

_COPIES = operation_names("data detach clone to cpu cuda float half bfloat16 double contiguous type requires_grad_")
"""Operations of which the result is the same weight."""
_CONTAINERS = (dict, list, tuple)
_HOOKS = ("on_save_checkpoint", "state_dict")
Path = tuple[Any, ...]
"""Keys and indices, from the outside in."""
Entries = dict[Path, list[Entry]]
"""Path of a container -> each weight in it."""


def watch_saving(
    trainer: Any, parallel: ParallelModule, mesh: ParallelMesh, gathers: Callable[[], bool]
) -> Iterator[Detour]:
    """Complete what hooks of the module and of callbacks put into checkpoints, while the Trainer saves one: at other
    times one rank may call them alone (for a log of a callback's `state_dict`). Of a callback that only some ranks have
    nothing is completed.

    Args:
        trainer: about to run.
        parallel: the module, cut into stages and divided.
        mesh: who is where.
        gathers: whether all ranks save together.
    """

    def save(hook: str, everywhere: bool, call: functools.partial[Any]) -> Any:
        shadows, followed = parallel.shadows if everywhere else None, _Followed(parallel)
        complete = functools.partial(_completed, followed=followed, parallel=parallel, mesh=mesh, hook=hook)
        with contextlib.nullcontext() if shadows is None else shadows.as_whole(owners_of(trainer)):
            if hook == "state_dict":
                with followed:
                    state = call()
                return complete({hook: state}, everywhere)[hook]
            checkpoint = call.args[-1]
            before, state = dict(checkpoint), checkpoint.get("state_dict", {})
            before_state = dict(state)
            followed.leave_out(state.values())
            with followed, explaining_written_rows(hook), _explaining_outlines(hook):
                call()
            if followed.written is not None:
                warn_once_per_run(part_written(hook, followed.written))
        added = {key: x for key, x in checkpoint.items() if before.get(key) is not x}
        changed = {key: x for key, x in state.items() if before_state.get(key) is not x}
        completed = complete({"added": added, "changed": changed}, everywhere)
        checkpoint.update(completed["added"])
        state.update(completed["changed"])
        return None

    def save_together(call: Callable[[], Any]) -> Any:
        if not gathers():
            return call()
        owners = owners_of(trainer)
        hooks = {(name, hook) for name, owner in owners.items() for hook in _HOOKS if is_users(owner, hook)}
        hooks.discard(("", "state_dict"))  # the module's, which the strategy completes
        everywhere = hooks.intersection(*mesh.exchange(hooks, *AXES))
        with contextlib.ExitStack() as ends:
            ends.enter_context(parallel.parts_expected())
            for name, hook in hooks:
                through = functools.partial(save, hook, (name, hook) in everywhere)
                ends.callback(Detour(owners[name], hook, through).end)
            return call()

    yield Detour(trainer, "save_checkpoint", save_together)


@contextlib.contextmanager
def _explaining_outlines(hook: str) -> Iterator[None]:
    """Explain what fails in a hook since this rank has no values of a whole state."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if "meta tensor" not in str(error) and "meta device" not in str(error):
            raise
        raise RuntimeError(
            f"MegaTPStrategy: `{hook}` looks at values of the whole model, which the checkpoint has on global rank 0"
            " alone, where it is written; the other ranks find names and shapes. Do it there, `if"
            " trainer.is_global_zero:`."
        ) from error


class _Followed(TorchFunctionMode):
    """Knows what is a weight, or a buffer of a stage, or a copy of one that was made meanwhile."""

    def __init__(self, parallel: ParallelModule) -> None:
        super().__init__()
        self._parallel = parallel
        persistent = frozenset(parallel.order)  # where pipeline stages hold parts of them
        buffers = parallel.module.named_buffers(remove_duplicate=False)
        self._of: dict[int, str] = {id(x): name for name, x in buffers if name in persistent}
        self._of |= {id(p): name for name, p in reversed(parallel.names.items())}
        held = {name: own_part(p.detach()) for name, p in reversed(parallel.names.items()) if not p.is_meta}
        self._at = {_place(x): name for name, x in held.items() if not is_fake(x) and x.numel()}
        self._copies: Any = WeakIdKeyDictionary()
        self._whole: Any = WeakIdKeyDictionary()
        """Tensors that were gathered before, on some ranks; they may lie where a weight does that is not split."""
        self.made_of: Any = WeakIdKeyDictionary()
        """Tensor -> name of a weight that it was computed of."""
        self.written: str | None = None
        """The first weight, not whole here, that went to a file meanwhile."""

    def leave_out(self, values: Iterable[Any]) -> None:
        """These are whole."""
        self._whole.update((x, True) for x in values if isinstance(x, Tensor))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.written is None and args and writes(operation_name(func)):
            name = self.name(args[0])
            self.written = name if name is not None and self._parallel.is_cut(name) else None
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        copies = operation_name(func) in _COPIES and args
        if copies and isinstance(args[0], Tensor) and args[0] in self._whole:
            self._whole[result] = True
        elif copies and (name := self.name(args[0])) is not None:
            self._copies[result] = name
        else:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            name = next((name for x in given if (name := self.name(x) or self.made_of.get(x)) is not None), None)
            if name is not None:
                self.made_of[result] = name
        return result

    def name(self, x: Any) -> str | None:
        """The name of the weight, or buffer of a stage, that this is or is a copy of; None for anything else."""
        if not isinstance(x, Tensor) or is_fake(x) or x.is_meta or x.layout is not torch.strided or x in self._whole:
            return None
        found: str | None = self._of.get(id(x)) or self._copies.get(x)
        return found or self._at.get(_place(own_part(x.detach())))


def _place(x: Tensor) -> Any:
    return x.data_ptr(), x.shape, x.stride()


def _completed(
    content: dict[str, Any],
    everywhere: bool,
    followed: _Followed,
    parallel: ParallelModule,
    mesh: ParallelMesh,
    hook: str,
) -> dict[str, Any]:
    """What a hook put into a checkpoint, with whole weights of all stages, on the first tensor rank of the first copy
    of the model.

    Args:
        everywhere: whether all ranks call this hook; otherwise none is asked for its part.
    """
    found = {path: entries for path, entries in _find((), content, followed) if entries}
    names = {path: [entry.name for entry in entries] for path, entries in found.items()}
    by_stage: dict[int, list[Any]] = {}
    for rank, of_rank in zip(mesh.ranks(*AXES), mesh.exchange(names, *AXES), strict=True) if everywhere else ():
        by_stage.setdefault(mesh.shape.stage(rank), []).append(of_rank)
    alike = all(of_rank == of_ranks[0] for of_ranks in by_stage.values() for of_rank in of_ranks)
    if not everywhere and not found:
        return content
    if not everywhere or not alike:
        warn_once_per_run(
            f"`{hook}` puts weights into the checkpoint on some ranks only, and what is saved there is the part that"
            " global rank 0 holds. Do it on all ranks: the rest is gathered then, and one rank writes."
        )
        return content
    made_of = [name for x in tree_leaves(content) if isinstance(x, Tensor) and (name := followed.made_of.get(x))]
    if cut := [name for name in made_of if parallel.is_cut(name)]:
        warn_once_per_run(
            f"`{hook}` puts something into the checkpoint that it computes of `{cut[0]}`, of which each rank holds a"
            " part: it is about that part. Save the weight itself, which is gathered."
        )
    keeps = mesh.rank("tp") == mesh.rank("dp") == 0
    whole: Entries = {path: [] for path in found}
    for path, entries in found.items():
        for key, name, x in entries:
            value = parallel.whole_like(name, x.detach())
            if keeps:
                whole[path].append(Entry(key, name, value.cpu()))
    completed = content
    if keeps:
        stages = mesh.exchange(whole, "pp") if mesh.size("pp") > 1 else []
        for path in dict.fromkeys(path for stage in stages for path in stage):
            of_stages = [stage.get(path, []) for stage in stages]
            whole[path] = merge_stages(of_stages, parallel.order, ".".join(map(str, path[1:])))
        completed = _with((), content, found, whole)
    if any(mesh.exchange(keeps and any(map(is_fake, tree_leaves(completed))), *AXES)):  # all ranks raise
        raise RuntimeError(
            f"MegaTPStrategy: `{hook}` puts something into the checkpoint that it computes of weights of other pipeline"
            " stages than this one. Save the weights themselves, which are gathered."
        )
    return completed


def _find(path: Path, value: Any, followed: _Followed) -> Iterator[tuple[Path, list[Entry]]]:
    """Every container in a value, with the weights that lie in it."""
    items = _items(value)
    named = [(key, followed.name(x), x) for key, x in items]
    yield path, [Entry(key, name, x) for key, name, x in named if name is not None]
    for key, x in items:
        if isinstance(x, _CONTAINERS):
            yield from _find((*path, key), x, followed)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [(key, x) for key, x in value.items() if isinstance(key, (str, int))]
    return list(enumerate(value))


def _with(path: Path, value: Any, own: Entries, whole: Entries) -> Any:
    """A container with whole weights in the place of parts, and with those of other stages.

    Args:
        own: what this rank has there.
    """
    if not any(at[: len(path)] == path for at in whole):
        return value
    weights = whole.get(path, [])
    inner = {key: _with((*path, key), x, own, whole) for key, x in _items(value) if isinstance(x, _CONTAINERS)}
    if isinstance(value, dict):
        made, new = copy.copy(value), {**inner, **{key: x for key, _, x in weights}}
        made.update(new)
        if made.keys() != value.keys():  # in the order of the whole model
            for key, _, x in weights:
                del made[key]
                made[key] = x
        return made
    if weights and len(own.get(path, ())) == len(value):  # a list of nothing else
        return type(value)(x for _, _, x in weights)
    new = {**inner, **{key: x for key, _, x in weights if key < len(value)}}
    items = [new.get(i, x) for i, x in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
