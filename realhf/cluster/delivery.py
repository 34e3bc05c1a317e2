"""Brings files to a host, a few parts ahead of what it says that it has kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from realhf.cluster.door import Door
from realhf.cluster.errors import ClusterError
from realhf.cluster.host_table import Host
from realhf.cluster.messages import FilePiece

AHEAD = 4
"""So many parts may be on the way to a host: they lie in the launcher's memory."""
KEPT_WITHIN_S = 60.0
"""A host that is there keeps a part within this time."""
LOOK_S = 0.1


def deliver(
    door: Door, host: Host, pieces: Iterable[FilePiece], there: Callable[[], bool], wait: Callable[[float], None]
) -> bool:
    """Send parts of files until the host has kept all of them; False when it is not ``there`` any more. ``wait`` takes
    note of what hosts say, for at most so many seconds. Raises ClusterError that names the host and what it cannot
    keep, and OSError for a file that cannot be read here."""
    host.problem = ""
    for piece in pieces:
        if not _room(host, AHEAD - 1, there, wait):
            return False
        host.on_way += 1
        host.sent.add(piece.path)
        door.send(host.hello.name, "file", piece, session=host.session)
    return _room(host, 0, there, wait)


def _room(host: Host, most: int, there: Callable[[], bool], wait: Callable[[float], None]) -> bool:
    """Wait until at most so many parts are on the way, none once something cannot be kept; False for a lost host."""
    before, deadline = host.on_way, time.monotonic() + KEPT_WITHIN_S
    while host.on_way > (0 if host.problem else most):
        if not there():
            return False
        if host.on_way < before:
            before, deadline = host.on_way, time.monotonic() + KEPT_WITHIN_S
        if time.monotonic() > deadline:
            raise ClusterError(f"host {host.hello.name} has kept no part of a file for {KEPT_WITHIN_S:g} s")
        wait(LOOK_S)
    if host.problem:
        raise ClusterError(
            f"host {host.hello.name} cannot keep {host.problem}; make room there, or start its agent with another "
            "--folder"
        )
    return there()
