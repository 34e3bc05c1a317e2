"""Describes what a command did: its output, its exit code, and the requests that really left for the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from realhf.aws.cli.policy import MAX_COMMAND_BYTES


@dataclass(frozen=True)
class SentRequest:
    """One request that really left for the simulator. ``service`` is botocore's name (``logs``, ``s3``), ``operation``
    the API's (``CreateBucket``), ``status`` the HTTP status, 0 when no answer came."""

    service: str
    operation: str
    params: dict[str, Any]
    status: int
    error_code: str

    @property
    def ok(self) -> bool:
        """Whether the simulator accepted the request with a 2xx answer."""
        return 200 <= self.status < 300


@dataclass(frozen=True)
class CommandResult:
    """What a command did. ``refusal`` is the rule that stopped it, None when it ran; ``stopped``: its worker was lost
    over it, so that nothing is known of what it did; ``truncated``: its output is not all here."""

    exit_code: int
    stdout: str
    stderr: str
    refusal: str | None = None
    timed_out: bool = False
    requests: tuple[SentRequest, ...] = ()
    stopped: bool = False
    truncated: bool = False

    @property
    def success(self) -> bool:
        """Whether the command ran, ended in time and exited with 0."""
        return self.exit_code == 0 and self.refusal is None and not self.timed_out

    @property
    def lost(self) -> bool:
        """Whether nothing is known of what the command did: it may have sent anything."""
        return self.stopped or self.timed_out


@dataclass(frozen=True)
class OutputLimits:
    """Limits a command: seconds it may take, bytes kept of each stream, bytes of the command line itself."""

    timeout_s: float = 10.0
    stdout_bytes: int = 16384
    stderr_bytes: int = 4096
    command_bytes: int = MAX_COMMAND_BYTES
