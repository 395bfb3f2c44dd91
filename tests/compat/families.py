"""Every Hugging Face family that builds offline, tiny, with its usual head and loss, and families written by hand.

The families come from transformers' own auto mappings, one head for each model type; `python -m tests.compat.families`
lists them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.compat.shrink import shrink

ROWS, LENGTH, IMAGE, CLASSES = 4, 16, 32, 4
LENGTHS = (16, 13, 9, 5)
"""How much of each row of 16 a padded batch keeps; other lengths in proportion."""


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    kind: str
    build: Callable[..., LightningModule]
    """Seeded by the caller; `dropout=` for a model with dropout."""
    batch: Callable[[int, bool], Any]
    """(seed, padding) to a batch of 4 rows; None where padding is asked of a family that takes no mask."""


@dataclasses.dataclass(frozen=True)
class Head:
    mapping: str
    kind: str
    labels: str


HEADS = (
    Head("CAUSAL_LM", "decoder", "tokens"),
    Head("MASKED_LM", "encoder", "tokens"),
    Head("SEQ_TO_SEQ_CAUSAL_LM", "encoder-decoder", "tokens"),
    Head("SPEECH_SEQ_2_SEQ", "speech", "text"),
    Head("CTC", "speech", "text"),
    Head("IMAGE_CLASSIFICATION", "vision", "class"),
    Head("AUDIO_CLASSIFICATION", "speech", "class"),
    Head("SEMANTIC_SEGMENTATION", "vision", "map"),
    Head("SEQUENCE_CLASSIFICATION", "encoder", "class"),
    Head("ZERO_SHOT_IMAGE_CLASSIFICATION", "vision", "pairs"),
)


class Step(LightningModule):
    """A Hugging Face model trained as people do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


OVERRIDES: dict[str, dict[str, Any]] = {
}
INPUTS: dict[str, Callable[[torch.Generator], dict[str, Tensor]]] = {}
HEAD_OF: dict[str, str] = {}
UNBUILDABLE: dict[str, str] = {}


@functools.cache
def model_class(name: str, mapping: str) -> Any:
    names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")[name]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def build(name: str, head: Head, dropout: float = 0.0) -> LightningModule:
    cls = model_class(name, head.mapping)
    config = shrink(CONFIG_MAPPING[name], OVERRIDES.get(name), dropout)
    return Step(cls(config))


def batch(name: str, head: Head, seed: int, padding: bool) -> dict[str, Any] | None:
    cls = model_class(name, head.mapping)
    parameters = inspect.signature(cls.forward).parameters
    if padding and "attention_mask" not in parameters:
        return None
    generator = torch.Generator().manual_seed(seed)
    tokens = functools.partial(torch.randint, 10, 100, generator=generator)
    main = cls.main_input_name
    values: dict[str, Any] = {}
    if name in INPUTS:
        values = INPUTS[name](generator)
    elif main == "input_ids":
        values = {"input_ids": tokens((ROWS, LENGTH))}
    elif main == "pixel_values":
        values = {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE, generator=generator)}
    elif main == "input_values":
        values = {"input_values": torch.randn(ROWS, 400, generator=generator)}
    elif main == "input_features":
        values = {"input_features": torch.randn(ROWS, 32, 16, generator=generator)}
    if head.labels == "tokens":
        values["labels"] = values["input_ids"].clone() if head.kind == "decoder" else tokens((ROWS, LENGTH))
    elif head.labels == "text":
        values["labels"] = tokens((ROWS, 6))
    elif head.labels == "class":
        values["labels"] = torch.randint(0, 2, (ROWS,), generator=generator)
    elif head.labels == "map":
        values["labels"] = torch.randint(0, 2, (ROWS, IMAGE, IMAGE), generator=generator)
    else:
        values |= {"input_ids": tokens((ROWS, LENGTH)), "return_loss": True}
    if padding:
        _pad(values, main)
    return values


def _pad(values: dict[str, Any], main: str) -> None:
    """Ragged padding on the right, -100 in the labels there."""
    main = main if main in values and values[main].dim() < 4 else "input_ids"
    length = values[main].size(1)
    kept = torch.tensor([length * part // LENGTHS[0] for part in LENGTHS])
    mask = torch.arange(length) < kept[:, None]
    values["attention_mask"] = mask.long()
    values[main] = values[main] * (mask if values[main].dim() == 2 else mask[..., None])
    labels = values.get("labels")
    if labels is not None and labels.shape == mask.shape:
        values["labels"] = labels.masked_fill(~mask, -100)


@functools.cache
def discovered() -> dict[str, Head]:
    heads: dict[str, Head] = {}
    for head in HEADS:
        for name in getattr(modeling_auto, f"MODEL_FOR_{head.mapping}_MAPPING_NAMES"):
            if HEAD_OF.get(name, head.mapping) == head.mapping:
                heads.setdefault(name, head)
    return heads


FAMILIES: dict[str, Family] = {
    name: Family(name, head.kind, functools.partial(build, name, head), functools.partial(batch, name, head))
    for name, head in discovered().items()
    if name not in UNBUILDABLE
}
