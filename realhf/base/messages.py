"""The one serialiser of what processes of a run say to each other: typed messages to plain data and back.

A message is a ``Message`` (a frozen msgspec struct). ``Call`` joins the name of a request, its form and the form of its
answer; ``realhf.api.calls`` lists those of a run. Whatever is not of its form is a ``MessageError`` that names the
message and the field. The transport packs plain data and knows none of this.
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
    """A message that has not the form it must have; the text names the message and the field."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request, an answer or a part of one. Its fields are annotated; unknown ones are refused."""


M = TypeVar("M", bound=Message)
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)


def to_payload(message: Message, name: str = "") -> Any:
    """Maps, lists, scalars and bytes. Raises MessageError for a value that is none of these."""
    try:
        return msgspec.to_builtins(message, builtin_types=_BYTES, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"message {_title(type(message), name)}: {error}") from None


def from_payload(kind: type[M], payload: Any, name: str = "") -> M:
    """The inverse of ``to_payload``. Raises MessageError for anything that is not a ``kind``."""
    try:
        return msgspec.convert(payload, kind, builtin_types=_BYTES)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        found = re.search(r"field `(.*)`", text)
        field = place.rstrip("`").lstrip(".") or (found.group(1) if found else "")
        where = f", field {field}" if field else ""
        raise MessageError(f"message {_title(kind, name)}{where}: {text}") from None


@dataclass(frozen=True)
class Call(Generic[Q, A]):
    """Something that one process may ask of another: the name on the wire, the form of the request and of the
    answer."""

    name: str
    request: type[Q]
    answer: type[A]

    def pack(self, request: Q) -> Any:
        """The payload of a request. Raises MessageError."""
        return to_payload(request, self.name)

    def unpack(self, payload: Any) -> Q:
        """The request in a payload. Raises MessageError."""
        return from_payload(self.request, payload, self.name)

    def pack_answer(self, answer: A) -> Any:
        """The payload of an answer. Raises MessageError."""
        return to_payload(answer, self.name)

    def unpack_answer(self, payload: Any, peer: str) -> A:
        """The answer of ``peer`` in a payload. Raises MessageError."""
        return from_payload(self.answer, payload, f"{self.name} of {peer}")

    def served_by(self, serve: Callable[[Q], A]) -> tuple[str, Callable[[Any], Any]]:
        """Name and handler, payload to payload, for a worker's table of handlers."""
        return self.name, lambda payload: self.pack_answer(serve(self.unpack(payload)))


def _title(kind: type[Message], name: str) -> str:
    return f"{name} ({kind.__name__})" if name else kind.__name__


def _plain(value: Any) -> Any:
    """Numbers of numpy, and other maps and sequences, as plain ones."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, Set)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")
