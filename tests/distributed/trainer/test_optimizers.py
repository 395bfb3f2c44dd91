"""Element-wise optimizers train shards as they train whole parameters; others are given whole ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import crossed
from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    make_trainer,
    run_program,
    shared_directory,
    train_loader,
)
from tests.parity.variants import variant
from tests.ranks import RankError


class Lamb(Optimizer):
    """A tiny LAMB: the step is scaled by the norm of the parameter (You et al. 2019)."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / (p.grad.norm() + 1e-6) * p.grad)
        return loss


ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}
COUPLED: dict[str, Callable[[Any], Optimizer]] = {
    "Lamb": Lamb,
    # Keys' biases have no gradient but rounding, which eps=None would scale up to full updates.
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, eps=(1e-8, 1e-3)),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
}


def _fit(layout: Layout, kind: str) -> dict[str, Tensor]:
    module = variant("untied").build()
    make = (ELEMENTWISE | COUPLED | {"LBFGS": torch.optim.LBFGS})[kind]
    module.configure_optimizers = lambda: make(list(module.parameters()))  # type: ignore[method-assign]
    trainer = make_trainer(layout)
    trainer.fit(module, train_loader(layout, 4))
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_an_elementwise_optimizer_steps_shards_like_whole_parameters(kind: str) -> None:
    expected, found = (run_program(layout, _fit, kind)[0] for layout in (PLAIN, TP2))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def _rates_by_size(layout: Layout) -> list[tuple[str, float, float]]:
    """The rate of each parameter by its width, as with muP, and its decay by its share of the model, and none where it
    is a vector."""
    module = variant("untied").build()
    module.register_parameter("gain", torch.nn.Parameter(torch.ones(1, 1, 8)))

    def configure() -> Optimizer:
        total = sum(p.numel() for p in module.parameters())
        groups = [
            {
                "params": [p],
                "name": name,
                "lr": 0.1 / p.shape[-1],
                "weight_decay": len(p) * p.size(0) * p.numel() / total if len(p.squeeze().shape) > 1 else 0.0,
            }
            for name, p in module.named_parameters()
        ]
        return torch.optim.AdamW(groups)

    module.configure_optimizers = configure  # type: ignore[method-assign]
    trainer = make_trainer(layout)
    trainer.fit(module, train_loader(layout, 1))
    own = trainer.optimizers[0].param_groups
    return sorted((group["name"], group["lr"], group["weight_decay"]) for group in own)


@pytest.mark.parametrize("layout", [TP2, Layout(tp=2, dp=2, zero=3), Layout(tp=2, pp=2)], ids=str)
def test_sizes_are_those_of_whole_parameters(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _rates_by_size)
    for found in run_program(layout, _rates_by_size):
        assert found == expected


def _fit_states(layout: Layout, made: str, root: str) -> dict[str, Any]:
    """A checkpoint after some steps of an optimizer that has its states from the start: a sum that begins at 0.5."""
    module = variant("untied").build().double()

    def make() -> Optimizer:
        optimizer = torch.optim.Adagrad(list(module.parameters()), lr=1e-2, initial_accumulator_value=0.5)
        for p in optimizer.param_groups[0]["params"] if made == "by shape" else ():
            optimizer.state[p]["sum"] = torch.full(p.shape, 0.25, dtype=p.dtype)
        return optimizer

    optimizer = make() if made == "before the split" else None
    module.configure_optimizers = lambda: optimizer or make()  # type: ignore[method-assign]
    trainer = make_trainer(layout)
    trainer.fit(module, train_loader(layout, 4))
    path = shared_directory(layout, made, root) / "saved"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    return {"weights": saved["state_dict"], "states": saved["optimizer_states"][0]["state"]}


@pytest.mark.parametrize(
    ("made", "layout"),
    crossed(["as usual", "by shape", "before the split"], [TP2, PP2, Layout(dp=2, zero=1), Layout(tp=2, dp=2, zero=3)]),
    ids=str,
)
def test_an_optimizer_that_makes_its_states_at_once(made: str, layout: Layout, tmp_path: Path) -> None:
    expected, found = (run_program(each, _fit_states, made, str(tmp_path))[0] for each in (PLAIN, layout))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


