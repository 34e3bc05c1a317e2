"""Harbor tasks are played without Docker: the shell, the verifier, and what an agent must not
reach."""

from __future__ import annotations

import pytest

from realhf.api.environment import EnvironmentFailure
from tests.env.harbor.conftest import Play, WriteTask

pytestmark = pytest.mark.slow


def test_an_agent_works_in_a_shell_and_the_verifier_pays(write_task: WriteTask, play: Play) -> None:
    turns = play(write_task(), "pwd; id -u", "echo right > answer", "exit 3")
    assert [turn.messages[0]["content"] for turn in turns[:3]] == [
        "/app\n0\n",
        "[no output]",
        "[exit code 3]",
    ]
    assert [turn.done for turn in turns] == [False, False, False, True]
    assert turns[-1].reward == 1.0
    assert turns[-1].metrics["success"] == 1.0


@pytest.mark.nightly
def test_nothing_done_earns_nothing(write_task: WriteTask, play: Play) -> None:
    (turn,) = play(write_task())
    assert turn.done
    assert turn.reward == 0.0
    assert turn.metrics == {"success": 0.0, "progress": 0.0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("true", "neither reward.txt nor reward.json"),
        ("echo good > /logs/verifier/reward.txt", "no number: 'good'"),
        ("echo nan > /logs/verifier/reward.txt", "no number"),
        (": > /logs/verifier/reward.txt", "reward.txt is empty"),
        ("echo '[1]' > /logs/verifier/reward.json", "no mapping"),
        ("ln -s /app/answer /logs/verifier/reward.txt", "cannot be read"),
    ],
)
def test_a_verifier_without_a_reward_is_a_failure_and_no_zero(
    text: str, reason: str, write_task: WriteTask, play: Play
) -> None:
    with pytest.raises(EnvironmentFailure, match=reason) as failure:
        play(write_task(test=text), "echo 1 > answer")
    assert failure.value.kind == "internal"


@pytest.mark.nightly
def test_a_slow_verifier_is_a_failure(write_task: WriteTask, play: Play) -> None:
    folder = write_task(toml="[verifier]\ntimeout_sec = 0.3\n", test="sleep 30")
    with pytest.raises(
        EnvironmentFailure, match=r"verifier was ended: it took more than 0\.3 s"
    ) as failure:
        play(folder)
    assert failure.value.kind == "timeout"


@pytest.mark.nightly
def test_the_agents_time_is_that_of_its_commands(write_task: WriteTask, play: Play) -> None:
    folder = write_task(toml="[agent]\ntimeout_sec = 0.5\n")
    turns = play(folder, "echo right > answer; sleep 30")
    assert "[ended: it took more than 0.5 s]" in turns[0].messages[0]["content"]
    assert turns[-1].done
    assert turns[-1].reward == 1.0


@pytest.mark.nightly
def test_the_last_turn_is_verified(write_task: WriteTask, play: Play) -> None:
    turns = play(write_task(), "true", "echo right > answer", "echo wrong > answer", max_turns=2)
    assert len(turns) == 2
    assert turns[-1].reward == 1.0
    assert turns[-1].messages[0]["content"] == "[no output]"


STEAL = "cat /tests/test.sh; ls /tests"
PAY_SELF = (
    "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; "
    "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &"
)
REDIRECT = (
    "rm -r /logs; mkdir /paid; echo 1 > /paid/reward.txt; mkdir /logs; ln -s /paid /logs/verifier"
)
REDIRECT_ALL = "rm -r /logs; mkdir -p /paid/verifier; ln -s /paid /logs; ln -s /paid /tests"
SURVIVE = "setsid nohup sh -c 'sleep 0.2; echo right > /app/answer' > /dev/null 2>&1 &"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", [PAY_SELF, REDIRECT, REDIRECT_ALL, SURVIVE])
def test_an_agent_cannot_pay_itself(command: str, write_task: WriteTask, play: Play) -> None:
    folder = write_task(
        test="sleep 0.5\n"
        'if [ "$(cat /app/answer 2> /dev/null)" = right ]; then pay=1; else pay=0; fi\n'
        "[ -e /logs/verifier/reward.txt ] && exit 1\n"
        "echo $pay > /logs/verifier/reward.txt\n"
    )
    assert play(folder, command)[-1].reward == 0.0


def test_the_tests_and_the_solution_are_not_there_for_the_agent(
    write_task: WriteTask, play: Play
) -> None:
    folder = write_task()
    turns = play(folder, STEAL, f"ls {folder} {folder.parent}; find / -name solve.sh -xdev")
    assert "reward.txt" not in turns[0].messages[0]["content"]
    assert "solve.sh" not in turns[1].messages[0]["content"].replace("-name solve.sh", "")


def test_a_fork_bomb_and_a_full_disk_are_the_agents_own_trouble(
    write_task: WriteTask, play: Play
) -> None:
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 20"
    fill = "cat /dev/zero > /tmp/full; cat /dev/zero > /app/answer"
    folder = write_task(toml="[environment]\nstorage_mb = 24\n")
    options = {"command_timeout_s": 1.0, "processes": 64, "memory_mb": 256, "storage_mb": 24}
    turns = play(folder, "echo right > answer", fill, **options)
    assert "No space left" in turns[1].messages[0]["content"]
    assert turns[-1].reward == 0.0
    turns = play(folder, "echo right > answer", bomb, **options)
    assert turns[-1].reward == 1.0


def test_the_dockerfile_is_followed(write_task: WriteTask, play: Play) -> None:
    folder = write_task(
        dockerfile="FROM python:3.12-slim AS base\n"
        "ENV COLOUR=blue SIZE='very large'\n"
        "ENV PLACE /srv/$COLOUR\n"
        "WORKDIR $PLACE\n"
        "COPY words.txt list.txt ./\n"
        'COPY ["data", "/data"]\n'
        "# a comment\n"
        "RUN cat words.txt > joined && \\\n"
        "    cat /data/deep/one >> joined\n"
        'RUN ["touch", "with space"]\n'
    )
    environment = folder / "environment"
    (environment / "words.txt").write_text("words\n")
    (environment / "list.txt").write_text("list\n")
    (environment / "data" / "deep").mkdir(parents=True)
    (environment / "data" / "deep" / "one").write_text("one\n")
    turns = play(folder, 'pwd; echo "$COLOUR $SIZE"; cat joined; ls')
    assert turns[0].messages[0]["content"] == (
        "/srv/blue\nblue very large\nwords\none\njoined\nlist.txt\nwith space\nwords.txt\n"
    )


@pytest.mark.nightly
def test_a_build_that_fails_names_its_command(write_task: WriteTask, play: Play) -> None:
    folder = write_task(dockerfile="FROM debian:12\nRUN echo broken >&2; exit 7\n")
    with pytest.raises(EnvironmentFailure, match=r"RUN echo broken.* ends with 7: broken"):
        play(folder)


@pytest.mark.nightly
def test_several_numbers_are_components_of_the_reward(write_task: WriteTask, play: Play) -> None:
    folder = write_task(
        test="""echo '{"reward": 0.5, "speed": 0.25}' > /logs/verifier/reward.json"""
    )
    (turn,) = play(folder)
    assert turn.reward == 0.5
    assert turn.rewards == {"speed": 0.25}
    assert turn.metrics == {"success": 0.0, "progress": 0.5}
