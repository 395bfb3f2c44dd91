"""Megatron's tensor, sequence, pipeline and data parallelism for an unmodified LightningModule."""

# First: what is imported before decides whether typing has `int` or `float` first in the Trainer's signature, and so
# what the CLI of Lightning 2.5 makes of a `val_check_interval` of 200.
import lightning.pytorch  # noqa: F401

from lightning_megatp.mesh import MeshShape, ParallelMesh
from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.strategy import strategy_class
from lightning_megatp.tensor.cross_entropy import vocab_parallel_cross_entropy

MegaTPStrategy = strategy_class("lightning.pytorch", __name__)

__version__ = "0.1.0"
__all__ = [
    "MegaTPStrategy",
    "MeshShape",
    "ParallelMesh",
    "ParallelismPlugin",
    "ShardSpec",
    "vocab_parallel_cross_entropy",
]
