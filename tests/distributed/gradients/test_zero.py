"""ZeRO keeps its word: bytes held per rank, bytes sent per step; and what it can't do is refused before training."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.fsdp import FSDPModule

from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.distributed.training import PLAIN, Layout, eval_loader, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.ranks import RankError

CONFIG = GPTConfig(tied=False, layers=4)


class Account(Callback):
    """Counts the collectives of the third batch, which no pipeline looks at, and what is held after it."""

    def __init__(self) -> None:
        self.counter = CollectiveCounter()
        self.held: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.counter.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.counter.__exit__(None, None, None)
            parallel = trainer.strategy.parallel
            states = trainer.optimizers[0].state.values()
            self.held = {
                "parameters": _bytes(parallel.module.parameters(), local=True),
                "gathered": _bytes(p.whole for p in set(parallel.divided.values())),
                "optimizer": _bytes(x for state in states for x in state.values() if x.dim()),
                "gradients": _bytes(p.grad for _, p in parallel.named_held() if p.grad is not None),
            }


def _bytes(tensors: Any, local: bool = False) -> int:
    """Of the memory behind some tensors."""
    plain = [x.to_local() if local and hasattr(x, "to_local") else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in plain}.values())


class Told(GPT):
    def loss_weight(self, batch: Any) -> int:
        return len(batch[0])


def _account(layout: Layout, zero: int, small_end: int = 2**20, told: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    account = Account()
    module = Told(CONFIG) if told else GPT(CONFIG)
    total = sum(p.numel() * 8 for p in module.parameters())
    trainer = make_trainer(layout, "untied", {"zero": zero}, callbacks=[account], limit_train_batches=3)
    with mock.patch("lightning_megatp.zero.units._SMALL_END", small_end):
        trainer.fit(module, train_loader(layout, 3))
    sharding = trainer.strategy.sharding
    units = sharding.units if sharding is not None else []
    parameters = sharding.parameters if sharding is not None else []
    together = int(any(p.together for p in parameters))
    once = sum(p.shape.numel() * 8 for p in parameters if p.together or p.name.startswith(f"{units[-1]}."))
    counted = {"calls": account.counter.calls, "bytes": account.counter.bytes}
    return {"total": total, **counted, **account.held, "units": units, "together": together, "once": once}


@pytest.mark.parametrize(("zero", "small_end"), [(0, 2**20), (1, 2**20), (2, 2**20), (3, 2**20), (3, 0)])
def test_bytes_of_a_step(zero: int, small_end: int) -> None:
    """Of P bytes of parameters: an all-reduce moves 2 (d - 1) / d P, and is counted as P here; a reduce-scatter and an
    all-gather of P move half of that each. Level 3 gathers twice what is not kept from forward to backward."""
    for found in run_program(Layout(dp=2), _account, zero, small_end):
        ends = {"tok", "head"} & {unit.rpartition(".")[2] for unit in found["units"]}
        assert bool(ends) == (small_end == 0), "embeddings and heads are units if they are large"
        P = found["total"]
        sent: Counter[str] = found["bytes"]
        slack = 0.03 * P  # flags, norms, the loss, and rows that fill up uneven parts
        if zero == 0:
            assert sent["all-reduce"] == pytest.approx(P, abs=slack) and sent["reduce-scatter"] == 0
            continue
        gathered = 2 * P - found["once"] if zero == 3 else P
        assert sent["reduce-scatter"] == pytest.approx(P, abs=slack)
        assert sent["all-gather"] == pytest.approx(gathered, abs=slack)
        assert sent["all-reduce"] < slack


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("zero", [1, 3])
def test_bytes_that_are_held(layout: Layout, zero: int) -> None:
    results = run_program(layout, _account, zero)
    P = results[0]["total"]
    for found in results:
        share = P / layout.tp / layout.dp
        norms = 0.05 * P if layout.tp > 1 else 0.02 * P  # whole on every tensor rank, and uneven rows
        assert found["parameters"] == pytest.approx(share, abs=norms)
        assert found["optimizer"] == pytest.approx(2 * found["parameters"], rel=0.02), "AdamW's two moments"
        assert found["gathered"] == 0, "between steps nothing is gathered"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_in_a_pipeline_are_counted(zero: int, told: bool) -> None:
    """At level 3 every microbatch gathers each unit for its forward and for its backward; else each once a batch. At
    levels 2 and 3 units are reduced after each, if it is known before what microbatches weigh."""
    layout = Layout(pp=2, dp=2, microbatches=2)
    for found in run_program(layout, _account, zero, 2**20, told):
        per_unit, together = 2 * layout.microbatches if zero == 3 else 1, found["together"]
        assert found["calls"]["all-gather"] == len(found["units"]) * per_unit + together, found["calls"]
        reductions = layout.microbatches if told and zero > 1 else 1
        assert found["calls"]["reduce-scatter"] == len(found["units"]) * reductions + together


def _first_gradients(layout: Layout, precision: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    gradients: dict[str, torch.Tensor] = {}

    class Looks(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            gradients.update({k: g.double() for k, g in trainer.strategy.full_gradients().items()})

    torch.manual_seed(0)
    trainer = make_trainer(
        layout,
        "untied",
        options,
        callbacks=[Looks()],
        accumulate_grad_batches=8,
        precision=precision,
    )
    trainer.fit(GPT(CONFIG), train_loader(layout, 8))
    return gradients


@pytest.mark.parametrize(
    ("layout", "zero"),
    [
        (Layout(dp=2), 0),
        (Layout(dp=2), 1),
        (Layout(pp=2, microbatches=4), 0),
        pytest.param(Layout(tp=2), 0, marks=pytest.mark.extended),
        pytest.param(Layout(tp=2, dp=2), 0, marks=pytest.mark.extended),
        pytest.param(Layout(tp=2, dp=2), 1, marks=pytest.mark.extended),
        pytest.param(Layout(pp=2, dp=2, microbatches=2), 0, marks=pytest.mark.extended),
        pytest.param(Layout(pp=2, schedule="zb_h1", microbatches=4), 0, marks=pytest.mark.extended),
        pytest.param(Layout(pp=2, schedule="interleaved", microbatches=4), 0, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_sums_in_float32(layout: Layout, zero: int) -> None:
    """Many rounded gradients, summed in bfloat16 and in float32: the second sum is nearer to the true one."""
    true = run_program(layout, _first_gradients, "64-true", {"zero": zero})[0]
    errors = []
    for options in ({"zero": zero}, {"zero": zero, "reduce_dtype": "float32"}):
        found = run_program(layout, _first_gradients, "bf16-true", options)[0]
        errors.append(sum(float((found[name] - true[name]).square().sum()) for name in true))
    assert errors[1] < 0.9 * errors[0]


class PartlyUsed(GPT):
    """Has a parameter in a block that no step uses."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.blocks[0].spare = torch.nn.Parameter(torch.zeros(3))


