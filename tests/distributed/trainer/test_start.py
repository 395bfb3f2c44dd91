"""The ways to ask for the strategy: by class, by name, with a plugin, in either of Lightning's namespaces."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from tests.distributed.training import PLAIN, QUIET, TP2, Layout, Losses, make_trainer, run_program, train_loader
from tests.parity.variants import variant
from tests.ranks import run_ranks


def _old_namespace(layout: Layout) -> list[float]:
    """A project that imports pytorch_lightning."""
    import pytorch_lightning as pl

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.up, self.down = nn.Embedding(32, 8), nn.Linear(8, 12), nn.Linear(12, 32)
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            logits_BLV = self.down(F.gelu(self.up(self.tok(batch[0]))))
            loss = F.cross_entropy(logits_BLV.flatten(0, 1), batch[1].flatten())
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    module = Small()
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    if layout.plain:
        trainer = pl.Trainer(devices=1, **options)
    else:
        from lightning_megatp.pytorch_lightning import MegaTPStrategy

        strategy = MegaTPStrategy(tp=layout.tp, plan={"tok": "vocab", "up": "column", "down": "row"}, summary=False)
        trainer = pl.Trainer(devices=layout.tp * layout.dp, strategy=strategy, **options)
    trainer.fit(module, train_loader(layout, 5))
    return module.losses


def test_pytorch_lightning_projects_train_the_same() -> None:
    expected = run_program(PLAIN, _old_namespace)[0]
    assert run_program(TP2, _old_namespace) == [pytest.approx(expected, abs=1e-9)] * 2


def _with_sparse_buffers(layout: Layout) -> list[float]:
    module, losses = variant("untied").build(), Losses()
    module.register_buffer("heads", torch.eye(4).bool().to_sparse(), persistent=False)
    make_trainer(layout, callbacks=[losses]).fit(module, train_loader(layout, 2))
    assert module.heads.to_dense().sum() == 4
    return losses.seen


def test_buffers_may_be_sparse() -> None:
    expected = run_program(PLAIN, _with_sparse_buffers)[0]
    for layout in (TP2, Layout(pp=2)):
        assert run_program(layout, _with_sparse_buffers) == [pytest.approx(expected, abs=1e-9)] * 2


def _by_name(rank: int, world_size: int) -> tuple[str, int, int]:
    from lightning.pytorch import Trainer

    import lightning_megatp

    trainer = Trainer(accelerator="cpu", devices=world_size, strategy="megatp", max_epochs=1, **QUIET)
    trainer.fit(variant("untied").build(), train_loader(Layout(dp=2), 2))
    assert isinstance(trainer.strategy, lightning_megatp.MegaTPStrategy)
    return type(trainer.strategy).__name__, trainer.strategy.tp, trainer.global_step


def _environment_after(layout: Layout) -> str | None:
    module = variant("untied").build()
    make_trainer(layout).fit(module, train_loader(layout, 1))
    return os.environ.get("WORLD_SIZE")


@pytest.mark.parametrize("layout", [TP2, pytest.param(Layout(pp=2), marks=pytest.mark.extended)], ids=str)
def test_a_fit_tears_its_environment_down(layout: Layout) -> None:
    assert run_program(layout, _environment_after) == [None] * layout.ranks


def test_the_name_megatp_is_data_parallel_by_default() -> None:
    assert run_ranks(2, _by_name) == [("MegaTPStrategy", 1, 2)] * 2


def _with_plugin(layout: Layout, kind: str) -> tuple[float, list[tuple[int, ...]]]:
    from lightning_megatp import ParallelismPlugin

    class OnlyTheMlps(ParallelismPlugin):
        """A user's subclass that changes one step."""

        def resolve(self, module: nn.Module, tp: int, sequence_parallel: bool) -> Any:
            self.plan = {name: style for name, style in self.plan.items() if ".mlp." in name}
            return super().resolve(module, tp, sequence_parallel)

    plugin = {"plain": ParallelismPlugin, "subclass": OnlyTheMlps}[kind](plan=variant("untied").plan)
    module = variant("untied").build()
    trainer = make_trainer(layout, strategy={"plan": None, "parallelism": plugin})
    trainer.fit(module, train_loader(layout, 3))
    shapes = [tuple(module.get_parameter(f"blocks.0.{name}.weight").shape) for name in ("attn.qkv", "mlp.up")]
    return float(trainer.callback_metrics["loss"]), shapes


def _plain(layout: Layout) -> float:
    trainer = make_trainer(layout)
    trainer.fit(variant("untied").build(), train_loader(layout, 3))
    return float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize(("kind", "qkv"), [("plain", (24, 16)), ("subclass", (48, 16))])
def test_a_plugin_and_a_subclass_of_it(kind: str, qkv: tuple[int, int]) -> None:
    expected = run_program(PLAIN, _plain)[0]
    for loss, shapes in run_program(TP2, _with_plugin, kind):
        assert loss == pytest.approx(expected, abs=1e-9)
        assert shapes == [qkv, (16, 16)]


DRAWS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda seed: torch.randperm(32, generator=torch.Generator().manual_seed(seed)), lambda x: x),
    "in a list": (lambda seed: [{"order": DRAWS["tensor"][0](seed)}], lambda x: x[0]["order"]),
    "array": (lambda seed: np.random.default_rng(seed).permutation(32), torch.from_numpy),
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda x: torch.randperm(32, generator=x)),
    "numpy": (lambda seed: np.random.default_rng(seed), lambda x: torch.from_numpy(x.permutation(32))),
    "old numpy": (lambda seed: np.random.RandomState(seed), lambda x: torch.from_numpy(x.permutation(32))),
    "sobol": (lambda seed: SobolEngine(1, scramble=True, seed=seed), lambda x: x.draw(32).view(-1).argsort()),
    "python": (lambda seed: random.Random(seed), lambda x: torch.tensor(x.sample(range(32), 32))),
}
"""What a module may make in `__init__`, in a process with a seed of its own, and the order of words it makes of it."""


def _drawn_by_each_process(layout: Layout, kind: str) -> dict[str, Tensor]:
    make, order = DRAWS[kind]
    module = variant("untied").build()
    module.held, step = make(int(os.environ.get("RANK", "0"))), module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        return step((tokens, order(module.held)[targets]), batch_idx)

    module.training_step = training_step  # type: ignore[method-assign]
    trainer = make_trainer(layout)
    trainer.fit(module, train_loader(layout, 3))
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, TP2) for kind in DRAWS), ("tensor", Layout(tp=2, pp=2))],
    ids=str,
)
def test_what_a_module_drew_before_ranks_were_seeded_alike(kind: str, layout: Layout) -> None:
    expected, found = (run_program(each, _drawn_by_each_process, kind)[0] for each in (PLAIN, layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
