"""Opens files of a run folder without trust in what lies there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading. Raises OSError when there is none, and at once for a pipe or a device, at which a
    reader would wait or which never ends."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return os.fdopen(handle, "rb")
