"""Holds the keys of a cluster: those of its launcher, and one of its own for each host, which can be taken away.

The launcher's file stays on its machine. A host's file has the public key of the launcher's control endpoint, by which
it knows the launcher, and a key pair by which the endpoint knows the host: with it nobody can act as the launcher, as
another host or as an operator."""

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
from realhf.transport.network import CurvePair, describe_key_fault, keep_in_memory, read_private, write_private

MOST_BYTES = 1 << 20
"""A file of keys has at most so many: there are 4096 hosts at most."""
HOW = "python -m realhf.cluster keys {} --host NAME"


@dataclass(frozen=True)
class HostKey:
    """Is what one host has: the public key of the endpoint, and its own pair."""

    server_public: str = field(repr=False)
    own: CurvePair


@dataclass(frozen=True)
class HostKeys:
    """Holds the keys of one host or of several that get the same file; ``hosts`` by name."""

    server_public: str = field(repr=False)
    hosts: Mapping[str, CurvePair]

    def of(self, name: str) -> HostKey:
        """Return the key of a host. Raises NetworkError where there is none."""
        if name not in self.hosts:
            there = ", ".join(sorted(self.hosts)) or "none"
            raise NetworkError(f"keys of the cluster: there is no key of host {name!r}, only of {there:.200} (--name)")
        return HostKey(self.server_public, self.hosts[name])

    def text(self) -> str:
        """Return what a file of them holds."""
        pairs = {name: asdict(pair) for name, pair in self.hosts.items()}
        return json.dumps({"server_public": self.server_public, "hosts": pairs})

    @staticmethod
    def read(path: Path) -> HostKeys:
        """Read a file of keys; ``-`` is the standard input. Raises NetworkError that names the file and what is
        wrong."""
        found = _fields(path, ("server_public", "hosts"), "of a host")
        try:
            hosts = {str(name): CurvePair(**pair) for name, pair in found["hosts"].items()}
            fault = describe_key_fault(found["server_public"]) and "a key server_public that is no Z85"
            faults = (fault, *(pair.describe_fault(name) for name, pair in hosts.items()))
        except (TypeError, AttributeError, ValueError):
            raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
        _check(path, faults)
        return HostKeys(found["server_public"], hosts)


@dataclass(frozen=True)
class LauncherKeys:
    """Holds the pair of the endpoint, that of whoever asks it as an operator, and the public keys of hosts by name."""

    server: CurvePair
    operator: CurvePair
    hosts: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def make() -> LauncherKeys:
        """Draw keys of a cluster that has no hosts yet. Raises NetworkError where ZeroMQ cannot encrypt."""
        return LauncherKeys(CurvePair.make(), CurvePair.make())

    @property
    def of_operator(self) -> HostKey:
        """What an operator connects with."""
        return HostKey(self.server.public, self.operator)

    def text(self) -> str:
        """Return what a file of them holds."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(path: Path) -> LauncherKeys:
        """Read the launcher's file. Raises NetworkError that names the file and what is wrong."""
        found = _fields(path, ("server", "operator", "hosts"), "of a launcher")
        try:
            server, operator, hosts = CurvePair(**found["server"]), CurvePair(**found["operator"]), found["hosts"]
            faults = [server.describe_fault("server"), operator.describe_fault("operator")]
            faults += [
                describe_key_fault(key) and f"a key of host {name!r:.80} that is none" for name, key in hosts.items()
            ]
        except (TypeError, AttributeError, ValueError):
            raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
        _check(path, faults)
        return LauncherKeys(server, operator, hosts)


def make_keys(path: Path) -> bool:
    """Make the launcher's file where there is none; return whether there was none. Raises OSError or NetworkError."""
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        write_private(path, LauncherKeys.make().text())
    except FileExistsError:
        return False
    return True


def add_hosts(path: Path, names: Iterable[str]) -> HostKeys:
    """Draw a key for each of these hosts, in place of one that it had, and note it in the launcher's file. Raises
    NetworkError or OSError."""
    with _alone(path):
        keys = LauncherKeys.read(path)
        drawn = {name: CurvePair.make() for name in names}
        _replace(path, keys, {**keys.hosts, **{name: pair.public for name, pair in drawn.items()}})
    return HostKeys(keys.server.public, drawn)


