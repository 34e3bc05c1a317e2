"""Publishes weights as a safetensors file per version, for hosts that share a folder and for engines that load files.

Files are written under a temporary name and renamed, so a name that ends in ``.safetensors`` is always complete; any
safetensors library reads it. Names carry the process that wrote the file. At its start a publisher removes what killed
publishers left in its folder: processes of this host that are gone, and its own predecessor, wherever that ran. Nothing
is synced to the device: recovery starts from a checkpoint, never from these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.api.keys import ITEMSIZE
from realhf.base.files.whole_file import whole_file
from realhf.base.process_id import host_token, start_time
from realhf.transport.weights.flat_buffer import Buffer, WeightsError, WeightsGone, checksum

SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "u8": "U8",
    "i16": "I16",
    "i32": "I32",
    "i64": "I64",
    "f16": "F16",
    "bf16": "BF16",
    "f32": "F32",
    "f64": "F64",
}
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors format allows."""

NAME = re.compile(
    r"(?P<owner>.+)\.(?P<host>[0-9a-f]{8})\.(?P<pid>\d+)\.(?P<started>\d+)\.v\d+\.[0-9a-f]{8}"
    r"\.safetensors(\.partial)?"
)


class WeightFile:
    """Owns one version's file. Raises OSError when it cannot be written; then no part of it stays."""

    def __init__(self, folder: Path, stem: str, version: int, slots: tuple[TensorSlot, ...], buffer: Buffer) -> None:
        self.checksum = checksum(buffer)
        self._path = folder.resolve() / f"{stem}.v{version}.{self.checksum[:8]}.safetensors"
        self.location = str(self._path)
        with whole_file(self._path) as partial, partial.open("wb") as file:
            _write(file, version, slots, buffer)

    def close(self) -> None:
        """Remove the file; a receiver that has opened it can still read it to its end."""
        self._path.unlink(missing_ok=True)


def file_stem(run_id: str, worker: str) -> str:
    """Return how the names of this process's files begin."""
    return f"{_owner(run_id, worker)}.{_host()}.{os.getpid()}.{start_time(os.getpid())}"


def sweep(folder: Path, run_id: str, worker: str) -> list[str]:
    """Remove files of publishers that are gone; return their names."""
    removed: list[str] = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        here = match["host"] == _host()
        alive = here and start_time(int(match["pid"])) == int(match["started"])
        if not alive and (here or match["owner"] == _owner(run_id, worker)):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _owner(run_id: str, worker: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", f"{run_id}-{worker}")


def _host() -> str:
    return hashlib.blake2b(host_token().encode(), digest_size=4).hexdigest()


def _write(file: BinaryIO, version: int, slots: tuple[TensorSlot, ...], buffer: Buffer) -> None:
    # The widest elements come first, as in the format's own writers, so that every tensor is aligned in a mapped file.
    ordered = sorted(slots, key=lambda slot: -ITEMSIZE[slot.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "version": str(version)}}
    end = 0
    for slot in ordered:
        header[slot.name] = {
            "dtype": SAFETENSORS_NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [end, end + slot.nbytes],
        }
        end += slot.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for slot in ordered:
        file.write(memoryview(cast(Any, buffer[slot.offset : slot.offset + slot.nbytes])))


def read_weight_file(manifest: WeightsManifest) -> Buffer:
    """Return the buffer of a manifest from its file. Raises WeightsGone, WeightsError."""
    buffer: Buffer = np.zeros(manifest.nbytes, dtype=np.uint8)
    try:
        with open(manifest.location, "rb") as file:
            header, start = _header(manifest, file)
            for slot in manifest.slots:
                begin, end = _range(manifest, header, slot)
                file.seek(start + begin)
                target = memoryview(cast(Any, buffer[slot.offset : slot.offset + slot.nbytes]))
                if end - begin != slot.nbytes or file.readinto(target) != slot.nbytes:
                    raise WeightsError(manifest, f"tensor {slot.name!r} is not complete in {manifest.location}")
    except FileNotFoundError:
        raise WeightsGone(manifest, f"{manifest.location} is there no more") from None
    except OSError as error:
        raise WeightsError(manifest, f"cannot read {manifest.location}: {error.strerror}") from None
    return buffer


def _header(manifest: WeightsManifest, file: BinaryIO) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise WeightsError(manifest, f"{manifest.location} has a header of {size} bytes")
    try:
        header = json.loads(file.read(size))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise WeightsError(manifest, f"{manifest.location} is not a safetensors file")
    return header, 8 + size


def _range(manifest: WeightsManifest, header: dict[str, Any], slot: TensorSlot) -> tuple[int, int]:
    try:
        entry = header[slot.name]
        same = entry["dtype"] == SAFETENSORS_NAMES[slot.dtype] and entry["shape"] == list(slot.shape)
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise WeightsError(manifest, f"{manifest.location} lacks tensor {slot.name!r}") from None
    if not same or begin < 0 or end > manifest.nbytes:
        raise WeightsError(manifest, f"{manifest.location} has another tensor {slot.name!r}")
    return begin, end
