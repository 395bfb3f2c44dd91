"""The models of the parity runs by name, each with its plan and its data. Nothing here imports this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from tests.parity import models, module_kinds, other_models
from tests.parity import unusual_models as unusual
from tests.parity.models import GPTConfig

Plan = dict[str, Any]
GLOBAL_BATCH = 4


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model, its plan, and its vocabulary for the data."""

    make: Callable[[], LightningModule]
    plan: Plan
    vocab: int = 32
    warns: str = ""
    """What the strategy has to say about this plan at tp > 1."""

    def build(self, seed: int = 7) -> LightningModule:
        torch.manual_seed(seed)
        return self.make()


def gpt_plan(c: GPTConfig, prefix: str = "") -> Plan:
    """The plan of a GPT, with a sequence region per block unless the block mixes tokens itself."""
    unit = c.hidden // c.heads
    attention, mlp = f"{prefix}blocks.*.attn", f"{prefix}blocks.*.mlp"
    plan: Plan = {f"{prefix}tok": "vocab", f"{prefix}head": "column_gather"}
    if not c.inside:
        plan[f"{prefix}blocks.*"] = "sequence"
    if c.attention == "fused":
        kv_size = (c.kv_heads or c.heads) * unit
        parts: int | list[int] = [c.hidden, kv_size, kv_size] if c.kv_heads else 3
        plan[f"{attention}.qkv"] = {"style": "column", "parts": parts, "unit": unit}
        plan[f"{attention}.n_head"] = plan[f"{attention}.n_kv_head"] = "divide"
    else:
        plan |= {f"{attention}.{name}": {"style": "column", "unit": unit} for name in "qkv"}
    plan[f"{attention}.out"] = {"style": "row", "unit": unit}
    if c.gate == "fused":
        plan[f"{mlp}.gate_up"] = {"style": "column", "parts": 2}
    else:
        plan[f"{mlp}.up"] = "column"
    if c.gate == "separate":
        plan[f"{mlp}.gate"] = "column"
    plan[f"{mlp}.down"] = "row"
    if c.norm == "own":
        plan[f"{prefix}blocks.*.norm1"] = plan[f"{prefix}blocks.*.norm2"] = "token_local"
    return plan


def gpt(kind: type[models.GPT] = models.GPT, plan: Plan | None = None, warns: str = "", **options: Any) -> Variant:
    """A variant of the GPT. `plan` is added to its usual plan; a value of None removes an entry."""
    c = GPTConfig(**options)
    entries = {**gpt_plan(c), **(plan or {})}
    return Variant(lambda: kind(c), {k: v for k, v in entries.items() if v is not None}, c.vocab, warns)


ENCODER_PLAN: Plan = {
    "tok": "vocab",
    "layers.*": {"style": "sequence", "dim": 0},
    "layers.*.qkv": {"style": "column", "parts": 3, "unit": 4},
    "layers.*.n_head": "divide",
    "layers.*.out": {"style": "row", "unit": 4},
    "layers.*.up": "column",
    "layers.*.down": "row",
    "head": "column_gather",
}
REGRESSION_PLAN: Plan = {
    "tok": "hidden",
    "net.0": "column",
    "net.2": "row",
    "middle": "column_gather",
    "wide": "row_split",
}

