"""Layers created in `configure_model` have, over all ranks, the values of one device, and train as there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    WEIGHTS_ONLY,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.late_models import Late, llama
from tests.memory import peak_mib

EXTENDED = pytest.mark.extended
_BLOCKS = "model.model.layers.*"
LLAMA_PLAN = {
    **{f"{_BLOCKS}.self_attn.{name}_proj": {"style": "column", "unit": 4} for name in "qkv"},
    f"{_BLOCKS}.self_attn.o_proj": {"style": "row", "unit": 4},
    **{f"{_BLOCKS}.mlp.{name}_proj": "column" for name in ("gate", "up")},
    f"{_BLOCKS}.mlp.down_proj": "row",
    "model.model.embed_tokens": "vocab",
    "model.lm_head": "column_gather",
}
LARGE_PLAN = {"model.*.0": "column", "model.*.2": "row"}


class Start(Callback):
    """The model and the random state as training finds them."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.drawn = torch.empty(0)
        self.on_meta: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.state = {name: value.clone() for name, value in state.items()}
        self.on_meta = [name for name, p in module.named_parameters() if p.is_meta]
        with torch.random.fork_rng([]):
            self.drawn = torch.rand(3)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def _train(layout: Layout, kind: str, *args: Any) -> tuple[list[float], dict[str, Tensor], Tensor]:
    start, losses = Start(), Losses()
    trainer = make_trainer(layout, callbacks=[start, losses], strategy=None if layout.plain else {"plan": "auto"})
    torch.manual_seed(5)
    trainer.fit(Late(kind, *args), train_loader(layout, 2))
    assert not start.on_meta
    return losses.losses, start.state, start.drawn


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("nano", TP2_PP2),
        pytest.param("nano", TP2, marks=EXTENDED),
        pytest.param("nano", PP2, marks=EXTENDED),
        *(pytest.param(kind, layout, marks=EXTENDED) for kind in ("tied", "llama") for layout in (TP2, PP2)),
        pytest.param("pixels", TP2, marks=EXTENDED),
    ],
    ids=str,
)
def test_values_and_training_are_those_of_one_device(kind: str, layout: Layout) -> None:
    expected_losses, expected, drawn = run_program(PLAIN, _train, kind)[0]
    by_rank = run_program(layout, _train, kind)
    _same(by_rank[0][1], expected)
    for losses, _, drawn_there in by_rank:
        assert losses == pytest.approx(expected_losses, rel=1e-6 if kind == "llama" else 1e-9)  # its norms are float32
        assert torch.equal(drawn_there, drawn)


def _same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def _save_llama(layout: Layout, folder: str) -> None:
    torch.manual_seed(1)
    llama().save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]


