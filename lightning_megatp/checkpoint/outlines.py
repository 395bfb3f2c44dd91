"""Modules among a LightningModule's hyperparameters: `save_hyperparameters()` of one that is given its network.

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


class Outlines:
    """Copies, without weights, of the modules in its hyperparameters that a LightningModule holds, too; of those in
    lists, dicts and the user's objects there as well.

    Args:
        module: whole.
    """

    def __init__(self, module: Any) -> None:
        inside = set(module.modules())
        weights = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self._names = {id(x): name for name, x in reversed(weights)}
        found = {name: list(_modules_in(value)) for name, value in module.hparams.items()}
        split = {name: [x for x in modules if not inside.isdisjoint(x.modules())] for name, modules in found.items()}
        self._modules = [x for modules in split.values() for x in modules]
        self._held = {name: module.hparams[name] for name, modules in split.items() if modules}
        self._copies = [self._without_weights(x) for x in self._modules]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._modules)

    def put_into(self, hyperparameters: Mapping[str, Any], module: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Hyperparameters in which modules are what they are on one device.

        Args:
            hyperparameters: those of a checkpoint.
            module: whose they are. What Lightning has removed there, since it can't be pickled once it is split, is put
                back: it does so where a second run begins.
            state: the checkpoint's state dict. Modules of which it has not all weights are left out.

        Warns:
            UserWarning: some are.
        """
        removed = {name: value for name, value in self._held.items() if name not in module.hparams}
        whole = {**removed, **hyperparameters}
        kept = {name: self._with_weights(value, state) for name, value in whole.items()}
        for name in [name for name, value in kept.items() if value is _LEFT_OUT]:
            del kept[name]
            warn_once_per_run(
                f"checkpoints leave out the hyperparameter `{name}`, a module: they have not all of its weights whole"
                f' (with checkpoint="folder" none), or it can\'t be copied. Load with `load_from_checkpoint(...,'
                f" {name}=...)`. `self.save_hyperparameters(ignore=[{name!r}])` says so from the beginning."
            )
        return kept

    def _without_weights(self, module: nn.Module) -> tuple[nn.Module, dict[int, str]] | None:
        """And the names of what takes the place of weights, by id; None if it can't be copied."""
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
        buffers = [(x, self._names.get(id(x))) for x in module.buffers()]
        memo: dict[int, Any] = dict(empty)
        try:
            copied = copy.deepcopy(module, memo)
        except Exception:
            return None  # nor could it be pickled
        places = {id(x): self._names.get(key, "") for key, x in empty.items()}
        return copied, places | {id(memo[id(x)]): name for x, name in buffers if name is not None}

    def _with_weights(self, value: Any, state: Mapping[str, Any]) -> Any:
        if isinstance(value, nn.Module):
            index = next((i for i, x in enumerate(self._modules) if x is value), None)
            return value if index is None else _filled(self._copies[index], state)
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


def _modules_in(value: Any, inside: tuple[int, ...] = ()) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif id(value) not in inside and (type(value) in (list, tuple, dict) or is_own_object(value)):
        held = value if isinstance(value, (list, tuple, dict)) else vars(value)
        for x in held.values() if isinstance(held, dict) else held:
            yield from _modules_in(x, (*inside, id(value)))


def _filled(outline: tuple[nn.Module, dict[int, str]] | None, state: Mapping[str, Any]) -> Any:
    if outline is None:
        return _LEFT_OUT
    module, names = outline
    memo: dict[int, Any] = {}
    for p in module.parameters():
        if not isinstance(whole := state.get(names[id(p)]), Tensor) or whole.shape != p.shape:
            return _LEFT_OUT
        memo[id(p)] = nn.Parameter(whole, p.requires_grad)
    for x in module.buffers():
        whole = state.get(names.get(id(x), ""))
        memo[id(x)] = whole if isinstance(whole, Tensor) else x
    return copy.deepcopy(module, memo)
