"""Where between its layers a block treats every token alike, so that each rank may hold a part of the sequence there.

Between a row layer's output (or the block's input) and the next column layer's input (or the block's output), token t
must depend on token t only. A block may have several streams of tokens, of different lengths, and values without any.
Source: Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.auto_plan.blocks import Call, tensors_anywhere_in
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.auto_plan.thin import ThinLinear, concrete_call
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.shim.autograd import accumulated_parameter
from lightning_megatp.shim.torch import tree_leaves, viewed
from lightning_megatp.tensor.functions import argument, is_in_place, operation_name


def sequence_dim(twin: nn.Module, call: Call, layers: Mapping[str, LayerPlan]) -> int | None:
    """The dim of a block's hidden states along which it may be divided between its regions; None if there is none.

    Args:
        twin: from `thin_copy`; it is changed.
        call: what a step calls it with.
        layers: what is split in the block.
    """
    rows = [name for name, layer in layers.items() if layer.style.style == "row"]
    columns = [
        name
        for name, layer in layers.items()
        if layer.style.style in ("column", "column_gather") and isinstance(twin.get_submodule(name), ThinLinear)
    ]
    if not rows:
        return None
    own = concrete_call(call, seed=0)
    hidden = next((x for x in tree_leaves((own.args, own.kwargs)) if _is_floating(x)), None)
    if hidden is None or hidden.dim() != 3 or not hidden.requires_grad:
        return None
    if all(x is not hidden for x in (*own.args, *own.kwargs.values())):
        return None  # in a tuple, a dict: what enters is found among the arguments
    for name in (*rows, *columns):
        layer = twin.get_submodule(name)
        assert isinstance(layer, ThinLinear)
        layer.record, layer.cut = [], name in rows
    with torch.enable_grad(), exact(), _Watch() as watch:
        result = twin(*own.args, **own.kwargs)
    inside = {id(y) for name in columns for _, y in _calls(twin, name)}
    in_part = [x for x in watch.changed_in_part if x.shape == hidden.shape and id(x) not in inside]
    if watch.asked or in_part:  # of tokens a rank would be given a part
        return None
    outputs = [x for x in tensors_anywhere_in(result, (own.args, own.kwargs)) if x.is_floating_point()]
    sources = [hidden, *(y for name in rows for _, y in _calls(twin, name))]
    targets = [*(x for name in columns for x, _ in _calls(twin, name)), *outputs[:1]]
    for dim in (1, 0):
        divisible = all(x.dim() == 3 and x.shape[dim] > 1 for x in sources)
        if divisible and all(_is_local(x, sources, dim) for x in targets):
            return dim
    return None


class _Watch(TorchFunctionMode):
    """Notes whether code asks for gradients of what it computes with: by hooks, or by making leaves (implicit layers,
    learning at test time); and what it changes in place through a view (`x[:, 0] += 1`)."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        self.changed_in_part: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = operation_name(func), kwargs or {}
        if name in ("register_hook", "retain_grad"):
            self.asked = True
        elif name == "requires_grad_" or (name == "requires_grad" and len(args) > 1):  # set
            wanted = argument(args, kwargs, 1, "requires_grad", default=True)
            self.asked = self.asked or bool(wanted and not args[0].requires_grad)
        elif is_in_place(name) and args and isinstance(args[0], Tensor):
            base = viewed(args[0])
            if base is not None and args[0].numel() < base.numel():
                self.changed_in_part.append(base)
        return func(*args, **kwargs)


def used_twice(twin: nn.Module, call: Call) -> set[str]:
    """The modules with a parameter that one run of a block uses more than once: it may meet whole values as well as
    shards of them.

    Args:
        twin: from `thin_copy`.
        call: what a step calls it with.
    """
    own = concrete_call(call, seed=0)
    with torch.enable_grad(), exact():
        outputs = tensors_anywhere_in(twin(*own.args, **own.kwargs))
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen, uses = set(todo), Counter[int]()
    while todo:
        for node, _ in todo.pop().next_functions:
            leaf = None if node is None else accumulated_parameter(node)
            uses.update([] if leaf is None else [id(leaf)])
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)
    return {name.rpartition(".")[0] for name, p in twin.named_parameters() if uses[id(p)] > 1}


def _calls(twin: nn.Module, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    yield from getattr(twin.get_submodule(name), "record", None) or ()


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _is_local(target: Tensor, sources: list[Tensor], dim: int) -> bool:
    """Whether one token of a value depends on that token of its sources only; of some it may not depend at all."""
    if not target.requires_grad:
        return True
    token = target.shape[dim] // 2 if target.dim() > dim else 0
    cotangent = torch.zeros_like(target)
    of_token = cotangent.select(dim, token) if target.dim() == 3 else cotangent
    of_token.normal_()
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        target, sources, cotangent, retain_graph=True, allow_unused=True
    )
    for source, grad in zip(sources, grads, strict=True):
        if grad is None:
            continue
        others = grad.clone()
        if target.dim() == 3 and target.shape[dim] == source.shape[dim]:
            others.select(dim, token).zero_()
        if bool(others.any()):
            return False
    return True
