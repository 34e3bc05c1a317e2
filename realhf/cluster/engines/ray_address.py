"""Knows the address of a Ray cluster, without Ray."""

from __future__ import annotations

import re
import socket

from realhf.base.extras import install_command
from realhf.cluster.errors import ClusterError

ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}")
REACH_S = 5.0
NO_RAY = f"scheduler=ray: Ray is not installed here: {install_command('ray')}"


def reach(address: str) -> None:
    """Raise ClusterError where nothing listens: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error) or f"no answer within {REACH_S:g} s"
        raise ClusterError(f"scheduler.ray={address}: no Ray cluster is reached there: {reason}") from None
