"""TLS of an HTTP server: its certificate and private key."""

from __future__ import annotations

import os
import ssl

from realhf.base.loopback import is_loopback_host


def certificate_problem(cert: str, key: str, flags: tuple[str, str]) -> str:
    """Return why a server cannot use the certificate in the file ``cert`` with the private key in
    ``key``, naming the flag; "" if it can, or if neither is given. ``flags``: names of the two
    flags."""
    if not cert and not key:
        return ""
    if not cert or not key:
        return f"{flags[not cert]} is given without {flags[bool(cert)]}"
    for path, flag in ((cert, flags[0]), (key, flags[1])):
        try:
            with open(os.path.expanduser(path), "rb"):
                pass
        except OSError as error:
            return f"{flag} {path}: {error.strerror}"
    try:
        # An empty password is given, because otherwise OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            os.path.expanduser(cert), os.path.expanduser(key), lambda: ""
        )
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        return (
            f"{flags[0]} {cert} and {flags[1]} {key} are not a certificate and its private key "
            f"without password: {reason}"
        )
    return ""


def server_files(cert: str, key: str) -> dict[str, str]:
    """Return the arguments of ``uvicorn.Config`` for a certificate and its key; {} without a
    certificate."""
    if not cert:
        return {}
    return {
        "ssl_certfile": os.path.expanduser(cert),
        "ssl_keyfile": os.path.expanduser(key),
        "loop": "realhf.web.connections:HandshakeLoop",
    }


def plaintext_warning(host: str, cert: str, flags: tuple[str, str]) -> str:
    """Return a warning if other machines can reach the server at ``host`` and it has no
    certificate; else ""."""
    if cert or is_loopback_host(host):
        return ""
    return (
        f"listening on {host} without TLS: whoever is on the way reads tokens and rollouts, and "
        f"can change them; "
        f"give {flags[0]} and {flags[1]}, or keep to a network that you trust"
    )
