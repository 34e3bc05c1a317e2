"""A zygote that imports next to nothing; its children write their pid to their descriptor, and wait to be
killed, but for the ``brief`` ones."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from realhf.env.containment.fork_server import serve_forks


def child(request: dict[str, Any], fds: list[int]) -> None:
    os.write(fds[0], f"{request['word']} {os.getpid()}\n".encode())
    if request["word"] != "brief":
        signal.pause()


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])), {"ready": True}, child)
