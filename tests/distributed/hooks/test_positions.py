"""Rows and columns by their numbers, in hooks, are those of one device, or refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, make_trainer, run_program
from tests.ranks import RankError

PLAN = {"tok": "vocab", "up": "column", "down": "row"}
WORDS, WIDTH = 14, 8
MASK = torch.arange(WORDS) < 10


def _set(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


PUTS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: _set(x, slice(0, 5), 0.0),
    "from the end": lambda x: _set(x, slice(-3, None), 0.5),
    "steps": lambda x: _set(x, slice(1, None, 3), 0.0),
    "one": lambda x: _set(x, 3, 0.0),
    "list": lambda x: _set(x, [0, 6], 0.0),
    "tensor": lambda x: _set(x, torch.tensor([1, 5]), torch.tensor(0.25, dtype=x.dtype)),
    "all but columns": lambda x: _set(x, (slice(None), slice(0, 3)), 0.0),
    "behind an ellipsis": lambda x: _set(x, (..., slice(0, 3)), 0.0),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([2, 7]), 0.0),
    "index_fill_ of columns": lambda x: x.index_fill_(1, torch.tensor([2, 7]), 0.0),
    "through data": lambda x: _set(x.data, slice(0, 5), 0.0),
    "all": lambda x: _set(x, slice(None), 0.125),
    "heads, by one number": lambda x: x.view(2, -1, 2).mul_(torch.tensor([[2.0]], dtype=x.dtype)),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda x: x[:5].zero_(),
    "a view, and back": lambda x: _set(x, slice(0, 5), x[:5] * 0),
    "narrow": lambda x: x.narrow(0, 0, 3).zero_(),
    "select": lambda x: x.select(0, 0).zero_(),
    "unbind": lambda x: x.unbind(0)[2].mul_(2),
    "split": lambda x: x.split(3)[0].zero_(),
    "values": lambda x: _set(x, slice(0, 5), torch.ones(5, x.shape[1], dtype=x.dtype)),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([0, 1]), torch.ones(2, x.shape[1], dtype=x.dtype)),
    "a list of rows": lambda x: [row.zero_() for row in list(x)[:6]],
    "flat": lambda x: x.view(-1)[:7].zero_(),
    "flat, set": lambda x: _set(x.view(-1), slice(0, 7), 0.0),
    "transposed": lambda x: _set(x.t(), (slice(None), 0), 0.0),
    "torch.nn.init": lambda x: nn.init.zeros_(x[:3]),
    "a block": lambda x: _set(x, (slice(0, 2), slice(0, 2)), 0.0),
    "numbers of heads": lambda x: x.view(2, -1, 2).mul_(torch.tensor([0.5, 2.0], dtype=x.dtype)[:, None, None]),
    "numbers of heads, and back": lambda x: x.copy_((x.reshape(2, -1, 2) * 2 * torch.ones(2, 1, 1)).reshape(x.shape)),
    "a mask of rows": lambda x: x.mul_(torch.ones(2 * len(x), 1, dtype=x.dtype)),
}
WHERE = ["gradient", "before the optimizer", "accumulated", "weight", "momentum"]


class Model(LightningModule):
    def __init__(self, where: str, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.where, self.change = where, change
        self.tok, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def weights(self) -> list[nn.Parameter]:
        return [self.tok.weight, self.up.weight, self.down.weight]

    def on_fit_start(self) -> None:
        for p in self.weights() if self.where == "accumulated" else ():
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tok(batch[:, :-1])
        x = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten())

    def on_gradient(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.change(parameter.grad)

    def on_after_backward(self) -> None:
        for parameter in self.weights() if self.where == "gradient" else ():
            self.on_gradient(parameter)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.weights() if self.where == "before the optimizer" else ():
            self.on_gradient(parameter)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.weights() if self.where == "weight" else ():
            self.change(parameter)
        optimizer: Any = self.optimizers()
        for parameter in self.weights() if self.where == "momentum" else ():
            self.change(optimizer.state[parameter]["momentum_buffer"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)


def _trained(layout: Layout, where: str, names: list[str]) -> list[dict[str, Tensor]]:
    """State dicts after each of some changes. Refused ones have the message in its place."""
    found = []
    for name in names:
        torch.manual_seed(0)
        module = Model(where, {**PUTS, **REFUSED}[name])
        batches = DataLoader(torch.randint(0, WORDS, (12, 6), generator=torch.Generator().manual_seed(1)), batch_size=4)
        trainer = make_trainer(
            layout, strategy=None if layout.plain else {"plan": PLAN if layout.tp > 1 else None}, max_epochs=1
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, batches)
        state = trainer.strategy.lightning_module_state_dict()
        found.append({key: value.clone() for key, value in state.items()})
    return found


@pytest.mark.parametrize("where", WHERE)
def test_values_are_put_where_they_belong(where: str) -> None:
    names = [name for name in PUTS if where != "accumulated" or not name.startswith(("index_fill_", "through"))]
    (whole,) = run_program(PLAIN, _trained, where, names)
    first, *_ = run_program(Layout(tp=2), _trained, where, names)  # the others are given no whole weights
    for name, state, expected in zip(names, first, whole, strict=True):
        for key, value in expected.items():
            assert torch.allclose(state[key], value, rtol=0, atol=1e-12), f"{name}: {key}"


@pytest.mark.parametrize(("where", "name"), [*itertools.product(WHERE[1::2], REFUSED), ("momentum", "a view")], ids=str)
def test_what_else_is_written_by_numbers_is_refused(where: str, name: str) -> None:
    with pytest.raises(RankError, match=r"MegaTPStrategy: .*of which each tensor rank holds a part"):
        run_program(Layout(tp=2), _trained, where, [name])


@pytest.mark.parametrize("where", ["gradient", "weight"])
@pytest.mark.parametrize("name", ["a view", "narrow", "select", "split"])
def test_changes_of_rows_that_data_parallel_ranks_hold_are_not_lost(where: str, name: str) -> None:
    with pytest.raises(RankError, match="the change would be lost"):
        run_program(Layout(dp=2, zero=3), _trained, where, [name])
