"""Weights between hosts: torch.distributed broadcast from the publisher to the receivers of a version.

Receivers need not come together, and may fail. Those that come within ``GATHER_S`` of each other share a broadcast;
one that comes late or again, e.g. a restarted worker, gets a broadcast of its own. A receiver that dies breaks the
broadcast it takes part in; the others come again, and the publisher goes on without it and tells its name.

Gloo and the store have neither passwords nor encryption: whoever reaches the address can read the weights. What a
receiver accepts is fixed by the checksum in its manifest. On anything but the loopback this needs ``insecure=True``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.api.generation import WeightsManifest
from realhf.transport.weights.errors import WeightsError, WeightsGone, WeightsTimeout
from realhf.transport.weights.flat_buffer import Buffer, checksum
from realhf.transport.weights.rendezvous import (
    STOP,
    join_group,
    join_store,
    open_store,
    poll_for,
    take_ticket,
    ticket_name,
    ticket_value,
    transfer_s,
    wait_for,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GATHER_S = 0.5
ANSWER_S = 2.0
"""How long a receiver that was called may take to answer; one that waits answers within a millisecond."""
IDLE_S = 3600.0
CLOSE_S = 0.1
CONNECT_S = 1.0
ATTEMPTS = 5

log = logging.getLogger(__name__)


class Broadcast:
    """One version's buffer and the threads that serve it. Raises OSError when the address cannot be listened on."""

    def __init__(self, version: int, buffer: Buffer, host: str, receivers: int) -> None:
        self.checksum = checksum(buffer)
        self._version = version
        self._buffer = buffer
        self._host = host
        self._receivers = receivers
        self._store, self._port = open_store(host)
        self._store.set("checksum", self.checksum)
        self.location = f"{host}:{self._port}"
        self._lock = threading.Lock()
        self._unconfirmed: dict[int, str] = {}
        self._served = 0
        self.thread = threading.Thread(target=self._serve, name=f"weights-v{version}", daemon=True)
        self.thread.start()

    @property
    def unconfirmed(self) -> list[str]:
        """Receivers that came for this version and have not said that they got it."""
        with self._lock:
            return sorted(set(self._unconfirmed.values()))

    def close(self) -> None:
        """Serve no one else. Broadcasts under way end on ``thread``, which holds the buffer until then."""
        take_ticket(join_store(self._host, self._port, ANSWER_S), STOP)
        # Idle, it ends at once, and nobody finds a port that is about to close.
        self.thread.join(CLOSE_S)

    def _serve(self) -> None:
        confirming: list[threading.Thread] = []
        following, group = 1, 0
        while True:
            members, stopped = self._gather(following)
            following += len(members)
            seated = self._call(members)
            if seated:
                group += 1
                confirming = [thread for thread in confirming if thread.is_alive()]
                confirming.append(self._send(group, seated))
            if stopped:
                break
        for thread in confirming:
            thread.join(transfer_s(len(self._buffer)))

    def _gather(self, following: int) -> tuple[dict[int, str], bool]:
        """The next receivers by ticket, and whether the version is being closed."""
        members: dict[int, str] = {}
        deadline = time.monotonic() + IDLE_S
        while len(members) < max(1, self._receivers - self._served):
            number = following + len(members)
            wait = poll_for if members else wait_for
            value = wait(self._store, f"ticket/{number}", deadline - time.monotonic())
            if value == STOP.encode():
                return members, True
            if value is None:
                break
            if not members:
                deadline = time.monotonic() + GATHER_S
            members[number] = ticket_name(value)
        return members, False

    def _call(self, members: dict[int, str]) -> dict[int, str]:
        """Those of the members that are alive."""
        with self._lock:
            self._unconfirmed.update(members)
        for number in members:
            self._store.set(f"call/{number}", "")
        deadline = time.monotonic() + ANSWER_S
        alive: dict[int, str] = {}
        for number, name in members.items():
            if poll_for(self._store, f"ready/{number}", deadline - time.monotonic()) is not None:
                alive[number] = name
            else:
                # Should it live after all, it comes again.
                self._store.set(f"seat/{number}", "null")
                log.warning("weights version %d: %s came and did not answer within %g s", self._version, name, ANSWER_S)
        return alive

    def _send(self, group: int, members: dict[int, str]) -> threading.Thread:
        """Broadcast to the members; the thread that waits for their word."""
        size = len(members) + 1
        for rank, number in enumerate(members, start=1):
            self._store.set(f"seat/{number}", json.dumps([group, rank, size]))
        joined: Any = None
        try:
            joined = join_group(self._store, (group, 0, size), self._host)
            _broadcast(joined, self._buffer, transfer_s(len(self._buffer)))
        except RuntimeError as error:
            log.warning(
                "weights version %d: broadcast to %s broke: %.200s", self._version, ", ".join(members.values()), error
            )
        thread = threading.Thread(target=self._confirm, args=(members, joined), daemon=True)
        thread.start()
        return thread

    def _confirm(self, members: dict[int, str], group: Any) -> None:
        """Note who got the weights. The group lives until then: receivers pass on to one another over it."""
        store = join_store(self._host, self._port, ANSWER_S)
        deadline = time.monotonic() + transfer_s(len(self._buffer))
        for number, name in members.items():
            end = wait_for(store, f"end/{number}", deadline - time.monotonic())
            with self._lock:
                if end == b"got":
                    self._served += 1
                    # It may have come before, to a broadcast that broke.
                    mine = [ticket for ticket, other in self._unconfirmed.items() if other == name]
                    for ticket in mine:
                        del self._unconfirmed[ticket]
                elif end is None and number in self._unconfirmed:
                    log.warning("weights version %d: %s has not confirmed them, it may be dead", self._version, name)
        del group


