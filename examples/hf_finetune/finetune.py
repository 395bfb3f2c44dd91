"""Fine-tune a Hugging Face causal language model on text: an ordinary Lightning project.

python examples/hf_finetune/finetune.py fit --config examples/hf_finetune/tp2_pp2.yaml

Nothing here knows about parallelism, and there is no plan: the strategy in the YAML is all there is.
"""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


class CausalLM(LightningModule):
    """A causal language model with its own loss.

    Args:
        pretrained: name or folder of a model; without one, a small Llama that starts from nothing.
        lr: of AdamW.
    """

    def __init__(self, pretrained: str | None = None, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        if pretrained is not None:
            self.model = AutoModelForCausalLM.from_pretrained(pretrained)
        else:
            small = LlamaConfig(
                vocab_size=256,
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                bos_token_id=None,
                eos_token_id=None,
            )
            self.model = AutoModelForCausalLM.from_config(small)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of tokens, labels the same (the model shifts them)."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": window, "labels": window.clone()}


class Text(LightningDataModule):
    """A text in windows.

    Args:
        path: a text file, or a folder of which all `*.txt`, `*.md` and `*.py` files are read; without one, a part of
            Python's standard library.
        tokenizer: name or folder of a tokenizer; without one, tokens are bytes.
        length: tokens in a window.
        batch_size: windows in a batch.
    """

    def __init__(
        self, path: str | None = None, tokenizer: str | None = None, length: int = 64, batch_size: int = 16
    ) -> None:
        super().__init__()
        self.path, self.tokenizer, self.length, self.batch_size = path, tokenizer, length, batch_size

    def setup(self, stage: str) -> None:
        root = Path(self.path or Path(sysconfig.get_path("stdlib")) / "email")
        files = [root] if root.is_file() else sorted(f for f in root.rglob("*") if f.suffix in (".txt", ".md", ".py"))
        text = b"".join(file.read_bytes() for file in files)
        if self.tokenizer is None:
            tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        else:
            tokens = torch.tensor(AutoTokenizer.from_pretrained(self.tokenizer)(text.decode(errors="ignore")).input_ids)
        held_out = len(tokens) // 10
        self.train = Windows(tokens[:-held_out], self.length)
        self.val = Windows(tokens[-held_out:], self.length)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size)


if __name__ == "__main__":
    LightningCLI(CausalLM, Text)
