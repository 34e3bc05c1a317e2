"""Holds the folder of a host agent: its own, and nobody else's meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from realhf.cluster.errors import ClusterError

MARK = ".realhf-host"
"""A file in each agent's folder, which the agent that uses it keeps locked."""


PREFIX = "realhf-agent-"
"""How the name of a temporary folder of an agent begins."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems say that have no locks."""
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def temporary() -> Iterator[Path]:
    """Make a folder for an agent among the temporary files of its host, and remove it after the block, with those of
    agents that were killed. Raises OSError."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ClusterError):
            if left.stat().st_uid == os.geteuid() and (left / MARK).exists():
                with held(left):
                    shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a private folder where there is none, and keep others from using it within the block. Keys that a run
    brings are removed from it, so it must be an agent's. Raises ClusterError naming it when it holds anything else, or
    another agent uses it, and OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mark = folder / MARK
    if not mark.exists() and any(folder.iterdir()):
        raise ClusterError(f"--folder {folder}: it holds files that are no host agent's; give a folder of its own")
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"--folder {folder}: another host agent uses it; give this one another --name or --folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _log.warning("%s cannot be locked (%s); nothing keeps another agent from using it", folder, error)
        folder.chmod(0o700)
        yield
    finally:
        os.close(descriptor)
