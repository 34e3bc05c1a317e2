"""Keys of a cluster: the launcher's keys, and a revocable key pair for each host.

The launcher's key file stays on its machine. A host's key file contains the public key of the
launcher's control endpoint, with which the host authenticates the launcher, and the host's key
pair, with which the endpoint authenticates the host. A host's key file does not allow its owner to
impersonate the launcher, another host or an operator.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from realhf.cluster.placement import LAUNCHER
from realhf.transport.errors import NetworkError
from realhf.transport.network import (
    CurvePair,
    describe_key_fault,
    keep_in_memory,
    read_private,
    write_private,
)

MAX_KEY_FILE_BYTES = 1 << 20
"""Maximum size of a key file in bytes, enough for 4096 hosts."""
KEYS_COMMAND = "python -m realhf.cluster keys {} --host NAME"
"""Command that makes a key for a host; for error messages."""


@dataclass(frozen=True)
class HostKey:
    """Keys with which one host or operator connects to a control endpoint."""

    server_public: str = field(repr=False)
    """Public key of the control endpoint."""
    own: CurvePair


@dataclass(frozen=True)
class HostKeys:
    """Content of a key file for one or several hosts."""

    server_public: str = field(repr=False)
    """Public key of the control endpoint."""
    hosts: Mapping[str, CurvePair]
    """Key pair of each host, by host name."""

    def key_of(self, name: str) -> HostKey:
        """Return the keys of the host ``name``. Raises NetworkError if the file has none for it."""
        if name not in self.hosts:
            names = ", ".join(sorted(self.hosts)) or "none"
            raise NetworkError(
                f"keys of the cluster: there is no key of host {name!r}, only of {names:.200} "
                f"(--name)"
            )
        return HostKey(self.server_public, self.hosts[name])

    def text(self) -> str:
        """Return the keys as the text of a key file."""
        pairs = {name: asdict(pair) for name, pair in self.hosts.items()}
        return json.dumps({"server_public": self.server_public, "hosts": pairs})

    @staticmethod
    def read(path: Path) -> HostKeys:
        """Read a key file; ``-`` is standard input. Raises NetworkError that names the file and the
        problem."""
        fields = _read_fields(path, ("server_public", "hosts"), "of a host")
        try:
            hosts = {str(name): CurvePair(**pair) for name, pair in fields["hosts"].items()}
            fault = (
                describe_key_fault(fields["server_public"])
                and "a key server_public that is not Z85"
            )
            faults = (fault, *(pair.describe_fault(name) for name, pair in hosts.items()))
        except (TypeError, AttributeError, ValueError):
            raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
        _check_faults(path, faults)
        return HostKeys(fields["server_public"], hosts)


@dataclass(frozen=True)
class LauncherKeys:
    """Content of the launcher's key file."""

    server: CurvePair
    """Key pair of the control endpoint."""
    operator: CurvePair
    """Key pair that all operators use."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Public key of each host, by host name."""

    @staticmethod
    def make() -> LauncherKeys:
        """Generate the keys of a cluster that has no hosts yet. Raises NetworkError if ZeroMQ was
        built without encryption."""
        return LauncherKeys(CurvePair.make(), CurvePair.make())

    @property
    def operator_key(self) -> HostKey:
        """Keys with which an operator connects."""
        return HostKey(self.server.public, self.operator)

    def text(self) -> str:
        """Return the keys as the text of a key file."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(path: Path) -> LauncherKeys:
        """Read the launcher's key file. Raises NetworkError that names the file and the problem."""
        fields = _read_fields(path, ("server", "operator", "hosts"), "of a launcher")
        try:
            server = CurvePair(**fields["server"])
            operator = CurvePair(**fields["operator"])
            hosts = fields["hosts"]
            faults = [server.describe_fault("server"), operator.describe_fault("operator")]
            faults += [
                describe_key_fault(key) and f"a key of host {name!r:.80} that is none"
                for name, key in hosts.items()
            ]
        except (TypeError, AttributeError, ValueError):
            raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
        _check_faults(path, faults)
        return LauncherKeys(server, operator, hosts)


