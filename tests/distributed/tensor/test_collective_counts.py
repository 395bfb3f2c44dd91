"""Collectives of one transformer block, forward and backward, are Megatron's in number and bytes.

A block's share is what a model of three blocks calls more than one of two: the entry to the first block and the exit of
the last are not part of a block. Source: Korthikanti et al. 2022, section 4.2.2: four all-reduces, or four all-gathers
and four reduce-scatters of the same volume; in backward two more all-gathers, since of the inputs of column layers each
rank keeps its own tokens.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.crossing import fewer
from tests.distributed.training import Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import GLOBAL_BATCH, gpt_plan

LENGTH = 8
CONFIGS = {
    "fused": GPTConfig(tied=False),
    "separate": GPTConfig(tied=False, attention="separate", gate="separate"),
    "grouped": GPTConfig(tied=False, attention="separate", kv_heads=2, gate="fused"),
}
KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
EACH = {"allgather_into_tensor_coalesced_": "all-gather", "reduce_scatter_tensor_coalesced_": "reduce-scatter"}
"""Of several at once, each for a row of its own."""


class CollectiveCounter(TorchDispatchMode):
    """Counts the c10d operations called inside it, and the bytes of the full tensors they are about."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.rows = 0
        """That were sent one by one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            sent = [[x for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args]
            values = any(x.is_floating_point() for tensors in sent for x in tensors)  # or objects, gathered as bytes
            kind = {**KINDS, **EACH}.get(name, name) if values else name
            self.calls[kind] += 1
            self.bytes[kind] += max(sum(x.nbytes for x in tensors) for tensors in sent)
            self.rows += max(map(len, sent)) if name in EACH else 0
        from lightning_megatp.shim.torch import DisableTorchFunctionSubclass

        with DisableTorchFunctionSubclass():  # as without this mode: operations below autograd see plain tensors
            return func(*args, **(kwargs or {}))


class Counted(GPT):
    """Counts while its own forward and its own backward run."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.counters: list[tuple[CollectiveCounter, CollectiveCounter]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.counters.append((CollectiveCounter(), CollectiveCounter()))
        with self.counters[-1][0]:
            return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.counters[-1][1]:
            super().backward(loss, *args, **kwargs)


def _count(
    layout: Layout, config: GPTConfig, layers: int, kept: int, precision: Any = "64-true", long: int = 2**20
) -> list[tuple[Counter[str], Counter[str]]]:
    """Calls and bytes of the second step's forward and of its backward: the first step may look around."""
    torch.manual_seed(0)
    module = Counted(GPTConfig(**{**config.__dict__, "layers": layers}))
    plan = {name: style for name, style in gpt_plan(config).items() if name not in ("tok", "head")}
    trainer = make_trainer(layout, strategy={"plan": plan}, limit_train_batches=2, precision=precision)
    tensor = "lightning_megatp.tensor"
    with (
        mock.patch(f"{tensor}.entry.KEPT_BYTES", kept),
        mock.patch(f"{tensor}.collectives.LONG_ROW", long),
    ):
        trainer.fit(module, train_loader(layout, 2, length=LENGTH))
    assert all(bool(counter.rows) == (long == 0) for counter in module.counters[-1])
    return [(counter.calls, counter.bytes) for counter in module.counters[-1]]


def _block(layout: Layout, config: GPTConfig, kept: int = 0, *more: Any) -> list[tuple[Counter[str], Counter[str]]]:
    """The same, of one block; sequences up to `kept` bytes stay gathered."""
    three, two = (run_program(layout, _count, config, layers, kept, *more)[0] for layers in (3, 2))
    for (calls3, bytes3), (calls2, bytes2) in zip(three, two, strict=True):
        calls3.subtract(calls2)
        bytes3.subtract(bytes2)
    return [(+calls, +sent) for calls, sent in three]


