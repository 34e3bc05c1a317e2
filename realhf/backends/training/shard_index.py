"""Reads the index of a folder of shards, which is a pickle, without letting it run code.

A checkpoint comes from wherever its folder came from: only the classes that an index consists of are built.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_TYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool complex64 complex128"
)
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_DCP}.metadata", name)
    for name in [
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ]
} | {
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    *(("torch", name) for name in _TYPES.split()),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no index consists of")
        return super().find_class(module_name, global_name)


class ShardReader(FileSystemReader):
    """Is a ``FileSystemReader`` whose index builds nothing but what an index consists of."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index. Raises ValueError, naming the file, on what is none."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # a damaged pickle raises anything
                raise ValueError(f"{path} is not the index of a checkpoint: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{path} is not the index of a checkpoint: it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
