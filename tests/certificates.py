"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str = "server", host: str = "IP:127.0.0.1") -> tuple[str, str]:
    """Files with a certificate for ``host`` (as openssl writes alternative names) and its key, in
    ``folder``."""
    cert = folder / f"{name}.pem"
    key = folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=test", "-addext", f"subjectAltName={host}", "-config", "/dev/null",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return str(cert), str(key)
