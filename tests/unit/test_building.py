"""Recorded models have, when their parameters are made, the values that they would have had at once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.discover import discover, look
from lightning_megatp.building.building import Building
from lightning_megatp.building.safetensors import Stored
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.plan.shard import ShardSpec
from tests.late_models import MODELS, Late, llama_config
from tests.memory import TELLS, peak_mib, printed_alone

CPU = torch.device("cpu")
EXTENDED = pytest.mark.extended


class Odd(nn.Module):
    """What initialisations do that is not drawing numbers for a whole parameter."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.own_generator = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.own_generator.data.uniform_(generator=generator)
        self.part = nn.Parameter(torch.cat([torch.rand(2, 3), torch.zeros(1, 3)]) * 0.02)
        self.given = nn.Linear(3, 2)
        numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
        values = torch.from_numpy(numbers.copy())
        self.given.weight.data.copy_(values)
        values.zero_()  # after it was read
        self.permuted = nn.Parameter(torch.rand(6)[torch.randperm(6)])
        self.register_buffer("large", torch.randperm(10) > 4)
        self.few = nn.Parameter(torch.ones(int(self.large.sum())))  # type: ignore[operator]
        self.found = nn.Parameter(self.large.nonzero().float())  # type: ignore[operator]
        self.from_numpy = nn.Parameter(torch.tensor(torch.linspace(0, 1, 3).numpy() * 2))
        self.plain = torch.polar(torch.ones(3), torch.arange(3.0))
        self.masked = nn.Parameter(torch.rand(5, 5).masked_fill_(torch.eye(5) > 0, -1.0))
        self.normalised = nn.Parameter(nn.functional.normalize(torch.randn(4, 8), dim=-1))
        self.scaled = nn.Parameter(torch.empty(3, 3).normal_().div_(math.sqrt(3)).t().contiguous())
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.other = nn.Linear(4, 4)
        self.other.weight.data = self.narrow.weight.data.t().float()
        self.other.weight.data[1:3, ::2] = 7.0
        with torch.no_grad():
            self.other.bias.copy_(torch.arange(4)).clamp_(max=2.0)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.other.weight
        self.scaled.no_weight_decay = True  # type: ignore[attr-defined]


def torch_layers() -> nn.Module:
    return nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),  # deep copies
            "lstm": nn.LSTM(5, 6, 2),
            "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            "orthogonal": nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
            "sparse": _initialised(lambda weight: nn.init.sparse_(weight, 0.3)),
            "dirac": nn.Conv2d(3, 4, 3),
            "truncated": _initialised(lambda weight: nn.init.trunc_normal_(weight, std=0.02)),
            "rejected": _initialised(lambda weight: nn.init.trunc_normal_(weight, a=-0.5, b=0.5)),
            "halved": nn.Linear(4, 4).half(),
            "unset": nn.BatchNorm2d(3),
        }
    )


def _initialised(init: Callable[[Tensor], Tensor]) -> nn.Module:
    layer = nn.Linear(9, 9)
    init(layer.weight)
    return layer


def hugging_face(name: str) -> Callable[[], nn.Module]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    configs = {
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "T5": {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8},
        "Bert": sizes,
        "Llama": sizes,
    }
    autos = {"T5": "AutoModelForSeq2SeqLM", "Bert": "AutoModelForMaskedLM"}
    auto = getattr(transformers, autos.get(name, "AutoModelForCausalLM"))
    config = getattr(transformers, f"{name}Config")(vocab_size=32, bos_token_id=0, eos_token_id=1, **configs[name])
    return lambda: auto.from_config(config)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], nn.Module]] = {
    **{kind: MODELS[kind] for kind in ("nano", "tied", "pixels")},
    "odd": Odd,
    "torch": torch_layers,
}


def recorded(build: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, Building]:
    """A module whose parameters have no values yet."""
    torch.manual_seed(seed)
    building = Building()
    with building.record():
        module = build()
    building.check()
    building.finish(module)
    return module, building


def assert_same(module: nn.Module, expected: nn.Module) -> None:
    found = dict(module.state_dict())
    for name, value in expected.state_dict().items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    assert found.keys() == expected.state_dict().keys()


