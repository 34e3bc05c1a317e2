"""Saves and loads the state of a training engine, alone or with other ranks (torch.distributed.checkpoint).

Each rank writes its own files; what all ranks hold alike, one of them writes. The files are read by any number of
ranks, and by one process alone. Torch pickles the index; a checkpoint comes from wherever its folder came from, and so
reading it builds only the classes that an index consists of.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from realhf.api.parallel import CollectiveBroken
from realhf.backends.training.optimizer import PolicyOptimizer

INDEX = ".metadata"
"""The file that says which tensor lies where; the first rank writes it when all have written theirs."""
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


def is_checkpoint(folder: Path) -> bool:
    """Whether ``save_shards`` wrote a whole checkpoint into this folder."""
    return (folder / INDEX).is_file()


def save_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any = None, rank: int = 0) -> list[Path]:
    """Write ``tensors`` with the other ranks of ``group`` (None: alone); return the files that this rank wrote. All
    ranks name the same tensors: parts of one (``DTensor``), or the same values. Raises what stopped this rank, e.g.
    OSError, or CollectiveBroken where another rank failed."""
    with _quiet(), _own_failure(folder, group):
        writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    own = sorted(folder.glob(f"__{rank}_*"))
    return [*own, folder / INDEX] if rank == 0 else own


def load_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Read into ``tensors``, in place, with the other ranks of ``group`` (None: alone). Raises ValueError that names a
    tensor which is missing, or of another shape; what stopped this rank; CollectiveBroken where another one failed."""
    held = ShardReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in held:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        size = getattr(held[name], "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            raise ValueError(f"checkpoint {folder}: {name} has shape {tuple(size or ())}, here {tuple(tensor.shape)}")
    if tensors:
        with _quiet(), _own_failure(folder, group):
            load(dict(tensors), storage_reader=ShardReader(folder), process_group=group, no_dist=group is None)


@contextlib.contextmanager
def _own_failure(folder: Path, group: Any) -> Iterator[None]:
    """Torch raises one exception on all ranks, which is no ``Exception`` and would end the process: each rank raises
    what happened to it instead."""
    try:
        yield
    except CheckpointException as error:
        rank = 0 if group is None else dist.get_rank(group)
        if rank in error.failures:
            raise error.failures[rank][0] from None
        others = ", ".join(f"rank {other}: {failed}" for other, (failed, _) in sorted(error.failures.items()))
        raise CollectiveBroken(f"checkpoint {folder}: {others}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns here of what is asked for: a process that saves alone, and tensors on the CPU."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


_VERSION, _RANDOM = "version", "torch_rng"


def save_state(
    folder: Path,
    model: nn.Module,
    optimizer: PolicyOptimizer | None,
    version: int,
    *,
    weights: bool = True,
    group: Any = None,
    rank: int = 0,
) -> list[Path]:
    """Write weights (if wanted), optimizer and version with the other ranks of ``group``, and without one the state of
    torch's random numbers; return the files of this rank."""
    tensors = {**_tensors(model, optimizer, weights), _VERSION: torch.tensor(version)}
    if group is None:
        tensors[_RANDOM] = torch.get_rng_state()
    return save_shards(folder, tensors, group, rank)


def load_state(
    folder: Path, model: nn.Module, optimizer: PolicyOptimizer | None, *, weights: bool = True, group: Any = None
) -> int:
    """Read what ``save_state`` wrote, whatever the number of ranks was, into model and optimizer; return the version.
    A weight in fp32 is read from its master weight where there is one. Raises ValueError that names a tensor which is
    missing, of another shape, or of another model; then nothing has changed but, perhaps, the moments of the
    optimizer."""
    held, names = ShardReader(folder).read_metadata().state_dict_metadata, _parameter_names(model)
    _refuse_unknown(folder, held, {*names.values(), *persistent_buffers(model)} if weights else frozenset())
    if optimizer is not None:
        optimizer.begin_moments({p for p, name in names.items() if f"exp_avg/{name}" in held})
    version, random = torch.tensor(0), torch.get_rng_state()
    tensors = {**_tensors(model, optimizer, weights), _VERSION: version}
    if _RANDOM in held:
        tensors[_RANDOM] = random
    if optimizer is not None and weights:
        for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
            if master is parameter and (own := f"master/{names[parameter]}") in held:
                tensors[own] = tensors.pop(f"weights/{names[parameter]}")
    load_shards(folder, tensors, group)
    torch.set_rng_state(random)
    if optimizer is not None:
        optimizer.publish()
    return int(version)


def _refuse_unknown(folder: Path, held: Collection[str], weights: Collection[str]) -> None:
    """Raise ValueError where a checkpoint holds weights, or master weights, of another model than the one that has
    ``weights``: a deeper one, for example."""
    kinds = ("weights/", "master/")
    if more := sorted(name for name in held if name.startswith(kinds) and name.partition("/")[2] not in weights):
        others = f" and {len(more) - 3} more" if len(more) > 3 else ""
        raise ValueError(
            f"checkpoint {folder} is of another model: it has {', '.join(more[:3])}{others}, which this one has not"
        )


def _parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of a model and their names; a tied one has its first name only."""
    return {parameter: name for name, parameter in model.named_parameters()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state of a model."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _tensors(model: nn.Module, optimizer: PolicyOptimizer | None, weights: bool) -> dict[str, Tensor]:
    names, found = _parameter_names(model), dict[str, Tensor]()
    if weights:
        found |= {f"weights/{name}": parameter.detach() for parameter, name in names.items()}
        found |= {f"weights/{name}": buffer for name, buffer in persistent_buffers(model).items()}
    return found if optimizer is None else found | optimizer.tensors(names)
