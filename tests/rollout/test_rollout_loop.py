"""The life of a rollout worker against a real service; players and stream are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from realhf.api.calls import ALLOCATE, EVALUATED, AllocateAnswer, EvaluatedRequest, EvaluationPart, RolloutLease
from realhf.api.evaluation import EpisodeResult
from realhf.api.trace import NoTrace
from realhf.rollout.group_player import GroupFailed, PlayedGroup
from realhf.rollout.rollout_loop import RolloutLoop
from realhf.transport.errors import CodecError, PeerLost, ProtocolError
from realhf.transport.push_stream import StreamFailed
from realhf.transport.service import Request, ServiceClient, ServiceError, ServiceServer


class FakeMaster:
    """Gives the samples of ``ids`` as they are asked for, then none; ``rejected``: what it was told of."""

    def __init__(self, ids: Sequence[str], deadline_s: float = 60.0) -> None:
        self.leases = [RolloutLease(id, 0, order, 0, deadline_s) for order, id in enumerate(ids)]
        self.rejected: dict[str, tuple[str, str]] = {}
        self.asked: list[int] = []
        self.shares: list[EvaluationPart] = []
        self.evaluated: list[EvaluatedRequest] = []
        self.server = ServiceServer("the master", "run", self._answer)

    def _answer(self, request: Request) -> None:
        if request.method == "allocate":
            count = request.payload["count"]
            self.asked.append(count)
            shares, self.shares = self.shares[:count], self.shares[count:]
            given, self.leases = self.leases[: count - len(shares)], self.leases[count - len(shares) :]
            request.reply(ALLOCATE.pack_answer(AllocateAnswer(given or (None if shares else []), shares)))
        elif request.method == "evaluated":
            self.evaluated.append(EVALUATED.unpack(request.payload))
            request.reply({})
        elif request.payload["id"] == "group refused":
            raise ValueError("refused")
        else:
            self.rejected[request.payload["id"]] = request.payload["outcome"], request.payload["message"]
            request.reply({})


class FakePlayer:
    """What it does is the sample's name."""

    def __init__(self) -> None:
        self.closed = False
        self.playing = False

    async def play(self, lease: RolloutLease) -> PlayedGroup:
        assert not self.playing, "one sample at a time"
        self.playing = True
        try:
            await asyncio.sleep(0)
            if lease.id.startswith("group"):
                raise GroupFailed("internal", "no server")
            if lease.id.startswith("broken"):
                raise PeerLost("something inside")
            if lease.id.startswith("slow"):
                await asyncio.sleep(600)
        finally:
            self.playing = False
        return PlayedGroup([])

    async def evaluate(self, part: EvaluationPart) -> list[EpisodeResult]:
        assert not self.playing, "one sample or share at a time"
        if part.part == 1:
            raise GroupFailed("engine_error", "the weights are lost")
        if part.part == 2:
            await asyncio.sleep(600)
        return [EpisodeResult("easy", True, part.greedy, 1.0, 2)]

    async def close(self) -> None:
        self.closed = True


class FakeStream:
    def __init__(self) -> None:
        self.pushed: list[str] = []

    async def push(self, id: str, attempt: int, frames: Sequence[Any], *, timeout_s: float) -> None:
        if id.startswith("large"):
            raise ProtocolError("a frame is too large")
        if id.startswith("stuck"):
            raise TimeoutError("the trainer gives no credit")
        if id.startswith("dead"):
            raise StreamFailed("closed")
        self.pushed.append(id)


def encode(lease: RolloutLease, played: PlayedGroup) -> list[bytes]:
    if lease.id.startswith("odd"):
        raise CodecError("too many keys")
    return [b"x"]


class Scene:
    def __init__(self, ids: Sequence[str], *, players: int = 2, deadline_s: float = 60.0) -> None:
        self.master = FakeMaster(ids, deadline_s)
        self.players = [FakePlayer() for _ in range(players)]
        self.stream = FakeStream()
        self.client = ServiceClient(self.master.server.endpoint, "the master", "me", "run")
        self.loop = RolloutLoop(self.client, self.stream, self.players, encode, tracer=NoTrace(), timeout_s=60)

    async def run(self) -> None:
        await asyncio.wait_for(self.loop.run(), 60)


@pytest.fixture
async def scene() -> AsyncIterator[Any]:
    made: list[Scene] = []

    def make(*ids: str, **options: Any) -> Scene:
        made.append(Scene(ids, **options))
        return made[-1]

    yield make
    for one in made:
        one.client.close()
        await asyncio.to_thread(one.master.server.close)


async def test_everything_that_is_given_is_played_and_the_players_are_closed(scene: Any) -> None:
    ids = [f"s{i}" for i in range(20)]
    run = scene(*ids, players=3)
    await run.run()
    assert sorted(run.stream.pushed) == sorted(ids) and run.loop.played == 20
    assert max(run.master.asked) == 3 and min(run.master.asked) >= 1 and run.master.rejected == {}
    assert all(player.closed for player in run.players)


async def test_what_fails_ends_its_attempt_and_the_loop_goes_on(scene: Any) -> None:
    run = scene("group", "broken", "odd", "large", "stuck", "good", players=1)
    await run.run()
    assert run.stream.pushed == ["good"] and run.loop.played == 1
    outcomes = {id: outcome for id, (outcome, _) in run.master.rejected.items()}
    assert outcomes == {
        "group": "internal",
        "broken": "rejected",
        "odd": "rejected",
        "large": "rejected",
        "stuck": "rejected",
    }
    assert "too many keys" in run.master.rejected["odd"][1]


async def test_shares_of_an_evaluation_are_played_beside_samples_and_the_master_is_told(scene: Any) -> None:
    """What of them, and why one was not."""
    run = scene("good", "better", players=2)
    run.master.shares = [
        EvaluationPart(7, part, 3, part == 0, 4, ["generation/0"], "heldout", 5, 10, 0.2 if part == 2 else 60.0)
        for part in range(3)
    ]
    await run.run()
    told = {request.part: request for request in run.master.evaluated}
    assert set(told) == {0, 1, 2} and {request.evaluation for request in told.values()} == {7}
    assert told[0].greedy and [result.achieved for result in told[0].results] == [True]
    assert "the weights are lost" in told[1].error and told[2].error == "not over after 0.2 s"
    assert sorted(run.stream.pushed) == ["better", "good"] and max(run.master.asked) == 2


async def test_a_sample_has_a_deadline_and_its_player_plays_the_next_one(scene: Any) -> None:
    run = scene("slow", "good", players=1, deadline_s=0.2)
    await run.run()
    assert run.master.rejected["slow"] == ("timeout", "not over after 0.2 s") and run.stream.pushed == ["good"]


@pytest.mark.parametrize(("id", "error"), [("dead", StreamFailed), ("group refused", ServiceError)])
async def test_without_stream_or_master_the_loop_ends_with_everything(
    scene: Any, id: str, error: type[Exception]
) -> None:
    run = scene("slow", id, players=2)
    with pytest.raises(error):
        await run.run()
    assert all(player.closed and not player.playing for player in run.players)


async def test_a_master_that_dies_ends_the_loop(scene: Any) -> None:
    run = scene("slow", players=1)
    playing = asyncio.create_task(run.loop.run())
    while not run.players[0].playing:
        await asyncio.sleep(0)
    await asyncio.to_thread(run.master.server.close)
    run.players.append(FakePlayer())
    run.loop._idle.append(run.players[1])
    run.loop._freed.set()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(playing, 60)
    assert run.players[0].closed and not run.players[0].playing
