"""Zygote process of the CLI workers: imports the AWS CLI and prepares everything once, then forks a
worker for each request.

``ForkServer`` runs it as ``python -m realhf.aws.cli.zygote <control fd> <account> <network> <layers
that may be missing>``. It never executes agent input.
"""

from __future__ import annotations

import gc
import mimetypes
import socket
import sys
from typing import Any

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.virtual_folder import MAX_FILE_BYTES
from realhf.aws.cli.worker import CliWorker
from realhf.env.containment import sandbox
from realhf.env.containment.fork_server import serve_forks
from realhf.env.containment.probe import PROBE, run_probe
from realhf.env.containment.sandbox import ProcessGuard

_OPEN_FILES = 64
_MEMORY_BYTES = 512 << 20
_CPU_S = 120


def main() -> None:
    """Prepare the worker, then fork children on request until the owner closes its end of the
    control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    account, mode, may_lack = sys.argv[2:]
    sys.argv = ["aws"]  # argparse names the program after it
    isolated = sandbox.apply_network_mode(mode)
    gc.disable()  # nothing that is built here becomes garbage, and collecting would double the start-up time
    worker = CliWorker(account)
    worker.cli.preload(ALLOWED)
    mimetypes.init()
    guard = ProcessGuard(
        MAX_FILE_BYTES, _OPEN_FILES, _MEMORY_BYTES, _CPU_S, frozenset(may_lack.split(","))
    )
    gc.freeze()
    gc.enable()

    def child(request: dict[str, Any], fds: list[int]) -> None:
        if PROBE in request:
            run_probe(guard, request[PROBE], fds)
        else:
            worker.serve(request, fds, guard)

    serve_forks(control, {"ready": True, "isolated": isolated}, child)


if __name__ == "__main__":
    main()
