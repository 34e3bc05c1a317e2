"""Says which test process runs which files: whole files, and in one process those that start the
same server; and in which order."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

RANKS = "tests/backends/parallel"
"""Files that run ranks. Their server, from which every rank is forked, imports for five seconds of
CPU in each test process that runs one of them."""
CALLS = "tests/mfc/"
"""Files whose tests share one model worker and one environment server."""
WITH_RANKS = ("tests/backends/parallel/", "tests/backends/training/test_lora_ranks.py")


class FilesThatBelongTogether(LoadFileScheduling):
    """Hands out files as ``--dist loadfile`` does, but those with ranks as if they were one, and
    those of the calls."""

    def _split_scope(self, nodeid: str) -> str:
        return together(super()._split_scope(nodeid))


def together(file: str) -> str:
    """Return the name under which a file is handed out."""
    if file.startswith(CALLS):
        return CALLS
    return RANKS if file.startswith(WITH_RANKS) else file


def place(nodeid: str, slow: bool, mixed: bool) -> tuple[bool, int]:
    """Return what the tests are sorted by: those that are not slow come last, in the order in which
    they were found. With ``mixed`` the order of slow files has nothing to do with their names:
    whole runs, which wait for processes, lie side by side in the tree, and so do tests that
    compute."""
    return not slow, zlib.crc32(nodeid.partition("::")[0].encode()) if slow and mixed else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesThatBelongTogether | None:
    """Take the place of ``--dist loadfile``, and of no other way."""
    return FilesThatBelongTogether(config, log) if config.getoption("dist") == "loadfile" else None
