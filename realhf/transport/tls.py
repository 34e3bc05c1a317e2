"""Encrypts the connections that carry bulk values between hosts: TLS, then large AES-GCM records.

TLS cuts what it encrypts into records of 16 KiB, and Python takes each of them by itself, which costs more than the
cipher. Here a record holds up to 256 KiB, and the package ``cryptography`` encrypts it with AES-256-GCM, for which it
uses vector instructions that the OpenSSL beside Python may lack. Between two network namespaces of one host, four
connections and 512 MB in turns, that was 2.4 times as fast as TLS alone on a busy machine, with 2.4 times less CPU of
both ends for a GB (medians of 11 rounds), and 1.5 times as fast on a quiet one (docs/measured.md). What TLS does is
kept where it matters: the handshake proves both ends, and the keys are random numbers that one end draws for this
connection and sends through TLS, so they are as secret as TLS makes them, also when the certificate's key is found
later.

- Each direction of each connection has a key of its own, and numbers its records from 0. That number is the nonce, so
  none occurs twice under a key, and a record that is changed, left out, repeated, sent back or moved to another
  connection does not open.
- A record begins with its length, which its tag covers. A length that no record has is refused before anything is read.
- A connection that ends is an error wherever something is still expected: all messages on it say how long they are.
- A record is decrypted where it belongs and checked then. If the check fails, the call raises, the connection is given
  up, and what lies there is not used.

ZeroMQ encrypts with XSalsa20 in portable code, 0.4 GB per second of a core; TLS uses the processor's AES. Every process
of a run has the same certificate and its key (``RunKeys``), and takes nobody who shows another. Where both ends have
the package ``cryptography``, they go on in larger records after the handshake (``sealed``), which costs less CPU.
"""

from __future__ import annotations

import functools
import math
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, Protocol

from realhf.base import process_clock
from realhf.base.tls import NO_CHECK_TIME, in_memory
from realhf.transport.errors import NetworkError
from realhf.transport.network import RunKeys

RECORD_BYTES = 256 << 10
"""Bytes that one record holds at most: a core's cache has room for it before and after the cipher."""
KEY_BYTES = 32
SECRET_BYTES = 2 * KEY_BYTES
"""Size of what one end draws: the key of what it sends, then the key of what it receives."""
_LENGTH = struct.Struct("!I")
_TAG_BYTES = 16
_NONCE_BYTES = 12


class Connection(Protocol):
    """Is a connection of a run after its handshake: a socket, or a ``SealedSocket``."""

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Send everything."""
        ...

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive some bytes, and return how many; 0 at the end."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """Let every wait for the other end last at most so many seconds."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


