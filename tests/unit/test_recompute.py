"""What is recomputed, on one process: the same gradients bit by bit, and the bytes that are kept."""

from __future__ import annotations

import copy
import gc
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_megatp import MegaTPStrategy
from lightning_megatp.building.recording import default_dtype
from lightning_megatp.recompute.blocks import Recomputation, blocks_to_recompute
from lightning_megatp.recompute.offload import OffloadActivations
from lightning_megatp.recompute.options import RecomputeOptions
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.tensor.random import RankStream

B, S, H, A = 2, 64, 32, 4


class Block(nn.Module):
    """Attention as `style` writes it, with dropout; a batch norm, keyword arguments and a tuple besides."""

    def __init__(self, style: str = "plain") -> None:
        super().__init__()
        self.style = style
        self.norm, self.batch_norm = nn.LayerNorm(H), nn.BatchNorm1d(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, mask: Tensor | None, extra: dict[str, Any]) -> tuple[Tensor, None]:
        q, k, v = self.qkv(self.norm(x)).view(B, S, 3, A, H // A).permute(2, 0, 3, 1, 4)
        attend = getattr(self, f"_{self.style}")
        y = self.out(attend(q, k, v, mask).transpose(1, 2).reshape(B, S, H))
        y = self.batch_norm(self.drop(y).transpose(1, 2)).transpose(1, 2)
        return x + extra["scale"] * y, None

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        return F.dropout(scores.masked_fill(mask, -torch.inf).softmax(-1), 0.2, self.training) @ v

    def _in_place(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT)
        scores /= math.sqrt(q.shape[-1])
        scores.masked_fill_(mask, -torch.inf)
        return torch.matmul(F.dropout(torch.softmax(scores, -1), 0.2, self.training, inplace=True), v)

    def _unrecorded_change(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bhld,bhsd->bhls", q, k)
        scores[..., 0] = scores[..., 0] * 2  # no operation that carries a core on
        return F.dropout(F.softmax(scores.masked_fill(mask, -torch.inf), -1), 0.2) @ v

    def _batched(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        bias = torch.zeros(1, S, S, dtype=q.dtype).masked_fill(mask, -1e4)
        scores = torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=0.3)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(F.dropout(weights, 0.2), v).unflatten(0, (B, A))

    def _two_cores(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        first, second = q @ k.mT, (q * 0.5) @ v.mT
        weights = (first + second).masked_fill(mask, -torch.inf).softmax(-1)
        return F.dropout(weights, 0.2) @ v + F.dropout(second, 0.5).tanh() @ k

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)

    def _own_checkpoint(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self._plain, q, k, v, mask, use_reentrant=False)


STYLES = ["plain", "in_place", "unrecorded_change", "batched", "two_cores", "sdpa", "own_checkpoint"]


class Model(nn.Module):
    def __init__(self, style: str, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(style) for _ in range(layers))
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(S, S, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x, _ = block(x, mask=mask, extra={"scale": 0.5})
        return self.head(x).square().mean()


def context() -> Any:
    return SimpleNamespace(stream=RankStream(0), size=1, rank=0, open_region=None, is_dry=is_fake)


class Kept:
    """Bytes of what autograd saves, shared storages once, without parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._held = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
        self._saved: list[Tensor] = []
        self.hooks = saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: Tensor) -> Tensor:
        self._saved.append(x)
        return x

    @property
    def bytes(self) -> int:
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._saved}
        return sum(size for pointer, size in sizes.items() if pointer not in self._held)


def run(model: nn.Module, kind: Any, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], int]:
    """Two steps; the loss, the state of the generator, gradients and buffers after them, and the bytes kept."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).to(dtype)
    x = torch.randn(B, S, H, dtype=dtype)
    Recomputation(model, context()).choose(RecomputeOptions.of(kind))
    for _ in range(2):
        kept = Kept(model)
        with kept.hooks:
            loss = model(x)
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), torch.get_rng_state(), *gradients, *model.buffers()], kept.bytes


@pytest.mark.parametrize("style", STYLES)
def test_recomputation_changes_nothing_but_memory(style: str) -> None:
    model = Model(style)
    expected, most = run(model, "none")
    for kind in ("selective", "full", {"blocks": 1}):
        found, kept = run(model, kind)
        assert all(map(torch.equal, found, expected)), kind
        as_usual = kind == "selective" and style in ("own_checkpoint", "unrecorded_change")
        assert kept == most if as_usual else kept < most


def test_bytes_are_those_of_the_formulas() -> None:
    """Per layer, in 16 bit: the attention core is 2 x 2 a s s b for scores and dropped scores, and 2 here for the mask,
    which torch's dropout keeps in the dtype of its input on a CPU; from its inputs a block keeps 2 s b h."""

    def per_layer(kind: Any) -> int:
        three, two = (run(Model("plain", layers), kind, torch.bfloat16)[1] for layers in (3, 2))
        return three - two

    core = 3 * 2 * A * S * S * B
    assert per_layer("none") - per_layer("selective") == core
    assert per_layer("full") == 2 * S * B * H
    first = run(Model("plain", 3), {"blocks": 1}, torch.bfloat16)[1]
    assert first == run(Model("plain", 2), "none", torch.bfloat16)[1] + 2 * S * B * H


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_a_graph_can_be_used_twice_or_dropped_and_nothing_stays(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Model("plain"), torch.randn(B, S, H)
    Recomputation(model, context()).choose(RecomputeOptions.of(kind))
    weight = model.blocks[0].qkv.weight
    counts = []
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            loss = model(x)
            if step < 2:
                (first,) = torch.autograd.grad(loss, weight, retain_graph=True)
                (second,) = torch.autograd.grad(loss, weight)
                assert torch.equal(first, second)
                del first, second
            del loss
            counts.append(sum(isinstance(x, Tensor) for x in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[0] == counts[1] == counts[2]


def test_evaluation_and_copies_run_as_before() -> None:
    model, x = Model("plain").eval(), torch.randn(B, S, H)
    expected = model(x)
    recomputation = Recomputation(model, context())
    recomputation.choose(RecomputeOptions("full"))
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert isinstance(model.blocks[0], Block) and list(model.state_dict()) == list(Model("plain").state_dict())
    twin = copy.deepcopy(model)
    twin.blocks[0].qkv.weight.data.zero_()
    assert not torch.equal(twin(x), expected) and torch.equal(model(x), expected)


def test_hooks_run_once() -> None:
    model, calls = Model("plain"), []
    Recomputation(model, context()).choose(RecomputeOptions("full"))
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model(torch.randn(B, S, H)).backward()
    assert calls == ["before", "after"]


class _OfDefaultDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.arange(4.0)).tanh()


def test_a_block_finds_the_default_dtype_again() -> None:
    """Lightning's 64-true and bf16-true set it for the step, not for its backward."""
    model = nn.Module()
    model.blocks = nn.ModuleList(_OfDefaultDtype().bfloat16() for _ in range(2))
    Recomputation(model, context()).choose(RecomputeOptions("full"))
    x = torch.randn(2, 4, dtype=torch.bfloat16).requires_grad_()
    with default_dtype(torch.bfloat16):
        y = model.blocks[0](x)
    y.sum().backward()
    assert torch.get_default_dtype() == torch.float32


class _InPlaceInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x += self.linear(x)
        return x


def test_a_block_that_changes_its_input_is_refused() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(_InPlaceInput() for _ in range(2))
    Recomputation(model, context()).choose(RecomputeOptions("full"))
    with pytest.raises(RuntimeError, match="MegaTPStrategy: an _InPlaceInput changes its input in place"):
        model.blocks[0](torch.randn(2, 4).requires_grad_() * 1)


def test_blocks_are_what_lists_repeat() -> None:
    model = nn.Module()
    model.tok, model.norm = nn.Embedding(4, 4), nn.LayerNorm(4)
    model.layers = nn.ModuleList([Block(), Block(), nn.LayerNorm(4)])
    model.tail = nn.ModuleList([Block()])
    model.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert blocks_to_recompute(model) == ["layers.0", "layers.1", "tail.0"]


def test_pairs_in_a_list_are_blocks() -> None:
    class Other(Block):
        pass

    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(2))
    assert blocks_to_recompute(model) == [f"layers.{i}.{j}" for i in range(2) for j in range(2)]


@pytest.mark.parametrize("value", ["all", "", None, True, 2, {"layers": 1}, {"blocks": 1, "more": 2}])
def test_unknown_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r'MegaTPStrategy: recompute=.* is unknown. Use "none", "selective", "full"'):
        MegaTPStrategy(recompute=value)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_numbers_of_blocks_are_positive(count: Any) -> None:
    with pytest.raises(ValueError, match="a number of blocks is 1 or more"):
        MegaTPStrategy(recompute={"blocks": count})


def test_more_blocks_than_there_are() -> None:
    recomputation = Recomputation(Model("plain", 3), context())
    with pytest.raises(ValueError, match=r'recompute=\{"blocks": 4\}, but the model has 3 blocks'):
        recomputation.choose(RecomputeOptions("full", 4))
    stages = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "head": 1}
    with pytest.raises(ValueError, match="no pipeline stage has more than 2 blocks"):
        recomputation.choose(RecomputeOptions("full", 3), stages)
    recomputation.choose(RecomputeOptions("full", 1), stages)
    assert "2 of 3 blocks (blocks.0, blocks.2)" in recomputation.describe()


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this one has none: no nn\.ModuleList"):
        Recomputation(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), context())


