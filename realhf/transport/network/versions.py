"""Compares what two processes of a run are made of."""

from __future__ import annotations

import os
import sys
from typing import Any

import realhf
from realhf.transport.envelope import PROTOCOL


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run: package, Python (without its last number)
    and protocol."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"realhf": realhf.__version__, "Python": python, "protocol": str(PROTOCOL)}


def differences(theirs: Any, host: str) -> str:
    """Say how the versions of a process on ``host`` differ from those here, with both; empty if they do not."""
    own, here = own_versions(), os.uname().nodename
    other = theirs if isinstance(theirs, dict) else {}
    found = [
        f"{name} {other.get(name, 'of an unknown version')!s:.40} on {host:.80}, {version} on {here}"
        for name, version in own.items()
        if other.get(name) != version
    ]
    return "; ".join(found)
