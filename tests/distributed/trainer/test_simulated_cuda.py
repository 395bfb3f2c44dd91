"""On a device that is not the host's: whether anything is in the wrong place, and what makes the host wait.

A GPU works on what was launched before while the host launches more. Where the host waits for it, for a number or a
copy, it has nothing to do until the host is back. See tests/simulated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor

from tests import devices
from tests.crossing import crossed
from tests.distributed.training import (
    DP2,
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT, AdamWModule, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import run_on_cuda
from tests.simulated.building import missing

pytestmark = pytest.mark.skipif(devices.chosen() != "cuda" and bool(missing()), reason=f"needs {missing()}")

BATCHES = 6
WHOLE = Layout(tp=2, sequence=False)
ZERO3 = Layout(dp=2, zero=3)


class Logging(GPT):
    """Numbers of the host and of the device, by batches and by sizes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("part", Fraction(1, 2))
        self.log("half", loss.detach() / 2, batch_size=len(batch[0]))
        self.log("epoch", self.current_epoch)
        return loss


class Positions(Logging):
    """A parameter outside of all modules, which every stage has and the first one uses."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.offset = torch.nn.Parameter(torch.linspace(-0.1, 0.1, config.hidden))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL) + self.offset
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class Tempered(Logging):
    """A parameter without a dim, which zero > 0 leaves whole on the device, beside rows in the host's memory."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.temperature = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens_BL)
        return logits * self.temperature


class Factored(Tempered):
    """With an optimizer that looks at whole tensors, and has states of other shapes."""

    def configure_optimizers(self) -> Any:
        # Keys' biases have no gradient but rounding, which eps=None would scale up to full updates.
        return torch.optim.Adafactor(self.parameters(), lr=1e-2, eps=(1e-8, 1e-3))


class Norms(Logging):
    """A hook that looks at gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.pos.weight.grad.norm())


class Compiled(Logging):
    """Its blocks are compiled."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Squares(GPT):
    """A loss whose microbatches weigh what their samples do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch
        return (self(ids).softmax(-1) - F.one_hot(targets, 32)).square().sum(-1).mean()


class Waits(Callback):
    """Why the host waits for the device, and where, in the last three batches."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == BATCHES - 3:
            devices.listen(self._hear)

    def on_train_end(self, trainer: Any, module: GPT) -> None:
        devices.listen(None)
        held = [*module.parameters(), *(p.grad for p in module.parameters() if p.grad is not None)]
        assert {x.device.type for x in held} == {"cuda"}

    def _hear(self, why: str) -> None:
        stack = traceback.extract_stack()
        ours = [f for f in stack if "lightning_megatp" in f.filename and "/shim/" not in f.filename]
        lightnings = any(f.name in ("log", "_log", "__to_tensor") and "/lightning/" in f.filename for f in stack)
        if not lightnings:  # self.log of a number copies it, on one device too
            self.found.append(f"{why}: {' < '.join(f'{Path(f.filename).name}:{f.lineno}' for f in reversed(ours))}")


def _fit(layout: Layout, kind: Callable[..., GPT], options: dict[str, Any]) -> tuple[Any, ...]:
    torch.manual_seed(0)
    config = GPTConfig(tied=True)
    waits = [] if layout.plain else [Waits()]
    plan = options.get("plan", gpt_plan(config))
    options = {name: value for name, value in options.items() if name != "plan"}
    strategy = None if layout.plain else {"plan": plan}
    trainer = make_trainer(
        layout, strategy=strategy, limit_train_batches=BATCHES, callbacks=[*waits],
        **({} if layout.plain else {"accelerator": "cuda"}), **options,
    )  # fmt: skip
    module = kind(config)
    trainer.fit(module, train_loader(layout, BATCHES))
    state = {name: x.cpu() for name, x in trainer.strategy.lightning_module_state_dict().items()}
    logged = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return state, logged, [found for wait in waits for found in wait.found]


def _on_rank(rank: int, world_size: int, layout: Layout, *args: Any) -> tuple[Any, ...]:
    return _fit(layout, *args)


