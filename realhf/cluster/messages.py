"""Defines the messages between host agents, operators and the control endpoint of a launcher, and reads them with
bounds.

A message is a header of the control protocol, whose ``kind`` says which ``Message`` the payload frame holds. Everything
that arrives is checked for size, type and length before it is used.
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
"""Stands in the header where messages of a run have the id of the run."""
TAIL_BYTES = 64 << 10
"""At most this much of the end of a worker's log comes with its exit."""
PIECE_BYTES = 128 << 10
"""Files are carried in pieces of this size: each is a sign of life, which has to come often over a slow link too."""
LINE_CHARACTERS = 1 << 20
"""A longer line of a worker is cut."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")]
WorkerName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}(/[A-Za-z0-9_.-]{1,64})?\Z")]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=4096)]
M = TypeVar("M", bound=Message)


class HostHello(Message, frozen=True):
    """Says what a host has: cores that its workers may use, memory (GiB), GPUs by names that no other GPU of any
    machine has (``own_gpus``), the address from which it reaches the launcher, its clock (s since the epoch), the
    folder that it has for a run, how many workers of each kind it is to get, and what it is made of (``own_host``)."""

    name: Name
    cores: Annotated[int, Meta(ge=1, le=1 << 16)]
    memory_gib: Annotated[float, Meta(ge=0, le=1 << 20)]
    gpus: Annotated[list[Annotated[str, Meta(max_length=160)]], Meta(max_length=64)]
    address: Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:_-]{1,64}\Z")]
    machine: Annotated[str, Meta(max_length=200)]
    clock: float
    folder: Annotated[str, Meta(max_length=4096, pattern="^/")]
    wants: Annotated[dict[Name, Count], Meta(max_length=8)]
    made_of: Annotated[dict[Name, Annotated[str, Meta(max_length=80)]], Meta(max_length=32)]


class Welcome(Message, frozen=True):
    """Answers a hello: a sign of life is wanted every ``ping_s``; a launcher silent for ``silent_s`` is gone."""

    ping_s: float
    silent_s: float


class Refused(Message, frozen=True):
    """Says why somebody may not take part."""

    reason: Text


class Nothing(Message, frozen=True):
    """Is a message whose kind says everything: ``ping`` and ``pong``; ``again``: register anew; ``over``: the run has
    ended; ``leave``: the host takes part no longer; ``status``: an operator asks."""


class Probe(Message, frozen=True):
    """Asks whether ``token`` can be read on the host, which then writes its text to ``answer``; and what each of
    ``paths`` looks like there."""

    number: int
    token: Text
    answer: Text
    paths: Annotated[list[Text], Meta(max_length=256)]


class Probed(Message, frozen=True):
    """Answers a probe: what ``token`` holds ("" where it cannot be read) and the print of each path ("": absent)."""

    number: int
    token: Text
    prints: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=256)]


class FilePiece(Message, frozen=True):
    """Carries a part of a file that a worker needs, to ``path`` in the agent's own folder."""

    path: Text
    offset: Annotated[int, Meta(ge=0)]
    data: bytes
    last: bool


class Kept(Message, frozen=True):
    """Answers each part of a file: how many bytes of it the host has now, or why it cannot keep it."""

    path: Text
    size: Annotated[int, Meta(ge=0)]
    problem: Annotated[str, Meta(max_length=500)]


class StartWorker(Message, frozen=True):
    """Asks for a process; the fields are those of ``WorkerSpec``, with paths of the host."""

    name: WorkerName
    module: Text
    argv: Annotated[list[Text], Meta(max_length=1024)]
    log: Text
    events: bool
    niceness: Annotated[int, Meta(ge=0, le=19)]
    gpu: Annotated[int, Meta(ge=0, le=1024)] | None


class EndWorker(Message, frozen=True):
    """Asks for the end of one worker, or of all ("") with what they have started; killed after ``grace_s``."""

    name: Annotated[str, Meta(max_length=129)]
    grace_s: Annotated[float, Meta(ge=0, le=600)]


class KillWorker(Message, frozen=True):
    """Asks to kill one worker at once; see ``Scheduler.kill``."""

    name: WorkerName
    cause: Text
    pid: Annotated[int, Meta(ge=0)]
    started: Annotated[int, Meta(ge=0)]


class Lines(Message, frozen=True):
    """Carries lines of a worker's standard output."""

    name: WorkerName
    lines: Annotated[list[Annotated[str, Meta(max_length=LINE_CHARACTERS)]], Meta(max_length=1 << 16)]


class Exited(Message, frozen=True):
    """Reports the end of a worker: where its log is on the host, where in it the worker began, and how it ends; and its
    cause, if the agent knows it beside the exit code."""

    name: WorkerName
    exit_code: Annotated[int, Meta(ge=-255, le=255)]
    log: Text
    log_from: Annotated[int, Meta(ge=0)]
    tail: Annotated[bytes, Meta(max_length=TAIL_BYTES)]
    cause: Text = ""


class NotStarted(Message, frozen=True):
    """Says why a worker could not be started."""

    name: WorkerName
    reason: Text


class Ended(Message, frozen=True):
    """Says that nothing of the run is left on the host."""


class Order(Message, frozen=True):
    """Asks a running job, for an operator, to add workers of a kind to a host, or to remove a host; with ``new_keys``
    the run begins again without it, with keys that it does not know."""

    host: Name
    kind: Annotated[str, Meta(max_length=64)]
    count: Count
    new_keys: bool = False


class Report(Message, frozen=True):
    """Answers an operator with lines to print."""

    lines: Annotated[list[Text], Meta(max_length=1 << 14)]
    failed: bool = False


OF_AGENT: Mapping[str, type[Message]] = MappingProxyType(
    {
        "hello": HostHello,
        "ping": Nothing,
        "probed": Probed,
        "kept": Kept,
        "lines": Lines,
        "exited": Exited,
        "not_started": NotStarted,
        "ended": Ended,
        "leave": Nothing,
        "status": Nothing,
        "add": Order,
        "remove": Order,
    }
)
"""What a control endpoint takes."""
OF_LAUNCHER: Mapping[str, type[Message]] = MappingProxyType(
    {
        "welcome": Welcome,
        "refused": Refused,
        "pong": Nothing,
        "again": Nothing,
        "over": Nothing,
        "probe": Probe,
        "file": FilePiece,
        "start": StartWorker,
        "end": EndWorker,
        "kill": KillWorker,
        "leave": Nothing,
        "report": Report,
    }
)
"""What an agent or an operator takes."""


def packed(kind: str, session: bytes, message: Message | None = None, **fields: Any) -> list[bytes]:
    """Return the frames of a message."""
    return [pack_header(kind, CONTROL, session, **fields), pack_payload(to_payload(message or Nothing(), kind))]


def unpacked(kind: str, payload: Sequence[Any], known: Mapping[str, type[Message]]) -> Message:
    """Return the message in a payload. Raises ProtocolError for a kind that is not ``known`` and for anything that does
    not have its form."""
    form = known.get(kind)
    if form is None:
        raise ProtocolError(f"unknown message kind {kind!r:.40}")
    try:
        return from_payload(form, unpack_payload(payload), kind)
    except MessageError as error:
        raise ProtocolError(str(error)[:500]) from None