@pytest.mark.parametrize("kind", [*KINDS, "Llama", *(pytest.param(x, marks=EXTENDED) for x in ("GPT2", "Bert", "T5"))])
def test_values_are_those_of_the_same_code_at_once(kind: str) -> None:
    build = KINDS.get(kind) or hugging_face(kind)
    torch.manual_seed(3)
    expected, drawn = build(), torch.rand(3)
    module, building = recorded(build)
    assert torch.equal(torch.rand(3), drawn)
    assert all(p.is_meta or kind == "odd" for p in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())
    building.materialize(module, lambda parameter: None, CPU)
    assert not building
    assert_same(module, expected)
    for (name, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert (type(p), p.shape, p.requires_grad) == (type(q), q.shape, q.requires_grad), name


def test_layers_of_init_take_part_as_they_are() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def configure(self) -> Mixed:
            self.second = nn.Linear(4, 4)
            for layer in (self.first, self.second):
                nn.init.normal_(layer.weight)
            self.second.weight.data += self.first.weight.data
            self.shift.add_(self.second.bias.detach())  # type: ignore[operator]
            return self

    torch.manual_seed(2)
    first = Mixed()
    twin = copy.deepcopy(first)
    torch.manual_seed(3)
    expected = twin.configure()
    module, building = recorded(first.configure)
    assert [p.is_meta for p in module.parameters()] == [False, False, True, True]
    building.materialize(module, lambda parameter: None, CPU)
    assert_same(module, expected)


def test_what_is_no_parameter_is_there_at_once() -> None:
    torch.manual_seed(3)
    expected = Odd()
    module, _ = recorded(Odd)
    assert isinstance(module, Odd)
    assert torch.equal(module.plain, expected.plain)
    assert module.scaled.no_weight_decay  # type: ignore[attr-defined]


def test_an_operation_that_is_left_out_shows() -> None:
    """The tests above can fail: here a recording loses its last operation on a parameter."""
    torch.manual_seed(3)
    expected = MODELS["nano"]()
    module, building = recorded(MODELS["nano"])
    operations = building._recorder.recording._operations
    last = max(i for i, operation in enumerate(operations) if str(operation.func) == "aten.mul_.Tensor")
    for writers in building._recorder.recording._writers.values():
        if last in writers:
            writers.remove(last)
    building.materialize(module, lambda parameter: None, CPU)
    with pytest.raises(AssertionError, match=r"qkv\.weight"):
        assert_same(module, expected)


def test_parameters_are_made_when_code_asks_for_them() -> None:
    torch.manual_seed(3)
    expected = MODELS["tied"]()
    module, building = recorded(MODELS["tied"])
    tokens = torch.arange(8).view(2, 4)
    with building.on_demand(module):
        assert torch.equal(module(tokens), expected(tokens))
        assert module.head.weight is module.tok.weight  # type: ignore[union-attr]
    assert all(p.is_meta for p in module.parameters())


def test_automatic_plans_are_those_of_the_model_with_values() -> None:
    batch = torch.arange(8).view(2, 4), torch.arange(8).view(2, 4)
    plans = []
    for late in (False, True):
        torch.manual_seed(3)
        module, building = Late("nano"), Building()
        if late:
            with building.record():
                module.configure_model()
            building.finish(module)
        else:
            module.configure_model()

        def step(module: Late = module, building: Building = building) -> Tensor:
            with building.on_demand(module):
                return module.loss(batch)

        plan = resolve({"**": "auto"}, module, 2, True)
        kinds, problems = look(module, plan, [step])
        problems += discover(module, 2, kinds, plan).problems
        plans.append((plan.layers, plan.attributes, plan.sequences, plan.parameters, problems))
    assert plans[0] == plans[1]
    assert plans[0][0]


@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        ("AutoModelForSequenceClassification", torch.bfloat16),
        pytest.param("AutoModelForSequenceClassification", torch.float32, marks=EXTENDED),
        pytest.param("AutoModelForCausalLM", torch.float32, marks=EXTENDED),
    ],
    ids=str,
)
def test_pretrained_weights_and_new_heads(
    head: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_config(llama_config()).save_pretrained(tmp_path, max_shard_size="20KB")

    def build() -> nn.Module:
        return getattr(transformers, head).from_pretrained(tmp_path, dtype=dtype)  # type: ignore[no-any-return]

    torch.manual_seed(3)
    expected = build()
    read = list[Tensor]()
    whole_or_part = Stored.read

    def counted(stored: Stored, spec: ShardSpec | None) -> Tensor:
        read.append(whole_or_part(stored, spec))
        return read[-1]

    monkeypatch.setattr(Stored, "read", counted)
    module, building = recorded(build)
    assert not read
    name = "model.layers.1.mlp.down_proj.weight"
    spec = ShardSpec(name, (16, 32), (((0, 16),), ((4, 8), (20, 24))))
    part = building.value(module.get_parameter(name), spec)
    assert torch.equal(part, spec.take(expected.get_parameter(name)))
    assert [value.nbytes for value in read] == [16 * 8 * 4]
    building.materialize(module, lambda parameter: None, CPU)
    assert_same(module, expected)


def _print_memory() -> None:
    """MiB that building takes at its peak: 16 layers of 8 MiB, of every second one of which half is made."""

    def build(width: int = 1024) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, 2 * width, bias=False) for _ in range(16)))

    module, building = recorded(lambda: build(8))  # what torch imports at its first use
    building.materialize(module, lambda parameter: None, CPU)
    kept = []

    def run() -> None:
        module, building = recorded(build)
        kept.append(module)
        spec = ShardSpec("", (2048, 1024), (((0, 1024),), ((0, 1024),)))
        for layer in list(module.children())[::2]:
            building.materialize(layer, lambda parameter: spec, CPU)

    print(peak_mib(run))


@pytest.mark.skipif(not TELLS, reason="only Linux tells")
def test_memory_is_that_of_what_is_made() -> None:
    assert float(printed_alone(_print_memory)) < 8 * 4 + 2 * 8 + 16


def test_a_copy_can_be_filled() -> None:
    torch.manual_seed(3)
    expected = torch_layers()
    module, building = recorded(torch_layers)
    twin = copy.deepcopy(module)
    building.fill(twin, module)
    assert_same(twin, expected)
    assert building
