"""A Trainer around any Hugging Face model, for `megatp plan --hf` and `megatp verify --hf`.

python -m lightning_megatp.commands.huggingface MODEL --tp 2 [--pp 2] [--layers 2]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatp.commands import requested
from lightning_megatp import MegaTPStrategy

ROWS, TOKENS = 2, 16


class Model(LightningModule):
    """A Hugging Face model with its own loss, or the mean square of what it returns first."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        loss: Tensor | None = getattr(out, "loss", None)
        return out[0].double().square().mean() if loss is None else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name or folder of a Hugging Face model; only its config is read")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--layers", type=int, help="use so many layers instead of the config's")
    options = parser.parse_args(arguments)
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(options.model)
    if options.layers is not None:
        shorten(config, options.layers)
    plan_only = requested() == "plan"
    with torch.device("meta") if plan_only else contextlib.nullcontext():
        model = Model(_build(transformers, config))
    trainer = Trainer(
        accelerator="cpu", devices=options.tp * options.pp, max_steps=1, logger=False, enable_checkpointing=False,
        strategy=MegaTPStrategy(tp=options.tp, pp=options.pp, microbatches=None if options.pp == 1 else ROWS),
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader([example_batch(model.model, config, plan_only)], batch_size=None))  # type: ignore[arg-type]


def shorten(config: Any, layers: int) -> None:
    """Let a config, and those in it, have fewer layers."""
    for part in (config, *(x for x in vars(config).values() if hasattr(x, "to_diff_dict"))):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers"):  # fmt: skip
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, layers)
        if isinstance(getattr(part, "layer_types", None), list):
            part.layer_types = part.layer_types[:layers]


def _build(transformers: Any, config: Any) -> Any:
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is not None:
        return kind(config)
    for auto in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel"):
        with contextlib.suppress(ValueError):
            return getattr(transformers, auto).from_config(config)
    raise ValueError(f"megatp: transformers has no model for a {type(config).__name__}.")


def example_batch(model: Any, config: Any, without_data: bool) -> dict[str, Tensor]:
    """A small random batch for a model, with labels if it takes them."""
    device = "meta" if without_data else "cpu"
    generator = None if without_data else torch.Generator().manual_seed(0)
    text = getattr(config, "get_text_config", lambda: config)()
    name = getattr(model, "main_input_name", "input_ids")

    def tokens() -> Tensor:
        return torch.randint(1, text.vocab_size, (ROWS, TOKENS), generator=generator, device=device)

    if name == "pixel_values":
        size = getattr(config, "image_size", 64)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        shape = (ROWS, getattr(config, "num_channels", 3), *sides)
        return {"pixel_values": torch.randn(shape, generator=generator, device=device)}
    if name == "input_features":
        shape = (ROWS, config.num_mel_bins, 2 * config.max_source_positions)
        batch = {"input_features": torch.randn(shape, generator=generator, device=device)}
        return batch | {"labels": tokens()}
    batch = {"input_ids": tokens()}
    if any(word in type(model).__name__ for word in ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration")):
        batch["labels"] = batch["input_ids"].clone()
    return batch


if __name__ == "__main__":
    main()
