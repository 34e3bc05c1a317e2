"""Digests of tensors, computed on the tensor's device. A digest has 128 bits that depend on the
dtype, the shape, and the value and position of every bit.

A tensor is read as signed bytes ``b`` in rows of ``ROW_BYTES``, the last row padded with zeros. For
each row, 16 sums ``sum(b_i * k_i)`` with fixed 7-bit keys are computed: these are 16 linear hashes
(Carter and Wegman, "Universal classes of hash functions", 1979). If a change was made independently
of the keys, the probability that a sum stays the same is at most 2**-7, and that all sums stay the
same at most 2**-112. The sums have 1/32 of the bytes and are hashed in the same way with other
keys, until few rows are left. BLAKE2b combines these with dtype and shape. The sums are integers
and no operation rounds them, so every device and library version gives the same digest. A digest is
not a signature: anyone who knows the keys can construct two tensors with the same digest.

CPUs with exact products of bytes (AVX512-VNNI and similar) use one product of int8 matrices; other
devices use products of floats, which represent integers up to 2**24 exactly.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCHEME = "realhf tensor digest 2"
"""Version of the digest computation, which files store together with their digests."""
ROW_BYTES = 1 << 11
"""Bytes per row. With this size, the absolute value of a sum is at most 2**7 * 2**6 * 2**11 =
2**24."""
SUMS = 16
"""Number of sums per row."""
LAST_ROWS = 32
"""Number of rows of sums at or below which the sums are not hashed again."""
_BLOCK_ROWS = {"cpu": 1 << 9}
"""Rows per matrix product, by device type: 1 MiB on a CPU, which fits into a core's cache. The
default for other devices is 16 MiB, because starting a kernel is slow."""
_SIZE = 16
"""Size of a digest in bytes."""


class TensorDigester:
    """Computes digests of tensors. It caches the keys for each device."""

    def __init__(self) -> None:
        self._by_device: dict[Any, _DeviceDigester] = {}

    def digest(self, tensor: Tensor) -> str:
        """Return the digest of a tensor of any shape, strides and device, as 32 hex digits."""
        import torch

        flat = tensor.detach().contiguous().reshape(-1)
        state = hashlib.blake2b(digest_size=_SIZE)
        state.update(f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode())
        if flat.numel():
            if flat.device not in self._by_device:
                self._by_device[flat.device] = _DeviceDigester(flat.device)
            with torch.inference_mode():
                sums = self._by_device[flat.device].digest(flat.view(torch.int8))
            state.update(sums.cpu().numpy().astype("<i4").tobytes())
        return state.hexdigest()


class _DeviceDigester:
    """Computes the sums on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._block = _BLOCK_ROWS.get(device.type, 1 << 13)
        self._keys: list[tuple[Tensor, Tensor]] = []
        self._product = (
            _int8_product if device.type == "cpu" and self._prefers_int8() else _float_product
        )

    def digest(self, raw: Tensor) -> Tensor:
        """Return the final sums for the bytes ``raw``, int8 (bytes,), as int32 (at most
        ``LAST_ROWS``, ``SUMS``)."""
        import torch

        level = 0
        while True:
            sums = self._row_sums(raw, level)
            if len(sums) <= LAST_ROWS:
                return sums
            raw = sums.view(torch.int8).reshape(-1)
            level = level + 1

    def _row_sums(self, raw: Tensor, level: int) -> Tensor:
        """Return the sums of all rows of ``raw``, int32 (rows, ``SUMS``)."""
        import torch

        keys = self._level_keys(level)
        whole = len(raw) - len(raw) % ROW_BYTES
        rows = raw[:whole].view(-1, ROW_BYTES)
        sums = [self._product(part, *keys) for part in rows.split(self._block)] if whole else []
        if whole < len(raw):
            last = torch.nn.functional.pad(raw[whole:], (0, ROW_BYTES - len(raw) + whole))
            sums.append(self._product(last.view(1, -1), *keys))
        return torch.cat(sums)

    def _level_keys(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the keys for a level of hashing, (``ROW_BYTES``, ``SUMS``), once as int8 and once
        as float32."""
        import torch

        while len(self._keys) <= level:
            name = f"{SCHEME}, level {len(self._keys)}"
            raw = bytearray(hashlib.shake_256(name.encode()).digest(ROW_BYTES * SUMS))
            keys = (torch.frombuffer(raw, dtype=torch.int8).view(ROW_BYTES, SUMS) >> 1).to(
                self._device
            )
            self._keys.append((keys, keys.float()))
        return self._keys[level]

    def _prefers_int8(self) -> bool:
        """Return whether int8 matrix products are available, exact and faster than float products.

        They are not exact on older CPUs, which saturate. If they are exact, both products give the
        same digests.
        """
        import torch

        keys, floats = self._level_keys(0)
        worst = torch.where(keys.T < 0, -128, 127).to(torch.int8)
        rows = torch.cat([worst, ~worst, keys.T]).contiguous()
        try:
            if not torch.equal(
                _int8_product(rows, keys, floats), _float_product(rows, keys, floats)
            ):
                return False
        except (AttributeError, RuntimeError):
            return False
        rows = rows.repeat(6, 1)[: self._block]
        seconds = [
            _best_time(lambda p=p: p(rows, keys, floats)) for p in (_int8_product, _float_product)
        ]
        return seconds[0] < seconds[1]


def _int8_product(rows: Tensor, keys: Tensor, _: Tensor) -> Tensor:
    import torch

    return torch._int_mm(rows, keys)  # pyright: ignore[reportPrivateImportUsage]


def _float_product(rows: Tensor, _: Tensor, keys: Tensor) -> Tensor:
    import torch

    return (rows.float() @ keys).to(torch.int32)


def _best_time(work: Callable[[], object]) -> float:
    """Run ``work`` several times; return the shortest time in seconds."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def digest_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor by name."""
    digester = TensorDigester()
    return {name: digester.digest(tensor) for name, tensor in tensors.items()}


def joint_digest(digests: Mapping[str, str]) -> str:
    """Combine named digests into one digest of 32 hex digits, which does not depend on their
    order."""
    joint = hashlib.blake2b(digest_size=_SIZE)
    for name, digest in sorted(digests.items()):
        joint.update(f"{len(name.encode())}:{name}={digest};".encode())
    return joint.hexdigest()
