"""What hooks of the user find out about gradients, of which a rank holds parts.

Logging `grad_norm(self, 2)`, or `torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)`, in `on_after_backward`,
`on_before_optimizer_step` or `configure_gradient_clipping` is a habit of many projects. While such a hook runs, the
2-norm of a split parameter's gradient is that of the whole gradient. The sums were made before the hook was called: a
hook that only rank 0 runs waits for nobody. Whatever else a hook computes of a part is a number of this rank, and said
so once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.gradients.norm import own_elements
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.lightning import within_hooks
from lightning_megatp.shim.torch import DisableTorchFunction, foreach_norm, is_fake
from lightning_megatp.tensor.functions import operation_name, operation_names

HOOKS = {
    "post_backward": ("on_after_backward",),
    "_after_closure": ("on_before_optimizer_step", "configure_gradient_clipping"),
}
"""The precision plugin's methods that call the user's hooks."""
_NORMS: dict[Any, tuple[str, Any]] = {
    Tensor.norm: ("p", "fro"),
    torch.norm: ("p", "fro"),
    torch.linalg.norm: ("ord", None),
    torch.linalg.vector_norm: ("ord", 2),
    foreach_norm: ("ord", 2),
}
"""Function -> its second argument, and the default of that."""
_SAME_NORM = operation_names(
    "grad data T mT detach float double half bfloat16 to cpu cuda clone contiguous view reshape flatten ravel abs neg"
)
"""Functions whose result has the norm of their argument."""
_SCALES = operation_names("mul_ div_ _foreach_mul_ _foreach_div_ __imul__ __itruediv__")


@dataclass(frozen=True)
class _Part:
    """A tensor with as many elements as this rank holds of a parameter."""

    what: str
    """The tensor, e.g. "the gradient of `head.weight`"."""
    numel: int
    parted: bool
    norm: Tensor | None
    """Of the whole tensor, where that was summed."""


class WholeNorms:
    """The 2-norms of whole gradients, for as long as somebody asks for them.

    Args:
        parallel: the split module.
        mesh: where it is.
        hooks: whose sums they are, for messages.

    Communication: one all-reduce over tp of a number per parameter, and with zero > 0 one over the ranks that divide
        them, before the first two calls of the hooks, and before all others if the first asked for a norm.
    """

    def __init__(self, parallel: ParallelModule, mesh: ParallelMesh, hooks: Sequence[str]) -> None:
        self._parallel, self._mesh, self._hooks = parallel, mesh, " or ".join(f"`{hook}`" for hook in hooks)
        self._calls, self._asked, self._wanted = 0, False, mesh.size("tp") > 1 or bool(parallel.divided)
        self._said: set[str] = set()
        self._now: _Looking | None = None

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Around the hooks."""
        self._calls += 1
        try:
            with _Looking(self, self._parts()) as self._now:
                yield
        finally:
            if self._now is not None:
                self._now.show(())
            self._now = None

    def clipping(self, clip: Callable[..., None]) -> Callable[..., None]:
        """Lightning's clipping, which all ranks call from within a hook: it changes what was summed."""

        def run(*args: Any, **kwargs: Any) -> None:
            clip(*args, **kwargs)
            if self._now is not None:
                with DisableTorchFunction():
                    self._now.show(self._parts())

        return run

    def norm_of(self, part: _Part, order: Any) -> Tensor | None:
        """A hook asks for the norm of a part: that of the whole, if it is known."""
        self._asked, stages = True, self._mesh.size("pp")
        if stages > 1:
            self._say(
                "stages",
                f"{self._hooks} takes the norm of {part.what}. With pp={stages} a rank has the gradients of its own"
                " stages only, so that a sum over `self.parameters()` leaves out the others. For all of them take"
                " `self.trainer.strategy.full_gradients()`; to clip, `gradient_clip_val` or `self.clip_gradients`.",
            )
        return part.norm if order == 2 else None

    def computed(self, name: str, part: _Part) -> None:
        """A hook has made a number of a part."""
        if part.parted:
            self._say(
                name,
                f"{self._hooks} takes `{name}` of {part.what}, of which a rank holds a part: the result"
                " is about that part. For whole gradients take `self.trainer.strategy.full_gradients()`.",
            )

    def check_scaling(self, part: _Part) -> None:
        """A hook is about to multiply gradients by a number in a tensor.

        Raises:
            RuntimeError: each stage would take its own.
        """
        if self._mesh.size("pp") > 1:
            raise RuntimeError(
                f"MegaTPStrategy: {self._hooks} scales gradients ({part.what}) by a number that each pipeline stage"
                " computes of its own ones (torch.nn.utils.clip_grad_norm_?), so that stages would be trained"
                " differently. Use Trainer(gradient_clip_val=...), or self.clip_gradients(optimizer, ...) in"
                " `configure_gradient_clipping`: they take the norm of the whole model."
            )

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warn_once_per_run(text)

    def _sums(self) -> dict[int, Tensor]:
        """id of what this rank trains -> the norm of the whole gradient."""
        parallel, mesh = self._parallel, self._mesh
        held = [p for _, p in parallel.named_held() if p.grad is None or p.grad.layout is torch.strided]
        divided = [parallel.divided.get(id(p)) for p in held]
        split = [parallel.spec(p) for p in held]
        places, parts = [], []
        for place, (parameter, spec, rows) in enumerate(zip(held, split, divided, strict=True)):
            if parameter.grad is not None:
                own = own_elements(parameter.grad, spec, mesh.rank("tp"), 2.0, None if rows is None else rows.rows)
                places += [place] * len(own)
                parts += own
        sums = torch.zeros(len(held) + 1, device=mesh.device, dtype=torch.float64)  # and whether a norm was asked for
        if parts:
            powers = torch.stack([norm.to(sums) for norm in foreach_norm(parts, 2.0)]).square()
            sums.index_add_(0, torch.tensor(places, device=sums.device), powers)
        sums[-1] = self._asked
        for group, parted in ((parallel.rows_group, divided), (mesh.group("tp"), split)):
            if group is not None and group.size() > 1:
                over = torch.tensor([part is not None for part in parted] + [True], device=sums.device)
                total = sums * over
                dist.all_reduce(total, group=group)
                sums = torch.where(over, total, sums)
        if self._calls == 2:  # it says of the first call whether some rank has asked
            self._wanted = bool(sums[-1])
        return {id(parameter): norm for parameter, norm in zip(held, sums.sqrt(), strict=False)}

    def _parts(self) -> list[tuple[Tensor, _Part]]:
        """Of all that a hook may look at."""
        norms, found = self._sums() if self._wanted else {}, []
        for name, parameter in self._parallel.named_held():
            parted = self._parallel.spec(parameter) is not None or id(parameter) in self._parallel.divided
            found.append((parameter, _Part(f"`{name}`", parameter.numel(), parted, None)))
            if (grad := parameter.grad) is not None:
                norm = norms.get(id(parameter))
                found.append((grad, _Part(f"the gradient of `{name}`", grad.numel(), parted, norm)))
        return found


