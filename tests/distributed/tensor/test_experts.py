"""Mixtures of experts on real ranks in float64: Hugging Face's stacked parameters, one's own, and lists of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.whole_and_split import compare
from tests.ranks import RankError, run_ranks

HIDDEN, EXPERTS, BATCH, TOKENS = 8, 4, 2, 5


def _config(kind: str, inside: int, implementation: str) -> Any:
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig

    common: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 2}
    config = {
        "mixtral": lambda: MixtralConfig(**common, intermediate_size=inside, num_local_experts=EXPERTS),
        "qwen3": lambda: Qwen3MoeConfig(**common, moe_intermediate_size=inside, num_experts=EXPERTS),
        "gpt_oss": lambda: GptOssConfig(**common, intermediate_size=inside, num_local_experts=EXPERTS),
        "deepseek": lambda: DeepseekV3Config(
            **common,
            moe_intermediate_size=inside,
            n_routed_experts=EXPERTS,
            n_shared_experts=2,
            n_group=2,
            topk_group=2,
        ),
        "nemotron": lambda: NemotronHConfig(
            **common,
            moe_intermediate_size=inside,
            n_routed_experts=EXPERTS,
            n_group=1,
            topk_group=1,
            moe_shared_expert_intermediate_size=6,
        ),
    }[kind]()
    config._experts_implementation = implementation
    return config


def _block(kind: str, inside: int, implementation: str) -> nn.Module:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    kinds: dict[str, Any] = {
        "mixtral": MixtralSparseMoeBlock,
        "qwen3": Qwen3MoeSparseMoeBlock,
        "gpt_oss": GptOssMLP,
        "deepseek": DeepseekV3MoE,
        "nemotron": NemotronHMoE,
    }
    return kinds[kind](_config(kind, inside, implementation))


class Model(nn.Module):
    """A norm, a block and a residual, as in a decoder layer."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(HIDDEN), make()
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(self.norm(x))
        return x + (y[0] if isinstance(y, tuple) else y)


def _inputs(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape or (BATCH, TOKENS, HIDDEN), generator=generator, dtype=torch.float64)]


def _call(model: nn.Module, inputs: list[Tensor]) -> Any:
    return model(*inputs)


PLANS: dict[str, dict[str, Any]] = {
    "mixtral": {"moe.experts": "experts"},
    "qwen3": {"moe.experts": "experts"},
    "gpt_oss": {"moe.experts": "experts"},
    "deepseek": {
        "moe.experts": "experts",
        "moe.shared_experts.gate_proj": "column",
        "moe.shared_experts.up_proj": "column",
        "moe.shared_experts.down_proj": "row",
    },
    "nemotron": {"moe.experts": "experts"},
}


def _hugging_face(rank: int, world_size: int, kind: str, inside: int, implementation: str, sequence: bool) -> None:
    plan = PLANS[kind] | ({"moe": "sequence"} if sequence else {})
    # Most routers compute in float32, whatever the model does, and grouped_mm knows no float64.
    tolerance = 1e-10 if kind == "gpt_oss" and implementation != "grouped_mm" else 1e-4
    inputs = [x.float() for x in _inputs()] if implementation == "grouped_mm" else _inputs()
    found = compare(lambda: Model(lambda: _block(kind, inside, implementation)), plan, inputs, _call, tolerance)
    experts = found.module.moe.experts
    sizes = [stop - start for ranges in found.plan.layers["moe.experts"].by_rank for start, stop in ranges]
    assert sum(sizes) == inside
    counted = getattr(experts, "intermediate_dim", None) or experts.intermediate_size
    assert counted == sizes[rank] and experts.num_experts == EXPERTS
    assert sizes[rank] == experts.down_proj.shape[1 if kind == "gpt_oss" else 2]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", PLANS)
def test_hugging_faces_blocks(kind: str, implementation: str) -> None:
    run_ranks(2, _hugging_face, kind, 8 if implementation == "grouped_mm" else 7, implementation, False)


