"""What Lightning calls: MegaTPStrategy, with a file for each group of its methods. It builds on all the rest, none of
which imports it."""

from lightning_megatp.strategy.strategy import MegaTPStrategyBase, strategy_class

__all__ = ["MegaTPStrategyBase", "strategy_class"]