def _ring_volume(tp: int, sent: Counter[str]) -> float:
    """Bytes received per rank by ring algorithms."""
    factor = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    return sum(factor[kind] * size * (tp - 1) / tp for kind, size in sent.items())


@pytest.mark.parametrize(("name", "tp"), fewer(itertools.product(CONFIGS, [2, 4]), extended=[("fused", 4)]))
def test_a_block_costs_two_all_reduces_each_way(name: str, tp: int) -> None:
    config = CONFIGS[name]
    hidden_states = GLOBAL_BATCH * LENGTH * config.hidden * 8
    for calls, sent in _block(Layout(tp=tp, sequence=False), config):
        assert calls == {"all-reduce": 2}
        assert sent == {"all-reduce": 2 * hidden_states}


@pytest.mark.parametrize(
    ("name", "tp", "long"),
    fewer(
        ((name, *ranks) for name in CONFIGS for ranks in [(2, 2**20), (4, 2**20), (2, 0)]),
        extended=[("fused", 4, 2**20)],
    ),
)
def test_a_sequence_region_costs_two_gathers_and_two_reduce_scatters_each_way(name: str, tp: int, long: int) -> None:
    """So do rows of a batch that are long enough to be sent one by one: all of them at once."""
    config = CONFIGS[name]
    hidden_states = GLOBAL_BATCH * LENGTH * config.hidden * 8
    block = _block(Layout(tp=tp), config, 0, "64-true", long)
    for (calls, sent), gathers in zip(block, (2, 4), strict=True):
        assert calls == {"all-gather": gathers, "reduce-scatter": 2}
        assert sent == {"all-gather": gathers * hidden_states, "reduce-scatter": 2 * hidden_states}
    volume = sum(_ring_volume(tp, sent) for _, sent in block)
    expected = (4 * 2 + 2) * (tp - 1) / tp * hidden_states
    assert math.isclose(volume, expected), "the bytes of four all-reduces, and of two gathers for weight gradients"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sequence", [True, False])
def test_under_autocast_sixteen_bits_are_sent(sequence: bool, name: str) -> None:
    """What enters is the output of a norm, in float32; its linear layers compute in bfloat16."""
    config = CONFIGS[name]
    hidden_states = GLOBAL_BATCH * LENGTH * config.hidden * 2
    for _, sent in _block(Layout(tp=2, sequence=sequence), config, 0, "bf16-mixed"):
        assert sent["all-reduce"] == (0 if sequence else 2 * hidden_states)
        assert sent["reduce-scatter"] == (2 * hidden_states if sequence else 0)
        assert sent["all-gather"] % hidden_states == 0 and sent["all-gather"] <= 4 * hidden_states


def test_a_small_sequence_is_not_gathered_again() -> None:
    config = CONFIGS["fused"]
    for calls, _ in _block(Layout(tp=2), config, GLOBAL_BATCH * LENGTH * config.hidden * 8):
        assert calls == {"all-gather": 2, "reduce-scatter": 2}


def test_the_gradients_of_parameters_in_sequence_regions_cost_one_all_reduce_per_step() -> None:
    calls = run_program(Layout(tp=2), _count_step, CONFIGS["fused"])[0]
    assert calls == {"all-reduce": 1 + 1}, "and one of norms, since a hook may look at them"


class _AfterBackward(Counted):
    """Counts from the end of the module's backward to the optimizer step."""

    def on_after_backward(self) -> None:
        self.mode.__exit__(None, None, None)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.mode = CollectiveCounter()
        self.mode.__enter__()


def _count_step(layout: Layout, config: GPTConfig) -> Counter[str]:
    torch.manual_seed(0)
    module = _AfterBackward(config)
    plan = {name: style for name, style in gpt_plan(config).items() if name not in ("tok", "head")}
    trainer = make_trainer(layout, strategy={"plan": plan}, limit_train_batches=2)
    trainer.fit(module, train_loader(layout, 2, length=LENGTH))
    return module.mode.calls
