"""Network of a run: addresses, keys, CURVE encryption and authentication, and each process's
network settings.

All listeners of a run share one key pair, all clients another one. Clients know the listeners'
public key, and listeners accept only the clients' key. The number of connections that have not
authenticated is limited.
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
from realhf.base.loopback import LOOPBACK_INTERFACE, is_loopback_host
from realhf.transport.errors import AddressTaken, NetworkError

LOOPBACK_ADDRESS = "127.0.0.1"
_ANY_PORT = 9
"""Port for a UDP socket that is connected only to find the route; nothing is sent."""


def parse_host(endpoint: str) -> str:
    """Return the host of ``tcp://HOST:PORT``. Raises NetworkError for any other form."""
    try:
        parts = urlsplit(endpoint)
        _ = parts.port
    except ValueError:
        parts = None
    # ZeroMQ would take more than this, such as ``tcp://interface;peer:port``.
    plain = (
        parts is not None
        and parts.hostname
        and parts.scheme == "tcp"
        and parts.netloc.count(":") == 1
    )
    if parts is None or not plain or set(parts.netloc) & set(";@*[]") or parts.path or parts.query:
        hint = "; IPv6 is not supported, give an IPv4 address or a name" if "::" in endpoint else ""
        raise NetworkError(f"{endpoint!r:.80} is not an address of the form tcp://HOST:PORT{hint}")
    return str(parts.hostname)


def is_loopback_endpoint(endpoint: str) -> bool:
    """Return whether an endpoint ``tcp://HOST:PORT`` is a loopback address or ``localhost``."""
    try:
        return is_loopback_host(parse_host(endpoint))
    except NetworkError:
        return False


def resolve_host(name: str, option: str) -> str:
    """Return the IPv4 address of a host name or address. Raises NetworkError naming the option."""
    try:
        addresses = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a name"
        raise NetworkError(
            f"{option}={name}: no IPv4 address of that name is known here: {reason}"
        ) from None
    return str(addresses[0][4][0])


def find_route_address(host: str) -> str:
    """Return this host's address on the route to ``host``. Nothing is sent. Raises NetworkError if
    there is no route."""
    target = resolve_host(host, "the master's address")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, _ANY_PORT))
        except OSError as error:
            raise NetworkError(
                f"no route from {socket.gethostname()} to {target}: {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])


def list_own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host, except for loopback addresses."""
    import psutil

    addresses = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not is_loopback_host(entry.address)
    }
    return sorted(addresses)


def find_interface(address: str) -> str:
    """Return the name of the network interface with this address. Raises NetworkError if there is
    none."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    raise NetworkError(f"{socket.gethostname()} has no interface with the address {address}")


_log = logging.getLogger(__name__)
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ queries a context's authenticator (ZAP, RFC 27)."""
_VERSION = b"1.0"
_FIELDS = 7
_KEY_BYTES = 32
HANDSHAKE_S = 8.0
"""Seconds that a connection has to authenticate."""
SHARE = 8
"""Unauthenticated connections of a listener may use at most 1 / SHARE of the process's file
descriptors, but always at least ``ALWAYS_ALLOWED``."""
ALWAYS_ALLOWED = 16
"""Number of unauthenticated connections that is always allowed (see ``SHARE``)."""
_AUTHENTICATED_BYTES = 240
"""A peer that has acknowledged this many bytes has authenticated: our greeting has 64 bytes,
WELCOME 170, and READY follows only an accepted key. The bytes that a peer sends prove nothing:
ZeroMQ reads a long frame before it checks it."""
_ACKED_AT = 120
"""Offset of the acknowledged bytes in the kernel's ``tcp_info``."""
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class Authenticator:
    """Authenticator of the connections to a context's listeners, on a separate thread.

    ``knows`` is called on that thread with a public key in Z85 and returns whether to accept the
    connection. Each message then carries its sender's key as ``User-Id``. The authenticator ends
    with its context. Create it before a socket of the context listens: until then the context
    refuses all connections.
    """

    def __init__(self, context: zmq.Context[Any], knows: Callable[[str], bool]) -> None:
        self._knows = knows
        self.n_refused = 0
        # The context's ``destroy``, which may run on another thread, does not close a shadow's
        # sockets.
        self._socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)
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
        is_curve_request = (
            len(request) == _FIELDS and request[0] == _VERSION and request[5] == b"CURVE"
        )
        key = z85.encode(request[6]) if is_curve_request and len(request[6]) == _KEY_BYTES else b""
        if key and self._knows(key.decode("ascii")):
            return [_VERSION, number, b"200", b"OK", key, b""]
        self.n_refused += 1
        if self.n_refused & (self.n_refused - 1) == 0:
            address = (
                request[3].decode("ascii", "replace") if len(request) > 3 else "an unknown address"
            )
            _log.warning(
                "connection %d refused: %s does not have the key of this run",
                self.n_refused,
                address,
            )
        return [_VERSION, number, b"400", b"the key is not of this run", b"", b""]


