"""What people's modules do with parameters and gradients has the same end, whether zero divides them or not."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.ranks import RankError

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Or ranks may not use other parameters than each other with zero > 0: in torch 2.13, not in 2.11."""


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) + 0.1 * self.b(x)


class Plain(LightningModule):
    accumulate, epochs = 1, 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks, self.head = nn.ModuleList(Unit() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return self(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Appending(Unit):
    def forward(self, x: Tensor, losses: list[Tensor] | None = None) -> Tensor:
        x = super().forward(x)
        assert losses is not None
        losses.append(0.1 * x.abs().mean())
        return x


class ChangesAList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appending() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            batch = block(batch, losses)
        return self.head(batch).square().mean() + sum(losses)


class Implicit(Unit):
    """A fixed point, whose gradient is another fixed point (deep equilibrium models)."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z = torch.tanh(0.3 * self.a(z) + self.b(x))
        z = torch.tanh(0.3 * self.a(z) + self.b(x))
        start = z.detach().requires_grad_()
        again = torch.tanh(0.3 * self.a(start) + self.b(x))

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(20):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return z


class SolvesInAHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Implicit() for _ in range(3))


class Tangents(Plain):
    """Differentiates blocks forward; the loss has the tangents alone."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with forward_ad.dual_level():
            x = forward_ad.make_dual(batch, batch.cos())
            for block in self.blocks:
                x = block(x)
            speed = forward_ad.unpack_dual(x).tangent
        return self.head(speed).square().mean()


class FunctionalTangents(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.func.jvp(self, (batch,), (batch.cos(),))[1].square().mean()


class Branching(Unit):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


class BranchesByData(Plain):
    """Data-parallel ranks use other parameters, and one is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Branching(), Unit()])
        self.blocks[1].unused = nn.Parameter(torch.ones(4, 8))  # type: ignore[union-attr]


class ClearsByModule(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()


class ClearsInManual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.zero_grad()
        self.manual_backward(self(batch).square().mean())
        self.optimizers().step()  # type: ignore[union-attr]


class Toggles(Plain):
    """Adversaries, each frozen while the other is trained: the blocks' loss leaves the head no gradient. What is frozen
    besides stays so, and what is thawed later is trained."""

    automatic_optimization, clears_late = False, True

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks[1].a.bias.requires_grad_(batch_idx > 3)  # type: ignore[union-attr]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):  # type: ignore[arg-type]
            with self.toggled_optimizer(optimizer):
                loss = sign * self(batch).square().mean()
                if not self.clears_late:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                if self.clears_late:
                    optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.blocks, self.head)]


class TogglesWithOldGradients(Toggles):
    """What is frozen has the gradient of its own last step."""

    clears_late = False


class ScalesInManual(ClearsInManual):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class ReplacesGradients(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad = None if name == "head.bias" else parameter.grad.sign()


class ProbesBeforeTheStep(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.blocks[0](torch.ones(2, 8, dtype=self.dtype))


class PenalisesGradients(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        loss = self(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class FollowsGradients(Plain):
    """The units are called again on what is differentiated again: energies of forces."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        loss = self(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + self(gradient).square().mean()


class FollowsInManual(FollowsGradients):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]


class PenalisesACritic(Plain):
    """WGAN-GP: called once more after the penalty, which doesn't depend on what the last unit returned for it, but on
    its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return gradient.norm(2, dim=1).sub(1).square().mean() + self(batch).mean()


class PenalisesInManual(PenalisesACritic):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]


class PenalisesAndAccumulates(PenalisesACritic):
    accumulate = 2


class WeighsByGradients(Plain):
    """Of a unit's weight, which it asks for between the unit's calls (VQGAN, GradNorm)."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        y = self(batch)
        losses = [y.square().mean(), y.abs().mean()]
        weight = self.blocks[-1].a.weight
        norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in losses]  # type: ignore[arg-type]
        return losses[0] + losses[1] * (norms[0] / (norms[1] + 1e-4)).detach()


class PenalisesBesideUnused(PenalisesGradients):
    """The step's own gradients are none of a parameter that nothing uses: it doesn't decay."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)


class NamesGroups(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.rate = 1e-3  # type: ignore[assignment]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": getattr(p, "rate", 1e-2)} for p in self.parameters()]
        return torch.optim.AdamW(groups)


class Thaws(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks[0].requires_grad_(batch_idx > 1)


class Attacks(Plain):
    """A forward and a backward to the input while the model is frozen, then the step (adversarial examples, samples of
    an energy model)."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        self.requires_grad_(False)
        self(x).square().mean().backward()
        self.requires_grad_(True)
        assert x.grad is not None
        return self((x + x.grad.sign()).detach()).square().mean()


class FreezesInTheStep(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.blocks[1].requires_grad_(batch_idx % 2 == 0)
        if batch_idx == 3:
            self.head.requires_grad_(False)
        return self(batch).square().mean()


class EndsEpochsEarly(Plain):
    """Between two accumulated batches: what the first has left is not stepped."""

    accumulate, epochs = 2, 2

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


class AveragesInEveryBatch(Plain):
    """Also where optimizers don't step."""

    accumulate = 2

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.ModuleList(Unit() for _ in range(3)).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        wanted = batch
        for block in self.average:
            wanted = block(wanted)
        return (self(batch) - wanted).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        for mine, theirs in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)


class AveragesByAssigning(AveragesInEveryBatch):
    """A new tensor in the place of `.data`; also that of a trained parameter, in other hooks."""

    accumulate = 1

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        for mine, theirs in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            mine.data = 0.5 * mine.data + 0.5 * theirs.data

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.head.weight.data = self.head.weight.data.clamp(-0.1, 0.1)


class TrainsTheHeadAlone(Plain):
    """Backwards that come to some parameters only, before the step is over."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        blocks, head = self.optimizers()  # type: ignore[misc]
        for inputs, optimizer in (
            ([self.head.weight], head),
            ([self.blocks[0].a.bias, self.blocks[2].b.weight], blocks),  # type: ignore[union-attr, list-item]
        ):
            self.manual_backward(self(batch).square().mean(), inputs=inputs)
            optimizer.step()
            optimizer.zero_grad()
        self.manual_backward(self.head(batch).square().mean())
        head.step()
        head.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.blocks, self.head)]


class ChangesUnderVmap(Plain):
    """In place, in a function that torch.func maps over samples: what it gets has no memory to ask for."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.vmap(self._of_sample)(self(batch)).mean()

    def _of_sample(self, x: Tensor) -> Tensor:
        doubled = 2 * x
        doubled += 1
        return doubled.square().sum()


class AveragesBeforeClearing(Plain):
    """Between a step's forward and its backward; the copy is in no step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.blocks).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for average, parameter in zip(self.average.parameters(), self.blocks.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.3)


class BackwardInTheStep(Plain):
    """Of a part of its loss, which Lightning then clears; in the second of two batches that are accumulated, not."""

    accumulate = 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self(batch.tanh()).square().mean().backward()
        return self(batch).square().mean()


class ClearedBackwardInTheStep(BackwardInTheStep):
    accumulate = 1


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimization, which sets weights to other tensors and asks for the gradients there, too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        held = {p: p.data.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}
        for p in held:
            p.data = p.data + 0.05 * p.grad  # type: ignore[operator]
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, before in held.items():
            p.data = before - 0.1 * p.grad  # type: ignore[operator]
        return loss


class SetsGradients(Plain):
    """By `.data`."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.data = 0.5 * parameter.grad.data.clamp(-1e-2, 1e-2)


class SetsWhatIsThere(Plain):
    """As pytorch_metric_learning's losses do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.head.weight.data = self.head.weight.data.to(batch.device)
        return super().training_step(batch, batch_idx)


class StepsBySetting(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Sharp(self.parameters())


class CallsWithOthers(Plain):
    """Compares a block with what it makes with other weights, before its own call and after it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        others = {name: torch.full_like(x, 0.1 + batch_idx / 9) for name, x in Unit().double().state_dict().items()}
        wanted: list[Any] = []

        def note() -> None:
            with torch.no_grad():
                wanted.append(functional_call(self.blocks[0], others, (batch,)))

        if batch_idx != 1:
            note()
        loss = self(batch).square().mean()
        if batch_idx != 2:
            note()
        return loss + sum((self.blocks[0](batch) - y).square().mean() for y in wanted)


class CallsWithSomeOthers(Plain):
    """The rest of a block's weights are its own, and are trained."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        others = {"a.weight": torch.full((8, 8), 0.1 + batch_idx / 9, dtype=torch.float64)}
        first = functional_call(self.blocks[0], others, (batch,)) if batch_idx != 1 else batch
        loss = (self(batch) - first).square().mean()
        return loss + functional_call(self.blocks[0], others, (batch,)).mean() if batch_idx != 2 else loss


class CallsWithTrained(Plain):
    """Weights that a block is called with are parameters of the model's, and a hypernetwork's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(8, 64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = {"a.weight": self.scale(batch.mean(0)).view(8, 8), "b.bias": self.head.bias * 2}
        return (self(batch) - functional_call(self.blocks[1], made, (batch,))).square().mean()


class DampsStates(Plain):
    """Looks for an optimizer's states by the module's parameters, and begins some anew."""

    epochs = 3

    def on_train_batch_end(self, *args: Any) -> None:
        states = self.trainer.optimizers[0].state
        for parameter in self.parameters():
            assert parameter in states and states.get(parameter) is states[parameter]
            states[parameter]["exp_avg"].mul_(0.5)

    def on_train_epoch_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        if self.current_epoch == 1:
            optimizer.state[self.head.weight] = {}
            optimizer.state.pop(self.head.bias)
        if self.current_epoch == 2:
            matrices = [p for p in self.parameters() if p.dim() > 1]
            optimizer.state = defaultdict(dict, {p: optimizer.state[p] for p in matrices})


HABITS: list[type[Plain]] = [
    Plain, ChangesAList, *([BranchesByData] if REDUCES_UNUSED else []), ClearsByModule, ClearsInManual, ScalesInManual,
    ReplacesGradients, ProbesBeforeTheStep, PenalisesGradients, PenalisesBesideUnused, FollowsGradients,
    FollowsInManual, NamesGroups, Thaws, EndsEpochsEarly, AveragesInEveryBatch, AveragesByAssigning,
    TrainsTheHeadAlone, ChangesUnderVmap, StepsBySetting, SetsGradients, SetsWhatIsThere,
    AveragesBeforeClearing, Toggles, TogglesWithOldGradients, BackwardInTheStep, ClearedBackwardInTheStep, Attacks,
    FreezesInTheStep, CallsWithOthers, CallsWithSomeOthers, CallsWithTrained, PenalisesACritic, PenalisesInManual,
    PenalisesAndAccumulates, WeighsByGradients, DampsStates, SolvesInAHook, Tangents, FunctionalTangents,
]  # fmt: skip


def _data(rows: int = 16) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _habits(layout: Layout, habits: list[type[Any]]) -> dict[str, dict[str, Tensor]]:
    found = {}
    for habit in habits:
        module = habit()
        options = {"accumulate_grad_batches": habit.accumulate, "max_epochs": habit.epochs}
        trainer = make_trainer(layout, "untied", {"plan": None}, **options)
        trainer.fit(module, DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]
        found[habit.__name__] = trainer.strategy.lightning_module_state_dict()
    return found


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("part", range(3))
def test_habits(part: int, zero: int) -> None:
    habits = HABITS[part::3]  # a call has two minutes
    expected = run_program(Layout(dp=2), _habits, habits)[0]
    found = run_program(Layout(dp=2, zero=zero), _habits, habits)[0]
    for habit, state in expected.items():
        for name, value in state.items():
            torch.testing.assert_close(found[habit][name], value, atol=1e-9, rtol=0, msg=f"zero={zero} {habit} {name}")


class LoadsInTheStep(Plain):
    """A DQN's target network."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        wanted = batch
        for block in self.target:
            wanted = block(wanted)
        loss = (self(batch) - wanted).square().mean()
        if batch_idx % 2:
            self.target.load_state_dict(self.blocks.state_dict())
        return loss


def _loaded(layout: Layout) -> dict[str, Tensor]:
    trainer = make_trainer(layout, "untied", {"plan": "auto"})
    trainer.fit(LoadsInTheStep(), DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


LOADED = [
    Layout(tp=2, dp=2, zero=3),
    pytest.param(Layout(tp=2, dp=2, zero=1), marks=pytest.mark.extended),
    pytest.param(Layout(dp=2, zero=3), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("layout", LOADED, ids=str)
def test_a_step_loads_the_state_of_divided_modules(layout: Layout) -> None:
    expected, found = (run_program(where, _loaded)[0] for where in (Layout(dp=2), layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class UnitsInARegion(Plain):
    """Each layer is gathered by itself, some of them between a column and its row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 14), nn.ReLU(), nn.Linear(14, 13), nn.ReLU(), nn.Linear(13, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.net(x))


def _units_in_a_region(layout: Layout) -> tuple[dict[str, Tensor], int]:
    module, trainer = UnitsInARegion(), make_trainer(layout, "untied", {"plan": "auto"})
    trainer.fit(module, DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]
    return trainer.strategy.lightning_module_state_dict(), module.net[0].weight.shape[0]


@pytest.mark.parametrize("zero", [1, 3])
def test_layers_of_a_region_that_are_gathered_one_by_one(zero: int) -> None:
    expected, _ = run_program(Layout(dp=2), _units_in_a_region)[0]
    found, rows = run_program(Layout(tp=2, dp=2, zero=zero), _units_in_a_region)[0]
    assert rows == 7, "a tensor rank's"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class WeighsUnseen(Toggles):
    """Weights beside their layers, in a step that can't be looked at before training: it takes numbers."""

    alone = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch).detach().numpy()  # without data it can't be looked at further
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            with self.toggled_optimizer(optimizer):
                penalty = self.blocks[0].a.weight.square().sum() + self.head.weight.square().sum()  # type: ignore[operator, union-attr]
                self.manual_backward(penalty if self.alone else self(batch).square().mean() + penalty)