FUSED = {"blocks.*.attn.qkv": {"style": "column_gather", "parts": 3}}
CASES: list[tuple[Layout, type[GPT], dict[str, Any]]] = [
    (TP2, Logging, {"gradient_clip_val": 0.1}),
    (PP2, Logging, {"gradient_clip_val": 0.1}),
    (PP2, Squares, {}),
    (PP2, Positions, {"plan": None}),
    (TP2, Logging, {"plan": "auto"}),
    (ZERO3, Logging, {"gradient_clip_val": 0.1}),
]
MORE: list[tuple[Layout, type[GPT], dict[str, Any]]] = [
    (WHOLE, Logging, {}),
    (WHOLE, Compiled, {}),
    (TP2, Logging, {"plan": FUSED}),
    (TP2, Norms, {}),
    (TP2, Logging, {"max_time": "00:01:00:00"}),
    (TP2, Squares, {"accumulate_grad_batches": 2}),
    (DP2, Logging, {"gradient_clip_val": 0.1}),
    (TP2_PP2, Logging, {"accumulate_grad_batches": 2}),
    (Layout(tp=2, dp=2, zero=1), Logging, {}),
    (Layout(pp=2, schedule="zb_h1"), Logging, {}),
    (Layout(pp=2, dp=2, zero=2, microbatches=2), Logging, {}),
    (Layout(pp=3, microbatches=2), Logging, {}),  # a stage between those that share the embedding
]


@pytest.mark.parametrize(
    ("layout", "kind", "options"), [*CASES, *(pytest.param(*case, marks=pytest.mark.extended) for case in MORE)]
)
def test_a_fit_is_that_of_one_device_and_no_step_waits(
    layout: Layout, kind: type[GPT], options: dict[str, Any]
) -> None:
    [(expected, logged, _)] = run_program(PLAIN, _fit, kind, options)
    by_rank = run_on_cuda(layout.ranks, _on_rank, layout, kind, options)
    for rank, (state, seen, waits) in enumerate(by_rank):
        last_stage = rank < layout.ranks // layout.pp
        looks = "weighing.py", "findings.py"  # of batches 2 and 4, whose losses are looked at
        waits = [where for where in waits if not any(name in where for name in looks)]
        assert len(waits) == (3 if layout.pp > 1 and last_stage else 0), waits  # the numbers of a batch, together
        if state:
            assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
        if layout.dp == 1:
            assert seen == pytest.approx(logged, rel=1e-9)


class Deep(GPT):
    """Most of it is in its blocks, which hold masks of their own."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.register_buffer("mask", torch.ones(config.hidden))
            block.register_forward_hook(lambda block, args, y: y * block.mask)


class DeepLate(AdamWModule):
    """The same, made in configure_model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.deep = config, None

    def configure_model(self) -> None:
        self.deep = self.deep or Deep(self.config)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        assert self.deep is not None
        return self.deep(tokens_BL)


class Peak(Callback):
    """Of the device's memory, until training starts."""

    def setup(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def on_train_start(self, *args: Any) -> None:
        self.bytes = torch.cuda.max_memory_allocated() - self.before


def _set_up(rank: int, world_size: int, layout: Layout, kind: Callable[..., Any]) -> tuple[int, int]:
    """Bytes of the whole model, and the most that were on the device until training started."""
    torch.manual_seed(0)
    config, peak = GPTConfig(hidden=64, layers=16), Peak()
    whole = sum(p.numel() * p.element_size() for p in GPT(config).parameters()) * 2  # in float64
    trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[peak], accelerator="cuda", limit_train_batches=1)
    trainer.fit(kind(config), train_loader(layout, 1))
    return whole, peak.bytes


@pytest.mark.parametrize(("kind", "layout"), crossed([DeepLate, Deep], [Layout(pp=4), Layout(dp=4, zero=3)]), ids=str)
def test_a_model_larger_than_a_device_is_never_whole_on_one(layout: Layout, kind: type) -> None:
    """A quarter is held in the end."""
    for whole, peak in run_on_cuda(4, _set_up, layout, kind):
        assert peak < 0.5 * whole


def _batches(device: torch.device) -> Iterator[Any]:
    """Of host and device, in one batch and in turns; the last is longer than what was sent before."""
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, generator=numbers)
    yield {"x": x.to(device), "lengths": torch.tensor([1, 2, 3]), "name": "a"}
    yield {"x": x.to(device)[:, ::2].half(), "empty": torch.empty(0, 4, device=device), "mask": torch.tensor(True)}
    yield ["nothing", 3, None]
    yield {"host": x}
    yield {"name": "b" * 9000, "host": torch.randn(40_000, generator=numbers), "device": x.to(device)}
    yield {"x": x.to(device)}


