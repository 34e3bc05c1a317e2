"""Receives a policy's weights (docs/reference/dataflow.md 9, weight update: stage and verify)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realhf.api.generation import WeightsManifest
from realhf.transport.network.network import LOOPBACK, Network
from realhf.transport.weights.disk import read_weight_file
from realhf.transport.weights.errors import WeightsError
from realhf.transport.weights.flat_buffer import Buffer, check_manifest, unpack
from realhf.transport.weights.memory_file import read_memory_file
from realhf.transport.weights.served import read_served

if TYPE_CHECKING:
    from torch import Tensor


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
