"""The loop of a rollout worker, and the groups that it plays: samples, evaluations, failures,
deadlines."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from realhf.api.calls import (
    ALLOCATE,
    EVALUATED,
    AllocateAnswer,
    EvaluatedRequest,
    EvaluationPart,
    RolloutLease,
)
from realhf.api.config import GenConfig
from realhf.api.environment import EnvironmentFailure, EnvironmentSpec, Task
from realhf.api.evaluation import EpisodeResult
from realhf.api.trace import NO_RECORDER, PlayedSample, RolloutRecorder, Tracer, TrainedRows
from realhf.rollout.episode import EpisodeLimits
from realhf.rollout.group_player import (
    FailurePolicy,
    GroupFailed,
    GroupPlayer,
    PlayedGroup,
    failure_policy,
    play_within_deadline,
    sampling_seed,
)
from realhf.rollout.player import EpisodePlayer, TurnAgent
from realhf.rollout.rollout_loop import RolloutLoop
from realhf.transport.errors import CodecError, PeerLost, ProtocolError
from realhf.transport.push_stream import StreamFailed
from realhf.transport.service import ServiceClient, ServiceError, ServiceRequest, ServiceServer
from tests.rollout.scripted_environment import Scripted, Words, World
from tests.rollout.word_chat import WordChat


class FakeMaster:
    """Gives the samples of ``ids`` as they are asked for, then none; ``rejected``: what it was told
    of."""

    def __init__(self, ids: Sequence[str], deadline_s: float = 60.0) -> None:
        self.leases = [RolloutLease(id, 0, order, 0, deadline_s) for order, id in enumerate(ids)]
        self.rejected: dict[str, tuple[str, str]] = {}
        self.asked: list[int] = []
        self.shares: list[EvaluationPart] = []
        self.evaluated: list[EvaluatedRequest] = []
        self.server = ServiceServer("the master", "run", self._answer)

    def _answer(self, request: ServiceRequest) -> None:
        if request.method == "allocate":
            count = request.payload["count"]
            self.asked.append(count)
            shares = self.shares[:count]
            self.shares = self.shares[count:]
            given = self.leases[: count - len(shares)]
            self.leases = self.leases[count - len(shares) :]
            request.reply(
                ALLOCATE.pack_answer(AllocateAnswer(given or (None if shares else []), shares))
            )
        elif request.method == "evaluated":
            self.evaluated.append(EVALUATED.unpack(request.payload))
            request.reply({})
        elif request.payload["id"] == "group refused":
            raise ValueError("refused")
        else:
            self.rejected[request.payload["id"]] = (
                request.payload["outcome"],
                request.payload["message"],
            )
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
        self.loop = RolloutLoop(
            self.client, self.stream, self.players, encode, tracer=Tracer(), timeout_s=60
        )

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


@pytest.mark.slow
async def test_shares_of_an_evaluation_are_played_beside_samples_and_the_master_is_told(
    scene: Any,
) -> None:
    """What of them, and why one was not."""
    run = scene("good", "better", players=2)
    run.master.shares = [
        EvaluationPart(
            7, part, 3, part == 0, 4, ["generation/0"], "heldout", 5, 10, 0.2 if part == 2 else 60.0
        )
        for part in range(3)
    ]
    await run.run()
    told = {request.part: request for request in run.master.evaluated}
    assert set(told) == {0, 1, 2} and {request.evaluation for request in told.values()} == {7}
    assert told[0].greedy and [result.achieved for result in told[0].results] == [True]
    assert "the weights are lost" in told[1].error and told[2].error == "not over after 0.2 s"
    assert sorted(run.stream.pushed) == ["better", "good"] and max(run.master.asked) == 2


@pytest.mark.slow
async def test_a_sample_has_a_deadline_and_its_player_plays_the_next_one(scene: Any) -> None:
    run = scene("slow", "good", players=1, deadline_s=0.2)
    await run.run()
    assert run.master.rejected["slow"] == (
        "timeout",
        "not over after 0.2 s",
    ) and run.stream.pushed == ["good"]


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
    run.loop._player_idle.set()
    with pytest.raises(PeerLost):
        await asyncio.wait_for(playing, 60)
    assert run.players[0].closed and not run.players[0].playing


N = 3


def lease(deadline_s: float = 30.0) -> RolloutLease:
    task = {"task": '{"text": "do it"}', "task_id": "t-1", "task_seed": 5, "group": "easy"}
    return RolloutLease("s1", 0, 4, 0, deadline_s, task)


def player(
    world: World,
    tokens: Any = None,
    name: str = "minimum_group",
    retries: int = 0,
    least: int = 2,
    **spec: Any,
) -> GroupPlayer:
    policy = failure_policy(name, retries, least)
    played = world.spec(**spec)
    agent = TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), "")
    own = EpisodePlayer(
        played,
        "",
        agent,
        N,
        first_slot=10,
        retries=policy.retries,
        message_timeout_s=5.0,
        patience_s=0.0,
    )
    return group_player(own, tokens or Words(), policy, played)


def group_player(
    own: EpisodePlayer,
    tokens: Any,
    policy: FailurePolicy,
    played: EnvironmentSpec,
    recorder: RolloutRecorder = NO_RECORDER,
) -> GroupPlayer:
    return GroupPlayer(
        own,
        tokens,
        group_size=N,
        run_seed=1,
        policy=policy,
        held_out=played,
        pinned=lambda part: tokens,
        recorder=recorder,
        gen=GenConfig(temperature=0.7),
    )


class Kept:
    """A recorder in memory."""

    keeps = True

    def __init__(self) -> None:
        self.samples: list[PlayedSample] = []

    def record_played(self, sample: PlayedSample) -> None:
        self.samples.append(sample)

    def record_trained(self, rows: TrainedRows) -> None:
        raise AssertionError("nothing is trained here")


@pytest.mark.slow
async def test_every_rollout_is_kept_whole_also_of_a_group_that_is_refused_or_too_late() -> None:
    hang = [False]
    kept = Kept()
    world = World(lambda env, message: "hang" if hang[0] and env.number == 0 else None)
    played = replace(world.spec(), tasks=lambda split: TwoTasks())
    own = EpisodePlayer(
        played, "", TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), "be brief"), N, patience_s=0.0
    )
    one = group_player(own, Words(), failure_policy("minimum_group", 0, 2), played, kept)
    await play_within_deadline(one, lease())
    hang[0] = True
    with pytest.raises(GroupFailed):
        await play_within_deadline(one, lease(0.3))
    hang[0] = False
    await one.evaluate(share(0, 2, greedy=True))
    await one.close()
    refused = fails(0, 1)
    failing = EpisodePlayer(
        refused.spec(), "", TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), ""), N, patience_s=0.0
    )
    with pytest.raises(GroupFailed):
        await group_player(
            failing, Words(), failure_policy("minimum_group", 0, 2), refused.spec(), kept
        ).play(lease())
    good, late, *evaluated, bad = kept.samples
    assert (good.id, good.step, good.attempt, good.env, good.split) == (
        "s1",
        1,
        0,
        "scripted",
        "train",
    )
    assert good.sampling["temperature"] == 0.7 and len(good.rollouts) == N
    outcome = good.rollouts[0]
    assert [message["role"] for message in outcome.opening] == ["system", "user"]
    assert [
        (turn.policy_turn.content, turn.messages[0]["content"])
        for turn in outcome.turns
        if turn.policy_turn
    ] == [(turn.text, f"saw {turn.text}") for turn in outcome.turns]
    assert [turn.metrics["progress"] for turn in outcome.turns] == pytest.approx([1 / 3, 2 / 3, 1])
    assert [(o.status, o.reward, o.valid) for o in late.rollouts] == [("timeout", None, False)] * N
    assert [o.status for o in bad.rollouts] == ["internal", "internal", "finished"]
    assert [sample.id for sample in evaluated] == [
        f"eval/greedy/4/{name}/{seed}"
        for name, seed in (("one", 0), ("one", 2), ("one", 4), ("two", 1), ("two", 3))
    ]
    assert {
        (sample.split, sample.step, sample.sampling["temperature"]) for sample in evaluated
    } == {("eval/greedy", 4, 0.0)}


def fails(*members: int, kind: str = "internal") -> World:
    """A world whose first instances with these numbers fail in their first step, and those made
    later do not."""
    return World(
        lambda env, message: EnvironmentFailure(kind, "why") if env.number in members else None
    )


async def test_rollouts_come_in_order_each_with_its_row_and_its_random_numbers() -> None:
    tokens = Words()
    one = player(World(), tokens)
    played = await play_within_deadline(one, lease())
    again = await play_within_deadline(one, lease())
    await one.close()
    assert (
        [o.task_id for o in played.outcomes] == [o.task_id for o in again.outcomes] == ["t-1"] * N
    )
    assert [(o.seed, o.group, o.task_text) for o in played.outcomes] == [(5, "easy", "do it")] * N
    seeds = {request.slot: request.seed for request in tokens.requests}
    assert seeds == {10 + member: sampling_seed(1, "s1", member) for member in range(N)}
    assert len(set(seeds.values())) == N
    assert {request.min_version for request in tokens.requests} == {0}, (
        "no token is older than the admission"
    )
    assert not played.failures and not played.retried
    notes = played.statistics()
    assert (notes["tokens"], notes["turns"], notes["failed"]) == (27, [3] * N, {})


async def test_a_rollout_that_fails_is_played_again_and_both_are_counted() -> None:
    one = player(fails(1, kind="timeout"), retries=2, deterministic=False)
    played = await one.play(lease())
    await one.close()
    assert [o.status for o in played.outcomes] == ["finished"] * N
    assert played.statistics()["failed"] == {"timeout": 1} == played.statistics()["retried"]


async def test_what_a_failed_rollout_means_is_the_policys_affair() -> None:
    played = await player(fails(1)).play(lease())
    assert [o.valid for o in played.outcomes] == [True, False, True] and played.failures == {
        "internal": 1
    }
    for refused, match in (
        (player(fails(1, 2)), "1 of 3 rollouts are valid; internal: why"),
        (player(fails(1), name="retry"), "2 of 3 rollouts are valid"),
    ):
        with pytest.raises(GroupFailed, match=match) as failed:
            await refused.play(lease())
        assert failed.value.outcome == "env_error"
    world = World()
    tokens = Words(broken=True)
    with pytest.raises(GroupFailed, match="policy: no generation worker") as failed:
        await player(world, tokens, name="fail_fast", retries=5).play(lease())
    assert failed.value.outcome == "engine_error" and len(tokens.requests) == N, "no second attempt"


@pytest.mark.slow
async def test_after_a_deadline_the_same_slots_play_the_next_sample() -> None:
    hang = ["hang"]

    def once(env: Scripted, message: Any) -> Any:
        return hang.pop() if hang and env.number == 2 else None

    one = player(World(once))
    with pytest.raises(GroupFailed, match=r"not over after 0\.3 s") as failed:
        await play_within_deadline(one, lease(0.3))
    assert failed.value.outcome == "timeout"
    assert len((await play_within_deadline(one, lease())).outcomes) == N
    await one.close()


@pytest.mark.slow
async def test_a_service_that_comes_back_is_waited_for() -> None:
    away = asyncio.Event()

    world = World(
        on_reset=lambda env: None if away.is_set() else EnvironmentFailure("lost", "no server")
    )
    agent = TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), "")
    own = EpisodePlayer(world.spec(), "", agent, N, patience_s=20.0)
    one = group_player(own, Words(), failure_policy("retry", 0, 1), world.spec())
    waiting = asyncio.create_task(one.play(lease()))
    await asyncio.sleep(0.2)
    assert not waiting.done(), "a sample in front of a dead server waits"
    away.set()
    assert [o.status for o in (await waiting).outcomes] == ["finished"] * N


class TwoTasks:
    """Two templates, each in as many instances as there are seeds."""

    group_of: Mapping[str, str] = {"one": "easy", "two": "hard"}
    groups: Sequence[str] = ("easy", "hard")

    def instantiate(self, template_id: str, seed: int) -> Task:
        return Task(template_id, self.group_of[template_id], {"text": template_id}, seed=seed)


def share(part: int, parts: int, *, greedy: bool = False) -> EvaluationPart:
    return EvaluationPart(0, part, parts, greedy, 4, ["generation/0"], "heldout", 5, 10, 30.0)


async def test_the_shares_of_an_evaluation_are_every_held_out_instance_once() -> None:
    tokens = Words()
    world = World()
    played = replace(world.spec(), tasks=lambda split: TwoTasks())
    own = EpisodePlayer(
        played, "", TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), ""), N, patience_s=0.0
    )
    one = group_player(own, tokens, failure_policy("minimum_group", 0, 2), played)
    results = [result for part in range(3) for result in await one.evaluate(share(part, 3))]
    assert Counter(result.group for result in results) == {"easy": 5, "hard": 5}
    assert all(result.valid and result.turns == 3 for result in results)
    seeds = {request.seed for request in tokens.requests}
    assert len(seeds) == 10, "each episode has its own random numbers"
    again = Words()
    other = group_player(own, again, failure_policy("minimum_group", 0, 2), played)
    for part in range(2):
        await other.evaluate(share(part, 2))
    assert {request.seed for request in again.requests} == seeds, "however it is divided"
    await one.close()


async def test_an_episode_that_its_environment_fails_is_a_result_and_lost_weights_are_none() -> (
    None
):
    world = fails(0, 1, 2)
    played = replace(world.spec(), tasks=lambda split: TwoTasks())
    own = EpisodePlayer(
        played, "", TurnAgent(WordChat(), EpisodeLimits(4, 500, 8), ""), N, patience_s=0.0
    )
    one = group_player(own, Words(), failure_policy("minimum_group", 0, 2), played)
    results = await one.evaluate(share(0, 1))
    assert Counter(result.valid for result in results) == {True: 7, False: 3}
    with pytest.raises(GroupFailed, match="no generation worker"):
        await group_player(own, Words(broken=True), failure_policy("retry", 0, 1), played).evaluate(
            share(0, 1)
        )
    await one.close()
