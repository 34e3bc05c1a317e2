"""Imports what workers need, then forks one for each request: ``python -m realhf.scheduler.prepared_server FD OWNER_PID
MODULE...``.

It is the other side of ``PreparedWorkers``. A worker is forked twice, so that the owner, which adopts orphans, becomes
its parent; it begins when the owner has its pid, and is then what ``realhf.scheduler.child`` makes of a process.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from realhf.base.process import collect_rarely, step_back
from realhf.scheduler.child import leave
from realhf.scheduler.process import die_with_parent

MOST_BYTES = 64 << 10
ADOPTED_WITHIN_S = 10.0
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


def serve(control: socket.socket, owner: int) -> None:
    """Fork a worker for each request until the owner closes its end. Descriptors of a request: standard output, log,
    and a pipe in which a byte says that the worker may begin."""
    control.send(b'{"ready":true}')
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
        if not data:
            return
        try:
            control.send(json.dumps({"pid": _forked(control, owner, json.loads(data), descriptors)}).encode())
        except OSError as error:
            control.send(json.dumps({"error": str(error)}).encode())
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _forked(control: socket.socket, owner: int, request: dict[str, Any], descriptors: Sequence[int]) -> int:
    """Fork a worker whose parent has ended; its pid. Raises OSError."""
    told, tell = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_on(tell)
            control.close()
            os.close(told)
            _become(owner, request, descriptors)
        os.waitpid(between, 0)
        os.close(tell)
        tell = -1
        text = os.read(told, 32)
    finally:
        os.close(told)
        if tell >= 0:
            os.close(tell)
    if not text:
        raise OSError("the process cannot be made")
    return int(text)


def _fork_on(tell: int) -> None:
    """Return in a new process only; its pid is told, and this one ends whatever happens."""
    worker = -1
    try:
        worker = os.fork()
        if worker > 0:
            os.write(tell, str(worker).encode())
    finally:
        if worker != 0:
            os._exit(0)
    os.close(tell)


def _become(owner: int, request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Be a worker, in the forked process. Does not return."""
    code: object = 1
    try:
        os.setsid()
        out, log, go = descriptors
        os.dup2(out, 1)
        os.dup2(log, 2)
        begun = os.read(go, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        if begun:
            _wait_for_parent(owner)
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
        traceback.print_exc()
    finally:
        leave(code)


def _wait_for_parent(owner: int) -> None:
    end = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != owner and time.monotonic() < end:
        time.sleep(0.001)


def main() -> None:
    """Serve the owner named on the command line."""
    owner = int(sys.argv[2])
    die_with_parent(owner)
    collect_rarely()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with socket.socket(fileno=int(sys.argv[1])) as control:
        prepare(sys.argv[3:])
        serve(control, owner)


if __name__ == "__main__":
    main()
