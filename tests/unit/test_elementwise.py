"""Which optimizers step shards as they step the whole parameter, found by measurement."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.optimizers.elementwise import (
    ELEMENTWISE,
    check_by_tensor,
    check_tensorwise,
    coupled_parameters,
    reads_losses,
)

COUPLED = {"Adafactor", "LBFGS", "Muon"}
OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "tensor lr": {"lr": torch.tensor(0.1), "capturable": True, "foreach": True},
    "differentiable": {"differentiable": True},
    "regularised": {"weight_decay": 0.1, "maximize": True},
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "centered": {"momentum": 0.9, "centered": True},
    "decoupled": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "accumulator": {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
}


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*(shape or (8, 6))))


def _derived(name: str) -> Any:
    """An optimizer of torch by a class of its own: nothing is known of it."""
    return type(name, (getattr(torch.optim, name),), {})


def _accepted(name: str) -> list[str]:
    signature = inspect.signature(getattr(torch.optim, name)).parameters
    return [case for case, options in OPTIONS.items() if options.keys() <= signature.keys()]


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in OPTIMIZERS for case in _accepted(name)])
def test_every_optimizer_of_torch(name: str, case: str) -> None:
    optimizer = _derived(name)([_weight()], **OPTIONS[case])
    assert _is_coupled(optimizer) == (name in COUPLED)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_known_of_torchs_own_is_what_trials_find(name: str) -> None:
    known = getattr(torch.optim, name) in ELEMENTWISE
    assert known == (name not in {*COUPLED, "SparseAdam"}) and _derived(name) not in ELEMENTWISE
    if known:
        check_by_tensor(_derived(name)([_weight(), _weight(6)]), 2)
        assert not reads_losses(_derived(name)([_weight()]))


def test_the_names_of_torch_are_all_known() -> None:
    """An optimizer that a later torch adds gets its line here after a look at what it does."""
    elementwise = {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
    assert set(OPTIMIZERS) == COUPLED | elementwise | {"SparseAdam"}


class Lion(Optimizer):
    """Chen et al. 2023: the sign of an interpolated momentum; element-wise."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                first, second = group["betas"]
                p.sub_(group["lr"] * momentum.lerp(p.grad, 1 - first).sign())
                momentum.lerp_(p.grad, 1 - second)


class Lamb(torch.optim.Adam):
    """You et al. 2020: Adam's update scaled by ||p|| / ||update|| of each tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = {p: p.clone() for group in self.param_groups for p in group["params"]}
        super().step()
        for p, old in before.items():
            p.copy_(old + (p - old) * (old.norm() / (p - old).norm()))


class ClippedAdam(torch.optim.Adam):
    """Each tensor's gradient is clipped by its norm. The limit lives on the instance, not in the groups."""

    def __init__(self, params: Any, limit: float | None = None, **options: Any) -> None:
        super().__init__(params, **options)
        self.limit = limit

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.limit is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(min(1.0, self.limit / float(p.grad.norm())))
        super().step()


class HiddenLimit(ClippedAdam):
    """What it couples is set behind the constructor's back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.limit = 1.0


class Centralized(torch.optim.SGD):
    """Gradient centralization (Yong et al. 2020) of matrices: subtracts the mean of each row; only dim 1 is coupled."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(1, keepdim=True))
        super().step()


class GroupClipped(torch.optim.SGD):
    """The limit is an option that only some groups have, and no argument of the constructor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "limit" in group:
                    p.grad.mul_(min(1.0, group["limit"] / float(p.grad.norm())))
        super().step()


class Flagged(GroupClipped):
    """Its constructor takes groups alone, and sets what they don't say."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group.setdefault("limit", math.inf)


class Every8(torch.optim.SGD):
    """A preconditioner that starts late."""

    steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for p in self.param_groups[0]["params"]:
            if self.steps % 8 == 0:
                p.grad.div_(p.grad.norm())
        super().step()


class Noisy(torch.optim.SGD):
    """Langevin noise: neither equal nor coupled."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p) * p.grad.abs().max())
        super().step()


class NeedsModel(Optimizer):
    """Can't be built from parameters alone, and holds what must not be copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), {"lr": 0.1})


