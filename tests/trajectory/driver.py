"""Drives a state, or an engine over a store, without HTTP: groups of a given size, registrations,
pulls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from isal import isal_zlib

from realhf.trajectory.records import (
    Encoding,
    GroupPlace,
    GroupRecord,
    Incoming,
    Payload,
    PayloadRef,
    StateOptions,
)
from realhf.trajectory.state import delivery, push, registry
from realhf.trajectory.state.engine import StateEngine
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.base import Changes, TrajectoryStore
from realhf.web.refusal import Refusal
from tests.trajectory.conftest import ENV, REGISTRATION

AnyStore = TypeVar("AnyStore", bound=TrajectoryStore)


class Driver:
    """A state with a clock that the test moves. ``now`` in seconds."""

    def __init__(self, **options: Any) -> None:
        self.state = TrajectoryState(StateOptions(**options))
        self.now = 1000.0

    def register(self, join: bool = False, **changed: Any) -> dict[str, Any]:
        return registry.register(self.state, self.now, REGISTRATION | changed, join)[0]

    def start(self, **changed: Any) -> None:
        """A registered trainer that has asked for a batch once."""
        self.register(**changed)
        assert isinstance(self.pull(), delivery.NoBatch)

    def at_version(self, version: int) -> None:
        registry.set_policy_version(self.state, self.now, version)

    def env(self, group_size: int = 4, **changed: Any) -> int:
        request = ENV | {"group_size": group_size} | changed
        body, _ = registry.register_env(self.state, self.now, request)
        assert body["status"] == "success"
        return body["env_id"]

    def push(
        self,
        *sizes: int,
        env: int | None = None,
        version: int | None = None,
        key: str | None = None,
        fingerprint: str = "f",
        listed: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        groups = [Incoming(b"x" * 10, Encoding.JSON, 7, 0, size, env, version) for size in sizes]
        listed = len(sizes) != 1 if listed is None else listed
        refs = [group.data for group in groups]
        return push.push(self.state, self.now, groups, refs, listed, key, fingerprint)

    def pull(self, who: str = "t", **request: Any) -> delivery.LeasedBatch | delivery.NoBatch:
        anonymous = request.pop("anonymous", False)
        return delivery.pull(self.state, self.now, delivery.PullRequest(who, anonymous, **request))

    def batch(self, who: str = "t", sent: bool = True, **request: Any) -> delivery.LeasedBatch:
        """A batch that must be there."""
        batch = self.pull(who, **request)
        assert isinstance(batch, delivery.LeasedBatch), batch
        if sent:
            delivery.mark_sent(self.state, self.now, batch)
        return batch


def sizes(batch: delivery.LeasedBatch) -> list[int]:
    return [group.size for group in batch.groups]


def ids(batch: delivery.LeasedBatch) -> list[int]:
    return [group.id for group in batch.groups]


@contextmanager
def refused(status: int) -> Iterator[pytest.ExceptionInfo[Refusal]]:
    with pytest.raises(Refusal) as refusal:
        yield refusal
    assert refusal.value.status == status


async def opening(store: AnyStore) -> AnyStore:
    await store.open()
    return store


async def opened(store: TrajectoryStore, *, registered: bool = True, **options: Any) -> StateEngine:
    """An engine over a store, with a registered trainer unless told otherwise."""
    engine = StateEngine(store, StateOptions(**options))
    await engine.open()
    if registered:
        await engine.write(registry.register, REGISTRATION, False)
    return engine


def incoming(data: bytes = b"x", size: int = 4) -> Incoming:
    return Incoming(data, Encoding.JSON, 7, isal_zlib.crc32(data), size, None, None)


async def pushed(engine: StateEngine, *data: bytes, size: int = 4) -> list[PayloadRef]:
    """Push a list of groups with these payloads; return where they lie."""
    refs = await engine.store.stage(data)
    await engine.write(push.push, [incoming(each, size) for each in data], refs, True)
    return refs


def data(number: int, size: int = 1000) -> bytes:
    return bytes([number % 251]) * size


async def put(
    store: TrajectoryStore, numbers: Iterable[int], size: int = 1000, **more: Any
) -> list[GroupRecord]:
    """Stage and commit groups with ids and payloads of these numbers."""
    contents = {number: data(number, size) for number in numbers}
    refs = await store.stage(list(contents.values()))
    payloads = [
        Payload(ref, size, Encoding.JSON, 7, isal_zlib.crc32(content))
        for ref, content in zip(refs, contents.values(), strict=True)
    ]
    groups = [
        GroupRecord(number, number, GroupPlace.QUEUE, None, 4, payload, 0, 1.5)
        for number, payload in zip(contents, payloads, strict=True)
    ]
    await store.commit(Changes(rows={("groups", group.id): group for group in groups}, **more))
    return groups
