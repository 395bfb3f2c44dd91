"""The user's hooks on gradients of parameters (`p.register_hook(lambda g: g.clamp(-1, 1))`), which run during backward,
where a tensor rank has a part of some gradients: they are given the whole, and this rank's part is taken of what they
return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_megatp.messages import warn_of_stage, warn_once_per_run
from lightning_megatp.parts.positions import Positions
from lightning_megatp.parts.values import WholeValues
from lightning_megatp.parts.weights import WeightWatch
from lightning_megatp.shim.autograd import accumulation_hooks, tensor_hooks
from lightning_megatp.tensor.functions import OwnHook

if TYPE_CHECKING:
    from lightning_megatp.parts.partial import PartialGradients


def complete_in_hooks(account: PartialGradients, leaves: Iterable[Tensor]) -> None:
    """Before a backward: let hooks on leaves find whole gradients. Those that do so already stay.

    Communication: in the backward, for each such hook, an all-gather or all-reduce of the gradient, if tensor ranks
    have parts of it.
    """
    for leaf in leaves:
        for hooks, kind in ((tensor_hooks(leaf), _OnGradient), (accumulation_hooks(leaf), _AfterAccumulation)):
            for key, hook in hooks.items():
                if not isinstance(hook, (kind, OwnHook)):
                    hooks[key] = kind(account, leaf, hook)


def warn_of_microbatches(module: nn.Module) -> None:
    """Before the first backward of microbatches, in each of which the hooks on this stage's parameters are called."""

    def is_hooked(parameter: nn.Parameter) -> bool:
        hooks = (*tensor_hooks(parameter).values(), *accumulation_hooks(parameter).values())
        return any(not isinstance(hook, OwnHook) for hook in hooks)

    if hooked := [name for name, parameter in module.named_parameters() if is_hooked(parameter)]:
        others = f" (and {len(hooked) - 1} more)" if len(hooked) > 1 else ""
        warn_of_stage(
            f"`{hooked[0]}`{others} has a hook on its gradient. With pp > 1 it is called in each microbatch, with the"
            " gradient of that one (`register_hook`) or of all until then (`register_post_accumulate_grad_hook`), and"
            " on one device with that of the batch: what is not linear in it (a limit, a unit norm), and whatever is"
            " done to what was added up, is another training. Do such things in `on_before_optimizer_step`."
        )


@dataclass(frozen=True, eq=False)
class _Completing:
    """A hook of the user's on a leaf."""

    account: PartialGradients
    leaf: Tensor
    call: Callable[[Any], Any]


class _OnGradient(_Completing):
    """One that `register_hook` was given."""

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        account, leaf = self.account, self.leaf
        if gradient is None or not account.is_part(leaf):
            return self.call(gradient)
        whole = account.completed(leaf, gradient)
        returned = self.call(whole)
        return account.part(leaf, whole if returned is None else returned)


class _AfterAccumulation(_Completing):
    """One that `register_post_accumulate_grad_hook` was given. It finds the parameter that it belongs to, and where
    that is split, this rank's part of both."""

    def __call__(self, leaf: Tensor) -> None:
        account = self.account
        if leaf.grad is None or not account.is_part(leaf):
            self.call(leaf)
        elif (spec := account.spec_of(leaf)) is not None:
            both = [(spec.name, leaf, spec), (f"{spec.name}.grad", leaf.grad, spec)]
            watching = WeightWatch(both, Positions(account.rank), _say, _say_written, _explained, _refused)
            with watching, WholeValues(lambda: [(x, spec.spec(account.rank)) for _, x, spec in both]):
                self.call(leaf)
        else:
            leaf.grad = account.completed(leaf, leaf.grad)
            self.call(leaf)
            if leaf.grad is not None:
                leaf.grad = account.part(leaf, leaf.grad)


def _say(operation: str, what: str) -> None:
    warn_once_per_run(
        f"a hook of `register_post_accumulate_grad_hook` uses `{operation}` on `{what}`, of which each tensor rank"
        " holds a part: what comes out is about that part, and another than on one device. Hooks of `register_hook` are"
        " given whole gradients."
    )


def _say_written(what: str) -> None:
    _say("save", what)


def _explained(operation: str, what: str, part: Tensor) -> RuntimeError:
    return RuntimeError(
        f"MegaTPStrategy: in a hook of `register_post_accumulate_grad_hook`, `{operation}` fails on `{what}`, of which"
        f" each tensor rank holds a part, here {tuple(part.shape)}. Hooks of `register_hook` are given whole gradients."
    )


def _refused(operation: str, what: str) -> RuntimeError:
    return RuntimeError(
        f"MegaTPStrategy: a hook of `register_post_accumulate_grad_hook` puts into `{what}`, of which each tensor rank"
        f" holds a part, what it has made by `{operation}` of several elements of that part: the model would be trained"
        " differently than on one device. Hooks of `register_hook` are given whole gradients."
    )
