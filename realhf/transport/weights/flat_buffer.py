"""Lays weights out as one flat buffer: tensors at 64-byte steps, zeros between them, one checksum over all of it where
it leaves this host's memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from realhf.api.generation import TensorSlot, WeightsManifest
from realhf.api.keys import ITEMSIZE, TORCH_NAMES, dtype_tag
from realhf.base.tensor_digest import TensorDigester
from realhf.transport.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor


class WeightsError(TransportError):
    """Is raised when the weights of a manifest did not arrive, or not as the manifest says. Nothing was handed out."""

    def __init__(self, manifest: WeightsManifest, reason: str) -> None:
        super().__init__(f"weights version {manifest.version} by {manifest.medium}: {reason}")
        self.version = manifest.version
        self.medium = manifest.medium


class WeightsGone(WeightsError):
    """Is raised when the publisher no longer serves this version (or has ended): ask for the newest manifest."""


class WeightsTimeout(WeightsError, TimeoutError):
    """Is raised when the deadline passed before the weights were complete."""


ALIGNMENT = 64

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


def layout(tensors: Mapping[str, Tensor], known: Mapping[str, str] = {}) -> tuple[tuple[TensorSlot, ...], int]:
    """Return the slots of tensors in the order given, with the digests of the tensors, and the size of the buffer (at
    least one step). ``known``: digests of tensors that are as they were. Raises ValueError on an element type without a
    tag and on the one name that safetensors files reserve."""
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be called '__metadata__'")
    slots: list[TensorSlot] = []
    end, digester = 0, TensorDigester()
    for name, tensor in tensors.items():
        nbytes, tag = tensor.numel() * tensor.element_size(), dtype_tag(tensor.dtype)
        digest = known.get(name) or digester.digest(tensor)
        slots.append(TensorSlot(name, tag, tuple(tensor.shape), end, nbytes, digest))
        end += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(slots), end or ALIGNMENT


def pack(tensors: Mapping[str, Tensor], slots: tuple[TensorSlot, ...], buffer: Buffer) -> None:
    """Copy tensors, from any device and with any strides, into a buffer of zeros."""
    for slot, view in zip(slots, _views(slots, buffer), strict=True):
        view.copy_(tensors[slot.name].detach())


def unpack(manifest: WeightsManifest, buffer: Buffer) -> dict[str, Tensor]:
    """Make tensors over a buffer, which they keep alive. Raises WeightsError when the checksum differs. A sealed buffer
    in memory needs none: nobody could have changed it."""
    if len(buffer) != manifest.nbytes:
        raise WeightsError(manifest, f"{len(buffer)} bytes, the manifest says {manifest.nbytes}")
    found = manifest.digest if manifest.medium == "shm" else checksum(buffer)
    if found != manifest.checksum:
        raise WeightsError(manifest, f"checksum {found}, the manifest says {manifest.checksum}")
    views = _views(manifest.slots, buffer)
    return {slot.name: view for slot, view in zip(manifest.slots, views, strict=True)}


def checksum(buffer: Buffer) -> str:
    """Return the BLAKE2b checksum of a buffer, 16 bytes as hex digits."""
    return hashlib.blake2b(memoryview(cast(Any, buffer)), digest_size=16).hexdigest()


def check_manifest(manifest: WeightsManifest) -> None:
    """Raise WeightsError on slots that contradict themselves or the size of the buffer."""
    if manifest.version < 0 or manifest.nbytes < ALIGNMENT:
        raise WeightsError(manifest, f"a manifest of {manifest.nbytes} bytes")
    end = 0
    for slot in manifest.slots:
        if slot.dtype not in ITEMSIZE or any(size < 0 for size in slot.shape):
            raise WeightsError(manifest, f"tensor {slot.name!r}: type {slot.dtype!r}, shape {slot.shape}")
        if slot.nbytes != math.prod(slot.shape) * ITEMSIZE[slot.dtype]:
            raise WeightsError(manifest, f"tensor {slot.name!r}: {slot.nbytes} bytes do not fit shape {slot.shape}")
        if slot.offset % ALIGNMENT or slot.offset < end or slot.offset + slot.nbytes > manifest.nbytes:
            raise WeightsError(manifest, f"tensor {slot.name!r} lies at {slot.offset} of {manifest.nbytes} bytes")
        end = slot.offset + slot.nbytes
    if len({slot.name for slot in manifest.slots}) != len(manifest.slots):
        raise WeightsError(manifest, "a tensor occurs twice")


def _views(slots: tuple[TensorSlot, ...], buffer: Buffer) -> list[Tensor]:
    import torch

    whole = torch.from_numpy(buffer)
    views: list[Tensor] = []
    for slot in slots:
        dtype = getattr(torch, TORCH_NAMES[slot.dtype])
        if slot.nbytes:
            views.append(whole[slot.offset : slot.offset + slot.nbytes].view(dtype).reshape(slot.shape))
        else:
            views.append(torch.empty(slot.shape, dtype=dtype))
    return views
