"""What hooks outside of steps do with weights of which tensor ranks hold parts."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.distributed.training import QUIET
from tests.ranks import RankError, run_ranks, run_reference

PLAN = {"blocks.*.0": "column", "blocks.*.2": "row", "tok": "vocab", "head": "column_gather"}


class Lit(LightningModule):
    """An MLP on tokens, with weights that hooks hold to something.

    Args:
        habit: what its hooks do.
        whole: whether they ask for whole parameters.
    """

    def __init__(self, habit: str, whole: bool) -> None:
        super().__init__()
        self.habit, self.whole, self.losses = habit, whole, []  # type: ignore[var-annotated]
        self.kept: list[Tensor] = []
        self.tok, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.register_buffer("center", torch.zeros(8))
        self.copies = tuple(p.detach().clone().double() for p in self.parameters() if habit == "early copies")
        self.anchor = [p.detach().clone().double() for p in self.blocks.parameters() if habit == "closure alone"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if self.habit == "closure alone":
            away = zip(self.blocks.parameters(), self.anchor, strict=True)
            loss = loss + torch.stack([(p - held).norm() for p, held in away]).sum()
            self.center.lerp_(self.tok.weight.detach().mean(0), 0.1)
        self.log("loss", loss)
        if self.habit == "kept":
            self.kept.append(loss.detach())
        return loss

    def weights(self) -> Any:
        """The context in which hooks look at weights."""
        given = getattr(self.trainer.strategy, "whole_parameters", None) if self.whole else None
        return contextlib.nullcontext() if given is None else given()

    def on_fit_start(self) -> None:
        if self.habit == "new values":
            torch.manual_seed(1)
            with self.weights(), torch.no_grad():
                for name, layer in self.named_modules():
                    if isinstance(layer, nn.Linear):
                        torch.manual_seed(sum(map(ord, name)))
                        layer.reset_parameters()
        if self.habit == "loading":  # what models on one device have saved
            whole = Lit("", False).state_dict()
            self.load_state_dict({name: torch.full_like(x, 0.1 + i / 50) for i, (name, x) in enumerate(whole.items())})
            torch.manual_seed(5)
            block = Lit("", False).blocks[0].state_dict()
            self.blocks[0].load_state_dict({name: x.flatten().cumsum(0).view_as(x) for name, x in block.items()})

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        if self.habit == "calling":
            with self.weights():
                self.tok(torch.arange(11))
        for early, weight in zip(self.copies, self.parameters(), strict=False):
            early.lerp_(weight.data, 0.1)
        with self.weights(), torch.no_grad():
            for layer in [layer for layer in self.blocks.modules() if isinstance(layer, nn.Linear)]:
                if self.habit == "max norm":
                    layer.weight.copy_(layer.weight.renorm(2, 0, 0.5))
                if self.habit == "norms of rows":  # of what each rank has all of
                    dim = int(any(layer is block[0] for block in self.blocks))
                    layer.weight.div_(layer.weight.norm(dim=dim, keepdim=True))
                if self.habit == "squares of rows":
                    dim = int(any(layer is block[0] for block in self.blocks))
                    layer.weight.data = layer.weight / layer.weight.data.square().sum(dim, keepdim=True).sqrt()
                if self.habit == "max norm in place":
                    layer.weight.renorm_(2, 0, 0.5)
                if self.habit == "centred":
                    layer.weight.data = layer.weight.data - layer.weight.data.mean(0)
                if self.habit == "several at once":
                    weights = [x.weight for x in self.blocks.modules() if isinstance(x, nn.Linear)]
                    torch._foreach_mul_(weights, torch._foreach_reciprocal(torch._foreach_norm(weights)))
                if self.habit == "averaged norms":
                    self.kept.append(torch.zeros_like(layer.weight.norm()).lerp_(layer.weight.norm(), 0.1))
                    layer.weight.mul_(torch.full_like(self.kept[-1], 0.99))
                if self.habit == "product":
                    self.kept.append(layer.weight @ layer.weight.t())
                if self.habit == "writing":
                    torch.save({"weight": layer.weight}, io.BytesIO())
                if self.habit == "pruning":
                    size = layer.weight.abs().flatten().kthvalue(layer.weight.numel() // 4).values
                    layer.weight.mul_(layer.weight.abs() > size)
            if self.habit == "values":
                self.blocks.load_state_dict(copy.deepcopy(self.blocks.state_dict()))
                for weight in self.blocks.parameters():
                    weight.clamp_(-0.3, 0.3).mul_(0.99)
                    assert F.linear(torch.ones(2, weight.shape[-1]).to(weight), weight).mean() < 99

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if self.habit == "closure alone" and batch_idx < 2:  # their gradients wait
            closure()
            return
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self.habit == "max norm of a step":
            with self.weights(), torch.no_grad():
                for block in self.blocks:
                    block[2].weight.mul_(0.5 / block[2].weight.norm().clamp(min=0.5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 11, (12, 5), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(ids, batch_size=4)


class Logs(Callback):
    """Logs norms of weights."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        with pl_module.weights():
            norms = [p.detach().norm() for p in pl_module.blocks.parameters()]
        self.norm = float(torch.stack(norms).norm())


def fit(rank: int, world_size: int, habit: str, whole: bool, layout: dict[str, Any]) -> tuple[list[float], float, str]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(plan=PLAN, summary=False, **layout)
    torch.manual_seed(0)
    module, logs = Lit(habit, whole), Logs()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, callbacks=[logs] if habit == "norms" else [], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    said = " ".join(str(warning.message) for warning in caught if "holds a part" in str(warning.message))
    return module.losses, getattr(logs, "norm", 0.0), said