class _Looking(TorchFunctionMode):
    """While hooks run.

    Args:
        whole: whom to ask and to tell.
        parts: what lies where.
    """

    def __init__(self, whole: WholeNorms, parts: Iterable[tuple[Tensor, _Part]]) -> None:
        super().__init__()
        self._whole = whole
        self._made: Any = WeakIdKeyDictionary()
        """Tensor -> the part of which it was made, element by element; also what has no address, since it is empty."""
        self.show(parts)

    def show(self, parts: Iterable[tuple[Tensor, _Part]]) -> None:
        """From now on these."""
        self._made.clear()
        self._alive = list(parts)
        """So that nothing else comes to lie at their addresses."""
        self._parts: dict[int, _Part] = {}
        """By address."""
        for tensor, part in self._alive:
            if address := _address(tensor):
                self._parts[address] = part
            else:
                self._made[tensor] = part

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        parts = [self._part(x) for x in (first if isinstance(first, list | tuple) else [first])]
        part = next(filter(None, parts), None)
        if part is None:
            return func(*args, **kwargs)
        name = operation_name(func)
        if name in _SCALES and len(args) > 1 and isinstance(args[1], Tensor) and not args[1].dim():
            self._whole.check_scaling(part)
        known: list[Tensor | None] = [None]
        if (order := _order(func, args, kwargs)) is not None:
            known = [None if part is None else self._whole.norm_of(part, order) for part in parts]
            if func is not foreach_norm and known[0] is not None:
                return known[0].to(first.dtype)
            if func is foreach_norm and None not in known:
                return [norm.to(x.dtype) for norm, x in zip(known, first, strict=True) if norm is not None]
        result = func(*args, **kwargs)
        if func is foreach_norm:
            return [self._found(name, *found) for found in zip(parts, known, result, strict=True)]
        if name.endswith("_") and not name.endswith("__"):
            self._changed(first if isinstance(first, list | tuple) else [first])
        elif isinstance(result, Tensor) and result is not first:
            self._note(name, part, result)
        return result

    def _found(self, name: str, part: _Part | None, known: Tensor | None, of_part: Tensor) -> Tensor:
        if part is not None and known is None:
            self._whole.computed(name, part)
        return of_part if known is None else known.to(of_part)

    def _part(self, x: Any) -> _Part | None:
        if not isinstance(x, Tensor):
            return None
        part = self._made.get(x) or self._parts.get(_address(x))
        return part if part is None or part.numel == _own(x).numel() else replace(part, norm=None)  # a slice of it

    def _changed(self, tensors: Iterable[Any]) -> None:
        """In place: what was summed is no longer true."""
        for x in tensors:
            part = self._part(x)
            if part is not None and x in self._made:
                self._made[x] = replace(part, norm=None)
            elif part is not None:
                self._parts[_address(x)] = replace(part, norm=None)

    def _note(self, name: str, part: _Part, result: Tensor) -> None:
        """What was made of a part: as many elements, several such in one, or a number."""
        if (numel := _own(result).numel()) == part.numel and name in _SAME_NORM:
            if _address(result) not in self._parts:
                self._made[result] = part
        elif numel == 1 < part.numel:
            self._whole.computed(name, part)
        else:
            self._made[result] = replace(part, numel=numel, norm=None)


