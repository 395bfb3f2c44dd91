"""FeatureShard: this rank's features (heads) of a tensor, that behaves as the whole one.

Between a column and a row layer user code counts heads and features: `view(B, T, self.n_head, -1)`,
`qkv.split(self.n_embd, dim=2)`. On shards these sizes mean the whole. Which features a rank owns is followed through
views, slices, products and attention (`rules/`), and all of these run on its own features. Any other operation gathers
the whole tensor first: what is not local is merely not faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.plan.ranges import ByRank, positions
from lightning_megatp.shim.fakes import as_subclass
from lightning_megatp.shim.torch import tensor_version, tree_map
from lightning_megatp.tensor.draws import OF_TENSORS, draws_random
from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Decision, Enter, take_local
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.operation import NEED_GRADIENT, NEED_WHOLE, Operation, operation_of
from lightning_megatp.tensor.shards import (
    GatheredView,
    Shard,
    becomes_leaf,
    change_whole,
    changes,
    is_collective,
    is_linear_of_layer,
    linear_of_layer,
    of_whole,
    send_whole,
    unsealed,
)

_MOST_DECISIONS = 4096
_VALUES = frozenset([int, float, bool, str, type(None)])
_ANY = (None,)


class FeatureShard(Shard):
    """A tensor of which this rank holds some features; shape, size and operations are those of the whole tensor."""

    features: FeatureLayout

    @staticmethod
    def wrap(local: Tensor, layout: FeatureLayout) -> FeatureShard:
        """This rank's features, a plain tensor, as a shard of the whole tensor."""
        shard = as_subclass(local, FeatureShard)
        shard.plain, shard.features = local, layout
        return shard

    def whole(self, operation: str = "whole") -> Tensor:
        """All features as a plain tensor, the same on every rank. Whoever asks again, of this object, gets the same.

        Args:
            operation: what needs it, for the account of gathers.

        Communication: `GroupExchange.gather`; none where every rank owns everything.
        """
        local, layout = self.plain, self.features
        with_graph = torch.is_grad_enabled() and local.requires_grad
        key = (tensor_version(local), with_graph, torch.is_inference_mode_enabled())
        held: tuple[Any, Tensor, int] | None = self.__dict__.get("_gathered")
        if held is not None and held[0] == key and tensor_version(held[1]) == held[2]:
            return held[1]
        if not layout.replicated:
            layout.context.gathers[operation] += 1
        value: Tensor = layout.context.exchange.gather(local, layout.dim, layout.by_rank)
        self.__dict__["_gathered"] = (key, value, tensor_version(value))
        return value

    def take_part(self, whole: Tensor) -> None:
        """Take this rank's features of a whole tensor. Communication: `GroupExchange.scatter`."""
        layout = self.features
        self.plain.copy_(layout.context.exchange.scatter(whole, layout.dim, layout.by_rank))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation.special is not None and args and isinstance(args[0], FeatureShard):
            done, result = operation.special(func, operation.name, args, kwargs)
            if done:
                return result
        if len(types) > 1 and is_linear_of_layer(operation.name, args, kwargs):
            return linear_of_layer(operation.name, args, kwargs)
        if len(types) > 1 and any(issubclass(kind, GatheredView) for kind in types):
            args, kwargs = tree_map(unsealed, args), tree_map(unsealed, kwargs)
        if len(types) == 1 or all(kind in (cls, Tensor) or issubclass(kind, GatheredView) for kind in types):
            done, result = _run_on_features(func, operation, args, kwargs)
            if done:
                return result
        return _run_on_whole(func, operation.name, args, kwargs)


def own_features(x: FeatureShard, by_rank: ByRank, size: int) -> Tensor | None:
    """The given features of the last dim as a plain tensor, without communication; None if the ranks lack some."""
    layout = x.features
    if layout.replicated and x.plain.shape[-1] == size:
        return take_local(x.plain, -1, by_rank[layout.context.rank])
    if layout.replicated or layout.dim != -1 or layout.size != size:
        return None
    if layout.by_rank == by_rank:
        return x.plain
    found = [positions(mine, wanted) for mine, wanted in zip(layout.by_rank, by_rank, strict=True)]
    own = found[layout.context.rank]
    return None if own is None or None in found else take_local(x.plain, -1, own)


