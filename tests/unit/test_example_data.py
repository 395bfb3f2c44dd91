"""examples/gpt/data.py: which bytes are read, how they are split, and what the errors say."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data import ByteWindows, TextBytes, find_files, split


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Ten files of 100 bytes; file i holds only the byte i."""
    for i in range(10):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 100)
    return tmp_path


def first_batches(path: Path, seed: int) -> Tensor:
    data = TextBytes(str(path), context=8, batch_size=2, val_every=5, seed=seed)
    data.setup("fit")
    return torch.stack([x for x, _ in data.train_dataloader()])


def test_standard_library_is_the_default_text() -> None:
    files = find_files(None)
    assert files == sorted(files, key=lambda file: file.relative_to(find_root(files)).as_posix())
    assert {file.suffix for file in files} == {".py"}
    assert not {"test", "tests", "idle_test", "site-packages"} & {part for file in files for part in file.parts}
    train, val = split(files, 20)
    assert len(train) > 4_000_000 and len(val) > 100_000


def find_root(files: list[Path]) -> Path:
    return next(file.parent for file in files if file.name == "argparse.py")


def test_split_is_by_file(texts: Path) -> None:
    train, val = split(find_files(str(texts)), val_every=5)
    assert val.unique().tolist() == [0, 5]
    assert train.unique().tolist() == [1, 2, 3, 4, 6, 7, 8, 9]


def test_single_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(bytes(range(100)))
    train, val = split(find_files(str(file)), val_every=10)
    assert train.tolist() == list(range(90))
    assert val.tolist() == list(range(90, 100))


def test_hidden_files_are_not_read(texts: Path) -> None:
    (texts / ".git").mkdir()
    (texts / ".git" / "objects").write_text("not text")
    (texts / ".hidden").write_text("not text")
    assert len(find_files(str(texts))) == 10


def test_windows_cover_the_text_and_targets_are_one_byte_later() -> None:
    windows = ByteWindows(torch.arange(33, dtype=torch.uint8), context=8)
    assert len(windows) == 4
    assert torch.cat([windows[i][0] for i in range(4)]).tolist() == list(range(32))
    assert torch.cat([windows[i][1] for i in range(4)]).tolist() == list(range(1, 33))


def test_fewer_windows_are_spread_over_the_text() -> None:
    windows = ByteWindows(torch.arange(81, dtype=torch.uint8), context=8, n_windows=5)
    assert [int(windows[i][0][0]) for i in range(len(windows))] == [0, 16, 32, 48, 64]
    assert len(ByteWindows(torch.arange(33, dtype=torch.uint8), context=8, n_windows=1000)) == 4


def test_order_depends_on_the_seed_alone(texts: Path) -> None:
    torch.manual_seed(1)
    first = first_batches(texts, seed=3)
    torch.manual_seed(2)
    assert torch.equal(first, first_batches(texts, seed=3))
    assert not torch.equal(first, first_batches(texts, seed=4))


def test_missing_path(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=rf"'{re.escape(str(missing))}' does not exist\. Give --data\.path"):
        TextBytes(str(missing)).setup("fit")


def test_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=rf"'{re.escape(str(tmp_path))}' holds no text file\. Point --data\.path"
    ):
        TextBytes(str(tmp_path)).setup("fit")


@pytest.mark.parametrize("size", [0, 50])
def test_too_little_text(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.txt"
    file.write_bytes(b"a" * size)
    with pytest.raises(
        ValueError, match=rf"short\.txt gives {size - size // 20} bytes for training, but .* 65\. Point --data\.path"
    ):
        TextBytes(str(file)).setup("fit")


def test_too_little_text_for_validation(texts: Path) -> None:
    with pytest.raises(ValueError, match=r"gives 100 bytes for validation, but one window needs context \+ 1 = 129\."):
        TextBytes(str(texts), context=128).setup("fit")


def test_validation_share_must_leave_training_files() -> None:
    with pytest.raises(ValueError, match=r"val_every is 1, which leaves no file to train on\. Use 2 or more\."):
        TextBytes(val_every=1)
