"""Defines what can go wrong between a client and the trajectory server. Every error names the URL and the cause."""

from __future__ import annotations


class TrajectoryError(Exception):
    """Is the base of all errors of a client. ``url``: of the request, or of the server."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"{url}: {cause}")
        self.url = url
        self.cause = cause


class BadGroup(ValueError):
    """Is raised before anything is sent for a group that no server would take. The text names the field."""


class Unreachable(TrajectoryError):
    """Is raised when no usable answer came by the deadline: connection errors, 5xx, or a queue that stayed full."""


class BadAnswer(TrajectoryError):
    """Is raised for an answer that is not of this protocol, e.g. from another kind of server."""


class Refused(TrajectoryError):
    """Is raised when the server refused, and would refuse again. ``status``: of HTTP."""

    def __init__(self, url: str, cause: str, status: int) -> None:
        super().__init__(url, f"{status}: {cause}")
        self.status = status


class Denied(Refused):
    """Is raised when the token is missing, wrong, or without the role that the request needs (401, 403)."""


class StaleEpoch(Refused):
    """Is raised when the run that this client registered for has ended (409); register again for the present one."""


class LeaseLost(Refused):
    """Is raised when the lease is unknown (404), or has ended: given to another trainer, or acknowledged already
    (409)."""


class NotRegistered(TrajectoryError):
    """Is raised when no trainer has registered, or this client has not registered as an environment."""


class NoBatchYet(TrajectoryError):
    """Is raised when there was no batch by the deadline. ``reason``: the server's last ``X-Batch-Reason``."""

    def __init__(self, url: str, waited_s: float, reason: str) -> None:
        super().__init__(url, f"no batch within {waited_s:.1f} s ({reason})")
        self.reason = reason