WHOLE_STEPS = [
    TP2,
    TP2_PP2,
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2, zero=1),
    Layout(dp=4, zero=3),
    Layout(tp=2, dp=2, zero=3),
    Layout(dp=2, pp=2, zero=2),
]


@pytest.mark.parametrize(("kind", "layout"), crossed(list(COUPLED), WHOLE_STEPS), ids=str)
def test_a_coupled_optimizer_steps_whole_tensors(kind: str, layout: Layout) -> None:
    expected, found = (run_program(each, _fit, kind)[0] for each in (PLAIN, layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def _resume(layout: Layout, kind: str, root: str, form: str) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """Two epochs, of which the second goes on from a checkpoint, with parameters in many turns: the optimizer's states
    in the last checkpoint, the parameters, and what hooks and schedulers have seen."""
    if not layout.plain:
        from lightning_megatp.optimizers import whole_steps

        whole_steps.TURN_BYTES = 5000
    path, seen = shared_directory(layout, form, root) / "saved", list[str]()
    for epochs in (1, 2):
        module = variant("untied").build().double()  # else one device rounds what it loads to float32

        def configure(module: Any = module) -> Any:
            optimizer = (ELEMENTWISE | COUPLED)[kind](list(module.parameters()))
            optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(f"after {len(optimizer.param_groups)}"))
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 8)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        module.configure_optimizers = configure
        trainer = make_trainer(layout, max_epochs=epochs, strategy={"checkpoint": form}, gradient_clip_val=0.1)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Detected call of")
            warnings.filterwarnings("error", "Seems like")
            trainer.fit(module, train_loader(layout, 4), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
    trainer.strategy.checkpoint = "file"  # type: ignore[attr-defined]
    trainer.save_checkpoint(path.with_name("last"))
    saved = torch.load(path.with_name("last"), weights_only=False)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return saved["optimizer_states"][0]["state"], saved["state_dict"], (seen, rate)


RESUMED = [(layout, form) for layout in (TP2, TP2_PP2, Layout(tp=2, dp=2, zero=3)) for form in ("file", "folder")]


@pytest.mark.parametrize(("kind", "where"), crossed(list(COUPLED), RESUMED), ids=str)
def test_a_coupled_optimizer_goes_on_from_a_checkpoint(kind: str, where: tuple[Layout, str], tmp_path: Path) -> None:
    layout, form = where
    (expected, *_), (found, *_) = (run_program(each, _resume, kind, str(tmp_path), form) for each in (PLAIN, layout))
    assert found[2] == expected[2], "hooks are called once a step, and see all groups"
    torch.testing.assert_close(found[1], expected[1], atol=1e-9, rtol=0)
    torch.testing.assert_close(found[0], expected[0], atol=1e-9, rtol=0)


class Unfreezes(Callback):
    """Gives an optimizer more parameters in the second epoch."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            known = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
            added = [p for p in pl_module.parameters() if p.dim() == 2 and id(p) not in known]
            trainer.optimizers[0].add_param_group({"params": added, "lr": 0.1})


def _unfreeze(layout: Layout) -> dict[str, Tensor]:
    module = variant("untied").build()
    module.configure_optimizers = lambda: Lamb([p for p in module.parameters() if p.dim() == 1])  # type: ignore[method-assign]
    trainer = make_trainer(layout, max_epochs=2, callbacks=[Unfreezes()])
    trainer.fit(module, train_loader(layout, 3))
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("layout", [TP2, Layout(dp=2, zero=2)], ids=str)
def test_a_coupled_optimizer_steps_whole_what_it_is_given_later(layout: Layout) -> None:
    expected, found = (run_program(each, _unfreeze)[0] for each in (PLAIN, layout))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("layout", [TP2, Layout(dp=2, zero=1)], ids=str)
def test_an_optimizer_that_couples_tensors_is_refused(layout: Layout) -> None:
    with pytest.raises(RankError, match=r"LBFGS is not element-wise.* does not step each tensor by itself") as error:
        run_program(layout, _fit, "LBFGS")
    assert len(error.value.failures) == 2, "every rank says so"


def _search(layout: Layout) -> dict[str, Tensor]:
    """Each data-parallel rank's loss leads along another line."""
    module = variant("untied").build()
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), **options)  # type: ignore[method-assign]
    trainer = make_trainer(layout)
    trainer.fit(module, train_loader(layout, 3))
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def test_a_search_along_a_line_goes_by_the_loss_of_all_data_parallel_ranks() -> None:
    expected, found = (run_program(layout, _search)[0] for layout in (PLAIN, Layout(dp=2)))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", COUPLED)
