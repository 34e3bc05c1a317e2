"""Digests of tensors: what they depend on, and that a plain computation gives the same."""

import hashlib

import numpy as np
import pytest
import torch

from realhf.base import tensor_digest
from realhf.base.tensor_digest import (
    LAST_ROWS,
    ROW_BYTES,
    SUMS,
    TensorDigester,
    digest_tensors,
    joint_digest,
)

torch.set_num_threads(1)


def plain(tensor):
    """The definition, in numbers without a bound."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    named = hashlib.blake2b(
        f"{str(tensor.dtype)[6:]}{tuple(tensor.shape)}".encode(), digest_size=16
    )
    level = 0
    while raw:
        stream = hashlib.shake_256(f"realhf tensor digest 2, level {level}".encode()).digest(
            ROW_BYTES * SUMS
        )
        keys = np.frombuffer(stream, dtype=np.int8).astype(object).reshape(ROW_BYTES, SUMS) // 2
        raw += bytes(-len(raw) % ROW_BYTES)
        sums = np.frombuffer(raw, dtype=np.int8).astype(object).reshape(-1, ROW_BYTES) @ keys
        raw = sums.astype("<i4").tobytes()
        level = level + 1
        if len(sums) <= LAST_ROWS:
            named.update(raw)
            break
    return named.hexdigest()


DIGESTER = TensorDigester()


def of(tensor):
    return DIGESTER.digest(tensor)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize(
    "shape", [(), (1,), (7, 3), (0, 4), (3, ROW_BYTES // 2 + 5), (LAST_ROWS + 1, ROW_BYTES)]
)
def test_it_is_the_sums_of_the_bytes(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    assert of(tensor) == plain(tensor)


def test_type_shape_order_and_place_count():
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


def test_strides_and_alignment_do_not_count():
    tensor = torch.randn(50, 40)
    assert of(tensor.T.contiguous().T) == of(tensor)
    shifted = torch.empty(2001)[1:].copy_(tensor.reshape(-1)).view(50, 40)
    assert of(shifted) == of(tensor)


@pytest.mark.slow
def test_every_single_bit_and_pairs_of_high_bits_count():
    """Also pairs of the highest bits, such as the signs of two weights, which a product modulo
    2**64 would lose."""
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


def test_a_bit_counts_in_every_row_and_rows_do_not_change_places():
    rows = 2 * LAST_ROWS
    tensor = torch.randint(
        -128, 128, (rows, ROW_BYTES), dtype=torch.int8, generator=torch.Generator().manual_seed(3)
    )
    seen = {of(tensor)}
    for row in range(rows):
        changed = tensor.clone()
        changed[row, 7 * row] ^= 1
        seen |= {of(changed), of(tensor.roll(row + 1, 0))}
    assert len(seen) == 2 * rows, "the last roll is the tensor itself"


@pytest.mark.slow
@pytest.mark.parametrize("product", ["_int8_product", "_float_product"])
@pytest.mark.parametrize("block", [1, 7, 4096])
def test_ways_and_blocks_give_the_same_digest(monkeypatch, product, block):
    """Extreme bytes are among them: products that saturate or round would show."""
    keys = tensor_digest._DeviceDigester(torch.device("cpu"))._level_keys(0)[0]
    extreme = torch.where(keys.T < 0, -128, 127).to(torch.int8)
    tensor = torch.cat([extreme, ~extreme, keys.T])
    monkeypatch.setattr(tensor_digest, "_BLOCK_ROWS", {"cpu": block})
    monkeypatch.setattr(tensor_digest, "_int8_product", getattr(tensor_digest, product))
    monkeypatch.setattr(tensor_digest, "_float_product", getattr(tensor_digest, product))
    assert TensorDigester().digest(tensor) == plain(tensor)


@pytest.mark.slow
def test_the_joint_digest_knows_which_name_has_which_tensor():
    ones = torch.ones(3)
    twos = torch.full((3,), 2.0)
    joint = joint_digest(digest_tensors({"a": ones, "b": twos}))
    assert joint == joint_digest(digest_tensors({"b": twos, "a": ones}))
    others = [
        {"a": twos, "b": ones},
        {"a": ones},
        {"a": ones, "b": twos, "c": ones},
        {"ab": ones, "": twos},
    ]
    assert joint not in {joint_digest(digest_tensors(other)) for other in others}
