"""Averages of weights that users keep by themselves, in lists, dicts and buffers, and other tensors of that kind."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.crossing import crossed
from tests.distributed.training import QUIET
from tests.ranks import RankError, run_ranks, run_reference

PLAN = {"net.blocks.*.1": "column", "net.blocks.*.3": "row", "net.tok": "vocab", "net.head": "column_gather"}
DECAY = 0.8
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "microbatches": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "microbatches": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2-dp2-zero1": {"pp": 2, "dp": 2, "zero": 1, "microbatches": 2},
    "tp2-zero1": {"tp": 2, "dp": 2, "zero": 1},
    "tp2-pp2-folder": {"tp": 2, "pp": 2, "microbatches": 2, "checkpoint": "folder"},
}


class ListAverage:
    """As score-based models have it: a list, in the order of the parameters."""

    def __init__(self, parameters: Any) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.collected: list[Tensor] = []

    @torch.no_grad()
    def update(self, parameters: Any) -> None:
        for s, p in zip(self.shadow_params, parameters, strict=False):
            s.sub_((1 - DECAY) * (s - p))

    def store(self, parameters: Any) -> None:
        self.collected = [p.clone() for p in parameters]

    def copy_to(self, parameters: Any) -> None:
        for s, p in zip(self.shadow_params, parameters, strict=False):
            p.data.copy_(s.data)

    def restore(self, parameters: Any) -> None:
        for c, p in zip(self.collected, parameters, strict=False):
            p.data.copy_(c.data)


class DataAverage(ListAverage):
    """One that no version counter tells of."""

    def update(self, parameters: Any) -> None:
        for s, p in zip(self.shadow_params, parameters, strict=False):
            s.data.mul_(DECAY).add_(p.data, alpha=1 - DECAY)


class NewAverage(ListAverage):
    """One whose tensors, and list, are made anew each time."""

    @torch.no_grad()
    def update(self, parameters: Any) -> None:
        pairs = zip(self.shadow_params, parameters, strict=False)
        self.shadow_params = [s.to(p).lerp(p.detach(), 1 - DECAY) for s, p in pairs]


class BufferAverage(nn.Module):
    """As latent diffusion has it: buffers, under names without dots."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "") for name, _ in net.named_parameters()}
        self.register_buffer("decay", torch.tensor(DECAY, dtype=torch.float64))
        for name, p in net.named_parameters():
            self.register_buffer(self.names[name], p.clone().detach().data)
        self.collected: list[Tensor] = []

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        shadows = dict(self.named_buffers())
        for name, p in net.named_parameters():
            shadow = shadows[self.names[name]]
            shadow.sub_((1 - self.decay) * (shadow - p))

    def copy_to(self, net: nn.Module) -> None:
        shadows = dict(self.named_buffers())
        for name, p in net.named_parameters():
            p.data.copy_(shadows[self.names[name]].data)


class Lit(LightningModule):
    """A residual network on tokens.

    Args:
        kind: how it keeps an average of its weights.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.losses = kind, []  # type: ignore[var-annotated]
        blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.net = nn.ModuleDict(
            {"tok": nn.Embedding(11, 8), "blocks": nn.ModuleList(blocks), "head": nn.Linear(8, 11)}
        )
        self.loaded: Any = None
        if kind == "buffers":
            self.ema: Any = BufferAverage(self.net)
        elif not kind.startswith("late"):
            self.ema = KINDS[kind](list(self.averaged()))
        self.anchor = [p.detach() + 0.1 for p in self.net.parameters()] if kind == "anchor" else []

    def averaged(self) -> Any:
        """The parameters of which an average is kept."""
        if self.kind == "turned":
            return itertools.chain(self.net["head"].parameters(), self.net["blocks"].parameters())  # type: ignore[union-attr, operator]
        return (self.net["blocks"] if self.kind == "blocks" else self.net).parameters()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.net["tok"](ids)
        for block in self.net["blocks"]:  # type: ignore[attr-defined]
            x = x + block(x)
        logits: Tensor = self.net["head"](x)
        return logits

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, ids: Tensor, batch_idx: int) -> Any:
        loss = self.loss(ids)
        if self.kind == "outside" and batch_idx > 1:
            loss = loss + self.net["head"].weight.square().sum()  # type: ignore[union-attr, operator]
        for p, a in zip(self.net.parameters(), self.anchor, strict=bool(self.anchor)):
            loss = loss + 0.01 * (p - a).square().sum()
        self.log("loss", loss)
        return {"loss": loss, "logits": loss.detach()} if self.kind == "returns" else loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        if self.kind == "scope":
            self.put_in()
        self.log("val", self.loss(ids), sync_dist=True)
        if self.kind == "scope":
            ListAverage.restore(self.ema, self.averaged())

    def on_fit_start(self) -> None:
        if self.kind == "late":
            self.ema = ListAverage(self.averaged())
            if self.loaded is not None:
                self.ema.shadow_params = [x.clone() for x in self.loaded]
        elif self.kind == "late-buffers":
            self.ema = BufferAverage(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))
        self.ema.update(self.net if self.kind.endswith("buffers") else self.averaged())

    def put_in(self) -> None:
        ListAverage.store(self.ema, self.averaged())
        self.ema.copy_to(self.net if self.kind.endswith("buffers") else self.averaged())

    def on_validation_epoch_start(self) -> None:
        if self.kind != "scope":
            self.put_in()

    def on_validation_epoch_end(self) -> None:
        if self.kind != "scope":
            ListAverage.restore(self.ema, self.averaged())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.kind.endswith("buffers"):
            checkpoint["ema"] = {"shadow_params": self.ema.shadow_params}
        else:
            checkpoint["ema"] = {name: x.clone() for name, x in self.ema.state_dict().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.kind == "late":
            self.loaded = checkpoint["ema"]["shadow_params"]
        elif not self.kind.endswith("buffers"):
            self.ema.shadow_params = checkpoint["ema"]["shadow_params"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 11, (16, 5), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(ids, batch_size=4)

    val_dataloader = train_dataloader


KINDS: dict[str, Any] = {
    "list": ListAverage,
    "data": DataAverage,
    "new": NewAverage,
    "blocks": ListAverage,
    "turned": ListAverage,
}
KINDS |= {"anchor": ListAverage, "scope": ListAverage, "returns": ListAverage, "outside": ListAverage}


class StateAverage(Callback):
    """What is often copied from one callback to the next: a dict like the module's state dict."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = {name: x.detach().clone() for name, x in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, x in pl_module.state_dict().items():
            self.average[name].copy_(self.average[name] * DECAY + x * (1 - DECAY))

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


