"""Holds the secrets of a run: made by its launcher, known to its processes, gone with it."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import subprocess
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from realhf.transport.errors import NetworkError
from realhf.transport.network.curve import CurvePair

_MAKE_S = 30.0
_COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
    *("-keyout", "-", "-out", "-", "-days", "3650", "-subj", "/CN=realhf-run"),
    *("-addext", "basicConstraints=critical,CA:FALSE", "-config", "/dev/null"),
)


def make_certificate() -> tuple[str, str]:
    """Return a new certificate and its private key, both as PEM. Raises NetworkError where the command ``openssl`` is
    missing or fails. No file is written."""
    try:
        done = subprocess.run(_COMMAND, check=True, capture_output=True, text=True, timeout=_MAKE_S)
    except FileNotFoundError:
        raise NetworkError(
            "network.bind: the command openssl is missing here; it makes the certificate of the run"
        ) from None
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        raise NetworkError(f"network.bind: openssl could not make the certificate of the run: {said:.400}") from None
    key, middle, rest = done.stdout.partition("-----END PRIVATE KEY-----\n")
    return rest, key + middle


MOST_BYTES = 16 << 10
"""A file of keys has at most so many."""
STDIN = Path("-")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,256}")


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
        server, client = CurvePair.make(), CurvePair.make()
        certificate, key = make_certificate()
        curve = (server.public, server.secret, client.public, client.secret)
        return RunKeys(*curve, token=secrets.token_urlsafe(32), certificate=certificate, certificate_key=key)

    @property
    def server(self) -> CurvePair:
        """The key pair of all that listen."""
        return CurvePair(self.server_public, self.server_secret)

    @property
    def client(self) -> CurvePair:
        """The key pair of all that connect."""
        return CurvePair(self.client_public, self.client_secret)

    def write(self, path: Path) -> None:
        """Write the keys into a new file that only its owner can read. Raises OSError, also when it exists."""
        write_private(path, json.dumps(asdict(self)))

    def in_memory(self) -> Path:
        """Keep the keys in memory of this process, see ``kept_in_memory``. Raises OSError."""
        return kept_in_memory(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> RunKeys:
        """Read a file of keys. Raises NetworkError naming the file and what is wrong: it is missing or no ordinary
        file, it is not the user's own, others may read it, or it holds something else. Waits for nobody, also where
        the path is that of a pipe; but ``-`` is the standard input up to its end."""
        try:
            found = json.loads(private_text(path))
            names = [each.name for each in fields(RunKeys)]
            if not isinstance(found, dict) or sorted(found) != sorted(names):
                raise ValueError("other fields")
            if not all(isinstance(text, str) and text.isascii() and text for text in found.values()):
                raise ValueError("no texts")
            keys = RunKeys(**found)
        except NetworkError:
            raise
        except (ValueError, RecursionError):
            raise NetworkError(f"keys of the run: {path} is not a file of keys") from None
        if fault := keys._fault():
            raise NetworkError(f"keys of the run: {path} holds {fault}; start the run anew, or copy the file again")
        return keys

    def _fault(self) -> str:
        """Return what is wrong with the values, without showing them, or ""."""
        for name, pair in (("server", self.server), ("client", self.client)):
            if fault := pair.fault(name):
                return fault
        if not _TOKEN.fullmatch(self.token):
            return "a token with other characters than letters, digits, - and _"
        for name, text, kind in (
            ("certificate", self.certificate, "CERTIFICATE"),
            ("certificate_key", self.certificate_key, "PRIVATE KEY"),
        ):
            lines = text.strip().splitlines()
            if lines[:1] != [f"-----BEGIN {kind}-----"] or lines[-1:] != [f"-----END {kind}-----"]:
                return f"a {name} that is no PEM"
        return ""


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner can read. Raises OSError, also when it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)  # half a file would be refused by every launcher to come
        raise


def kept_in_memory(text: str) -> Path:
    """Keep keys in memory of this process, and return a path by which processes of the same user on this machine read
    them as long as this one lives: they are on no disk, and gone however it ends. The descriptor is the last part of
    the path; ``forget`` closes it. Raises OSError."""
    descriptor = os.memfd_create("keys", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def forget(path: Path) -> None:
    """Give up what ``kept_in_memory`` has returned in this process."""
    os.close(int(path.name))


def private_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of an ordinary file that only its owner, this user, can read; of ``-`` the standard input. Raises
    NetworkError, or ValueError for what is no ASCII."""
    try:
        if path == STDIN:
            return sys.stdin.buffer.read(most_bytes).decode("ascii")
        # A pipe or a device would otherwise be waited for; what is open here is what is looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check_owner(path, os.fstat(descriptor))
            read = os.read(descriptor, most_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NetworkError(f"keys of the run: cannot read {path}: {error.strerror}") from None
    if len(read) > most_bytes:
        raise NetworkError(f"keys of the run: {path} is not a file of keys: it has more than {most_bytes} bytes")
    return read.decode("ascii")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NetworkError(f"keys of the run: {path} is not an ordinary file")
    if status.st_uid != os.geteuid():
        raise NetworkError(
            f"keys of the run: {path} belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}: "
            "whoever owns the file knows the keys; copy it"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise NetworkError(f"keys of the run: others may read {path}; chmod 600 it, or start the run anew")