def _order(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Of which norm of all elements; None where it is none."""
    if func not in _NORMS or len(args) > 2 or kwargs.get("dim") is not None:
        return None
    keyword, default = _NORMS[func]
    order = args[1] if len(args) > 1 else kwargs.get(keyword, default)
    if func is torch.linalg.norm and order not in (None, "fro") and args[0].dim() > 1:
        return None  # of a matrix
    return 2 if order in (None, "fro") else order


def _own(x: Tensor) -> Tensor:
    """What this rank has of it."""
    return x.to_local() if isinstance(x, DTensor) else x


def _address(x: Tensor) -> int:
    """Where what this rank has of it lies. Gradients may share the storage of a bucket."""
    return 0 if x.layout is not torch.strided or x.is_meta or is_fake(x) else _own(x).data_ptr()


def watch_hooks(plugin: Any, trainer: Any, parallel: ParallelModule, mesh: ParallelMesh) -> None:
    """Let the user's hooks find the norms of whole gradients.

    Args:
        plugin: Lightning's precision plugin, which calls them; changed in place.
        trainer: whose module's and callbacks' hooks they are.
        parallel: the module, split and divided.
        mesh: where it is.

    Communication: one all-reduce of two numbers over the world.
    """
    watched = (parallel.module, *trainer.callbacks)
    users = [sum(_is_users(x, name) for x in watched for name in names) for names in HOOKS.values()]
    counts = torch.tensor(users, device=mesh.device)
    if not (whole := mesh.size("tp") == mesh.size("pp") == 1 and not parallel.divided):
        dist.all_reduce(counts)  # some rank may have a callback of its own
    for (method, hooks), count in zip(HOOKS.items(), counts.tolist(), strict=True):
        if whole or not count:
            within_hooks(plugin, method, None)
            continue
        norms = WholeNorms(parallel, mesh, hooks)
        within_hooks(plugin, method, norms.looking)
        if "configure_gradient_clipping" in hooks:
            plugin.clip_grad_by_norm = norms.clipping(plugin.clip_grad_by_norm)


def _is_users(x: Any, name: str) -> bool:
    hook = vars(x).get(name, getattr(type(x), name, None))
    module = getattr(hook, "__module__", None) or ""
    return hook is not None and module.split(".")[0] not in ("lightning", "pytorch_lightning", "lightning_megatp")
