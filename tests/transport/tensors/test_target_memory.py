"""Memory for what is fetched: used again when the last tensor in it is gone, never before, and kept within a limit."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from realhf.transport.bulk import Piece, fetch_pieces
from realhf.transport.shared_memory import KEPT_FROM_BYTES, TargetMemory

SIZE = KEPT_FROM_BYTES + 12_800


def place(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.slow
def test_memory_is_used_again_once_the_last_tensor_is_gone():
    memory = TargetMemory(1 << 30)

    def fill(lane: int, piece: Piece, into: memoryview) -> None:
        into[:] = b"\x07" * piece.length

    frames = fetch_pieces([100, SIZE - 128], fill, memory.take)
    tensor = torch.frombuffer(frames[1], dtype=torch.uint8)
    row = tensor[5:10]
    where = tensor.data_ptr()
    del frames, tensor
    gc.collect()
    assert memory.idle_bytes == 0, "a view of a tensor still needs it"
    other = memory.take(SIZE)
    other[:] = 1
    assert row.tolist() == [7] * 5
    del row
    gc.collect()
    assert memory.idle_bytes >= SIZE
    again = memory.take(SIZE - 50)
    assert place(again) <= where < place(again) + SIZE and memory.idle_bytes == 0


def test_memory_that_is_kept_is_written_and_read_like_any_other():
    """The kernel may take pages of idle memory, but none that was written since."""
    memory = TargetMemory(1 << 30)
    for value in range(3):
        taken = memory.take(SIZE)
        taken[:] = value
        assert taken.nbytes == SIZE and not taken.ctypes.data % 64
        assert bool((taken == value).all())
        del taken
    assert memory.idle_bytes >= SIZE


def test_what_is_idle_has_a_limit_and_fits_what_it_is_used_for():
    memory = TargetMemory(3 * SIZE)
    taken = [memory.take(SIZE) for _ in range(4)]
    places = [place(each) for each in taken]
    while taken:
        del taken[0]
    assert 2 * SIZE <= memory.idle_bytes <= 3 * SIZE
    assert place(memory.take(SIZE)) in places[1:], "the one that has been idle for longest was given up"
    kept = memory.idle_bytes
    large = memory.take(3 * SIZE)
    assert memory.idle_bytes == kept and len(large) == 3 * SIZE
    small = memory.take(KEPT_FROM_BYTES - 1)
    del small
    assert memory.idle_bytes == kept
    held = memory.take(SIZE)
    memory.close()
    assert memory.idle_bytes == 0
    held[:] = 9
    assert int(held.sum()) == 9 * SIZE
    del held, large
    assert memory.idle_bytes == 0


def test_memory_that_there_is_not_is_an_error():
    with pytest.raises(MemoryError, match="there are no"):
        TargetMemory(1).take(1 << 62)
