"""nn.MultiheadAttention split by heads, alone and in torch's own Transformer layers, on real ranks in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_megatp.tensor.attention import ParallelAttention
from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.distributed.tensor.whole_and_split import compare
from tests.ranks import RankError, run_ranks

HEAD, BATCH, QUERIES, KEYS = 3, 2, 5, 4


class Attention(nn.Module):
    """An attention with arguments; biases, which start at zero, get values."""

    def __init__(self, heads: int, **options: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(heads * HEAD, heads, **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)


def _inputs(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _shape(tokens: int, width: int, batch_first: bool) -> tuple[int, ...]:
    return (BATCH, tokens, width) if batch_first else (tokens, BATCH, width)


def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


# name -> (options of the module, how it is called with (query, key, value))
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "one more key": {"add_bias_kv": True},
    "a zero key": {"add_zero_attn": True},
    "both, other widths": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7, "vdim": 5},
    "other widths without bias": {"kdim": 7, "vdim": 5, "bias": False},
}


def _cross(rank: int, world_size: int, heads: int, options: dict[str, Any], batch_first: bool, how: str) -> None:
    width = heads * HEAD
    x = _inputs(
        rank,
        _shape(QUERIES, width, batch_first),
        _shape(KEYS, options.get("kdim", width), batch_first),
        _shape(KEYS, options.get("vdim", width), batch_first),
    )

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        return model.attn(*inputs, average_attn_weights=how != "each", need_weights=how != "none")

    compare(lambda: Attention(heads, batch_first=batch_first, **options), {"attn": "attention"}, x, call)


@pytest.mark.parametrize("how", ["none", "average", "each"])
@pytest.mark.parametrize("options", KINDS.values(), ids=list(KINDS))
def test_query_key_and_value_of_their_own(options: dict[str, Any], how: str) -> None:
    run_ranks(2, _cross, 3, options, True, how)
    run_ranks(2, _cross, 2, options, False, how)


@pytest.mark.parametrize("heads", [4, 6])
def test_on_four_ranks(heads: int) -> None:
    for name, how in (("plain", "each"), ("both, other widths", "average")):
        run_ranks(4, _cross, heads, KINDS[name], name == "plain", how)


SHARED: dict[str, Callable[[list[Tensor]], tuple[Tensor, ...]]] = {
    "self": lambda x: (x[0], x[0], x[0]),
    "key is value": lambda x: (x[0], x[1], x[1]),
    "query is value": lambda x: (x[0], x[1], x[0]),
}


def _shared(rank: int, world_size: int, name: str) -> int:
    x = _inputs(rank, *[_shape(QUERIES, 4 * HEAD, True)] * 2)
    plan = {"attn": "attention"}
    parallel = compare(
        lambda: Attention(4, batch_first=True), plan, x, lambda model, inputs: model.attn(*SHARED[name](inputs))
    )
    with CollectiveCounter() as counter:
        y = parallel.module.attn(*SHARED[name]([x.requires_grad_() for x in x]), need_weights=False)[0]
        y.sum().backward()
    assert set(counter.calls) == {"all-reduce"}
    return counter.calls["all-reduce"]


@pytest.mark.parametrize(("name", "entries"), [("self", 1), ("key is value", 2), ("query is value", 2)])
def test_a_tensor_that_is_given_twice_enters_once(name: str, entries: int) -> None:
    assert run_ranks(2, _shared, name) == [1 + entries] * 2


# ---------------------------------------------------------------- masks

MASKS: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "padding": lambda heads: {"key_padding_mask": torch.tensor([[False] * 3 + [True] * 2, [False] * 5])},
    "float padding": lambda heads: {"key_padding_mask": torch.linspace(-2, 1, 10, dtype=torch.float64).view(2, 5)},
    "causal": lambda heads: {"attn_mask": _causal(5)},
    "causal hint": lambda heads: {"attn_mask": _causal(5), "is_causal": True},
    "causal hint and padding": lambda heads: {
        "attn_mask": _causal(5),
        "is_causal": True,
        "key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5]),
    },
    "float": lambda heads: {"attn_mask": torch.linspace(-3, 2, 25, dtype=torch.float64).view(5, 5)},
    "per head": lambda heads: {
        "attn_mask": torch.linspace(-3, 2, 50 * heads, dtype=torch.float64).sin().view(2 * heads, 5, 5)
    },
    "bool per head": lambda heads: {
        "attn_mask": (torch.arange(50 * heads).view(2 * heads, 5, 5) % 7 == 3),
        "key_padding_mask": torch.tensor([[False] * 4 + [True], [False] * 5]),
    },
}


def _masked(rank: int, world_size: int, heads: int, name: str, options: dict[str, Any]) -> None:
    x = _inputs(rank, _shape(QUERIES, heads * HEAD, options.get("batch_first", False)))
    masks = MASKS[name](heads)

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        return [
            model.attn(*inputs * 3, **masks, need_weights=need, average_attn_weights=average)
            for need, average in ((False, True), (True, True), (True, False))
        ]

    compare(lambda: Attention(heads, **options), {"attn": "attention"}, x, call)


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    run_ranks(2, _masked, 3, name, {"batch_first": True})
    run_ranks(2, _masked, 2, name, {})
    if "hint" not in name:
        run_ranks(2, _masked, 3, name, {"add_bias_kv": True, "add_zero_attn": True})


def test_masks_on_four_ranks() -> None:
    run_ranks(4, _masked, 6, "bool per head", {"batch_first": True})


class Biased(nn.Module):
    """Learned positions as the mask: of one head or of each."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(3 * HEAD, 3, batch_first=True)
        self.positions = nn.Parameter(torch.linspace(-1, 1, 75 if each else 25).view(-1, 5, 5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        each = self.positions.shape[0] == 3
        mask = self.positions.repeat(len(x), 1, 1) if each else self.positions[0]
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0], self.positions.square()


def _biased(rank: int, world_size: int, each: bool) -> None:
    x = _inputs(rank, (BATCH, 5, 3 * HEAD))
    compare(lambda: Biased(each), {"attn": "attention"}, x, lambda model, inputs: model(*inputs))


@pytest.mark.parametrize("each", [False, True])
def test_a_mask_with_a_gradient(each: bool) -> None:
    run_ranks(2, _biased, each)


def _unbatched(rank: int, world_size: int, batch_first: bool) -> None:
    x = _inputs(rank, (QUERIES, 3 * HEAD), (KEYS, 3 * HEAD))
    masks = {
        "attn_mask": torch.arange(3 * QUERIES * KEYS).view(3, QUERIES, KEYS) % 5 == 2,
        "key_padding_mask": torch.tensor([False, False, True, False]),
    }

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        query, key = inputs
        return [model.attn(query, key, key, average_attn_weights=average, **masks) for average in (True, False)]

    compare(lambda: Attention(3, batch_first=batch_first), {"attn": "attention"}, x, call)


@pytest.mark.parametrize("batch_first", [False, True])
def test_input_without_a_batch(batch_first: bool) -> None:
    run_ranks(2, _unbatched, batch_first)


# ---------------------------------------------------------------- dropout


def _dropout(rank: int, world_size: int, need_weights: bool) -> tuple[list[float], list[float], float]:
    """The mean over many masks is the result without one; ranks draw different masks, and the same ones outside."""
    torch.manual_seed(0)
    whole = Attention(4, batch_first=True, dropout=0.25).double()
    split = copy.deepcopy(whole)
    parallelize(split, {"attn": "attention"})
    x = torch.randn(1, 3, 4 * HEAD, dtype=torch.float64)
    torch.manual_seed(5)
    with torch.no_grad():
        same = split.attn(x, x, x, need_weights=need_weights)[0]
        gathered = [torch.empty_like(same) for _ in range(world_size)]
        dist.all_gather(gathered, same)
        assert all(torch.equal(same, other) for other in gathered)
        mean = sum(split.attn(x, x, x, need_weights=need_weights)[0] for _ in range(3000)) / 3000
        whole.eval(), split.eval()
        torch.testing.assert_close(split.attn(x, x, x)[0], whole.attn(x, x, x)[0])
        assert not torch.allclose(same, whole.attn(x, x, x)[0])
        torch.testing.assert_close(mean, whole.attn(x, x, x)[0], atol=0.1, rtol=0.0)
        split.train()
        weights = split.attn(x[:, :1], x, x, need_weights=True, average_attn_weights=False)[1]
    return (weights[0, :2] == 0).flatten().tolist(), (weights[0, 2:] == 0).flatten().tolist(), float(torch.rand(()))


@pytest.mark.parametrize("need_weights", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_dropout_draws_other_numbers_on_every_rank(need_weights: bool) -> None:
    (first, second, after), (*_, after_too) = run_ranks(2, _dropout, need_weights)
    assert after == after_too, "after the attention all ranks draw the same numbers"
    assert first != second, "the heads of the two ranks were masked alike"


# ---------------------------------------------------------------- torch's own layers

SPLIT_LAYER: dict[str, Any] = {"linear1": "column", "linear2": "row"}


def _stack(layers: str, attentions: tuple[str, ...]) -> dict[str, Any]:
    plan = {f"{layers}.*.{name}": style for name, style in SPLIT_LAYER.items()}
    return plan | {f"{layers}.*.{name}": "attention" for name in attentions}


class Encoder(nn.Module):
    """nn.TransformerEncoder as users make it, with nested tensors where torch makes them."""

    def __init__(self, batch_first: bool, heads: int = 4, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(heads * HEAD, heads, 10, 0.0, batch_first=batch_first, **options)
        self.net = nn.TransformerEncoder(layer, 2, nn.LayerNorm(heads * HEAD), enable_nested_tensor=batch_first)

    def forward(self, x: Tensor, **masks: Any) -> Tensor:
        return self.net(x, **masks)


def _encoder(rank: int, world_size: int, batch_first: bool, heads: int, sequence: bool, mask: str) -> None:
    x = _inputs(rank, _shape(QUERIES, heads * HEAD, batch_first))
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    masks = {"none": {}, "padding": {"src_key_padding_mask": padding}, "causal": {"mask": _causal(5)}}[mask]
    plan = _stack("net.layers", ("self_attn",))
    if sequence:
        plan["net.layers.*"] = {"style": "sequence", "dim": 1 if batch_first else 0}
    kept = (~padding)[..., None] if batch_first else (~padding).T[..., None]

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        y = model(*inputs, **masks)
        return y * kept if mask == "padding" else y + 0  # the fused path fills padded positions with zeros

    compare(lambda: Encoder(batch_first, heads), plan, x, call)


@pytest.mark.parametrize("mask", ["none", "padding", "causal"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_torchs_encoder_in_training_and_evaluation(batch_first: bool, sequence: bool, mask: str) -> None:
    run_ranks(2, _encoder, batch_first, 4, sequence, mask)


def _no_nested_tensors(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    whole = Encoder(True).double().eval()
    split = copy.deepcopy(whole)
    parallelize(split, _stack("net.layers", ("self_attn",)))
    assert whole.net.use_nested_tensor and not split.net.use_nested_tensor
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    x = torch.randn(2, 5, 4 * HEAD, dtype=torch.float64)
    with torch.no_grad():
        expected = whole(x, src_key_padding_mask=padding)
        torch.testing.assert_close(split(x, src_key_padding_mask=padding)[~padding], expected[~padding])


def test_torchs_encoder_makes_no_nested_tensors_of_split_layers() -> None:
    run_ranks(2, _no_nested_tensors)


def test_torchs_encoder_on_four_ranks() -> None:
    run_ranks(4, _encoder, True, 6, True, "padding")


class EncoderDecoder(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.net = nn.Transformer(12, 4, 2, 2, 10, 0.0, batch_first=True, norm_first=norm_first)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.net(source, target, tgt_mask=_causal(target.shape[1]), tgt_is_causal=True)


def _decoder(rank: int, world_size: int, norm_first: bool, sequence: bool) -> None:
    plan = _stack("net.encoder.layers", ("self_attn",))
    plan |= _stack("net.decoder.layers", ("self_attn", "multihead_attn"))
    if sequence:
        plan |= {"net.encoder.layers.*": "sequence", "net.decoder.layers.*": "sequence"}
    x = _inputs(rank, (BATCH, KEYS, 12), (BATCH, QUERIES, 12))
    compare(lambda: EncoderDecoder(norm_first), plan, x, lambda model, inputs: model(*inputs))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_torchs_encoder_and_decoder(norm_first: bool, sequence: bool) -> None:
    run_ranks(2, _decoder, norm_first, sequence)


# ---------------------------------------------------------------- what stays as it was


def _objects(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = Attention(3)
    names, parameters = list(model.state_dict()), dict(model.named_parameters())
    attn, out = model.attn, model.attn.out_proj
    calls = []
    attn.register_forward_hook(lambda module, args, y: calls.append(y[0].shape))
    out.register_forward_hook(lambda module, args, y: calls.append("never"))
    parallelize(model, {"attn": "attention"})
    assert model.attn is attn and attn.out_proj is out
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == names
    assert isinstance(attn, nn.MultiheadAttention) and isinstance(attn, ParallelAttention)
    assert isinstance(out, NonDynamicallyQuantizableLinear)
    own = (2 - rank) * HEAD
    assert attn.in_proj_weight.shape == (3 * own, 9) and out.weight.shape == (9, own) and out.bias.shape == (9,)
    assert (attn.num_heads, attn.embed_dim) == (3, 9), "nothing outside of it sees a part"
    x = torch.randn(4, 2, 9)
    attn(query=x, key=x, value=x)
    assert calls == [x.shape], "torch never calls the output projection"


def test_objects_parameters_hooks_and_names_stay() -> None:
    run_ranks(2, _objects)


def _outside(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """A penalty on every parameter: each is gathered in that step, and whole from the next one on."""

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        return model.attn(*inputs), [parameter.square().sum() for parameter in model.parameters()]

    shapes = (4, 2, 9), (3, 2, options.get("kdim", 9)), (3, 2, options.get("vdim", 9))
    found = compare(lambda: Attention(3, **options), {"attn": "attention"}, _inputs(rank, *shapes), call)
    whole = Attention(3, **options).double()
    for _ in range(2):
        found.keep_whole_where_used_outside()
    assert not found.sharded
    whole.load_state_dict(found.module.state_dict())
    x = _inputs(rank, *shapes)
    expected, y = whole.attn(*x)[0], found.module.attn(*x)[0]
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    whole.zero_grad(), found.module.zero_grad()
    whole.attn(*x)[0].square().sum().backward()
    found.module.attn(*x)[0].square().sum().backward()
    for name, parameter in found.module.named_parameters():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad)


@pytest.mark.parametrize("name", ["plain", "both, other widths"])
def test_weights_that_the_step_also_uses_outside(name: str) -> None:
    run_ranks(2, _outside, KINDS[name])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": (
        {"attn_mask": torch.zeros(2, 5, 5)},
        r"the `attn_mask` of `attn` has the shape \(2, 5, 5\), but .*\(6, 5",
    ),
    "padding": ({"key_padding_mask": torch.zeros(2, 4)}, r"the `key_padding_mask` of `attn` has the shape \(2, 4\)"),
    "integers": ({"attn_mask": torch.zeros(5, 5, dtype=torch.int)}, "a mask of `attn` is torch.int32, but should be"),
    "hint": ({"is_causal": True}, "`attn` needs `attn_mask` too where is_causal=True is given"),
}


def _wrong(rank: int, world_size: int, arguments: dict[str, Any]) -> None:
    model = Attention(3)
    parallelize(model, {"attn": "attention"})
    x = torch.randn(5, 2, 9)
    model.attn(x, x, x, **arguments)


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_do_not_fit(name: str) -> None:
    arguments, text = WRONG[name]
    with pytest.raises(RankError, match=text):
        run_ranks(2, _wrong, arguments)
