"""Makes the certificate that all processes of a run share, see ``tls``."""

from __future__ import annotations

import subprocess

from realhf.transport.errors import NetworkError

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
