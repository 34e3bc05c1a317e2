"""Holds the secrets of a run: made by its launcher, known to its processes, gone with it."""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import zmq

from realhf.transport.errors import NetworkError
from realhf.transport.network.certificate import make_certificate

KEY_CHARACTERS = 40
"""Length of a key in the printable form that ZeroMQ takes (Z85)."""
MOST_BYTES = 16 << 10
"""A file of keys is smaller than this."""
_CURVE = ("server_public", "server_secret", "client_public", "client_secret")


@dataclass(frozen=True)
class RunKeys:
    """Holds one key pair for all sockets of a run that listen, one for all that connect, the token of its HTTP servers,
    and the certificate of its bulk connections with the key of that. Nothing of it is shown when it is printed."""

    server_public: str = field(repr=False)
    server_secret: str = field(repr=False)
    client_public: str = field(repr=False)
    client_secret: str = field(repr=False)
    token: str = field(repr=False)
    certificate: str = field(repr=False)
    certificate_key: str = field(repr=False)

    @staticmethod
    def make() -> RunKeys:
        """Draw new keys. Raises NetworkError where ZeroMQ was built without encryption, or there is no ``openssl``."""
        if not zmq.has("curve"):
            raise NetworkError("network.bind: this installation of ZeroMQ has no CURVE, so it cannot encrypt")
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        curve = (key.decode("ascii") for key in pairs)
        certificate, key = make_certificate()
        return RunKeys(*curve, token=secrets.token_urlsafe(32), certificate=certificate, certificate_key=key)

    def write(self, path: Path) -> None:
        """Write the keys into a new file that only its owner can read. Raises OSError, also when it exists."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            json.dump(asdict(self), file)

    @staticmethod
    def read(path: Path) -> RunKeys:
        """Read a file of keys. Raises NetworkError naming the file: it is missing, others may read it, or it holds
        something else."""
        try:
            with path.open(encoding="ascii") as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
                    raise NetworkError(f"keys of the run: others may read {path}; chmod 600 it, or start the run anew")
                found = json.loads(file.read(MOST_BYTES))
        except OSError as error:
            raise NetworkError(f"keys of the run: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            if isinstance(error, NetworkError):
                raise
            raise NetworkError(f"keys of the run: {path} is not a file of keys") from None
        names = [each.name for each in fields(RunKeys)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            raise NetworkError(f"keys of the run: {path} is not a file of keys")
        if not all(isinstance(text, str) and text.isascii() and text for text in found.values()):
            raise NetworkError(f"keys of the run: {path} is not a file of keys")
        if any(len(found[name]) != KEY_CHARACTERS for name in _CURVE):
            raise NetworkError(f"keys of the run: {path} holds a key of another length than {KEY_CHARACTERS}")
        return RunKeys(**found)
