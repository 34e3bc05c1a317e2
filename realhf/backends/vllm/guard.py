"""Guard process that runs a command in a new session, and ends the whole session when standard
input closes, that is, when the process that started the guard is gone.

    python -m realhf.backends.vllm.guard COMMAND ARGUMENT...

vLLM consists of several processes, and its owner may be killed at any moment. The guard imports
nothing heavy, and starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from realhf.base.process import share_niceness

_PR_SET_PDEATHSIG = 1
"""prctl option that sets the signal a process gets when its parent dies."""
_GRACE_S = 6.0
"""Seconds that processes get to end after a signal."""
_POLL_S = 0.1
"""Seconds between checks whether any processes are left."""


def main() -> None:
    """Run the command in ``sys.argv``. End its session when it ends, on SIGTERM or SIGINT, or when
    standard input closes."""
    wake_read_fd, wake_write_fd = os.pipe()

    def stop(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        os.write(wake_write_fd, b".")

    # Install the handlers before the child starts: a guard that a signal kills in between would
    # leave the child without one.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    share_niceness(child.pid)
    reporter = threading.Thread(target=_report_end, args=(child,), daemon=True)
    reporter.start()
    ready: list[int] = []
    while wake_read_fd not in ready and (0 not in ready or os.read(0, 4096)):
        ready = select.select([0, wake_read_fd], [], [])[0]
    _end_command(child, reporter)


def _die_with_guard() -> None:
    """Let the kernel send SIGTERM to the child when the guard dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _report_end(child: subprocess.Popen[bytes]) -> None:
    """Wait for the command, end the rest of its session, and exit with its exit status."""
    code = child.wait()
    _end_session(child.pid)
    os._exit(code if code >= 0 else 128 - code)


def _end_command(child: subprocess.Popen[bytes], reporter: threading.Thread) -> None:
    """Signal the command to end its processes, then kill it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        reporter.join(_GRACE_S)


def _end_session(group: int) -> None:
    """End the remaining processes of a session. Python's resource trackers ignore SIGTERM until
    they have unlinked shared memory, so processes get some time before SIGKILL."""
    deadline = time.monotonic() + _GRACE_S / 2
    left = _signal_group(group, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = _signal_group(group, 0)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of the group; return whether there were any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