def read_broadcast(manifest: WeightsManifest, timeout_s: float, name: str) -> Buffer:
    """The buffer of a manifest from its publisher. Raises WeightsGone, WeightsTimeout, WeightsError."""
    from torch.distributed import DistNetworkError

    deadline = time.monotonic() + timeout_s
    host, _, port = manifest.location.rpartition(":")
    buffer: Buffer = np.zeros(manifest.nbytes, dtype=np.uint8)
    broken: Exception | None = None
    try:
        address, store = _connect(host, int(port), deadline)
        if not store.check(["checksum"]) or store.get("checksum") != manifest.checksum.encode():
            raise WeightsGone(manifest, f"another version is served at {manifest.location}")
        for _ in range(ATTEMPTS):
            try:
                _take_part(manifest, store, buffer, address, deadline, name or f"process {os.getpid()}")
                return buffer
            except DistNetworkError:
                raise
            except RuntimeError as error:
                broken = error
            if time.monotonic() > deadline:
                raise WeightsTimeout(manifest, f"not complete within {timeout_s:g} s: {broken!s:.200}")
    except WeightsError:
        raise
    except (ConnectionError, DistNetworkError):
        raise WeightsGone(manifest, f"nobody serves it at {manifest.location}") from None
    except TimeoutError:
        raise WeightsTimeout(manifest, f"{manifest.location} was not reached within {timeout_s:g} s") from None
    except (OSError, ValueError, OverflowError) as error:
        raise WeightsError(manifest, f"location {manifest.location!r:.80}: {error}") from None
    raise WeightsError(manifest, f"broke {ATTEMPTS} times, last: {broken!s:.200}")


def _take_part(
    manifest: WeightsManifest, store: TCPStore, buffer: Buffer, address: str, deadline: float, name: str
) -> None:
    """One broadcast. Raises RuntimeError when it breaks."""

    def awaited(key: str) -> bytes:
        value = wait_for(store, key, deadline - time.monotonic())
        if value is None:
            raise WeightsTimeout(manifest, f"the publisher at {manifest.location} did not turn to {name} in time")
        return value

    number = take_ticket(store, ticket_value(name, uuid.uuid4().hex))
    awaited(f"call/{number}")
    store.set(f"ready/{number}", "")
    seat: Any = json.loads(awaited(f"seat/{number}"))
    end = "broke"
    try:
        if seat is None:
            raise RuntimeError("the publisher went on without this receiver, which answered late")
        group = join_group(store, seat, address)
        _broadcast(group, buffer, min(transfer_s(len(buffer)), max(deadline - time.monotonic(), 0.01)))
        end = "got"
    finally:
        # The publisher may have closed this version meanwhile, or died.
        with contextlib.suppress(RuntimeError):
            store.set(f"end/{number}", end)


def _broadcast(group: Any, buffer: Buffer, timeout_s: float) -> None:
    import torch
    from torch.distributed import BroadcastOptions

    options: Any = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=timeout_s)
    group.broadcast([torch.from_numpy(buffer)], options).wait()


def _connect(host: str, port: int, deadline: float) -> tuple[str, TCPStore]:
    """This host's address on the way to the publisher, and the publisher's store. Raises OSError at once where nobody
    listens: the store's own connecting would try again until its deadline."""
    from torch.distributed import DistNetworkError

    while True:
        with socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01)) as connection:
            address = str(connection.getsockname()[0])
        try:
            return address, join_store(host, port, CONNECT_S)
        except DistNetworkError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
