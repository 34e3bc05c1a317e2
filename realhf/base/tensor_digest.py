"""Digests of tensors: 128 bits that depend on element type, shape and every bit at its place, computed where it lies.

A tensor is read as 64-bit words ``w`` in rows of ``ROW_WORDS``. Each row gives two sums ``sum(w_i * k_i + (w_i >> 32) *
l_i) mod 2**64`` with fixed keys: the multilinear hash of 32-bit words (Lemire and Kaser, "Strongly universal string
hashing is fast", 2014), in which the shift brings the high half of a word to where a product keeps it. A change that
was not made with the keys in view keeps one sum with a probability of at most 2**-33 and both with 2**-66, whatever its
pattern. BLAKE2b joins type, shape and the sums of all rows. The sums are integers, so every device and every version of
the library gives the same digest. It is no signature: who knows the keys can make two tensors of one digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROW_WORDS = 1 << 15
"""Words of a row: 256 KiB, so that a row and what is computed from it stay in a core's cache."""
_BLOCK_ROWS = {"cpu": 1}
"""How many rows are computed at once, by kind of device (64 elsewhere, for devices that are slow to start a kernel)."""
_SIZE = 16


class TensorDigester:
    """Computes digests; it keeps the keys, and room for a block of rows, for each device that it has seen."""

    def __init__(self) -> None:
        self._raw = bytearray(hashlib.shake_256(b"realhf tensor digest 1").digest(4 * 8 * ROW_WORDS))
        self._places: dict[Any, _Place] = {}

    def digest(self, tensor: Tensor) -> str:
        """Return the digest of a tensor of any shape, strides and device, as 32 hex digits."""
        import torch

        flat = tensor.detach().contiguous().reshape(-1)
        named = hashlib.blake2b(digest_size=_SIZE)
        named.update(f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}".encode())
        if flat.numel():
            if flat.device not in self._places:
                self._places[flat.device] = _Place(flat.device, self._raw)
            place = self._places[flat.device]
            with torch.inference_mode():
                sums = [place.sums(part) for part in _parts(_words(flat), place.rows)]
                named.update(torch.cat(sums).cpu().numpy().astype("<i8").tobytes())
        return named.hexdigest()


class _Place:
    """Computes the sums of rows on one device."""

    def __init__(self, device: Any, raw: bytearray) -> None:
        import torch

        self.rows = _BLOCK_ROWS.get(device.type, 64)
        self._keys = torch.frombuffer(raw, dtype=torch.int64).view(4, ROW_WORDS).to(device)
        # New memory for each block would cost more than the sums.
        self._high, self._products = (torch.empty(self.rows, ROW_WORDS, dtype=torch.int64, device=device) for _ in "ab")

    def sums(self, rows: Tensor) -> Tensor:
        """Return both sums of each row, int64 (rows * 2,). ``rows``: int64 (rows, words)."""
        import torch

        count, words = rows.shape
        high, keys = self._high[:count, :words], self._keys[:, :words]
        torch.bitwise_right_shift(rows, 32, out=high)
        found = [self._dot(rows, keys[i]) + self._dot(high, keys[i + 1]) for i in (0, 2)]
        return torch.stack(found, dim=1).reshape(-1)

    def _dot(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the sum of the products of each row with the keys, modulo 2**64."""
        import torch

        if len(rows) == 1 and rows.device.type == "cpu":
            return torch.dot(rows[0], keys).reshape(1)  # in one pass; other devices have it for floats alone
        products = self._products[: rows.shape[0], : rows.shape[1]]
        torch.mul(rows, keys, out=products)
        return products.sum(1)


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a one-dimensional tensor as int64 words, zeros behind the last byte."""
    import torch

    raw = flat.view(torch.uint8)
    if raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    elif raw.data_ptr() % 8 or raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)


def _parts(words: Tensor, block: int) -> Iterable[Tensor]:
    """Cut words into blocks of whole rows, and the last row if it is shorter."""
    whole = len(words) - len(words) % ROW_WORDS
    rows = words[:whole].view(-1, ROW_WORDS)
    for begin in range(0, len(rows), block):
        yield rows[begin : begin + block]
    if whole < len(words):
        yield words[whole:].view(1, -1)


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