def _partly_used(layout: Layout) -> None:
    trainer = make_trainer(
        layout, "untied", {"reduce_dtype": "float32"}, accumulate_grad_batches=2, precision="bf16-true"
    )
    trainer.fit(PartlyUsed(), train_loader(layout, 2))


@pytest.mark.parametrize("zero", [1, 2])
def test_sums_in_float32_beside_what_nobody_uses(zero: int) -> None:
    """FSDP2 has zeros of another dtype for it."""
    run_program(Layout(dp=2, zero=zero), _partly_used)


class Evaluated(GPT):
    """Looks whether evaluation keeps a graph."""

    graphs: tuple[bool, ...] = ()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.graphs = (*self.graphs, loss.requires_grad)
        self.log("val_loss", loss, sync_dist=True)


def _evaluated(layout: Layout, zero: int) -> tuple[tuple[bool, ...], float, float]:
    torch.manual_seed(3)
    module, trainer = Evaluated(CONFIG), make_trainer(layout, "untied", {"zero": zero} if zero else {})
    trainer.fit(module, train_loader(layout, 2), eval_loader(layout, 2))
    fitted = float(trainer.callback_metrics["val_loss"])
    return module.graphs, fitted, trainer.validate(module, eval_loader(layout, 2), verbose=False)[0]["val_loss"]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=2, pp=2, microbatches=2)], ids=str)
def test_evaluation(layout: Layout) -> None:
    _, *expected = run_program(Layout(dp=2), _evaluated, 0)[0]
    for rank, (graphs, *found) in enumerate(run_program(layout, _evaluated, 3)):
        assert found == pytest.approx(expected, abs=1e-9)
        assert not any(graphs)
        assert len(graphs) > 0 or rank >= layout.dp, "the last stage sees its losses"


