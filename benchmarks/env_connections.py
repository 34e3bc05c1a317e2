"""Refused, half-open and killed connections: what stays behind, and how soon a killed client's slot
is usable.

    python benchmarks/env_connections.py [--pool-size 8] [--connections 1000] [--killed 20]

A real server with all slots leased is asked for more sessions (each must get 503 and Retry-After),
is left alone in the middle of handshakes, and loses clients without a goodbye. Printed:
descriptors, threads, processes and free slots before and after, and the time from a client's death
to the next session on its slot.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from realhf.aws.server.program import EnvServerProcess

_HANDSHAKE = b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
_SETTLE_S = 20.0


@dataclass(frozen=True)
class Footprint:
    """Resources of the server while no client is connected."""

    descriptors: int
    threads: int
    processes: int
    free_slots: int


def footprint(server: EnvServerProcess) -> Footprint:
    """Return the resources that a server uses, and its number of free slots."""
    process = psutil.Process(server.process.pid)
    page = urllib.request.urlopen(server.url + "/metrics", timeout=5).read().decode()
    free = next(line for line in page.splitlines() if line.startswith("realhf_env_pool_free "))
    children = sum(lives(child) for child in process.children(recursive=True))
    return Footprint(
        process.num_fds(), process.num_threads(), children, int(float(free.split()[1]))
    )


def lives(process: psutil.Process) -> bool:
    """Return whether a process is still running."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def rested(server: EnvServerProcess, pool_size: int, wanted: Footprint | None = None) -> Footprint:
    """Wait until all slots are free, and the footprint equals ``wanted`` if given; return the
    footprint. After some time, return it as it is."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        now = footprint(server)
        at_rest = now.free_slots == pool_size and now.processes >= 2 * pool_size
        if (at_rest and now == (wanted or footprint(server))) or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def open_session(url: str) -> ClientConnection:
    """Return the open connection of a new session."""
    return connect(
        url.replace("http", "ws") + "/ws",
        compression=None,
        proxy=None,
        open_timeout=20,
        legacy=True,
    )


def kill(session: ClientConnection) -> None:
    """Close a client's connection with a reset and no closing handshake, as the kernel does for a
    killed process."""
    session.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    session.socket.close()


def refused(url: str) -> bool:
    """Return whether a session beyond the capacity is refused correctly, with status 503 and
    Retry-After."""
    try:
        open_session(url).close()
    except InvalidStatus as error:
        response = error.response
        body = json.loads(response.body or b"{}")
        return (
            response.status_code == 503
            and response.headers.get("Retry-After") == "1"
            and body.get("code") == "CAPACITY_REACHED"
        )
    return False


def half_open(url: str, step: int) -> None:
    """Connect a client that stops in the middle of its handshake."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(_HANDSHAKE[: step % len(_HANDSHAKE)])
        if step % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def storm(server: EnvServerProcess, pool_size: int, connections: int) -> int:
    """Make ``connections`` connections of all three kinds. Return how many of those beyond the
    capacity were refused correctly."""
    sessions = [open_session(server.url) for _ in range(pool_size)]
    try:
        good = sum(refused(server.url) for _ in range(connections // 2))
        for step in range(connections // 4):
            half_open(server.url, step)
    finally:
        for session in sessions:
            kill(session)
    for _ in range(connections - connections // 2 - connections // 4 - pool_size):
        kill(open_session(server.url))
    return good


def freed_after_s(server: EnvServerProcess, repeats: int) -> list[float]:
    """Return the seconds from a client's death to a new session on its slot, for each of
    ``repeats`` deaths."""
    times = []
    for _ in range(repeats):
        session = open_session(server.url)
        session.send(json.dumps({"type": "reset", "data": {"task_id": 101, "seed": 1}}))
        session.recv(timeout=20)
        kill(session)
        died = time.perf_counter()
        while True:
            try:
                again = open_session(server.url)
                break
            except InvalidStatus:
                if time.perf_counter() - died > _SETTLE_S:
                    raise
        times.append(time.perf_counter() - died)
        again.close()
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool-size", type=int, default=8)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--killed", type=int, default=20, help="deaths to be timed")
    options = parser.parse_args(argv)
    with EnvServerProcess(options.pool_size, "--web", "off") as server:
        storm(server, options.pool_size, 10 * options.pool_size)
        before = rested(server, options.pool_size)
        good = storm(server, options.pool_size, options.connections)
        after = rested(server, options.pool_size, before)
    with EnvServerProcess(1, "--web", "off") as single:
        times = freed_after_s(single, options.killed)
    print(f"{options.connections} connections on {options.pool_size} slots; {os.cpu_count()} cores")
    print(f"refused with 503 and Retry-After: {good} of {options.connections // 2}")
    print(f"before: {before}\nafter:  {after}")
    print(
        f"a killed client's slot is usable after: median {1e3 * statistics.median(times):.0f} ms, "
        f"max {1e3 * max(times):.0f} ms ({len(times)} deaths)"
    )
    return 0 if after == before and good == options.connections // 2 else 1


if __name__ == "__main__":
    sys.exit(main())
