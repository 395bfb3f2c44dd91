"""Which gradients are partial sums over the tensor ranks, read off each step's graph, and their sum after backward.

A whole parameter that is used inside of a tensor or sequence region gets a part of its gradient on every rank; used
where values are whole it gets all of it. `tensor/lineage.py` walks the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.parts.on_parameters import complete_in_hooks
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.autograd import Engine, current_backward_node
from lightning_megatp.tensor.collectives import all_reduce
from lightning_megatp.tensor.lineage import Lineage, region_of, trace_regions
from lightning_megatp.tensor.outside import WholeParameter, check_undivided
from lightning_megatp.tensor.parameters import gather_shards

if TYPE_CHECKING:
    from lightning_megatp.module import ParallelModule


class PartialGradients:
    """The account of one model, from an optimizer step to the next.

    Args:
        parallel: the model.
    """

    def __init__(self, parallel: ParallelModule) -> None:
        self._parallel = parallel
        self._partial: dict[int, Tensor] = {}
        """id(parameter) -> whole parameters whose gradient is partial on every tensor rank, in the backwards since the
        last optimizer step."""
        self._full: set[int] = set()
        self._received: dict[int, Tensor] = {}
        """id(leaf) -> values from another pipeline stage of whose gradient each rank has a part, until it is asked
        for."""
        self.differentiable = False
        """Whether the step that runs has made gradients with a graph of their own."""

    def __contains__(self, parameter_id: int) -> bool:
        return parameter_id in self._partial

    def trace(self, outputs: Iterable[Tensor], received: Iterable[Tensor] = (), region: str = "whole") -> None:
        """Read off the graph of a loss which gradients will be partial. Before every backward: steps may differ.

        Args:
            outputs: the loss, or what a pipeline stage sends on.
            received: leaves of the graph that come from another pipeline stage, and are nobody's parameters.
            region: in which the outputs live.

        Raises:
            RuntimeError: values cross into or out of a tensor region where no layer of the plan lets them.
        """
        if not self._parallel.has_regions:
            return
        outputs, others = list(outputs), {id(x): x for x in received}
        lineage = trace_regions(outputs, region=region)
        if lineage.hidden:
            raise RuntimeError(_HIDDEN)
        for parameter_id, regions in lineage.regions.items():
            if parameter_id in self._parallel.sharded and regions != {"tensor"}:
                raise RuntimeError(_escaped(self._parallel.name_of(parameter_id)))
        if lineage.crossings:
            raise RuntimeError(_side_door(lineage))
        self._complete_where_mixed(lineage, others)
        self._divide_where_mixed(lineage, outputs, region)
        for leaf_id, leaf in others.items():
            if lineage.regions.pop(leaf_id, {region}) != {region}:
                self._received[leaf_id] = leaf
        for parameter_id, regions in lineage.regions.items():
            if parameter_id in self._parallel.sharded:
                continue
            if regions == {"whole"} and parameter_id not in self._partial:
                self._full.add(parameter_id)
            elif parameter_id in self._full:
                raise RuntimeError(_mixed(self._parallel.name_of(parameter_id), regions | {"whole"}))
            else:
                self._partial[parameter_id] = lineage.leaves[parameter_id]
        complete_in_hooks(self, lineage.leaves.values())

    def completed_received(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """The whole gradient of what came from another pipeline stage, once after its backward.

        Communication: an all-reduce over tp, if each rank has a part of it.
        """
        if self._received.pop(id(leaf), None) is None:
            return gradient
        return all_reduce(gradient, self._parallel.context.group)

    def is_part(self, leaf: Tensor) -> bool:
        """Whether tensor ranks have parts of a parameter's gradient."""
        return self.spec_of(leaf) is not None or id(leaf) in self._partial

    def spec_of(self, leaf: Tensor) -> ShardedTensorSpec | None:
        """How a parameter is split; None if it is not."""
        return self._parallel.spec(leaf)

    @property
    def rank(self) -> int:
        """In the tensor group."""
        return self._parallel.context.rank

    def completed(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """The whole of a gradient of which tensor ranks have parts.

        Communication: one all-gather, or all-reduce.
        """
        whole = self._complete(leaf, gradient)
        assert whole is not None
        return whole

    def part(self, leaf: Tensor, gradient: Tensor) -> Tensor:
        """What this rank adds to a parameter's gradient, of a whole one: its elements; or where they are summed, as
        much as each of those that do."""
        context, spec = self._parallel.context, self._parallel.spec(leaf)
        if spec is None:
            return gradient / context.size
        taken: Tensor = spec.spec(context.rank).take(gradient)
        if not spec.shared:
            return taken
        owners = gradient.new_zeros(spec.shape)
        for rank in range(context.size):
            spec.spec(rank).put(owners, spec.spec(rank).take(owners) + 1)
        return taken / spec.spec(context.rank).take(owners)

    def _divide_where_mixed(self, lineage: Lineage, outputs: Sequence[Tensor], region: str) -> None:
        """Let each rank contribute its share of what comes from uses on whole values (a norm of all parameters beside a
        sequence region) to gradients that will be summed over the tensor ranks."""
        mixed = {
            i for i, regions in lineage.regions.items()
            if "whole" in regions and i not in self._parallel.sharded and i not in self._full
            and (len(regions) > 1 or i in self._partial)
        }  # fmt: skip
        if not mixed:
            return
        uses = trace_regions(outputs, edges=True, region=region).edges
        for parameter_id in mixed:
            for (node, position), regions in uses[parameter_id].items():
                if len(regions) > 1:
                    raise RuntimeError(_mixed(self._name_of(parameter_id), regions))
                divided = node.metadata.setdefault("divided", set())
                if regions == {"whole"} and position not in divided:  # a graph may be walked again, by another backward
                    divided.add(position)
                    node.register_hook(partial(_share_of, position, self._parallel.context.size))

    def trace_nested(self, outputs: Sequence[Tensor]) -> None:
        """`trace` for a backward inside of a backward: for the graph that an autograd function makes there, since it
        kept nothing of what its forward computed (reversible layers, activation checkpoints of unknown kinds).

        Raises:
            RuntimeError: as `trace` does; also where inputs of that graph live in another region than its outputs, so
                that the gradient which the function asks for is a part.
        """
        if not self._parallel.has_regions:
            return
        region, known = region_of(current_backward_node()), {id(p) for p in self._parallel.names.values()}
        found = trace_regions(outputs, region=region)
        for parameter_id, regions in found.regions.items():
            if parameter_id not in known and regions != {region}:
                raise RuntimeError(_nested(region, regions))
        self.trace(outputs, (x for i, x in found.leaves.items() if i not in known), region)

    def _name_of(self, leaf_id: int) -> str:
        known = any(id(p) == leaf_id for p in self._parallel.names.values())
        return self._parallel.name_of(leaf_id) if known else "what an earlier pipeline stage made"

    def _complete_where_mixed(self, lineage: Lineage, received: Mapping[int, Tensor]) -> None:
        """Parameters that a step may use on tokens and on whole values: where one does both, each use on tokens
        completes its gradient; where it does not, they are summed with the others' at the end. With zero > 0 each use
        always does.

        Communication: one all-reduce of a gradient that earlier backwards since the last step left partial. (Not in
        pipelines, where microbatches' graphs are walked before those backwards are over: there it is an error.)
        """
        context = self._parallel.context
        for parameter_id in [i for i in self._partial if i in context.kept_whole]:  # in the order of the graph
            if "whole" in lineage.regions.get(parameter_id, ()) and not context.pipelined:
                gradient = self._parallel.held(self._partial.pop(parameter_id)).grad
                if gradient is not None:
                    gradient.copy_(all_reduce(gradient, context.group))
                self._full.add(parameter_id)
        for parameter_id, nodes in lineage.uses.items():
            if parameter_id in received:
                for node in nodes:
                    node.completes = True
                continue
            whole = parameter_id in self._full or "whole" in lineage.regions.get(parameter_id, ())
            at_use = whole or self._parallel.sharding is not None
            for node in nodes:
                node.completes = at_use
            if at_use:
                self._full.add(parameter_id)
            else:
                self._partial[parameter_id] = lineage.leaves[parameter_id]

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Any],
        create_graph: bool,
        engine: Engine,
    ) -> Sequence[Tensor | None]:
        """`torch.autograd.grad` in a step: the gradients of parameters are those of one device.

        Args:
            outputs: of which, where values are whole.
            inputs: with respect to what; split and divided parameters as the step sees them.
            create_graph: whether the gradients will be differentiated.
            engine: torch's, on inputs.

        Raises:
            RuntimeError: gradients of which ranks have parts have no graph that is whole.

        Communication: an all-gather or all-reduce for each parameter of which tensor ranks have a part of the gradient.
        """
        self.differentiable |= create_graph
        own = tuple(map(self._parallel.leaf, inputs))
        if not self._parallel.has_regions:
            return engine(own)
        for x in inputs:
            if isinstance(x, WholeParameter):
                check_undivided(x, "grad")
        known = {id(p) for p in self._parallel.names.values()} | self._parallel.divided.keys()
        used = trace_regions(outputs).regions if any(id(x) in known for x in own) else {}
        regions = [used.get(id(x), set()) if id(x) in known else set() for x in own]
        for x, at in zip(own, regions, strict=True):
            if at - {"whole"} and (create_graph or "whole" in at):
                name = self._parallel.name_of(id(x))
                raise RuntimeError(_differentiated(name) if create_graph else _mixed(name, at))
        found = zip(own, regions, engine(own), strict=True)
        return tuple(self._complete(x, gradient) if at - {"whole"} else gradient for x, at, gradient in found)

    def _complete(self, parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            return None
        group, spec = self._parallel.context.group, self._parallel.spec(parameter)
        if spec is not None and not spec.shared:
            return gather_shards(gradient, spec, group)
        if spec is not None:
            gradient, part = gradient.new_zeros(spec.shape), gradient
            spec.spec(self._parallel.context.rank).put(gradient, part)
        return all_reduce(gradient, group)

    def waiting(self) -> set[int]:
        """id of what this rank trains of the parameters whose gradients `sum` changes, at tp > 1."""
        shared = (parameter for parameter, _ in self._owned_by_several())
        return {id(x) for x in (*map(self._parallel.held, self._partial.values()), *shared)}

    def forget(self) -> None:
        """Gradients are complete: the next backward starts a new account of what is partial."""
        self._partial.clear()
        self._full.clear()

    def sum(self) -> None:
        """Sum over the tensor ranks the gradients of whole parameters that each rank used on other features or tokens,
        and of elements that several ranks own.

        Communication: one coalesced all-reduce per dtype, 2 (t - 1) / t of these parameters' elements; none if there
        are no such parameters.
        """
        pieces: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        place = {id(p): i for i, p in enumerate(self._parallel.names.values())} if self._partial else {}
        partial = sorted(self._partial, key=lambda i: place.get(i, len(place)))  # the graph may have another order
        for parameter in (self._parallel.held(self._partial[i]) for i in partial):
            if parameter.grad is not None:
                pieces.setdefault(parameter.grad.dtype, []).append((parameter, parameter.grad))
        for parameter, spec in self._owned_by_several():
            if parameter.grad is not None:
                grad = self._parallel.of_tensor_rank(parameter, parameter.grad)
                full = grad.new_zeros(spec.shape)
                spec.spec(self._parallel.context.rank).put(full, grad)
                pieces.setdefault(full.dtype, []).append((parameter, full))
        for parts in pieces.values():
            flat = torch.cat([self._parallel.to_send(grad).reshape(-1) for _, grad in parts])
            dist.all_reduce(flat, group=self._parallel.context.group)
            for (parameter, grad), total in zip(parts, flat.split([grad.numel() for _, grad in parts]), strict=True):
                shared = self._parallel.sharded.get(id(parameter))
                total = total.view(grad.shape)
                if shared is not None and shared.shared:
                    total = shared.spec(self._parallel.context.rank).take(total)
                    divided = self._parallel.divided.get(id(parameter))
                    total = total if divided is None else divided.take(total)
                parameter.grad = total.to(parameter.device)

    def _owned_by_several(self) -> list[tuple[Tensor, ShardedTensorSpec]]:
        """The plain tensors of which several tensor ranks hold the same elements; each once."""
        found = {parameter_id: spec for parameter_id, spec in self._parallel.sharded.items() if spec.shared}
        held = dict.fromkeys(self._parallel.names.values()) if found else {}
        return [(self._parallel.held(p), found[id(p)]) for p in held if id(p) in found]


def _escaped(name: str) -> str:
    return (
        f"MegaTPStrategy: the split output of `{name.rpartition('.')[0]}` reaches the loss without passing a `row`"
        " layer (or a gathering one), so every rank would train on its own part of the features. Give that layer"
        " the style `column_gather`, or add to the plan the `row` layer that consumes it."
    )


def _mixed(name: str, regions: set[str]) -> str:
    return (
        f"MegaTPStrategy: `{name}` is used both where values are whole and inside a tensor-parallel region"
        f" ({', '.join(sorted(regions))}); its gradient would be summed wrongly over the tensor ranks. A value"
        " enters such a region only through its `column` layers: take the region's layers out of the plan, or"
        f" compute what depends on `{name}` outside of it."
    )


def _differentiated(name: str) -> str:
    return (
        f"MegaTPStrategy: the step differentiates with respect to `{name}`, with create_graph=True, and each tensor"
        " rank has a part of that gradient, which can't be differentiated again. Leave the layers that use it out of"
        " the plan, or, if it is not split itself, use sequence_parallel=False."
    )


def _nested(region: str, regions: set[str]) -> str:
    return (
        "MegaTPStrategy: an autograd function of the step runs modules again in its backward, and there asks for the"
        f" gradient of a tensor that is used inside a tensor-parallel region ({', '.join(sorted(regions))}; the result:"
        f" {region}), of which each tensor rank has a part. Let the function run whole blocks, or leave their layers"
        " out of the plan."
    )


def _side_door(lineage: Lineage) -> str:
    found, used = sorted(lineage.crossings)[0]
    return (
        f"MegaTPStrategy: a {found} value is used where values are {used}: something passes into or out of a"
        " tensor-parallel region beside its `column` and `row` layers (a gate, a bias computed from the input),"
        " and gradients would be wrong. Leave the layers of that region out of the plan, or give the layer whose"
        " output escapes the style `column_gather`."
    )


def _share_of(position: int, ways: int, gradients: Sequence[Tensor | None], _: object) -> tuple[Tensor | None, ...]:
    """A hook of a node of the autograd graph: one of the gradients that it computes, divided."""
    return tuple(g / ways if i == position and g is not None else g for i, g in enumerate(gradients))


_HIDDEN = (
    "MegaTPStrategy: the step uses a `CheckpointFunction` of an unknown kind, which builds its graph during backward,"
    " so it can't be known which gradients are partial. Use torch.utils.checkpoint.checkpoint in its place."
)
