"""Takes what has arrived at a ROUTER socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import zmq

from realhf.transport.envelope import unpack_header
from realhf.transport.errors import OtherProtocol, ProtocolError

Take = Callable[[bytes, dict[str, Any], list[bytes]], None]
"""Gets a message: who sent it, its header, and the frames after the header."""


def take_all(
    socket: zmq.Socket[bytes],
    take: Take,
    drop: Callable[[str], None],
    other: Callable[[bytes, dict[str, Any]], None] | None = None,
    most: int | None = None,
    whose: Callable[[str], None] | None = None,
) -> None:
    """Hand every message that waits to ``take``, until there is none or ``take`` closes the socket. A message without
    a header, and one for which ``take`` raises ProtocolError, goes to ``drop`` with the reason. Before that one of
    another version of the protocol goes to ``other``, where there is that. Who polls the socket again anyway gives
    ``most``, the number of messages after which others have a turn: some may come faster than they are taken.
    ``whose`` is told before each message with which key (Z85) its sender came; the context has a ``Doorkeeper``."""
    for _ in range(most) if most is not None else itertools.repeat(None):
        if socket.closed:
            return
        try:
            if whose is None:
                identity, frame, *payload = socket.recv_multipart(zmq.NOBLOCK)
            else:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                whose(str(frames[0].get("User-Id")))
                identity, frame, *payload = (each.bytes for each in frames)
        except zmq.Again:
            return
        except ValueError:
            drop("it has no header")
            continue
        try:
            take(identity, unpack_header(frame), payload)
        except ProtocolError as error:
            if other is not None and isinstance(error, OtherProtocol):
                other(identity, error.header)
            drop(str(error))
