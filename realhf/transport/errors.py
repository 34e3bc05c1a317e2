"""Errors of communication between processes. Every message names the peer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TransportError(Exception):
    """Base class of all errors of this package."""


class NetworkError(TransportError, ValueError):
    """Error: a run cannot use an address or keys. The message names the option."""


class AddressTaken(TransportError):
    """Error: another socket already listens on the address."""


class CodecError(TransportError, ValueError):
    """Error: frames are not a well-formed sample."""


class RpcError(TransportError):
    """Base class of the errors of a remote call."""


class ProtocolError(RpcError):
    """Error: a message breaks the protocol (malformed, too large, refused, or out of call
    order)."""


class OtherProtocol(ProtocolError):
    """Error: a message has another protocol version; ``header`` is its decoded header."""

    def __init__(self, header: dict[str, Any], expected: int) -> None:
        super().__init__(f"protocol version {header.get('v')!r:.40}, expected {expected}")
        self.header = header


class RpcTimeout(RpcError, TimeoutError):
    """Error: a call got no answer by its deadline. The message names the worker, the handler and
    the worker's last known state."""


class CallCancelled(RpcError):
    """Error: a call was cancelled before the worker began it, so it never ran."""


LOST_MASTER = "lost the master at"
"""Part of the message of every MasterLost."""


class MasterLost(RpcError):
    """Error, raised in a worker: the master is gone."""


class WorkerDied(RpcError):
    """Error: a worker is gone. It is raised for each of its calls in flight."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} died: {reason}")
        self.worker = worker
        self.reason = reason


class RemoteError(RpcError):
    """Error: the handler of a call raised an exception. The text ends with the remote traceback."""

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
    """Base class of the errors of tensor storage and exchange."""


class DuplicateDataError(DataError):
    """Error: another producer call has already stored the value."""


class DataMissing(DataError, KeyError):
    """Error: the owner does not hold some values. ``missing`` lists them as (sample id, key)."""

    def __init__(self, owner: str, missing: Sequence[tuple[str, str]]) -> None:
        shown = ", ".join(f"{key} of {sample}" for sample, key in missing[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        super().__init__(f"{owner} does not hold {shown}{more}")
        self.owner = owner
        self.missing = list(missing)

    def __str__(self) -> str:
        return str(self.args[0])


class PeerLost(DataError, ConnectionError):
    """Error: a peer of a tensor transfer is unreachable or closed the connection."""


class FetchTimeout(DataError, TimeoutError):
    """Error: a tensor transfer missed its deadline."""
