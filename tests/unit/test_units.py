"""Which modules are units, and how they are spread over stages."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_megatp.pipeline.assignment import assign
from lightning_megatp.pipeline.observed import used_beside
from lightning_megatp.pipeline.slicing.order import units_of_step
from lightning_megatp.pipeline.twins import frozen_twins
from lightning_megatp.plan.units import find_units
from lightning_megatp.shim.modules import modules_in
from tests.pipeline_models import CASES, GPT, Block, tokens

FOUND = {
    "gpt": ["tokens", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"],
    "encoder": ["embedding", *(f"encoder.layers.{i}" for i in range(4)), "head"],
    "sequential": ["net.0", "net.2", "net.4", "net.6"],
    "resnet": ["stem", "stem_norm", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"],
    "encoder-decoder": [
        "shared",
        "bias",
        *(f"{part}.{i}" for part in ("encoder", "decoder") for i in range(3)),
        "head",
    ],
    "recurrent": ["embedding", "layers.0", "layers.1", "layers.2", "head"],
}


@pytest.mark.parametrize("name", FOUND)
def test_units_of_models(name: str) -> None:
    assert find_units(CASES[name].build()) == FOUND[name]


@pytest.mark.parametrize("name", CASES)
def test_every_layer_with_parameters_is_in_one_unit_at_most(name: str) -> None:
    module = CASES[name].build()
    units = find_units(module)
    parameters = [p for unit in units for p in set(module.get_submodule(unit).parameters())]
    inside = {id(part) for unit in units for part in module.get_submodule(unit).modules()}
    assert len(inside) == sum(len(list(module.get_submodule(unit).modules())) for unit in units)
    tied = {id(p) for p in module.parameters()} < {id(p) for p in parameters} or len(parameters) > len(
        {id(p) for p in parameters}
    )
    assert tied == (len(dict(module.named_parameters())) < len(dict(module.named_parameters(remove_duplicate=False))))


class Called(nn.Module):
    """A module with a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Wrapped(nn.Module):
    """As Hugging Face nests its models; embeddings of several layers; experts in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Called()
        self.model.embeddings = Called()
        self.model.embeddings.word, self.model.embeddings.place = nn.Embedding(5, 4), nn.Embedding(5, 4)
        self.model.layers = nn.ModuleList(Called() for _ in range(2))
        for layer in self.model.layers:
            layer.experts = nn.ModuleList(Block(4) for _ in range(3))
        self.stages = nn.ModuleList(nn.Sequential(Block(4), nn.GELU(), Block(4)) for _ in range(2))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.activation, self.empty = nn.GELU(), nn.ModuleList()
        self.again = self.model.layers[0]


def test_nested_models() -> None:
    found = find_units(Wrapped())
    expected = [
        "model.embeddings",
        "model.layers.0",
        "model.layers.1",
        *(f"stages.{i}.{j}" for i in (0, 1) for j in (0, 2)),
    ]
    assert found == expected


def test_what_holds_another_unit_is_opened() -> None:
    class Head(nn.Module):
        def __init__(self, embedding: nn.Module) -> None:
            super().__init__()
            self.embedding, self.mix = embedding, nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mix(x) @ self.embedding.weight.T

    module = nn.Module()
    module.embedding, module.layers = nn.Embedding(5, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    module.head = Head(module.embedding)
    assert find_units(module) == ["embedding", "layers.0", "layers.1", "head.mix"]
    module.layers.append(Head(module.embedding))  # blocks are never opened
    assert find_units(module) == ["layers.0", "layers.1", "layers.2", "head.mix"]


def test_a_model_without_lists_is_opened() -> None:
    module, net = nn.Module(), nn.Module()
    net.first, net.second, net.act = nn.Linear(2, 2), nn.LSTM(2, 2), nn.ReLU()
    module.net = net
    assert find_units(module) == ["net.first", "net.second"]


def test_a_layer_with_a_parametrization_is_one_unit() -> None:
    """And no list of what its weight is computed by: the positions of wav2vec2."""
    module, encoder, positions = nn.Module(), nn.Module(), nn.Module()
    positions.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3))
    positions.forward = positions.conv.forward
    encoder.positions, encoder.head = positions, nn.utils.parametrizations.orthogonal(nn.Linear(8, 8, bias=False))
    module.encoder = encoder
    assert find_units(module) == ["encoder.positions.conv", "encoder.head"]
    encoder.layers = nn.ModuleList([nn.Linear(8, 8)])
    assert find_units(module) == ["encoder.positions.conv", "encoder.head", "encoder.layers.0"]


def test_a_compiled_model_is_one_unit() -> None:
    module = nn.Module()
    module.model = torch.compile(GPT(), backend="eager")
    assert find_units(module) == ["model"]


def test_execution_order() -> None:
    class Reversed(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return x

    module = Reversed()
    units = find_units(module)
    order = units_of_step(module, units, module.training_step, tokens()).order
    assert order == ["tokens", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "norm", "head", "unused"]
    assert "forward" not in module.blocks[0].__dict__


def test_a_unit_of_which_only_a_parameter_is_used_is_where_that_is() -> None:
    class Late(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(64, 8)

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids) + self.places.weight[: ids.shape[1]]

    module = Late()
    found = units_of_step(module, find_units(module), module.training_step, tokens())
    assert found.order == ["tokens", "places", *(f"blocks.{i}" for i in range(4)), "norm", "head"]
    assert found.idle == {"places"}


def test_weights_used_beside_their_layers_after_the_step_has_read_a_value_are_those_of_the_first_entry() -> None:
    """Routers of mixtures of experts, whose choice the step goes on by."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(4, 4), "up": nn.Linear(4, 4)}) for _ in "ab")
            self.head = nn.Linear(4, 4)

        def step(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                choice = F.linear(x, layer["gate"].weight).argmax(-1)
                x = layer["up"](x) * float(choice[0])
            return self.head(x).sum()

    module = Routed()
    example: Any = SimpleNamespace(batch=torch.randn(2, 4), bare_step=module.step)
    layers = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    assert used_beside(module, layers, example) == {"layers.0.gate.weight", "layers.1.gate.weight"}


def test_units_that_are_never_called_are_opened_where_their_parts_are() -> None:
    class Holder(Called):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    class Parts(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.holder = Holder()

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return super().middle(self.holder.second(self.holder.first(x)))

    module = Parts()
    units = find_units(module)
    assert "holder" in units
    order = units_of_step(module, units, module.training_step, tokens()).order
    assert order[:4] == ["tokens", "holder.first", "holder.second", "blocks.0"]


def test_a_unit_that_reads_a_number_is_opened_and_those_after_it_are_not() -> None:
    """A table of all items, of as many features as they have, before the blocks."""

    class Items(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Embedding(9, 8)
            self.register_buffer("lengths", torch.tensor([1, 3, 2]))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.features(torch.arange(int(self.lengths.max()))).mean(0).expand(*ids.shape, -1)

    class Recommender(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.ModuleList([Items()])

        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            return super().embed(ids) + self.items[0](ids)

    module = Recommender()
    order = units_of_step(module, find_units(module), module.training_step, tokens()).order
    assert order == ["tokens", "items.0.features", *(f"blocks.{i}" for i in range(4)), "norm", "head"]


def test_stems_of_several_inputs_come_before_what_they_share() -> None:
    """One trunk takes what each stem makes, one after the other; and a critic sees samples before they are made up."""

    class Towers(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.critic = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]), nn.Linear(8, 8)

        def training_step(self, batch: Any, *_: object) -> torch.Tensor:
            ids, _ = batch
            real = self.critic(self.tokens(ids)).mean()
            x = self.images[1](self.images[0](ids[..., None].expand(-1, -1, 8).float()))
            return self.head(self.middle(self.tokens(ids))).mean() + self.critic(self.middle(x)).mean() - real

    module = Towers()
    found = units_of_step(module, find_units(module), module.training_step, tokens())
    called = [unit for unit in found.order if unit not in found.idle]
    assert called == ["tokens", "images.0", "images.1", *(f"blocks.{i}" for i in range(4)), "critic", "head"]
    assert not found.together


def test_lists_in_a_level_of_a_network_are_opened() -> None:
    """A bare nn.Module that holds the parts of one resolution, in a list of them, and one in the middle: the encoders
    of VQGAN and of latent diffusion."""

    class Levels(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList()
            for _ in range(2):
                level = nn.Module()
                level.block = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
                level.downsample = nn.Linear(8, 8)
                self.down.append(level)
            self.mid = nn.Module()
            self.mid.first, self.mid.second = Block(8), Block(8)

        def middle(self, x: torch.Tensor) -> torch.Tensor:
            for level in self.down:
                for block in level.block:
                    x = block(x)
                x = level.downsample(x)
            return super().middle(self.mid.second(self.mid.first(x)))

    module = Levels()
    levels = [f"down.{i}.{part}" for i in range(2) for part in ("block.0", "block.1", "downsample")]
    assert find_units(module)[-8:] == [*levels, "mid.first", "mid.second"]
    found = units_of_step(module, find_units(module), module.training_step, tokens())
    assert found.order[1:9] == [*levels, "mid.first", "mid.second"]
    assert not found.touched


def test_the_costliest_stage_costs_least() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        n = int(torch.randint(3, 9, (), generator=generator))
        costs = torch.randint(0, 10, (n,), generator=generator).tolist()
        units = [str(i) for i in range(n)]
        for parts in range(1, n + 1):
            stage_of_unit = assign(units, parts, dict(zip(units, costs, strict=True)))
            assert list(stage_of_unit) == units and list(stage_of_unit.values()) == sorted(stage_of_unit.values())
            assert set(stage_of_unit.values()) == set(range(parts))
            totals = [sum(c for u, c in zip(units, costs, strict=True) if stage_of_unit[u] == s) for s in range(parts)]
            cuts = itertools.combinations(range(1, n), parts - 1)
            best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, n))) for cut in cuts)
            assert max(totals) == best