def _run_on_features(
    func: Callable[..., Any], operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """(True, what it returns), or (False, None) where it needs whole tensors."""
    tensors: list[Tensor] = []
    key: list[Any] = [func]
    own_args, layout = _read(args, operation.pointwise, key, tensors, None)
    own_kwargs = kwargs
    if kwargs:
        key += kwargs
        values, layout = _read(kwargs.values(), operation.pointwise, key, tensors, layout)
        own_kwargs = dict(zip(kwargs, values, strict=True))
    if layout is None:
        return False, None
    try:
        question = tuple(key)
        decision = layout.decisions[question]
    except KeyError:
        decision = _remember(layout, question, _decide(operation, layout, args, kwargs))
    except TypeError:  # an argument that can't be remembered
        return False, None
    if decision is None:
        return False, None
    layouts, actions, run = decision
    draws = operation.draws and draws_random(operation.name, args, kwargs)
    if draws and not (isinstance(layouts, FeatureLayout) and layouts.disjoint):
        return False, None  # several ranks would have to draw the same
    if actions:
        tensors = [x if action is None else action(x) for x, action in zip(tensors, actions, strict=True)]
        rest = iter(tensors)
        own_args = _fill(args, rest)
        own_kwargs = dict(zip(kwargs, _fill(kwargs.values(), rest), strict=True))
    if draws:
        with layout.context.stream.inside(tensors[0].device):
            result = func(*own_args, **own_kwargs) if run is None else run(tensors)
    else:
        result = func(*own_args, **own_kwargs) if run is None else run(tensors)
    if operation.in_place:
        return True, None if operation.name == "__setitem__" else args[0]
    if result is tensors[0] and args and isinstance(args[0], FeatureShard) and result is args[0].plain:
        return True, args[0]
    return True, result if layouts is None else _wrap(result, layouts)


def _read(
    values: Iterable[Any], pointwise: bool, key: list[Any], tensors: list[Tensor], layout: FeatureLayout | None
) -> tuple[list[Any], FeatureLayout | None]:
    """The arguments with this rank's part of each shard, and the layout of the first one, whose `decisions` are asked.

    Args:
        values: arguments.
        pointwise: whether a rule depends on the tensors among them alone.
        key: takes what else a rule depends on.
        tensors: takes the tensors among them.
        layout: of the first shard among earlier arguments.
    """
    own: list[Any] = []
    for x in values:
        kind = type(x)
        if kind in _VALUES:
            key += _ANY if pointwise else (kind, x)
        elif isinstance(x, FeatureShard):
            held = x.features
            if layout is None:
                layout = held
            x = x.plain
            tensors.append(x)
            key += (held is layout or held, x.shape, x.dtype)
        elif isinstance(x, Tensor):
            tensors.append(x)
            key += (None, x.shape, x.dtype)
        elif pointwise:
            key += _ANY
        elif kind is tuple or kind is list:
            key.append(len(x))
            items, layout = _read(x, False, key, tensors, layout)
            x = kind(items)
        elif kind is slice:
            a, b, c = x.start, x.stop, x.step
            unknown = isinstance(a, Tensor) or isinstance(b, Tensor) or isinstance(c, Tensor)
            key += (kind, [] if unknown else (a, b, c))  # a list has no hash
        else:
            key += (kind, x)
        own.append(x)
    return own, layout


def _fill(values: Iterable[Any], tensors: Iterator[Tensor]) -> list[Any]:
    """The arguments again, with other tensors."""
    return [
        next(tensors)
        if isinstance(x, Tensor)
        else type(x)(_fill(x, tensors))
        if type(x) is tuple or type(x) is list
        else x
        for x in values
    ]


def _wrap(result: Any, layouts: Any) -> Any:
    if isinstance(result, Tensor):
        return FeatureShard.wrap(result, layouts)
    if isinstance(result, (tuple, list)):
        each = layouts if isinstance(layouts, tuple) else [layouts] * len(result)
        wrapped = [_wrap(x, layout) for x, layout in zip(result, each, strict=True)]
        return type(result)(wrapped)
    return result


def _remember(layout: FeatureLayout, question: tuple[Any, ...], decision: Decision | None) -> Decision | None:
    if decision is not None and not any(decision.actions):
        decision = decision._replace(actions=())
    if len(layout.decisions) >= _MOST_DECISIONS:
        layout.decisions.clear()
    layout.decisions[question] = decision
    return decision


def _decide(
    operation: Operation, layout: FeatureLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Decision | None:
    operands: list[Operand] = []

    def seen(x: Any) -> Any:
        if isinstance(x, Tensor):
            own = x.features if isinstance(x, FeatureShard) else None
            local = x.plain if isinstance(x, FeatureShard) else x
            operands.append(Operand(len(operands), own.shape(local.shape) if own else x.shape, local.dtype, own))
            return operands[-1]
        return type(x)(map(seen, x)) if type(x) is tuple or type(x) is list else x

    own_args, own_kwargs = tuple(map(seen, args)), {name: seen(x) for name, x in kwargs.items()}
    if kwargs.get("out") is not None:
        return None
    if not any(x.sharded for x in operands):
        return _decide_on_everything(operation, layout, operands, args)
    if operation.rule is None:
        return None
    first = next(x.layout for x in operands if x.layout is not None and x.sharded)
    return operation.rule(Call(operation.name, own_args, own_kwargs, operands, first, operation.in_place))


def _decide_on_everything(
    operation: Operation, layout: FeatureLayout, operands: list[Operand], args: tuple[Any, ...]
) -> Decision | None:
    """Where every rank owns everything, any operation is right."""
    changes_whole = operation.in_place and not isinstance(args[0], FeatureShard)
    if operation.name in NEED_WHOLE or changes_whole:
        return None
    enter = Enter(layout.context)
    return Decision(layout.everywhere(), [enter if x.layout is None else None for x in operands])


def _run_on_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the shards, and run an operation as one device does."""
    if name in NEED_GRADIENT or becomes_leaf(func, name, args):
        raise RuntimeError(
            f"MegaTPStrategy: `{name}` on a tensor of which this rank holds some features would see a part of its"
            " gradient. Call it on a whole value: before the column layer, or after the row layer."
        )
    if is_collective(func):
        return send_whole(func, name, args, kwargs)
    if changes(FeatureShard, name, args, kwargs):
        return change_whole(FeatureShard, _FeatureView, func, name, args, kwargs)
    draws = name in OF_TENSORS and draws_random(name, args, kwargs)
    shards: list[FeatureShard] = []

    def take(x: Any) -> Any:
        if not isinstance(x, FeatureShard):
            return x
        shards.append(x)
        return x.whole(name)

    args, kwargs = tree_map(take, args), tree_map(take, kwargs)
    with _replicated_stream(shards[0]) if draws and shards else contextlib.nullcontext():
        result = func(*args, **kwargs)
    return of_whole(name, result, _FeatureView)


@contextlib.contextmanager
def _replicated_stream(x: FeatureShard) -> Iterator[None]:
    """Random numbers that are the same on all ranks, inside a region too."""
    stream = x.features.context.stream
    inside = stream.active
    stream.leave()
    try:
        yield
    finally:
        if inside:
            stream.enter(x.plain.device)


class _FeatureView(GatheredView):
    """A view of a feature shard's gathered copy."""

    @staticmethod
    def refusal(name: str) -> str:
        return (
            f"MegaTPStrategy: `{name}` changes in place a tensor of which each tensor rank holds some features, and"
            " needs all of them. Write it without in-place change, or leave the layer that made the tensor out of the"
            " plan."
        )
