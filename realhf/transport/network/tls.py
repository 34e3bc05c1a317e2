"""Encrypts the connections that carry bulk values between the hosts of a run.

ZeroMQ encrypts with XSalsa20 in portable code, 0.4 GB per second of a core; TLS uses the processor's AES. Every process
of a run has the same certificate and its key (``RunKeys``), and takes nobody who shows another. Where both ends have
the package ``cryptography``, they go on in larger records after the handshake (``sealed``), which costs less CPU.
"""

from __future__ import annotations

import socket
import ssl

from realhf.base.tls import NO_CHECK_TIME, in_memory
from realhf.transport.errors import NetworkError
from realhf.transport.network.keys import RunKeys
from realhf.transport.network.sealed import SECRET_BYTES, Connection, SealedSocket, cipher, new_secret

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