def test_fewer_units_than_stages() -> None:
    with pytest.raises(ValueError, match=r"3 pipeline stages need at least as many units, and the model has 2: a, b\."):
        assign(["a", "b"], 3, {"a": 1, "b": 1})


def test_units_that_belong_together_share_a_stage() -> None:
    costs = {"a": 1, "b": 1, "c": 5, "d": 1, "e": 1, "f": 5}
    assert list(assign(list(costs), 3, costs).values()) == [0, 0, 1, 1, 2, 2]
    assert list(assign(list(costs), 3, costs, together=[("b", "c"), ("c", "d")]).values()) == [0, 1, 1, 1, 2, 2]
    assert list(assign(list(costs), 2, costs, together=[("a", "f")]).values()) == [0, 0, 0, 1, 1, 1], "can't be"


def test_what_takes_what_later_units_make() -> None:
    class Again(GPT):
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[2](super().middle(x)))

    module = Again()
    found = units_of_step(module, find_units(module), module.training_step, tokens())
    assert found.together == [("blocks.2", "blocks.3"), ("blocks.1", "blocks.3")]


def test_what_one_activation_checkpoint_calls() -> None:
    class Checkpointed(GPT):
        def middle(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in (self.blocks[:2], self.blocks[2:]):
                x = checkpoint(lambda x, first=first, second=second: second(first(x)).tanh(), x, use_reentrant=False)
            return x

    module = Checkpointed()
    found = units_of_step(module, find_units(module), module.training_step, tokens())
    assert found.together == [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]


def test_chosen_stages() -> None:
    units = ["tokens", "model.layers.0", "model.layers.1", "head"]
    assert assign(units, 2, {}, [["tokens", "model.layers.0"], ["model.layers.1", "head"]]) == {
        "tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "head": 1,
    }
    assert list(assign(units, 2, {}, [["tokens", "model"], ["head"]]).values()) == [0, 0, 0, 1]
    assert list(assign(units, 2, {}, [["tokens"], ["*.layers.[01]", "head"]]).values()) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([["a"]], "lists 1 stages, but there are 2"),
        ([["a", "x.*"], ["b", "c"]], r"`x\.\*` in `stages\[0\]` matches no unit\. The units are a, b, c"),
        ([["a", "b"], ["b", "c"]], r"places `b` on stage 0 and, by `b`, on stage 1"),
        ([["a"], ["b"]], "leaves out c"),
        ([["a", "b", "c"], []], r"`stages\[1\]` is empty"),
    ],
)
def test_chosen_stages_are_checked(stages: list[list[str]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign(["a", "b", "c"], 2, {}, stages)


def test_averaged_copies_are_known() -> None:
    model = nn.Module()
    model.student, model.other = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)) for _ in range(2))
    model.teacher = copy.deepcopy(model.student).requires_grad_(False)
    model.frozen = nn.Sequential(nn.Linear(3, 5)).requires_grad_(False)
    units = find_units(model)
    assert frozen_twins(model, units) == {"teacher.0": "student.0", "teacher.1": "student.1"}
    model.teacher.requires_grad_(True)
    assert frozen_twins(model, units) == {}
    untrained = {"teacher.0", "teacher.1"}
    assert frozen_twins(model, units, untrained) == {"teacher.0": "student.0", "teacher.1": "student.1"}


