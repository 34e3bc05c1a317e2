"""What validation learns about one pushed group."""

from __future__ import annotations

import msgspec

from realhf.trajectory.base.records import Encoding


class Incoming(msgspec.Struct, frozen=True):
    """A valid group: its canonical bytes (see ``records.Payload``) and what routing needs. ``size``: number of
    sequences, ``len(tokens)``; ``policy_version`` None: stamp it with the current one."""

    data: bytes
    encoding: Encoding
    present: int
    crc: int
    size: int
    env_id: int | None
    policy_version: int | None
