"""Says where the sockets of a run listen and whom they let in: addresses, keys, CURVE, and the network of one process.

A listener has a key pair, whoever connects has another and knows the listener's. Connections that have not shown a key
yet are bounded in number.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import os
import re
import resource
import secrets
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from realhf.api.config import WILDCARD, NetworkConfig
from realhf.base.loopback import is_loopback_host
from realhf.transport.errors import AddressTaken, NetworkError

LOOPBACK_ADDRESS = "127.0.0.1"
_ANY_PORT = 9


def host_of(endpoint: str) -> str:
    """Return the host of ``tcp://HOST:PORT``. Raises NetworkError on anything else."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        parts = None
    # ZeroMQ would take more than this, such as ``tcp://interface;peer:port``.
    plain = parts is not None and parts.hostname and parts.scheme == "tcp" and parts.netloc.count(":") == 1
    if parts is None or not plain or set(parts.netloc) & set(";@*[]") or parts.path or parts.query:
        hint = "; IPv6 is not supported, give an IPv4 address or a name" if "::" in endpoint else ""
        raise NetworkError(f"{endpoint!r:.80} is not an address of the form tcp://HOST:PORT{hint}")
    return str(parts.hostname)


def on_loopback(endpoint: str) -> bool:
    """Return whether an endpoint ``tcp://HOST:PORT`` is on the loopback, by address or as ``localhost``."""
    try:
        return is_loopback_host(host_of(endpoint))
    except NetworkError:
        return False


def resolved(name: str, option: str) -> str:
    """Return the IPv4 address of a host name or address. Raises NetworkError naming the option."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise NetworkError(f"{option}={name}: no IPv4 address of that name is known here: {reason}") from None
    return str(found[0][4][0])


def address_towards(host: str) -> str:
    """Return the own address on the way to ``host``. Nothing is sent. Raises NetworkError when there is no way."""
    target = resolved(host, "the master's address")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ANY_PORT))
        except OSError as error:
            raise NetworkError(f"no route from {socket.gethostname()} to {target}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host, without the loopback's."""
    import psutil

    found = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback_host(entry.address)
    }
    return sorted(found)


