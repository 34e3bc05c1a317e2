"""What can go wrong between processes. Every message names the peer."""

from __future__ import annotations

from collections.abc import Sequence


class TransportError(Exception):
    """Base of all errors of this package."""


class CodecError(TransportError, ValueError):
    """Frames that are not a well-formed sample."""


class RpcError(TransportError):
    """Base of the errors of a remote call."""


class ProtocolError(RpcError):
    """A message that breaks the protocol: malformed, too large, refused, or out of call order."""


class RpcTimeout(RpcError, TimeoutError):
    """A deadline passed; the message names the worker, the handler and the worker's last known state."""


class CallCancelled(RpcError):
    """The worker's answer to a call that was cancelled before it had begun, and was not made."""


class MasterLost(RpcError):
    """The master is gone: seen by a worker."""


class WorkerDied(RpcError):
    """The worker is gone: all its calls in flight fail with this."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker!r} died: {reason}")
        self.worker = worker
        self.reason = reason


class RemoteError(RpcError):
    """A handler raised. The text ends with the remote traceback."""

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
    """Base of the errors of tensor storage and exchange."""


class DuplicateDataError(DataError):
    """A value that is stored already was stored again by another producer call."""


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
    """The peer of a tensor transfer cannot be reached or closed the connection."""


class FetchTimeout(DataError, TimeoutError):
    """A tensor transfer passed its deadline."""
