"""What steps left on a module, packed for other stages and given to them for a while."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.pipeline.told.left import given, packed


def test_what_was_left_is_there_for_a_while() -> None:
    graph = torch.ones(3, requires_grad=True) * 2
    left: dict[str, Any] = {
        "outputs": [graph, (torch.arange(4)[1:3], np.arange(2), "text")],
        "by_name": OrderedDict(a=deque([1.5, torch.zeros(2)]), b={3}),
        "new": None,
    }
    module, before = nn.Linear(2, 2), [0]
    vars(module).update(left)
    sent = packed(module, [(name,) for name in left])
    assert sent is not None
    for name in left:
        delattr(module, name)
    module.outputs = before  # type: ignore[assignment]
    with given(module, sent, torch.device("cpu")):
        first, (rows, array, text) = module.outputs
        assert torch.equal(first, graph.detach()) and not first.requires_grad
        assert torch.equal(rows, torch.tensor([1, 2])) and rows.untyped_storage().nbytes() == rows.nbytes
        assert array.tolist() == [0, 1] and text == "text"
        assert isinstance(module.by_name["a"], deque) and module.by_name["b"] == {3} and module.new is None
        module.outputs.clear()
    assert module.outputs is before and before == [0] and not hasattr(module, "by_name") and not hasattr(module, "new")


class Thing:
    """One of the user's own objects."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_what_was_left_on_an_object_is_there_for_a_while() -> None:
    module = nn.Linear(2, 2)
    thing = Thing(inner=Thing(kept=[torch.ones(2)], other=1))
    module.thing = thing  # type: ignore[assignment]
    path = ("thing", "inner", "kept")
    sent = packed(module, [path])
    assert sent is not None and packed(module, [path, ("thing", "gone")]) is None
    thing.inner.kept = before = []
    with given(module, sent, torch.device("cpu")):
        assert torch.equal(thing.inner.kept[0], torch.ones(2)) and thing.inner.other == 1
    assert thing.inner.kept is before


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        [Thing()],
        {"a": (Thing(),)},
        nn.Parameter(torch.ones(1)),
        np.array([lambda: None]),
        torch.empty(2**26 + 1),
    ],
    ids=["object", "in a list", "in a dict", "parameter", "array of functions", "large"],
)
def test_what_can_not_be_sent(value: Any) -> None:
    module = nn.Linear(2, 2)
    module.__dict__ |= {"value": value, "other": Tensor([1.0])}
    assert packed(module, [("other",)]) is not None and packed(module, [("value",), ("other",)]) is None
