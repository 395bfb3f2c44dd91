"""What is split outside of blocks. What lies inside of one may be part of a region."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_megatp.auto_plan.blocks import find_blocks, is_linear, own_weights
from lightning_megatp.auto_plan.changes import add_layer
from lightning_megatp.auto_plan.lookups import HOW, can_split
from lightning_megatp.plan.convolutions import convolution_plan, fits, weights
from lightning_megatp.plan.parallel_plan import ParallelPlan, plain_name
from lightning_megatp.plan.styles import Style, matches
from lightning_megatp.shim.transformers import is_conv1d

SMALL_TABLE = 0.005
"""Embeddings and heads with a smaller share of the model's parameters stay whole."""


class OutsideBlocks:
    """The modules of a model that are in no block.

    Args:
        plan: what was planned so far; it is extended.
        model: the unsplit model.
    """

    def __init__(self, plan: ParallelPlan, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._blocks = tuple(f"{plain_name(name)}." for name in find_blocks(model))

    def add_tables(self) -> None:
        """Split large embeddings by their rows, and large linear layers by their outputs."""
        total = sum(p.numel() for p in self._model.parameters())
        vocabularies = {child.num_embeddings for child in self._model.modules() if isinstance(child, nn.Embedding)}
        for raw, child in self._modules():
            for weight_name in (f"{raw}.{leaf}".lstrip(".") for leaf in own_weights(child)):
                if is_open(plain_name(weight_name), self._plan):
                    self._plan.whole.setdefault(weight_name, "it belongs to no layer, and to no block")
        for name, child in self._open():
            weight = child._parameters.get("weight")
            if weight is None or weight.numel() < SMALL_TABLE * total or weight.shape[0] < self._plan.tp:
                continue
            if isinstance(child, nn.Embedding) and can_split(child):
                add_layer(self._plan, name, "vocab", child.num_embeddings, HOW["vocab"])
            elif isinstance(child, nn.EmbeddingBag) and can_split(child) and child.embedding_dim >= self._plan.tp:
                add_layer(self._plan, name, "hidden", child.embedding_dim, HOW["hidden"])
            elif is_linear(child):
                outputs = weight.shape[1 if is_conv1d(child) else 0]
                add_layer(self._plan, name, "column_gather", outputs, "outside of blocks", outputs in vocabularies)

    def add_convolutions(self, least: float) -> None:
        """Split large convolutions by their output channels.

        Args:
            least: how many weights these have.
        """
        for name, child in self._open():
            if weights(child) >= max(least, 1) and fits(child, self._plan.tp):
                self._plan.layers[name] = convolution_plan(name, Style(name, "column_gather"), child, self._plan.tp)
                self._plan.how[name] = "gathered: a convolution"

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for raw, child in self._model.named_modules():
            if not f"{plain_name(raw)}.".startswith(self._blocks):
                yield raw, child

    def _open(self) -> Iterator[tuple[str, nn.Module]]:
        """Those of which nothing is planned yet, and which a plan leaves open."""
        for raw, child in self._modules():
            name = plain_name(raw)
            if name not in self._plan.layers and is_open(name, self._plan):
                yield name, child


def is_open(name: str, plan: ParallelPlan) -> bool:
    """Whether a module, or one that holds it, matches a pattern of the style `auto`."""
    parts = name.split(".")
    above = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(matches(pattern, module) for pattern in plan.open for module in above)


def tables_of(model: nn.Module) -> dict[str, nn.Embedding]:
    """The embeddings that can be split by their rows, by the names of their weights."""
    return {f"{name}.weight": x for name, x in model.named_modules() if isinstance(x, nn.Embedding) and can_split(x)}
