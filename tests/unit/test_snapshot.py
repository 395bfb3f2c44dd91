"""What a dry run puts back on a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_megatp.snapshots.snapshot import Snapshot


def _module() -> Any:
    module: Any = nn.Linear(2, 2)
    module.kinds = {7}
    module.kinds.add(15)  # takes a place before the other one's, which is its own, too
    assert list(module.kinds) == [15, 7]
    return module


def test_sets_keep_the_order_in_which_a_step_goes_through_them() -> None:
    """Blocks of several kinds share tables that are made kind by kind; a plan says which comes first."""
    module = _module()
    Snapshot(module).restore()
    assert list(module.kinds) == [15, 7]


def test_sets_are_put_back() -> None:
    module = _module()
    kinds, snapshot = module.kinds, Snapshot(module)
    module.kinds.add(3)
    module.kinds.remove(7)
    snapshot.restore()
    assert module.kinds is kinds and kinds == {7, 15}
