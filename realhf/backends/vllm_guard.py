"""Runs a command in a session of its own and ends all of it when standard input closes: when its owner is gone.

    python -m realhf.backends.vllm_guard COMMAND ARGUMENT...

vLLM is several processes; whoever starts it may be killed at any moment. Standard library only, so it starts at once.
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
from types import FrameType

_PR_SET_PDEATHSIG = 1
_GRACE_S = 8.0


def main() -> None:
    woken, wake = os.pipe()

    def stop(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        os.write(wake, b".")

    # Before there is a child: a guard that dies between the two would leave it alone.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True,
                             preexec_fn=_die_with_guard)  # fmt: skip
    threading.Thread(target=_report_end, args=(child,), daemon=True).start()
    ready: list[int] = []
    while woken not in ready and (0 not in ready or os.read(0, 4096)):
        ready = select.select([0, woken], [], [])[0]
    _end(child)


def _die_with_guard() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _report_end(child: subprocess.Popen[bytes]) -> None:
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)
    os._exit(code if code >= 0 else 128 - code)


def _end(child: subprocess.Popen[bytes]) -> None:
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    _signal_group(child.pid, signal.SIGKILL)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    main()
