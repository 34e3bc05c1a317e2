"""Forms batches from plain lists of dicts, for programs that want the rule without the server.

Source: docs/reference/trajectory.md 1.1, 3.3, 3.4, 3.6, 3.12.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.trajectory.base.records import Encoding, GroupRecord, Payload, Place
from realhf.trajectory.batching.exact_selection import select_exact, unservable
from realhf.trajectory.batching.fair_share import FairShare
from realhf.trajectory.batching.minimum_selection import select_with_minimums
from realhf.trajectory.batching.packs import NotSelected
from realhf.trajectory.batching.queue_index import QueueIndex
from realhf.trajectory.batching.strict_selection import select_strict, select_strict_with_minimums

Group = Mapping[str, Any]
_NO_PAYLOAD = Payload(b"", 0, Encoding.JSON, 0, 0)


def select_batch(
    groups: Sequence[Group], batch_size: int, envs: Sequence[Mapping[str, Any]] = (), *, strict: bool = False
) -> tuple[list[Group] | None, list[Group], str]:
    """Return the next batch of a queue (oldest first) or None, what remains of the queue, and why there is no batch.

    A group is a mapping with a list of ``tokens`` and, where it has one, an ``env_id``; an environment has
    ``registered_id``, and may have ``connected``, ``weight`` and ``min_batch_allocation``. Groups of a size that can
    never be served stay where they are. ``strict``: the original's packing rule.
    """
    index = QueueIndex()
    for order, group in enumerate(groups):
        size = len(group["tokens"])
        if unservable(size, batch_size, strict) is None:
            index.add(GroupRecord(order, order, Place.QUEUE, group.get("env_id"), size, _NO_PAYLOAD, 0, 0.0))
    if batch_size < 1:
        return None, list(groups), "batch_size_not_positive"
    connected = [env for env in envs if env.get("connected", True)]
    minimums = [
        (env["registered_id"], min(1e12, max(0.0, env["min_batch_allocation"])))
        for env in connected
        if env.get("min_batch_allocation") is not None
    ]
    fair = _fair_share(connected, strict)
    if minimums:
        select = select_strict_with_minimums if strict else select_with_minimums
        selected = select(index, batch_size, fair, minimums)
    else:
        selected = (select_strict if strict else select_exact)(index, batch_size, fair)
    if isinstance(selected, NotSelected):
        return None, list(groups), selected.reason
    taken = {record.id for record in selected.groups}
    rest = [group for order, group in enumerate(groups) if order not in taken]
    return [groups[record.id] for record in selected.groups], rest, ""


def _fair_share(envs: Sequence[Mapping[str, Any]], strict: bool) -> FairShare:
    """Set shares by weight with nothing served so far; in strict mode the order of arrival alone counts."""
    if strict:
        return FairShare({}, {}, 0.0, float("inf"))
    weights: dict[int | None, float] = {env["registered_id"]: max(0.0, env.get("weight", 1.0)) for env in envs}
    total = sum(weights.values()) + 1.0
    return FairShare({key: max(0.01, weight / total) for key, weight in weights.items()}, {}, 0.0, 1.0 / total)