def test_offloading_leaves_parameters_and_small_tensors_where_they_are() -> None:
    model, x = nn.Linear(256, 256), torch.randn(128, 256).requires_grad_()
    copied = []
    hooks = OffloadActivations([*model.parameters()], pin_memory=False)

    def pack(x: Tensor) -> Any:
        packed = hooks.pack_hook(x)
        copied.append((tuple(x.shape), isinstance(packed, tuple)))
        return packed

    with saved_tensors_hooks(pack, hooks.unpack_hook):
        loss = (model(x).relu() * torch.ones(256)).sum()
    loss.backward()
    assert ((128, 256), True) in copied and ((256, 256), False) in copied and ((256,), False) in copied


@pytest.mark.extended
@pytest.mark.parametrize("in_place", [True, False], ids=["compile()", "torch.compile"])
def test_compiled_blocks_run_again_as_a_whole(in_place: bool) -> None:
    """Compiled, here into what torch does anyway: a machine for tests need not have a compiler."""
    model = Model("plain")
    expected, _ = run(model, "none")
    for i in range(2):
        if in_place:
            model.blocks[i].compile(backend="eager")
        else:
            model.blocks[i] = torch.compile(model.blocks[i], backend="eager")
    torch.manual_seed(0)
    model, x = model.double(), torch.randn(B, S, H, dtype=torch.float64)
    recomputation = Recomputation(model, context())
    with pytest.warns(UserWarning, match='recompute="selective" leaves blocks.0 and its like as they are'):
        recomputation.choose(RecomputeOptions("selective"))
    recomputation.choose(RecomputeOptions("full"))
    for _ in range(2):
        kept = Kept(model)
        with kept.hooks:
            model(x).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for gradient, wanted in zip(gradients, expected[2:], strict=False):
        torch.testing.assert_close(gradient, wanted)
    assert kept.bytes < 4 * B * S * H * 8


def test_blocks_whose_forward_is_never_called_are_told() -> None:
    model = Model("plain")
    recomputation = Recomputation(model, context())
    recomputation.choose(RecomputeOptions("full"))
    with pytest.warns(UserWarning, match="`recompute` has no effect: the step calls the parts of blocks.0"):
        recomputation.warn_if_unused()
    with pytest.raises(ValueError, match="never their forward"):
        recomputation.choose(RecomputeOptions("full"), {"blocks.0.qkv": 0, "head": 1})