@pytest.mark.parametrize("kind", [pytest.param("mixtral", marks=pytest.mark.extended), "gpt_oss", "deepseek"])
def test_in_sequence_regions_and_on_four_ranks(kind: str) -> None:
    run_ranks(2, _hugging_face, kind, 12, "eager", True)
    run_ranks(4, _hugging_face, kind, 7, "eager", True)


# ---------------------------------------------------------------- one's own


class Experts(nn.Module):
    """Names of its own, a bias before and one after, dropout inside, and one expert that no token is sent to."""

    def __init__(self, inside: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ffn_dim, self.dropout = inside, dropout
        self.scale = nn.Parameter(torch.empty(HIDDEN))
        self.w13 = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * inside))
        self.b13 = nn.Parameter(torch.empty(EXPERTS, 2 * inside))
        self.w2, self.b2 = (
            nn.Parameter(torch.empty(EXPERTS, inside, HIDDEN)),
            nn.Parameter(torch.empty(EXPERTS, HIDDEN)),
        )

    def forward(self, x: Tensor, *, chosen: Tensor, weights: Tensor) -> Tensor:
        shape, x = x.shape, (x * self.scale).reshape(-1, HIDDEN)
        gate, up = torch.einsum("th,ehf->tef", x, self.w13).add(self.b13).unflatten(-1, (2, self.ffn_dim)).unbind(-2)
        self.dropped = h = F.dropout(F.silu(gate) * up, self.dropout, self.training)
        y = torch.einsum("tef,efh->teh", h, self.w2) + self.b2
        return (y * (F.one_hot(chosen, EXPERTS) * weights[..., None])[..., None]).sum(1).reshape(shape)


class Block(nn.Module):
    def __init__(self, inside: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS - 1), Experts(inside, dropout)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).flatten(0, 1).softmax(-1).max(-1)
        return self.experts(x, chosen=chosen, weights=weights)


OWN: dict[str, Any] = {
    "style": "experts",
    "parameters": {
        "scale": "whole",
        "w13": {"dim": 2, "parts": 2},
        "b13": {"dim": 1, "parts": 2},
        "w2": 1,
        "b2": "once",
    },
}


def _own(rank: int, world_size: int, inside: int, unit: int, sequence: bool) -> None:
    plan = {"moe.experts": {**OWN, "unit": unit}}
    if sequence:
        plan["moe"] = "sequence"
    found = compare(lambda: Model(lambda: Block(inside)), plan, _inputs(), _call)
    assert found.module.moe.experts.ffn_dim * 2 == found.module.moe.experts.w13.shape[2] < 2 * inside


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("inside", "unit"), [(6, 1), (7, 1), (10, 2)])
def test_experts_of_ones_own(inside: int, unit: int, sequence: bool) -> None:
    run_ranks(2, _own, inside, unit, sequence)
    run_ranks(4, _own, inside, unit, sequence)


