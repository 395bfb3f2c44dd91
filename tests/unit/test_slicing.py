"""A step in stages is the step: same loss, same gradients, same logs; or an error that says why not.

The stages of one process: each has its own copy of the module without the other stages' parameters, and tensors cross
as they would between processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.quasirandom import SobolEngine

from lightning_megatp.pipeline.assignment import assign
from lightning_megatp.pipeline.slicing import locator
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.order import units_of_step
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer, StageRun
from lightning_megatp.plan.units import find_units
from lightning_megatp.shim.autograd import unbind_functions
from lightning_megatp.shim.fakes import is_fake
from tests.crossing import crossed
from tests.pipeline_models import (
    CASES,
    GPT,
    HIDDEN,
    VOCAB,
    Asking,
    Block,
    Classifier,
    Hooked,
    Keeping,
    Leaking,
    Noisy,
    Watched,
    tokens,
)

Step = Callable[[Any], Any]
STAGES = [["tokens", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "norm", "head"]]


@dataclass
class Pipeline:
    """The stages of a module, each on a copy of it that holds its own parameters only."""

    whole: nn.Module
    stages: dict[str, int]
    modules: list[nn.Module]
    slicers: list[Slicer]
    plans: list[SlicePlan]

    @property
    def n(self) -> int:
        return len(self.modules)


def pipeline(
    module: nn.Module,
    batch: Any,
    n: int,
    stages: list[list[str]] | None = None,
    prepare: Callable[[nn.Module], None] = lambda module: None,
) -> Pipeline:
    unbind_functions()  # as a ParallelModule does, before there are stages
    units = units_of_step(module, find_units(module), module.training_step, batch).order
    cost = {unit: sum(p.numel() for p in module.get_submodule(unit).parameters()) for unit in units}
    stage_of_unit = assign(units, n, cost, stages)
    modules = [copy.deepcopy(module) for _ in range(n)]
    for each in modules:
        prepare(each)
    slicers = [Slicer(each, stage_of_unit, n) for each in modules]
    plans = [slicer.plan(each.training_step, batch) for slicer, each in zip(slicers, modules, strict=True)]
    for stage, slicer in enumerate(slicers):
        slicer.ownership.free({stage})
    return Pipeline(module, stage_of_unit, modules, slicers, plans)


def planned(module: nn.Module, batch: Any) -> SlicePlan:
    units = find_units(module)
    return Slicer(module, assign(units, 2, {}, STAGES), 2).plan(module.training_step, batch)


def forward(
    pipe: Pipeline, batch: Any, tamper: Callable[[int, list[Tensor]], None] = lambda *_: None, **kwargs: Any
) -> list[tuple[list[Tensor], StageRun]]:
    """All stages, one after another."""
    runs: list[tuple[list[Tensor], StageRun]] = []
    for stage, (module, slicer, plan) in enumerate(zip(pipe.modules, pipe.slicers, pipe.plans, strict=True)):
        sent = runs[-1][1].sent if runs else ()
        pairs = zip(sent, plan.relays[stage], strict=True)
        received = [x.detach().clone().requires_grad_(relay.requires_grad) for x, relay in pairs]
        tamper(stage, received)
        runs.append(
            (received, slicer.run(plan, stage, lambda b, m=module: m.training_step(b, **kwargs), batch, received))
        )
    return runs


def backward(pipe: Pipeline, runs: list[tuple[list[Tensor], StageRun]]) -> None:
    """All stages, in reverse."""
    loss_of(runs[-1][1].result).backward()
    for stage in range(pipe.n - 2, -1, -1):
        relays, back = pipe.plans[stage].relays[stage + 1], runs[stage + 1][0]
        pairs = [
            (x, y.grad) for x, y, relay in zip(runs[stage][1].sent, back, relays, strict=True) if relay.requires_grad
        ]
        pairs = [(x, torch.zeros_like(x) if grad is None else grad) for x, grad in pairs]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))


def loss_of(result: Any) -> Tensor:
    return result["loss"] if isinstance(result, dict) else result


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    """Summed over the stages that hold a parameter."""
    total: dict[str, Tensor] = {}
    for module in pipe.modules:
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.grad is not None:
                total[name] = total[name] + p.grad if name in total else p.grad
    return total


def check(pipe: Pipeline, module: nn.Module, batch: Any) -> None:
    """Compare the stages with the whole on a batch, by the plans that there are."""
    whole = copy.deepcopy(module)
    loss = whole.training_step(batch)
    loss.backward()
    runs = forward(pipe, batch)
    backward(pipe, runs)
    assert_same(whole, pipe, runs[-1][1].result, loss)


def check_with_plans_of(pipe: Pipeline, module: nn.Module, batch: Any) -> None:
    """Plan a batch, and compare the stages with the whole on it."""
    pipe.plans = [s.plan(m.training_step, batch) for s, m in zip(pipe.slicers, pipe.modules, strict=True)]
    check(pipe, module, batch)
    for each in pipe.modules:
        each.zero_grad()


def assert_same(whole: nn.Module, pipe: Pipeline, result: Any, loss: Tensor) -> None:
    torch.testing.assert_close(loss_of(result), loss, rtol=1e-12, atol=1e-12)
    found = gradients(pipe)
    for name, p in whole.named_parameters(remove_duplicate=False):
        if p.grad is None:
            assert name not in found or not found[name].any(), name
        else:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("name", "n"), crossed(list(CASES), [4, 2]))
def test_stages_together_are_the_whole(name: str, n: int) -> None:
    torch.manual_seed(0)
    module, batch = CASES[name].build().double(), CASES[name].batch()
    pipe = pipeline(module, batch, n)
    for step in range(3):
        whole = copy.deepcopy(module)
        loss = loss_of(whole.training_step(copy.deepcopy(batch), batch_idx=step))
        loss.backward()
        runs = forward(pipe, batch, batch_idx=step)
        backward(pipe, runs)
        assert_same(whole, pipe, runs[-1][1].result, loss)
        for each in pipe.modules:
            each.zero_grad()
    assert len({plan.digest() for plan in pipe.plans}) == 1


def test_each_stage_holds_its_own_parameters_only() -> None:
    module = GPT(tied=True)
    pipe = pipeline(module, tokens(), 2)
    held = [dict(each.named_parameters(remove_duplicate=False)) for each in pipe.modules]
    assert "blocks.0.up.weight" in held[0] and "blocks.0.up.weight" not in held[1]
    assert "blocks.3.up.weight" in held[1] and "blocks.3.up.weight" not in held[0]
    assert held[1]["head.weight"] is held[1]["tokens.weight"]
    assert pipe.plans[0].shared == {"tokens.weight": (0, 1)}
    assert pipe.plans[0].glue == {"positions": (0,)}
    away = pipe.modules[1].blocks[0].up.weight
    assert (away.shape, away.dtype, away.device.type) == ((2 * HIDDEN, HIDDEN), torch.float32, "cpu")
    alone = GPT()
    all_stages = pipeline(alone, tokens(), 4).modules
    total = sum(p.numel() for each in all_stages for p in each.parameters())
    assert total == sum(p.numel() for p in alone.parameters()) + 3 * alone.positions.numel()


def test_one_rank_may_hold_several_stages() -> None:
    module = GPT().double()
    pipe = pipeline(module, tokens(), 4)
    both = copy.deepcopy(module)
    slicer = Slicer(both, pipe.stages, 4)
    slicer.plan(both.training_step, tokens())
    slicer.ownership.free({0, 3})
    names = {name for name, _ in both.named_parameters()}
    assert {"tokens.weight", "head.weight"} <= names and not any(
        name.startswith(unit) for name in names for unit, stage in pipe.stages.items() if stage in (1, 2)
    )


def test_what_is_logged_and_left_behind_is_on_the_last_stage() -> None:
    torch.manual_seed(0)
    module, batch = Watched().double(), tokens()
    pipe = pipeline(module, batch, 4)
    whole = copy.deepcopy(module)
    whole.training_step(batch)
    runs = forward(pipe, batch)
    last = pipe.modules[-1]
    assert isinstance(last, Watched)
    for name in ("early", "loss", "spread"):
        torch.testing.assert_close(last.logged[name], whole.logged[name], rtol=0, atol=0)
    torch.testing.assert_close(last.early, whole.early)
    torch.testing.assert_close(last.accuracy.compute(), whole.accuracy.compute())
    assert len(last.outputs) == 1 and torch.equal(last.outputs[0], runs[-1][1].result)
    for each in pipe.modules[:-1]:
        assert isinstance(each, Watched)
        assert not each.logged and not each.outputs and each.accuracy.update_count == 0
    early = [relay for relay in pipe.plans[0].relays[3] if relay.shape == ()]
    assert early and not any(relay.requires_grad for relay in early)


def test_a_dry_run_leaves_no_trace() -> None:
    module, batch = Watched(), tokens()
    module.norm, module.engine = nn.BatchNorm1d(6), SobolEngine(1)
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    before = {name: value for name, value in module.__dict__.items() if not name.startswith("_")}
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    generator, ids = torch.get_rng_state(), batch[0].clone()

    def step(batch: Any) -> Tensor:
        torch.rand(3), module.engine.draw(2), module.engine.fast_forward(3)
        batch[0].clamp_(max=VOCAB - 2)
        module.counter = 1
        return module.training_step(batch)

    slicer.plan(step, batch)
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(batch[0], ids)
    assert torch.equal(module.engine.draw(2), SobolEngine(1).draw(2))
    assert {name: value for name, value in module.__dict__.items() if not name.startswith("_")} == before
    assert module.outputs == [] and module.logged == {} and module.accuracy.update_count == 0
    assert all(torch.equal(x, buffers[name]) for name, x in module.named_buffers())
    assert all(p.grad is None for p in module.parameters())


def test_hooks_fire_where_their_module_is() -> None:
    module, batch = Hooked(), tokens()
    pipe = pipeline(module, batch, 4)
    forward(pipe, batch)
    for i in range(4):
        own = pipe.stages[f"blocks.{i}"]
        assert [each.blocks[i].calls for each in pipe.modules] == [int(stage == own) for stage in range(4)]


def test_a_plan_fits_the_values_that_the_step_branches_by() -> None:
    class Hiding(GPT):
        calls = 0

        def embed(self, ids_BL: Tensor) -> Tensor:
            self.calls += 1
            x_BLD = super().embed(ids_BL)
            return x_BLD * (ids_BL > 2)[..., None] if (ids_BL <= 2).any() else x_BLD

    module, batch = Hiding(), tokens()
    full, hidden = batch[0].clamp(min=3), batch[0].clamp(max=2)
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    assert slicer.signatures([(full, full)]) == slicer.signatures([(hidden, hidden)])
    plans = [slicer.plan(module.training_step, (ids, ids)) for ids in (full, hidden)]
    state = torch.get_rng_state()
    for plan, own, other in zip(plans, (full, hidden), (hidden, full), strict=True):
        with slicer.rehearsing():
            assert slicer.fits(plan, module.training_step, (own, own)) and module.calls == 1
            assert not slicer.fits(plan, module.training_step, (other, other))
    assert module.calls == 0 and not module.logged and torch.equal(torch.get_rng_state(), state)
    plain = GPT()
    late = lambda batch: plain.training_step(batch) * (2 if bool((batch[0] > 2).all()) else 1)  # noqa: E731
    slicer = Slicer(plain, assign(find_units(plain), 2, {}, STAGES), 2)
    assert slicer.plan(late, (full, full)).reads and not slicer.plan(late, (full, full)).early_reads


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (lambda x: [x.sin(), x.cos()], lambda x: [x.cos(), x.sin()][::-1], True),
        (lambda x: [x.sin().cos()], lambda x: [x.cos().sin()], False),
        (lambda x: [x * 2], lambda x: [x * 3], False),
        (lambda x: [x.sin(), x.cos()], lambda x: [x.cos(), x.sin()], False),
        (lambda x: [torch.rand(()), x.sin()], lambda x: [x.sin(), torch.rand(())][::-1], False),
    ],
)
def test_what_is_replicated_may_come_in_another_order(one: Any, other: Any, alike: bool) -> None:
    module, batch = GPT(), tokens()
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)

    def step(make: Any) -> Any:
        def run(batch: Any) -> Tensor:
            parts = make(batch[0].double())
            loss = module.training_step(batch)
            for part in parts:  # the order in which stages use them matters
                loss = (loss * part).mean()
            return loss

        return run

    assert (slicer.plan(step(one), batch).digest() == slicer.plan(step(other), batch).digest()) is alike


def test_random_numbers_of_replicated_operations_are_the_same_everywhere() -> None:
    module, batch = Noisy().double(), tokens()
    losses = []
    for n in (2, 4):
        pipe = pipeline(module, batch, n)
        state = torch.get_rng_state()
        losses.append([forward(pipe, batch)[-1][1].result.item() for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1]
    assert losses[0][0] == losses[0][1]
    seeds = []
    for seed in (1, 2):
        slicer = Slicer(module, dict.fromkeys(pipe.stages, 0), 1)
        plan = slicer.plan(module.training_step, batch)
        seeds.append(slicer.run(plan, 0, module.training_step, batch, [], seed).result.item())
        slicer.close()
    assert seeds[0] != seeds[1]


def test_lengths_may_vary() -> None:
    torch.manual_seed(0)
    module = GPT().double()
    pipe = pipeline(module, tokens(6), 2)
    for length in (6, 3, 9):
        check_with_plans_of(pipe, module, tokens(length))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_validation(mode: str) -> None:
    torch.manual_seed(0)
    module, batch = GPT().double().eval(), tokens()
    with getattr(torch, mode)():
        pipe = pipeline(module, batch, 4)
        runs = forward(pipe, batch)
        torch.testing.assert_close(runs[-1][1].result, module.training_step(batch))
    assert not any(relay.requires_grad for relays in pipe.plans[0].relays for relay in relays)


def test_autocast() -> None:
    torch.manual_seed(0)
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)

    def step(module: nn.Module) -> Step:
        def run(batch: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return module.training_step(batch)

        return run

    plan = pipe.slicers[0].plan(step(pipe.modules[0]), batch)
    first = pipe.slicers[0].run(plan, 0, step(pipe.modules[0]), batch, [])
    assert [relay.dtype for relay in plan.relays[1]] == [x.dtype for x in first.sent] == [torch.float32]
    received = [x.detach().requires_grad_() for x in first.sent]
    second = pipe.slicers[1].run(plan, 1, step(pipe.modules[1]), batch, received)
    whole = copy.deepcopy(module)
    loss = step(whole)(batch)
    loss.backward()
    backward(Pipeline(module, {}, pipe.modules, pipe.slicers, [plan, plan]), [([], first), (received, second)])
    torch.testing.assert_close(second.result, loss, rtol=0, atol=0)
    for name, grad in gradients(pipe).items():
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=0, atol=0)


def test_compiled_blocks() -> None:
    def compile_blocks(module: nn.Module) -> None:
        for block in module.blocks:
            block.compile(backend="eager", fullgraph=True)

    torch.manual_seed(0)
    module, batch = GPT().double(), tokens()
    pipe = pipeline(module, batch, 2, prepare=compile_blocks)
    check(pipe, module, batch)


def test_copies_of_an_intercepted_module_run_by_themselves() -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    slicer = Slicer(module, pipe.stages, 2)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        module.blocks[0].up.weight.zero_()
    assert not torch.equal(copied.training_step(batch), module.training_step(batch))
    slicer.close()
    assert "forward" not in module.blocks[0].__dict__


def test_signatures_differ_where_plans_may() -> None:
    module = GPT()
    slicer = Slicer(module, {"tokens": 0, "head": 0}, 1)
    x = torch.zeros(2, 3)
    same = slicer.signatures([{"x": x, "n": 1}])[0]
    assert same == slicer.signatures([{"x": x + 1, "n": 1}])[0] and hash(same) is not None
    others = [
        {"x": x[:1], "n": 1},
        {"x": x.double(), "n": 1},
        {"x": x, "n": 2},
        {"y": x, "n": 1},
        [x, 1],
        {"x": [x], "n": 1},
    ]
    assert all(slicer.signatures([other])[0] != same for other in others)
    module.eval()
    assert slicer.signatures([{"x": x, "n": 1}])[0] != same
    module.train()
    with torch.no_grad():
        assert slicer.signatures([{"x": x, "n": 1}])[0] != same


class Rows:
    """A batch of a user's own class."""

    def __init__(self, x: Tensor, n: int = 1) -> None:
        self.x, self.n, self.itself = x, n, self


