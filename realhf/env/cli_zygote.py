"""Zygote of the CLI workers: imports the AWS CLI, builds everything once, then forks workers on request.

Run by ``ForkServer`` as ``python -m realhf.env.cli_zygote <control fd> <account> <network>``. It never executes
agent input.
"""

from __future__ import annotations

import gc
import mimetypes
import socket
import sys
from typing import Any

from realhf.env import sandbox, seccomp
from realhf.env.cli_worker import CliWorker
from realhf.env.command_table import ALLOWED
from realhf.env.fork_server import serve_forks


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    account, mode = sys.argv[2:]
    sys.argv = ["aws"]  # argparse names the program after it
    isolated = sandbox.without_network(mode)
    worker = CliWorker(account)
    worker.cli.preload(ALLOWED)
    mimetypes.init()
    roots = sandbox.package_roots()
    gc.collect()
    gc.freeze()

    def child(request: dict[str, Any], fds: list[int]) -> None:
        worker.serve(request, fds, roots)

    serve_forks(control, {"ready": True, "isolated": isolated, "filtered": seccomp.available()}, child)


if __name__ == "__main__":
    main()
