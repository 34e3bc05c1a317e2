"""Asks the launcher of a running job, for a person."""

from __future__ import annotations

import os
import time
from pathlib import Path

import zmq

from realhf.cluster.cluster_keys import LauncherKeys
from realhf.cluster.messages import OF_LAUNCHER, Message, Nothing, Report, packed, unpacked
from realhf.transport.envelope import field, unpack_header
from realhf.transport.errors import NetworkError, ProtocolError
from realhf.transport.network import connect_encrypted, host_of
from realhf.transport.sockets import REACHED_WITHIN_S, HandshakeWatch, dealer, unreached

ANSWER_S = 30.0
LOOK_MS = 100


def asked(launcher: str, key_file: Path, kind: str, message: Message | None = None) -> Report:
    """Return the answer of the launcher at ``launcher``, whose own file of keys is ``key_file``. Raises NetworkError
    when it is not reached or refuses the keys, and ProtocolError when it does not answer within ``ANSWER_S``."""
    host_of(launcher)
    key = LauncherKeys.read(key_file.expanduser()).of_operator
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = dealer(context)
    watch = HandshakeWatch(socket)
    session, began = os.urandom(16), time.monotonic()
    try:
        connect_encrypted(socket, launcher, key.server_public, key.own)
        socket.send_multipart(packed(kind, session, message or Nothing()))
        while not socket.poll(LOOK_MS):
            watch.look()
            if watch.refused:
                raise NetworkError(f"the launcher at {launcher} {watch.refused}")
            if not watch.reached and time.monotonic() - began > REACHED_WITHIN_S:
                raise NetworkError(f"the launcher at {launcher} {unreached()}")
            if time.monotonic() - began > ANSWER_S:
                raise ProtocolError(f"the launcher at {launcher} did not answer within {ANSWER_S:g} s")
        frame, *payload = socket.recv_multipart()
        found = unpacked(field(unpack_header(frame), "kind", str), payload, OF_LAUNCHER)
        if not isinstance(found, Report):
            raise ProtocolError(f"the launcher at {launcher} answered with {type(found).__name__}")
        return found
    finally:
        watch.close()
        context.destroy(0)