class Columns(Rows):
    """A table's index, as pandas has them: what it looks up it keeps, and does not pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.x, self.n)


def test_values_that_each_row_has_its_own_are_no_part_of_signatures() -> None:
    slicer = Slicer(GPT(), {"tokens": 0, "head": 0}, 1)
    x = torch.zeros(2, 3)
    looked_up = Columns(x)
    looked_up.engine = object()
    alike = [
        ([Columns(x)], [looked_up]),
        ([Rows(object())], [Rows(object())]),
        ({"x": x, "names": ["a", "b"]}, {"x": x, "names": ["c", "d"]}),
        ((x, [{"name": "a", "at": (b"1", 2)}]), (x, [{"name": "b", "at": (b"3", 2)}])),
        ({"x": x, "table": np.zeros(3)}, {"x": x, "table": np.ones(3)}),
        (Rows(x), Rows(x + 1)),
        ([torch.Generator()], [torch.Generator()]),
    ]
    for one, other in alike:
        first, second = slicer.signatures([one, other])
        assert first == second and hash(first) is not None
    different = [
        ({"x": x, "mode": "a"}, {"x": x, "mode": "b"}),
        ({"names": ["a", "b"]}, {"names": ["a", "b", "c"]}),
        ({"table": np.zeros(3)}, {"table": np.zeros(4)}),
        ([{"n": 1}], [{"n": 2}]),
        (Rows(x), Rows(x[:1])),
        (Rows(x), Rows(x, 2)),
        (Columns(x), Columns(x[:1])),
    ]
    for one, other in different:
        first, second = slicer.signatures([one, other])
        assert first != second


def _keeps(module: GPT, x: Tensor, how: str) -> Tensor:
    """What a step makes, or is given, and leaves on its module."""
    held: Any = module.__dict__.setdefault("held", [])
    if how == "collected":
        held.append(x)
    elif how == "table" and not hasattr(module, "table"):
        module.table = torch.arange(HIDDEN).cos()
    elif how == "pair" and not hasattr(module, "table"):
        module.table = (torch.arange(HIDDEN).cos(), torch.arange(HIDDEN).sin())
    elif how == "in a list" and not held:
        held.append(torch.arange(HIDDEN).cos())
    elif how == "of the first batch" and not hasattr(module, "mean"):
        module.mean = x.double().mean()
    return {"table": lambda: module.table, "pair": lambda: module.table[0], "in a list": lambda: held[0]}.get(
        how, lambda: torch.ones(())
    )()


@pytest.mark.parametrize(
    ("how", "plans", "is_rehearsed"),
    [
        ("collected", 1, False),
        ("table", 2, False),
        ("pair", 2, False),
        ("in a list", 2, False),
        ("of the first batch", 1, True),
    ],
)
def test_what_a_step_leaves_is_followed_where_the_next_one_goes_by_it(how: str, plans: int, is_rehearsed: bool) -> None:
    class Leaving(GPT):
        calls = 0

        def embed(self, ids_BL: Tensor) -> Tensor:
            self.calls += 1
            return super().embed(ids_BL) * _keeps(self, ids_BL, how)

    module, batch = Leaving(), tokens()
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    with slicer.rehearsing():
        found = slicer.plans(module.training_step, batch, True)
        before, calls = dict(vars(module)), []
        assert slicer.fits(found[0], lambda x: calls.append(1) or module.training_step(x), batch)
    assert (len(found), bool(calls)) == (plans, is_rehearsed)
    assert vars(module) == before and hasattr(module, "table") == (how in ("table", "pair"))
    assert len({plan.digest() for plan in found}) == plans


def test_a_step_may_branch_by_the_texts_of_rows() -> None:
    class Named(GPT):
        def training_step(self, batch: Any) -> Tensor:
            *ids, names = batch
            return super().training_step((ids[0].flip(1) if names[0] == "flipped" else ids[0], ids[1]))

    module, (ids, targets) = Named(), tokens()
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    batches = [(ids, targets, [name, "other"]) for name in ("plain", "flipped", "straight")]
    assert len(set(slicer.signatures(batches))) == 1
    plans = [slicer.plan(module.training_step, batch) for batch in batches[:2]]
    with slicer.rehearsing():
        fits = [[slicer.fits(plan, module.training_step, batch) for batch in batches] for plan in plans]
    assert fits == [[True, False, True], [False, True, False]]


_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda ids: (ids > 0).any(0),
    "table": lambda ids: torch.arange(ids.max()),
    "part of a table": lambda ids: torch.arange(99)[: ids.max()],
    "new": lambda ids: ids.new_ones(ids.max()).cumsum(0) - 1,
    "expanded": lambda ids: torch.ones(1, dtype=torch.int64).expand(ids.max()).cumsum(0) - 1,
    "counts": lambda ids: ids.flatten().bincount()[1:].clamp(1, 1).cumsum(0) - 1,
    "classes": lambda ids: F.one_hot(ids)[0, 0, 1:].clamp(1, 1).cumsum(0) - 1,
}
"""Of ids, as many as the largest of them."""


def _of_lengths(module: GPT, batch: Any, how: str) -> Tensor:
    """A loss of as many tokens as its values tell."""
    ids, targets, *texts = batch
    if how == "texts":
        length = len(max(texts[0], key=len))
    elif how == "number":
        length = int(ids.max())
    elif how == "slice":
        return GPT.training_step(module, (ids[:, : ids.max()], targets[:, : ids.max()]))
    elif "hidden" in how:
        x = module.blocks[1](module.blocks[0](module.tokens(ids)))
        most = ids.max()
        x = x + x[:, most - 1, None] if how == "one hidden" else x[:, : most if how == "hidden" else int(most)]
        x = module.head(module.norm(module.blocks[3](module.blocks[2](x))))
        return F.cross_entropy(x.flatten(0, 1), targets[:, : x.shape[1]].flatten())
    else:
        columns = _COLUMNS[how](ids)
        return GPT.training_step(module, (ids[:, columns], targets[:, columns]))
    return GPT.training_step(module, (ids[:, :length], targets[:, :length]))


@pytest.mark.parametrize("how", ["texts", "number", "slice", "hidden", "number of hidden", *_COLUMNS])
def test_lengths_may_depend_on_values(how: str) -> None:
    class Trimmed(GPT):
        def training_step(self, batch: Any) -> Tensor:
            return _of_lengths(self, batch, how)

    module, (_, targets) = Trimmed(), tokens()
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    counted = torch.arange(1, targets.shape[1] + 1).repeat(len(targets), 1)
    batches: list[Any] = [(ids, targets) for ids in (counted, torch.where(counted > 3, 0, counted), counted)]
    if how == "texts":
        batches = [(*batch, ["a" * int(batch[0].max()), "b"]) for batch in batches]
    assert len(set(slicer.signatures(batches))) == 1
    plans = [slicer.plan(module.training_step, batch) for batch in batches[:2]]
    assert not any(plan.ended for plan in plans)
    with slicer.rehearsing():
        fits = [[slicer.fits(plan, module.training_step, batch) for batch in batches] for plan in plans]
    assert fits == [[True, False, True], [False, True, False]]


@pytest.mark.parametrize("how", ["hidden", "number of hidden", "one hidden"])
def test_an_earlier_stages_value_may_be_cut_by_a_tensor(how: str) -> None:
    class Trimmed(GPT):
        def training_step(self, batch: Any) -> Tensor:
            return _of_lengths(self, batch, how)

    module, (ids, targets) = Trimmed(), tokens()
    batch = ids.clamp(max=5), targets
    pipe = pipeline(module, batch, 2)
    assert pipe.stages["blocks.1"] == 0 and pipe.stages["blocks.2"] == 1
    check(pipe, module, batch)


# What can't be done is said.


def keep(model: GPT, x: Tensor) -> Tensor:
    model.kept = x
    return x


def branch(model: GPT, x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x


def print_value(model: GPT, x: Tensor) -> Tensor:
    print(f"{x.mean():.3f}")
    return x


def select(model: GPT, x: Tensor) -> Tensor:
    x[x > 0].sum()
    return x


def change_a_view(model: GPT, x: Tensor) -> Tensor:
    row = x[0]
    y = model.blocks[2](x)
    row.mul_(2)
    return model.blocks[3](y) + x


def change_after_use(model: GPT, x: Tensor) -> Tensor:
    y = model.blocks[3](x)
    x.mul_(2)
    return y


def differentiate(model: GPT, x: Tensor) -> Tensor:
    return x * torch.autograd.grad(x.sum(), x)[0]


def run_backward(model: GPT, x: Tensor) -> Tensor:
    x.sum().backward()
    return x


def go_back(model: GPT, x: Tensor) -> Tensor:
    return model.blocks[0](model.blocks[3](x))


def functional(model: GPT, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * 2)(x)


def functional_weight(model: GPT, x: Tensor) -> Tensor:
    return x + torch.func.vmap(lambda row: row * 2)(model.positions[:6])


def functional_unit(model: GPT, x: Tensor) -> Tensor:
    return x + torch.func.vmap(lambda row: row * 2)(model.blocks[0].down.bias.detach())


def functional_block(model: GPT, x: Tensor) -> Tensor:
    ones = torch.ones(2, 6, HIDDEN)
    return x + torch.func.jvp(model.blocks[1], (ones,), (ones,))[1]


def forward_block(model: GPT, x: Tensor) -> Tensor:
    ones = torch.ones(2, 6, HIDDEN)
    with forward_ad.dual_level():
        return x + forward_ad.unpack_dual(model.blocks[1](forward_ad.make_dual(ones, ones))).tangent


def functional_noise(model: GPT, x: Tensor) -> Tensor:
    return x + torch.func.vmap(lambda row: row + torch.rand(HIDDEN), randomness="different")(torch.ones(6, 1))


def functional_change(model: GPT, x: Tensor) -> Tensor:
    model.register_buffer("seen", torch.zeros(6, 1))
    torch.func.vmap(lambda row, seen: seen.add_(row))(torch.ones(6, 1), model.seen)
    return x + model.seen


def set_data(model: GPT, x: Tensor) -> Tensor:
    x.data = x * 2
    return x


def freeze_for_good(model: GPT, x: Tensor) -> Tensor:
    model.positions.requires_grad = False
    return x


def freeze_a_unit(model: GPT, x: Tensor) -> Tensor:
    model.blocks[0].up.weight.requires_grad = False
    return x


def ask_for_gradient(model: GPT, x: Tensor) -> Tensor:
    x = x.detach()
    x.requires_grad = True
    return x


def keep_for_its_gradient(model: GPT, x: Tensor) -> Tensor:
    model.noise = torch.zeros(3, 6, HIDDEN)
    model.noise.requires_grad = True
    return x + model.noise


def over_stages(model: GPT, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: model.blocks[3](model.blocks[0](y)), x, use_reentrant=False)


def over_stages_reentrant(model: GPT, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda y: model.blocks[3](model.blocks[0](y)), x, use_reentrant=True)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (branch, ["`__bool__`", "in branch", "stage 0", "host"]),
        (lambda model, x: x * x.mean().item(), ["`item`", "stage 0"]),
        (lambda model, x: x * float(x.detach().numpy().sum()), ["`numpy`", "stage 0"]),
        (lambda model, x: x * x.tolist()[0][0][0], ["`item`", "stage 0"]),
        (print_value, ["`__format__`", "in print_value"]),
        (select, ["shape", "depends on values", "in select"]),
        (lambda model, x: x[torch.nonzero(x.sum(-1))[0, 0]], ["`nonzero`", "depends on values"]),
        (change_a_view, ["`mul_`", "in change_a_view", "returns a new tensor"]),
        (change_after_use, ["`mul_`", "returns a new tensor"]),
        (differentiate, ["`grad`", "differentiates inside the step"]),
        (run_backward, ["`backward`", "differentiates inside the step"]),
        (go_back, ["`blocks.0`", "later stage 1", "`blocks.3`", "stages=[["]),
        (functional, ["torch.func", "not every stage has"]),
        (functional_weight, ["torch.func", "learns"]),
        (functional_unit, ["torch.func", "not every stage has"]),
        (functional_block, ["torch.func", "`blocks.1", "a module that one stage has"]),
        (forward_block, ["forward-mode", "`blocks.1", "a module that one stage has", "ModuleList"]),
        (functional_noise, ["torch.func", "`rand`", "random"]),
        (functional_change, ["torch.func", "`add_`", "in place"]),
        (set_data, ["`data`", "sets an attribute"]),
        (freeze_for_good, ["`requires_grad`", "sets an attribute", "in freeze_for_good"]),
        (freeze_a_unit, ["`requires_grad`", "sets an attribute"]),
        (ask_for_gradient, ["`requires_grad`", "sets an attribute"]),
        (keep_for_its_gradient, ["`zeros`", "leaves on the module", "gradient"]),
        (over_stages, ["checkpoint", "stages [0, 1]"]),
        (over_stages_reentrant, ["CheckpointFunction", "blocks.0, blocks.3"]),
    ],
)
def test_what_cannot_be_cut_is_refused_when_planned(
    function: Callable[[GPT, Tensor], Tensor], words: list[str]
) -> None:
    with pytest.raises(SliceError) as error:
        planned(Asking(function), tokens())
    for word in words:
        assert word in str(error.value), str(error.value)


def read_inner(model: Leaking, x: Tensor) -> Tensor:
    x = model.blocks[0](x)
    return model.blocks[2](x) + model.blocks[0].inner


def read_output(model: Leaking, x: Tensor) -> Tensor:
    model.blocks[0](x)
    return model.blocks[2](model.blocks[0].seen)


def read_argument(model: Leaking, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    x = model.blocks[0](x, seen)
    return model.blocks[2](x) + seen[0]


class Reader(nn.Module):
    """Uses what another module keeps."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others, self.linear = [other], nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.linear(x_BLD) + self.others[0].inner


