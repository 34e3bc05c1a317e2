"""Roster of the workers of a run, and its incremental announcement to every worker.

Sending the whole roster to all workers after each change would cost time quadratic in their number,
and with thousands of workers it would not fit into a message. So each worker receives only the
changes since the last announcement to it. A worker without services, such as a rollout worker,
receives only the workers that have services: it calls no others, and only the master calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from realhf.base import process_clock
from realhf.transport.envelope import pack_payload
from realhf.transport.errors import ProtocolError


@dataclass(frozen=True)
class WorkerInfo:
    """One registered worker."""

    name: str
    kind: str
    index: int
    host: str
    """Host name, which need not be unique."""
    pid: int
    data_endpoint: str = ""
    """Address of its data plane; "" if it has none."""
    endpoints: dict[str, str] = field(default_factory=dict)
    """Addresses of its services by name, e.g. ``{"env": "http://..."}``."""
    machine: str = ""
    """Identity of the host (``host_token``), which is unique."""
    started: int = 0
    """Start time of the process (``start_time``), which distinguishes it from others with the same
    pid."""

    def to_map(self, *, listed: bool = True) -> dict[str, Any]:
        """Return the worker as plain data. If ``listed`` is False, the addresses of its services
        are left out."""
        return asdict(self) if listed else {**asdict(self), "endpoints": {}}

    @staticmethod
    def from_map(value: Any) -> WorkerInfo:
        """Parse the result of ``to_map``. Raises ProtocolError for anything else."""
        try:
            info = WorkerInfo(**value)
        except TypeError as error:
            raise ProtocolError(f"not a worker description: {error}") from None
        texts = (info.name, info.kind, info.host, info.data_endpoint, info.machine)
        numbers = (info.index, info.pid, info.started)
        if not (
            all(isinstance(t, str) for t in texts)
            and all(isinstance(n, int) for n in numbers)
            and isinstance(info.endpoints, dict)
        ):
            raise ProtocolError(f"not a worker description: {info}")
        return info


SHARE = 0.1
"""Maximum fraction of the event loop's time for announcements, however often workers join and
leave."""


class _RosterChange(NamedTuple):
    """The last change to one worker."""

    version: int
    serves: bool
    """Whether the worker has services."""


class RosterAnnouncer:
    """Sender of roster changes to workers. Belongs to the running loop.

    roster: The current workers by name. unlisted: Names of workers whose services are hidden from
    others. send: Function (name, version, payload) -> None that sends an announcement to a worker.
    ``version`` counts changes.
    """

    def __init__(
        self,
        roster: Mapping[str, WorkerInfo],
        unlisted: set[str],
        send: Callable[[str, int, bytes], None],
    ) -> None:
        self._roster = roster
        self._unlisted = unlisted
        self._send = send
        # In the order of their versions, so that a walk from the end meets the newest first.
        self._changes: dict[str, _RosterChange] = {}
        self._announced_version: dict[str, int] = {}
        self._packed: dict[tuple[int, bool], bytes | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_round_at = 0.0
        self.version = 0

    def announce_later(self, info: WorkerInfo) -> None:
        """Schedule an announcement to all workers that this one has joined, left or changed its
        listing.

        Changes that follow soon are announced together.
        """
        self.version += 1
        self._changes.pop(info.name, None)
        self._changes[info.name] = _RosterChange(self.version, is_listed(info))
        self._packed.clear()
        if info.name not in self._roster:
            self._announced_version.pop(info.name, None)
        if self._timer is None:
            wait_s = max(0.0, self._next_round_at - process_clock.now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._announce_to_all)

    def announce(self, name: str) -> None:
        """Send a worker the changes since the last announcement to it, if there are any."""
        announced_version = self._announced_version.get(name, 0)
        if announced_version < self.version:
            self._announced_version[name] = self.version
            kind = (announced_version, is_listed(self._roster[name]))
            if kind not in self._packed:
                self._packed[kind] = self._pack(*kind)
            payload = self._packed[kind]
            if payload is not None:
                self._send(name, self.version, payload)

    def close(self) -> None:
        """Cancel the scheduled announcement."""
        if self._timer is not None:
            self._timer.cancel()

    def _announce_to_all(self) -> None:
        self._timer = None
        start = process_clock.now()
        for name in self._roster:
            self.announce(name)
        now = process_clock.now()
        self._next_round_at = now + (now - start) / SHARE

    def _pack(self, version: int, everybody: bool) -> bytes | None:
        """Encode the changes since ``version``; return None if there are none.

        everybody: Whether to include workers without services.
        """
        workers = []
        gone = []
        for name, change in reversed(self._changes.items()):
            if change.version <= version:
                break
            if not everybody and not change.serves:
                continue
            info = self._roster.get(name)
            if info is None:
                gone.append(name)
            else:
                workers.append(info.to_map(listed=name not in self._unlisted))
        return pack_payload({"workers": workers[::-1], "gone": gone}) if workers or gone else None


def is_listed(info: WorkerInfo) -> bool:
    """Return whether other workers may call this worker."""
    return bool(info.data_endpoint or info.endpoints)