class NeedsName(torch.optim.SGD):
    """Its constructor has an argument that it doesn't keep."""

    def __init__(self, params: Any, label: str, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.rescale: Callable[[Tensor], Tensor] = {"norm": _by_norm, "sign": torch.Tensor.sign}[label]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = self.rescale(p.grad)
        super().step()


def _by_norm(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm()


class Silent(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("only on a full moon")


@pytest.mark.parametrize(
    ("make", "coupled"),
    [
        (Lion, False),
        (Lamb, True),
        (ClippedAdam, False),
        (functools.partial(ClippedAdam, limit=0.1), True),
        (functools.partial(ClippedAdam, limit=500.0), True),
        (HiddenLimit, True),
        (Centralized, True),
        (functools.partial(torch.optim.SGD, lr=0.0), False),
        (functools.partial(Lamb, lr=0.0), True),
        (functools.partial(Lamb, lr=torch.tensor(0.1)), True),
        (Every8, True),
        (functools.partial(NeedsName, label="norm", lr=0.1), True),
    ],
)
def test_other_optimizers(make: Callable[..., Optimizer], coupled: bool) -> None:
    assert _is_coupled(make([_weight()])) == coupled


def test_the_error_names_optimizer_reason_and_fix() -> None:
    optimizer = torch.optim.LBFGS([_weight()])
    with pytest.raises(ValueError) as error:
        check_tensorwise(optimizer, coupled_parameters(optimizer).values())
    for part in (
        "MegaTPStrategy: LBFGS is not element-wise",
        "its update couples the elements of a tensor, of which ranks hold parts",
        "does not step each tensor by itself",
        "AdamW, or keep this optimizer's parameters whole",
    ):
        assert part in str(error.value)


class Searching(torch.optim.LBFGS):
    """Along a line, by the losses that its closure returns."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options | {"line_search_fn": "strong_wolfe"})


class Shared(Lamb):
    """One rate for all parameters, from the norm of all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in given]).norm()
            for p in given:
                p.sub_(group["lr"] * p.grad / norm)


class Counting(Lamb):
    """Counts its steps in the group and by itself, and steps less and less."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / (group["steps"] + self.steps) * p.grad / p.grad.norm())


class Estimating(Shared):
    """Keeps what it found in all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            group["found"] = float(torch.stack([p.grad.norm() for p in given]).norm())
            for p in given:
                p.sub_(group["lr"] * p.grad / p.grad.norm())


class Named(Lamb):
    """Keeps a name for each of its parameters, and steps them stacked."""

    def __init__(self, params: Any, names: list[list[str]], by_norm: bool, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.names, self.by_norm = names, by_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, names in zip(self.param_groups, self.names, strict=True):
            assert len(group["params"]) == len(names)
            for shape in {p.shape for p in group["params"]}:
                alike = [p for p in group["params"] if p.shape == shape]
                gradient = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in alike])
                size = torch.stack([p.norm() for p in alike]) if self.by_norm else torch.ones(len(alike))
                for p, g, factor in zip(alike, gradient, size, strict=True):
                    p.sub_(group["lr"] * factor * g.sign())


@pytest.mark.parametrize("by_norm", [False, True])
def test_something_kept_for_each_parameter(by_norm: bool) -> None:
    weights = [_weight(), _weight(), _weight(6), _weight(4, 6), _weight()]
    groups = [{"params": weights[:3]}, {"params": weights[3:], "lr": 0.2}]
    optimizer = Named(groups, [["a", "b", "c"], ["d", "e"]], by_norm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(coupled_parameters(optimizer)) == 5 * by_norm
        check_by_tensor(optimizer, 2)
    if by_norm:
        with pytest.raises(
            ValueError, match=r"Named is not element-wise.*whole tensors in turn: a step of a small twin"
        ):
            check_tensorwise(optimizer, weights)


@pytest.mark.parametrize("make", [Lamb, torch.optim.Adafactor, torch.optim.Muon, Counting])
def test_tensors_can_be_stepped_in_turns(make: Callable[..., Optimizer]) -> None:
    optimizer = make([_weight(), _weight(4, 6)])
    coupled = coupled_parameters(optimizer)
    assert len(coupled) == 2
    check_tensorwise(optimizer, coupled.values())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Shared, "it does not step each tensor by itself"),
        (Estimating, "depends on all"),
        (torch.optim.LBFGS, "it does not step each tensor by itself"),
        (Searching, "it does not step each tensor by itself"),
    ],
)
def test_tensors_that_depend_on_each_other(make: Callable[..., Optimizer], why: str) -> None:
    optimizer = make([_weight(), _weight(4, 6)], lr=0.1)
    with pytest.raises(ValueError, match=rf"{make.__name__} is not element-wise.*whole tensors in turn: .*{why}"):
        check_tensorwise(optimizer, coupled_parameters(optimizer).values())


class Polyak(Optimizer):
    """A rate from the loss and the norm of the gradient (Polyak 1987)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss: Tensor = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        square = sum(p.grad.square().sum() for p in parameters)
        for parameter in parameters:
            parameter -= loss / square * parameter.grad
        return loss


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Searching, Polyak])
def test_what_closures_return_is_read(make: Callable[..., Optimizer]) -> None:
    assert reads_losses(make([_weight()]))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, Lamb, Shared])
def test_what_closures_return_is_not_read(make: Callable[..., Optimizer]) -> None:
    assert not reads_losses(make([_weight()], lr=0.1))


class Ascending(Optimizer):
    """Sharpness-aware: steps from where the whole gradient, made a unit, leads (Foret et al. 2021)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "it goes twice over a batch"
        loss = torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        ways = [0.05 * p.grad / norm for p in held]
        torch._foreach_add_(held, ways)
        self.zero_grad()
        torch.enable_grad()(closure)()
        torch._foreach_sub_(held, ways)
        torch._foreach_add_(held, [0.1 * p.grad + way for p, way in zip(held, ways, strict=True)], alpha=-1)
        return loss


