"""What hooks find of other pipeline stages' parameters: stand-ins without data, to which nothing is done. Numbers over
all parameters are of this stage's."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.detour import Detour
from lightning_megatp.hooks.around import READ_OR_CHANGE_WEIGHTS, around_hooks
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.parts.mode import is_elementwise
from lightning_megatp.parts.values import draws_for_tensors
from lightning_megatp.shim.fakes import fake_beside, is_fake, making_fakes
from lightning_megatp.shim.torch import FOREACH_IN_PLACE, DisableTorchFunction, storage_id, tree_map
from lightning_megatp.tensor.functions import is_in_place, one_by_one, operation_name, operation_names
from lightning_megatp.user_hooks import Hook, mentions


def leaving_out_others(trainer: Any, hooks: Sequence[Hook], take_back: Callable[[], None]) -> Iterator[Detour]:
    """Let hooks that change parameters, also in lists that they keep (`torch._foreach_mul_(self.averages, 0.9)`), do so
    to this stage's, and nothing to what stands for those of other stages. Say of numbers that hooks between steps take
    of parameters, as they go over all, that these are of one stage. (`WholeNorms` sees to those around a backward.)

    Args:
        trainer: about to run a module that is cut into stages.
        hooks: the user's.
        take_back: called after each.
    """
    listing = {hook for owner, hook in hooks if hook in READ_OR_CHANGE_WEIGHTS and mentions(owner, _LISTS, hook)}
    numbers = _Numbers(trainer.lightning_module)

    @contextlib.contextmanager
    def without_others(hook: str) -> Iterator[None]:
        with _WithoutOthers(hook, numbers if hook in listing else None):
            yield
        numbers.left()
        take_back()

    return around_hooks(hooks, without_others, lambda owner, hook: hook != "optimizer_step")


_LISTS = frozenset(["parameters", "named_parameters"])
_NUMBERS_OF = operation_names("norm vector_norm linalg_vector_norm _foreach_norm sum mean max min amax amin var std")


def _zeros_for(x: Any) -> Any:
    return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) and is_fake(x) else x


class _Numbers:
    """Says once of a number that hooks take of parameters that it is of one stage.

    Args:
        module: whose parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._told = module, False
        self._made: dict[int, weakref.ref[Tensor]] = {}
        """By id, what was made of parameters, element by element or not, and is no number yet."""

    @functools.cached_property
    def _own(self) -> set[int]:
        with DisableTorchFunction():
            return {storage_id(p) for p in self._module.parameters() if not is_fake(p)}

    def look(self, hook: str, name: str, given: Any, result: Any) -> None:
        """At an operation of a hook, and what came out."""
        if self._told or not any(isinstance(x, Tensor) and x.dim() > 0 and self._is_of_parameters(x) for x in given):
            return
        results = result if isinstance(result, (list, tuple)) else [result]
        if not all(isinstance(x, Tensor) and x.dim() == 0 for x in results):
            self._made.update({id(x): weakref.ref(x) for x in results if isinstance(x, Tensor)})
        elif name in _NUMBERS_OF:
            self._told = True
            warn_once_per_run(
                f"`{hook}` takes a number (`{name}`) of parameters as it goes over them. With pp > 1 it finds"
                " those of its own pipeline stage only, and global rank 0 those of the last. Add the stages' numbers"
                " up, on all ranks: `torch.distributed.all_reduce(x, group=trainer.strategy.mesh.group('pp'))`."
            )

    def left(self) -> None:
        """At the end of a hook."""
        self._made.clear()

    def _is_of_parameters(self, x: Tensor) -> bool:
        made = self._made.get(id(x))
        return (made is not None and made() is x) or storage_id(x) in self._own


class _WithoutOthers(TorchFunctionMode):
    """Around a hook.

    Args:
        hook: its name.
        numbers: looks at those that it takes of parameters; None where it does not go over these.
    """

    def __init__(self, hook: str, numbers: _Numbers | None) -> None:
        super().__init__()
        self._hook, self._numbers = hook, numbers

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if func in FOREACH_IN_PLACE and not args[0]:  # of a part that is on another stage
            return None
        if func in FOREACH_IN_PLACE and any(map(is_fake, args[0])):
            for single, of_one, named in one_by_one(func, args, kwargs):
                single(*of_one, **named)
            return None
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]  # torch.nn.init hands on keywords
        other = next((x for x in given if is_fake(x) and x.dim() > 0), None)
        if other is None:
            result = func(*args, **kwargs)
            if self._numbers is not None:
                listed = args[0] if args and isinstance(args[0], (list, tuple)) else given
                self._numbers.look(self._hook, name, listed, result)
            return result
        if draws_for_tensors(name):  # as many random numbers as on other stages
            func(*map(_zeros_for, args), **{key: _zeros_for(x) for key, x in kwargs.items()})
        changed = given[0] if is_in_place(name) and name != "requires_grad_" else None
        if changed is not None and is_fake(changed):
            return changed
        if changed is None and is_elementwise(name):  # what comes out is another stage's, too
            real = [x for x in given if not is_fake(x)]
            fakes = {id(x): fake_beside(other, x) for x in real}
            args, kwargs = tree_map(lambda x: fakes.get(id(x), x), (args, kwargs))
            with making_fakes(other):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
