"""What hooks of the user find out about gradients, of which a rank holds parts.

Logging `grad_norm(self, 2)`, or `torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)`, in `on_after_backward`,
`on_before_optimizer_step` or `configure_gradient_clipping` is a habit of many projects. While such a hook runs, the
2-norms of a split parameter and of its gradient are those of the whole. The sums were made before the hook was called:
a hook that only rank 0 runs waits for nobody. Whatever else a hook computes of a part is a number of this rank, and
said so once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.detour import Detour
from lightning_megatp.gradients.clipping import clip, clip_in_hook
from lightning_megatp.gradients.norm import own_elements
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.looking import KnownPart, Looking, Version
from lightning_megatp.parts.rows import address_of, own_part
from lightning_megatp.shim.gradients import ClipCall, clipping_by
from lightning_megatp.shim.lightning import within_hooks
from lightning_megatp.shim.torch import DisableTorchFunction, foreach_norm, tensor_version
from lightning_megatp.tensor.collectives import from_host
from lightning_megatp.user_hooks import is_users, users_hooks

METHODS = {
    "post_backward": ("on_after_backward",),
    "_after_closure": ("on_before_optimizer_step", "configure_gradient_clipping"),
}
"""The precision plugin's methods that call the user's hooks."""


class _Summed(NamedTuple):
    """A gradient or parameter before hooks run, and the norm of the whole one."""

    source: Tensor | None
    version: int
    norm: Tensor


class WholeNorms:
    """The 2-norms of whole gradients and parameters while hooks run.

    Args:
        parallel: the split module.
        mesh: where it is.
        summed: whether gradients are summed over tensor ranks and stages after a backward: those of a batch that only
            accumulates are not.

    Communication: before each call of hooks that a user has defined, one all-reduce over tp of two numbers per
        parameter, and with zero > 0 one over the ranks that divide them.
    """

    def __init__(self, parallel: ParallelModule, mesh: ParallelMesh, summed: Callable[[], bool] = lambda: True) -> None:
        self._parallel, self._mesh, self._summed = parallel, mesh, summed
        self._complete = True
        """Whether the gradients are summed that the hooks find which run."""
        self._hooks = ""
        self._said: set[str] = set()
        self._now: Looking | None = None
        self._unknown: set[str] = set()
        """Gradients of which a norm was taken, since the last step, that is known of a part only."""

    @contextlib.contextmanager
    def looking(self, method: str) -> Iterator[None]:
        """Around the hooks that a method of the plugin calls."""
        self._hooks = " or ".join(f"`{hook}`" for hook in METHODS[method])
        self._complete = method == "_after_closure" or self._summed()
        with DisableTorchFunction():  # an `optimizer_step` that is watched may have called the closure
            parts = self._parts()
        try:
            with (
                clipping_by(self._clip),
                Looking(self, self._parallel.context.rank, parts) as self._now,
            ):
                yield
        finally:
            if self._now is not None:
                self._now.show(tuple)
            self._now = None
            if method == "_after_closure":
                self._unknown.clear()

    def clipping(self, does: Callable[..., Any]) -> Callable[..., Any]:
        """Lightning's clipping, which all ranks call, maybe from within a hook: it changes what was summed."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with DisableTorchFunction():
                result = does(*args, **kwargs)
                if self._now is not None:
                    self._now.show(self._parts())
                return result

        return run

    def _clip(self, call: ClipCall) -> Any:
        """A hook calls torch's clipping."""
        if not self._complete:
            return call.of(call.parameters)
        return clip_in_hook(call, self._parallel, self._mesh, self.clipping(clip))

    def norm_of(self, part: KnownPart, order: Any) -> Tensor | None:
        """A hook asks for the norm of a part: that of the whole, if it is known."""
        if (stages := self._mesh.size("pp")) > 1:
            self._say(
                "stages",
                f"{self._hooks} takes the norm of {part.what}. With pp={stages} a rank has the gradients of its own"
                " stages only, so that a sum over `self.parameters()` leaves out the others. For all of them take"
                " `self.trainer.strategy.full_gradients()`; to clip, `gradient_clip_val` or `self.clip_gradients`.",
            )
        norm = part.norm if order == 2 and part.unchanged else None
        if norm is None and part.parted and part.is_gradient:
            self._unknown.add(part.what)
        else:
            self._unknown.discard(part.what)
        return norm

    def computed(self, name: str, part: KnownPart) -> None:
        """A hook has made a number of a part."""
        if part.parted:
            self._say(
                name,
                f"{self._hooks} takes `{name}` of {part.what}, of which a rank holds a part: the result"
                " is about that part. For whole gradients take `self.trainer.strategy.full_gradients()`.",
            )

    def check_made(self, part: KnownPart, by: str) -> None:
        """A hook is about to put into a part what it made of this rank's elements of one.

        Raises:
            RuntimeError: if the model would be trained differently.
        """
        if part.parted:
            raise RuntimeError(
                f"MegaTPStrategy: {self._hooks} puts into {part.what}, of which a rank holds a part, what it has made"
                f" by `{by}` of several elements of a part (unit-wise adaptive clipping?): the model would be trained"
                " differently than on one device."
                " Hooks on parameters are given whole gradients: `p.register_hook(lambda g: g - g.mean(0))`. Norms of"
                " whole tensors (`p.norm()`, `p.grad.norm()`) are those of one device; or leave its layer out of the"
                " plan."
            )

    def check_scaling(self, part: KnownPart, made_of: frozenset[str]) -> None:
        """A hook is about to multiply gradients by a number in a tensor.

        Raises:
            RuntimeError: each stage, or each rank, would take its own.
        """
        by_itself = made_of == {part.parameter} and self._complete
        if self._mesh.size("pp") > 1 and not by_itself:
            why = "each pipeline stage computes of its own gradients"
        elif self._unknown:
            norm = f"the norm of {min(self._unknown)}, as the hook changed it or asked for it"
            why = f"is known of this rank's part only ({norm})"
        else:
            return
        raise RuntimeError(
            f"MegaTPStrategy: {self._hooks} scales {part.what} by a number in a tensor"
            f" (torch.nn.utils.clip_grad_norm_?) that {why}, so that ranks would be trained differently. Use"
            " Trainer(gradient_clip_val=...), or self.clip_gradients(optimizer, ...) in `configure_gradient_clipping`:"
            " they take the norm of the whole model. A factor that is alike on all ranks can be a Python number."
        )

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warn_once_per_run(text)

    def _sums(self) -> dict[int, tuple[_Summed, _Summed]]:
        """The norms of the gradient and the value of every parameter that is split or divided, by the id of what this
        rank trains of it."""
        parallel, mesh = self._parallel, self._mesh
        split_over: tuple[tuple[dist.ProcessGroup | None, Collection[int]], ...] = (
            (parallel.rows_group, parallel.divided),
            (mesh.group("tp"), parallel.sharded),
        )
        groups = [(group, ids) for group, ids in split_over if group is not None and group.size() > 1]
        parted = {id(p): p for p in parallel.names.values() if any(id(p) in ids for _, ids in groups)}
        shown = [(p, parallel.held(p)) for p in parted.values()]
        shown = [(p, held) for p, held in shown if (grad := held.grad) is None or grad.layout is torch.strided]
        if not shown:
            return {}
        places, parts = [], []
        for place, (_, held) in enumerate(shown):
            divided = parallel.divided.get(id(held))
            rows = None if divided is None else divided.rows
            for at, x in enumerate((held.grad, held.detach())):
                if x is not None:
                    own = own_elements(x, parallel.spec(held), mesh.rank("tp"), rows)
                    places += [2 * place + at] * len(own)
                    parts += own
        sums = torch.zeros(2 * len(shown), device=mesh.device, dtype=torch.float64)
        if parts:  # a rank may own nothing
            norms = foreach_norm(parts, 2.0)
            if len({norm.device for norm in norms}) > 1:  # some are offloaded
                norms = tuple(norm.to(sums.device) for norm in norms)
            sums.index_add_(0, from_host(places, sums.device), torch.stack(norms).to(sums).square())
        for group, ids in groups:
            over = from_host([id(held) in ids for _, held in shown for _ in range(2)], sums.device)
            total = sums * over
            dist.all_reduce(total, group=group)
            sums = torch.where(over, total, sums)
        found = sums.sqrt().view(-1, 2)
        return {
            id(held): (_summed(_grad_of(p, held), of_grad), _summed(held, of_value))
            for (p, held), (of_grad, of_value) in zip(shown, (x.unbind() for x in found), strict=True)
        }

    def _parts(self) -> Callable[[], list[tuple[Tensor, KnownPart]]]:
        """A function that lists the parts of all that a hook may look at; when it looks, since most look at nothing.

        Communication: that of `_sums`, at once.
        """
        sums = self._sums()
        versions: dict[tuple[int, int], Version] = {}

        def known(part: KnownPart, x: Tensor, summed: _Summed | None) -> KnownPart:
            """With the norm of the whole, if that was summed of this tensor."""
            source, number, norm = summed or (x, tensor_version(x), None)
            if source is not x:
                return replace(part, norm=None, source=x)
            version = versions.setdefault((_storage(x), number), Version(number))
            return replace(part, norm=norm, source=x, version=version)

        def parts() -> list[tuple[Tensor, KnownPart]]:
            found = []
            waiting = set() if self._complete else self._parallel.partial.waiting()
            for name, parameter in self._parallel.module.named_parameters():
                held = self._parallel.held(parameter)
                spec, divided = self._parallel.spec(held), id(held) in self._parallel.divided
                of_grad, of_value = sums.get(id(held), (None, None))
                part = KnownPart(
                    f"`{name}`", held.numel(), spec is not None, spec is not None or divided,
                    parameter=name, shape=tuple(held.shape), spec=spec,
                )  # fmt: skip
                value = part if of_value is None else known(part, held, of_value)
                found += [(held, value), (parameter, value)]
                if (grad := _grad_of(parameter, held)) is not None:
                    part = replace(part, what=f"the gradient of {part.what}", is_gradient=True)
                    part = replace(part, parted=True) if id(held) in waiting else known(part, grad, of_grad)
                    found += [(x, part) for x in (grad, parameter.grad) if x is not None]
            return found

        return parts


