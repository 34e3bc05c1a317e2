"""Verification of server certificates in HTTP clients, and certificates embedded in URLs."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL flag X509_V_FLAG_NO_CHECK_TIME, which turns off the check of validity periods. A run's
certificate is valid for that run even if a host's clock is wrong."""


def context_trusting(ca_file: str) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in a PEM file (of authorities or of the
    server itself) and checks the server's name.

    Raises ValueError that names the file.
    """
    try:
        return ssl.create_default_context(cafile=os.path.expanduser(ca_file))
    except (OSError, ssl.SSLError) as error:
        reason = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"the file of certificates {ca_file}: {reason}") from None


def embed_certificate(url: str, certificate: str) -> str:
    """Add the server's certificate (PEM) to an https URL as its fragment, which clients never send.
    Return other URLs unchanged."""
    if not url.startswith("https://"):
        return url
    return f"{url}#{base64.urlsafe_b64encode(ssl.PEM_cert_to_DER_cert(certificate)).decode()}"


def split_certificate(url: str) -> tuple[str, ssl.SSLContext | None]:
    """Split a URL into (URL without certificate, TLS context that accepts only the certificate in
    the URL's fragment).

    The context is None if there is no certificate. It does not check the server's name and the
    validity period. Raises ValueError for an invalid certificate.
    """
    address, mark, encoded = url.partition("#")
    if not mark:
        return url, None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=base64.urlsafe_b64decode(encoded))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{address}: what follows # is not a certificate") from None
    return address, context


@contextmanager
def in_memory_file(pem: str) -> Iterator[str]:
    """Context manager that yields a path from which this process can read the certificate and key
    ``pem``. They are kept in memory, not on disk."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
