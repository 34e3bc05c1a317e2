"""What a request takes of the budget is what its body holds, also while it is put together.

Source: docs/reference/trajectory.md 3.8.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator

import pytest
import zstandard
from isal import igzip

from realhf.trajectory.wire.body import read_body

SIZE = 8 << 20
CHUNK = 64 << 10
SLACK = 3 << 20
"""A step of inflation, the reserve of a growing buffer, and what the decoders need."""


@pytest.mark.parametrize("coding", ["plain", "gzip", "gzip that does not shrink", "gzip members", "zstd"])
async def test_no_more_is_held_than_is_counted(coding: str):
    """The chunks are not held beside the body, nor the compressed chunks during inflation, nor the plain parts."""
    plain = random.Random(5).randbytes(SIZE) if "shrink" in coding else bytes(SIZE)
    sent = plain
    if coding == "gzip members":
        sent = igzip.compress(plain[: SIZE // 8], 0) * 8
    elif coding.startswith("gzip"):
        sent = igzip.compress(plain, 0)
    elif coding == "zstd":
        sent = zstandard.compress(plain)
    counted = 0

    def take(nbytes: int) -> None:
        nonlocal counted
        counted += nbytes

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(sent), CHUNK):
            yield sent[start : start + CHUNK]

    await asyncio.to_thread(bool)  # so that threads are there already
    tracemalloc.start()
    try:
        body = await read_body(chunks(), encoding=coding.split()[0], max_bytes=2 * SIZE, allow_zstd=True, take=take)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert body == plain and type(body) is bytes
    assert counted == len(plain) + (len(sent) if sent is not plain else 0)
    assert peak <= counted + SLACK, f"{peak} bytes were held, and {counted} counted"
