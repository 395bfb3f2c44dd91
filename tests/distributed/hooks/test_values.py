"""What hooks draw for weights and gradients, and whole values that they put there, are those of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.crossing import crossed
from tests.distributed.training import PLAIN, TP2, Layout, make_trainer, run_program
from tests.ranks import RankError

PLAN = {"tok": "vocab", "up": "column", "down": "row"}
WORDS, WIDTH = 14, 10
SHAPES = [(WORDS // 2, WIDTH), (8, WIDTH), (WIDTH, 8)]
"""Of the parts at tp=2."""


def _noise(x: Tensor) -> None:
    x.add_(0.1 * torch.randn_like(x))


def _noise_of_shape(x: Tensor) -> None:
    x += 0.1 * torch.randn(x.shape)


def _noise_of_size(x: Tensor) -> None:
    x.add_(torch.normal(mean=0.0, std=0.1, size=x.size(), dtype=x.dtype))


def _uniform_noise(x: Tensor) -> None:
    x.sub_((torch.rand(*x.shape, dtype=x.dtype) - 0.5).mul_(0.2))


def _empty_noise(x: Tensor) -> None:
    x.add_(torch.zeros_like(x).normal_(0, 0.1))


def _new_noise(x: Tensor) -> None:
    x.add_(x.new_empty(x.size()).uniform_(-0.1, 0.1))


def _noise_as_large(x: Tensor) -> None:
    x.add_(torch.randn_like(x.abs().add(1)) * x.abs())


def _mask(x: Tensor) -> None:
    x.mul_(torch.rand_like(x) < 0.5)


def _bernoulli(x: Tensor) -> None:
    x.mul_(torch.bernoulli(x.sigmoid()))


def _bernoulli_of_weights(x: Tensor) -> None:
    x.copy_(torch.empty_like(x).bernoulli_(x.detach().sigmoid()))


def _dropped(x: Tensor) -> None:
    x.copy_(F.dropout(x, 0.5))


def _uneven(x: Tensor) -> None:
    x.copy_(torch.normal(x.clone(), x.abs()))


def _by_generator(x: Tensor) -> None:
    x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "randn_like": _noise,
    "randn of its shape": _noise_of_shape,
    "normal of its size": _noise_of_size,
    "rand of its sizes": _uniform_noise,
    "zeros_like": _empty_noise,
    "new_empty": _new_noise,
    "like something made of it": _noise_as_large,
    "mask": _mask,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_of_weights,
    "dropout": _dropped,
    "normal": _uneven,
    "a generator": _by_generator,
    "normal_": lambda x: x.normal_(0, 0.1),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=2),
    "xavier_normal_": nn.init.xavier_normal_,
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda x: nn.init.sparse_(x, 0.1),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.1, a=-0.1, b=0.1),
}


def _values(shape: torch.Size) -> Tensor:
    return torch.linspace(-1, 1, shape.numel(), dtype=torch.float64).sin().view(shape)


WHOLE: dict[str, Callable[[Tensor, torch.Size], Any]] = {
    "values": lambda x, shape: x.copy_(_values(shape)),
    "values by data": lambda x, shape: setattr(x, "data", _values(shape)),
    "a mask": lambda x, shape: x.mul_(_values(shape) > 0),
    "a mask of rows": lambda x, shape: x.mul_((torch.arange(shape[0]) % 3 > 0)[:, None]),
    "a factor for each column": lambda x, shape: x.div_(torch.arange(1, shape[1] + 1)),
    "masked_fill_": lambda x, shape: x.masked_fill_(_values(shape) > 0, 0.5),
    "where": lambda x, shape: x.copy_(torch.where(_values(shape) > 0, x, 0.25)),
    "a sum": lambda x, shape: x.copy_(_values(shape).to(x.dtype) * 0.1 + x),
    "lerp_": lambda x, shape: x.lerp_(_values(shape).to(x.dtype), 0.5),
    "addcmul_": lambda x, shape: x.addcmul_(x.clone(), _values(shape).to(x.dtype)),
}
WHERE = ["gradient", "before the optimizer", "accumulated", "weight"]


class Model(LightningModule):
    def __init__(self, where: str, change: Callable[..., Any] | None) -> None:
        super().__init__()
        self.where, self.change = where, change
        self.tok, self.up, self.down = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.shapes = [p.shape for p in self.weights()]

    def weights(self) -> list[nn.Parameter]:
        return [self.tok.weight, self.head.weight, self.up.weight, self.down.weight, self.up.bias]

    def on_fit_start(self) -> None:
        for p in self.weights() if self.where == "accumulated" else ():
            p.register_post_accumulate_grad_hook(lambda p: self.disturb(p.grad))

    def on_train_start(self) -> None:
        if self.where == "layers":
            torch.manual_seed(1)
            for layer in (self.tok, self.up, self.down):
                layer.reset_parameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tok(batch[:, :-1])
        x = self.head(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten())

    def disturb(self, x: Tensor | None, shape: torch.Size | None = None) -> None:
        assert x is not None and self.change is not None
        if self.change in WHOLE.values():
            if len(shape or ()) > 1:
                self.change(x, shape)
        elif x.dim() > 1 or self.change in (_noise, _mask):
            torch.manual_seed(self.global_step)
            self.change(x)

    def on_after_backward(self) -> None:
        for parameter, shape in zip(self.weights() if self.where == "gradient" else (), self.shapes, strict=False):
            self.disturb(parameter.grad, shape)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weights = self.weights() if self.where == "before the optimizer" else ()
        for parameter, shape in zip(weights, self.shapes, strict=False):
            self.disturb(parameter.grad, shape)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter, shape in zip(self.weights() if self.where == "weight" else (), self.shapes, strict=False):
            self.disturb(parameter, shape)

    def configure_optimizers(self) -> Any:
        if self.where == "rates":
            rates = [0.1 * float(p.detach().norm()) + 0.01 * p.detach().abs().mean().item() for p in self.parameters()]
            groups = [{"params": [p], "lr": rate} for p, rate in zip(self.parameters(), rates, strict=True)]
            return torch.optim.SGD(groups, lr=0.5)
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(layout: Layout, module: LightningModule) -> dict[str, Tensor]:
    batches = DataLoader(torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(1)), batch_size=4)
    stages = {"stages": [["tok", "up", "down"], ["head"]]} if layout.pp > 1 else {}
    trainer = make_trainer(
        layout,
        strategy=None if layout.plain else {"plan": PLAN if layout.tp > 1 else None, **stages},
        max_epochs=2,
        use_distributed_sampler=False,  # all ranks see all of it, in order
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, batches)
    said = [text for item in caught if "MegaTP" in (text := str(item.message)) and "`normal`" not in text]
    assert not [text for text in said if "each tensor rank holds a part" in text], said
    state = trainer.strategy.lightning_module_state_dict()
    return {key: value.clone() for key, value in state.items()}


def _trained(layout: Layout, where: str, names: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for name in names:
        torch.manual_seed(0)
        found.append(_fit(layout, Model(where, {**DRAWS, **REFUSED, **WHOLE}.get(name))))
    return found


LAYOUTS = [TP2, Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2, dp=2, zero=3)]
PIPELINES = [Layout(pp=2, microbatches=1), Layout(tp=2, pp=2, microbatches=1)]
CASES = [
    ("accumulated", TP2),
    ("weight", PIPELINES[0]),
    *crossed(["weight", "gradient", "before the optimizer"], LAYOUTS[:3]),
    *(pytest.param(where, LAYOUTS[3], marks=pytest.mark.extended) for where in WHERE if where != "accumulated"),
    pytest.param("weight", PIPELINES[1], marks=pytest.mark.extended),
]


@pytest.mark.parametrize(("where", "layout"), CASES, ids=str)
def test_hooks_put_there_what_they_do_on_one_device(where: str, layout: Layout) -> None:
    names = [name for name in (*DRAWS, *WHOLE) if where != "accumulated" or name in ("randn_like", "mask", "normal_")]
    (whole,) = run_program(PLAIN, _trained, where, names)
    first, *_ = run_program(layout, _trained, where, names)  # the others are given no whole weights
    for name, state, expected in zip(names, first, whole, strict=True):
        for key, value in expected.items():
            assert torch.allclose(state[key], value, rtol=0, atol=1e-12), f"{name}: {key}"


@pytest.mark.parametrize("layout", LAYOUTS + PIPELINES, ids=str)
def test_layers_are_initialised_anew_as_on_one_device(layout: Layout) -> None:
    (whole,) = run_program(PLAIN, _trained, "layers", [""])
    first, *_ = run_program(layout, _trained, "layers", [""])
    for key, value in whole[0].items():
        assert torch.allclose(first[0][key], value, rtol=0, atol=1e-12), key


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rates_by_weights_are_those_of_whole_ones(layout: Layout) -> None:
    (whole,) = run_program(PLAIN, _trained, "rates", [""])
    first, *_ = run_program(layout, _trained, "rates", [""])
    for key, value in whole[0].items():
        assert torch.allclose(first[0][key], value, rtol=0, atol=1e-12), key


def test_rates_by_weights_of_other_stages_are_refused() -> None:
    with pytest.raises(RankError, match="MegaTPStrategy: `configure_optimizers` failed"):
        run_program(PIPELINES[0], _trained, "rates", [""])


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("layout", LAYOUTS[::2], ids=str)
def test_initial_values_of_whole_matrices_are_refused(layout: Layout, name: str) -> None:
    with pytest.raises(RankError, match=rf"MegaTPStrategy: .*`{name}` on `.*each rank holds a part"):
        run_program(layout, _trained, "weight", [name])


class Shaped(Model):
    """Draws for shapes that it was told of before."""

    def on_after_backward(self) -> None:
        for parameter, shape in zip(self.weights()[:1] + self.weights()[2:4], SHAPES, strict=True):
            assert parameter.grad is not None
            parameter.grad += torch.randn(shape, dtype=parameter.dtype)


def _shaped(layout: Layout) -> None:
    _fit(layout, Shaped("", None))


def test_numbers_of_unknown_use_are_refused_where_they_meet_a_part() -> None:
    with pytest.raises(RankError, match=r"MegaTPStrategy: .*random numbers .*each rank holds a part"):
        run_program(TP2, _shaped)
