"""Messages between host agents, operators and the control endpoint of a launcher.

A message has a header and a payload frame. The header's ``kind`` determines the ``Message``
subclass of the payload. The size, types and lengths of a received message are checked before it is
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from realhf.base.messages import Message, MessageError, from_payload, to_payload
from realhf.transport.envelope import pack_header, pack_payload, unpack_payload
from realhf.transport.errors import ProtocolError

CONTROL = "control"
"""Value of the header field ``run`` in these messages, where other messages have a run id."""
TAIL_BYTES = 64 << 10
"""Maximum size in bytes of the log tail that is sent with a worker's exit."""
PIECE_BYTES = 128 << 10
"""Size of a file piece in bytes. Each piece counts as a heartbeat, so it must be small enough to
arrive in time over a slow link."""
LINE_CHARACTERS = 1 << 20
"""Length in characters to which a line of a worker's output is truncated."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")]
WorkerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?\Z")]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=4096)]
M = TypeVar("M", bound=Message)


class HostHello(Message, frozen=True):
    """Registration of a host, with its resources."""

    name: Name
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    """CPU cores that the host's workers may use."""
    memory_gib: Annotated[float, Meta(ge=0, le=1 << 20)]
    gpus: Annotated[list[Annotated[str, Meta(max_length=160)]], Meta(max_length=64)]
    """Names of the GPUs, which are unique among all machines (``own_gpus``)."""
    address: Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:_-]{1,64}\Z")]
    """Address from which the host reaches the launcher."""
    machine: Annotated[str, Meta(max_length=200)]
    """Unique id of the machine (``host_token``)."""
    clock: float
    """Time on the host, in seconds since the epoch."""
    folder: Annotated[str, Meta(max_length=4096, pattern="^/")]
    """The agent's own folder, for the files of a run."""
    wants: Annotated[dict[Name, Count], Meta(max_length=8)]
    """Number of workers of each kind that the host asks for."""
    made_of: Annotated[dict[Name, Annotated[str, Meta(max_length=80)]], Meta(max_length=32)]
    """Digest of this package's files, and the versions of Python and other packages
    (``own_host.installed_versions``)."""


class Welcome(Message, frozen=True):
    """Acceptance of a host."""

    ping_s: float
    """Interval of the heartbeats that the launcher expects, in seconds."""
    silent_s: float
    """Seconds of silence after which the agent must consider the launcher lost."""


class HelloRefusal(Message, frozen=True):
    """Refusal of a registration."""

    reason: Text


class NoContent(Message, frozen=True):
    """Message without a payload.

    Kinds: ``ping`` and ``pong``; ``again``: register again; ``over``: the run has ended; ``leave``:
    the host leaves; ``status``: an operator's request for the state.
    """


class FolderProbeRequest(Message, frozen=True):
    """Request to a host to show whether it shares the run folder and which files it has."""

    number: int
    token: Text
    """Path of the token file, which contains a secret string for the host to read."""
    answer: Text
    """Path of the answer file, into which the host writes the reversed string."""
    paths: Annotated[list[Text], Meta(max_length=256)]
    """Paths for which the host reports fingerprints."""


class ProbeAnswer(Message, frozen=True):
    """A host's answer to ``FolderProbeRequest``."""

    number: int
    """Number of the probe."""
    token: Text
    """Content of the token file; "" if it cannot be read."""
    prints: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=256)]
    """Fingerprint of each requested path; "" if the path does not exist."""


class FilePiece(Message, frozen=True):
    """Piece of a file that a worker needs."""

    path: Text
    """Target path in the agent's folder."""
    offset: Annotated[int, Meta(ge=0)]
    data: bytes
    last: bool
    """Whether this piece completes the file."""


class FileReceipt(Message, frozen=True):
    """A host's answer to a ``FilePiece``."""

    path: Text
    size: Annotated[int, Meta(ge=0)]
    """Number of bytes of the file that the host has now."""
    problem: Annotated[str, Meta(max_length=500)]
    """Why the host cannot store the file; "" if it can."""


