"""What torch.distributed.checkpoint keeps under private names. Seen in torch 2.11, 2.13 and 2.15."""

from __future__ import annotations

import pickle
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

METADATA_FILE = ".metadata"
"""`torch.distributed.checkpoint.filesystem._metadata_fn`: where a folder says what is in which of its files."""


def read_dcp_metadata(file: IO[bytes]) -> Metadata:
    """Unpickle `.metadata`, and nothing but the classes it is made of: torch itself (FileSystemReader.read_metadata)
    runs whatever code a stranger's file asks for.

    Raises:
        pickle.UnpicklingError: it asks for another class.
    """
    metadata: Metadata = _MetadataUnpickler(file).load()
    return metadata


def file_view(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """A part of a file as a file of its own, which torch.load needs."""
    view: IO[bytes] = _create_file_view(file, offset, length)  # type: ignore[arg-type, assignment]
    return view


def written_item(item: WriteItem, file: str, offset: int, length: int) -> WriteResult:
    """Where a chunk was written, as FileSystemReader wants to know it."""
    return WriteResult(item.index, length, _StorageInfo(file, offset, length))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()) and not (module == "torch" and name in _DTYPES):
            raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


_CLASSES = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath", "PurePosixPath"},  # Python 3.13
}
_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
}


def storage_offset_in_file(storage: Any) -> int:
    """Where the bytes of a storage are in the `.ckpt` that was loaded under a FakeTensorMode. torch's notes on
    serialization name the attribute; it has no public one."""
    return int(storage._checkpoint_offset)
