"""Metrics that synchronise over a group."""

import copy
import pickle

from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric

from lightning_megatp import metrics


def test_synchronised_metrics_can_be_pickled_and_copied() -> None:
    module = LightningModule()
    module.metric = MeanMetric()
    metrics.gather_metrics_over([module], object())  # type: ignore[arg-type]
    assert module.metric.dist_sync_fn is not None
    assert copy.deepcopy(module.metric).dist_sync_fn is module.metric.dist_sync_fn
    assert pickle.loads(pickle.dumps(module.metric)).dist_sync_fn is None
