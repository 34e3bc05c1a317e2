"""Digests of tensors: 128 bits that depend on element type, shape and every bit at its place,
computed where it lies.

A tensor is read as signed bytes ``b`` in rows of ``ROW_BYTES``, the last filled up with zeros. Each
row gives sixteen sums ``sum(b_i * k_i)`` with fixed keys of seven bits: sixteen linear hashes
(Carter and Wegman, "Universal classes of hash functions", 1979). A change that was not made with
the keys in view keeps one sum with a probability of at most 2**-7 and all with 2**-112, whatever
its pattern. The sums, a thirty-second of the bytes, are read as bytes again, with keys of their
own, until few rows are left; BLAKE2b joins those with type and shape. Sums are integers that no
arithmetic below rounds, so every device and every version of the library gives the same digest. It
is no signature: who knows the keys can make two tensors of one digest.

A CPU that multiplies bytes exactly (AVX512-VNNI and the like) does it by one product of byte
matrices; anything else by products of floats, which hold integers up to 2**24.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SCHEME = "realhf tensor digest 2"
"""Names the computation; a file that keeps digests says which one made them."""
ROW_BYTES = 1 << 11
"""A sum is at most 2**7 * 2**6 * 2**11 = 2**24."""
SUMS = 16
LAST_ROWS = 32
"""So many rows of sums are not summed again."""
_BLOCK_ROWS = {"cpu": 1 << 9}
"""How many rows are computed at once, by kind of device: 1 MiB, which stay in a core's cache (16
MiB elsewhere, for devices that are slow to start a kernel)."""
_SIZE = 16


class TensorDigester:
    """Computes digests; it keeps the keys for each device that it has seen."""

    def __init__(self) -> None:
        self._places: dict[Any, _Place] = {}

    def digest(self, tensor: Tensor) -> str:
        """Return the digest of a tensor of any shape, strides and device, as 32 hex digits."""
        import torch

        flat = tensor.detach().contiguous().reshape(-1)
        named = hashlib.blake2b(digest_size=_SIZE)
        named.update(f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode())
        if flat.numel():
            if flat.device not in self._places:
                self._places[flat.device] = _Place(flat.device)
            with torch.inference_mode():
                sums = self._places[flat.device].digest(flat.view(torch.int8))
            named.update(sums.cpu().numpy().astype("<i4").tobytes())
        return named.hexdigest()


class _Place:
    """Computes sums on one device."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._block = _BLOCK_ROWS.get(device.type, 1 << 13)
        self._keys: list[tuple[Tensor, Tensor]] = []
        self._product = (
            _product_of_bytes
            if device.type == "cpu" and self._bytes_are_better()
            else _product_of_floats
        )

    def digest(self, raw: Tensor) -> Tensor:
        """Return the last sums of bytes, int32 (at most ``LAST_ROWS``, ``SUMS``). ``raw``: int8
        (bytes,)."""
        import torch

        level = 0
        while True:
            sums = self._sums(raw, level)
            if len(sums) <= LAST_ROWS:
                return sums
            raw = sums.view(torch.int8).reshape(-1)
            level = level + 1

    def _sums(self, raw: Tensor, level: int) -> Tensor:
        """Return the sums of all rows of ``raw``, int32 (rows, ``SUMS``)."""
        import torch

        keys = self._keys_of(level)
        whole = len(raw) - len(raw) % ROW_BYTES
        rows = raw[:whole].view(-1, ROW_BYTES)
        found = [self._product(part, *keys) for part in rows.split(self._block)] if whole else []
        if whole < len(raw):
            last = torch.nn.functional.pad(raw[whole:], (0, ROW_BYTES - len(raw) + whole))
            found.append(self._product(last.view(1, -1), *keys))
        return torch.cat(found)

    def _keys_of(self, level: int) -> tuple[Tensor, Tensor]:
        """Return the keys of a level, (``ROW_BYTES``, ``SUMS``), as int8 and as float32."""
        import torch

        while len(self._keys) <= level:
            name = f"{SCHEME}, level {len(self._keys)}"
            raw = bytearray(hashlib.shake_256(name.encode()).digest(ROW_BYTES * SUMS))
            keys = (torch.frombuffer(raw, dtype=torch.int8).view(ROW_BYTES, SUMS) >> 1).to(
                self._device
            )
            self._keys.append((keys, keys.float()))
        return self._keys[level]

    def _bytes_are_better(self) -> bool:
        """Try whether products of byte matrices are there, neither round nor saturate (as those of
        older CPUs do), and are faster than those of floats. Which is taken changes no digest."""
        import torch

        keys, floats = self._keys_of(0)
        worst = torch.where(keys.T < 0, -128, 127).to(torch.int8)
        rows = torch.cat([worst, ~worst, keys.T]).contiguous()
        try:
            if not torch.equal(
                _product_of_bytes(rows, keys, floats), _product_of_floats(rows, keys, floats)
            ):
                return False
        except (AttributeError, RuntimeError):
            return False
        rows = rows.repeat(6, 1)[: self._block]
        seconds = [
            _best_time(lambda p=p: p(rows, keys, floats))
            for p in (_product_of_bytes, _product_of_floats)
        ]
        return seconds[0] < seconds[1]


def _product_of_bytes(rows: Tensor, keys: Tensor, _: Tensor) -> Tensor:
    import torch

    return torch._int_mm(rows, keys)  # pyright: ignore[reportPrivateImportUsage]


def _product_of_floats(rows: Tensor, _: Tensor, keys: Tensor) -> Tensor:
    import torch

    return (rows.float() @ keys).to(torch.int32)


def _best_time(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of five turns; the first ones prepare what the others
    use."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor by name."""
    digester = TensorDigester()
    return {name: digester.digest(tensor) for name, tensor in tensors.items()}


def joint_digest(digests: Mapping[str, str]) -> str:
    """Return one digest for digests by name, whatever their order, as 32 hex digits."""
    joint = hashlib.blake2b(digest_size=_SIZE)
    for name, digest in sorted(digests.items()):
        joint.update(f"{len(name.encode())}:{name}={digest};".encode())
    return joint.hexdigest()