def test_averaged_copies_of_parts_are_known() -> None:
    model = nn.Module()
    model.tok, model.blocks = nn.Embedding(5, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.head = nn.Linear(4, 5, bias=False)
    parts = {"blocks": model.blocks, "head": model.head}
    model.teacher = nn.ModuleDict(copy.deepcopy(parts)).requires_grad_(False)
    model.ema_head = copy.deepcopy(model.head).requires_grad_(False)
    model.tok.requires_grad_(False)
    assert frozen_twins(model, find_units(model)) == {
        **{f"teacher.blocks.{i}": f"blocks.{i}" for i in range(3)},
        "teacher.head": "head",
        "ema_head": "head",
    }


def test_averaged_copies_of_one_of_several_networks_are_known() -> None:
    model = nn.Module()
    model.actor, model.critic = (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)) for _ in range(2))
    model.target = copy.deepcopy(model.critic).requires_grad_(False)
    with torch.no_grad():
        model.target[0].weight.mul_(0.99)
    model.actor_average = copy.deepcopy(model.actor).requires_grad_(False)
    critics = {f"target.{i}": f"critic.{i}" for i in range(3)}
    actors = {f"actor_average.{i}": f"actor.{i}" for i in range(3)}
    assert frozen_twins(model, find_units(model)) == critics | actors

    model.actor[2] = nn.Linear(3, 5)
    del model.actor_average
    assert frozen_twins(model, find_units(model)) == critics


