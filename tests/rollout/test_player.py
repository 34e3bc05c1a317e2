"""Many episodes on a few slots: order, retries, lockstep and free play, environments that fail and
are resumed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from realhf.api.environment import AssistantMessage, EnvironmentFailure, Task, Turn
from realhf.api.model import GenOutput, GenRequest
from realhf.rollout.blocking_player import BlockingPlayer
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.player import EpisodePlayer, ReplayDiverged, SlotEnvironment, TurnAgent
from tests.rollout.scripted_environment import Scripted, Words, World, said
from tests.rollout.word_chat import CUE, WordChat

LIMITS = EpisodeLimits(4, 500, 20)


def wanted(count: int) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(n, Task(f"t-{n}", payload={"text": f"task {n}"}, seed=n), n)
        for n in range(count)
    ]


def player(world: World, size: int = 3, retries: int = 0, **spec: Any) -> EpisodePlayer:
    return EpisodePlayer(
        world.spec(**spec),
        "",
        TurnAgent(WordChat(), LIMITS, ""),
        size,
        first_slot=10,
        retries=retries,
        patience_s=0.0,
    )


class Batches:
    """A batch engine that says "go" to everybody and records every batch: slot and task of each
    request."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.batches: list[list[tuple[int, str]]] = []
        self.freed: list[int] = []
        self.delay_s = delay_s

    def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
        assert round_index == len(self.batches)
        time.sleep(self.delay_s)
        self.batches.append(
            [(r.slot, "".join(map(chr, r.token_ids[: r.token_ids.index(CUE)]))) for r in requests]
        )
        return [said("go") for _ in requests]

    def free(self, slots: Sequence[int]) -> None:
        self.freed += slots


def jittery(world: World) -> World:
    """The same world, whose answers take a random time."""

    class Slow(Scripted):
        async def _perhaps(self, told: Any) -> Any:
            await asyncio.sleep(random.random() * 0.004)
            return await super()._perhaps(told)

    spec = world.spec

    def slow_spec(**changed: Any) -> Any:
        from dataclasses import replace

        return replace(spec(**changed), make=lambda address: Slow(world))

    world.spec = slow_spec  # type: ignore[method-assign]
    return world


async def test_outcomes_come_in_order_on_slots_of_their_own() -> None:
    world = World()
    tokens = Words()
    own = player(world)
    played = await own.play(wanted(7), tokens)
    assert [outcome.task_id for outcome in played.outcomes] == [f"t-{n}" for n in range(7)]
    assert world.made == 3, "an instance plays one episode after another"
    assert {request.slot for request in tokens.requests} == {10, 11, 12} == {*tokens.freed}
    assert {request.seed for request in tokens.requests} == {*range(7)}
    assert not played.failures and not played.retried
    await own.close()
    assert world.closed == 3


async def test_an_environment_may_allow_fewer_instances() -> None:
    world = World()
    own = player(world, size=8, concurrency=2)
    await own.play(wanted(5), Words())
    assert own.size == 2 and world.made == 2


async def test_a_failed_episode_is_played_again_and_both_are_counted() -> None:
    left = [EnvironmentFailure("lost", "gone")]

    def once(env: Scripted, message: Any) -> Any:
        return left.pop() if left and env.seed == 1 else None

    played = await player(World(once), retries=1, deterministic=False).play(wanted(3), Words())
    assert [outcome.status for outcome in played.outcomes] == ["finished"] * 3
    assert played.failures == {"lost": 1} == played.retried


async def test_one_that_fails_for_good_is_an_outcome_and_never_a_reward() -> None:
    world = World(lambda env, message: ValueError("bug") if env.seed == 1 else None)
    played = await player(world, retries=1).play(wanted(3), Words())
    assert [outcome.valid for outcome in played.outcomes] == [True, False, True]
    assert (played.outcomes[1].status, played.outcomes[1].reward) == ("internal", None)
    assert played.failures == {"internal": 2}
    broken = await player(World()).play(wanted(1), Words(broken=True))
    assert (broken.outcomes[0].status, broken.outcomes[0].reward) == ("policy", None)


async def test_an_error_that_is_no_failure_ends_all_episodes_and_is_raised() -> None:
    class Buggy:
        async def play(self, env: Any, request: Any, llm: Any, slot: int) -> Any:
            await asyncio.sleep(0 if slot == 10 else 600)
            raise KeyError("a bug of the agent")

    own = EpisodePlayer(World().spec(), "", Buggy(), 3, first_slot=10)
    with pytest.raises(KeyError, match="a bug of the agent"):
        await asyncio.wait_for(own.play(wanted(3), Words()), 60)


