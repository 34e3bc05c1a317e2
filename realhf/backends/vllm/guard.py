"""Runs a command in a session of its own and ends all of it when standard input closes: when its
owner is gone.

    python -m realhf.backends.vllm.guard COMMAND ARGUMENT...

vLLM is several processes; whoever starts it may be killed at any moment. It imports nothing heavy
and starts at once.
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
_GRACE_S = 6.0
_POLL_S = 0.1


def main() -> None:
    """Run the command of ``sys.argv`` and end its session when it ends, on a signal, or when
    standard input closes."""
    woken, wake = os.pipe()

    def stop(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        os.write(wake, b".")

    # Handlers come before the child: a guard that dies between the two would leave the child alone.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    child = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    share_niceness(child.pid)
    reporter = threading.Thread(target=_report_end, args=(child,), daemon=True)
    reporter.start()
    ready: list[int] = []
    while woken not in ready and (0 not in ready or os.read(0, 4096)):
        ready = select.select([0, woken], [], [])[0]
    _end(child, reporter)


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _report_end(child: subprocess.Popen[bytes]) -> None:
    code = child.wait()
    _clear(child.pid)
    os._exit(code if code >= 0 else 128 - code)


def _end(child: subprocess.Popen[bytes], reporter: threading.Thread) -> None:
    """Ask the command to end its own processes, then end those that are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        reporter.join(_GRACE_S)


def _clear(group: int) -> None:
    """End what is left of a session. Python's resource trackers outlive a polite signal: they
    unlink shared memory."""
    deadline = time.monotonic() + _GRACE_S / 2
    left = _signal_group(group, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = _signal_group(group, 0)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of the group; return False when none is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
