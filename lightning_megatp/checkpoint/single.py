"""A checkpoint as one file, which is complete or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_megatp.checkpoint.files import durable, remove


def durable_checkpoint_io(base: Any) -> Any:
    """Lightning's plugin for files, which puts them together in memory, and neither asks for the disk (fsync) nor takes
    `storage_options`.

    Args:
        base: `TorchCheckpointIO` of one copy of Lightning.
    """

    class DurableCheckpointIO(base):
        """Writes straight to a temporary name, brings it to the disk, and renames it."""

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
            filesystem, name = url_to_fs(str(path), **(storage_options or {}))
            if isinstance(filesystem, LocalFileSystem):
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                with durable(Path(name)) as file:
                    torch.save(checkpoint, file)
            elif storage_options is None:
                super().save_checkpoint(checkpoint, path)
            else:
                with filesystem.transaction, filesystem.open(name, "wb") as file:
                    torch.save(checkpoint, file)

        def remove_checkpoint(self, path: Any) -> None:
            filesystem, name = url_to_fs(str(path))
            if isinstance(filesystem, LocalFileSystem):
                remove(Path(name))
            else:
                super().remove_checkpoint(path)

    return DurableCheckpointIO()
