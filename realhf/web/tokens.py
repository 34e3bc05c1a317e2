"""Bearer tokens and API keys: reading them from files and requests, and comparing them in constant
time."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

from realhf.web.settings import SettingError

Grant = TypeVar("Grant")
_SCHEME = b"bearer "
_OTHERS = 0o077
"""Permission bits of the group and of all other users."""


class TokenTable(Generic[Grant]):
    """The tokens of a server, each with what it grants: a role or an owner.

    A comparison takes the same time whichever token is sent: it goes through all tokens, and
    ``hmac.compare_digest`` does not stop at the first byte that differs. HTTP headers are bytes,
    and clients encode characters beyond ASCII as UTF-8 or as Latin-1, so both encodings are
    accepted.
    """

    def __init__(self, grants: Iterable[tuple[str, Grant]]) -> None:
        self._grants = [
            (encoded, grant) for token, grant in grants if token for encoded in _encodings(token)
        ]

    def __bool__(self) -> bool:
        """Return whether there is any token."""
        return bool(self._grants)

    def find_grants(self, offered: bytes) -> list[Grant]:
        """Return what the token ``offered`` grants; [] if the token is unknown."""
        return [grant for token, grant in self._grants if hmac.compare_digest(token, offered)]


def _encodings(token: str) -> set[bytes]:
    """Return the byte strings that are accepted for a token and cannot mean another token.

    Characters are never replaced: a token with characters outside Latin-1 has no Latin-1 form, and
    bytes of an environment variable that are not UTF-8 (surrogates in ``token``) stay the bytes
    that they were.
    """
    encodings = {encode_token(token)}
    if not token.isascii():
        with contextlib.suppress(UnicodeEncodeError):
            encodings.add(token.encode("latin-1"))
    return encodings


def encode_token(token: str) -> bytes:
    """Encode a token as UTF-8. A surrogate that stands for a byte becomes that byte; any other
    surrogate is encoded as such."""
    try:
        return token.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a surrogate that does not stand for a byte
        return token.encode("utf-8", "surrogatepass")


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the token in ``Authorization: Bearer TOKEN``, from raw ASGI headers; b"" unless there
    is exactly one such header."""
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
        return b""
    return values[0][len(_SCHEME) :].strip()


def read_token_lines(path: str, flag: str, *, private: bool = False) -> list[str]:
    """Return the lines of a file with tokens, without surrounding spaces. ``flag``: name of the
    option, for messages. ``private``: require that no other user has access to the file. Raises
    SettingError."""
    file = Path(path).expanduser()
    try:
        if private and file.stat().st_mode & _OTHERS:
            raise SettingError(f"{flag} {path}: others may read it; chmod 600")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError(f"{flag} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{flag} {path}: {error}") from error
    return [line.strip() for line in text.strip().splitlines()]
