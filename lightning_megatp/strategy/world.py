"""The ranks of MegaTPStrategy: how they meet, what they do together, and how they part."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_megatp.failure import FailureWatch, ParentWatch
from lightning_megatp.failure.ending import saying_after
from lightning_megatp.mesh import AXES, MeshShape
from lightning_megatp.shim.lightning import default_store
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.strategy.copies import CopyMethods
from lightning_megatp.tensor.collectives import all_gather, reduce_scatter

_PATIENCE_S = 10.0  # until somebody is told which nodes are missing


@dataclass(frozen=True)
class _OnDevice:
    """A tensor on its way from a device to another rank's: a pickled one would arrive on the sender's."""

    value: Tensor

    @classmethod
    def of(cls, x: Any) -> Any:
        return cls(x.detach().cpu()) if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta") else x


class _Stack(torch.autograd.Function):
    """A tensor stacked over a group; its gradient is the sum of what all ranks have for it. (torch's own takes ranks of
    a gloo group for global ones in backward.) No OwnFunction: it gathers shards of the step first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x.unsqueeze(0), group, 0, [1] * group.size())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group, 0, [1] * ctx.group.size()).squeeze(0), None


class WorldMethods(CopyMethods):
    """What Lightning calls on all ranks at once."""

    timeout: timedelta
    process_group_backend: str | None
    num_nodes: int
    _failure_watch: FailureWatch | None
    _interrupted: Callable[[], bool]
    _apart: Callable[[], bool]

    def _join_world(self, shape: MeshShape) -> None:
        """Create the default process group, unless somebody has, and start to watch the other ranks."""
        environment = self.cluster_environment
        assert environment is not None
        name = shape.describe(self.global_rank)
        parent = ParentWatch(name)
        if not dist.is_initialized():
            parent.start()
            os.environ["MASTER_ADDR"] = environment.main_address
            os.environ["MASTER_PORT"] = str(environment.main_port)
            device = self.root_device
            backend = self.process_group_backend or dist.get_default_backend_for_device(device)
            bound = "nccl" in backend.lower()  # of gloo's groups torch would then ask for what NCCL's alone can do
            with self._saying_whom_it_waits_for():
                dist.init_process_group(
                    backend,
                    rank=self.global_rank,
                    world_size=self.world_size,
                    timeout=self.timeout,
                    device_id=device if bound else None,
                )
            atexit.register(self._leave_world)
        launcher = self._launcher
        describe = getattr(launcher, "describe_exit", lambda pid: None)
        self._failure_watch = FailureWatch(
            self.global_rank, self.world_size, default_store(), name, describe_exit=describe
        )
        self._failure_watch.start()
        parent.stop()
        if launcher is not None:
            launcher.failure_watch = self._failure_watch  # type: ignore[attr-defined]

    def _saying_whom_it_waits_for(self) -> contextlib.AbstractContextManager[None]:
        """Around the ranks' first meeting, which lasts until the last node's script has been started."""
        environment = self.cluster_environment
        assert environment is not None
        if self.num_nodes == 1 or self.process_local_rank != 0:
            return contextlib.nullcontext()
        place = f"{environment.main_address}:{environment.main_port}"
        if self.global_rank != 0:
            text = f"this node waits for rank 0 at {place}. Is that node's script running, and the port reachable?"
        else:
            local = environment.main_address in ("127.0.0.1", "localhost")
            text = (
                f"waiting at {place} for {self.num_nodes} nodes, {self.world_size} ranks in all. Unless a launcher"
                " does, start the script on each of the other nodes, with the environment variables"
                f" MASTER_ADDR={socket.gethostname() if local else environment.main_address}"
                f" MASTER_PORT={environment.main_port} NODE_RANK=1 (2, ...)."
            )
        return saying_after(_PATIENCE_S, f"MegaTPStrategy: {text}")

    def _leave_world(self) -> None:
        """At exit: meet the other ranks once more, since gloo may abort where one leaves early (torch 2.13)."""
        if not dist.is_initialized() or self._interrupted():
            return
        failed = getattr(sys, "last_value", None) is not None  # its peers may wait for it elsewhere, and it must go
        if self.mesh is not None and self.world_size > 1 and not failed:
            # a rank that is gone must not spoil the others' exit, nor a world that somebody has made anew
            with contextlib.suppress(RuntimeError, ValueError):
                hosts = self.mesh.hosts(*AXES)
                if dist.get_backend(hosts) == "gloo":
                    dist.barrier(hosts)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    # ---------------------------------------------------------------- all ranks together

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and not self._interrupted():
            devices = [self.root_device.index] if dist.get_backend() == "nccl" else None
            axes = self._all_who_call("strategy.barrier")
            dist.barrier(None if self.mesh is None else self.mesh.group(*axes), device_ids=devices)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Between the hosts: Lightning's Timer asks after every batch. A device's tensors arrive on the receiver's."""
        if not dist.is_initialized() or self._apart():
            return obj
        axes = self._all_who_call("strategy.broadcast")
        objects = [tree_map(_OnDevice.of, obj)]
        dist.broadcast_object_list(objects, src=src, group=None if self.mesh is None else self.mesh.hosts(*axes))
        if self.process_rank == src:
            return obj
        return tree_map(lambda x: x.value.to(self.root_device) if isinstance(x, _OnDevice) else x, objects[0])

    def _all_who_call(self, what: str) -> tuple[str, ...]:
        """AXES, of the world; in a hook that runs on the last pipeline stage only, of its ranks, with global rank 0.

        Raises:
            RuntimeError: within a step, whose stages are at different points of it.
        """
        if self.pipeline is None or not self.pipeline.metrics.are_apart:
            return AXES
        if not self.pipeline.metrics.in_hook:
            raise RuntimeError(
                f"MegaTPStrategy: `{what}` waits for all ranks, and with pp={self.pp} a step reaches it on some stages"
                " only. Call it in a hook, such as `on_train_batch_start`."
            )
        return "dp", "tp"

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor over the data-parallel ranks; at dp = 1 it comes back as it is, as on one device.

        `LightningModule.all_gather` passes the world where its caller named no group, so the world means dp here: the
        ranks of a tensor group hold the same value.
        """
        if group is None or group is dist.group.WORLD:
            group = self._mesh().group("dp")
        if group.size() == 1:
            return tensor
        return _Stack.apply(tensor, group) if sync_grads else super().all_gather(tensor, group=group)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks, by default to the mean; tensor ranks hold the same value already."""
        if not isinstance(tensor, Tensor) or self.mesh is None:
            return tensor
        group = group or self.mesh.group("dp")
        if group.size() == 1:
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = (
            reduce_op
            if not isinstance(reduce_op, str)
            else getattr(dist.ReduceOp, "SUM" if mean else reduce_op.upper())
        )
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, op=op, group=group)
        return total / group.size() if mean else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        votes = torch.tensor(int(decision), device="cpu")  # Lightning creates layers with its device as the default
        dist.all_reduce(votes, group=self._mesh().hosts(*AXES))
        return bool(votes == dist.get_world_size()) if all else bool(votes > 0)
