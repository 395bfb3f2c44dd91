"""What users ask a running strategy for: counts, bytes, and the whole of what ranks hold parts of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_megatp.mesh import AXES
from lightning_megatp.planner.live import predict_run
from lightning_megatp.planner.measure import MemoryAccount, measure
from lightning_megatp.planner.report import MemoryReport, RankMemory
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.strategy.state import StrategyState
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.parameters import whole_values


class InspectionMethods(StrategyState):
    """Answers about the whole model; for `full_gradients`, `whole_parameters` and `memory_report` all ranks ask."""

    _memory_account: MemoryAccount | None
    """An account of what is kept for backward, with `MegaTPStrategy(memory=True)`."""

    def parameter_counts(self) -> tuple[int, int]:
        """Parameters of the whole model, and of this rank; tied ones once."""
        parallel = self._parallel()
        return parallel.whole_parameters, sum(held.numel() for _, held in parallel.named_held())

    def memory_report(self) -> MemoryReport:
        """What every rank holds, predicted and measured, in bytes; after a training batch. Every rank calls it.

        Activations, and what is predicted, are known with `MegaTPStrategy(memory=True)`.

        Communication: one object all-gather over the world.
        """
        mesh, parallel = self._mesh(), self._parallel()
        measured = measure(parallel, self.optimizers, self._memory_account)
        predicted, problem = predict_run(self, parallel, mesh, self._memory_account)
        peak = torch.cuda.max_memory_allocated(self.root_device) if self.root_device.type == "cuda" else None
        own = RankMemory(self.global_rank, mesh.stage, measured, predicted, peak), problem
        by_rank = mesh.exchange(own, *AXES)
        return MemoryReport(tuple(rank for rank, _ in by_rank), problem)

    def full_gradients(self) -> dict[str, Tensor]:
        """The gradients of the whole model under canonical names, on every rank; for looking at them. With a pipeline
        they are on the CPU.

        Raises:
            RuntimeError: inside of a step at pp > 1, which stages leave before its end.

        Communication: one all-gather over tp per sharded parameter, one over dp per divided one, and an object gather
        over pp, between the hosts.
        """
        parallel = self._parallel()
        if parallel.context.user_code and self.pipeline is not None:
            raise RuntimeError(
                "MegaTPStrategy: `full_gradients` can't be used inside of a step with pp > 1, where stages are at other"
                " places: use it in `on_after_backward` or `on_before_optimizer_step`, on all ranks."
            )
        gradients = {}
        with parallel.context.running(user_code=False), DisableTorchFunction():  # what hooks make of parts is watched
            for name, parameter in parallel.named_held():
                if parameter.grad is not None:
                    grad = parallel.whole_value(parameter, parameter.grad)
                    gradients[name] = grad.clone() if parallel.spec(parameter) is None else grad
        if self.pipeline is None:
            return gradients
        by_stage: list[dict[str, Tensor]] = self._mesh().exchange(gradients, "pp")
        merged = {name: grad for stage in by_stage for name, grad in stage.items()}
        return {name: merged[name] for name in parallel.order if name in merged}

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Meanwhile the parameters that tensor ranks divide have the values and shapes of one device, and may be
        changed: for hooks that project weights, prune them or draw them anew. All tensor ranks have to do the same,
        and call no layers of theirs meanwhile. Of a pipeline they are those of this rank's stages.

        Raises:
            RuntimeError: inside of a step; with zero > 0, where other ranks have rows of them; meanwhile, where a layer
                is called that the plan has split.

        Communication: one all-gather over tp for each.
        """
        parallel = self._parallel()
        if parallel.context.user_code or parallel.divided:
            where = "inside of a step" if parallel.context.user_code else "with zero > 0"
            raise RuntimeError(f"MegaTPStrategy: `whole_parameters` can't be used {where}: use it in hooks, at zero=0.")
        split = {id(p): (p, spec) for p in parallel.names.values() if (spec := parallel.spec(p)) is not None}
        whole = whole_values(list(split.values()), parallel.context.group)
        with parallel.parts_expected(), DisableTorchFunction(), whole, _without_layers(parallel.module):
            yield


@contextlib.contextmanager
def _without_layers(module: nn.Module) -> Iterator[None]:
    """Meanwhile a split layer that is called raises an error: it would take whole weights for this rank's part."""

    def refuse(called: nn.Module, args: Any) -> None:
        if isinstance(called, ParallelLayer):
            name = next((name for name, child in module.named_modules() if child is called), type(called).__name__)
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` is called inside of `whole_parameters()`. The plan has split it, and it"
                " would take whole weights for this rank's part of them. Call modules outside: there they compute what"
                " they do on one device."
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
