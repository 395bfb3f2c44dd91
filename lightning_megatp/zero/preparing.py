"""Before and while the parameters of a module are divided: what is refused, and where FSDP2 puts them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megatp.parts.rows import DividedParameter, rows_of
from lightning_megatp.shim.autograd import accumulation_hooks, hooks_held, tensor_hooks
from lightning_megatp.zero.holders import Group


def lay_out(
    module: nn.Module, groups: Sequence[Group], in_rest: set[str], place: int, ranks: int, first_copy: bool
) -> list[DividedParameter]:
    """Let FSDP2 lay out its memory: afterwards this rank's rows, and the tensors it gathers into, stay the same.

    Args:
        module: whose parameters are FSDP2's by now.
        groups: that gather them, the root last.
        in_rest: names of those that the root gathers.
        place: this rank's among those that hold different rows.
        ranks: how many these are.
        first_copy: whether this rank saves its rows, and not one with the same.
    """
    for group in groups:
        group.gather()
        group.free()
    resting = dict(module.named_parameters())
    owners = _owners(module)
    gathered: dict[str, nn.Parameter] = {}
    for group in groups:
        group.gather()
        for name, ((owner, leaf), *_) in owners.items():
            parameter = owner._parameters[leaf]
            if parameter is not None and not isinstance(parameter, DTensor):
                gathered[name] = parameter
        group.free()
    found = []
    for name, parameter in resting.items():
        if isinstance(parameter, DTensor):
            with torch.no_grad():
                local = nn.Parameter(parameter.to_local())
            rows = rows_of(parameter.shape[0], place, ranks)
            whole, together = gathered[name], name in in_rest
            found.append(DividedParameter(name, parameter, whole, local, rows, owners[name], together, first_copy))
    return found


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The user's hooks on gradients of parameters (`p.register_hook`), which go on with what takes their places.

    Returns:
        Name -> hooks as torch holds them.

    Raises:
        ValueError: a hook can't.
    """
    named = dict(module.named_parameters())
    known = {id(p) for p in named.values()}
    found = {}
    for name, parameter in named.items():
        if accumulation_hooks(parameter):
            raise ValueError(
                f"MegaTPStrategy: `{name}` has a hook of `register_post_accumulate_grad_hook`, and zero > 0 replaces"
                " the parameter: it would never be called. Do it in `on_before_optimizer_step`, or use zero=0."
            )
        for hook in tensor_hooks(parameter).values():
            if any(id(x) in known for x in _bound_to(hook)):
                raise ValueError(
                    f"MegaTPStrategy: a gradient hook of `{name}` keeps a parameter, and zero > 0 replaces it: it would"
                    " go on with old values. Do it in `on_before_optimizer_step`, or use zero=0."
                )
            found[name] = hooks_held(parameter)
    return found


def _bound_to(function: Any) -> Iterator[Any]:
    """What a function was made with: in its closure, its defaults, or by `functools.partial`."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # empty
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_bound_to(function.func))


def refuse_sparse(module: nn.Module) -> None:
    """Refuse embeddings with sparse gradients.

    Raises:
        ValueError: an embedding gives sparse gradients.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise ValueError(
                f"MegaTPStrategy: the embedding `{name}` has sparse gradients, which zero > 0 can't divide. Build it"
                " with sparse=False."
            )


def main_dtype(module: nn.Module) -> torch.dtype:
    """That of most trained parameters, over all stages. FSDP2 reduces the gradients of a group in one dtype.

    Communication: one object all-gather over the world.
    """
    by_rank: list[Counter[torch.dtype]] = [Counter() for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, trained_dtypes(module))
    return most_common(sum(by_rank, Counter[torch.dtype]()))


def trained_dtypes(module: nn.Module) -> Counter[torch.dtype]:
    """How many trained elements there are of each dtype."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.requires_grad:
            counts[parameter.dtype] += parameter.numel()
    return counts


def most_common(counts: Counter[torch.dtype]) -> torch.dtype:
    """The dtype of most elements, the same on all ranks; torch's default where there are none."""
    return max(counts, key=lambda dtype: (counts[dtype], str(dtype)), default=torch.get_default_dtype())


def _owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Parameter name -> modules that hold it, and how they call it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for leaf, parameter in child._parameters.items():
            if parameter is not None:
                owners.setdefault(names[id(parameter)], []).append((child, leaf))
    return owners