def _outside(rank: int, world_size: int) -> None:
    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        experts = model.moe.experts
        return model(*inputs), [parameter.square().sum() for parameter in (experts.w13, experts.w2, experts.b2)]

    found = compare(lambda: Model(lambda: Block(6)), {"moe.experts": OWN}, _inputs(), call)
    found.keep_whole_where_used_outside()
    experts = found.module.moe.experts
    assert experts.w13.shape[2] == 12 and experts.w2.shape[1] == 6 and experts.b13.shape[1] == 6
    whole = Model(lambda: Block(6)).double()
    state = found.module.state_dict()
    spec = found.spec_of("moe.experts.b13")
    assert spec is not None
    parts = [torch.empty_like(state["moe.experts.b13"]) for _ in range(world_size)]
    dist.all_gather(parts, state["moe.experts.b13"])
    full = torch.empty(spec.shape, dtype=torch.float64)
    for other, part in enumerate(parts):
        spec.spec(other).put(full, part)
    whole.load_state_dict({**state, "moe.experts.b13": full})
    (x,) = _inputs()
    found.module.zero_grad()
    y, expected = found.module(x), whole(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for name in ("w13", "w2", "b2"):
        torch.testing.assert_close(experts.get_parameter(name).grad, whole.moe.experts.get_parameter(name).grad)


def test_weights_that_the_step_also_uses_outside() -> None:
    run_ranks(2, _outside)


def _dropout(rank: int, world_size: int) -> tuple[list[bool], float]:
    """Every rank masks its own features, and all ranks draw the same numbers afterwards."""
    torch.manual_seed(0)
    model = Model(lambda: Block(8, dropout=0.5)).double()
    parallel = parallelize(model, {"moe.experts": OWN})
    torch.manual_seed(5)
    with parallel.step(watch=True):
        model(*_inputs())
    with parallel.step(watch=False):
        y = model(*_inputs())
    all_of_them = [torch.empty_like(y) for _ in range(world_size)]
    dist.all_gather(all_of_them, y.detach())
    assert torch.equal(*all_of_them)
    return (model.moe.experts.dropped == 0).flatten().tolist(), float(torch.rand(()))


def test_dropout_inside_of_experts() -> None:
    (first, after), (second, after_too) = run_ranks(2, _dropout)
    assert after == after_too
    assert first != second


def _objects(rank: int, world_size: int) -> None:
    model = Model(lambda: Block(6))
    experts, names, parameters = model.moe.experts, list(model.state_dict()), dict(model.named_parameters())
    calls: list[Any] = []
    experts.register_forward_hook(lambda module, args, y: calls.append(y.shape))
    parallelize(model, {"moe.experts": OWN})
    assert model.moe.experts is experts and isinstance(experts, Experts)
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    model(torch.randn(BATCH, TOKENS, HIDDEN))
    assert calls == [(BATCH, TOKENS, HIDDEN)]
    assert type(experts).__name__ == "ParallelExperts"


def test_objects_parameters_hooks_and_names_stay() -> None:
    run_ranks(2, _objects)


class Two(Experts):
    """Returns more than one tensor."""

    def forward(self, x: Tensor, *, chosen: Tensor, weights: Tensor) -> Any:
        return super().forward(x, chosen=chosen, weights=weights), chosen


class Named(Experts):
    """Has an attribute that the strategy needs."""

    def __init__(self, inside: int) -> None:
        super().__init__(inside)
        self.region = "north"


def _refused(rank: int, world_size: int, kind: type[Experts]) -> None:
    model = Model(lambda: Block(6))
    model.moe.experts = kind(6)
    parallelize(model, {"moe.experts": OWN})
    model(torch.randn(BATCH, TOKENS, HIDDEN))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Two, "`moe.experts` has the style `experts`, and its forward should return one tensor, but returned a tuple"),
        (Named, "a Named has the style `experts` and the attributes region, which this strategy needs there"),
    ],
)
def test_experts_that_are_refused(kind: type[Experts], text: str) -> None:
    with pytest.raises(RankError, match=text):
        run_ranks(2, _refused, kind)


# ---------------------------------------------------------------- a list of layers


class Gated(nn.Module):
    def __init__(self, inside: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(HIDDEN, inside),
            nn.Linear(HIDDEN, inside),
            nn.Linear(inside, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """Every expert is a module; the last one gets no token, and the one before it an empty batch."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Gated(inside) for _ in range(EXPERTS + 2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts[:-1]):
            at = (chosen == index).nonzero(as_tuple=True)
            y = y.index_put(at[:-1], expert(x[at[:-1]]) * weights[at][:, None], accumulate=True)
        return y


def _listed(rank: int, world_size: int, sequence: bool) -> None:
    names = ("gate", "up", "down")
    plan: dict[str, Any] = {f"moe.experts.*.{name}": "row" if name == "down" else "column" for name in names}
    if sequence:
        plan["moe"] = "sequence"
    found = compare(lambda: Model(lambda: Listed(6)), plan, _inputs(), _call)
    assert all(parameter.grad is None for parameter in found.module.moe.experts[-1].parameters())
    empty = found.module.moe.experts[-2].up.weight.grad
    assert empty is not None and not empty.any()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_that_are_a_list_of_layers(world_size: int, sequence: bool) -> None:
    run_ranks(world_size, _listed, sequence)
