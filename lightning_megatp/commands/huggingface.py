"""A Trainer around any Hugging Face model, for `megatp plan --hf`, `megatp estimate --hf` and `megatp verify --hf`.

python -m lightning_megatp.commands.huggingface MODEL --tp 2 [--pp 2] [--layers 2]

Of these, `megatp estimate` alone takes --dp, --zero, --microbatch, --microbatches, --schedule and --precision; its
optimizer is AdamW.
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

from lightning_megatp import MegaTPStrategy
from lightning_megatp.commands import requested, without_ranks
from lightning_megatp.messages import with_article

ROWS, TOKENS = 2, 16


class Model(LightningModule):
    """A Hugging Face model with its own loss, or the mean square of what it returns first."""

    megatp_batch: Any = None
    """What `megatp estimate` asks about instead of a loader's batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        out = self.model(**batch)
        loss: Tensor | None = getattr(out, "loss", None)
        return out[0].double().square().mean() if loss is None else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if requested() == "estimate":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name or folder of a Hugging Face model; only its config is read")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--layers", type=int, help="use so many layers instead of the config's")
    if requested() == "estimate":
        _add_layout(parser)
    options = parser.parse_args(arguments)
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(options.model)
    if options.layers is not None:
        shorten(config, options.layers)
    no_data = without_ranks()
    with torch.device("meta") if no_data else contextlib.nullcontext():
        model = Model(_build(transformers, config))
    layout: dict[str, Any] = {"tp": options.tp, "pp": options.pp, "microbatches": None if options.pp == 1 else ROWS}
    devices, precision = options.tp * options.pp, None
    if requested() == "estimate":
        layout |= {"zero": options.zero, "schedule": options.schedule, "microbatches": options.microbatches}
        layout |= {"recompute": options.recompute}
        devices, precision = devices * options.dp, options.precision
        rows, tokens = options.microbatch
        parts = (options.microbatches or 4 * options.pp) if options.pp > 1 else 1
        model.megatp_batch = example_batch(model.model, config, True, rows * parts, tokens)
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_steps=1, logger=False, enable_checkpointing=False,
        strategy=MegaTPStrategy(**layout), precision=precision, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader([example_batch(model.model, config, no_data)], batch_size=None))  # type: ignore[arg-type]


def _add_layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--microbatch", type=int, nargs=2, metavar=("ROWS", "TOKENS"), default=(1, 2048))
    parser.add_argument("--microbatches", type=int, help="per batch; by default four per pipeline rank")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--precision", default="bf16-mixed", help="of Lightning's Trainer")


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
    raise ValueError(f"megatp: transformers has no model for {with_article(type(config).__name__)}.")


def example_batch(
    model: Any, config: Any, without_data: bool, rows: int = ROWS, length: int = TOKENS
) -> dict[str, Tensor]:
    """A small random batch for a model, with labels if it takes them."""
    device = "meta" if without_data else "cpu"
    generator = None if without_data else torch.Generator().manual_seed(0)
    text = getattr(config, "get_text_config", lambda: config)()
    name = getattr(model, "main_input_name", "input_ids")

    def tokens() -> Tensor:
        return torch.randint(1, text.vocab_size, (rows, length), generator=generator, device=device)

    if name == "pixel_values":
        size = getattr(config, "image_size", 64)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        shape = (rows, getattr(config, "num_channels", 3), *sides)
        return {"pixel_values": torch.randn(shape, generator=generator, device=device)}
    if name == "input_features":
        shape = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        batch = {"input_features": torch.randn(shape, generator=generator, device=device)}
        return batch | {"labels": tokens()}
    batch = {"input_ids": tokens()}
    if any(word in type(model).__name__ for word in ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration")):
        batch["labels"] = batch["input_ids"].clone()
    return batch


if __name__ == "__main__":
    main()
