"""Lets a process that others connect to keep as many connections as its host allows."""

from __future__ import annotations

import contextlib
import resource


def allow_many_connections() -> int:
    """Raise the limit of open descriptors to what the host allows this process (``ulimit -Hn``); return it. The usual
    limit of 1,024 is that of a program that waits with select(2), and few hundred workers exhaust it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