@functools.cache
def cipher() -> Callable[[bytes], Any] | None:
    """Return AES-GCM of the package ``cryptography``; None where there is none that works in given memory."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return AESGCM if hasattr(AESGCM, "encrypt_into") and hasattr(AESGCM, "decrypt_into") else None


def new_secret() -> bytes:
    """Draw the keys of a connection."""
    return secrets.token_bytes(SECRET_BYTES)


class SealedSocket:
    """Sends and receives records over ``plain``, a connected socket. ``secret`` is what one end has drawn; the other
    end of the connection is made with ``drawn_here`` the other way round. One thread sends and one receives.

    Raises RuntimeError where ``cipher`` is None. After an OSError the connection is of no further use.
    """

    def __init__(self, plain: socket.socket, secret: bytes, *, drawn_here: bool) -> None:
        made = cipher()
        if made is None:
            raise RuntimeError("the package cryptography is missing")
        sending, receiving = secret[:KEY_BYTES], secret[KEY_BYTES:SECRET_BYTES]
        if not drawn_here:
            sending, receiving = receiving, sending
        self._plain = plain
        self._encrypt, self._decrypt = made(sending).encrypt_into, made(receiving).decrypt_into
        self._sent = self._received = 0
        self._timeout = math.inf
        self.settimeout(plain.gettimeout())
        self._outgoing = memoryview(bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES))
        self._incoming = memoryview(bytearray(_LENGTH.size + RECORD_BYTES + _TAG_BYTES))
        self._rest = memoryview(b"")

    def sendall(self, data: bytes | memoryview, /) -> None:
        """Send everything. Raises OSError, TimeoutError among them."""
        view = memoryview(data)
        for start in range(0, view.nbytes, RECORD_BYTES):
            part = view[start : start + RECORD_BYTES]
            nonce, self._sent = self._sent.to_bytes(_NONCE_BYTES, "big"), self._sent + 1
            record = self._outgoing[: _LENGTH.size + part.nbytes + _TAG_BYTES]
            _LENGTH.pack_into(record, 0, part.nbytes)
            self._encrypt(nonce, part, record[: _LENGTH.size], record[_LENGTH.size :])
            self._plain.sendall(record)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive at most what ``buffer`` holds, and return how many bytes; 0 when the other end has closed. Raises
        OSError, ConnectionError among them for a record that is not of the other end, or not the next one."""
        if not self._rest:
            size = self._read_record()
            if size <= buffer.nbytes:
                if size:
                    self._open(size, buffer[:size])
                return size
            plain = memoryview(bytearray(size))
            self._open(size, plain)
            self._rest = plain
        count = min(buffer.nbytes, self._rest.nbytes)
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def settimeout(self, value: float | None, /) -> None:
        """Let every wait for the other end last at most so many seconds, and the rest of a record that has begun to
        come in as many more."""
        self._timeout = math.inf if value is None else value
        self._plain.settimeout(value)

    def close(self) -> None:
        """Close the connection; harmless when repeated."""
        self._plain.close()

    def _read_record(self) -> int:
        """Read the next record as it came, and return how many bytes it holds; 0 at the end of the connection."""
        length = self._incoming[: _LENGTH.size]
        if not self._fill(length, may_end=True):
            return 0
        (size,) = _LENGTH.unpack(length)
        if not 0 < size <= RECORD_BYTES:
            raise ConnectionError(f"sent a record of {size} bytes")
        self._fill(self._incoming[_LENGTH.size : _LENGTH.size + size + _TAG_BYTES])
        return size

    def _open(self, size: int, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag  # pyright: ignore[reportMissingImports]

        nonce, self._received = self._received.to_bytes(_NONCE_BYTES, "big"), self._received + 1
        record = self._incoming[_LENGTH.size : _LENGTH.size + size + _TAG_BYTES]
        try:
            self._decrypt(nonce, record, self._incoming[: _LENGTH.size], into)
        except InvalidTag:
            self._plain.close()
            raise ConnectionError("sent bytes that were changed on the way") from None

    def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        start, deadline = 0, process_clock.now() + self._timeout
        while start < view.nbytes:
            count = self._plain.recv_into(view[start:])
            if count == 0:
                if may_end and start == 0:
                    return False
                raise ConnectionError("closed the connection")
            start += count
            if start < view.nbytes and process_clock.now() >= deadline:
                raise TimeoutError
        return True


_READY, _CAN_SEAL = b"+", b"="
"""What the listener says first: it is ready, and can go on in large records if the caller can."""


class RunTls:
    """Encrypts connections between processes of one run (TLS 1.3, each end shows the certificate of the run).

    With ``trusted`` both ends prove who they are in the same way, and then go on without encryption. Thread-safe.
    """

    def __init__(self, keys: RunKeys, *, trusted: bool = False) -> None:
        self._certificate = ssl.PEM_cert_to_DER_cert(keys.certificate)
        self._trusted = trusted
        self._can_seal = cipher() is not None
        self._listener = self._context(keys, ssl.PROTOCOL_TLS_SERVER)
        self._listener.num_tickets = 0
        self._caller = self._context(keys, ssl.PROTOCOL_TLS_CLIENT)

    def accept(self, plain: socket.socket) -> Connection:
        """Shake hands with whoever has connected, within the timeout of the socket for each of four steps. Raises
        OSError (of which SSLError is one) for a stranger. ``plain`` is used up, also then."""
        secured = self._shaken(plain, self._listener, server_side=True)
        try:
            if self._trusted or not self._can_seal:
                secured.sendall(_READY)
                return secured.unwrap() if self._trusted else secured
            secured.sendall(_CAN_SEAL)
            if _exactly(secured, 1) != _CAN_SEAL:
                return secured
            secret = _exactly(secured, SECRET_BYTES)
            return SealedSocket(secured.unwrap(), secret, drawn_here=False)
        except (OSError, ValueError) as error:
            secured.close()
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def connect(self, plain: socket.socket) -> Connection:
        """Shake hands with a listener of the run; otherwise as ``accept``."""
        secured = self._shaken(plain, self._caller, server_side=False)
        try:
            # In TLS 1.3 a client learns only with the first byte that its certificate was refused.
            said = secured.recv(1)
            if said not in (_READY, _CAN_SEAL):
                raise ConnectionError("it closed the connection in the handshake")
            if self._trusted:
                return secured.unwrap()
            if said == _READY:
                return secured
            if not self._can_seal:
                secured.sendall(_READY)
                return secured
            secret = new_secret()
            secured.sendall(_CAN_SEAL + secret)
            return SealedSocket(secured.unwrap(), secret, drawn_here=True)
        except (OSError, ValueError) as error:
            secured.close()
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def _shaken(self, plain: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
        try:
            secured = context.wrap_socket(plain, server_side=server_side, suppress_ragged_eofs=False)
        except OSError:
            plain.close()
            raise
        if secured.getpeercert(binary_form=True) != self._certificate:
            secured.close()
            raise ssl.SSLError("the certificate is not that of this run")
        return secured

    def _context(self, keys: RunKeys, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= NO_CHECK_TIME
        with in_memory(keys.certificate + keys.certificate_key) as path:  # the library reads files only
            try:
                context.load_cert_chain(path)
                context.load_verify_locations(cadata=keys.certificate)
            except (ssl.SSLError, ValueError) as error:
                raise NetworkError(f"keys of the run: the certificate cannot be used: {error}") from None
        return context


def _exactly(secured: ssl.SSLSocket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = secured.recv(size - len(found))
        if not part:
            raise ConnectionError("it closed the connection in the handshake")
        found += part
    return bytes(found)
