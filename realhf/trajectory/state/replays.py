"""Makes requests idempotent: a repeated request with the same key gets the first answer and changes nothing.

The key is stored in the same commit as the data. The fingerprint tells a repeat from a mistake: CRC-32 and length of
the body, which find a client's bug and are not meant to resist an attack.

Source: docs/reference/trajectory.md 3.10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from realhf.trajectory.base.records import Replay
from realhf.trajectory.base.refusal import Refusal
from realhf.trajectory.state.server_state import TrajectoryState

MAX_KEY_LENGTH = 128
Answer = tuple[dict[str, Any], dict[str, str]]


class NotYet(NamedTuple):
    """Is an ``Answer`` that asks the client to try again, so it is not stored for repeats."""

    body: dict[str, Any]
    headers: dict[str, str]


def once(
    state: TrajectoryState, now: float, key: str | None, fingerprint: str, command: Callable[..., Answer], *args: Any
) -> tuple[Answer, bool]:
    """Return the answer of ``command(state, now, *args)`` and whether it is a repeated one. Raises Refusal 422 when the
    key came with another request, and what the command raises; only a final answer is stored."""
    if key is None:
        return command(state, now, *args), False
    replay = state.replays.get(key)
    if replay is not None and now - replay.stored_at <= state.options.replay_ttl_s:
        if replay.fingerprint != fingerprint:
            raise Refusal(422, "this Idempotency-Key was used for another request")
        state.counters["replayed"] += 1
        return (msgspec.json.decode(replay.body), replay.headers | {"Idempotency-Replayed": "true"}), True
    if replay is not None:
        state.delete("replays", key)
    answer = command(state, now, *args)
    if isinstance(answer, NotYet):
        return answer, False
    body, headers = answer
    state.put("replays", key, Replay(key, fingerprint, encode_body(body), headers, now))
    return (body, headers), False


def encode_body(body: dict[str, Any]) -> bytes:
    """Encode an answer as JSON; the 128-bit ``uuid`` of a registration is beyond msgspec's integers."""
    number = body.get("uuid")
    return b'{"uuid":%d}' % number if number is not None else msgspec.json.encode(body)
