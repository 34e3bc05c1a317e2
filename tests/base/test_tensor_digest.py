"""Digests of tensors: what they depend on, and that a plain computation gives the same."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from realhf.base.tensor_digest import ROW_WORDS, TensorDigester, digests, joint_digest

torch.set_num_threads(1)


def plain(tensor: torch.Tensor) -> str:
    """The definition, in numbers without a bound."""
    raw = hashlib.shake_256(b"realhf tensor digest 1").digest(32 * ROW_WORDS)
    keys = np.frombuffer(raw, dtype="<i8").reshape(4, -1).tolist()
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    raw += bytes(-len(raw) % 8)
    words = np.frombuffer(raw, dtype="<i8").tolist()
    named = hashlib.blake2b(f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}".encode(), digest_size=16)
    for begin in range(0, len(words), ROW_WORDS):
        row = words[begin : begin + ROW_WORDS]
        for low, high in (keys[:2], keys[2:]):
            total = sum(word * a + (word >> 32) * b for word, a, b in zip(row, low, high, strict=False))
            named.update((total % 2**64).to_bytes(8, "little"))
    return named.hexdigest()


DIGESTER = TensorDigester()


def of(tensor: torch.Tensor) -> str:
    return DIGESTER.digest(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (0, 4), (3, ROW_WORDS // 2 + 5)])
def test_it_is_the_sums_of_the_words(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    assert of(tensor) == plain(tensor)


def test_type_shape_order_and_place_count() -> None:
    tensor = torch.arange(1.0, 13.0).reshape(3, 4)
    others = [
        tensor.reshape(4, 3),
        tensor.view(torch.int32),
        tensor.flip(0),
        tensor.roll(1),
        tensor.neg(),
        tensor.to(torch.float64),
        torch.cat([tensor, torch.zeros(1, 4)]),
        tensor[:2],
    ]
    assert len({of(t) for t in [tensor, *others]}) == 1 + len(others)
    assert of(torch.zeros(2)) != of(-torch.zeros(2)), "bits count, not values"
    assert of(torch.zeros(0)) != of(torch.zeros(0, 1))


def test_strides_and_alignment_do_not_count() -> None:
    tensor = torch.randn(50, 40)
    assert of(tensor.T.contiguous().T) == of(tensor)
    shifted = torch.empty(2001)[1:].copy_(tensor.reshape(-1)).view(50, 40)
    assert of(shifted) == of(tensor)


def test_every_single_bit_and_pairs_of_high_bits_count() -> None:
    """A sum of products alone would lose pairs of the highest bits, such as the signs of two weights."""
    words = torch.randint(-(2**62), 2**62, (24,), generator=torch.Generator().manual_seed(2))
    seen = {of(words)}
    for place in range(24):
        for bit in range(64):
            changed = words.clone()
            changed[place] ^= 1 << bit if bit < 63 else -(2**63)
            seen.add(of(changed))
    for first in range(48):
        for second in range(first):
            changed = words.clone()
            changed.view(torch.int32)[[first, second]] ^= -(2**31)
            seen.add(of(changed))
    assert len(seen) == 1 + 24 * 64 + 48 * 47 // 2


def test_blocks_of_rows_and_single_rows_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices other than the CPU compute many rows at once, by products and sums."""
    tensor = torch.randn(5 * ROW_WORDS + 77)
    alone = of(tensor)
    monkeypatch.setattr("realhf.base.tensor_digest._BLOCK_ROWS", {"cpu": 2})
    assert TensorDigester().digest(tensor) == alone


def test_the_joint_digest_knows_which_name_has_which_tensor() -> None:
    ones, twos = torch.ones(3), torch.full((3,), 2.0)
    joint = joint_digest(digests({"a": ones, "b": twos}))
    assert joint == joint_digest(digests({"b": twos, "a": ones}))
    others = [{"a": twos, "b": ones}, {"a": ones}, {"a": ones, "b": twos, "c": ones}, {"ab": ones, "": twos}]
    assert joint not in {joint_digest(digests(other)) for other in others}
