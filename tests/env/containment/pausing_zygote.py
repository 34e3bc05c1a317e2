"""A zygote that imports next to nothing; its children write their pid to their descriptor, and wait
to be killed, but for the ``brief`` ones; the ``threads`` ones have many."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import Any

from realhf.env.containment.fork_server import serve_forks


def child(request: dict[str, Any], fds: list[int]) -> None:
    if request["word"] == "threads":
        for _ in range(16):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.write(fds[0], f"{request['word']} {os.getpid()}\n".encode())
    if request["word"] != "brief":
        signal.pause()


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])), {"ready": True}, child)