class Elsewhere(Lit):
    """Its average of the blocks, whose shapes repeat, is updated in other hooks; and in one of a callback.

    Args:
        hook: which.
    """

    def __init__(self, hook: str) -> None:
        super().__init__("blocks")
        called: Any = getattr(self, hook)

        def update(*args: Any, **kwargs: Any) -> Any:
            result = called(*args, **kwargs)
            self.ema.update(self.averaged())
            return result

        setattr(self, hook, update)

    def on_train_batch_end(self, *args: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class AfterSanity(Callback):
    """Which looks at the average before training."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.ema.update(pl_module.averaged())


def fit_elsewhere(rank: int, world_size: int, hook: str, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"plan": PLAN if "tp" in layout else None, "summary": False, **layout})
    torch.manual_seed(0)
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "precision": "64-true", "accelerator": "cpu"}
    trainer = Trainer(devices=world_size, strategy=strategy, callbacks=[AfterSanity()], **options)
    trainer.fit(Elsewhere(hook))
    trainer.save_checkpoint(Path(folder, "saved.ckpt"))
    return torch.load(Path(folder, "saved.ckpt"), weights_only=False)


class Normalizes(Lit):
    """Works on copies of its weights while it validates."""

    def on_validation_epoch_start(self) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        head = self.net["head"].weight.clone()  # type: ignore[union-attr, operator]
        head.div_(head.norm(dim=1, keepdim=True))
        head[0] = 0
        up = self.net["blocks"][0][1].weight.detach().clone()  # type: ignore[index]
        up -= up.mean(0)
        self.log("val", self.loss(ids) + head.sum() + up.abs().sum())


class Loads(Lit):
    """Loads an average, kept as a state dict, when the first batch is validated, and what was there in a hook."""

    def __init__(self) -> None:
        super().__init__("list")
        self.kept: dict[str, Tensor] | None = None

    def on_fit_start(self) -> None:
        self.average = {name: x.detach().clone() for name, x in self.net.state_dict().items()}

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for name, x in self.net.state_dict().items():
            self.average[name].lerp_(x, 0.1)

    def on_validation_epoch_start(self) -> None:
        pass

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        if self.kept is None:
            self.kept = {name: x.detach().clone() for name, x in self.net.state_dict().items()}
            self.net.load_state_dict(self.average)
        self.log("val", self.loss(ids))

    def on_validation_epoch_end(self) -> None:
        assert self.kept is not None
        self.net.load_state_dict(self.kept)
        self.kept = None


class Factors(LightningModule):
    """Of users and films, of which the first few have data: some ranks' rows never change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"users": nn.Embedding(8, 4), "films": nn.Embedding(8, 4)})
        self.ema = DataAverage(self.net.parameters())
        self.state = nn.Module()
        for name, p in self.net.named_parameters():
            self.state.register_buffer(name.replace(".", ""), p.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        users, films = self.net["users"](batch[0]), self.net["films"](batch[1])
        return ((users * films).sum(-1) - 1).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        for s, buffer, p in zip(self.ema.shadow_params, self.state.buffers(), self.net.parameters(), strict=True):
            s.data.add_(p.data - s.data, alpha=1 - DECAY)
            buffer.data.copy_(s.data)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = self.ema.shadow_params

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows = torch.utils.data.TensorDataset(torch.arange(8) % 3, torch.arange(8) % 4)
        return torch.utils.data.DataLoader(rows, batch_size=4)


def fit_factors(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> dict[str, Any]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(plan={"net.*": "vocab"}, summary=False, **layout)
    torch.manual_seed(0)
    path = Path(folder, "saved.ckpt")
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "precision": "64-true", "accelerator": "cpu"}
    trainer = Trainer(devices=world_size, strategy=strategy, **options)
    trainer.fit(Factors())
    trainer.save_checkpoint(path)
    return torch.load(path, weights_only=False)


def fit(
    rank: int,
    world_size: int,
    kind: str,
    layout: dict[str, Any],
    folder: str,
    resumes: bool,
    module: Lit | None = None,
) -> tuple[list[float], float]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"plan": PLAN if "tp" in layout else None, "summary": False, **layout})
    torch.manual_seed(rank)  # all ranks get rank 0's weights, and so its averages
    path = Path(folder, "saved.ckpt")
    module = Lit("list" if kind == "callback" else kind) if module is None else module
    options: dict[str, Any] = {**QUIET, "num_sanity_val_steps": 0, "max_epochs": 1 + resumes}
    callbacks = [StateAverage()] if kind == "callback" else []
    options |= {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, "callbacks": callbacks}
    trainer = Trainer(devices=world_size, strategy=strategy, **options)
    trainer.fit(module, ckpt_path=path if resumes else None)
    trainer.save_checkpoint(Path(folder, "again.ckpt") if resumes else path)
    return module.losses, float(trainer.callback_metrics["val"])


