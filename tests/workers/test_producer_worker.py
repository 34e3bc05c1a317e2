"""How a producer follows the server: it waits, paces itself, goes over to a new run and stops when
there is enough; and what it says where no episode comes to a result."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from realhf.rollout.player import EpisodePlayer
from realhf.trajectory.client import NoBatchYet, NotRegistered, TrajectoryClient
from tests.trajectory.conftest import running_server
from workers import producer_worker
from workers.producer_worker import AllEpisodesFailed, PolicyEpisodes, Producer, build_parser

FLAGS = ["--server", "", "--env-url", "", "--policy", "", "--group-size", "2", "--sessions", "4"]


@pytest.fixture(scope="module")
def url():
    with running_server() as address:
        yield address


class Games:
    """Plays nothing, but counts; ``before`` is called ahead of every round."""

    def __init__(self):
        self.rounds: list[int] = []
        self.before = lambda: None

    def play(self, count):
        self.rounds.append(count)
        self.before()
        return [
            {
                "tokens": [[1, 2]] * 2,
                "masks": [[-100, 2]] * 2,
                "scores": [0.0, 1.0],
                "group_overrides": {"round": len(self.rounds)},
            }
            for _ in range(count)
        ]


def trainer(url, steps):
    """A trainer that began a run of its own and has asked once."""
    client = TrajectoryClient(url)
    client.register(batch_size=4, max_token_len=64, num_steps=steps, reset=True)
    with suppress(NoBatchYet):
        client.pull(0)
    return client


def run(url, games, *flags):
    with TrajectoryClient(url) as client:
        return Producer(client, games.play, build_parser().parse_args([*FLAGS, *flags])).run()


@pytest.mark.slow
def test_it_stops_when_the_queue_holds_the_rest_of_the_run(url):
    games = Games()
    with trainer(url, steps=2) as client:
        assert run(url, games) == 6
        assert games.rounds == [2, 2, 2] and client.status()["queue_size"] == 6


@pytest.mark.slow
def test_it_pauses_when_enough_is_queued_and_goes_on_when_batches_leave(url):
    games = Games()
    got = []
    with trainer(url, steps=99) as client:
        thread = threading.Thread(target=lambda: got.append(run(url, games, "--groups", "11")))
        thread.start()
        rounds = [
            item["group_overrides"]["round"] for _ in range(5) for item in client.pull(20).groups
        ]
        thread.join(60)
        assert got == [11] and sum(games.rounds) == 11 and games.rounds[-1] == 1
        assert rounds == sorted(rounds) and client.status()["queue_size"] == 1


def test_what_was_played_for_a_run_that_ended_goes_to_the_next(url):
    games, runs = Games(), [trainer(url, steps=99)]

    def restart_once():
        if len(games.rounds) == 2:
            runs.append(trainer(url, steps=99))

    games.before = restart_once
    assert run(url, games, "--groups", "6") == 6
    with runs[0], runs[1] as client:
        assert client.status()["queue_size"] == 4
        assert [item["group_overrides"]["round"] for item in client.pull(5).groups] == [2, 2]


@pytest.mark.slow
def test_its_patience_with_the_trainer_ends(url):
    with TrajectoryClient(url) as client:
        client.register(batch_size=4, max_token_len=64, num_steps=1, reset=True)
    with pytest.raises(NotRegistered, match="waited 0 s for the trainer"):
        run(url, Games(), "--patience-s", "0.2")


@pytest.mark.slow
def test_a_round_without_a_result_is_told_and_played_again(url, caplog):
    games = Games()

    def fail_twice():
        if len(games.rounds) <= 2:
            raise AllEpisodesFailed("lost: nobody answers")

    games.before = fail_twice
    with trainer(url, steps=99):
        assert run(url, games, "--groups", "2") == 2 and games.rounds == [2, 2, 2]
    told = [
        record.getMessage()
        for record in caplog.records
        if "came to a result" in record.getMessage()
    ]
    assert told == ["no episode of this round came to a result: lost: nobody answers"]


@pytest.mark.slow
def test_its_patience_with_an_environment_that_is_away_ends_with_what_failed(
    url, tiny_policy, monkeypatch
):
    """It played round after round for ever, and said that it had pushed no groups."""
    monkeypatch.setattr(
        producer_worker,
        "EpisodePlayer",
        lambda *of, **by: EpisodePlayer(*of, **{**by, "patience_s": 0.0}),
    )
    where = ("--env-url", "http://127.0.0.1:9", "--policy", str(tiny_policy), "--tiers", "warmup")
    flags = [*FLAGS, *where, "--patience-s", "0"]
    told = r"no episode has come to a result for \d+ s, at last lost: cannot open a session at ws://127\.0\.0\.1:9/ws"
    with (
        trainer(url, steps=99),
        PolicyEpisodes(build_parser().parse_args(flags)) as episodes,
        pytest.raises(RuntimeError, match=told),
    ):
        run(url, episodes, *where, "--patience-s", "0")