class StartWorker(Message, frozen=True):
    """Request to start a worker. The fields are those of ``WorkerSpec``, with paths on the host."""

    name: WorkerName
    module: Text
    argv: Annotated[list[Text], Meta(max_length=1024)]
    log: Text
    events: bool
    niceness: Annotated[int, Meta(ge=0, le=19)]
    gpu: Annotated[int, Meta(ge=0, le=1024)] | None


class EndWorker(Message, frozen=True):
    """Request to end workers with their child processes."""

    name: Annotated[str, Meta(max_length=129)]
    """Name of the worker; "" for all."""
    grace_s: Annotated[float, Meta(ge=0, le=600)]
    """Seconds after which workers that still run are killed."""


class KillWorker(Message, frozen=True):
    """Request to kill a worker at once. The fields are the arguments of ``Scheduler.kill``."""

    name: WorkerName
    cause: Text
    pid: Annotated[int, Meta(ge=0)]
    started: Annotated[int, Meta(ge=0)]


class Lines(Message, frozen=True):
    """Lines of a worker's standard output."""

    name: WorkerName
    lines: Annotated[
        list[Annotated[str, Meta(max_length=LINE_CHARACTERS)]], Meta(max_length=1 << 16)
    ]


class Exited(Message, frozen=True):
    """Host agent's message that a worker has exited."""

    name: WorkerName
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    log: Text
    """Path of the worker's log on the host."""
    log_from: Annotated[int, Meta(ge=0)]
    """Offset in bytes at which this worker's output begins in the log."""
    tail: Annotated[bytes, Meta(max_length=TAIL_BYTES)]
    """End of the log."""
    cause: Text = ""
    """Why the worker ended, if the agent knows more than the exit code."""


class NotStarted(Message, frozen=True):
    """Report that a worker could not be started."""

    name: WorkerName
    reason: Text


class Ended(Message, frozen=True):
    """Report that all processes of the run on the host have ended."""


class OperatorOrder(Message, frozen=True):
    """Operator's request to add workers to a host (kind ``add``), or to remove a host
    (``remove``)."""

    host: Name
    kind: Annotated[str, Meta(max_length=64)]
    """Kind of the workers to add."""
    count: Count
    """Number of the workers to add."""
    new_keys: bool = False
    """Whether to restart the run without the removed host and with new keys, which that host does
    not know."""


class OperatorReport(Message, frozen=True):
    """Answer to an operator's request: lines to print."""

    lines: Annotated[list[Text], Meta(max_length=1 << 14)]
    failed: bool = False


OF_AGENT: Mapping[str, type[Message]] = MappingProxyType(
    {
        "hello": HostHello,
        "ping": NoContent,
        "probed": ProbeAnswer,
        "kept": FileReceipt,
        "lines": Lines,
        "exited": Exited,
        "not_started": NotStarted,
        "ended": Ended,
        "leave": NoContent,
        "status": NoContent,
        "add": OperatorOrder,
        "remove": OperatorOrder,
    }
)
"""Messages that a control endpoint accepts, by kind."""
OF_LAUNCHER: Mapping[str, type[Message]] = MappingProxyType(
    {
        "welcome": Welcome,
        "refused": HelloRefusal,
        "pong": NoContent,
        "again": NoContent,
        "over": NoContent,
        "probe": FolderProbeRequest,
        "file": FilePiece,
        "start": StartWorker,
        "end": EndWorker,
        "kill": KillWorker,
        "leave": NoContent,
        "report": OperatorReport,
    }
)
"""Messages that an agent or an operator accepts, by kind."""


def pack_message(
    kind: str, session: bytes, message: Message | None = None, **fields: Any
) -> list[bytes]:
    """Encode a message as frames. ``fields`` are added to the header."""
    return [
        pack_header(kind, CONTROL, session, **fields),
        pack_payload(to_payload(message or NoContent(), kind)),
    ]


def unpack_message(
    kind: str, payload: Sequence[Any], known: Mapping[str, type[Message]]
) -> Message:
    """Decode the payload of a message of ``kind``. Raises ProtocolError if ``kind`` is not in
    ``known`` or the payload is malformed."""
    form = known.get(kind)
    if form is None:
        raise ProtocolError(f"unknown message kind {kind!r:.40}")
    try:
        return from_payload(form, unpack_payload(payload), kind)
    except MessageError as error:
        raise ProtocolError(str(error)[:500]) from None