class ByWholeNorm(torch.optim.SGD):
    """Clips by the norm of all its gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "LBFGS"])
def test_stages_can_step_every_optimizer_of_torch(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_by_tensor(_derived(name)([_weight(), _weight()]), 2)


@pytest.mark.parametrize("make", [Lamb, Centralized, Counting, Every8])
def test_stages_can_step_what_looks_at_one_tensor(make: Callable[..., Optimizer]) -> None:
    check_by_tensor(make([_weight(), _weight(6)], lr=0.1), 2)


@pytest.mark.parametrize("make", [Shared, ByWholeNorm, Ascending, torch.optim.LBFGS, Searching])
def test_stages_cannot_step_what_looks_at_all_tensors(make: Callable[..., Optimizer]) -> None:
    optimizer = make([_weight(), _weight()], **({} if make is Ascending else {"lr": 0.1}))
    with pytest.raises(ValueError, match=f"{make.__name__} does not step each tensor by itself.*pp=2 stages"):
        check_by_tensor(optimizer, 2)


def test_stages_and_steps_that_draw() -> None:
    with pytest.warns(UserWarning, match="could not check whether Noisy .* random numbers"):
        check_by_tensor(Noisy([_weight(), _weight()], lr=0.1), 2)


def test_an_optimizer_that_calls_its_closure_twice() -> None:
    assert _is_coupled(Ascending([_weight()]))


def test_each_group_is_tried_with_its_own_options() -> None:
    groups = [{"params": [_weight()]}, {"params": [_weight()], "limit": 0.1}]
    assert not _is_coupled(GroupClipped(groups[:1], lr=0.1))
    assert _is_coupled(GroupClipped(groups, lr=0.1))
    assert not _is_coupled(Flagged(groups[:1]))
    assert _is_coupled(Flagged(groups))


def test_groups_without_shards_and_matrix_only_rules() -> None:
    """A vector is not judged by what happens to matrices, and a group that holds no shard not at all."""
    matrix, vector = _weight(), _weight(6)
    assert not _is_coupled(Centralized([vector]))
    assert not _is_coupled(Centralized([matrix, vector]), sharded=[vector])
    groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector]}]
    assert not _is_coupled(Lamb(groups), sharded=[])
    assert _is_coupled(Lamb(groups), sharded=[matrix])
    assert _is_coupled(Lamb(groups), sharded=[vector])
    assert not _is_coupled(_derived("AdamW")([_weight(2, 3, 4, 5), nn.Parameter(torch.tensor(1.0))]))


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_wrapper_is_unwrapped(namespace: str) -> None:
    wrapper = importlib.import_module(f"{namespace}.core.optimizer").LightningOptimizer
    assert not _is_coupled(wrapper(torch.optim.AdamW([_weight()])))
    assert _is_coupled(wrapper(torch.optim.Muon([_weight()])))


def test_nothing_of_the_users_is_touched() -> None:
    """With schedulers (which patch `step`), hooks and state in place, and a warm-up that starts at zero."""
    weight = _weight()
    optimizer = _derived("Adam")([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    before = weight.detach().clone(), repr(optimizer.state_dict()), set(optimizer.__dict__), torch.get_rng_state()
    assert not _is_coupled(optimizer)
    assert torch.equal(weight, before[0])
    assert repr(optimizer.state_dict()) == before[1] and set(optimizer.__dict__) == before[2]
    assert torch.equal(torch.get_rng_state(), before[3])
    assert called == [] and scheduler.last_epoch == 0


def test_a_patched_step_and_hooks_stay_out_of_a_copied_twin() -> None:
    """The constructor can't be called again: attributes are copied, but none that leads back to the original."""
    optimizer = NeedsName([_weight()], "norm", lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    assert _is_coupled(optimizer)
    assert called == [] and not optimizer.state


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: NeedsModel(nn.Linear(2, 2)), r"no small twin of it could be built .*its attributes \['model'\]"),
        (lambda: Failing([_weight()]), "a step of a small twin failed .*RuntimeError: only on a full moon"),
        (
            lambda: Silent([_weight()]),
            r"a step of a small twin failed \(NotImplementedError: raise NotImplementedError\)",
        ),
        (lambda: Noisy([_weight()]), "its steps draw random numbers"),
        (lambda: torch.optim.SGD([_weight()], lr=0.1, weight_decay=0.0), None),
    ],
)
def test_what_cannot_be_tried_is_said(make: Callable[[], Optimizer], reason: str | None) -> None:
    optimizer = make()
    name = type(optimizer).__name__
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        coupled_parameters(optimizer)
    messages = [str(warning.message) for warning in caught]
    if reason is None:
        assert messages == []
        return
    assert len(messages) == 1
    assert re.search(f"could not check whether {name} is an element-wise optimizer: {reason}", messages[0])


def _is_coupled(optimizer: Any, sharded: list[Tensor] | None = None) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return bool(coupled_parameters(optimizer, sharded))
