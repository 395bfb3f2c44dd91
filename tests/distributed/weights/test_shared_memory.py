"""Two parameters that share memory are tied on one device; parts of them are not, which is said."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.distributed.training import DP2, PP2, TP2, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig


def _told(layout: Layout) -> list[str]:
    torch.manual_seed(0)
    module = GPT(GPTConfig(tied=False))
    module.head.weight.data = module.tok.weight.data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": None}, precision="32-true", limit_train_batches=1)
        trainer.fit(module, train_loader(layout, 1))
    return [str(item.message) for item in caught if "share memory" in str(item.message)]


@pytest.mark.parametrize("layout", [TP2, PP2, Layout(dp=2, zero=3)], ids=str)
def test_what_is_tied_by_memory_alone_is_told(layout: Layout) -> None:
    first, *others = run_program(layout, _told)
    assert len(first) == 1 and "`tok.weight` and `head.weight` are two parameters that share memory" in first[0]
    assert not any(others)


def test_whole_copies_stay_tied() -> None:
    assert not any(run_program(DP2, _told))