def test_lockstep_batches_depend_on_nothing_but_what_is_said() -> None:
    found = []
    for world in (World(), jittery(World()), jittery(World())):
        engine = Batches()
        blocking = BlockingPlayer(player(world))
        outcomes = blocking.play(wanted(8), engine).outcomes
        blocking.close()
        assert [outcome.task_id for outcome in outcomes] == [f"t-{n}" for n in range(8)]
        found.append(engine.batches)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == [(10, "task 0"), (11, "task 1"), (12, "task 2")]
    assert [len(batch) for batch in found[0]] == [3, 3, 3, 3, 3, 3, 2, 2, 2]


@pytest.mark.slow
def test_in_free_play_a_slow_environment_holds_up_only_its_own_episode() -> None:
    def slow(env: Scripted) -> Any:
        return "hang" if env.seed == 0 else None

    world = World(on_reset=slow)
    spec = world.spec()
    own = EpisodePlayer(
        spec, "", TurnAgent(WordChat(), LIMITS, ""), 3, message_timeout_s=0.3, patience_s=0.0
    )
    engine = Batches()
    blocking = BlockingPlayer(own)
    outcomes = blocking.play(wanted(6), engine, lockstep=False).outcomes
    blocking.close()
    assert [outcome.status for outcome in outcomes] == ["timeout"] + ["finished"] * 5


def test_an_error_of_the_engine_is_raised_and_the_player_goes_on() -> None:
    class Broken(Batches):
        def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
            raise RuntimeError("out of memory")

    blocking = BlockingPlayer(player(World()))
    with pytest.raises(RuntimeError, match="out of memory"):
        blocking.play(wanted(4), Broken())
    engine = Batches()
    assert all(outcome.valid for outcome in blocking.play(wanted(4), engine).outcomes)
    assert {10, 11, 12} <= set(engine.freed)
    blocking.close()
    blocking.close()


@pytest.mark.slow
def test_an_environment_that_blocks_the_loop_is_named_with_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("realhf.rollout.blocking_player._CHECK_S", 0.05)
    over = threading.Event()
    look = BlockingPlayer._check_loop

    def looked(player: BlockingPlayer) -> None:
        try:
            look(player)
        except RuntimeError:
            over.set()
            raise

    monkeypatch.setattr(BlockingPlayer, "_check_loop", looked)

    def blocks(env: Scripted, message: Any) -> Any:
        return over.wait(60) and None

    agent = TurnAgent(WordChat(), LIMITS, "")
    blocking = BlockingPlayer(
        EpisodePlayer(World(blocks).spec(), "", agent, 2, message_timeout_s=0.3)
    )
    try:
        with pytest.raises(
            RuntimeError,
            match=r"blocked the event loop .* s \(.*test_player\.py, line \d+, in blocks",
        ):
            blocking.play(wanted(2), Batches())
    finally:
        over.set()
        blocking.close()


def test_one_run_at_a_time_and_nothing_is_left_running() -> None:
    before = threading.active_count()
    blocking = BlockingPlayer(player(World()))
    second: list[Any] = []

    class Nosy(Batches):
        def generate(self, requests: Sequence[GenRequest], round_index: int) -> list[GenOutput]:
            with pytest.raises(RuntimeError, match="one run at a time"):
                blocking.play(wanted(1), self)
            second.append(True)
            return super().generate(requests, round_index)

    blocking.play(wanted(1), Nosy())
    blocking.close()
    assert second and threading.active_count() == before


FAILED = {
    kind: EnvironmentFailure(kind, "why") for kind in ("unavailable", "timeout", "lost", "capacity")
}


def slot(
    world: World, retries: int = 0, *, deterministic: bool = True, **options: Any
) -> SlotEnvironment:
    options = {"message_timeout_s": 5.0, "patience_s": 0.0, **options}
    env = SlotEnvironment("scripted", lambda: Scripted(world), **options)
    env.prepare(retries, deterministic=deterministic)
    return env


def says(text: str) -> AssistantMessage:
    return AssistantMessage(text, text=text)


def tricks(told: dict[tuple[int, str], Any]) -> World:
    """A world in which instance n answers a message once as told."""
    return World(lambda env, message: told.pop((env.number, message.content), None))