def read_in_unit(model: Leaking, x: Tensor) -> Tensor:
    return model.blocks[3](model.blocks[0](x))


@pytest.mark.parametrize("function", [read_inner, read_output, read_argument])
def test_what_units_hand_out_by_a_side_door_is_followed(function: Callable[[Leaking, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, batch = Leaking(function).double(), tokens()
    pipe = pipeline(module, batch, 2, STAGES)
    for _ in range(2):
        check(pipe, module, batch)
        for each in pipe.modules:
            each.zero_grad()


def test_of_what_a_unit_keeps_only_that_is_sent_which_is_taken() -> None:
    module = Leaking(read_inner)
    assert len(planned(module, tokens()).relays[1]) == 2


def test_a_unit_may_read_what_one_of_another_stage_keeps() -> None:
    torch.manual_seed(0)
    module, batch = Leaking(read_in_unit).double(), tokens()
    module.blocks[3] = Reader(module.blocks[0]).double()
    check(pipeline(module, batch, 2, STAGES), module, batch)
    module.blocks[1] = Reader(module.blocks[0])
    module.function = lambda model, x: model.blocks[2](model.blocks[1](model.blocks[0](x)))
    assert len(planned(module, batch).relays[1]) == 1


def test_what_units_keep_where_nobody_sees_it_is_refused() -> None:
    kept: list[Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x_BLD: Tensor) -> Tensor:
            kept[:] = [self.linear(x_BLD)]
            return kept[0].tanh()

    module = Leaking(lambda model, x: model.blocks[2](model.blocks[0](x)) + kept[0])
    module.blocks[0] = Keeping()
    with pytest.raises(
        SliceError, match=r"came out of `blocks.0`.* by a side door.*Let the module's forward return it"
    ):
        planned(module, tokens())


def test_a_value_that_a_unit_takes_from_an_attribute_is_relayed() -> None:
    torch.manual_seed(0)

    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(HIDDEN, HIDDEN)
            self.first: Tensor | None = None

        def forward(self, x_BLD: Tensor) -> Tensor:
            return self.linear(x_BLD) + self.first

    def set_attribute(model: Leaking, x: Tensor) -> Tensor:
        model.blocks[3].first = model.blocks[0](x)
        return model.blocks[3](model.blocks[2](model.blocks[3].first.tanh()))

    module, batch = Leaking(set_attribute).double(), tokens()
    module.blocks[3] = Attribute().double()
    pipe = pipeline(module, batch, 2, STAGES)
    check(pipe, module, batch)


class Rotated(nn.Module):
    """A block that makes a table when it is first called, and a longer one for a longer sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.table: tuple[Tensor, Tensor] | None = None

    def forward(self, x_BLD: Tensor) -> Tensor:
        length = x_BLD.shape[1]
        if self.table is None or len(self.table[0]) < length:
            angle_L1 = torch.arange(length, dtype=x_BLD.dtype)[:, None]
            self.table = angle_L1.cos(), angle_L1.sin()
        cos_L1, sin_L1 = (part[:length] for part in self.table)
        return self.linear(x_BLD) * cos_L1 + x_BLD * sin_L1


def test_tables_that_units_make_and_keep() -> None:
    """Those of other stages' units are never made, which makes no difference to the plans."""
    torch.manual_seed(0)
    module, batch = GPT().double(), tokens()
    for i in range(len(module.blocks)):
        module.blocks[i] = Rotated().double()
    pipe = pipeline(module, batch, 2, STAGES)
    for length in (6, 3, 8):
        check_with_plans_of(pipe, module, tokens(length))
        assert len({plan.digest() for plan in pipe.plans}) == 1


def test_a_fixed_point_may_be_sought_on_the_last_stage() -> None:
    """Without gradients, by values; the step that has some comes after it."""

    def seek(model: Leaking, x: Tensor) -> Tensor:
        x, z = model.blocks[0](x), torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z, before = 0.1 * model.blocks[3](z) + x, z
                if (z - before).abs().max() < 1e-3:
                    break
        return 0.1 * model.blocks[3](z) + x

    torch.manual_seed(0)
    module, batch = Leaking(seek).double(), tokens()
    check_with_plans_of(pipeline(module, batch, 2, STAGES), module, batch)


def test_values_may_decide_on_the_last_stage() -> None:
    class Selecting(Block):
        def forward(self, x_BLD: Tensor) -> Tensor:
            return x_BLD[x_BLD.sum(-1) > 0].mean(0).expand(3, 6, HIDDEN)

    torch.manual_seed(0)
    module, batch = GPT().double(), tokens()
    module.blocks[3] = Selecting().double()
    pipe = pipeline(module, batch, 2)
    torch.testing.assert_close(forward(pipe, batch)[-1][1].result, module.training_step(batch))


class Picking(GPT):
    """On the last stage, rows of an early value by what the model finds: how many, values tell."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        x_BLD = self.embed(batch[0])
        early = x_BLD.square()
        logits_BLV = self.head(self.norm(self.middle(x_BLD)))
        loss = self.loss(logits_BLV, batch[1]) + x_BLD[logits_BLV.argmax(-1) != batch[1]].mean() + x_BLD.std()
        return {"loss": loss, "early": early} if batch_idx == 2 else loss * early.mean() if batch_idx else loss


def test_values_may_decide_what_is_taken_of_an_early_one() -> None:
    torch.manual_seed(0)
    module, batch = Picking().double(), tokens()
    pipe = pipeline(module, batch, 2)
    check(pipe, module, batch)
    for batch_idx in (1, 2):
        pipe.plans = [
            slicer.plan(lambda x, m=each: m.training_step(x, batch_idx), batch)  # noqa: B023
            for slicer, each in zip(pipe.slicers, pipe.modules, strict=True)
        ]
        with pytest.raises(SliceError, match=r"not sent to it: .* `__getitem__` \(test_slicing.*before that line"):
            forward(pipe, batch, batch_idx=batch_idx)


class Selecting(Block):
    """Reads values inside, for what it returns or for its shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x_BLD: Tensor) -> Any:
        chosen_BL = x_BLD.sum(-1) > 0
        if self.how == "fewer":
            return self.up(x_BLD[chosen_BL].mean(0)).sum(-1) * x_BLD[:2]
        if self.how == "those":
            return self.up(x_BLD[chosen_BL].mean(0)).sum(-1) * x_BLD[:, chosen_BL.all(0)]
        if self.how == "a number":
            return super().forward(x_BLD) * float(x_BLD[chosen_BL].mean())
        if self.how == "a pair by numbers":  # Autoformer's delays
            shifts = x_BLD.mean((0, 2)).topk(2).indices
            rolled_BLD = [x_BLD.roll(-int(shifts[i]), 1) for i in range(2)]
            return super().forward(sum(rolled_BLD)), self.up(rolled_BLD[shifts.tolist()[0] % 2]).pow(2).mean()
        out_BLD = torch.zeros_like(x_BLD)
        for mask_BL in (chosen_BL, ~chosen_BL):
            if mask_BL.any():
                out_BLD[mask_BL] += super().forward(x_BLD[mask_BL])
        if self.how == "changed in place":
            return out_BLD
        rows, columns = torch.where(chosen_BL)
        return out_BLD.index_put((rows, columns), x_BLD[rows, columns]), self.up(x_BLD[rows, columns]).pow(2).mean()


class Routed(GPT):
    """The first block is a mixture of experts; what it returns beside hidden states is part of the loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks[0] = Selecting(how)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        out, aux = self.blocks[0](self.embed(batch[0])), []
        if "pair" in self.blocks[0].how:  # type: ignore[operator]
            x, *aux = out
        else:
            x = out
        for block in list(self.blocks)[1:]:
            x = block(x)
        return self.head(self.norm(x)).pow(2).mean() + sum(aux)


@pytest.mark.parametrize("how", ["a pair", "changed in place", "fewer", "a number", "a pair by numbers"])
def test_values_may_be_read_inside_of_an_early_unit(how: str) -> None:
    """What it returns is found out with made-up ones, or taken to be hidden states; the run holds it to that."""
    torch.manual_seed(0)
    module, batch = Routed(how).double(), tokens()
    pipe, whole = pipeline(module, batch, 2), copy.deepcopy(module)
    loss = whole.training_step(batch)
    loss.backward()
    runs = forward(pipe, batch)
    backward(pipe, runs)
    assert_same(whole, pipe, runs[-1][1].result, loss)


def test_shapes_of_what_an_early_unit_returns_may_not_depend_on_values() -> None:
    torch.manual_seed(0)
    module, batch = Routed("those").double(), tokens()
    with pytest.raises(SliceError, match=r"`blocks.[01]`.*on pipeline stage 0 made .*; planned was"):
        forward(pipeline(module, batch, 2), batch)


COLLECTED: dict[str, list[Any]] = {}


class Collecting(Leaking):
    """Hooks of blocks, and of layers in them, append to lists, of which the step makes a part of the loss."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.blocks[3](model.blocks[2](model.blocks[1](model.blocks[0](x)))))
        for i, block in enumerate(self.blocks):
            block.register_forward_hook(lambda module, args, out: COLLECTED["hidden"].extend([args[0], out, None]))
            block.norm.register_forward_hook(lambda module, args, out, i=i: COLLECTED["normed"].append((i, out)))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        COLLECTED.update(hidden=[], normed=[])
        loss = super().training_step(batch)
        normed = [(i + 1) * x.pow(3).mean() for i, x in COLLECTED["normed"]]
        hidden = [x for x in COLLECTED["hidden"] if x is not None]
        early = sum((i + 1) * x.pow(2).mean() for i, x in enumerate(hidden))
        assert (len(normed), len(hidden), len(COLLECTED["hidden"])) == (8, 8, 12)
        return loss + 0.1 * early + 0.1 * sum(normed)


class CastHead(nn.Module):
    """Its head is the embedding's weight, cast to a dtype that it has already (Whisper)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        x = self.tokens(batch)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy((x @ self.tokens.weight.to(x.dtype).transpose(0, 1)).flatten(0, 1), batch.flatten())


def test_a_weight_that_is_cast_to_its_own_dtype() -> None:
    torch.manual_seed(0)
    module = CastHead().double()
    pipe = pipeline(module, torch.randint(0, 16, (4, 6)), 2)
    for length in (6, 5):  # the second plan is made where each stage holds its own parameters only
        check_with_plans_of(pipe, module, torch.randint(0, 16, (4, length)))


class Lengths(nn.Module):
    """Masks by lengths that come out of a unit, which a dry run compares the other way round (Wav2Vec2)."""

    def __init__(self) -> None:
        super().__init__()
        self.front = Halves()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        x, lengths = self.front(*batch)
        at = torch.arange(x.shape[1])
        for i, block in enumerate(self.blocks):
            hidden = [
                at >= lengths[:, None],
                at > lengths[:, None] - 1,
                lengths[:, None] <= at,
                lengths[:, None] < at + 1,
            ]
            x = block(x.masked_fill(hidden[i].unsqueeze(-1), 0.0))
        return x.square().mean()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x[:, ::2]), lengths // 2


def test_comparisons_are_the_same_whichever_side_is_asked() -> None:
    module, batch = Lengths().double(), (torch.randn(3, 10, 4).double(), torch.tensor([4, 10, 7]))
    check(pipeline(module, batch, 4), module, batch)


@pytest.mark.parametrize("n", [2, 4])
def test_what_layers_inside_of_units_collect(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megatp.pipeline.slicing.state.collected.collecting", lambda: COLLECTED)
    torch.manual_seed(0)
    module, batch = Collecting().double(), tokens()
    pipe, whole = pipeline(module, batch, n), copy.deepcopy(module)
    loss = whole.training_step(batch)
    loss.backward()
    runs = forward(pipe, batch)
    backward(pipe, runs)
    assert_same(whole, pipe, runs[-1][1].result, loss)


def test_what_layers_of_a_guessed_unit_collect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Selecting(Keeping):
        def forward(self, x_BLD: Tensor, seen: list[Tensor] | None = None) -> Tensor:
            return super().forward(x_BLD, seen) + self.norm(x_BLD[x_BLD.sum(-1) > 0]).mean(0)

    monkeypatch.setattr("lightning_megatp.pipeline.slicing.state.collected.collecting", lambda: COLLECTED)
    module = Collecting()
    module.blocks[0] = Selecting()
    with pytest.raises(SliceError, match=r"`blocks.0` .* can't be planned .* depends on values"):
        planned(module, tokens())


class Converting(Block):
    """Converts layers where it uses them, as some mixtures of experts do with their routers."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        self.up, self.down = self.up.to(x_BLD.dtype), self.down.to(torch.float32)
        hidden_BLD = F.gelu(self.up(self.norm(x_BLD)))
        return x_BLD + self.down(hidden_BLD.float())


def test_units_that_convert_their_layers() -> None:
    torch.manual_seed(0)
    module, batch = GPT().double(), tokens()
    module.blocks = nn.ModuleList(Converting().double() for _ in range(4))
    pipe = pipeline(module, batch, 2)
    for length in (6, 5):  # other stages' layers are without values by now
        check_with_plans_of(pipe, module, tokens(length))
        assert module.blocks[1].down.weight.dtype == torch.float64


class Moving(GPT):
    """Moves parts of itself to where they are, a frozen one too, as who does not trust their Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)

    def training_step(self, batch: Any, **kwargs: Any) -> Any:
        self.teacher.to(self.head.weight.device)
        with torch.no_grad():
            known = self.teacher.double().eval()(F.one_hot(batch[0] % HIDDEN, HIDDEN).double())
        loss = super().training_step(batch, **kwargs)
        self.to(known)
        return loss + (self.norm.to(known.dtype)(known) * 0.1).square().mean()


def test_modules_that_are_moved_to_where_they_are_between_units() -> None:
    torch.manual_seed(0)
    module, batch = Moving().double(), tokens()
    pipe = pipeline(module, batch, 2)
    for length in (6, 5):  # other stages' parameters are without values by now
        check_with_plans_of(pipe, module, tokens(length))


def test_logging_inside_an_early_unit_is_refused() -> None:
    class Logging(Block):
        def forward(self, x_BLD: Tensor) -> Tensor:
            self.log("mean", x_BLD.mean())
            return super().forward(x_BLD)

    module = GPT()
    module.blocks[0] = Logging()
    module.blocks[0].__dict__["log"] = lambda *args: module.log(*args)
    with pytest.raises(SliceError, match=r"`self.log\('mean'\)`.*inside a module of pipeline stage 0"):
        planned(module, tokens())


def test_buffers_changed_between_units() -> None:
    class Counting(GPT):
        def __init__(self, at: str) -> None:
            super().__init__()
            self.at = at
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            if self.at == "first of all":
                self.count += 1
            x = self.middle(self.embed(batch[0]))
            if self.at == "replicated":
                self.count += 1
            if self.at == "last":
                self.count += x.detach().mean()
            if self.at == "used":
                self.count += x.detach().mean()
                x = x + self.blocks[0].up.weight.sum() * self.count
            if self.at == "first":
                self.count += self.embed(batch[0]).detach().mean()
            if self.at == "elsewhere":
                x = x + self.count
                self.count += self.embed(batch[0]).detach().mean()
            return self.loss(self.head(self.norm(x)), batch[1])

    with pytest.raises(SliceError, match="changes `count`"):
        planned(Counting("elsewhere"), tokens())
    for at, stage in (("last", 1), ("used", 1), ("first", 0), ("replicated", 1), ("first of all", None)):
        module, batch = Counting(at).double(), tokens()
        pipe = pipeline(module, batch, 2)
        torch.testing.assert_close(forward(pipe, batch)[-1][1].result, module.training_step(batch))
        assert module.count != 0
        by_stage = [torch.equal(each.count, module.count) for each in pipe.modules]
        assert by_stage == [stage in (None, s) for s in range(2)]
        assert pipe.plans[0].changed == ({} if stage is None else {"count": stage})
        assert pipe.plans[0].changed_alike == (("count",) if stage is None else ())


def test_a_stage_without_work_is_refused() -> None:
    module = GPT()
    module.middle = lambda x: model_middle(module, x)
    with pytest.raises(SliceError, match="pipeline stage 0 of 2 has nothing to do"):
        Slicer(module, {"blocks.3": 0, "tokens": 1, "head": 1}, 2).plan(module.training_step, tokens())


def test_a_stage_may_be_without_work_where_no_gradients_are_wanted() -> None:
    module, batch = GPT(), tokens()
    module.middle = lambda x: model_middle(module, x)
    slicer = Slicer(module, {"blocks.3": 0, "tokens": 1, "head": 1}, 2)
    with torch.no_grad():
        plan = slicer.plan(module.training_step, batch)
        sent = slicer.run(plan, 0, module.training_step, batch, ()).sent
        run = slicer.run(plan, 1, module.training_step, batch, sent)
        slicer.close()
        torch.testing.assert_close(run.result, module.training_step(batch))
    assert not sent


def test_padding_masks_of_torchs_encoder_in_evaluation() -> None:
    class Padded(Classifier):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            padding = batch[0] % 7 == 0
            x = self.encoder(self.embedding(batch[0]), src_key_padding_mask=padding)
            return F.cross_entropy(self.head((x * ~padding[..., None]).sum(1)), batch[1])

    module = Padded().eval()
    module.encoder.use_nested_tensor = True  # torch's default
    ids = 1 + (torch.arange(8)[:, None] + torch.arange(4)) % 6
    left_aligned = torch.where(torch.arange(4) < 3, ids, 7), torch.arange(8) % 2
    with torch.no_grad():
        pipe = pipeline(module, left_aligned, 2)
        torch.testing.assert_close(forward(pipe, left_aligned)[-1][1].result, module.training_step(left_aligned))
        for each, slicer in zip(pipe.modules, pipe.slicers, strict=True):
            assert not each.encoder.use_nested_tensor
            slicer.close()
            assert each.encoder.use_nested_tensor


def model_middle(model: GPT, x: Tensor) -> Tensor:
    return model.blocks[0](x)


def test_a_loss_of_no_stage_has_nothing_to_do_for_any() -> None:
    module = GPT()
    slicer = Slicer(module, assign(find_units(module), 2, {}, STAGES), 2)
    with pytest.raises(SliceError, match="has nothing to do"):
        slicer.plan(lambda batch: batch[0].float().mean(), tokens())


def test_a_step_that_leaves_its_plan_is_refused() -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    for each in pipe.modules:
        each.embed = lambda ids, each=each: torch.tanh(GPT.embed(each, ids))
    with pytest.raises(
        SliceError, match=r"left its plan on pipeline stage 0: it does `tanh` .*planned it did `blocks.0`"
    ):
        forward(pipe, batch)
    for each in pipe.modules:
        each.embed = lambda ids, each=each: each.tokens(ids)
    with pytest.raises(
        SliceError, match=r"left its plan on pipeline stage 0: it does `blocks.0` .*planned it did `__getitem__`"
    ):
        forward(pipe, batch)
    for each in pipe.modules:
        del each.embed
        each.middle = lambda x: x
    with pytest.raises(
        SliceError, match=r"left its plan on pipeline stage 0: it does `norm` .*planned it did `blocks.0`"
    ):
        forward(pipe, batch)


@pytest.mark.parametrize(
    ("result", "text"),
    [(0.0, "ended on pipeline stage 0 before `tokens`"), (None, "returned None before `tokens`")],
)
def test_a_step_that_ends_early_is_refused(result: float | None, text: str) -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    pipe.modules[0].training_step = lambda batch: result
    with pytest.raises(SliceError, match=text):
        forward(pipe, batch)


def test_the_last_stage_is_told_what_it_lacks() -> None:
    class Late(GPT):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            x = self.embed(batch[0])
            loss = self.loss(self.head(self.norm(self.middle(x))), batch[1])
            if batch_idx:
                self.log("early", x if batch_idx == 1 else x.mean())
            return loss

    module, batch = Late(), tokens()
    pipe = pipeline(module, batch, 2)
    forward(pipe, batch)
    for batch_idx, name in ((1, "self.log"), (2, "mean")):
        with pytest.raises(SliceError, match=rf"`{name}` .* on pipeline stage 1 needs a value of another stage"):
            forward(pipe, batch, batch_idx=batch_idx)


def test_a_freed_parameter_is_taken_back_where_a_later_plan_uses_it() -> None:
    class Longer(GPT):
        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            loss = super().training_step(batch)
            return loss if batch[0].shape[1] < 7 else loss * self.tokens.weight.mul(loss).mean()

    pipe = pipeline(Longer(), tokens(6), 2)
    for slicer, each in zip(pipe.slicers, pipe.modules, strict=True):
        assert slicer.plan(each.training_step, tokens(7)).shared["tokens.weight"] == (0, 1)
    (first, second), slicer = pipe.modules, pipe.slicers[1]
    assert is_fake(slicer.ownership.stand_in("tokens.weight")) and "tokens.weight" not in dict(
        second.named_parameters()
    )
    held = slicer.ownership.hold("tokens.weight", first.tokens.weight.detach().clone())
    assert second.tokens.weight is held and dict(second.named_parameters())["tokens.weight"] is held
    assert torch.equal(held, first.tokens.weight) and held.requires_grad


# A pipeline that is broken on purpose is found out.


def test_a_dropped_relay_is_noticed() -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    with pytest.raises(SliceError, match="pipeline stage 1 received 0 values, and the plan has 1"):
        forward(pipe, batch, tamper=lambda stage, received: received.clear())


def test_a_corrupted_relay_is_noticed_by_these_tests() -> None:
    torch.manual_seed(0)
    module, batch = GPT().double(), tokens()
    pipe = pipeline(module, batch, 2)

    def corrupt(stage: int, received: list[Tensor]) -> None:
        for x in received:
            x.data[0, 0, 0] += 1e-6

    whole = copy.deepcopy(module)
    loss = whole.training_step(batch)
    loss.backward()
    runs = forward(pipe, batch, corrupt)
    backward(pipe, runs)
    with pytest.raises(AssertionError):
        assert_same(whole, pipe, runs[-1][1].result, loss)


def test_a_relay_of_another_kind_is_noticed() -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    pipe.modules[0].blocks[1].forward = lambda x: x[:1]
    with pytest.raises(SliceError, match=r"`blocks.1` .*stage 0 made shape \(1, 6, 8\).*planned was shape \(3, 6, 8\)"):
        forward(pipe, batch)
    for other in (lambda x: None, lambda x: (x, 2 * x)):
        pipe.modules[0].blocks[1].forward = other
        with pytest.raises(SliceError, match=r"`blocks.1` .*stage 0 made another number of values"):
            forward(pipe, batch)


# What a user's own code may do around and beside the pipeline.


def test_a_step_that_catches_everything_hides_no_error() -> None:
    class Stubborn(GPT):
        def middle(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except BaseException:
                    x = x + 1
            return x

    torch.manual_seed(0)
    module, batch = Stubborn().double(), tokens()
    pipe = pipeline(module, batch, 4)
    check(pipe, module, batch)

    class Deciding(Stubborn):
        def embed(self, ids: Tensor) -> Tensor:
            x = super().embed(ids)
            try:
                return x * 2 if x.mean() > 0 else x
            except Exception:
                return x

    with pytest.raises(SliceError, match="`__bool__`"):
        planned(Deciding(), batch)


def test_parameters_that_a_unit_takes_from_elsewhere_are_shared() -> None:
    class Head(nn.Module):
        def __init__(self, model: GPT) -> None:
            super().__init__()
            self.linear, self.models = nn.Linear(HIDDEN, HIDDEN), [model]

        def forward(self, x: Tensor) -> Tensor:
            model = self.models[0]
            return torch.nn.functional.linear(self.linear(x) * model.scale, model.tokens.weight)

    torch.manual_seed(0)
    module, batch = GPT(), tokens()
    module.scale = nn.Parameter(torch.ones(HIDDEN))
    module.head = Head(module)
    module.double()
    pipe = pipeline(module, batch, 2)
    assert pipe.plans[0].shared == {"tokens.weight": (0, 1)}
    assert pipe.plans[0].glue == {"positions": (0,), "scale": (1,)}
    check(pipe, module, batch)


def test_a_unit_that_changes_what_others_see_is_refused() -> None:
    class Counter(Block):
        def forward(self, x: Tensor) -> Tensor:
            counts.add_(1)
            return super().forward(x)

    counts = torch.zeros(1)
    module = GPT()
    module.blocks[0] = Counter()
    with pytest.raises(SliceError, match=r"`add_` in `blocks.0`.* neither the module's own nor an argument"):
        planned(module, tokens())


def test_attributes_that_a_step_sets_anew() -> None:
    class Centred(GPT):
        def __init__(self, early: bool) -> None:
            super().__init__()
            self.early = early
            self.register_buffer("center", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            x = self.embed(batch[0]) - (self.center if self.early else 0)
            x = self.middle(x)
            x = x if self.early else x - self.center
            self.center = 0.9 * self.center + x.detach().mean()
            return self.loss(self.head(self.norm(x)), batch[1])

    with pytest.raises(SliceError, match="sets `center` anew"):
        planned(Centred(early=True), tokens())
    module, batch = Centred(early=False).double(), tokens()
    pipe = pipeline(module, batch, 2)
    for _ in range(2):
        torch.testing.assert_close(forward(pipe, batch)[-1][1].result, module.training_step(batch))
    assert torch.equal(pipe.modules[1].center, module.center) and pipe.modules[0].center == 0


def test_what_a_stage_in_between_would_keep_of_others_is_dropped() -> None:
    class Collecting(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.means: list[Tensor] = []

        def embed(self, ids: Tensor) -> Tensor:
            x = super().embed(ids)
            self.means.append(x.mean())
            return x

    torch.manual_seed(0)
    module, batch = Collecting().double(), tokens()
    pipe = pipeline(module, batch, 4)
    forward(pipe, batch)
    module.training_step(batch)
    assert [len(each.means) for each in pipe.modules] == [1, 1, 1, 1]
    assert all(torch.equal(each.means[0], module.means[0]) for each in pipe.modules)


def test_the_batch_may_be_changed_in_place() -> None:
    class Scaling(GPT):
        def embed(self, ids: Tensor) -> Tensor:
            ids.clamp_(min=3)
            return super().embed(ids)

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            loss = super().training_step(batch)
            batch[0].add_(1)
            return loss

    torch.manual_seed(0)
    module, batch = Scaling().double(), tokens()
    pipe = pipeline(module, batch, 4)
    result = forward(pipe, batch)[-1][1].result
    torch.testing.assert_close(result, module.training_step(copy.deepcopy(batch)))


def test_whole_values_are_loaded_into_a_stage() -> None:
    """As in a hook of the user's. What is wrong is wrong on all stages."""
    torch.manual_seed(0)
    module, batch = GPT(), tokens()
    for i in (0, 3):
        module.blocks[i].register_buffer("count", torch.zeros(2))
        module.blocks[i].register_buffer("table", torch.zeros(2), persistent=False)
    pipe = pipeline(module, batch, 2)
    whole = {name: torch.full_like(x, 3) for name, x in module.state_dict().items()}
    for each in pipe.modules:
        own = copy.deepcopy(each.state_dict())
        assert len(own) < len(whole)
        each.load_state_dict(whole)
        each.blocks[0].load_state_dict(module.blocks[0].state_dict())
        held = each.state_dict()
        assert all(torch.equal(x, whole[n]) for n, x in held.items() if not n.startswith("blocks.0."))
        assert all(torch.equal(x, module.state_dict()[n]) for n, x in held.items() if n.startswith("blocks.0."))
        each.load_state_dict(own)
        assert all(torch.equal(x, own[name]) for name, x in each.state_dict().items())
        copy.deepcopy(each).load_state_dict(whole)
        assert all(torch.equal(x, own[name]) for name, x in each.state_dict().items())
        for block in ("blocks.0", "blocks.3"):
            less = {name: x for name, x in whole.items() if name != f"{block}.up.bias"}
            wrong = {**whole, f"{block}.up.bias": torch.zeros(5)}
            more = {**whole, f"{block}.up.scale": torch.zeros(5)}
            for state, text in ((less, "Missing key"), (wrong, "size mismatch for"), (more, "Unexpected key")):
                with pytest.raises(RuntimeError, match=rf"(?s){text}.*{block}.up"):
                    each.load_state_dict(state)
            assert each.load_state_dict(less, strict=False).missing_keys == [f"{block}.up.bias"]


def test_a_freed_module_can_be_copied() -> None:
    module, batch = GPT(), tokens()
    pipe = pipeline(module, batch, 2)
    copied = copy.deepcopy(pipe.modules[0])
    assert {name for name, _ in copied.named_parameters()} == {name for name, _ in pipe.modules[0].named_parameters()}
    assert copied.blocks[3].up.weight.shape == (2 * HIDDEN, HIDDEN)


def test_places_are_lines_of_the_users() -> None:
    names: dict[str, Any] = {"__name__": "lightning_megatp.tensor.watch"}
    exec("def call(function): return function()", names)
    assert names["call"](locator.Locator(nn.Linear(2, 2)).here).startswith("test_slicing.py:")
