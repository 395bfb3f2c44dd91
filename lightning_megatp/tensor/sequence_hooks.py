"""Forward hooks of modules at the borders of sequence regions, and of a pipeline's units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_megatp.plan.styles import Style
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.sequence import SequenceLayout, SequenceShard, gathered
from lightning_megatp.tensor.shards import Shard


class SequenceEntry:
    """Forward pre-hook of a `sequence` block: splits its hidden states, unless they already are."""

    def __init__(self, name: str, style: Style, context: TensorContext) -> None:
        self.name, self.style, self.context = name, style, context
        self._layer: Any = None
        """A split one of the block."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = self.style.input
        if where is None:
            where = next(self._eligible(args, kwargs), None)
        x = None if where is None else args[where] if isinstance(where, int) else kwargs.get(where)
        if not isinstance(x, Tensor) or _plain(x).dim() <= self.style.dim:
            raise ValueError(
                f"MegaTPStrategy: `{self.name}` has the style `sequence` with dim={self.style.dim}, but no argument of"
                " its forward is a floating tensor with that dim. Name it by `input` in the plan, or drop the style."
            )
        if isinstance(x, SequenceShard) or self._is_dry(x, module):
            return None
        shard: Tensor = SequenceShard.shard(gathered(x), self.style.dim, self.context)
        if isinstance(where, int):
            args = (*args[:where], shard, *args[where + 1 :])
        else:
            kwargs = {**kwargs, str(where): shard}
        return args, kwargs

    def _is_dry(self, x: Tensor, block: nn.Module) -> bool:
        """Whether a dry run asks for shapes: there a batch has its values, but split layers have none."""
        if self._layer is None:
            self._layer = next((child for child in block.modules() if hasattr(child, "any_weight")), block)
        return self.context.is_dry(x) or self.context.is_dry(getattr(self._layer, "any_weight", x))

    def _eligible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int | str]:
        everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for where, x in everything:
            if not isinstance(x, Tensor):
                continue
            plain = _plain(x)
            if plain.is_floating_point() and plain.dim() > self.style.dim + 1:
                yield where


def _plain(x: Tensor) -> Tensor:
    """A shard's own tensor, which is asked faster than the shard; anything else as it is."""
    return x.plain if isinstance(x, Shard) else x


def leave_whole(module: nn.Module, args: Any, output: Any) -> Any:
    """The end of a pipeline's unit: what crosses to other stages is whole."""
    return tree_map(gathered, output)


def whole_result(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a unit returns, made whole, where its forward is called directly, past its hooks."""
    return tree_map(gathered, forward(*args, **kwargs))


def leave_sequence(module: nn.Module, args: Any, output: Any) -> Any:
    """The end of a `sequence` block that returns whole sequences."""
    return tree_map(lambda x: x.whole() if isinstance(x, SequenceShard) else x, output)


def unwrap_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `token_local` module sees this rank's tokens as a plain tensor."""
    shards = [x for x in (*args, *kwargs.values()) if isinstance(x, SequenceShard)]
    module.__dict__["_megatp_layout"] = shards[0].tokens if shards else None
    return tree_map(lambda x: x.plain if isinstance(x, SequenceShard) else x, (args, kwargs))


def wrap_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What a `token_local` module returns is of this rank's tokens again."""
    layout: SequenceLayout | None = module.__dict__.pop("_megatp_layout", None)
    if layout is None:
        return output
    return tree_map(lambda x: SequenceShard.wrap(x, layout) if isinstance(x, Tensor) else x, output)
