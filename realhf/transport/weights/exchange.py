"""Sends and receives a policy's weights (docs/reference/dataflow.md 9, weight updates)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.weights.disk import WeightFile, file_stem, read_weight_file, sweep
from realhf.transport.weights.flat_buffer import Buffer, WeightsError, check_manifest, layout, pack, unpack
from realhf.transport.weights.memory_file import MemoryFile, read_memory_file
from realhf.transport.weights.served import ServedVersion, WeightServer, read_served

if TYPE_CHECKING:
    from torch import Tensor


KEPT_VERSIONS = 2

Medium = Literal["shm", "disk", "fetch"]

_Published = MemoryFile | WeightFile | ServedVersion


class WeightPublisher:
    """Publishes the versions of one policy and keeps the last two, each complete or not there at all.

    ``shm`` reaches the processes of this host, ``disk`` every host that has ``folder`` under the same path (only this
    medium uses it), ``fetch`` every process of the run that reaches ``network``. Not thread-safe. Raises ValueError on
    an unknown medium.
    """

    def __init__(
        self,
        run_id: str,
        worker: str,
        folder: Path,
        medium: Medium = "shm",
        *,
        network: Network = LOOPBACK,
    ) -> None:
        if medium not in get_args(Medium):
            raise ValueError(f"medium {medium!r} of weights, one of {', '.join(get_args(Medium))}")
        self._medium: Medium = medium
        self._folder = folder
        self._stem = file_stem(run_id, worker)
        self._versions: dict[int, tuple[_Published, WeightsManifest]] = {}
        self._last = -1
        self._server = WeightServer(network) if medium == "fetch" else None
        if medium == "disk":
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder, run_id, worker)

    @property
    def latest(self) -> WeightsManifest | None:
        """The manifest of the newest version that can be received, which a worker that joins late needs; None if there
        is none."""
        return self._versions[max(self._versions)][1] if self._versions else None

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        trial: int = 0,
        changed: Collection[str] = (),
    ) -> WeightsManifest:
        """Copy tensors (any device, any strides) and make them available; versions before the previous one are retired.

        ``trial``: a step of a self-test, which takes the place of the last version; only ``changed`` tensors differ
        from it. Raises ValueError on a version that is not above the last, or (trial) not the last, or on a tensor that
        cannot travel, and OSError when the medium is full: then nothing is published.
        """
        if version < self._last + (not trial):
            raise ValueError(f"weights version {version} after version {self._last}")
        latest = self.latest if trial else None
        known = {slot.name: slot.digest for slot in latest.slots if slot.name not in changed} if latest else {}
        slots, nbytes = layout(tensors, known)
        published = self._store(version, tensors, slots, nbytes)
        manifest = WeightsManifest(version, self._medium, published.location, nbytes, published.checksum, slots, trial)
        self.retire(version)
        self._versions[version] = (published, manifest)
        self._last = version
        for old in sorted(self._versions)[:-KEPT_VERSIONS]:
            self.retire(old)
        return manifest

    def _store(
        self, version: int, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int
    ) -> _Published:
        if self._medium == "shm":
            return MemoryFile(tensors, slots, nbytes)
        buffer: Buffer = np.zeros(nbytes, dtype=np.uint8)
        pack(tensors, slots, buffer)
        if self._medium == "disk":
            return WeightFile(self._folder, self._stem, version, slots, buffer)
        assert self._server is not None
        return ServedVersion(self._server, buffer)

    def retire(self, version: int) -> None:
        """Stop serving a version; receivers that are reading it finish. An unknown version counts as retired
        already."""
        published, _ = self._versions.pop(version, (None, None))
        if published is not None:
            published.close()

    def close(self) -> None:
        """Retire all versions, so that nothing is left behind."""
        for version in list(self._versions):
            self.retire(version)
        if self._server is not None:
            self._server.close()
            self._server = None


def receive(manifest: WeightsManifest, timeout_s: float, network: Network = LOOPBACK) -> dict[str, Tensor]:
    """Return the tensors of a manifest on the CPU, complete and verified (sizes, then the checksum) before any is
    handed out. They share memory with no other process: writing to them is safe.

    ``timeout_s`` bounds the time without a byte of what is fetched, beside what all bytes take on a slow network;
    ``network`` has the keys for that. Raises WeightsGone when the version can no longer be had, WeightsTimeout, and
    WeightsError when it or the manifest is damaged.
    """
    check_manifest(manifest)
    return unpack(manifest, _read(manifest, timeout_s, network))


def _read(manifest: WeightsManifest, timeout_s: float, network: Network) -> Buffer:
    if manifest.medium == "shm":
        return read_memory_file(manifest)
    if manifest.medium == "disk":
        return read_weight_file(manifest)
    if manifest.medium == "fetch":
        return read_served(manifest, timeout_s, network)
    raise WeightsError(manifest, "no such medium")
