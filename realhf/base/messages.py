"""Typed messages between the processes of a run, and their conversion to plain data and back.

Messages are ``Message`` objects (frozen msgspec structs). A ``Call`` combines the name of a request
with the types of the request and the answer; ``realhf.api.calls`` contains all calls of a run. An
invalid message raises a ``MessageError``, which names the message and the field. The transport
sends plain data and does not depend on the message types.
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
    """Raised if a message does not match its type. The error text names the message and the
    field."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of requests, answers and their parts. Fields have type annotations, and unknown
    fields are rejected."""


M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


def to_payload(message: Message, name: str = "") -> Any:
    """Convert a message to mappings, lists, scalars and bytes.

    Raises MessageError for a value of any other type.
    """
    try:
        return msgspec.to_builtins(message, builtin_types=_BYTES, enc_hook=_to_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"message {_describe_message(type(message), name)}: {error}") from None


def from_payload(kind: type[M], payload: Any, name: str = "") -> M:
    """Rebuild a message from the output of ``to_payload``.

    Raises MessageError if ``payload`` is not a valid message of type ``kind``.
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
    """Name of the call in messages."""
    request: type[Q]
    """Type of the request."""
    answer: type[A]
    """Type of the answer."""

    def pack(self, request: Q) -> Any:
        """Convert a request to a payload. Raises MessageError."""
        return to_payload(request, self.name)

    def unpack(self, payload: Any) -> Q:
        """Convert a payload to a request. Raises MessageError."""
        return from_payload(self.request, payload, self.name)

    def pack_answer(self, answer: A) -> Any:
        """Convert an answer to a payload. Raises MessageError."""
        return to_payload(answer, self.name)

    def unpack_answer(self, payload: Any, peer: str) -> A:
        """Convert a payload from ``peer`` to an answer. Raises MessageError."""
        return from_payload(self.answer, payload, f"{self.name} of {peer}")

    def with_handler(self, serve: Callable[[Q], A]) -> tuple[str, Callable[[Any], Any]]:
        """Return (name, handler) for a worker's table of handlers. The handler takes and returns
        payloads and calls ``serve``."""
        return self.name, lambda payload: self.pack_answer(serve(self.unpack(payload)))


def _describe_message(kind: type[Message], name: str) -> str:
    """Return the name of a message for error messages."""
    return f"{name} ({kind.__name__})" if name else kind.__name__


def _to_plain(value: Any) -> Any:
    """Convert NumPy numbers, and mappings and sequences of other types, to plain data. Raises
    TypeError for anything else."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, Set)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")
