"""Hands weights to processes of the same host: an anonymous memory file per version.

The publisher writes the file, seals it and holds its descriptor; a receiver opens it through the publisher's /proc
entry. A sealed file cannot change, so it needs no checksum of its own, and there is no name that could be
left behind: the kernel frees the memory when the last process that uses it lets go, however it ends. Segments of
``realhf.transport.tensors.shared_memory`` are filled again and again, which a slow reader of weights must not suffer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.base.process_id import host_token
from realhf.base.tensor_digest import joint_digest
from realhf.transport.weights.flat_buffer import Buffer, WeightsError, WeightsGone, pack

if TYPE_CHECKING:
    from torch import Tensor


class MemoryFile:
    """Owns one version's buffer. Raises OSError when the system has no memory left."""

    def __init__(self, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int) -> None:
        self.checksum = joint_digest({slot.name: slot.digest for slot in slots})
        self._descriptor = os.memfd_create("realhf-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocating here turns a lack of memory into an error; in the mapping below it would be a signal.
            os.posix_fallocate(self._descriptor, 0, nbytes)
            _fill(self._descriptor, tensors, slots, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.location = f"{os.getpid()}:{self._descriptor}:{os.fstat(self._descriptor).st_ino}:{host_token()}"

    def close(self) -> None:
        """Let go of the file; receivers that have opened it keep it until their tensors are gone."""
        os.close(self._descriptor)


def _fill(descriptor: int, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int) -> None:
    mapping = mmap.mmap(descriptor, nbytes)
    buffer: Buffer = np.frombuffer(mapping, dtype=np.uint8)
    try:
        pack(tensors, slots, buffer)
    finally:
        # Sealing fails as long as a writable mapping exists.
        del buffer
        mapping.close()


def read_memory_file(manifest: WeightsManifest) -> Buffer:
    """Map the buffer privately: what the receiver writes stays with it. Raises WeightsGone, WeightsError."""
    try:
        *numbers, host = manifest.location.split(":", 3)
        pid, number, inode = (int(part) for part in numbers)
    except ValueError:
        raise WeightsError(manifest, f"location {manifest.location!r:.80} is not pid:descriptor:inode:host") from None
    if host != host_token():
        raise WeightsError(
            manifest,
            "its publisher is on another host, which memory does not reach; set async_rl.weights=fetch (or disk)",
        )
    path = f"/proc/{pid}/fd/{number}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        raise WeightsGone(manifest, f"process {pid} of this host holds it no more") from None
    except OSError as error:
        raise WeightsError(manifest, f"cannot open {path}: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if status.st_ino != inode:
            raise WeightsGone(manifest, f"process {pid} of this host holds it no more")
        if status.st_size != manifest.nbytes:
            raise WeightsError(manifest, f"{status.st_size} bytes, the manifest says {manifest.nbytes}")
        return np.frombuffer(mmap.mmap(descriptor, manifest.nbytes, access=mmap.ACCESS_COPY), dtype=np.uint8)
    except OSError as error:
        raise WeightsError(manifest, f"cannot map {path}: {error}") from None
    finally:
        os.close(descriptor)
