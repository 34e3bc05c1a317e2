"""The sending side of a policy's weights (dataflow spec section 9, weight update: stage)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.transport.weights.flat_buffer import layout
from realhf.transport.weights.memory_file import MemoryFile

if TYPE_CHECKING:
    from torch import Tensor

KEPT_VERSIONS = 2

Medium = Literal["shm"]


class _Published(Protocol):
    """One version as its medium holds it."""

    location: str
    checksum: str

    def close(self) -> None: ...


class WeightPublisher:
    """Publishes the versions of one policy and keeps the last two. Not thread-safe."""

    def __init__(self, run_id: str, worker: str, folder: Path, medium: Medium = "shm") -> None:
        if medium != "shm":
            raise ValueError(f"medium {medium!r}: one of shm")
        self._medium = medium
        self._versions: dict[int, tuple[_Published, WeightsManifest]] = {}
        self._last = -1

    @property
    def latest(self) -> WeightsManifest | None:
        """The newest version that can be received: what a worker that joins late needs."""
        return self._versions[max(self._versions)][1] if self._versions else None

    def publish(self, version: int, tensors: Mapping[str, Tensor], receivers: int = 1) -> WeightsManifest:
        """Copy tensors (any device, any strides) and make them available; versions before the previous one are
        retired. Raises ValueError on a version that is not above the last, or an element type without a tag, and
        OSError when the medium is full: then nothing is published."""
        if version <= self._last:
            raise ValueError(f"weights version {version} after version {self._last}")
        slots, nbytes = layout(tensors)
        published = self._store(tensors, slots, nbytes)
        manifest = WeightsManifest(version, self._medium, published.location, nbytes, published.checksum, slots)
        self._versions[version] = (published, manifest)
        self._last = version
        for old in sorted(self._versions)[:-KEPT_VERSIONS]:
            self.retire(old)
        return manifest

    def _store(self, tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], nbytes: int) -> _Published:
        return MemoryFile(tensors, slots, nbytes)

    def retire(self, version: int) -> None:
        """Serve a version no more; receivers that are reading it finish."""
        entry = self._versions.pop(version, None)
        if entry is not None:
            entry[0].close()

    def close(self) -> None:
        """Retire all versions: nothing is left behind."""
        for version in list(self._versions):
            self.retire(version)