def test_a_network_is_no_copy_of_another_one_with_a_layer_like_its_own() -> None:
    model = nn.Module()
    model.actor, model.critic = (nn.Sequential(nn.Linear(n, 4), nn.Linear(4, 4), nn.Linear(4, 1)) for n in (2, 3))
    model.target = copy.deepcopy(model.critic).requires_grad_(False)
    critics = {f"target.{i}": f"critic.{i}" for i in range(3)}
    assert frozen_twins(model, find_units(model), {f"actor.{i}" for i in range(3)}) == critics


class Keepers(nn.Module):
    """Modules without parameters that change buffers, and one that only has some."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.BatchNorm1d(4, affine=False), Called()
        self.table.register_buffer("waves", torch.zeros(4))
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(self.table(self.norm(batch))).sum()


def test_what_changes_its_buffers_is_a_unit() -> None:
    module = Keepers()
    assert find_units(module) == ["net.0", "net.2"]
    found = units_of_step(module, find_units(module), module.step, torch.randn(3, 4))
    assert found.order == ["norm", "net.0", "net.1", "net.2"]
    module.eval()
    assert units_of_step(module, find_units(module), module.step, torch.randn(3, 4)).order == ["net.0", "net.2"]


def test_modules_are_found_in_torchs_order() -> None:
    """Also one that is in two places, one that is None, and a module in itself."""
    module = GPT()
    module.again = module.blocks[1]
    module.register_module("empty", None)
    module.blocks[2].add_module("whole", module)
    assert modules_in(module) == list(module.modules())