def fit_one(habit: str) -> tuple[list[float], float, str]:
    return fit(0, 1, habit, False, {})


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2, "microbatches": 2}], ids=["tp2", "tp2-pp2"])
@pytest.mark.parametrize("habit", ["max norm", "max norm of a step", "pruning", "new values", "norms", "values"])
def test_whole_parameters_are_those_of_one_device(habit: str, layout: dict[str, Any]) -> None:
    losses, norm, _ = run_reference(fit_one, habit)
    for found, found_norm, said in run_ranks(2 * layout.get("pp", 1), fit, habit, True, layout):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_norm == pytest.approx(norm, rel=1e-9) or "pp" in layout
        assert not said


@pytest.mark.parametrize("habit", ["norms of rows", "squares of rows"])
def test_norms_of_what_each_rank_has_are_those_of_one_device(habit: str) -> None:
    losses, _, _ = run_reference(fit_one, habit)
    for found, _, said in run_ranks(2, fit, habit, False, {"tp": 2}):
        assert found == pytest.approx(losses, rel=1e-9)
        assert not said


def test_layers_of_parts_are_not_called_on_whole_parameters() -> None:
    """They would look for this rank's rows in a table of all rows."""
    run_reference(fit_one, "calling")
    with pytest.raises(RankError) as raised:
        run_ranks(2, fit, "calling", True, {"tp": 2})
    assert ["`tok` is called inside of `whole_parameters()`" in x.message for x in raised.value.failures] == [True] * 2


def test_whole_parameters_may_be_written() -> None:
    assert not any(said for _, _, said in run_ranks(2, fit, "writing", True, {"tp": 2}))


def test_a_hook_of_the_last_stage_that_leaves_weights_alone() -> None:
    losses, _, _ = run_reference(fit_one, "kept")
    for found, _, said in run_ranks(4, fit, "kept", False, {"tp": 2, "pp": 2, "microbatches": 2})[:2]:
        assert found == pytest.approx(losses, rel=1e-9)
        assert not said


def test_a_step_whose_closure_is_called_alone_is_no_hook() -> None:
    """Its optimizer waits for other batches."""
    losses, _, _ = run_reference(fit_one, "closure alone")
    for found, _, said in run_ranks(2, fit, "closure alone", False, {"tp": 2}):
        assert found == pytest.approx(losses, rel=1e-9)
        assert not said


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        ("new values", ""),
        ("norms", "`on_train_epoch_end` uses `norm` on `blocks.0.0.weight`"),
        ("averaged norms", "`on_train_batch_end` uses `norm` on `blocks.0.0.weight`"),
        ("product", "`on_train_batch_end` uses `matmul` on `blocks.0.0.weight`"),
        ("writing", "`on_train_batch_end` writes `blocks.0.0.weight`, of which each rank holds a part"),
        ("values", ""),
        ("norms of rows", ""),
    ],
)
def test_what_is_about_parts_is_said(habit: str, text: str) -> None:
    said = run_ranks(2, fit, habit, False, {"tp": 2})[0][2]
    assert text in said if text else not said


@pytest.mark.parametrize(
    ("habit", "text"),
    [
        ("max norm", "`on_train_batch_end` puts into `blocks.0.0.weight`, .* by `renorm` of"),
        ("max norm in place", "`on_train_batch_end` puts into `blocks.0.0.weight`, .* by `renorm_` of"),
        ("max norm of a step", "`optimizer_step` puts into `blocks.0.2.weight`, .* by `norm` of"),
        ("pruning", "`on_train_batch_end` puts into `blocks.0.0.weight`, .* by `kthvalue` of"),
        ("centred", "`on_train_batch_end` puts into `blocks.0.0.weight`, .* by `mean` of"),
        ("several at once", "`on_train_batch_end` puts into `blocks.0.0.weight`, .* by `norm` of"),
    ],
)
def test_what_is_made_of_parts_is_not_put_into_weights(habit: str, text: str) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(2, fit, habit, False, {"tp": 2})
    assert [re.search(text, failure.message) is not None for failure in raised.value.failures] == [True, True]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2, "microbatches": 2}], ids=["tp2", "tp2-pp2"])
def test_whole_values_are_loaded_in_a_hook(layout: dict[str, Any]) -> None:
    losses, _, _ = run_reference(fit_one, "loading")
    for found, _, _ in run_ranks(2 * layout.get("pp", 1), fit, "loading", False, layout):
        assert found == pytest.approx(losses, rel=1e-9)


def test_copies_made_before_the_split_do_not_fit() -> None:
    run_reference(fit_one, "early copies")
    with pytest.raises(RankError) as raised:
        run_ranks(2, fit, "early copies", False, {"tp": 2})
    for text in ("`on_train_batch_end`", "`lerp_`", "(6, 8) of (11, 8)", "`tok.weight`", "in `on_fit_start`"):
        assert text in str(raised.value)


def test_whole_values_are_loaded_to_rows() -> None:
    expected = run_ranks(2, fit, "loading", False, {"dp": 2})
    for zero in (1, 3):
        for (found, *_), (losses, *_) in zip(
            run_ranks(2, fit, "loading", False, {"dp": 2, "zero": zero}), expected, strict=True
        ):
            assert found == pytest.approx(losses, rel=1e-9)
    for rank, (found, _, said) in enumerate(run_ranks(4, fit, "loading", False, {"tp": 2, "dp": 2, "zero": 2})):
        assert found == pytest.approx(expected[rank // 2][0], rel=1e-9)
        assert "to a file" not in said


def test_rows_elsewhere_are_no_whole_parameters() -> None:
    with pytest.raises(RankError, match="can't be used with zero > 0"):
        run_ranks(2, fit, "max norm", True, {"dp": 2, "zero": 3})