VARIANTS: dict[str, Variant] = {
    "tied": gpt(),
    "untied": gpt(tied=False),
    "separate": gpt(attention="separate"),
    "grouped": gpt(attention="separate", kv_heads=2, tied=False),
    "grouped_fused": gpt(kv_heads=2),
    "swiglu_rms": gpt(attention="separate", gate="separate", norm="rms", bias=False, tied=False),
    "swiglu_own": gpt(attention="separate", gate="fused", norm="own", bias=False),
    "uneven": gpt(hidden=24, heads=6, feed_forward=30, vocab=97),
    "uneven_separate": gpt(hidden=24, heads=6, feed_forward=29, vocab=97, attention="separate", gate="separate"),
    "qk_norm": gpt(attention="separate", qk_norm=True),
    "positions": gpt(inside="positions"),
    "positions_in_region": gpt(inside="positions", plan={"blocks.*": "sequence"}),
    "convolution": gpt(inside="convolution"),
    "convolution_in_region": gpt(inside="convolution", plan={"blocks.*": "sequence"}),
    "mean_in_region": gpt(inside="mean", plan={"blocks.*": "sequence"}),
    "pooled": gpt(models.Pooled),
    "unused": gpt(models.WithUnused),
    "regularised": gpt(models.Regularised, warns="blocks.0.mlp.up"),
    "head_outside": gpt(models.HeadOutside, {"head": None}),
    "manual": gpt(models.Manual),
    "configured": Variant(models.Configured, gpt_plan(GPTConfig(), "gpt.")),
    "encoder": Variant(other_models.Encoder, ENCODER_PLAN),
    "regression": Variant(other_models.Regression, REGRESSION_PLAN),
}
# Variants of other tests, outside the parity matrix. Random masks inside regions can't be those of one device.
EXTRA: dict[str, Variant] = {
    "late_regulariser": gpt(unusual.LateRegulariser),
    "regularised_everywhere": gpt(unusual.RegularisedEverywhere),
    "recomputed": gpt(unusual.Recomputed),
    "recomputed_dropout": gpt(unusual.Recomputed, dropout=0.1),
    "recomputed_reentrant": gpt(unusual.RecomputedReentrant),
    "recomputed_by_function": gpt(unusual.RecomputedByFunction),
    "recomputed_parts": gpt(unusual.RecomputedParts),
    "looked_at": gpt(unusual.LookedAt),
    "twice": gpt(unusual.Twice),
    "replaced": gpt(unusual.Replaced),
    "in_place": gpt(unusual.InPlace, gate="separate"),
    "gradient_penalty": gpt(unusual.GradientPenalty),
    "adaptive_weights": gpt(unusual.AdaptiveWeights),
    "manual_accumulation": gpt(unusual.ManualAccumulation),
    "computed": gpt(unusual.Computed, plan={"head": None}, tied=False),
    "dropout": gpt(dropout=0.1),
    "attention_dropout": gpt(attention_dropout=0.1),
    "both_dropouts": gpt(dropout=0.1, attention_dropout=0.1),
    "deep": gpt(layers=6, tied=False),
    "deep_tied": gpt(layers=7),
    "torch_encoder": Variant(module_kinds.TorchEncoder, module_kinds.TORCH_PLAN),
    "torch_decoder": Variant(module_kinds.TorchDecoder, module_kinds.DECODER_PLAN),
    "gated": Variant(lambda: module_kinds.Blocks(module_kinds.GatedBlock), module_kinds.GATED_PLAN),
    "conv1d": Variant(lambda: module_kinds.Blocks(module_kinds.Conv1DBlock), module_kinds.CONV1D_PLAN),
    "experts": Variant(lambda: module_kinds.Blocks(module_kinds.ExpertsBlock), module_kinds.EXPERTS_PLAN),
}


def variant(name: str) -> Variant:
    return VARIANTS.get(name) or EXTRA[name]


def loader(vocab: int, length: int, samples: int, dp: int = 1, seed: int = 11, rows: int = GLOBAL_BATCH) -> DataLoader:
    """The same batches of `rows` samples for every dp.

    At dp > 1 Lightning puts its DistributedSampler into a training loader, which always shuffles (seed 0, epoch 0) and
    gives rank r the shuffled indices r, r + dp, ...: step k of all dp ranks covers what step k of one device covers in
    shuffled order.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (samples, length + 1), generator=generator)
    if dp == 1:
        tokens = tokens[torch.randperm(samples, generator=torch.Generator().manual_seed(0))]
    return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=rows // dp, shuffle=False)
