"""Loads certificates for HTTP: what a server shows, and whom a client believes."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from realhf.base.loopback import is_loopback_host

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME: the certificate of a run is as old as the run, whatever the clock of a host says."""


def certificate_problem(cert: str, key: str, flags: tuple[str, str]) -> str:
    """Return why a server cannot show the certificate in the file ``cert`` with the private key in ``key``, naming the
    flags of both; "" where it can, or where neither is given."""
    if not cert and not key:
        return ""
    if not cert or not key:
        return f"{flags[not cert]} is given without {flags[bool(cert)]}"
    for given, flag in ((cert, flags[0]), (key, flags[1])):
        try:
            with open(os.path.expanduser(given), "rb"):
                pass
        except OSError as error:
            return f"{flag} {given}: {error.strerror}"
    try:
        # Without a password one that is wanted is asked for at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            os.path.expanduser(cert), os.path.expanduser(key), lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        return (
            f"{flags[0]} {cert} and {flags[1]} {key} are no certificate and its private key without password: {reason}"
        )
    return ""


def server_files(cert: str, key: str) -> dict[str, str]:
    """Return what ``uvicorn.Config`` takes for them; {} without."""
    if not cert:
        return {}
    return {
        "ssl_certfile": os.path.expanduser(cert),
        "ssl_keyfile": os.path.expanduser(key),
        "loop": "realhf.base.http_guard:HandshakeLoop",
    }


def in_the_clear(host: str, cert: str, flags: tuple[str, str]) -> str:
    """Return a warning for a server that others reach at ``host`` without a certificate; "" for others."""
    if cert or is_loopback_host(host):
        return ""
    return (
        f"listening on {host} without TLS: whoever is on the way reads tokens and rollouts, and can change them; "
        f"give {flags[0]} and {flags[1]}, or keep to a network that you trust"
    )


def believing(ca_file: str) -> ssl.SSLContext:
    """Return what a client checks servers by: the authorities, or the server's own certificate, in a PEM file, and the
    server's name. Raises ValueError naming the file."""
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(ca_file))
    except (OSError, ssl.SSLError) as error:
        reason = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"the file of certificates {ca_file}: {reason}") from None


def with_certificate(url: str, certificate: str) -> str:
    """Return an https address that names the one certificate (PEM) that its server may show; others as they are. It
    stands behind ``#``, so it is never sent."""
    if not url.startswith("https://"):
        return url
    return f"{url}#{base64.urlsafe_b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


def without_certificate(url: str) -> tuple[str, ssl.SSLContext | None]:
    """Return the address, and what to check its server by where it names a certificate: that certificate alone, by
    whatever name or address the server is reached, and whatever the clock says. Raises ValueError for what is no
    certificate."""
    address, mark, encoded = url.partition("#")
    if not mark:
        return url, None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=base64.urlsafe_b64decode(encoded))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{address}: what follows # is no certificate") from None
    return address, context


@contextmanager
def in_memory(pem: str) -> Iterator[str]:
    """Yield a path by which this process reads a certificate and its key, which lie on no disk."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