class BytesRead(Start):
    """What this rank read from files, before its building is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        from lightning_megatp.building.safetensors import Stored

        read = Stored.read

        def counted(stored: Stored, spec: Any) -> Tensor:
            value = read(stored, spec)
            self.read += value.nbytes
            return value

        Stored.read = counted  # type: ignore[method-assign]
        self.undo = lambda: setattr(Stored, "read", read)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        super().on_train_start(trainer, module)
        self.undo()


def _fine_tune(layout: Layout, folder: str) -> tuple[list[float], dict[str, Tensor], int]:
    start = Start() if layout.plain else BytesRead()
    losses = Losses()
    plan = {"plan": LLAMA_PLAN}
    trainer = make_trainer(layout, callbacks=[start, losses], strategy=None if layout.plain else plan)
    torch.manual_seed(5)
    trainer.fit(Late("pretrained", folder), train_loader(layout, 1))
    return losses.losses, start.state, getattr(start, "read", 0)


@pytest.mark.parametrize("layout", [TP2_PP2, pytest.param(TP2, marks=EXTENDED)], ids=str)
def test_from_pretrained_reads_the_part_of_each_rank(layout: Layout, tmp_path: Path) -> None:
    run_program(PLAIN, _save_llama, str(tmp_path))
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    losses, expected, _ = run_program(PLAIN, _fine_tune, str(tmp_path))[0]
    by_rank = run_program(layout, _fine_tune, str(tmp_path))
    _same(by_rank[0][1], expected)
    for found, _, read in by_rank:
        assert found == pytest.approx(losses, rel=1e-6)
        assert read < 1.15 * stored / layout.ranks, (read, stored)


def _resume(layout: Layout, first: Layout, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    start, losses = Start(), Losses()
    path = Path(folder) / f"{first}.ckpt"
    epochs, strategy = 2 if path.exists() else 1, None if layout.plain else {"plan": "auto"}
    trainer = make_trainer(layout, strategy=strategy, max_epochs=epochs, callbacks=[start, losses])
    torch.manual_seed(8)
    trainer.fit(Late("nano"), train_loader(layout, 2), ckpt_path=path if path.exists() else None, **WEIGHTS_ONLY)
    if not path.exists():
        trainer.save_checkpoint(path)
    return losses.losses, start.state


def test_a_checkpoint_is_resumed_without_making_what_it_holds(tmp_path: Path) -> None:
    """The values drawn are not those of the checkpoint: another seed would show if they were kept."""
    run_program(PLAIN, _resume, PLAIN, str(tmp_path))
    expected_losses, expected = run_program(PLAIN, _resume, PLAIN, str(tmp_path))[0]
    by_rank = run_program(TP2_PP2, _resume, PLAIN, str(tmp_path))
    _same(by_rank[0][1], expected)
    assert by_rank[0][0] == pytest.approx(expected_losses, rel=1e-9)


def _with(layout: Layout, kind: str, strategy: dict[str, Any]) -> tuple[list[float], list[str]]:
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], strategy=None if layout.plain else {"plan": "auto", **strategy})
    torch.manual_seed(5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Late(kind), train_loader(layout, 1))
    return losses.losses, [str(warning.message) for warning in caught]


def test_what_cannot_be_recorded_is_built_whole_and_said() -> None:
    expected, _ = run_program(PLAIN, _with, "resized", {})[0]
    by_rank = run_program(TP2, _with, "resized", {})
    for losses, _ in by_rank:
        assert losses == pytest.approx(expected, rel=1e-9)
    assert any("can't be recorded" in text and "resizes a tensor" in text for text in by_rank[0][1])


@EXTENDED
def test_verify_has_a_whole_copy() -> None:
    expected, _ = run_program(PLAIN, _with, "nano", {})[0]
    for losses, _ in run_program(TP2, _with, "nano", {"verify": True}):
        assert losses == pytest.approx(expected, rel=1e-9)


def _peak(layout: Layout) -> tuple[float, float]:
    """MiB that a rank had at most while a model was built, and what it holds of it."""
    _with(layout, "tied", {})  # what is imported, and allocated once, is there
    module = Late("large")
    trainer = make_trainer(layout, strategy={"plan": LARGE_PLAN}, precision="32-true", max_epochs=0)
    peak = peak_mib(lambda: trainer.fit(module, train_loader(layout, 1)))
    return peak, sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20


@EXTENDED
def test_a_rank_never_holds_much_more_than_its_part() -> None:
    for peak, held in run_program(TP2_PP2, _peak):
        assert 90 < held < 110  # of 400
        assert peak < held + 50 + 75, peak  # a block, and what malloc keeps


def _twice(layout: Layout) -> tuple[str, list[float]]:
    """A set-up that fails once the layers are there, and another with the same module."""
    module = Late("nano")
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="matches no module") as refused:
        make_trainer(layout, strategy={"plan": {"nothing": "row"}}).fit(module, train_loader(layout, 1))
    losses = Losses()
    torch.manual_seed(5)
    make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses]).fit(module, train_loader(layout, 1))
    return str(refused.value), losses.losses


def test_after_a_refusal_the_layers_are_created_anew() -> None:
    expected, _ = run_program(PLAIN, _with, "nano", {})[0]
    for _, losses in run_program(TP2, _twice):
        assert losses == pytest.approx(expected, rel=1e-9)