def interface_of(address: str) -> str:
    """Return the name of the interface with this address. Raises NetworkError when there is none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise NetworkError(f"{socket.gethostname()} has no interface with the address {address}")


_log = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks, in each context of its own."""
_VERSION = b"1.0"
_FIELDS, _KEY_BYTES = 7, 32
HANDSHAKE_S = 8.0
"""How long a connection may take to show its key."""
SHARE, FEWEST = 8, 16
"""Strangers of one listener hold at most one of so many of the descriptors of this process, and so many in any case."""
_SHOWN_BYTES = 240
"""Who has acknowledged as much has shown a key: our greeting has 64 bytes, WELCOME 170, and READY follows only a key
that was taken. What a stranger sends says nothing: a long frame is read before anything of it is looked at."""
_ACKED_AT = 120
"""Where the kernel's ``tcp_info`` holds the bytes that were acknowledged."""
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Authenticator:
    """Lets in whoever connects with a public key (Z85) that ``knows`` knows, which is asked on its own
    thread. Each message carries its sender's key as ``User-Id``. It ends with its context.

    It has to be there before a socket of the context listens: until then, the context refuses everybody.
    """

    def __init__(self, context: zmq.Context[Any], knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self.refused = 0
        # A shadow's sockets are not closed by the context's ``destroy``, which may run on another thread than this one.
        self._socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        threading.Thread(target=self._run, name="authenticator", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ZMQError:
            # The context is being terminated, which waits until this socket is closed.
            self._socket.close(0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        number = request[1] if len(request) > 1 else b""
        asked = len(request) == _FIELDS and request[0] == _VERSION and request[5] == b"CURVE"
        key = z85.encode(request[6]) if asked and len(request[6]) == _KEY_BYTES else b""
        if key and self._knows(key.decode("ascii")):
            return [_VERSION, number, b"200", b"OK", key, b""]
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            address = request[3].decode("ascii", "replace") if len(request) > 3 else "an unknown address"
            _log.warning("connection %d refused: %s has not the key of this run", self.refused, address)
        return [_VERSION, number, b"400", b"the key is not of this run", b"", b""]


class HandshakeLimit:
    """Keeps those who hold connections of a listener and never show a key from taking all descriptors of this process:
    one too many ends the oldest of them. ZeroMQ itself takes connections without end, and where there is no descriptor
    left, it tries again and again with a whole core. Made before the socket listens; it ends with the socket.

    ``most``: so many strangers at once; 0: as many as the limit of descriptors allows.
    """

    def __init__(self, listener: zmq.Socket[Any], most: int = 0) -> None:
        address = f"inproc://strangers-{id(self)}"
        listener.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        listener.monitor(address, _WATCHED)
        self._events = zmq.Context.shadow(listener.context.underlying).socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # Where no descriptor is left, ZeroMQ reports half a million failures a second: it waits for this thread then.
        self._events.setsockopt(zmq.RCVHWM, 1000)
        self._events.connect(address)
        self._most = most
        self._suspects: dict[int, None] = {}
        self._spare = self._kept_back()
        self.ended = 0
        threading.Thread(target=self._run, name="strangers", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                found = recv_monitor_message(self._events)
                event, value = int(found["event"]), int(found["value"])
                port = int(bytes(found["endpoint"]).rpartition(b":")[2] or 0)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event == zmq.EVENT_ACCEPTED:
                    self._came(value, port)
                elif event == zmq.EVENT_ACCEPT_FAILED:
                    self._starved(port)
                else:
                    self._suspects.pop(value, None)
        except zmq.ZMQError:
            pass  # the context is being terminated, which waits until this socket is closed
        finally:
            self._events.close(0)
            if self._spare is not None:
                os.close(self._spare)

    def _came(self, descriptor: int, port: int) -> None:
        self._suspects.pop(descriptor, None)
        self._suspects[descriptor] = None
        most = self._most or max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
        if self._spare is None:
            self._spare = self._kept_back()
        if len(self._suspects) > most:
            self._end_oldest(len(self._suspects) - most, port)

    def _starved(self, port: int) -> None:
        """Give up the descriptor that was kept back, so that the connection that waits can be taken, and ended."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self._end_oldest(max(1, len(self._suspects) // 2), port)

    @staticmethod
    def _kept_back() -> int | None:
        try:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _end_oldest(self, count: int, port: int) -> None:
        """End so many of the connections that have not shown a key yet, and forget those that have."""
        for descriptor in [*self._suspects]:
            if count == 0:
                return
            del self._suspects[descriptor]
            if _ended_if_strange(descriptor, port):
                count -= 1
                self.ended += 1
                if self.ended & (self.ended - 1) == 0:
                    _log.warning("port %d: %d connections ended that showed no key of this run", port, self.ended)


def _ended_if_strange(descriptor: int, port: int) -> bool:
    """End a connection of the listener at ``port`` to which hardly anything was said. ZeroMQ may have closed it
    meanwhile, and the number may be that of another file, which stays as it is."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if connection.getsockname()[1] != port:
            return False
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
        if len(info) < _ACKED_AT + 8 or struct.unpack_from("Q", info, _ACKED_AT)[0] >= _SHOWN_BYTES:
            return False
        with contextlib.suppress(OSError):  # it has ended by itself
            connection.shutdown(socket.SHUT_RDWR)
        return True
    except (OSError, IndexError, TypeError):
        return False
    finally:
        connection.detach()


KEY_CHARACTERS = 40
"""Length of a key in the printable form that ZeroMQ takes (Z85)."""
NO_CURVE = "network.bind: this installation of ZeroMQ has no CURVE, so it cannot encrypt"


@dataclass(frozen=True)
class CurvePair:
    """Is a public key and the secret one that belongs to it, both as Z85. Printed, it shows neither."""

    public: str = field(repr=False)
    secret: str = field(repr=False)

    @staticmethod
    def make() -> CurvePair:
        """Draw a pair. Raises NetworkError where ZeroMQ was built without encryption."""
        if not zmq.has("curve"):
            raise NetworkError(NO_CURVE)
        public, secret = zmq.curve_keypair()
        return CurvePair(public.decode("ascii"), secret.decode("ascii"))

    def fault(self, name: str = "") -> str:
        """Return what is wrong with the keys ``NAME_public`` and ``NAME_secret``, without showing them, or ""."""
        labels = [f"{name}_{side}".removeprefix("_") for side in ("public", "secret")]
        for label, key in zip(labels, (self.public, self.secret), strict=True):
            if fault := key_fault(key):
                return f"a key {label} {fault}"
        if zmq.curve_public(self.secret.encode("ascii")) != self.public.encode("ascii"):
            return f"keys {labels[0]} and {labels[1]} that do not belong together"
        return ""


def key_fault(key: str) -> str:
    """Return why a text is no key, or ""."""
    if len(key) != KEY_CHARACTERS:
        return f"of another length than {KEY_CHARACTERS}"
    try:
        zmq.curve_public(key.encode("ascii"))
    except zmq.ZMQError as error:
        if error.errno == errno.EINVAL:
            return "that is no Z85"
        raise NetworkError(NO_CURVE) from None
    return ""


def listen_encrypted(socket: zmq.Socket[Any], address: str, own: CurvePair) -> str:
    """Listen at ``address`` (tcp://...) with a socket of a context that has an ``Authenticator``, and return the
    endpoint. Raises as ``bound`` does."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"run")
    # Without this a context that has no authenticator would take everybody.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    HandshakeLimit(socket)
    return bound(socket, address)


def bound(socket: zmq.Socket[Any], address: str) -> str:
    """Bind a socket and return the endpoint. Raises AddressTaken, or NetworkError for an address that is not of this
    host."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            there = ", ".join(own_addresses()) or "none but the loopback"
            raise NetworkError(f"{address}: no address of this host, which has {there} (network.bind)") from None
        raise AddressTaken(f"cannot listen on {address}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_encrypted(socket: zmq.Socket[Any], endpoint: str, server_public: str, own: CurvePair) -> None:
    """Connect to the listener that has the secret key of ``server_public``."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(endpoint)


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


def require_loopback(address: str) -> str:
    """Return the address if it is ``tcp://`` on a loopback interface. Raises NetworkError otherwise: without keys a
    socket takes everybody, so nothing may listen where another host can reach it."""
    if not on_loopback(address):
        raise NetworkError(
            f"refusing to listen on {address!r:.80}: without the keys of a run only tcp:// on a loopback address is "
            "allowed (network.bind makes keys, --key-file names them)"
        )
    return address


@dataclass(frozen=True)
class Network:
    """Says where this process listens (``host``), how others reach it (``advertised``), and with which keys.
    ``trusted`` is the option of that name. Raises NetworkError for another address than loopback without keys."""

    host: str = LOOPBACK_ADDRESS
    advertised: str = LOOPBACK_ADDRESS
    keys: RunKeys | None = None
    trusted: bool = False

    def __post_init__(self) -> None:
        if self.keys is None:
            require_loopback(f"tcp://{self.host}:0")

    @staticmethod
    def of_master(config: NetworkConfig, keys: RunKeys | None) -> Network:
        """Return the network of a master. Raises NetworkError naming the option that is wrong."""
        if not config.bind:
            return Network(keys=keys)
        host = config.bind if config.bind == WILDCARD else resolved(config.bind, "network.bind")
        if is_loopback_host(host) and not is_loopback_host(config.bind):
            raise NetworkError(
                f"network.bind={config.bind}: on this host the name means the loopback ({host}); give an address that "
                f"others reach, such as {', '.join(own_addresses()) or 'none here'}"
            )
        return Network(host, config.advertise or host, keys, config.trusted)

    @staticmethod
    def of_worker(config: NetworkConfig, keys: RunKeys | None, master: str) -> Network:
        """Return the network of a worker of the master at ``master``, tcp://HOST:PORT. Raises NetworkError when it
        cannot be reached from here."""
        own = LOOPBACK_ADDRESS if on_loopback(master) else address_towards(host_of(master))
        return Network(WILDCARD if config.bind == WILDCARD else own, own, keys, config.trusted)

    @property
    def protected(self) -> bool:
        """Whether sockets are encrypted and take nobody without the keys of the run."""
        return self.keys is not None

    def reached_at(self, url: str) -> str:
        """Return the address at which others reach an HTTP server that listens at ``url`` in this process."""
        parts = urlsplit(url)
        return url if parts.hostname != WILDCARD else f"{parts.scheme}://{self.advertised}:{parts.port}"

    def with_token(self, url: str) -> str:
        """Return the address of an HTTP server of the run with the token that it wants, as ``http://:TOKEN@HOST:PORT``.
        Only the client that it is for takes it; it is in no message."""
        if self.keys is None:
            return url
        scheme, _, rest = url.partition("://")
        return f"{scheme}://:{self.keys.token}@{rest}"

    def context(self) -> zmq.Context[Any]:
        """Make a context for sockets that listen; those that connect may share it."""
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        if self.keys is not None:
            known = self.keys.client_public
            Authenticator(context, lambda key: hmac.compare_digest(key, known))
        return context

    def listen(self, socket: zmq.Socket[Any], bind: str = "") -> str:
        """Listen with a socket of a context of ``context``, on any free port of ``host``, or at ``bind`` (tcp://...).
        Returns the endpoint at which others reach it. Raises AddressTaken, or NetworkError for an address that is not
        of this host, and for one other than loopback without keys."""
        address = bind or f"tcp://{self.host}:0"
        if self.keys is None:
            endpoint = bound(socket, require_loopback(address))
        else:
            endpoint = listen_encrypted(socket, address, self.keys.server)
        if bind or self.host == self.advertised:
            return endpoint
        return f"tcp://{self.advertised}:{endpoint.rpartition(':')[2]}"

    def connect(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Connect to a listener of the run. Raises NetworkError for one that is not on the loopback where there are no
        keys: what is sent would be readable on the way."""
        if self.keys is None:
            if not on_loopback(endpoint):
                raise NetworkError(
                    f"{endpoint!r:.80} is not on the loopback, and this process has no keys of the run "
                    "(network.bind makes them, --key-file names them)"
                )
            socket.connect(endpoint)
        else:
            host_of(endpoint)
            connect_encrypted(socket, endpoint, self.keys.server_public, self.keys.client)


LOOPBACK = Network()
"""The network of a run that one host has for itself: nothing is encrypted, since nothing leaves it."""