def make_keys(path: Path) -> bool:
    """Create the launcher's key file if it does not exist; return whether it was created. Raises
    OSError or NetworkError."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        write_private(path, LauncherKeys.make().text())
    except FileExistsError:
        return False
    return True


def add_hosts(path: Path, names: Iterable[str]) -> HostKeys:
    """Generate a key pair for each host in ``names``, add the public keys to the launcher's key
    file at ``path``, and return the hosts' keys.

    If a host already has a key, it is replaced. Raises NetworkError or OSError.
    """
    with _lock_file(path):
        keys = LauncherKeys.read(path)
        pairs = {name: CurvePair.make() for name in names}
        _write_hosts(
            path, keys, {**keys.hosts, **{name: pair.public for name, pair in pairs.items()}}
        )
    return HostKeys(keys.server.public, pairs)


class KnownHosts:
    """Keys that a control endpoint accepts: those in the launcher's key file, and those generated
    for a run.

    The key file is read again whenever it changes. If ``file`` is None, all keys are generated and
    the key file is kept in memory. Raises NetworkError or OSError. Thread-safe.
    """

    def __init__(self, file: Path | None) -> None:
        self._lock = threading.RLock()
        self._in_memory = file is None
        self.file = file if file is not None else keep_in_memory(LauncherKeys.make().text())
        self.keys = LauncherKeys.read(self.file)
        self._file_status = self._read_status()
        self._generated: dict[str, str] = {}
        self._leaving: dict[str, str] = {}
        self._revoked: set[str] = set()
        self._names: Mapping[str, str] = {}
        self._index_names()

    def _read_status(self) -> tuple[int, ...]:
        status = self.file.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _index_names(self) -> None:
        hosts = (*self.keys.hosts.items(), *self._generated.items())
        names = (
            self._leaving
            | {key: name for name, key in hosts}
            | {self.keys.operator.public: LAUNCHER}
        )
        self._names = {key: name for key, name in names.items() if key not in self._revoked}

    def name_of(self, key: str) -> str:
        """Return the owner of a public key: a host's name, ``LAUNCHER`` for an operator, or "" for
        an unknown key.

        If the key file cannot be read, the keys of the last successful read are used.
        """
        with self._lock, contextlib.suppress(OSError, NetworkError):
            if not self._in_memory and (status := self._read_status()) != self._file_status:
                self.keys = LauncherKeys.read(self.file)
                self._file_status = status
                self._index_names()
        return self._names.get(key, "")

    def accepts(self, key: str) -> bool:
        """Return whether to accept a new connection with this key, whose owner must be known and
        not being removed."""
        return bool(self.name_of(key)) and key not in self._leaving

    def has_key(self, host: str) -> bool:
        """Return whether a host has a valid key."""
        return host in self._names.values()

    def generate(self, names: Iterable[str]) -> HostKeys:
        """Generate and return keys for hosts on which the launcher starts agents. Hosts that were
        removed or are being removed get none."""
        with self._lock:
            void = {*self._revoked, *self._leaving}
            pairs = {
                name: CurvePair.make() for name in names if self._generated.get(name) not in void
            }
            self._generated |= {name: pair.public for name, pair in pairs.items()}
            self._index_names()
        return HostKeys(self.keys.server.public, pairs)

    def revoke(self, host: str) -> None:
        """Revoke all keys of a host. Messages on its existing connection are refused as well."""
        with self._lock:
            self._revoked |= {key for key, name in self._names.items() if name == host}
            self._index_names()

    def begin_removal(self, host: str) -> None:
        """Refuse new connections with the keys of a host, and remove it from the launcher's file.

        Its existing connection stays valid until ``revoke``, so that the host can report the exits
        of its workers. Raises OSError or NetworkError if the file cannot be changed; even then this
        launcher refuses the keys.
        """
        with self._lock:
            self._leaving |= {key: name for key, name in self._names.items() if name == host}
        if host in self.keys.hosts:
            with _lock_file(self.file):
                keys = LauncherKeys.read(self.file)
                _write_hosts(
                    self.file, keys, {name: key for name, key in keys.hosts.items() if name != host}
                )


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Context manager that locks a key file against other writers: an operator may add hosts while
    a launcher removes one."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write_hosts(path: Path, keys: LauncherKeys, hosts: Mapping[str, str]) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_private(partial, LauncherKeys(keys.server, keys.operator, hosts).text())
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _read_fields(path: Path, names: tuple[str, ...], whose: str) -> dict[str, Any]:
    try:
        content = json.loads(read_private(path, MAX_KEY_FILE_BYTES))
    except NetworkError:
        raise
    except (ValueError, RecursionError):
        raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
    present = sorted(content) if isinstance(content, dict) else []
    if present == sorted(names):
        return dict(content)
    if "client_secret" in present:
        problem = (
            f"has one key for all hosts, as before; move it away and make new ones: "
            f"{KEYS_COMMAND.format(path)}"
        )
    elif present == ["hosts", "operator", "server"]:
        problem = (
            f"has the keys of the launcher; a host has one of its own: {KEYS_COMMAND.format(path)}"
        )
    elif present == ["hosts", "server_public"]:
        problem = (
            "has the keys of hosts; the launcher and its operators need the file that these were "
            "made from"
        )
    else:
        problem = f"is not a file of keys {whose}"
    raise NetworkError(f"keys of the cluster: {path} {problem}")


def _check_faults(path: Path, faults: Iterable[str]) -> None:
    for fault in faults:
        if fault:
            raise NetworkError(
                f"keys of the cluster: {path} holds {fault}; copy the file again, or make new ones"
            )