class KnownHosts:
    """Knows for a control endpoint who comes with which key: whom the launcher's file names, as it is at that moment,
    and hosts whose keys were drawn here. Without a file all of it is drawn, and ``file`` is in memory. Raises
    NetworkError or OSError. Thread-safe."""

    def __init__(self, file: Path | None) -> None:
        self._lock, self._in_memory = threading.RLock(), file is None
        self.file = file if file is not None else keep_in_memory(LauncherKeys.make().text())
        self.keys = LauncherKeys.read(self.file)
        self._looked = self._look()
        self._drawn: dict[str, str] = {}
        self._leaving: dict[str, str] = {}
        self._gone: set[str] = set()
        self._names: Mapping[str, str] = {}
        self._note()

    def _look(self) -> tuple[int, ...]:
        found = self.file.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _note(self) -> None:
        hosts = (*self.keys.hosts.items(), *self._drawn.items())
        names = self._leaving | {key: name for name, key in hosts} | {self.keys.operator.public: LAUNCHER}
        self._names = {key: name for key, name in names.items() if key not in self._gone}

    def name_of(self, key: str) -> str:
        """Return whose key it is: a host's name, ``LAUNCHER`` for an operator, "" for nobody's. A file that cannot be
        read at the moment counts as it was before."""
        with self._lock, contextlib.suppress(OSError, NetworkError):
            if not self._in_memory and (looked := self._look()) != self._looked:
                self.keys = LauncherKeys.read(self.file)
                self._looked = looked
                self._note()
        return self._names.get(key, "")

    def knows(self, key: str) -> bool:
        """Return whether somebody may come with a key: it is somebody's, who is not about to leave."""
        return bool(self.name_of(key)) and key not in self._leaving

    def has(self, host: str) -> bool:
        """Return whether a host has a key."""
        return host in self._names.values()

    def draw(self, names: Iterable[str]) -> HostKeys:
        """Draw keys for hosts on which agents are started from here; one whose key was taken away, or that is about to
        leave, gets none."""
        with self._lock:
            void = {*self._gone, *self._leaving}
            pairs = {name: CurvePair.make() for name in names if self._drawn.get(name) not in void}
            self._drawn |= {name: pair.public for name, pair in pairs.items()}
            self._note()
        return HostKeys(self.keys.server.public, pairs)

    def take_away(self, host: str) -> None:
        """Know nobody any more by the keys that a host has had."""
        with self._lock:
            self._gone |= {key for key, name in self._names.items() if name == host}
            self._note()

    def let_leave(self, host: str) -> None:
        """Let nobody come with the keys of a host, and strike it from the launcher's file. On a connection that is
        there it is known by them until ``take_away``, so that it can say how its workers end. Raises OSError or
        NetworkError where the file cannot be changed; nobody comes with them to this launcher in any case."""
        with self._lock:
            self._leaving |= {key: name for key, name in self._names.items() if name == host}
        if host in self.keys.hosts:
            with _alone(self.file):
                keys = LauncherKeys.read(self.file)
                _replace(self.file, keys, {name: key for name, key in keys.hosts.items() if name != host})


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep others from changing the file: an operator adds hosts while a launcher takes one out."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, keys: LauncherKeys, hosts: Mapping[str, str]) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_private(partial, LauncherKeys(keys.server, keys.operator, hosts).text())
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _fields(path: Path, names: tuple[str, ...], whose: str) -> dict[str, Any]:
    try:
        found = json.loads(read_private(path, MOST_BYTES))
    except NetworkError:
        raise
    except (ValueError, RecursionError):
        raise NetworkError(f"keys of the cluster: {path} is not a file of keys") from None
    there = sorted(found) if isinstance(found, dict) else []
    if there == sorted(names):
        return dict(found)
    if "client_secret" in there:
        said = f"has one key for all hosts, as before; move it away and make new ones: {HOW.format(path)}"
    elif there == ["hosts", "operator", "server"]:
        said = f"has the keys of the launcher; a host has one of its own: {HOW.format(path)}"
    elif there == ["hosts", "server_public"]:
        said = "has the keys of hosts; the launcher and its operators need the file that these were made from"
    else:
        said = f"is not a file of keys {whose}"
    raise NetworkError(f"keys of the cluster: {path} {said}")


def _check(path: Path, faults: Iterable[str]) -> None:
    for fault in faults:
        if fault:
            raise NetworkError(f"keys of the cluster: {path} holds {fault}; copy the file again, or make new ones")
