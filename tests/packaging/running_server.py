"""Starts what a person types in a shell and that serves until it is interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

PORTS = {
    "AWS_RL_ENV_PORT": "0",
    "AWS_RL_ENV_MINISTACK_BASE_PORT": "0",
    "AWS_RL_ENV_WEB_MINISTACK_PORT": "0",
}
"""Free ports, so that servers of several tests stand beside each other."""


ROOT = Path(__file__).resolve().parents[2]


def checkout_in(folder: Path) -> Path:
    """Make a folder a checkout whose ``.venv`` has what this Python has, so that ``make install``
    has nothing to do."""
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "aws-env", "run-api"):
        (binaries / name).symlink_to(Path(sys.executable).with_name(name))
    (folder / ".venv" / ".installed").touch()
    return folder


@contextlib.contextmanager
def typed(
    line: str, folder: Path, environ: Mapping[str, str] = {}
) -> Iterator[tuple[str, list[str]]]:
    """Type a line that starts a server; yields its address and the lines up to it, which grow to
    all that it printed.

    The server is interrupted as ``Ctrl-C`` does it, in its whole process group, and must end then.
    """
    server = subprocess.Popen(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, **PORTS, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    guard = threading.Timer(300, os.killpg, (server.pid, signal.SIGKILL))
    guard.start()
    printed: list[str] = []
    try:
        for text in server.stdout:
            printed.append(text)
            if found := re.search(r" sessions at (http\S+)", text):
                yield found[1], printed
                break
        else:
            raise AssertionError("".join(printed))
    finally:
        os.killpg(server.pid, signal.SIGINT)
        printed += server.stdout
        server.wait(60)
        guard.cancel()
