"""MegaTPStrategy for projects that import `pytorch_lightning` rather than `lightning.pytorch`."""

from lightning_megatp.strategy import strategy_class

MegaTPStrategy = strategy_class("pytorch_lightning", __name__)

__all__ = ["MegaTPStrategy"]
