"""Bytes of real text, cut into windows, as a LightningDataModule.

The default text is on every machine that can run this: the source files of Python's own standard library.
"""

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# Tests repeat themselves, and installed packages differ from machine to machine.
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `context` bytes, each with the same window one byte later as its target.

    Args:
        text: the bytes, uint8.
        context: bytes in a window.
        n_windows: how many windows to take, spread evenly over the text; None takes all that do not overlap.
    """

    def __init__(self, text: Tensor, context: int, n_windows: int | None = None) -> None:
        self.text, self.context = text, context
        fitting = (len(text) - 1) // context
        self.n_windows = fitting if n_windows is None else min(n_windows, fitting)
        self.stride = fitting * context // max(self.n_windows, 1)

    def __len__(self) -> int:
        return self.n_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class TextBytes(LightningDataModule):
    """Text as bytes: every n-th file is for validation, the others are for training.

    A single file is split by position instead: its last n-th part is for validation.

    Args:
        path: a file, or a folder whose files are all read (hidden ones excepted), whole, into memory. Without it:
            the source files of Python's standard library.
        context: bytes that the model sees at once.
        batch_size: windows in a batch.
        val_every: one file in so many is for validation.
        val_windows: windows of the validation text that are used, spread evenly over it.
        seed: of the order in which the training windows come.
    """

    def __init__(
        self,
        path: str | None = None,
        context: int = 64,
        batch_size: int = 16,
        val_every: int = 20,
        val_windows: int = 2048,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if val_every < 2:
            raise ValueError(f"TextBytes: val_every is {val_every}, which leaves no file to train on. Use 2 or more.")
        self.path, self.context, self.batch_size = path, context, batch_size
        self.val_every, self.val_windows, self.seed = val_every, val_windows, seed

    def setup(self, stage: str) -> None:
        if hasattr(self, "train_windows"):
            return
        train, val = split(find_files(self.path), self.val_every)
        for name, text in ("training", train), ("validation", val):
            if len(text) <= self.context:
                raise ValueError(
                    f"TextBytes: {self.path or 'the standard library'} gives {len(text)} bytes for {name}, "
                    f"but one window needs context + 1 = {self.context + 1}. "
                    "Point --data.path to more text, or lower --data.context or --data.val_every."
                )
        self.train_windows = ByteWindows(train, self.context)
        self.val_windows_set = ByteWindows(val, self.context, self.val_windows)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        # A generator of its own: the order depends on the seed alone, whatever else draws random numbers.
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, generator=order, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_windows_set, 4 * self.batch_size)


def find_files(path: str | None) -> list[Path]:
    """The files to read, in an order that is the same everywhere."""
    root = Path(path or sysconfig.get_path("stdlib")).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise FileNotFoundError(
            f"TextBytes: the path {str(root)!r} does not exist. "
            "Give --data.path a text file or a folder of text files, or leave it out for Python's standard library."
        )
    names = (file.relative_to(root) for file in root.rglob("*.py" if path is None else "*") if file.is_file())
    if path is None:
        names = (name for name in names if NOT_THE_LIBRARY.isdisjoint(name.parts))
    else:
        names = (name for name in names if not any(part.startswith(".") for part in name.parts))
    files = [root / name for name in sorted(names, key=Path.as_posix)]
    if not files:
        raise FileNotFoundError(
            f"TextBytes: the folder {str(root)!r} holds no {'source' if path is None else 'text'} file. "
            "Point --data.path to a folder with at least two text files, or to one text file."
        )
    return files


def split(files: list[Path], val_every: int) -> tuple[Tensor, Tensor]:
    """The bytes for training and the bytes for validation; no file is in both, unless there is only one."""
    if len(files) == 1:
        text = read(files)
        n_train = len(text) - len(text) // val_every
        return text[:n_train], text[n_train:]
    val = files[::val_every]
    return read([file for file in files if file not in set(val)]), read(val)


def read(files: list[Path]) -> Tensor:
    text = b"".join(file.read_bytes() for file in files)
    # bytearray: torch wants memory it may write to. frombuffer takes no empty buffer.
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
