"""Checkpoints of a training engine, of one or several ranks (torch.distributed.checkpoint).

Each rank writes its own files; replicated tensors are written by one rank. A checkpoint can be read
with any number of ranks. Torch pickles the index, and the folder may come from an untrusted source,
so the index is unpickled with an allow-list of classes.
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
"""Index of the tensors in a checkpoint's files. Rank 0 writes it last, so its presence marks a
complete checkpoint."""
_VERSION = "version"
"""Name under which a checkpoint stores the number of train steps."""
_RANDOM = "torch_rng"
"""Name under which a checkpoint stores the state of torch's random number generator."""
_TYPES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool "
    "complex64 complex128"
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
    """Unpickler that creates only allowed classes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module_name}.{global_name}, which no index consists of"
            )
        return super().find_class(module_name, global_name)


class ShardReader(FileSystemReader):
    """``FileSystemReader`` that unpickles the index with an allow-list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index. Raises ValueError naming the file if it is not a valid index."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with self.fs.create_stream(path, "rb") as file:
            try:
                metadata = _Unpickler(file).load()
            except OSError:
                raise
            except Exception as error:  # A damaged pickle can raise any exception.
                raise ValueError(f"{path} is not the index of a checkpoint: {error}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(
                f"{path} is not the index of a checkpoint: it holds a {type(metadata).__name__}"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains a complete checkpoint of ``save_shards``."""
    return (folder / INDEX).is_file()


def save_shards(
    folder: Path, tensors: Mapping[str, Tensor], group: Any = None, rank: int = 0
) -> list[Path]:
    """Write ``tensors`` together with the other ranks of ``group``; return the files that this rank
    wrote.

    Without a group, this process writes everything. All ranks must pass the same names; the tensors
    are shards (``DTensor``) or have equal values on all ranks. Raises this rank's own error, such
    as OSError, or CollectiveBroken if another rank failed.
    """
    with _quiet(), _own_failure(folder, group):
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, sync_files=True, thread_count=1
        )
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    own = sorted(folder.glob(f"__{rank}_*"))
    return [*own, folder / INDEX] if rank == 0 else own


def load_shards(folder: Path, tensors: Mapping[str, Tensor], group: Any = None) -> None:
    """Read ``tensors`` in place, together with the other ranks of ``group`` (None: a single
    process).

    Raises ValueError naming a tensor that is missing or has a different shape, this rank's own
    error, or CollectiveBroken if another rank failed.
    """
    saved = ShardReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise ValueError(f"checkpoint {folder} has no tensor {name}")
        size = getattr(saved[name], "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            raise ValueError(
                f"checkpoint {folder}: {name} has shape {tuple(size or ())}, here "
                f"{tuple(tensor.shape)}"
            )
    if tensors:
        with _quiet(), _own_failure(folder, group):
            load(
                dict(tensors),
                storage_reader=ShardReader(folder),
                process_group=group,
                no_dist=group is None,
            )


@contextlib.contextmanager
def _own_failure(folder: Path, group: Any) -> Iterator[None]:
    """Context manager that raises this rank's own error in place of torch's CheckpointException.

    Torch raises that exception on all ranks. It is not a subclass of ``Exception``, so it would end
    the process.
    """
    try:
        yield
    except CheckpointException as error:
        rank = 0 if group is None else dist.get_rank(group)
        if rank in error.failures:
            raise error.failures[rank][0] from None
        others = ", ".join(
            f"rank {other}: {failed}" for other, (failed, _) in sorted(error.failures.items())
        )
        raise CollectiveBroken(f"checkpoint {folder}: {others}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context manager that suppresses torch's warnings about intended uses: saving in a single
    process, and tensors on the CPU."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
    """Write a checkpoint together with the other ranks of ``group``; return the files that this
    rank wrote.

    It contains the optimizer and the version. With ``weights`` it also contains the weights, and
    without a group the state of torch's random number generator.
    """
    tensors = {**_tensors(model, optimizer, weights), _VERSION: torch.tensor(version)}
    if group is None:
        tensors[_RANDOM] = torch.get_rng_state()
    return save_shards(folder, tensors, group, rank)


def load_state(
    folder: Path,
    model: nn.Module,
    optimizer: PolicyOptimizer | None,
    *,
    weights: bool = True,
    group: Any = None,
) -> int:
    """Read a checkpoint of ``save_state`` into model and optimizer; return the version.

    Any number of ranks may have written it. A weight in fp32 is read from its master weight if the
    checkpoint has one. Raises ValueError naming a tensor that is missing, has a different shape or
    belongs to another model; at most the optimizer's moments have changed then.
    """
    saved = ShardReader(folder).read_metadata().state_dict_metadata
    names = _parameter_names(model)
    _refuse_unknown(
        folder, saved, {*names.values(), *persistent_buffers(model)} if weights else frozenset()
    )
    if optimizer is not None:
        optimizer.reset_moments({p for p, name in names.items() if f"exp_avg/{name}" in saved})
    version = torch.tensor(0)
    random = torch.get_rng_state()
    tensors = {**_tensors(model, optimizer, weights), _VERSION: version}
    if _RANDOM in saved:
        tensors[_RANDOM] = random
    if optimizer is not None and weights:
        for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
            if master is parameter and (own := f"master/{names[parameter]}") in saved:
                tensors[own] = tensors.pop(f"weights/{names[parameter]}")
    load_shards(folder, tensors, group)
    torch.set_rng_state(random)
    if optimizer is not None:
        optimizer.publish()
    return int(version)


def _refuse_unknown(folder: Path, saved: Collection[str], weights: Collection[str]) -> None:
    """Raise ValueError if a checkpoint has weights or master weights that are not in ``weights``.

    Such a checkpoint belongs to another model, for example a deeper one.
    """
    kinds = ("weights/", "master/")
    if more := sorted(
        name for name in saved if name.startswith(kinds) and name.partition("/")[2] not in weights
    ):
        others = f" and {len(more) - 3} more" if len(more) > 3 else ""
        raise ValueError(
            f"checkpoint {folder} is of another model: it has {', '.join(more[:3])}{others}, which "
            f"this one has not"
        )


def _parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of a model. A tied parameter gets only its first name."""
    return {parameter: name for name, parameter in model.named_parameters()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model that are part of its state dict, by name."""
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


def _tensors(
    model: nn.Module, optimizer: PolicyOptimizer | None, weights: bool
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    names = _parameter_names(model)
    tensors = dict[str, Tensor]()
    if weights:
        tensors |= {f"weights/{name}": parameter.detach() for parameter, name in names.items()}
        tensors |= {f"weights/{name}": buffer for name, buffer in persistent_buffers(model).items()}
    return tensors if optimizer is None else tensors | optimizer.tensors(names)