def fit_twice(rank: int, world_size: int, kind: str, layout: dict[str, Any], folder: str) -> tuple[list[float], float]:
    torch.manual_seed(rank)
    module = Lit(kind)
    fit(rank, world_size, kind, layout, folder, False, module)
    module.losses.clear()
    return fit(rank, world_size, kind, layout, folder, True, module)


@functools.cache
def fit_one(kind: str, runs: str = "one") -> tuple[list[float], float, dict[str, Any]]:
    """What one device makes of it: in one run, resumed in another, or in another with the same module."""
    with tempfile.TemporaryDirectory() as folder:
        if runs == "same module":
            losses, val = fit_twice(0, 1, kind, {}, folder)
        else:
            losses, val = fit(0, 1, kind, {}, folder, False)
        if runs == "resumed":
            losses, val = fit(0, 1, kind, {}, folder, True)
        return (
            losses,
            val,
            torch.load(Path(folder, "saved.ckpt" if runs == "one" else "again.ckpt"), weights_only=False),
        )


def ranks_of(layout: str) -> int:
    return 4 if "2-" in layout else 2


def content(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What of a checkpoint is about weights and their averages."""
    callbacks = {name: state for name, state in checkpoint["callbacks"].items() if name == "StateAverage"}
    return {"weights": checkpoint["state_dict"], "ema": checkpoint.get("ema"), **callbacks}


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{at}.{i}")
    else:
        assert found is expected is None or torch.allclose(found, expected, rtol=1e-9, atol=1e-12), at


CASES = [
    *crossed(["list", "buffers"], ["tp2", "pp2", "tp2-pp2", "zero3", "tp2-zero1"]),
    *crossed(["callback", "data"], ["tp2", "zero3"]),
    *crossed(["late-buffers"], ["tp2", "pp2-dp2-zero1", "tp2-pp2", "tp2-zero1"]),
    *(("new", "tp2-pp2"), ("blocks", "pp2"), ("turned", "pp2"), ("late", "tp2-pp2"), ("late", "tp2-zero1")),
    *(("callback", "pp2"), ("scope", "tp2"), ("outside", "tp2")),
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_averages_are_those_of_one_device(kind: str, layout: str, tmp_path: Path) -> None:
    losses, val, saved = run_reference(fit_one, kind)
    for found, found_val in run_ranks(ranks_of(layout), fit, kind, LAYOUTS[layout], str(tmp_path), False):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)
    assert_same(*map(content, (torch.load(tmp_path / "saved.ckpt", weights_only=False), saved)))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *crossed(["list", "buffers"], ["tp2", "tp2-pp2-folder"]),
        *(("list", "zero3"), ("late", "tp2-pp2"), pytest.param("late", "tp2", marks=pytest.mark.extended)),
    ],
)
def test_a_run_is_resumed_with_its_averages(kind: str, layout: str, tmp_path: Path) -> None:
    losses, val, saved = run_reference(fit_one, kind, "resumed")
    run_ranks(ranks_of(layout), fit, kind, LAYOUTS[layout], str(tmp_path), False)
    for found, found_val in run_ranks(ranks_of(layout), fit, kind, LAYOUTS[layout], str(tmp_path), True):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)
    if not layout.endswith("folder"):
        assert_same(*map(content, (torch.load(tmp_path / "again.ckpt", weights_only=False), saved)))


@pytest.mark.parametrize(
    ("kind", "layout"), [("list", "tp2-pp2"), ("list", "zero3"), ("buffers", "tp2"), ("buffers", "zero3")]
)
def test_a_checkpoint_is_loaded_where_only_parts_are_left(kind: str, layout: str, tmp_path: Path) -> None:
    losses, val, saved = run_reference(fit_one, kind, "same module")
    for found, found_val in run_ranks(ranks_of(layout), fit_twice, kind, LAYOUTS[layout], str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)
    assert_same(*map(content, (torch.load(tmp_path / "again.ckpt", weights_only=False), saved)))


class SwappedAverage(StateAverage):
    """One that takes the weights' place in validation, and comes back with a checkpoint."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = {name: x.clone() for name, x in pl_module.state_dict().items()}
        self.put(pl_module, self.average)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.put(pl_module, self.before)

    def put(self, module: LightningModule, values: dict[str, Tensor]) -> None:
        for name, x in module.state_dict().items():
            x.copy_(values[name])


def validate_after(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> tuple[float, float]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"plan": PLAN if "tp" in layout else None, "summary": False, **layout})
    torch.manual_seed(rank)
    module, path = Lit("list"), Path(folder, "saved.ckpt")
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, callbacks=[SwappedAverage()], max_epochs=1, **options)
    module.on_validation_epoch_start = module.on_validation_epoch_end = lambda: None  # type: ignore[method-assign]
    trainer.fit(module)
    fitted = float(trainer.callback_metrics["val"])
    trainer.save_checkpoint(path)
    trainer.validate(module, ckpt_path=path, verbose=False)
    return fitted, float(trainer.callback_metrics["val"])


