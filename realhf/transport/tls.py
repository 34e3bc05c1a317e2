"""TLS for the connections that carry bulk tensors between the hosts of a run.

ZeroMQ encrypts with XSalsa20 in portable code, 0.4 GB per second and core; TLS uses the AES
instructions of the processor. All processes of a run have the same certificate and private key
(``RunKeys``). Both ends of a connection show it, and each end refuses every other certificate.
"""

from __future__ import annotations

import socket
import ssl

from realhf.base.tls import NO_CHECK_TIME, in_memory_file
from realhf.transport.errors import NetworkError
from realhf.transport.network import RunKeys

_READY = b"+"
"""First byte that a listener sends, to confirm that it accepts the caller's certificate. Without it
a TLS 1.3 caller would take the handshake for complete, and learn of a refusal only from a later
read or, after a reset, not at all."""


class RunTls:
    """TLS 1.3 between processes of one run, with mutual certificate checks.

    With ``trusted`` both ends authenticate each other in the same way, then continue unencrypted.
    Thread-safe.
    """

    def __init__(self, keys: RunKeys, *, trusted: bool = False) -> None:
        self._certificate = ssl.PEM_cert_to_DER_cert(keys.certificate)
        self._trusted = trusted
        self._listener = _make_context(keys, ssl.PROTOCOL_TLS_SERVER)
        # A session ticket would follow the handshake, and could mix with the plain bytes of a
        # trusted connection.
        self._listener.num_tickets = 0
        self._caller = _make_context(keys, ssl.PROTOCOL_TLS_CLIENT)

    def accept(self, plain: socket.socket) -> socket.socket:
        """Authenticate an incoming connection, and return the socket to use in place of ``plain``.

        The timeout of ``plain`` limits each step: the handshake, the first byte and, if trusted,
        the end of TLS. Raises OSError, of which ssl.SSLError is a subclass, for a peer of another
        run. ``plain`` is consumed in any case.
        """
        secured = self._handshake(plain, self._listener, server_side=True)
        try:
            secured.sendall(_READY)
            return secured.unwrap() if self._trusted else secured
        except (OSError, ValueError) as error:
            secured.close()
            raise _as_os_error(error) from None

    def connect(self, plain: socket.socket) -> socket.socket:
        """Authenticate an outgoing connection to a listener of the run. Otherwise like
        ``accept``."""
        secured = self._handshake(plain, self._caller, server_side=False)
        try:
            if secured.recv(1) != _READY:
                raise ConnectionError("it closed the connection in the handshake")
            return secured.unwrap() if self._trusted else secured
        except (OSError, ValueError) as error:
            secured.close()
            raise _as_os_error(error) from None

    def _handshake(
        self, plain: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> ssl.SSLSocket:
        try:
            # A connection that ends without TLS's own end may have been cut off by somebody on the
            # way.
            secured = context.wrap_socket(
                plain, server_side=server_side, suppress_ragged_eofs=False
            )
        except OSError:
            plain.close()
            raise
        if secured.getpeercert(binary_form=True) != self._certificate:
            secured.close()
            raise ssl.SSLError("the certificate is not that of this run")
        return secured


def _make_context(keys: RunKeys, protocol: int) -> ssl.SSLContext:
    """Build a context that presents the run's certificate and trusts no other. Raises NetworkError
    if the certificate is unusable."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= NO_CHECK_TIME
    with in_memory_file(
        keys.certificate + keys.certificate_key
    ) as path:  # OpenSSL reads a key from files only
        try:
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=keys.certificate)
        except (ssl.SSLError, ValueError) as error:
            raise NetworkError(
                f"keys of the run: the certificate cannot be used: {error}"
            ) from None
    return context


def _as_os_error(error: OSError | ValueError) -> OSError:
    """Return ``error``, or an OSError with its text for the ValueError of a socket that was closed
    during the call."""
    return error if isinstance(error, OSError) else OSError(str(error))