def _share_batches(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    from lightning_megatp.batches.same import SameBatch
    from lightning_megatp.mesh import MeshShape, ParallelMesh

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mesh = ParallelMesh(MeshShape(tp=world_size), "cuda")
    same_batch = SameBatch(mesh.group("pp", "tp"), device, mesh.hosts("pp", "tp"))
    got, waits = [], list[str]()
    for batch in list(_batches(device)):
        got.append(same_batch(batch if rank == 0 else {"other": torch.zeros(2)}))
        devices.listen(waits.append)  # from the second batch on: the first is checked
    devices.listen(None)
    return [repr(x).replace(f"cuda:{rank}", "its device") for x in got], waits


def test_batches_of_both_devices_arrive_where_they_were() -> None:
    (sent, none), (received, no_wait) = run_on_cuda(2, _share_batches)
    assert received == sent
    assert "its device" in sent[0] and "its device" not in sent[3]
    assert none == no_wait == []


def _save(layout: Layout, root: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Fit with checkpoints of every epoch; what the last one holds."""
    torch.manual_seed(0)
    averaging = options.get("averaging")
    saves = ModelCheckpoint(dirpath=root, filename=f"{layout}", save_top_k=1)
    trainer = make_trainer(
        layout, strategy={"plan": gpt_plan(GPTConfig()), **options.get("strategy", {})}, max_epochs=2,
        enable_checkpointing=True, callbacks=[saves, *([averaging()] if averaging else [])],
        gradient_clip_val=options.get("clip"), **({} if layout.plain else {"accelerator": "cuda"}),
    )  # fmt: skip
    trainer.fit(options.get("kind", Logging)(GPTConfig()), train_loader(layout, BATCHES))
    checkpoint = torch.load(saves.best_model_path, map_location="cpu", weights_only=False)
    found: dict[str, Tensor] = dict(checkpoint["state_dict"])
    for index, state in checkpoint["optimizer_states"][0]["state"].items():
        found |= {f"{index}.{name}": value for name, value in state.items()}
    return found


def _saving_rank(rank: int, world_size: int, *args: Any) -> dict[str, Tensor]:
    return _save(*args)


def _late_average() -> Callback:
    return StochasticWeightAveraging(1e-2, swa_epoch_start=1)  # until then its copy is in the host's memory


def _host_average() -> Callback:
    return callbacks.EMAWeightAveraging(device="cpu", decay=0.9)


IN_TWO_MEMORIES: list[Any] = [
    (TP2, {"averaging": _late_average}),
    pytest.param(
        TP2,
        {"averaging": _host_average},
        marks=[
            pytest.mark.extended,
            pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 has no EMAWeightAveraging"),
        ],
    ),
    (Layout(tp=2, dp=2, zero=1), {"strategy": {"offload": "optimizer"}, "kind": Tempered, "clip": 0.1}),
    (Layout(tp=2, dp=2, zero=1), {"strategy": {"offload": "optimizer"}, "kind": Factored}),
    (Layout(pp=2, dp=2, zero=1, microbatches=2), {"strategy": {"offload": "optimizer"}}),
]


@pytest.mark.parametrize(("layout", "options"), IN_TWO_MEMORIES)
def test_what_the_hosts_memory_holds_is_sent_and_saved(tmp_path: Path, layout: Layout, options: dict[str, Any]) -> None:
    """NCCL sends nothing that is not on the device."""
    [expected] = run_program(PLAIN, _save, str(tmp_path), options)
    for saved in run_on_cuda(layout.ranks, _saving_rank, layout, str(tmp_path), options):
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def _broadcast(rank: int, world_size: int) -> tuple[str, list[float]]:
    module = GPT(GPTConfig())
    trainer = make_trainer(TP2, accelerator="cuda", strategy={"plan": None}, limit_train_batches=0)
    trainer.fit(module, train_loader(TP2, 1))
    told = trainer.strategy.broadcast({"at": [torch.tensor([rank + 1.0], device=f"cuda:{rank}")], "name": "a"})["at"][0]
    return str(told.device), told.tolist()


def test_a_broadcast_tensor_arrives_on_the_receivers_device() -> None:
    assert run_on_cuda(2, _broadcast) == [("cuda:0", [1.0]), ("cuda:1", [1.0])]


def _try_optimizer(rank: int, world_size: int) -> bool:
    from lightning_megatp.optimizers.elementwise import coupled_parameters

    torch.cuda.manual_seed(7 + rank)
    before = torch.cuda.get_rng_state()
    coupled_parameters(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8, 6, device="cuda"))]))
    return torch.equal(torch.cuda.get_rng_state(), before)


def test_trying_an_optimizer_leaves_the_devices_random_numbers_alone() -> None:
    """Data-parallel ranks were given other ones before."""
    assert run_on_cuda(2, _try_optimizer) == [True, True]