def validate_one() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        return validate_after(0, 1, {}, folder)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_an_average_is_given_back_to_a_module_in_parts(layout: str, tmp_path: Path) -> None:
    """By a callback that made it of parts, after the module was split."""
    expected = run_reference(validate_one)
    for found in run_ranks(
        2, validate_after, {**LAYOUTS[layout], "plan": PLAN if "tp" in layout else None}, str(tmp_path)
    ):
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_steps_find_whole_tensors_that_no_hook_changes(layout: str, tmp_path: Path) -> None:
    losses, val, _ = run_reference(fit_one, "anchor")
    for found, found_val in run_ranks(2, fit, "anchor", {**LAYOUTS[layout], "plan": None}, str(tmp_path), False):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)


def test_an_average_that_one_stage_alone_would_update(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="`on_train_batch_end` changes parameters, or an average of them"):
        run_ranks(2, fit, "returns", LAYOUTS["pp2"], str(tmp_path), False)


def test_parts_of_some_ranks_may_be_unchanged(tmp_path: Path) -> None:
    expected = run_reference(fit_factors, 0, 1, {}, str(tmp_path))
    found = run_ranks(2, fit_factors, LAYOUTS["tp2"], str(tmp_path))[0]
    assert_same(found["ema"], expected["ema"])
    assert_same(found["state_dict"], expected["state_dict"])


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
@pytest.mark.parametrize(
    "hook",
    ["on_after_backward", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"],
)
def test_hooks_of_the_optimization_find_parts(hook: str, layout: str, tmp_path: Path) -> None:
    expected = run_reference(fit_elsewhere, 0, 1, hook, {}, str(tmp_path))
    found = run_ranks(2, fit_elsewhere, hook, LAYOUTS[layout], str(tmp_path))[0]
    assert_same(found["ema"], expected["ema"])
    assert_same(found["state_dict"], expected["state_dict"])


IN_STEPS: dict[str, Any] = {"changes copies": lambda: Normalizes("list"), "loads": Loads}


def fit_in_steps(rank: int, world_size: int, habit: str, layout: dict[str, Any], folder: str) -> Any:
    torch.manual_seed(0)
    return fit(rank, world_size, "list", layout, folder, False, IN_STEPS[habit]())


@pytest.mark.parametrize("habit", IN_STEPS)
def test_what_validation_steps_do_with_weights(habit: str, tmp_path: Path) -> None:
    """They change copies of them; they load an average, and a hook what was there before."""
    losses, val = run_reference(fit_in_steps, 0, 1, habit, {}, str(tmp_path))
    for found, found_val in run_ranks(2, fit_in_steps, habit, LAYOUTS["tp2"], str(tmp_path)):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)
