"""Defines what can go wrong between processes. Every message names the peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TransportError(Exception):
    """Is the base of all errors of this package."""


class NetworkError(TransportError, ValueError):
    """Is raised for an address or keys that a run cannot use; the message names the option."""


class AddressTaken(TransportError):
    """Is raised when nothing can listen on an address now, as another socket does."""


class CodecError(TransportError, ValueError):
    """Is raised for frames that are not a well-formed sample."""


class RpcError(TransportError):
    """Is the base of the errors of a remote call."""


class ProtocolError(RpcError):
    """Is raised for a message that breaks the protocol: malformed, too large, refused, or out of call order."""


class OtherProtocol(ProtocolError):
    """Is raised for a message of another version of the protocol; ``header`` is what it says."""

    def __init__(self, header: dict[str, Any], expected: int) -> None:
        super().__init__(f"protocol version {header.get('v')!r:.40}, expected {expected}")
        self.header = header


class RpcTimeout(RpcError, TimeoutError):
    """Is raised when a deadline passed; the message names the worker, the handler and the worker's last known state."""


class CallCancelled(RpcError):
    """Answers a call that was cancelled before the worker began it, so that it never ran."""


LOST_MASTER = "lost the master at"
"""Stands in the message of every MasterLost."""


class MasterLost(RpcError):
    """Is raised in a worker when the master is gone."""


class WorkerDied(RpcError):
    """Is raised when a worker is gone: all its calls in flight fail with this."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} died: {reason}")
        self.worker = worker
        self.reason = reason


class RemoteError(RpcError):
    """Is raised when a handler raised. The text ends with the remote traceback."""

    def __init__(
        self, *, worker: str, handler: str, mfc: str, step: int, kind: str, message: str, remote_traceback: str
    ) -> None:
        where = f"{handler} of {worker!r}" + (f" ({mfc}, step {step})" if mfc else "")
        super().__init__(f"{where} raised {kind}: {message}\n--- remote traceback ---\n{remote_traceback}")
        self.worker = worker
        self.handler = handler
        self.mfc = mfc
        self.step = step
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback


class DataError(TransportError):
    """Is the base of the errors of tensor storage and exchange."""


class DuplicateDataError(DataError):
    """Is raised when a value that is stored already is stored again by another producer call."""


class DataMissing(DataError, KeyError):
    """Is raised for values that the owner does not hold. ``missing`` lists them as (sample id, key)."""

    def __init__(self, owner: str, missing: Sequence[tuple[str, str]]) -> None:
        shown = ", ".join(f"{key} of {sample}" for sample, key in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        super().__init__(f"{owner} does not hold {shown}{more}")
        self.owner = owner
        self.missing = list(missing)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLost(DataError, ConnectionError):
    """Is raised when the peer of a tensor transfer cannot be reached or closed the connection."""


class FetchTimeout(DataError, TimeoutError):
    """Is raised when a tensor transfer passed its deadline."""
