"""Entry point of a local worker process. It makes the process end with its parent, then runs the
worker's module.

    python -m realhf.scheduler.child PARENT_PID NICENESS MODULE ARGUMENT...

When the module has finished, the process exits with ``os._exit``, because the orderly shutdown of
an interpreter that has imported torch would take more than a second of CPU time.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys

from realhf.base.process import collect_garbage_rarely, lower_priority
from realhf.scheduler.process import (
    LAST_WORDS,
    die_with_parent,
    set_last_words_descriptor,
    write_last_words,
)


def exit_process(code: object) -> None:
    """Exit with the same exit code as ``sys.exit(code)``, without finalizing the interpreter."""
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        write_last_words(str(code))
    with contextlib.suppress(OSError):  # the log's disk may be full
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    parent_pid = int(sys.argv[1])
    niceness = int(sys.argv[2])
    module = sys.argv[3]
    die_with_parent(parent_pid)
    if words := os.environ.pop(LAST_WORDS, ""):
        set_last_words_descriptor(int(words))
    lower_priority(niceness)
    collect_garbage_rarely()
    sys.argv = [module, *sys.argv[4:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        exit_process(end.code)
    exit_process(0)