class WeighsUnseenAlone(WeighsUnseen):
    alone = True


def _weighed(layout: Layout, module: type[Plain]) -> None:
    make_trainer(layout, "untied", {"plan": None}).fit(module(), DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [WeighsUnseen, WeighsUnseenAlone])
def test_weights_beside_their_layers_that_were_not_seen(module: type[Plain]) -> None:
    with pytest.raises(
        RankError, match="uses a parameter that zero=3 has divided outside of the forward of its module"
    ):
        run_program(Layout(dp=2, zero=3), _weighed, module)


class FreezesInWindow(Plain):
    """Between two accumulated batches: what the first has left is stepped all the same."""

    accumulate = 2

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.blocks.requires_grad_(batch_idx % 4 != 1)


def _frozen_in_window(layout: Layout) -> dict[str, Tensor]:
    module, trainer = FreezesInWindow(), make_trainer(layout, "untied", {"plan": None}, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


def test_freezing_between_accumulated_batches_keeps_the_gradients_that_are_reduced() -> None:
    """At zero=1 they are not, and freezing is refused (test_data_parallel)."""
    expected = run_program(Layout(dp=2), _frozen_in_window)[0]
    for zero in (2, 3):
        found = run_program(Layout(dp=2, zero=zero), _frozen_in_window)[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=f"zero={zero} {name}")


class EditsGradients(GPT):
    """Scales gradients in place, replaces and clears them, wherever Lightning has a hook for it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad()

    def on_after_backward(self) -> None:
        if (self.trainer.fit_loop.batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self._scale(0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._scale(0.5)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._scale(0.8)
        for parameter in self.parameters():
            parameter.grad = None if parameter.grad is None else 0.7 * parameter.grad

    def _scale(self, factor: float) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _edited(layout: Layout, accumulate: int) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module, trainer = EditsGradients(GPTConfig()), make_trainer(layout, "tied", accumulate_grad_batches=accumulate)
    trainer.fit(module, train_loader(layout, 4))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


EDITED = [
    (Layout(tp=2, dp=2, zero=1), 1),
    (Layout(tp=2, dp=2, zero=3), 2),
    (Layout(pp=2, dp=2, zero=1, microbatches=2), 2),
    *(
        pytest.param(layout, accumulate, marks=pytest.mark.extended)
        for layout in (
            Layout(dp=2, zero=2),
            Layout(tp=2, dp=2, zero=2),
            Layout(pp=2, dp=2, microbatches=2),
            Layout(pp=2, dp=2, zero=2, microbatches=2),
            Layout(pp=2, dp=2, zero=3, microbatches=2),
        )
        for accumulate in (1, 2)
    ),
]


@pytest.mark.parametrize(("layout", "accumulate"), EDITED, ids=str)
def test_edited_gradients_are_stepped(layout: Layout, accumulate: int) -> None:
    """Also where they were summed over tensor ranks or stages after FSDP2 had reduced them."""
    expected, found = (run_program(where, _edited, accumulate)[0] for where in (PLAIN, layout))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


class WeighsInRegions(GPT):
    """By gradients of what each tensor rank uses on its own tokens, and of what it has a part of."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        losses = [torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.square().mean()]
        shared = [self.norm.weight, self.blocks[0].mlp.down.bias]
        first, second = (torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses)
        rate = sum(a.norm() / (b.norm() + 1e-3) for a, b in zip(first, second, strict=True))
        return losses[0] + 0.1 * losses[1] * rate.detach()


def _weighed_in_regions(layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(5)
    module, trainer = WeighsInRegions(GPTConfig()), make_trainer(layout, "tied")
    trainer.fit(module, train_loader(layout, 3))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


def test_gradients_in_a_step_of_divided_parameters_are_those_of_all_tensor_ranks() -> None:
    expected = run_program(Layout(dp=2), _weighed_in_regions)[0]
    for zero in (1, 3):
        found = run_program(Layout(tp=2, dp=2, zero=zero), _weighed_in_regions)[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-9, rtol=0, msg=f"zero={zero} {name}")


class WritesWhileGathered(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).square().mean()
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return loss


class Teaches(Plain):
    """The usual average of weights, by `.data`, inside a step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for mine, others in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
            mine.data.mul_(0.9).add_(others.data, alpha=0.1)
        return (self(batch) - self.teacher(batch)).square().mean()


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda p: None)


class ReplacesGradientsInTheStep(ClearsInManual):
    """Projected ones, say."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self(batch).square().mean())
        self.blocks[0].a.weight.grad = torch.zeros(8, 8)  # type: ignore[union-attr]


class HookedWithWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        weight = self.head.weight
        weight.register_hook(lambda grad: grad + 0.1 * weight)


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)


class TrainsCopies(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [nn.Parameter(parameter.detach().clone()) for parameter in self.parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.kept, lr=0.1)


def _refused(layout: Layout, kind: type[Plain]) -> None:
    trainer = make_trainer(layout, "untied", {"plan": None})
    trainer.fit(kind(), DataLoader(_data(), batch_size=2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WritesWhileGathered, "`head.weight` was changed in place while it was gathered"),
        (Teaches, "`teacher.weight` was changed in place while it was gathered"),
        (Hooked, "`head.weight` has a hook of `register_post_accumulate_grad_hook`"),
        (HookedWithWeight, "a gradient hook of `head.weight` keeps a parameter"),
        (Sparse, "the embedding `table` has sparse gradients"),
        (TrainsCopies, "not the module's"),
    ],
    ids=["writes", "teaches", "hooked", "hooked with a weight", "sparse", "copies"],
)
def test_what_would_be_lost_is_refused(kind: type[Plain], text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_program(Layout(dp=2, zero=1), _refused, kind)


@pytest.mark.parametrize("zero", [1, 3])
def test_gradients_that_a_step_sets_are_refused(zero: int) -> None:
    with pytest.raises(RankError, match=r"the step sets the gradient of `blocks\.0\.a\.weight`"):
        run_program(Layout(dp=2, zero=zero), _refused, ReplacesGradientsInTheStep)


class Unfreezes(Plain):
    """Under a pipeline: what is trained from the second epoch on, and gradients that are kept over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.requires_grad_(True)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


def _early(layout: Layout, bucket_mb: float) -> dict[str, Tensor]:
    trainer = make_trainer(layout, "untied", {"plan": None, "bucket_mb": bucket_mb}, max_epochs=2)
    module = Unfreezes()
    trainer.fit(module, DataLoader(_data(), batch_size=4))  # type: ignore[arg-type]
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


def test_early_averages_are_those_at_the_end() -> None:
    layout = Layout(pp=2, dp=2, microbatches=2)
    expected, found = (run_program(layout, _early, bucket_mb)[0] for bucket_mb in (0, 25.0))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=0, msg=name)


def _predict(layout: Layout, rows: int) -> None:
    module = Plain()
    module.predict_step = lambda batch, batch_idx: module(batch)  # type: ignore[method-assign, assignment]
    make_trainer(layout, "untied", {"plan": None}).predict(module, DataLoader(_data(rows)))  # type: ignore[arg-type]


def test_ranks_with_different_numbers_of_batches_are_refused() -> None:
    """They would wait for each other: Lightning gives every sample to one rank."""
    with pytest.raises(RankError, match="rank 1 has 1 predict batches, and rank 0 has 2"):
        run_program(Layout(dp=2, zero=3), _predict, 3)


class ReadsNumbers(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.head.weight.grad is not None
        self.log("sum", self.head.weight.grad.sum().item())


def _numbers(layout: Layout) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, "untied", {"plan": None}, limit_train_batches=1)
        trainer.fit(ReadsNumbers(), DataLoader(_data(), batch_size=4))  # type: ignore[arg-type]
    return [str(item.message) for item in caught if "it is of this rank's rows" in str(item.message)]


def test_numbers_of_some_rows_are_said_to_be() -> None:
    said = run_program(Layout(dp=2, zero=1), _numbers)
    assert len(said[0]) == 1 and "a hook takes a number (`item`)" in said[0][0]


class LogsWeights(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.blocks[0].a.weight.detach()  # type: ignore[union-attr, operator]
        self.log("largest", weight.max())
        self.log_dict({"sum": weight.sum(), "norm": weight.norm(), "spread": weight.std()}, on_epoch=True)


class ReadsLogs(Callback):
    """On one rank alone, as those that print or save do."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = {}
        if trainer.is_global_zero:
            self.seen = {name: float(f"{x:.12f}") for name, x in trainer.callback_metrics.items()}


def _logged(layout: Layout) -> dict[str, float]:
    reads = ReadsLogs()
    trainer = make_trainer(layout, "untied", {"plan": None}, callbacks=[reads])
    trainer.fit(LogsWeights(), DataLoader(_data(), batch_size=4))  # type: ignore[arg-type]
    return reads.seen


@pytest.mark.parametrize("zero", [1, 3])
def test_what_hooks_log_of_weights_is_of_the_whole(zero: int) -> None:
    expected = run_program(Layout(dp=2), _logged)[0]
    assert len(expected) >= 4
    assert run_program(Layout(dp=2, zero=zero), _logged)[0] == pytest.approx(expected, abs=1e-9)


class LeavesOut(Plain):
    """Another block on each data-parallel rank, of the same sizes (LayerDrop)."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for i, block in enumerate(self.blocks):
            batch = batch if i == self.global_rank else block(batch)
        return self.head(batch).square().mean()


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_ranks_that_call_other_units_are_refused(zero: int) -> None:
    """Each would be given the rows of another block than it asked for."""
    with pytest.raises(RankError, match=r"some data-parallel ranks have called `blocks\.0` in this step, and others"):
        run_program(Layout(dp=2, zero=zero), _refused, LeavesOut)


def _copied_later(layout: Layout) -> tuple[list[float], bool]:
    """A module as Lightning's StochasticWeightAveraging copies it, when a second run begins; and how that goes on."""
    torch.manual_seed(5)
    module, losses = Plain(), Losses()
    make_trainer(layout, "untied", {"plan": None}).fit(module, DataLoader(_data(), batch_size=4))  # type: ignore[arg-type]
    copied = copy.deepcopy(module)
    trainer = make_trainer(layout, "untied", {"plan": None}, callbacks=[losses])
    trainer.fit(module, DataLoader(_data(), batch_size=4))  # type: ignore[arg-type]
    return losses.seen, len(list(copied.parameters())) == len(list(module.parameters()))


@pytest.mark.parametrize("zero", [1, 3])
def test_a_module_can_be_copied_after_a_run(zero: int) -> None:
    expected = run_program(Layout(dp=2), _copied_later)
    assert run_program(Layout(dp=2, zero=zero), _copied_later) == [
        (pytest.approx(losses, rel=1e-12), True) for losses, _ in expected
    ]
