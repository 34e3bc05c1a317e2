"""Describes who takes part in a run; the master publishes the roster, with a version."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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
