"""Modules in checkpoints: among the hyperparameters, by `save_hyperparameters()` of a LightningModule that is given its
network, and where an `on_save_checkpoint` puts them (PyTorch Forecasting's losses and metrics).

On one device a checkpoint holds them, pickled, and `load_from_checkpoint` finds them there. Once they are split they
hold what can't be pickled (groups, hooks), and parts of weights. So copies without weights are made before, and
checkpoints get these with the weights of their state dict: no more is written for that, as on one device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.snapshots.leftovers import is_own_object
from lightning_megatp.user_hooks import is_users


class Outlines:
    """Copies, without weights, of what a LightningModule holds and checkpoints may: the modules in its hyperparameters,
    those in lists, dicts and the user's objects there as well, and all if it has an `on_save_checkpoint`.

    Args:
        module: whole.
    """

    def __init__(self, module: Any) -> None:
        inside = set(module.modules())
        weights = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._whole = module
        self._names = {id(x): name for name, x in reversed(weights)}
        found = {name: list(_modules_in(value)) for name, value in module.hparams.items()}
        split = {name: [x for x in modules if not inside.isdisjoint(x.modules())] for name, modules in found.items()}
        self._held = {name: module.hparams[name] for name, modules in split.items() if modules}
        self._modules = [x for modules in split.values() for x in modules]
        self._modules += module.children() if is_users(module, "on_save_checkpoint") else ()
        self._copies = [self._without_weights(x) for x in self._modules]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._modules)

    def put_into(self, checkpoint: dict[str, Any], hyperparameters: str) -> None:
        """Make the modules in a checkpoint what they are on one device. Those of which it has not all weights are left
        out. What Lightning has removed of the hyperparameters, since it can't be pickled once it is split, is put back:
        it does so where a second run begins.

        Args:
            checkpoint: with a state dict.
            hyperparameters: under which name it has them.

        Warns:
            UserWarning: some are left out.
        """
        state, given = checkpoint.get("state_dict", {}), checkpoint.get(hyperparameters)
        for name in checkpoint.keys() - {"state_dict", hyperparameters}:
            if self._put(checkpoint, name, state):
                warn_once_per_run(_LEFT_OUT_BY_HOOK.format(name))
        if given is None:
            return
        removed = {name: value for name, value in self._held.items() if name not in self._whole.hparams}
        checkpoint[hyperparameters] = whole = {**removed, **given}
        for name in list(whole):
            if self._put(whole, name, state):
                warn_once_per_run(_LEFT_OUT_PARAMETER.format(name))

    def _put(self, place: dict[str, Any], name: str, state: Mapping[str, Any]) -> bool:
        """Returns: whether it had to be left out."""
        if next(_modules_in(place[name]), None) is None:
            return False
        place[name] = self._with_weights(place[name], state)
        if place[name] is not _LEFT_OUT:
            return False
        del place[name]
        return True

    def _without_weights(self, module: nn.Module) -> tuple[nn.Module, dict[int, str]] | None:
        """And the names of what takes the place of weights, by id; None if it can't be copied."""
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
        buffers = [(x, self._names.get(id(x))) for x in module.buffers()]
        memo: dict[int, Any] = {**empty, id(self._whole): self._whole}
        try:
            copied = copy.deepcopy(module, memo)
        except Exception:
            return None  # nor could it be pickled
        places = {id(x): self._names.get(key, "") for key, x in empty.items()}
        return copied, places | {id(memo[id(x)]): name for x, name in buffers if name is not None}

    def _module(self, module: nn.Module, state: Mapping[str, Any]) -> Any:
        """What a checkpoint gets for a module: itself if it is none of these."""
        for outside, outline in zip(self._modules, self._copies, strict=True):
            for name, x in outside.named_modules():
                if x is module:
                    return _LEFT_OUT if outline is None else _filled(outline[0].get_submodule(name), outline[1], state)
        return module

    def _with_weights(self, value: Any, state: Mapping[str, Any]) -> Any:
        if isinstance(value, nn.Module):
            return self._module(value, state)
        if type(value) in (list, tuple):
            entries = [self._with_weights(x, state) for x in value]
            return _LEFT_OUT if any(x is _LEFT_OUT for x in entries) else type(value)(entries)
        if type(value) is dict:
            found = {key: self._with_weights(x, state) for key, x in value.items()}
            return _LEFT_OUT if any(x is _LEFT_OUT for x in found.values()) else found
        if is_own_object(value) and next(_modules_in(value), None) is not None:
            found = self._with_weights(dict(vars(value)), state)
            if found is _LEFT_OUT:
                return found
            copied = copy.copy(value)
            vars(copied).update(found)
            return copied
        return value


_LEFT_OUT = object()
_WITHOUT_WEIGHTS = 'they have not all of its weights whole (with checkpoint="folder" none), or it can\'t be copied'
_LEFT_OUT_PARAMETER = (
    f"checkpoints leave out the hyperparameter `{{0}}`, a module: {_WITHOUT_WEIGHTS}. Load with"
    " `load_from_checkpoint(..., {0}=...)`. `self.save_hyperparameters(ignore=[{0!r}])` says so from the beginning."
)
_LEFT_OUT_BY_HOOK = (
    f"checkpoints leave out `{{0}}`, a module that `on_save_checkpoint` puts there: {_WITHOUT_WEIGHTS}. Its weights are"
    " in the state dict."
)


def _modules_in(value: Any, inside: tuple[int, ...] = ()) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif id(value) not in inside and (type(value) in (list, tuple, dict) or is_own_object(value)):
        held = value if isinstance(value, (list, tuple, dict)) else vars(value)
        for x in held.values() if isinstance(held, dict) else held:
            yield from _modules_in(x, (*inside, id(value)))


def _filled(module: nn.Module, names: Mapping[int, str], state: Mapping[str, Any]) -> Any:
    memo: dict[int, Any] = {}
    for p in module.parameters():
        if not isinstance(whole := state.get(names[id(p)]), Tensor) or whole.shape != p.shape:
            return _LEFT_OUT
        memo[id(p)] = nn.Parameter(whole, p.requires_grad)
    for x in module.buffers():
        whole = state.get(names.get(id(x), ""))
        memo[id(x)] = whole if isinstance(whole, Tensor) else x
    return copy.deepcopy(module, memo)
