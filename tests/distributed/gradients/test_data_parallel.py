"""Data-parallel gradients: sent while backward runs, on stepping batches only, whatever has no gradient."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.distributed.training import DP2, PLAIN, TP2_DP2, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.ranks import RankError


class Traced(GPT):
    """Counts collectives, and profiles the last batch, from the start of its backward to the optimizer step."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False, layers=4))
        self.batches: list[dict[str, int]] = []
        self.events: list[tuple[str, float, float]] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.counter = CollectiveCounter()
        self.profile = torch.profiler.profile()
        self.profile.__enter__()
        self.counter.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counter.__exit__(None, None, None)
        self.profile.__exit__(None, None, None)
        self.batches.append(dict(self.counter.calls))
        self.events = [(e.name, e.time_range.start, e.time_range.end) for e in self.profile.events()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.counter.calls["step"] += 1


def _trace(
    layout: Layout, bucket_mb: float, accumulate: int
) -> tuple[list[dict[str, int]], list[tuple[str, float, float]]]:
    torch.manual_seed(0)
    module = Traced()
    strategy = {"bucket_mb": bucket_mb, "plan": {}}
    trainer = make_trainer(layout, strategy=strategy, accumulate_grad_batches=accumulate)
    trainer.fit(module, train_loader(layout, 4))
    return module.batches, module.events


def test_the_first_bucket_starts_before_backward_ends() -> None:
    for batches, events in run_program(DP2, _trace, 0.01, 1):
        assert batches[-1]["all-reduce"] > 2
        first = min(start for name, start, _ in events if name.startswith("c10d::allreduce"))
        last = max(start for name, start, _ in events if name.startswith("autograd::engine::evaluate_function"))
        assert first < last, "a node of backward starts after the first all-reduce"


def test_without_overlap_everything_starts_after_backward() -> None:
    for _, events in run_program(DP2, _trace, 0, 1):
        first = min(start for name, start, _ in events if name.startswith("c10d::allreduce"))
        last = max(start for name, start, _ in events if name.startswith("autograd::engine::evaluate_function"))
        assert first > last


def test_accumulating_batches_send_nothing() -> None:
    for batches, _ in run_program(DP2, _trace, 0.01, 2):
        for accumulating, stepping in zip(batches[::2], batches[1::2], strict=True):
            assert accumulating == {}
            assert stepping["all-reduce"] > 2 and stepping["step"] == 1


class Conditional(GPT):
    """Uses one layer on some data-parallel ranks only, and another on none."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))
        self.sometimes, self.never = nn.Linear(16, 16), nn.Linear(16, 16)
        self.seen: dict[str, Tensor | None] = {}
        self.kept: list[tuple[Tensor, Tensor]] = []

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = super().trunk(tokens_BL)
        last = dist.get_rank() == dist.get_world_size() - 1 if dist.is_initialized() else True
        return (
            x_BLD + self.sometimes(x_BLD) if last or (self.trainer.world_size > 2 and dist.get_rank() == 2) else x_BLD
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = {name: p.grad for name, p in self.named_parameters()}
        self.kept += [(grad, grad.clone()) for grad in self.seen.values() if grad is not None]


def _conditional(layout: Layout, bucket_mb: float) -> tuple[list[Tensor], bool, list[Tensor]]:
    with mock.patch("lightning_megatp.gradients.buckets._LARGE", 0):  # as those of large models
        kept = _fit_conditional(layout, bucket_mb)
    new = _fit_conditional(layout, bucket_mb)
    assert all(torch.equal(a, b) for a, b in zip(kept[2], new[2], strict=True))
    return kept


def _fit_conditional(layout: Layout, bucket_mb: float) -> tuple[list[Tensor], bool, list[Tensor]]:
    torch.manual_seed(0)
    module = Conditional()
    plan = {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
    trainer = make_trainer(layout, strategy={"bucket_mb": bucket_mb, "plan": plan})
    trainer.fit(module, train_loader(layout, 3))
    assert all(torch.equal(grad, then) for grad, then in module.kept), "a later batch has written into it"
    grads = [module.seen["sometimes.weight"], module.seen["head.weight"]]
    assert all(grad is not None for grad in grads)
    return grads, module.seen["never.weight"] is None, [p.detach() for p in module.parameters()]  # type: ignore[return-value]


@pytest.mark.parametrize("bucket_mb", [25.0, 0.0005])
@pytest.mark.parametrize("layout", [DP2, TP2_DP2], ids=str)
def test_a_parameter_without_gradient_on_one_rank_counts_as_zero_there(layout: Layout, bucket_mb: float) -> None:
    by_rank = run_program(layout, _conditional, bucket_mb)
    for grads, never, parameters in by_rank:
        assert never, "what no rank uses has no gradient, so the optimizer leaves it alone"
        for mine, theirs in zip(grads, by_rank[0][0], strict=True):
            torch.testing.assert_close(mine, theirs)
        if layout.tp == 1:
            assert all(torch.equal(a, b) for a, b in zip(parameters, by_rank[0][2], strict=True))


class Frozen(Callback):
    """Freezes everything but the head, and unfreezes after the first epoch, as fine-tuning does."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.blocks.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.blocks.requires_grad_(True)


def _frozen(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = GPT(GPTConfig(tied=False))
    trainer = make_trainer(layout, callbacks=[Frozen()], max_epochs=3)
    trainer.fit(module, train_loader(layout, 3))
    state = trainer.strategy.lightning_module_state_dict()
    return [float(value.double().sum()) for value in state.values()]


@pytest.mark.parametrize("layout", [DP2, Layout(tp=2), TP2_DP2], ids=str)
def test_layers_that_are_unfrozen_later(layout: Layout) -> None:
    expected = run_program(PLAIN, _frozen)[0]
    assert run_program(layout, _frozen)[0] == pytest.approx(expected, abs=1e-9)


class Changing(Callback):
    """Freezes blocks between two accumulated batches, and later exchanges a layer, in the optimizer too."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.blocks.requires_grad_(False)
        if batch_idx == 2:
            pl_module.blocks.requires_grad_(True)
            torch.manual_seed(3)
            new = nn.Linear(pl_module.head.in_features, pl_module.head.out_features, bias=False)
            new.to(dtype=pl_module.head.weight.dtype)
            group = trainer.optimizers[0].param_groups[0]
            group["params"] = [new.weight if p is pl_module.head.weight else p for p in group["params"]]
            pl_module.head = new


def _changing(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = GPT(GPTConfig(tied=False))
    trainer = make_trainer(layout, callbacks=[Changing()], strategy={"plan": {}}, accumulate_grad_batches=2)
    trainer.fit(module, train_loader(layout, 6))
    return [float(value.double().sum()) for value in module.state_dict().values()]


def test_parameters_that_change_within_an_epoch() -> None:
    expected = run_program(PLAIN, _changing)[0]
    for found in run_program(DP2, _changing):
        assert found == pytest.approx(expected, abs=1e-9)


def test_freezing_between_accumulated_batches_is_refused_with_zero() -> None:
    with pytest.raises(RankError, match="was frozen between two accumulated batches"):
        run_program(Layout(dp=2, zero=1), _changing)


class KeepsGradients(GPT):
    """Clears gradients every other step only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if (batch_idx // self.trainer.accumulate_grad_batches) % 2 == 0:
            optimizer.zero_grad()


def _kept(layout: Layout, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module, trainer = KeepsGradients(GPTConfig()), make_trainer(layout, "tied", accumulate_grad_batches=accumulate)
    trainer.fit(module, train_loader(layout, 8))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [
        (Layout(tp=2), 1),
        (Layout(pp=2), 2),
        (Layout(tp=2, pp=2), 1),
        (Layout(pp=2, dp=2, zero=1, microbatches=2), 1),
        *(
            pytest.param(layout, accumulate, marks=pytest.mark.extended)
            for layout, accumulate in (
                (DP2, 1),
                (TP2_DP2, 2),
                (Layout(pp=2), 1),
                (Layout(tp=2, dp=2, zero=1), 2),
                (Layout(pp=2, dp=2, microbatches=2), 1),
                (Layout(pp=2, dp=2, zero=1, microbatches=2), 2),
            )
        ),
    ],
    ids=str,
)
def test_gradients_that_were_kept_are_summed_over_ranks_once(layout: Layout, accumulate: int) -> None:
    expected, found = (run_program(where, _kept, accumulate)[0] for where in (PLAIN, layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class TakesTurns(GPT):
    """The blocks' optimizer steps every other batch, and once without having been told to synchronise; the head's
    steps in every batch, and clears its gradients late."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        blocks, head = self.optimizers()
        last = batch_idx % 2 == 1
        head.zero_grad()
        self.manual_backward(self.loss(batch), inputs=[self.head.weight])
        with blocks.toggle_model(sync_grad=last and batch_idx < 4):
            self.manual_backward(self.loss(batch))
        head.step()
        if last:
            blocks.step()
            blocks.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.blocks, self.head)]


def _in_turns(layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module, trainer = TakesTurns(), make_trainer(layout)
    trainer.fit(module, train_loader(layout, 6))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


@pytest.mark.parametrize("layout", [Layout(tp=2), DP2, pytest.param(TP2_DP2, marks=pytest.mark.extended)], ids=str)
def test_optimizers_that_accumulate_unlike_each_other(layout: Layout) -> None:
    expected, found = (run_program(where, _in_turns)[0] for where in (PLAIN, layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class KeepsGraphs(LightningModule):
    """Backwards whose gradients have a graph themselves, of a bucket that keeps its memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 400))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean(), create_graph=True)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _with_graphs(layout: Layout) -> list[Tensor]:
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module, size = KeepsGraphs(), 4 // layout.dp
    rows = x.view(-1, layout.dp, size, 8)[:, dist.get_rank() if layout.dp > 1 else 0].flatten(0, 1)
    trainer = make_trainer(layout, strategy={"plan": None}, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=size))
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_gradients_that_have_a_graph() -> None:
    (expected,) = run_program(PLAIN, _with_graphs)
    for found in run_program(DP2, _with_graphs):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