def test_a_coupled_optimizer_may_train_whole_parameters(kind: str) -> None:
    expected, found = (run_program(layout, _fit, kind)[0] for layout in (PLAIN, Layout()))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0)


def _fit_without(layout: Layout, root: str, checkpoint: str) -> tuple[int, list[dict[str, Tensor]]]:
    """Fit without an optimizer, and go on from the checkpoint: how many epochs in all, and the files' parameters."""
    path, epochs, states = shared_directory(layout, checkpoint, root) / "saved", 0, []
    for resume in (None, path):
        module = variant("untied").build()
        module.configure_optimizers = lambda: None  # type: ignore[assignment, method-assign, return-value]
        trainer = make_trainer(layout, max_epochs=epochs + 1, strategy={"checkpoint": checkpoint})
        trainer.fit(module, train_loader(layout, 2), ckpt_path=resume)
        trainer.save_checkpoint(path)
        states += [torch.load(path)["state_dict"]] if checkpoint == "file" else []
        epochs = trainer.current_epoch
    return epochs, states


@pytest.mark.parametrize("checkpoint", ["file", "folder"])
@pytest.mark.parametrize("layout", [TP2, PP2, Layout(dp=2, zero=3)], ids=str)
def test_no_optimizer_steps_nothing(layout: Layout, checkpoint: str, tmp_path: Path) -> None:
    epochs, states = run_program(layout, _fit_without, str(tmp_path), checkpoint)[0]
    assert epochs == 2
    expected = variant("untied").build().state_dict()
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name].double(), atol=0, rtol=0)


class AveragesLater(LightningModule):
    """A teacher that its step averages from the second batch on, which set-up's look at a step does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
        for average, parameter in pairs if batch_idx > 0 else ():
            if batch_idx == 1:
                average.data.copy_(parameter.data)
            average.data.lerp_(parameter.data, 0.3)
            average.data.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        y = self.student(batch[0])
        loss = (y - self.teacher(batch[0])).square().mean() + (y - 1).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.student.parameters(), lr=0.1)


class PutsBack(AveragesLater):
    """Its step goes half the way back to copies that an earlier one has made, also of a weight that was used outside of
    its layer in between, and is whole since then."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            if batch_idx == 0:
                self.kept = [p.clone() for p in self.student.parameters()]
            for p, kept in zip(self.student.parameters(), self.kept, strict=True) if batch_idx > 1 else ():
                p.lerp_(kept, 0.5)
        loss = (self.student(batch[0]) - 1).square().mean()
        if batch_idx == 1:
            loss = loss + self.student[0].weight.norm()
        self.losses.append(float(loss))
        return loss


def _averages(layout: Layout, kind: type[AveragesLater]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    module = kind()
    columns = {f"{name}.{i}": "column_gather" for name in ("student", "teacher") for i in (0, 2)}
    trainer = make_trainer(layout, strategy={"plan": columns})
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 6, dtype=torch.float64)), batch_size=4))
    assert layout.plain or len(trainer.strategy.parallel.sharded) == (7 if kind is PutsBack else 8)
    return module.losses, {name: x.clone() for name, x in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("kind", [AveragesLater, PutsBack])
def test_a_step_averages_split_weights(kind: type[AveragesLater]) -> None:
    losses, state = run_program(PLAIN, _averages, kind)[0]
    ranks = run_program(TP2, _averages, kind)
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-12)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, state[name], rtol=1e-12, atol=1e-12)
