"""Errors of communication between processes. Every message names the peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TransportError(Exception):
    """Base of all errors of this package."""


class NetworkError(TransportError, ValueError):
    """An address or keys that a run cannot use; the message names the option."""


class AddressTaken(TransportError):
    """An address that another socket listens on."""


class CodecError(TransportError, ValueError):
    """Frames that are not a well-formed sample."""


class RpcError(TransportError):
    """Base of the errors of a remote call."""


class ProtocolError(RpcError):
    """A message that breaks the protocol: malformed, too large, refused, or out of call order."""


class OtherProtocol(ProtocolError):
    """A message of another protocol version; ``header`` is its decoded header."""

    def __init__(self, header: dict[str, Any], expected: int) -> None:
        super().__init__(f"protocol version {header.get('v')!r:.40}, expected {expected}")
        self.header = header


class RpcTimeout(RpcError, TimeoutError):
    """A call without an answer by its deadline. The message names the worker, the handler and the
    worker's last known state."""


class CallCancelled(RpcError):
    """A call that was cancelled before the worker began it, so it never ran."""


LOST_MASTER = "lost the master at"
"""Part of the message of every MasterLost."""


class MasterLost(RpcError):
    """The loss of the master, raised in a worker."""


class WorkerDied(RpcError):
    """The loss of a worker, raised for each of its calls in flight."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} died: {reason}")
        self.worker = worker
        self.reason = reason


class RemoteError(RpcError):
    """An exception in the handler of a call. The text ends with the remote traceback."""

    def __init__(
        self,
        *,
        worker: str,
        handler: str,
        mfc: str,
        step: int,
        kind: str,
        message: str,
        remote_traceback: str,
    ) -> None:
        where = f"{handler} of {worker!r}" + (f" ({mfc}, step {step})" if mfc else "")
        super().__init__(
            f"{where} raised {kind}: {message}\n--- remote traceback ---\n{remote_traceback}"
        )
        self.worker = worker
        self.handler = handler
        self.mfc = mfc
        self.step = step
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback


class DataError(TransportError):
    """Base of the errors of tensor storage and exchange."""


class DuplicateDataError(DataError):
    """A value that another producer call has already stored."""


class DataMissing(DataError, KeyError):
    """Values that the owner does not hold. ``missing`` lists them as (sample id, key)."""

    def __init__(self, owner: str, missing: Sequence[tuple[str, str]]) -> None:
        shown = ", ".join(f"{key} of {sample}" for sample, key in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        super().__init__(f"{owner} does not hold {shown}{more}")
        self.owner = owner
        self.missing = list(missing)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLost(DataError, ConnectionError):
    """A peer of a tensor transfer that is unreachable or closed the connection."""


class FetchTimeout(DataError, TimeoutError):
    """A tensor transfer that missed its deadline."""
