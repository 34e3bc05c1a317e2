"""Gives the owner its own ways into a simulator: connections that are handed over, not made.

The owner sends one end of a socket pair through a channel that only the two processes hold, with a mark that says whose
it is. There is no port, no path and no secret that bytes of an agent could name: what comes in by the port is the
agent's, for good. Control, set-up, grading and health checks use these connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

OWNER = b"o"
"""Mark of a connection for calls of the environment and its control paths."""
ENVIRONMENT = b"e"
"""Mark of a connection for command lines of tasks, in a worker of their own: AWS alone, as by the port."""


class OwnerChannel:
    """Is the owner's end; ``theirs`` goes to the simulator at its fork, and is closed here after it."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)  # a simulator that hangs does not empty its queue

    def connect(self, mark: bytes) -> socket.socket:
        """Return a new connection with one of the marks above; what is sent waits until the simulator serves. Raises
        OSError when the simulator is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._ours, [mark], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def close(self) -> None:
        """Close the channel. Idempotent. Connections that were made stay."""
        self._ours.close()
        self.theirs.close()


def serve_owner(
    loop: asyncio.AbstractEventLoop, channel: socket.socket, protocols: Mapping[bytes, Callable[[], asyncio.Protocol]]
) -> None:
    """Serve every connection that comes through ``channel`` by the protocol of its mark, as long as the loop runs; the
    simulator's end."""
    tasks: set[asyncio.Task[object]] = set()

    def arrived() -> None:
        try:
            mark, fds, _, _ = socket.recv_fds(channel, 1, 1)
        except (BlockingIOError, InterruptedError):
            return
        if not mark:
            loop.remove_reader(channel)
        for fd in fds:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd)
            task = loop.create_task(_serve(loop, connection, protocols[mark]))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    channel.setblocking(False)
    loop.add_reader(channel, arrived)


async def _serve(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, make_protocol: Callable[[], asyncio.Protocol]
) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        await loop.connect_accepted_socket(make_protocol, connection)
