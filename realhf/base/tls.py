"""Certificates as an HTTP client checks them, and as a run passes them on."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME: the certificate of a run is as old as the run, whatever the clock of a
host says."""


def believing(ca_file: str) -> ssl.SSLContext:
    """Return what a client checks servers by: the authorities, or the server's own certificate, in
    a PEM file, and the server's name. Raises ValueError naming the file."""
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(ca_file))
    except (OSError, ssl.SSLError) as error:
        reason = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"the file of certificates {ca_file}: {reason}") from None


def with_certificate(url: str, certificate: str) -> str:
    """Return an https address that names the one certificate (PEM) that its server may show; others
    as they are. It stands behind ``#``, so it is never sent."""
    if not url.startswith("https://"):
        return url
    return f"{url}#{base64.urlsafe_b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


def without_certificate(url: str) -> tuple[str, ssl.SSLContext | None]:
    """Return the address, and what to check its server by where it names a certificate: that
    certificate alone, by whatever name or address the server is reached, and whatever the clock
    says. Raises ValueError for what is no certificate."""
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