def _grad_of(parameter: Tensor, held: Tensor) -> Tensor | None:
    """A rank without rows may have a gradient where the module shows it, and none to train with."""
    return parameter.grad if held.grad is None else held.grad


def _storage(x: Tensor) -> int:
    """Where it begins."""
    return own_part(x).untyped_storage().data_ptr() if address_of(x) else 0


def _summed(source: Tensor | None, norm: Tensor) -> _Summed:
    return _Summed(source, 0 if source is None else tensor_version(source), norm)


def watch_hooks(
    plugin: Any, trainer: Any, parallel: ParallelModule, mesh: ParallelMesh, summed: Callable[[], bool]
) -> None:
    """Let the user's hooks find the norms of whole gradients.

    Args:
        plugin: Lightning's precision plugin, which calls them; changed in place.
        trainer: whose module's and callbacks' hooks they are.
        parallel: the module, split and divided.
        mesh: where it is.
        summed: see `WholeNorms`.

    Communication: one all-reduce of two numbers over the world.
    """
    watched = (parallel.module, *trainer.callbacks)
    norms = WholeNorms(parallel, mesh, summed)
    users = [sum(is_users(x, name) for x in watched for name in names) for names in METHODS.values()]
    counts = torch.tensor(users, device=mesh.device)
    if not (whole := mesh.size("tp") == mesh.size("pp") == 1 and not parallel.divided):
        dist.all_reduce(counts)  # some rank may have a callback of its own
        plugin.clip_grad_by_norm = norms.clipping(plugin.clip_grad_by_norm)
    for method, count in zip(METHODS, counts.tolist(), strict=True):
        looks = count and not whole
        within_hooks(plugin, method, functools.partial(norms.looking, method) if looks else None)


def clipping_around_steps(trainer: Any, parallel: ParallelModule, mesh: ParallelMesh) -> Iterator[Detour]:
    """Let an `optimizer_step` of the user's clip, by torch's functions, the gradients that its closure has made.

    Args:
        trainer: about to fit.
        parallel: the module, split and divided.
        mesh: where it is.
    """

    def in_hook(call: ClipCall) -> Any:
        if parallel.context.user_code:  # the step, in the closure
            return call.of(call.parameters)
        return clip_in_hook(call, parallel, mesh)

    def run(call: Callable[[], Any]) -> Any:
        with clipping_by(in_hook):
            return call()

    for owner, hook in users_hooks([trainer.lightning_module], ["optimizer_step"]):
        yield Detour(owner, hook, run)
