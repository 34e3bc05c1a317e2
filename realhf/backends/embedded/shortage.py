"""Tells a want of memory from other errors, whatever device it is the memory of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

_SAID = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What errors of other types say: those of the CPU's memory, and of what a GPU keeps outside of torch's own pool."""


def shortage(error: BaseException) -> str | None:
    """Return the first line of an error that says that there was no memory, or None for any other error."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
    ):
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None


@contextlib.contextmanager
def naming_shortage(said: Callable[[], str]) -> Iterator[None]:
    """Raise RuntimeError ``out of memory ...`` where something inside finds no memory. ``said``, asked then, goes on
    from these words: what wanted it, and which option to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (first := shortage(error)) is None:
            raise
        raise RuntimeError(f"out of memory {said()} ({first})") from error
