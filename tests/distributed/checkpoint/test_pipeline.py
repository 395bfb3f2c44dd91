"""A checkpoint of a pipeline is a plain Trainer's, and any layout goes on from it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.crossing import fewer
from tests.distributed.checkpoint.test_trainer import (
    Losses,
    _best_and_last,
    _damage,
    _just_read,
    _load,
    _train,
    assert_same,
)
from tests.distributed.training import (
    DP2_PP2,
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    make_trainer,
    run_program,
    shared_directory,
    tokens,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig
from tests.ranks import RankError

ZB_V = Layout(pp=2, schedule="zb_v")
WRITERS = {"plain": PLAIN, "pp2": PP2, "tp2_pp2": TP2_PP2, "dp2_pp2": DP2_PP2, "tp2": TP2, "zb_v": ZB_V}
READERS = {
    "plain": ["pp2", "zb_v"],
    "pp2": ["plain", "tp2_pp2"],
    "tp2_pp2": ["plain", "pp2", "dp2_pp2"],
    "dp2_pp2": ["tp2", "tp2_pp2"],
    "tp2": ["pp2", "dp2_pp2"],
    "zb_v": ["pp2", "plain"],
}


@pytest.mark.parametrize(
    ("model", "writer"),
    fewer(
        itertools.product(["tied", "grouped_fused"], WRITERS),
        extended=[("tied", "plain"), ("tied", "dp2_pp2"), *(("grouped_fused", writer) for writer in WRITERS)],
    ),
)
def test_every_layout_goes_on(model: str, writer: str, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _train, model, str(tmp_path / "whole.ckpt"), None, 2)[0]
    run_program(PLAIN, _train, model, str(tmp_path / "half.ckpt"), None, 1)
    path = str(tmp_path / "first.ckpt")
    run_program(WRITERS[writer], _train, model, path, None, 1)
    assert_same(*(run_program(PLAIN, _just_read, file)[0] for file in (path, str(tmp_path / "half.ckpt"))))
    for reader in READERS[writer] if model == "tied" else READERS[writer][:1]:
        second = str(tmp_path / f"{reader}.ckpt")
        for losses in run_program(WRITERS[reader], _train, model, second, path, 2):
            assert losses == pytest.approx(expected[4:], abs=1e-9), f"{reader} goes on with the optimizer's state"
        assert_same(*(run_program(PLAIN, _just_read, file)[0] for file in (second, str(tmp_path / "whole.ckpt"))))


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_best_and_last_checkpoints(layout: Layout, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _best_and_last, str(tmp_path))[0]
    for found in run_program(layout, _best_and_last, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9)


class Seen(GPT):
    """Counts on the last stage: a metric whose state is saved, and a buffer of its own; two groups of parameters."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False, dropout=0.1, attention_dropout=0.1))
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)
        self.register_buffer("smooth", torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.smooth = 0.5 * self.smooth + loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def _resumed(layout: Layout, root: str, load: bool) -> dict[str, Any]:
    """A checkpoint in the middle of an epoch. The batches are alike, since Lightning starts the loader anew."""
    torch.manual_seed(6 if load else 5)
    directory = shared_directory(layout, "middle", root)
    losses = Losses()
    keep = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = make_trainer(layout, callbacks=[losses, keep], enable_checkpointing=True, max_epochs=1)
    module = Seen().double()
    loader = DataLoader(Subset(tokens(1), [0] * 24), batch_size=4 // layout.dp)
    path = directory / "step=3.ckpt"
    trainer.fit(module, loader, ckpt_path=path if load else None)
    saved = torch.load(directory / "step=6.ckpt")["state_dict"] if layout.pp > 1 and trainer.is_global_zero else {}
    state = {name: saved[name] for name in ("mean.mean_value", "mean.weight", "smooth") if name in saved}
    return {"losses": losses.values, "state": state}


@pytest.mark.parametrize("layout", [PP2, TP2_PP2, DP2_PP2], ids=str)
def test_the_same_layout_resumes_bit_equal_within_an_epoch(layout: Layout, tmp_path: Path) -> None:
    whole = run_program(layout, _resumed, str(tmp_path), False)
    resumed = run_program(layout, _resumed, str(tmp_path), True)
    assert [found["losses"][-3:] for found in whole] == [found["losses"][-3:] for found in resumed]
    assert len(set(whole[0]["losses"])) == len(whole[0]["losses"])
    assert whole[0]["state"]["mean.weight"] > 0, "what the last stage counted is saved"
    assert whole[0]["state"]["smooth"] != 0


class Named(GPT):
    """Gives the optimizer some parameters by name, wherever they are."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [self.tok.weight, self.head.bias]
        rest = [p for p in self.parameters() if all(p is not q for q in own)]
        return torch.optim.AdamW([{"params": rest}, {"params": own, "lr": 1e-2}], lr=1e-3)


def _named(layout: Layout, path: str, load: str | None) -> list[float]:
    torch.manual_seed(3)
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], max_epochs=2 if load else 1)
    trainer.fit(Named(GPTConfig(tied=False)).double(), train_loader(layout, 3), ckpt_path=load)
    trainer.save_checkpoint(path)
    return losses.values


def test_parameters_given_by_name(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    expected = run_program(PLAIN, _named, first, None)[0], run_program(PLAIN, _named, second, first)[0]
    for start, load in enumerate((None, first)):
        for found in run_program(PP2, _named, str(tmp_path / "ours.ckpt"), load):
            assert found == pytest.approx(expected[start], abs=1e-9)
    assert_same(*(run_program(PLAIN, _just_read, file)[0] for file in (str(tmp_path / "ours.ckpt"), second)))


class Backwards(GPT):
    """The optimizer gets the last blocks first."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        blocks = [p for block in reversed(self.blocks) for p in block.parameters()]
        rest = [p for p in self.parameters() if all(p is not q for q in blocks)]
        return torch.optim.Adagrad([{"params": blocks}, {"params": rest, "lr": 1e-1}], lr=1e-2)


def _backwards(layout: Layout, path: str, load: str | None) -> list[float]:
    torch.manual_seed(3)
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], max_epochs=2 if load else 1)
    trainer.fit(Backwards(GPTConfig(tied=False)).double(), train_loader(layout, 3), ckpt_path=load)
    trainer.save_checkpoint(path)
    return losses.values