class HandshakeLimiter:
    """Limit on a listener's unauthenticated connections; one more ends the oldest of them.

    Without it, peers that connect and never authenticate could use up the descriptors of this
    process. ZeroMQ accepts connections without limit, and without a free descriptor it retries in a
    busy loop. Create it before the socket listens; it ends with the socket.

    max_pending: Maximum number of connections that have not authenticated; 0 derives it from the
    limit of descriptors (SHARE, ALWAYS_ALLOWED).
    """

    def __init__(self, listener: zmq.Socket[Any], max_pending: int = 0) -> None:
        address = f"inproc://strangers-{id(self)}"
        listener.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        listener.monitor(address, _WATCHED)
        self._events = zmq.Context.shadow(listener.context.underlying).socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        # Without a free descriptor ZeroMQ reports half a million failures per second; a full queue
        # makes it wait for this thread.
        self._events.setsockopt(zmq.RCVHWM, 1000)
        self._events.connect(address)
        self._max_pending = max_pending
        self._pending: dict[int, None] = {}
        # Reserved so that a connection can be accepted, and ended, when no other descriptor is
        # left.
        self._spare = self._open_spare_descriptor()
        self.ended = 0
        threading.Thread(target=self._run, name="strangers", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                message = recv_monitor_message(self._events)
                event = int(message["event"])
                value = int(message["value"])
                port = int(bytes(message["endpoint"]).rpartition(b":")[2] or 0)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event == zmq.EVENT_ACCEPTED:
                    self._on_accepted(value, port)
                elif event == zmq.EVENT_ACCEPT_FAILED:
                    self._on_no_descriptor(port)
                else:
                    self._pending.pop(value, None)
        except zmq.ZMQError:
            pass  # the context is being terminated, which waits until this socket is closed
        finally:
            self._events.close(0)
            if self._spare is not None:
                os.close(self._spare)

    def _on_accepted(self, descriptor: int, port: int) -> None:
        self._pending.pop(descriptor, None)
        self._pending[descriptor] = None
        max_pending = self._max_pending or max(
            ALWAYS_ALLOWED, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE
        )
        if self._spare is None:
            self._spare = self._open_spare_descriptor()
        if len(self._pending) > max_pending:
            self._end_oldest(len(self._pending) - max_pending, port)

    def _on_no_descriptor(self, port: int) -> None:
        """Release the reserved descriptor, so that the waiting connection can be accepted, and end
        the older half of the unauthenticated connections."""
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        self._end_oldest(max(1, len(self._pending) // 2), port)

    @staticmethod
    def _open_spare_descriptor() -> int | None:
        try:
            return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None

    def _end_oldest(self, count: int, port: int) -> None:
        """End the ``count`` oldest unauthenticated connections; drop the authenticated ones from
        the list."""
        for descriptor in [*self._pending]:
            if count == 0:
                return
            del self._pending[descriptor]
            if _end_if_unauthenticated(descriptor, port):
                count -= 1
                self.ended += 1
                if self.ended & (self.ended - 1) == 0:
                    _log.warning(
                        "port %d: %d connections ended that showed no key of this run",
                        port,
                        self.ended,
                    )


def _end_if_unauthenticated(descriptor: int, port: int) -> bool:
    """End an unauthenticated connection of the listener at ``port``; return whether it was one.

    ZeroMQ may have closed it in the meantime, and the descriptor may belong to another file, which
    is left alone.
    """
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        if connection.getsockname()[1] != port:
            return False
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_AT + 8)
        if (
            len(info) < _ACKED_AT + 8
            or struct.unpack_from("Q", info, _ACKED_AT)[0] >= _AUTHENTICATED_BYTES
        ):
            return False
        with contextlib.suppress(OSError):  # the peer has already ended it
            connection.shutdown(socket.SHUT_RDWR)
        return True
    except (OSError, IndexError, TypeError):
        return False
    finally:
        connection.detach()


KEY_CHARACTERS = 40
"""Length of a key in Z85, ZeroMQ's printable form."""
NO_CURVE = "network.bind: this installation of ZeroMQ has no CURVE, so it cannot encrypt"


@dataclass(frozen=True)
class CurvePair:
    """A public key and its secret key, both in Z85. The repr shows neither."""

    public: str = field(repr=False)
    secret: str = field(repr=False)

    @staticmethod
    def make() -> CurvePair:
        """Generate a pair. Raises NetworkError if ZeroMQ was built without encryption."""
        if not zmq.has("curve"):
            raise NetworkError(NO_CURVE)
        public, secret = zmq.curve_keypair()
        return CurvePair(public.decode("ascii"), secret.decode("ascii"))

    def describe_fault(self, name: str = "") -> str:
        """Return what is wrong with the keys ``NAME_public`` and ``NAME_secret``, without showing
        them; "" if they are valid."""
        labels = [f"{name}_{side}".removeprefix("_") for side in ("public", "secret")]
        for label, key in zip(labels, (self.public, self.secret), strict=True):
            if fault := describe_key_fault(key):
                return f"a key {label} {fault}"
        if zmq.curve_public(self.secret.encode("ascii")) != self.public.encode("ascii"):
            return f"keys {labels[0]} and {labels[1]} that do not belong together"
        return ""


def describe_key_fault(key: str) -> str:
    """Return why a string is not a key; "" if it is one."""
    if len(key) != KEY_CHARACTERS:
        return f"of another length than {KEY_CHARACTERS}"
    try:
        zmq.curve_public(key.encode("ascii"))
    except zmq.ZMQError as error:
        if error.errno == errno.EINVAL:
            return "that is not Z85"
        raise NetworkError(NO_CURVE) from None
    return ""


def listen_encrypted(socket: zmq.Socket[Any], address: str, own: CurvePair) -> str:
    """Listen at ``address`` (tcp://...); return the endpoint. Raises the errors of ``bind_socket``.

    The socket's context must have an ``Authenticator``.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"run")
    # Without this a context that has no authenticator would accept every connection.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    HandshakeLimiter(socket)
    return bind_socket(socket, address)


def bind_socket(socket: zmq.Socket[Any], address: str) -> str:
    """Bind a socket; return the endpoint. Raises AddressTaken, or NetworkError if the address does
    not belong to this host."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            addresses = ", ".join(list_own_addresses()) or "none but the loopback"
            raise NetworkError(
                f"{address}: no address of this host, which has {addresses} (network.bind)"
            ) from None
        raise AddressTaken(f"cannot listen on {address}: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_encrypted(
    socket: zmq.Socket[Any], endpoint: str, server_public: str, own: CurvePair
) -> None:
    """Connect to a listener. The handshake fails unless the listener has the secret key that
    belongs to ``server_public``."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    socket.connect(endpoint)


_MAKE_S = 30.0
"""Timeout of the ``openssl`` command in seconds."""
_COMMAND = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
    *("-keyout", "-", "-out", "-", "-days", "3650", "-subj", "/CN=realhf-run"),
    *("-addext", "basicConstraints=critical,CA:FALSE", "-config", "/dev/null"),
)


def make_certificate() -> tuple[str, str]:
    """Return a new certificate and its private key, both as PEM. No file is written.

    Raises NetworkError if the command ``openssl`` is missing or fails.
    """
    try:
        completed = subprocess.run(
            _COMMAND, check=True, capture_output=True, text=True, timeout=_MAKE_S
        )
    except FileNotFoundError:
        raise NetworkError(
            "network.bind: the command openssl is missing here; it makes the certificate of the run"
        ) from None
    except subprocess.SubprocessError as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip()
        raise NetworkError(
            f"network.bind: openssl could not make the certificate of the run: {reason:.400}"
        ) from None
    key, middle, certificate = completed.stdout.partition("-----END PRIVATE KEY-----\n")
    return certificate, key + middle


MAX_KEY_FILE_BYTES = 16 << 10
"""Maximum size of a key file, in bytes."""
STDIN = Path("-")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,256}")


@dataclass(frozen=True)
class RunKeys:
    """All keys of a run. The repr shows none of them."""

    server_public: str = field(repr=False)
    """Public key of all listening sockets, in Z85."""
    server_secret: str = field(repr=False)
    client_public: str = field(repr=False)
    """Public key of all connecting sockets, in Z85."""
    client_secret: str = field(repr=False)
    token: str = field(repr=False)
    """Access token of the run's HTTP servers."""
    certificate: str = field(repr=False)
    """Certificate of bulk connections and of the environment server, as PEM."""
    certificate_key: str = field(repr=False)
    """Private key of the certificate, as PEM."""

    @staticmethod
    def make() -> RunKeys:
        """Generate new keys. Raises NetworkError if ZeroMQ was built without encryption or
        ``openssl`` is missing."""
        server = CurvePair.make()
        client = CurvePair.make()
        certificate, key = make_certificate()
        curve = (server.public, server.secret, client.public, client.secret)
        return RunKeys(
            *curve, token=secrets.token_urlsafe(32), certificate=certificate, certificate_key=key
        )

    @property
    def server(self) -> CurvePair:
        """Key pair of the listening sockets."""
        return CurvePair(self.server_public, self.server_secret)

    @property
    def client(self) -> CurvePair:
        """Key pair of the connecting sockets."""
        return CurvePair(self.client_public, self.client_secret)

    def write(self, path: Path) -> None:
        """Write the keys into a new file that only its owner can read. Raises OSError, for example
        if the file exists."""
        write_private(path, json.dumps(asdict(self)))

    def move_to_memory(self) -> Path:
        """Move the keys to an anonymous memory file of this process, see ``keep_in_memory``. Raises
        OSError."""
        return keep_in_memory(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> RunKeys:
        """Read a key file; ``-`` is standard input up to its end. Never blocks on a pipe.

        Raises NetworkError, naming the file and the problem, if the file is missing, not a regular
        file, not owned by the user, readable by others, or contains something else.
        """
        try:
            values = json.loads(read_private(path))
            names = [each.name for each in fields(RunKeys)]
            if not isinstance(values, dict) or sorted(values) != sorted(names):
                raise ValueError("other fields")
            if not all(
                isinstance(text, str) and text.isascii() and text for text in values.values()
            ):
                raise ValueError("no texts")
            keys = RunKeys(**values)
        except NetworkError:
            raise
        except (ValueError, RecursionError):
            raise NetworkError(f"keys of the run: {path} is not a file of keys") from None
        if fault := keys._describe_fault():
            raise NetworkError(
                f"keys of the run: {path} holds {fault}; restart the run, or copy the file again"
            )
        return keys

    def _describe_fault(self) -> str:
        """Return what is wrong with the values, without showing them; "" if they are valid."""
        for name, pair in (("server", self.server), ("client", self.client)):
            if fault := pair.describe_fault(name):
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
    """Write a new file that only its owner can read. Raises OSError, for example if the file
    exists."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)
            file.write(text)
    except OSError:
        path.unlink(missing_ok=True)  # every later launcher would refuse a truncated file
        raise


def keep_in_memory(text: str) -> Path:
    """Keep keys in an anonymous memory file of this process; return its path below /proc.

    Processes of the same user on this machine can read the path as long as this process lives. The
    keys are not on any disk, and are gone when the process ends. ``forget`` closes the file. Raises
    OSError.
    """
    descriptor = os.memfd_create("keys", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


def forget(path: Path) -> None:
    """Close the file that ``keep_in_memory`` returned in this process."""
    os.close(int(path.name))


def read_private(path: Path, max_bytes: int = MAX_KEY_FILE_BYTES) -> str:
    """Return the text of a regular file that only this user can read; ``-`` is standard input.

    Raises NetworkError, or ValueError for text that is not ASCII.
    """
    try:
        if path == STDIN:
            return sys.stdin.buffer.read(max_bytes).decode("ascii")
        # O_NONBLOCK: opening a pipe or a device would block. The checks are of the opened file, not
        # of the path.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _check_owner(path, os.fstat(descriptor))
            read = os.read(descriptor, max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise NetworkError(f"keys of the run: cannot read {path}: {error.strerror}") from None
    if len(read) > max_bytes:
        raise NetworkError(
            f"keys of the run: {path} is not a file of keys: it has more than {max_bytes} bytes"
        )
    return read.decode("ascii")


def _check_owner(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NetworkError(f"keys of the run: {path} is not an ordinary file")
    if status.st_uid != os.geteuid():
        raise NetworkError(
            f"keys of the run: {path} belongs to user {status.st_uid}, and this process runs as "
            f"user {os.geteuid()}: "
            "whoever owns the file knows the keys; copy it"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise NetworkError(
            f"keys of the run: others may read {path}; chmod 600 it, or restart the run"
        )


def require_loopback(address: str) -> str:
    """Return the address if it is ``tcp://`` on a loopback interface; otherwise raise NetworkError.

    Without keys a socket accepts every connection, so it must not listen where another host can
    reach it.
    """
    if not is_loopback_endpoint(address):
        raise NetworkError(
            f"refusing to listen on {address!r:.80}: without the keys of a run only tcp:// on a "
            f"loopback address is "
            "allowed (network.bind makes keys, --key-file names them)"
        )
    return address


@dataclass(frozen=True)
class Network:
    """Network settings of a process. Raises NetworkError if there are no keys and an address is not
    a loopback address."""

    host: str = LOOPBACK_ADDRESS
    """Address on which the process listens."""
    advertised: str = LOOPBACK_ADDRESS
    """Address at which other processes reach this one."""
    keys: RunKeys | None = None
    trusted: bool = False
    """Option ``network.trusted``: whether bulk connections are left unencrypted after the
    handshake."""

    def __post_init__(self) -> None:
        if self.keys is None:
            require_loopback(f"tcp://{self.host}:0")

    @staticmethod
    def for_master(config: NetworkConfig, keys: RunKeys | None) -> Network:
        """Return the settings of a master. Raises NetworkError naming the wrong option."""
        if not config.bind:
            return Network(keys=keys)
        host = config.bind if config.bind == WILDCARD else resolve_host(config.bind, "network.bind")
        if is_loopback_host(host) and not is_loopback_host(config.bind):
            raise NetworkError(
                f"network.bind={config.bind}: on this host the name means the loopback ({host}); "
                f"give an address that "
                f"others reach, such as {', '.join(list_own_addresses()) or 'none here'}"
            )
        return Network(host, config.advertise or host, keys, config.trusted)

    @staticmethod
    def for_worker(config: NetworkConfig, keys: RunKeys | None, master: str) -> Network:
        """Return the settings of a worker whose master is at ``master``, tcp://HOST:PORT.

        Raises NetworkError if there is no route to the master.
        """
        own = (
            LOOPBACK_ADDRESS
            if is_loopback_endpoint(master)
            else find_route_address(parse_host(master))
        )
        return Network(WILDCARD if config.bind == WILDCARD else own, own, keys, config.trusted)

    @property
    def protected(self) -> bool:
        """Whether sockets are encrypted and accept only peers with the keys of the run."""
        return self.keys is not None

    @property
    def interface(self) -> str:
        """Name of the network interface with the address ``advertised``. Raises NetworkError if
        there is none."""
        own = self.advertised
        return LOOPBACK_INTERFACE if is_loopback_host(own) else find_interface(own)

    def public_url(self, url: str) -> str:
        """Return the URL at which other processes reach this process's HTTP server that listens at
        ``url``."""
        parts = urlsplit(url)
        return (
            url
            if parts.hostname != WILDCARD
            else f"{parts.scheme}://{self.advertised}:{parts.port}"
        )

    def add_token(self, url: str) -> str:
        """Add the run's token to the URL of one of its HTTP servers: ``http://:TOKEN@HOST:PORT``.

        The result is for the client of that server only; it must not be sent in a message.
        """
        if self.keys is None:
            return url
        scheme, _, address = url.partition("://")
        return f"{scheme}://:{self.keys.token}@{address}"

    def context(self) -> zmq.Context[Any]:
        """Create a ZeroMQ context with an authenticator for listening sockets; connecting sockets
        may share it."""
        context: zmq.Context[Any] = zmq.Context(io_threads=1)
        if self.keys is not None:
            known = self.keys.client_public
            Authenticator(context, lambda key: hmac.compare_digest(key, known))
        return context

    def listen(self, socket: zmq.Socket[Any], bind: str = "") -> str:
        """Listen at ``bind`` (tcp://...) or on any free port of ``host``; return the endpoint for
        other processes.

        The socket's context must be one that ``context`` created. Raises AddressTaken, or
        NetworkError if the address does not belong to this host or, without keys, is not a loopback
        address.
        """
        address = bind or f"tcp://{self.host}:0"
        if self.keys is None:
            endpoint = bind_socket(socket, require_loopback(address))
        else:
            endpoint = listen_encrypted(socket, address, self.keys.server)
        if bind or self.host == self.advertised:
            return endpoint
        return f"tcp://{self.advertised}:{endpoint.rpartition(':')[2]}"

    def connect(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Connect to a listener of the run.

        Without keys, raises NetworkError for any address but loopback, because messages would be
        readable in transit.
        """
        if self.keys is None:
            if not is_loopback_endpoint(endpoint):
                raise NetworkError(
                    f"{endpoint!r:.80} is not on the loopback, and this process has no keys of the "
                    f"run "
                    "(network.bind creates them, --key-file names them)"
                )
            socket.connect(endpoint)
        else:
            parse_host(endpoint)
            connect_encrypted(socket, endpoint, self.keys.server_public, self.keys.client)


LOOPBACK = Network()
"""Network settings of a run on one host. Nothing is encrypted, because nothing leaves the host."""
