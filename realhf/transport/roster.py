"""Describes who takes part in a run, and tells each worker what has changed among the others since it was told last.

A roster that goes as a whole to everybody with every change grows with the square of the workers, and with thousands of
them fills no message any more. A worker that serves nobody, as a rollout worker, hears only of those that serve: it
calls no others, and nobody calls it but the master.
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
    """Describes one registered worker. ``endpoints`` maps a service to its address, e.g. ``{"env": "http://..."}``;
    ``machine`` is the same for workers of one host (``host_token``), whose names may be the same on several, and
    ``started`` (``start_time``) tells its process from others that had its number."""

    name: str
    kind: str
    index: int
    host: str
    pid: int
    data_endpoint: str = ""
    endpoints: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    started: int = 0

    def to_map(self, *, listed: bool = True) -> dict[str, Any]:
        """Return the worker as plain data, without the addresses of its services unless ``listed``."""
        return asdict(self) if listed else {**asdict(self), "endpoints": {}}

    @staticmethod
    def from_map(value: Any) -> WorkerInfo:
        """Read what ``to_map`` returned. Raises ProtocolError on a map that does not describe a worker."""
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
"""Most of the loop's time that telling all workers may take, however many come and go."""


class _Change(NamedTuple):
    version: int
    serves: bool


class RosterNews:
    """Belongs to the running loop. ``roster``: who takes part now; ``unlisted``: whose services are not shown;
    ``send(name, version, payload)`` tells a worker. ``version`` counts changes."""

    def __init__(
        self, roster: Mapping[str, WorkerInfo], unlisted: set[str], send: Callable[[str, int, bytes], None]
    ) -> None:
        self._roster, self._unlisted, self._send = roster, unlisted, send
        self._changes: dict[str, _Change] = {}
        self._told: dict[str, int] = {}
        self._packed: dict[tuple[int, bool], bytes | None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tell_after = 0.0
        self.version = 0

    def changed(self, info: WorkerInfo) -> None:
        """A worker has joined or left, or is shown in another way: have everybody told, together with other changes
        that come soon after."""
        self.version += 1
        self._changes.pop(info.name, None)
        self._changes[info.name] = _Change(self.version, serves(info))
        self._packed.clear()
        if info.name not in self._roster:
            self._told.pop(info.name, None)
        if self._timer is None:
            wait_s = max(0.0, self._tell_after - process_clock.now())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._tell_all)

    def tell(self, name: str) -> None:
        """Tell a worker now what it has not been told."""
        told = self._told.get(name, 0)
        if told < self.version:
            self._told[name] = self.version
            kind = (told, serves(self._roster[name]))
            if kind not in self._packed:
                self._packed[kind] = self._pack(*kind)
            payload = self._packed[kind]
            if payload is not None:
                self._send(name, self.version, payload)

    def close(self) -> None:
        """Nobody is told any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell_all(self) -> None:
        self._timer, began = None, process_clock.now()
        for name in self._roster:
            self.tell(name)
        now = process_clock.now()
        self._tell_after = now + (now - began) / SHARE

    def _pack(self, version: int, everybody: bool) -> bytes | None:
        """Return what has changed since ``version``, for those that hear of everybody or for the others; None if that
        is nothing."""
        workers, gone = [], []
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


def serves(info: WorkerInfo) -> bool:
    """Return whether others may call this worker."""
    return bool(info.data_endpoint or info.endpoints)