def test_an_optimizer_with_another_order_of_parameters(tmp_path: Path) -> None:
    first, second, ours = (str(tmp_path / f"{name}.ckpt") for name in ("first", "second", "ours"))
    run_program(PLAIN, _backwards, first, None)
    expected = run_program(PLAIN, _backwards, second, first)[0]
    for found in run_program(PP2, _backwards, ours, first):
        assert found == pytest.approx(expected, abs=1e-9)
    assert_same(*(run_program(PLAIN, _just_read, file)[0] for file in (ours, second)))


class ByName(GPT):
    """The optimizer gets the last blocks first, and is told their names."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        blocks = reversed([entry for entry in self.named_parameters() if entry[0].startswith("blocks")])
        rest = [entry for entry in self.named_parameters() if not entry[0].startswith("blocks")]
        return torch.optim.Adagrad([{"params": list(blocks)}, {"params": rest, "lr": 1e-1}], lr=1e-2)


def _of_kind(layout: Layout, kind: type[GPT], path: str, form: str) -> None:
    torch.manual_seed(3)
    trainer = make_trainer(layout, strategy={"checkpoint": form})
    trainer.fit(kind(GPTConfig(tied=False)).double(), train_loader(layout, 3))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("kind", [Backwards, ByName])
def test_a_folder_keeps_the_order_of_an_optimizers_parameters(kind: type[GPT], tmp_path: Path) -> None:
    from lightning_megatp.checkpoint.convert import convert

    plain, folder, converted = (tmp_path / f"{name}.ckpt" for name in ("plain", "folder", "converted"))
    run_program(PLAIN, _of_kind, kind, str(plain), "file")
    run_program(PP2, _of_kind, kind, str(folder), "folder")
    convert(folder, converted, "file")
    expected, found = (torch.load(path)["optimizer_states"][0] for path in (plain, converted))
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"])


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape"])
def test_a_checkpoint_that_does_not_fit(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    run_program(PLAIN, _train, "untied", path, None, 1)
    run_program(PLAIN, _damage, path, how)
    with pytest.raises(RankError) as error:
        run_program(PP2, _load, path)
    assert all("Timeout" not in failure.type_name for failure in error.value.failures)
    name = "blocks.0.other" if how == "unexpected" else "blocks.0.attn.qkv.weight"
    assert any(name in failure.message for failure in error.value.failures)


class Averages(nn.Module):
    """As latent diffusion has them: a buffer for each parameter, under a name without dots."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone())

    def forward(self, module: nn.Module) -> None:
        shadows = dict(self.named_buffers())
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                shadow = shadows[name.replace(".", "")]
                shadow.sub_(0.5 * (shadow - parameter))


class Averaged(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.averages = Averages(self.blocks)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.averages(self.blocks)


def _averaged(layout: Layout, path: str, resumed: str | None) -> None:
    torch.manual_seed(3)
    trainer = make_trainer(layout, max_epochs=2 if resumed else 1)
    trainer.fit(Averaged(), train_loader(layout, 2), ckpt_path=resumed)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("layout", [PP2, DP2_PP2], ids=str)
def test_averages_in_buffers_that_stages_keep_up(layout: Layout, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("whole", "whole_on", "parts", "parts_on")]
    for of, first, second in ((PLAIN, *files[:2]), (layout, *files[2:])):
        run_program(of, _averaged, first, None)
        run_program(of, _averaged, second, first)
    for whole, parts in (files[::2], files[1::2]):
        expected, found = (torch.load(x, weights_only=True)["state_dict"] for x in (whole, parts))
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=name)


class OwnEntries(nn.Module):
    """Puts its parameters into a state dict by itself, as PyTorch Geometric's `Linear` does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) * 0.1), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, parameter in self._parameters.items():
            destination[prefix + name] = parameter if keep_vars else parameter.detach()  # type: ignore[union-attr]


class WithOwnEntries(GPT):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.own = OwnEntries(GPTConfig.hidden)
            block.register_forward_hook(lambda block, _, y: y + block.own(y))


def _with_own_entries(layout: Layout, path: str, checkpoint: str, resumed: str | None) -> None:
    torch.manual_seed(3)
    options = {"checkpoint": checkpoint} if layout.ranks > 1 else {}
    trainer = make_trainer(layout, strategy=options, max_epochs=2 if resumed else 1)
    trainer.fit(WithOwnEntries(), train_loader(layout, 2), ckpt_path=resumed)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("checkpoint", ["file", "folder"])
def test_modules_that_save_their_parameters_by_themselves(checkpoint: str, tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    for of, path in ((PLAIN, whole), (PP2, parts)):
        run_program(of, _with_own_entries, f"{path}.ckpt", checkpoint, None)
        run_program(of, _with_own_entries, f"{path}_on.ckpt", checkpoint, f"{path}.ckpt")
    if checkpoint == "file":
        expected, found = (torch.load(f"{x}_on.ckpt", weights_only=True)["state_dict"] for x in (whole, parts))
        assert list(expected) == list(found)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=name)
