"""Parallel layers. Each is made from an existing layer *in place*: the object keeps its identity, its hooks, its ties,
its parameters' names and the sizes it reports (`out_features`), stays an `nn.Linear` or `nn.Embedding` by isinstance,
and holds only this rank's shard.

Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nested import nested_tensor_from_jagged

from lightning_megatp.plan.layer import MatrixDims
from lightning_megatp.plan.ranges import Ranges, length
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.modules import Convertible
from lightning_megatp.tensor.collectives import (
    canonical_order,
    copy_to_region,
    from_host,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_sequence,
    scatter_to_region,
)
from lightning_megatp.tensor.context import Region, TensorContext
from lightning_megatp.tensor.entry import Entry
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard, own_features
from lightning_megatp.tensor.outside import LayerParameters, WholeParameter, used_whole
from lightning_megatp.tensor.parameters import slice_whole
from lightning_megatp.tensor.sequence import SequenceLayout, SequenceShard
from lightning_megatp.tensor.shards import Shard, gathered

L = TypeVar("L", bound="ParallelLayer")


class ParallelLayer(Convertible):
    """What the parallel layers share. Not a layer by itself."""

    context: TensorContext
    by_rank: tuple[Ranges, ...]
    """Ranges of the split dimension, for every rank of the tensor group."""
    region: Region | None
    label: str
    """Name in the LightningModule, for messages."""
    whole_parameters: frozenset[str]
    """Parameters kept whole, because the step also uses them outside this layer; they are sliced when used here."""
    matrix_dims: MatrixDims = MatrixDims()
    """Of its weight."""

    @classmethod
    def adopt(
        cls: type[L],
        layer: nn.Module,
        context: TensorContext,
        by_rank: tuple[Ranges, ...],
        label: str = "",
        region: Region | None = None,
        **options: Any,
    ) -> L:
        """Turn an existing layer into this class, in place. Its parameters have been, or will be, cut to this rank's
        ranges by the caller (`tensor.parameters.shard_`), since tied parameters are cut once."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.context, layer.by_rank, layer.label, layer.region = context, by_rank, label, region
        layer.whole_parameters = frozenset()
        layer.__dict__["_parameters"] = LayerParameters(layer._parameters, context, layer, is_layer=True)
        for name, value in options.items():
            setattr(layer, name, value)
        layer._prepare()
        return layer

    @property
    def group(self) -> Any:
        """The tensor-parallel process group."""
        return self.context.group

    @property
    def ranges(self) -> Ranges:
        """What this rank owns of the split dimension."""
        return self.by_rank[self.context.rank]

    @property
    def sizes(self) -> list[int]:
        """Features of each rank."""
        return [length(ranges) for ranges in self.by_rank]

    @property
    def features(self) -> int:
        """Features of the whole split dimension."""
        return max(stop for ranges in self.by_rank for _, stop in ranges)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's own work: meanwhile its parameters are the shards (see `tensor.outside`)."""
        if torch.compiler.is_compiling():
            return self._outside_of_compiled_code(input)
        return self._run(self._compute, input)

    @contextlib.contextmanager
    def about_to_convert(self) -> Iterator[list[Tensor] | None]:
        """In a step, whose code finds whole parameters: it may move a layer to where it is (experts that wait in the
        host's memory, elsewhere)."""
        if not self.context.user_code:
            yield None
            return
        with self.context.running(user_code=False):
            yield [*self.parameters(), *self.buffers()]

    def linear(self, x: Any, bias: Any) -> Any:
        """What `F.linear(x, self.weight, bias)` is in the code of a step. NotImplemented where that needs all of the
        weight: it is then gathered."""
        return NotImplemented

    def _run(self, compute: Callable[[Tensor], Tensor], x: Any) -> Tensor:
        """Run the layer's own work, `compute`, on what it is given; of jagged sequences on all their tokens."""
        if type(x) is not Tensor and _is_jagged(x):
            return nested_tensor_from_jagged(self._run(compute, x.values()), x.offsets(), x.lengths())
        context = self.context
        context.meet(self.label)
        before, context.user_code = context.user_code, False
        try:
            return compute(x)
        except RuntimeError as error:
            if type(error) is not RuntimeError or (why := self._refused(x)) is None:
                raise
            raise RuntimeError(f"MegaTPStrategy: {why}") from error
        finally:
            context.user_code = before

    @torch.compiler.disable(reason="MegaTPStrategy: split layers run outside of compiled code")
    def _outside_of_compiled_code(self, *args: Any) -> Tensor:
        return self.forward(*args)

    def _compute(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _refused(self, x: Tensor) -> str | None:
        """Why it failed on a value, if that is the plan's fault."""
        return None

    def _prepare(self) -> None:
        """Work out what the layer's calls need to know."""

    def _own(self, name: str, dim: int, by_rank: tuple[Ranges, ...] | None = None) -> Any:
        """This rank's part of a parameter, None if there is none, a weight as `F.linear` takes it: (out, in).

        Args:
            name: of the parameter.
            dim: the split dim.
            by_rank: its ranges, where they are not the layer's.
        """
        parameter = self._held(name)
        by_rank = by_rank or self.by_rank
        if parameter is None or (name not in self.whole_parameters and not _stands_in(parameter, dim, by_rank)):
            return parameter
        return slice_whole(parameter, self.group, dim, by_rank)

    def _held(self, name: str) -> Any:
        """A parameter itself, whatever code sees of it; or what is computed in its place."""
        held = self._parameters
        return dict.__getitem__(held, name) if name in held else getattr(self, name)

    def computes_with(self, weight: Tensor) -> bool:
        """Whether this is its weight, the parameter itself."""
        return self._held("weight") is weight

    def keep_whole(self, parameter: Tensor) -> None:
        """From now on a parameter of its own is whole here."""
        self.whole_parameters |= {name for name in self._names() if self._held(name) is parameter}

    def _names(self) -> Collection[str]:
        return self._parameters.keys()

    def _is_own(self, bias: Any) -> bool:
        """Whether what code gives as a bias is the layer's own, as it sees it."""
        held = self._held("bias")
        return held is not None and (bias.parameter if isinstance(bias, WholeParameter) else bias) is held

    def _part(self, bias: Any) -> Any:
        """This rank's part of a bias that code has computed."""
        whole = used_whole(gathered(bias), "linear")
        return None if whole is None else self.context.exchange.scatter(whole, 0, self.by_rank)

    @property
    def any_weight(self) -> Tensor:
        """A weight of its, or what stands for it in a dry run."""
        weight: Tensor = self._held("weight")
        return weight

    def bring_in(self, x: Tensor) -> Entry:
        """A whole value, or this rank's tokens or features of one, into the tensor region."""
        x = x.whole("linear") if isinstance(x, FeatureShard) else x
        return Entry(x, self.group, self.context.deferred, self._readers())

    def _readers(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Weight and bias of the linear layers that will probably read what this layer brings in."""
        return ()


def of_subclass(kind: Any, layer: nn.Module) -> Any:
    """A parallel class that also has what the layer's own class adds to torch's: methods that the user's code calls,
    and what an embedding does around `super().forward`, which then is the parallel one."""
    original: Any = type(layer)
    return kind if original in (nn.Linear, nn.Embedding, nn.EmbeddingBag) else _combined(kind, original)


@functools.cache
def _combined(kind: Any, original: Any) -> Any:
    around = issubclass(original, nn.Embedding) and original.forward is not nn.Embedding.forward
    return type(kind.__name__, (original, kind) if around else (kind, original), {"__module__": __name__})


def _stands_in(x: Tensor, dim: int, by_rank: tuple[Ranges, ...]) -> bool:
    """Whether it is a whole value in the place of a parameter: one that the step computed (`functional_call`), or what
    stands for the parameter in a pipeline's dry run."""
    made = not isinstance(x, nn.Parameter) or is_fake(x)
    return made and x.shape[dim] == max(stop for ranges in by_rank for _, stop in ranges)


class ColumnParallel(ParallelLayer):
    """y = x A^T + b with the output features of A split over the tensor ranks.

    Input (..., in_features) whole, a SequenceShard or a FeatureShard; output (..., features of this rank). With
    `global_sizes` it is a FeatureShard of them; with `gather_output` all features, or with `lazy` too a FeatureShard,
    which is gathered only where an operation needs it whole.

    Communication: that of an `Entry`, once for all column layers that read the same tensor, hidden in backward behind
    the gradients of their weights; with `gather_output` also `gather_from_region`, unless `lazy`.
    """

    bias: Any
    gather_output: bool = False
    global_sizes: bool = False
    lazy: bool = False

    @property
    def out_range(self) -> Ranges:
        """This rank's output features."""
        return self.ranges

    def _prepare(self) -> None:
        self._layout: FeatureLayout | None = None
        if self.lazy if self.gather_output else self.global_sizes:
            self._layout = FeatureLayout(-1, self.by_rank, self.features, self.context)
            self.context.feature_shards = True
        self._order = canonical_order(self.by_rank) if self.gather_output else None
        if self.region is not None:
            self.region.columns.append(weakref.ref(self))

    def linear(self, x: Any, bias: Any) -> Any:
        """Only where what it returns has the sizes of the whole: who uses a weight need not be in its region."""
        if not (self.gather_output or self.global_sizes):
            return NotImplemented
        own = self._is_own(bias)
        return self._run(self._compute if own else lambda x: self._columns(x, self._part(bias)), x)

    def _compute(self, x: Tensor) -> Tensor:
        return self._columns(x, self._own("bias", 0))

    def _columns(self, x: Tensor, bias: Tensor | None) -> Tensor:
        entry = self.context.enter(x, self, None if self.gather_output else self.region)
        y = entry.linear(self._own("weight", 0), bias)
        if self._layout is not None and self.context.size > 1:
            whole = self.context.is_dry(y)
            return self.context.exchange.gather(y, -1, self.by_rank) if whole else FeatureShard.wrap(y, self._layout)
        if not self.gather_output:
            return y
        y = gather_from_region(y, self.group, self.sizes)
        return y if self._order is None else y.index_select(-1, from_host(self._order, y.device))

    def _refused(self, x: Tensor) -> str | None:
        expected = getattr(self, "in_features", None)
        if expected is None or not x.dim() or x.shape[-1] == expected:
            return None
        return (
            f"`{self.label}` takes {expected} features, and this rank has {x.shape[-1]} of them: it is called inside"
            " of a tensor-parallel region, and was not when the plan was made (an adapter that a hook turns on later)."
            " Turn it on before training, so that the automatic plan sees it, or leave the layers around it out of the"
            " plan."
        )

    def _readers(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        columns = [] if self.region is None else [column() for column in self.region.columns]
        layers = columns if any(layer is self for layer in columns) else [self]  # a copy's region has the originals
        return [held for layer in layers if layer is not None and (held := layer._plain_parameters()) is not None]

    def _plain_parameters(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias as this layer's call will use them; None if it will use something made of them."""
        weight = self._held("weight")
        if self.whole_parameters or not isinstance(weight, nn.Parameter):
            return None
        return weight, self._held("bias")


class RowParallel(ParallelLayer):
    """y = x A^T + b with the input features of A split over the tensor ranks; the partial results are summed.

    Input (..., features of this rank), whole with `split_input`, or with `global_sizes` a FeatureShard (or what some
    operation made whole of one); output (..., out_features) whole, or a SequenceShard along `sequence_dim`. The bias is
    added once, after the sum.

    Communication: `reduce_from_region`, or `reduce_scatter_sequence` in a sequence region (the same bytes).
    """

    bias: Any
    split_input: bool = False
    global_sizes: bool = False
    sequence_dim: int | None = None

    def _prepare(self) -> None:
        self._own_features = length(self.ranges)
        self._all_features = self.features

    def _split_features(self, x: Tensor) -> Tensor:
        """This rank's features of a shard or a whole value."""
        if isinstance(x, FeatureShard):
            own = own_features(x, self.by_rank, self._all_features)
            if own is not None:
                return own
            x = x.whole("linear")
        if isinstance(x, SequenceShard):
            x = x.whole()
        return scatter_to_region(x, self.group, self.by_rank) if x.shape[-1] == self._all_features else x

    def linear(self, x: Any, bias: Any) -> Any:
        """Only where it takes whole values: who uses a weight need not be in its region."""
        if not (self.split_input or self.global_sizes):
            return NotImplemented
        if self._is_own(bias):
            return self._run(self._compute, x)
        y = self._run(lambda x: self._rows(x, None), x)
        return y if bias is None else y + used_whole(bias, "linear").to(y.dtype)

    def _compute(self, x: Tensor) -> Tensor:
        return self._rows(x, self._held("bias"))

    def _rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.split_input or self.global_sizes or isinstance(x, FeatureShard):
            x = self._split_features(x)
        if x.shape[-1] != self._own_features:
            raise ValueError(
                f"MegaTPStrategy: `{self.label}` has the plan's style `row` and expects {self._own_features} of"
                f" {sum(self.sizes)} input features on this rank, but got {x.shape[-1]}. Its input must come from a"
                f" `column` layer split the same way; for a whole input use the style `row_split`."
            )
        self.context.leave()  # first of all: a checkpoint's recomputation may stop inside of F.linear
        partial = self.context.deferred.linear(x, self._own("weight", 1))
        dim = self.sequence_dim
        if dim is None or partial.dim() <= dim + 1 or self.context.is_dry(partial):
            y = reduce_from_region(partial, self.group, spend=True)
            return y if bias is None else y + bias.to(y.dtype)
        layout = SequenceLayout(dim - partial.dim(), partial.shape[dim], self.context)
        y = reduce_scatter_sequence(partial, self.group, layout.dim)
        return SequenceShard.wrap(y if bias is None else y + bias.to(y.dtype), layout)


class ColumnParallelLinear(ColumnParallel, nn.Linear):
    """An nn.Linear: weight (features of this rank, in_features)."""


class RowParallelLinear(RowParallel, nn.Linear):
    """An nn.Linear: weight (out_features, features of this rank)."""


class VocabParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding table split on its rows (the vocabulary).

    Input (...) int ids, the same on every rank; output (..., h) whole.

    Communication: `reduce_from_region` of the output.
    """

    def _prepare(self) -> None:
        (self.first, stop), *_ = self.ranges
        self.rows = stop - self.first
        padding = self.padding_idx
        self.local_padding = padding - self.first if padding is not None and self.first <= padding < stop else None
        self._scores = FeatureLayout(-1, self.by_rank, self.num_embeddings, self.context)

    def linear(self, x: Any, bias: Any) -> Any:
        """Scores of all rows (..., rows), a FeatureShard of this rank's, as of a `lazy` column layer. Not with pipeline
        stages, which send whole values."""
        if self.context.pipelined:
            return NotImplemented
        self.context.feature_shards = True
        return FeatureShard.wrap(self._run(lambda x: self._score(x, self._part(bias)), x), self._scores)

    def _score(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.context.enter(x, self).linear(self._own("weight", 0), bias)

    def _compute(self, x: Tensor) -> Tensor:
        rows = self.rows
        own = x - self.first
        index = own.clamp(0, rows - 1)
        elsewhere = own != index
        # Ids of other ranks look up some row and are zeroed below; ids outside the vocabulary stay out of range here
        # too, so that the lookup itself complains, as on one device.
        unknown = x != x.clamp(0, self.num_embeddings - 1)
        y = F.embedding(index.masked_fill_(unknown, rows), self._own("weight", 0), self.local_padding)
        return reduce_from_region(y.masked_fill_(elsewhere.unsqueeze(-1), 0.0), self.group, spend=True)


class HiddenParallelEmbedding(ParallelLayer, nn.Embedding):
    """An embedding table split on its hidden dim.

    Input (...) int ids; output (..., h) whole.

    Communication: `gather_from_region` of the output.
    """

    def _compute(self, x: Tensor) -> Tensor:
        y = F.embedding(x, self._own("weight", 1), self.padding_idx, None, 2.0, self.scale_grad_by_freq)
        return gather_from_region(y, self.group, self.sizes)


class HiddenParallelEmbeddingBag(ParallelLayer, nn.EmbeddingBag):
    """Bags of the rows of a table that is split on its hidden dim.

    Input as `nn.EmbeddingBag` takes it; output (bags, h) whole.

    Communication: `gather_from_region` of the output; `copy_to_region` of the weights of samples.
    """

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            return self._outside_of_compiled_code(input, offsets, per_sample_weights)
        return self._run(lambda ids: self._look_up(ids, offsets, per_sample_weights), input)

    def _look_up(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        weights = None if weights is None else copy_to_region(gathered(weights), self.group)
        y = F.embedding_bag(
            ids,
            self._own("weight", 1),
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )
        return gather_from_region(y, self.group, self.sizes)


def _is_jagged(x: Any) -> bool:
    """Whether it holds sequences of several lengths (`torch.nested`)."""
    return bool(not isinstance(x, Shard) and x.is_nested and x.layout is torch.jagged)
