"""Fork server that ``PreparedWorkers`` starts. It imports the workers' modules once, then forks a
worker for each request.

    python -m realhf.scheduler.prepared_server FD OWNER_PID MODULE...

The process that started the server adopts orphans, so it becomes the parent of the forked workers.
These behave like processes started through ``realhf.scheduler.child``.
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

from realhf.base.process import collect_garbage_rarely, lower_priority
from realhf.env.containment.fork_server import serve_forks
from realhf.scheduler.child import exit_process
from realhf.scheduler.process import die_with_parent, set_last_words_descriptor

_log = logging.getLogger(__name__)


def prepare(modules: Sequence[str]) -> None:
    """Import modules. A module that cannot be imported is skipped, because the worker that needs it
    will report the error.

    The workers' main modules are removed from ``sys.modules`` afterwards, because each worker runs
    its own main module.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            _log.info("%s is not prepared: %s", name, error)
        if name.startswith("workers."):
            sys.modules.pop(name, None)
    # Exclude the imported objects from garbage collection in the workers, so that the memory pages
    # of these objects stay shared.
    gc.freeze()


def work(owner: int, request: dict[str, Any], descriptors: list[int]) -> None:
    """Run a worker in the forked process. Does not return.

    ``descriptors`` contains the descriptors for the worker's standard output, its log and its last
    words.
    """
    code: object = 1
    try:
        set_last_words_descriptor(descriptors.pop())
        for target, descriptor in enumerate(descriptors, 1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(owner)
        lower_priority(int(request["niceness"]))
        os.environ.update(request["environment"])
        sys.argv = [request["module"], *request["argv"]]
        # Otherwise the server's handlers would write log records as well.
        logging.getLogger().handlers.clear()
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
    finally:
        exit_process(code)


def main() -> None:
    """Serve the owner process given on the command line until it closes the connection."""
    owner = int(sys.argv[2])
    die_with_parent(owner)
    collect_garbage_rarely()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with socket.socket(fileno=int(sys.argv[1])) as control:
        prepare(sys.argv[3:])
        serve_forks(control, {"ready": True}, partial(work, owner), owner)
    exit_process(0)


if __name__ == "__main__":
    main()
