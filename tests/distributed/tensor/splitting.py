"""Splitting a plain module over the ranks of a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_megatp import MeshShape, ParallelismPlugin, ParallelMesh
from lightning_megatp.module import ParallelModule


def parallelize(module: nn.Module, plan: dict[str, Any]) -> ParallelModule:
    """Split it in place over all ranks."""
    mesh = ParallelMesh(MeshShape(tp=dist.get_world_size()))
    return ParallelismPlugin(plan).parallelize(module, mesh, torch.device("cpu"))
