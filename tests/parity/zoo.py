"""Models beyond the GPT, each with its own data, for pipelines: skips, two trunks, several outputs, Hugging Face's own.

Nothing here imports this package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.parity.models import LEARNING_RATE, Block, GPTConfig


class Zoo(LightningModule):
    """Training shared by the models."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError


class Sequential(Zoo):
    """Activations between the layers are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(8, 3))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])


class UNet(Zoo):
    """Skips from every level down to the same level up, across stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(first))
        middle = F.relu(self.middle(second))
        up = F.interpolate(F.relu(self.up2(torch.cat([middle, second], 1))), scale_factor=2.0)
        return F.mse_loss(self.up1(torch.cat([up, first], 1)), y)


class EncoderDecoder(Zoo):
    """torch's own nn.Transformer with its masks: every decoder layer reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, 8), nn.Embedding(20, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 20)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        length = y.size(1) - 1
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=y.device, dtype=torch.float64)
        h = self.transformer(self.source(x), self.target(y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), y[:, 1:].flatten(), ignore_index=0)


class ResNet(Zoo):
    """Residual convolutions with BatchNorm, which sees a microbatch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
            for _ in range(3)
        )
        self.head = nn.Linear(4, 5)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = self.stem(batch[0])
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return F.mse_loss(self.head(x.mean((2, 3))), batch[1][:, :, 0, 0].repeat(1, 3)[:, :5])


class Auxiliary(Zoo):
    """A second loss from a block in the middle, a number of the first block that is only logged, and layers of the
    first block that the last stage calls by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(GPTConfig()) for _ in range(4))
        self.side, self.head = nn.Linear(16, 20), nn.Linear(16, 20)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = self.tok(x)
        for i, block in enumerate(self.blocks):
            h = block(h)
            if i == 0:
                self.log("first", h.detach().pow(2).mean())
            if i == 1:
                middle = h
        h = h + self.blocks[0].mlp.down(F.silu(self.blocks[0].mlp.up(middle)))  # type: ignore[union-attr, operator]
        side = F.mse_loss(self.side(middle), F.one_hot(y, 20).to(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten()) + 0.3 * side


class SeveralTokensAhead(Zoo):
    """Its norm and its head also take what the modules behind them make (as DeepSeek-V3's), and the embedding is used
    again there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(GPTConfig()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20)
        self.ahead = nn.ModuleList(
            nn.ModuleDict({"join": nn.Linear(32, 16), "block": Block(GPTConfig())}) for _ in range(2)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        loss = F.cross_entropy(self.head(self.norm(h)).transpose(1, 2), y)
        for i, ahead in enumerate(self.ahead, 1):
            h = ahead["block"](ahead["join"](torch.cat([h[:, :-1], self.embed(x[:, i:])], -1)))
            loss = loss + 0.3 * F.cross_entropy(self.head(self.norm(h)).transpose(1, 2), y[:, i:])
        return loss


class TwoInputs(Zoo):
    """A dict of several tensors, strings and numbers; positions, a mask and a bias computed outside of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(20, 16)
        self.position = nn.Parameter(torch.randn(1, 16, 16) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def loss(self, batch: dict[str, Any]) -> Tensor:
        ids, mask = batch["ids"], batch["mask"]
        h = self.tok(ids) * self.scale + self.position[:, : ids.size(1)]
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=~mask)
        weights = mask.to(h) / mask.sum(1, keepdim=True)
        pooled = (h * weights.unsqueeze(-1)).sum(1)
        assert len(batch["names"]) == len(ids)
        return F.cross_entropy(self.head(pooled) * self.scale, batch["label"])


class HuggingFace(Zoo):
    """A model of transformers, with the loss it computes itself."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, **sizes))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    return GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "max_position_embeddings": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=40, hidden_size=16, **sizes, **dropout))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24, "image_size": 8}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(hidden_size=16, patch_size=4, num_labels=5, **sizes, **dropout))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **sizes))


class Samples(Dataset):
    """Samples made by index."""

    def __init__(self, count: int, make: Callable[[torch.Generator], Any]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.samples = [make(generator) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _vectors(g: torch.Generator) -> Any:
    return torch.randn(8, generator=g).double(), torch.randn(3, generator=g).double()


def _images(g: torch.Generator) -> Any:
    return torch.randn(2, 8, 8, generator=g).double(), torch.randn(2, 8, 8, generator=g).double()


def _tokens(g: torch.Generator) -> Any:
    return torch.randint(1, 20, (6,), generator=g), torch.randint(0, 20, (6,), generator=g)


def _padded(g: torch.Generator) -> Any:
    length = int(torch.randint(2, 7, (), generator=g))
    ids = torch.randint(1, 20, (6,), generator=g)
    mask = torch.arange(6) < length
    return {"ids": ids, "mask": mask, "label": torch.randint(0, 4, (), generator=g), "names": f"sample of {length}"}


def _language(g: torch.Generator) -> Any:
    ids = torch.randint(3, 40, (7,), generator=g)
    ignored = torch.rand(7, generator=g) < 0.3
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100), "attention_mask": torch.ones(7).long()}


def _masked(g: torch.Generator) -> Any:
    """Few targets, so that microbatches hold different numbers of them, sometimes none."""
    ids = torch.randint(3, 40, (7,), generator=g)
    ignored = torch.rand(7, generator=g) < 0.8
    return {"input_ids": ids.masked_fill(~ignored, 1), "labels": ids.masked_fill(ignored, -100)}


def _translation(g: torch.Generator) -> Any:
    return {"input_ids": torch.randint(3, 40, (7,), generator=g), "labels": torch.randint(3, 40, (5,), generator=g)}


def _pictures(g: torch.Generator) -> Any:
    return {"pixel_values": torch.randn(3, 8, 8, generator=g).double(), "labels": torch.randint(0, 5, (), generator=g)}


def _shorter(samples: list[Any]) -> Any:
    """Batches of different lengths."""
    x, y = (torch.stack(part) for part in zip(*samples, strict=True))
    length = 3 + int(x.sum()) % 4
    return x[:, :length], y[:, :length]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model and its samples."""

    make: Callable[[], Zoo]
    sample: Callable[[torch.Generator], Any]
    collate: Callable[[list[Any]], Any] | None = None

    def build(self, seed: int = 7) -> Zoo:
        torch.manual_seed(seed)
        return self.make().double()

    def loader(self, samples: int, rows: int) -> DataLoader:
        return DataLoader(Samples(samples, self.sample), batch_size=rows, collate_fn=self.collate)


ZOO: dict[str, Entry] = {
    "sequential": Entry(Sequential, _vectors),
    "unet": Entry(UNet, _images),
    "encoder_decoder": Entry(EncoderDecoder, _tokens),
    "auxiliary": Entry(Auxiliary, _tokens),
    "several_tokens_ahead": Entry(SeveralTokensAhead, _tokens),
    "lengths": Entry(Auxiliary, _tokens, _shorter),
    "two_inputs": Entry(TwoInputs, _padded),
    "resnet": Entry(ResNet, _images),
    "llama": Entry(lambda: HuggingFace(_llama), _language),
    "gpt2": Entry(lambda: HuggingFace(_gpt2), _language),
    "bert": Entry(lambda: HuggingFace(_bert), _masked),
    "vit": Entry(lambda: HuggingFace(_vit), _pictures),
    "t5": Entry(lambda: HuggingFace(_t5), _translation),
}


def couples_samples(name: str) -> bool:
    """Whether a model's output for a sample depends on the other samples: then a microbatch is a batch of its own."""
    return name == "resnet"
