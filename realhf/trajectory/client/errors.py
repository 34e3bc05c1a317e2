"""What can go wrong between a client and the trajectory server. Every error names the URL and the cause."""

from __future__ import annotations


class TrajectoryError(Exception):
    """Base of all. ``url``: of the request, or of the server."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"{url}: {cause}")
        self.url = url
        self.cause = cause


class BadGroup(ValueError):
    """A group that no server would take; found before anything was sent. The text names the field."""


class Unreachable(TrajectoryError):
    """No usable answer until the deadline: connection errors, 5xx, or a queue that stayed full."""


class BadAnswer(TrajectoryError):
    """An answer that is not of this protocol, e.g. from another kind of server."""


class Refused(TrajectoryError):
    """The server said no, and would again. ``status``: of HTTP."""

    def __init__(self, url: str, cause: str, status: int) -> None:
        super().__init__(url, f"{status}: {cause}")
        self.status = status


class Denied(Refused):
    """Token missing, wrong, or without the role that this needs (401, 403)."""


class StaleEpoch(Refused):
    """The run that this client registered for has ended (409); register again for the present one."""


class LeaseLost(Refused):
    """The lease is unknown (404), or it ended: given to another trainer, or acknowledged already (409)."""


class NotRegistered(TrajectoryError):
    """Nobody registered as the trainer, or this client did not register as an environment."""


class NoBatchYet(TrajectoryError):
    """No batch until the deadline. ``reason``: the server's last ``X-Batch-Reason``."""

    def __init__(self, url: str, waited_s: float, reason: str) -> None:
        super().__init__(url, f"no batch within {waited_s:.1f} s ({reason})")
        self.reason = reason
