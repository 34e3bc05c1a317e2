"""The receiving side of a policy's weights (dataflow spec section 9, weight update: stage and verify)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realhf.api.generation import WeightsManifest
from realhf.transport.weights.errors import WeightsError
from realhf.transport.weights.flat_buffer import Buffer, check_manifest, unpack
from realhf.transport.weights.memory_file import read_memory_file

if TYPE_CHECKING:
    from torch import Tensor


def receive(manifest: WeightsManifest, timeout_s: float) -> dict[str, Tensor]:
    """Tensors of a manifest on the CPU, complete and verified (sizes, then the checksum) before any is handed out.

    They may share memory with each other's padding but with no other process: writing to them is safe. Raises
    WeightsGone when the version is no more to be had, WeightsError when it is damaged."""
    check_manifest(manifest)
    return unpack(manifest, _read(manifest, timeout_s))


def _read(manifest: WeightsManifest, timeout_s: float) -> Buffer:
    if manifest.medium == "shm":
        return read_memory_file(manifest)
    raise WeightsError(manifest, "no such medium: shm")
