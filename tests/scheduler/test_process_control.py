"""Whose child an orphan becomes, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from realhf.scheduler.process import adopt_orphans

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl(2) is Linux's")


def _parent_of_an_orphan() -> int:
    """Its parent after the shell that started it has ended; the orphan is ended and, if it is ours,
    collected."""
    shell = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    orphan = psutil.Process(int(shell.stdout))
    parent = orphan.ppid()
    orphan.kill()
    orphan.wait(60)
    return parent


@pytest.mark.slow
def test_orphans_become_children_inside_and_strangers_outside() -> None:
    """A test or a notebook that runs the launcher in its own process is not left collecting
    zombies."""
    assert _parent_of_an_orphan() != os.getpid()
    with adopt_orphans():
        assert _parent_of_an_orphan() == os.getpid()
        with adopt_orphans():
            pass
        assert _parent_of_an_orphan() == os.getpid(), "the inner one restores what it found"
    assert _parent_of_an_orphan() != os.getpid()
