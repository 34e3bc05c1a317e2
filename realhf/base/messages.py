"""Typed messages between the processes of a run, and their conversion to plain data and back.

A message is a ``Message`` (a frozen msgspec struct). A ``Call`` is the name of a request with the
types of request and answer; ``realhf.api.calls`` lists all calls of a run. An invalid message
raises a ``MessageError`` that names the message and the field. The transport sends plain data and
does not depend on the message types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

import msgspec

_BYTES = (bytes, bytearray, memoryview)


class MessageError(ValueError):
    """A message does not match its type; the text names the message and the field."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of requests, answers and their parts. Fields are annotated, and unknown fields are
    rejected."""


M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


def to_payload(message: Message, name: str = "") -> Any:
    """Convert a message to maps, lists, scalars and bytes.

    Raises MessageError for a value of any other type.
    """
    try:
        return msgspec.to_builtins(message, builtin_types=_BYTES, enc_hook=_to_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"message {_describe_message(type(message), name)}: {error}") from None


def from_payload(kind: type[M], payload: Any, name: str = "") -> M:
    """Rebuild a message from the output of ``to_payload``.

    Raises MessageError for anything that is not a ``kind``.
    """
    try:
        return msgspec.convert(payload, kind, builtin_types=_BYTES)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        match = re.search(r"field `(.*)`", text)
        field = place.rstrip("`").lstrip(".") or (match.group(1) if match else "")
        where = f", field {field}" if field else ""
        raise MessageError(f"message {_describe_message(kind, name)}{where}: {text}") from None


@dataclass(frozen=True)
class Call(Generic[Q, A]):
    """A type of request from one process to another."""

    name: str
    """Name on the wire."""
    request: type[Q]
    """Type of the request."""
    answer: type[A]
    """Type of the answer."""

    def pack(self, request: Q) -> Any:
        """Return the payload of a request. Raises MessageError."""
        return to_payload(request, self.name)

    def unpack(self, payload: Any) -> Q:
        """Return the request in a payload. Raises MessageError."""
        return from_payload(self.request, payload, self.name)

    def pack_answer(self, answer: A) -> Any:
        """Return the payload of an answer. Raises MessageError."""
        return to_payload(answer, self.name)

    def unpack_answer(self, payload: Any, peer: str) -> A:
        """Return the answer of ``peer`` in a payload. Raises MessageError."""
        return from_payload(self.answer, payload, f"{self.name} of {peer}")

    def with_handler(self, serve: Callable[[Q], A]) -> tuple[str, Callable[[Any], Any]]:
        """Return (name, handler from payload to payload) for a worker's table of handlers."""
        return self.name, lambda payload: self.pack_answer(serve(self.unpack(payload)))


def _describe_message(kind: type[Message], name: str) -> str:
    """Return the name of a message for errors."""
    return f"{name} ({kind.__name__})" if name else kind.__name__


def _to_plain(value: Any) -> Any:
    """Convert NumPy numbers, and other maps and sequences, to plain ones. Raises TypeError for
    anything else."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, Set)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")
