"""Writes a file that is whole or absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``out`` at the end of the block and is removed where that is not reached:
    a full disk keeps no half of an export. Raises OSError."""
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a file is wanted, and it is a folder", str(out))
    partial = out.with_name(f"{out.name}.partial")
    try:
        yield partial
        os.replace(partial, out)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
