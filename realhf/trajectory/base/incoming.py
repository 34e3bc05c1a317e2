"""Describes one pushed group as validation found it."""

from __future__ import annotations

import msgspec

from realhf.trajectory.base.records import Encoding


class Incoming(msgspec.Struct, frozen=True):
    """Holds a valid group: its canonical bytes (see ``records.Payload``) and what routing needs. ``size`` is the number
    of sequences, ``len(tokens)``; a ``policy_version`` of None is replaced by the current one."""

    data: bytes
    encoding: Encoding
    present: int
    crc: int
    size: int
    env_id: int | None
    policy_version: int | None
