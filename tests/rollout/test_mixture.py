"""Episodes of a mixture: the limits of each environment, and its own numbers."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from realhf.api.environment import EnvironmentFailure, EnvironmentPart, Task, TaskLimits
from realhf.api.evaluation import EpisodeResult, evaluation_report
from realhf.api.model import GenRequest
from realhf.api.rollout import RolloutOutcome
from realhf.api.source import SampleResult
from realhf.dataflow.rollouts.metrics import rollout_metrics
from realhf.monitor.metrics import public_names
from realhf.rollout.api_errors import ApiError
from realhf.rollout.episode import EpisodeLimits, EpisodeRequest
from realhf.rollout.group_player import PlayedGroup, RolloutRecording, episode_results
from realhf.rollout.interface import rollout_statistics
from realhf.rollout.openai_requests import OpenAiMessage
from realhf.rollout.openai_sessions import OpenAiSessions
from realhf.rollout.player import EpisodePlayer, TurnAgent
from tests.monitor.rollouts.made_rollouts import outcome
from tests.rollout.scripted_environment import Scripted, Words, World
from tests.rollout.word_chat import WordChat

LIMITS = EpisodeLimits(max_turns=4, max_total_tokens=500, turn_tokens=20)


def test_limits_of_an_environment_narrow_those_of_the_run_and_never_widen_them():
    assert LIMITS.narrow(TaskLimits()) == LIMITS
    assert LIMITS.narrow(TaskLimits(2, 300)) == EpisodeLimits(2, 300, 20)
    assert LIMITS.narrow(TaskLimits(max_new_tokens=5)) == EpisodeLimits(4, 500, 5, 5)
    assert LIMITS.narrow(TaskLimits(9, 900, 90)) == EpisodeLimits(4, 500, 20, 20)


@pytest.mark.parametrize(
    ("limits", "turns", "status"),
    [
        (TaskLimits(), 3, "finished"),
        (TaskLimits(max_turns=2), 2, "max_turns"),
        (TaskLimits(max_total_tokens=26), 1, "token_budget"),
    ],
)
def test_an_episode_ends_at_the_limits_of_its_environment(limits, turns, status):
    player = EpisodePlayer(World().spec(), "", TurnAgent(WordChat(), LIMITS, ""), 1)
    task = Task("t", payload={"text": "do"}, environment="words", limits=limits)
    played = asyncio.run(player.play_and_close([EpisodeRequest(0, task)], Words()))
    (ended,) = played.outcomes
    assert (len(ended.turns), ended.status, ended.environment) == (turns, status, "words")
    assert ended.out_of_turns is (status == "max_turns"), "the limit is one that can be raised"


async def test_a_lost_episode_is_resumed_if_its_own_environment_is_deterministic():
    def lose_once(env: Scripted, message: Any) -> Any:
        return left.pop() if left else None

    for name, resumed in (("words", True), ("network", False)):
        left = [EnvironmentFailure("lost", "gone")]
        spec = World(lose_once).spec(deterministic=False)
        parts = {
            each: EnvironmentPart(replace(spec, deterministic=each == "words"), 0.5)
            for each in ("words", "network")
        }
        player = EpisodePlayer(
            replace(spec, parts=parts), "", TurnAgent(WordChat(), LIMITS, ""), 1, retries=1
        )
        task = Task("t", payload={"text": "do"}, environment=name)
        played = await player.play_and_close([EpisodeRequest(0, task)], Words())
        assert played.outcomes[0].status == "finished"
        assert played.retried == {"resumed" if resumed else "lost": 1}


def test_the_endpoint_of_an_agent_has_the_limits_of_the_environment():
    sessions = OpenAiSessions(WordChat(), LIMITS)  # pyright: ignore[reportArgumentType]
    session = sessions.open(Words(), slot=0, task_limits=TaskLimits(1, 300, 7))
    turn = session.ledger.begin([OpenAiMessage("user", "do")])
    assert turn.request().max_new_tokens == 7
    with pytest.raises(ApiError, match="has had its 1 turns"):
        session.ledger.begin([OpenAiMessage("user", "do")])


async def test_the_engine_is_asked_for_no_more_than_the_limit_of_a_turn():
    words = Words()
    player = EpisodePlayer(World().spec(), "", TurnAgent(WordChat(), LIMITS, ""), 1)
    for limit in (0, 7):
        task = Task("t", payload={"text": "do"}, limits=TaskLimits(max_new_tokens=limit))
        await player.play([EpisodeRequest(0, task)], words)
        assert {request.max_new_tokens for request in words.requests} == {limit}
        words.requests.clear()
    await player.close()


def test_a_turn_that_goes_on_has_what_is_left_of_its_limit():
    assert GenRequest(0, [1], 3).limit_turn(20) == 17
    assert GenRequest(0, [1], 3, max_new_tokens=5).limit_turn(20) == 2
    assert GenRequest(0, [1], 3, max_new_tokens=50).limit_turn(20) == 17


def of(environment: str, group: str, reward: float | None, **more: Any) -> RolloutOutcome:
    failed = {"status": "internal"} if reward is None else {}
    return replace(
        outcome(reward),
        group=f"{environment}/{group}",
        environment=environment,
        **failed,
        **more,
    )


PLAYED = [
    of("sql", "join", 1.0),
    of("sql", "join", 0.5),
    of("sql", "lookup", 0.0),
    of("sql", "lookup", None),
    of("sums", "small", 1.0),
    of("sums", "small", 1.0),
]
WANTED = {
    "success/overall": 3 / 5,
    "success/sql": 1 / 3,
    "success/sql/join": 1 / 2,
    "success/sql/lookup": 0.0,
    "success/sums": 1.0,
    "success/sums/small": 1.0,
    "reward/mean": 3.5 / 5,
    "reward/mean/sql": 0.5,
    "reward/mean/sums": 1.0,
    "length/turns/sql": 1.0,
    "length/turns/sums": 1.0,
    "rollouts/played": 6.0,
    "rollouts/played/sql": 4.0,
    "rollouts/played/sums": 2.0,
}


def test_each_environment_has_its_own_numbers_in_both_kinds_of_runs():
    alone = rollout_statistics([replace(each, environment="") for each in PLAYED])
    statistics = rollout_statistics(PLAYED)
    row = public_names({f"actor_gen/{name}": value for name, value in statistics.items()})
    assert {name: row.get(name) for name in WANTED} == pytest.approx(WANTED)
    assert not [name for name in alone if name.startswith(("reward_of", "turns_of", "n_rollouts"))]
    results = [
        SampleResult(
            str(start),
            {
                "group": group[0].group,
                "environment": group[0].environment,
                "rollout": json.dumps(PlayedGroup(group).statistics()),
            },
            [each.reward for each in group],
            [each.achieved if each.valid else None for each in group],  # pyright: ignore[reportArgumentType]
        )
        for start in (0, 2, 4)
        for group in [PLAYED[start : start + 2]]
    ]
    streamed = {f"rollout/{name}": value for name, value in rollout_metrics(results).items()}
    streamed = public_names(streamed)
    assert {name: streamed.get(name) for name in WANTED} == pytest.approx(WANTED)


def test_an_evaluation_reports_each_environment():
    report = evaluation_report(episode_results(PLAYED), 3)
    assert {name: entry["episodes"] for name, entry in report.items()} == {
        "overall": 5,
        "sql": 3,
        "sums": 2,
        "sql/join": 2,
        "sql/lookup": 1,
        "sums/small": 2,
    }
    assert report["sql"]["success"] == pytest.approx(1 / 3)


def test_the_numbers_of_an_environment_include_all_of_its_groups():
    results = [
        EpisodeResult(group, True, achieved, 1.0, 1, environment="sql")
        for group, achieved in (("sql", True), ("sql/join", False))
    ]
    report = evaluation_report(results, 3)
    assert (report["sql"]["episodes"], report["sql"]["success"]) == (2, 0.5)


def test_rollouts_are_recorded_under_the_environment_that_they_played():
    class Recorder:
        def record_played(self, sample):
            kept.append(sample.env)

    kept: list[str] = []
    recording = RolloutRecording(Recorder(), "sql+sums", gen=None)  # pyright: ignore[reportArgumentType]
    recording.record_training("a", PLAYED[:2], 1)
    recording.record_training("b", [outcome()], 1)
    assert kept == ["sql", "sql+sums"]