async def test_a_step_that_was_not_executed_is_sent_again() -> None:
    left = [FAILED["unavailable"]] * 2
    world = World(lambda env, message: left.pop() if left else None)
    env = slot(world)
    await env.reset({}, seed=1)
    assert (await env.step(says("a"))).messages[0]["content"] == "saw a"
    assert env.failures == {"unavailable": 2} and env.resumed == 0
    assert world.log == [(0, "reset"), (0, "a"), (0, "a"), (0, "a")]


@pytest.mark.parametrize(("trick", "kind"), [(FAILED["lost"], "lost"), ("hang", "timeout")])
async def test_a_lost_episode_is_resumed_by_replay(trick: Any, kind: str) -> None:
    world = tricks({(0, "b"): trick})
    env = slot(world, retries=1, message_timeout_s=0.1)
    await env.reset({"text": "task"}, seed=7)
    await env.step(says("a"))
    last = await env.step(says("b"))
    assert last.metrics == {"progress": 2 / 3}
    assert env.failures == {kind: 1} and env.resumed == 1 and world.closed == 1
    assert world.log == [(0, "reset"), (0, "a"), (0, "b"), (1, "reset"), (1, "a"), (1, "b")]


async def test_a_loss_during_the_replay_is_one_more_loss() -> None:
    world = tricks(
        {(0, "b"): FAILED["lost"], (1, "a"): FAILED["lost"], (2, "b"): FAILED["unavailable"]}
    )
    env = slot(world, retries=2)
    await env.reset({}, seed=1)
    await env.step(says("a"))
    await env.step(says("b"))
    assert env.failures == {"lost": 2, "unavailable": 1} and env.resumed == 1


async def test_the_retries_are_bounded_and_the_failure_is_named() -> None:
    world = World(lambda env, message: FAILED["lost"])
    env = slot(world, retries=2)
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure, match="why") as end:
        await env.step(says("a"))
    assert end.value.kind == "lost" and env.failures == {"lost": 3} and world.made == 3


async def test_another_answer_in_the_replay_is_a_failure_of_the_environment() -> None:
    stranger = Turn([{"role": "user", "content": "another world"}], reward=0.25)
    env = slot(tricks({(0, "b"): FAILED["lost"], (1, "a"): stranger}), retries=1)
    await env.reset({}, seed=1)
    await env.step(says("a"))
    with pytest.raises(ReplayDiverged, match=r"turn 0 was answered .*saw a.*another world"):
        await env.step(says("b"))
    assert env.failures == {"lost": 1, "diverged": 1}


async def test_an_environment_that_is_not_deterministic_is_not_resumed() -> None:
    world = tricks({(0, "a"): FAILED["lost"]})
    env = slot(world, retries=3, deterministic=False)
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure):
        await env.step(says("a"))
    assert world.made == 1


async def test_a_service_that_is_away_is_waited_for_no_longer_than_the_patience() -> None:
    away = [FAILED["lost"], FAILED["capacity"]]
    world = World(on_reset=lambda env: away.pop(0) if away else None)
    env = slot(world, patience_s=5.0)
    await env.reset({}, seed=1)
    assert world.made == 3 and not env.resumed
    env = slot(World(on_reset=lambda env: FAILED["lost"]), patience_s=0.1)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure):
        await env.reset({}, seed=1)
    assert 0.05 < time.monotonic() - began < 30


@pytest.mark.parametrize("where", ["reset", "step"])
async def test_an_exception_names_the_environment_and_the_line(where: str) -> None:
    def broken(*_: Any) -> Any:
        return KeyError("no such row")

    world = World(broken) if where == "step" else World(on_reset=broken)
    env = slot(world, retries=0)
    with pytest.raises(
        EnvironmentFailure, match=rf"environment scripted: {where}: KeyError: .*\.py, line \d+"
    ) as end:
        await env.reset({}, seed=1)
        await env.step(says("a"))
    assert end.value.kind == "internal"


async def test_a_timeout_of_the_environments_own_is_one_too() -> None:
    env = slot(World(lambda env, message: TimeoutError("own deadline")))
    await env.reset({}, seed=1)
    with pytest.raises(EnvironmentFailure, match="own deadline") as end:
        await env.step(says("a"))
    assert end.value.kind == "timeout"


async def test_closing_is_bounded_and_never_raises() -> None:
    class Stubborn(Scripted):
        async def close(self) -> None:
            raise RuntimeError("no")

    world = World()
    env = SlotEnvironment(
        "scripted",
        lambda: Stubborn(world),
        message_timeout_s=1.0,
        patience_s=0.0,
    )
    await env.reset({}, seed=1)
    await env.close()
    await env.close()
