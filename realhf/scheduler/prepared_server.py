"""Imports what workers need, then forks one for each request: ``python -m realhf.scheduler.prepared_server FD OWNER_PID
MODULE...``.

It is the zygote of ``PreparedWorkers``. Its owner adopts orphans and is the parent of the workers, which are then what
``realhf.scheduler.child`` makes of a process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

from realhf.base.process import collect_rarely, step_back
from realhf.env.containment.fork_server import serve_forks
from realhf.scheduler.child import leave
from realhf.scheduler.process import die_with_parent, keep_last_words

_log = logging.getLogger(__name__)


def prepare(modules: Sequence[str]) -> None:
    """Import modules, as far as that is possible; a worker that needs one of the others says why it is not. Programs
    are forgotten again: a worker runs them anew."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            _log.info("%s is not prepared: %s", name, error)
        if name.startswith("workers."):
            sys.modules.pop(name, None)
    gc.freeze()  # what is there now is not walked by collectors of workers, and stays shared


def work(owner: int, request: dict[str, Any], descriptors: list[int]) -> None:
    """Be a worker, in the forked process; the descriptors are those of its standard output, its log and its last
    words. Does not return."""
    code: object = 1
    try:
        keep_last_words(descriptors.pop())
        for target, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(owner)
        step_back(int(request["niceness"]))
        os.environ.update(request["environment"])
        sys.argv = [request["module"], *request["argv"]]
        # Handlers of the server's own log would write twice.
        logging.getLogger().handlers.clear()
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        leave(code)


def main() -> None:
    """Serve the owner named on the command line."""
    owner = int(sys.argv[2])
    die_with_parent(owner)
    collect_rarely()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as control:
        prepare(sys.argv[3:])
        serve_forks(control, {"ready": True}, partial(work, owner), owner)
    leave(0)


if __name__ == "__main__":
    main()