class Walks(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert sum(p.requires_grad for _, p in self.named_parameters()) > 8
        return super().training_step(batch, batch_idx)


def _waits(layout: Layout) -> list[bool]:
    """Whether each backward ends with waiting for what FSDP2 reduces on streams of its own: gradients are read then."""
    told: list[bool] = []
    tell = FSDPModule.set_is_last_backward

    def note(self: FSDPModule, last: bool) -> None:
        told.append(last)
        tell(self, last)

    trainer = make_trainer(layout, limit_train_batches=4, accumulate_grad_batches=2)
    with mock.patch.object(FSDPModule, "set_is_last_backward", note):
        trainer.fit(GPT(CONFIG), train_loader(layout, 4))
    return told


@pytest.mark.parametrize("zero", [2, 3])
def test_accumulated_gradients_are_there_when_they_are_read(zero: int) -> None:
    """On a GPU FSDP2 reduces beside the backward, and only a last backward waits for it."""
    assert run_program(Layout(dp=2, zero=zero), _waits) == [[True] * 4] * 2
    pipeline = Layout(pp=2, dp=2, zero=zero, microbatches=2)
    assert run_program(pipeline, _waits) == [[False, False, True] * 4] * 4, "after both microbatches"


def _walked(layout: Layout) -> int:
    trainer = make_trainer(layout, "untied", {"zero": 2})
    trainer.fit(Walks(CONFIG), train_loader(layout, 2))
    return trainer.global_step


def test_a_step_may_walk_over_divided_shards() -> None:
    """As long as it does not compute with them."""
    assert run_program(Layout(tp=2, dp=2), _walked) == [2] * 4


class PredictsNothing(GPT):
    """Besides tokens it has a head for labels, of which there are none (graphs without global features)."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.labels = torch.nn.Linear(CONFIG.hidden, 0)

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().loss(batch) + self.labels(self.trunk(batch[0])).sum()


def _predicts_nothing(layout: Layout) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = PredictsNothing()
    trainer = make_trainer(layout, "untied")
    trainer.fit(module, train_loader(layout, 3))
    trainer.save_checkpoint("nothing.ckpt", weights_only=True)
    state: dict[str, torch.Tensor] = torch.load("nothing.ckpt")["state_dict"]
    return state


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3)], ids=str)
def test_parameters_without_elements_stay_whole(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _predicts_nothing)
    found = run_program(layout, _predicts_nothing)[0]
    assert found["labels.weight"].shape == (0, CONFIG.hidden)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


REFUSED = [
    ({"reduce_dtype": "float16", "zero": 1}, ["reduce_dtype='float16'", "float32"]),
    ({"zero": 4}, ["zero=4", "0, 1, 2 and 3"]),
    ({"zero": 1, "offload": "parameters"}, ["offload", "zero=3"]),
    ({"zero": 0, "offload": "optimizer"}, ["offload", "zero=1 or zero=2"]),
    ({"zero": 3, "offload": "disk"}, ["disk", "optimizer", "parameters"]),
    ({"dp_replicate": 2}, ["dp_replicate=2", "zero > 0"]),
]


@pytest.mark.parametrize(("options", "texts"), REFUSED, ids=str)
def test_what_does_not_go_together(options: dict[str, Any], texts: list[str]) -> None:
    from lightning_megatp import MegaTPStrategy

    with pytest.raises(ValueError, match="MegaTPStrategy") as error:
        MegaTPStrategy(**options)
    assert all(text in str(error.value) for text in texts)


class ReadsEmbedding(GPT):
    """Makes a table for the validation that begins (of all items that can be recommended), without a module's call."""

    def on_validation_start(self) -> None:
        self.table = torch.nn.functional.embedding(torch.arange(4), self.tok.weight)


def _reads_embedding(layout: Layout) -> None:
    trainer = make_trainer(layout, "untied", num_sanity_val_steps=0)
    trainer.fit(ReadsEmbedding(CONFIG), train_loader(layout, 1), eval_loader(layout, 1))


def test_a_hook_that_computes_with_divided_parameters_is_told_so() -> None:
    with pytest.raises(RankError) as error:
        run_program(Layout(dp=2, zero=3), _reads_embedding)
    texts = ["`on_validation_start`", "divided outside of steps (zero=3)", "`.full_tensor()`", "calls of a block"]
    assert all(text in failure.message for failure in error.value.failures for text in texts)


def _uneven_copies(layout: Layout) -> None:
    make_trainer(layout, "untied", {"zero": 1, "dp_replicate": 2}).fit(GPT(CONFIG), train_loader(layout, 1))


@pytest.mark.extended  # three ranks for one message
def test_copies_that_do_not_fit() -> None:
    with pytest.raises(RankError, match="dp_replicate=2 copies don't divide dp=3"):
        run_program(Layout(dp=3), _uneven_copies)
