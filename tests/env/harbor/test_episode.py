"""Harbor tasks are played without Docker: the shell, the verifier, and what an agent must not
reach."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import pytest

from realhf.api.environment import (
    AssistantMessage,
    EnvironmentFailure,
    EnvironmentSpec,
    ToolCall,
)
from realhf.env.loader.load import build_environment
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
    assert turn.metrics == {"success": 0.0, "progress": 0.0, "verifier_failed": 0.0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("true", "neither reward.txt nor reward.json"),
        ("echo good > /logs/verifier/reward.txt", "no number: 'good'"),
        ("echo nan > /logs/verifier/reward.txt", "no number"),
        (": > /logs/verifier/reward.txt", "reward.txt is empty"),
        ("echo '[1]' > /logs/verifier/reward.json", "no mapping"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "cannot be read"),
        ("mkfifo /logs/verifier/reward.txt", "cannot be read"),
    ],
)
def test_a_verifier_without_a_reward_fails_the_agent_if_there_was_one(
    text: str, reason: str, write_task: WriteTask, play: Play
) -> None:
    """Where no command was run, it is the task's fault, and the episode has no reward."""
    folder = write_task(test=text)
    turn = play(folder, "echo 1 > answer")[-1]
    assert (turn.reward, turn.metrics["verifier_failed"]) == (0.0, 1.0)
    assert re.search(reason, turn.info["verifier"])
    with pytest.raises(EnvironmentFailure, match=reason) as failure:
        play(folder)
    assert failure.value.kind == "internal"


def test_a_verifier_without_a_reward_runs_once_more(write_task: WriteTask, play: Play) -> None:
    """The file of the agent is still there, and the first run's reward is not."""
    first = (
        "[ -e /app/tried ] || { touch /app/tried; echo bad > /logs/verifier/reward.txt; exit 1; }\n"
    )
    second = "[ -e /logs/verifier/reward.txt ] || cat /app/answer > /logs/verifier/reward.txt\n"
    turn = play(write_task(test=first + second), "echo 0.75 > answer")[-1]
    assert (turn.reward, turn.metrics["verifier_failed"]) == (0.75, 0.0)


@pytest.mark.nightly
def test_a_slow_verifier_is_a_failure(write_task: WriteTask, play: Play) -> None:
    folder = write_task(toml="[verifier]\ntimeout_sec = 0.3\n", test="sleep 30")
    reason = r"verifier was ended: it took more than 0\.3 s"
    with pytest.raises(EnvironmentFailure, match=reason):
        play(folder)
    turn = play(folder, "true")[-1]
    assert turn.reward == 0.0
    assert re.search(reason, turn.info["verifier"])


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
EVADE = (
    "python3 -c 'import ctypes, time; libc = ctypes.CDLL(None)\n"
    "libc.mmap.restype = ctypes.c_void_p\n"
    "libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 4, ctypes.c_long]\n"
    "libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
    "for _ in range(600):\n    at = libc.mmap(None, 1 << 20, 3, 0x21, 2**64 - 1, 0)\n"
    "    ctypes.memset(at, 1, 1 << 20); libc.munmap(at + 4096, (1 << 20) - 4096)\n"
    "    time.sleep(0.002)\ntime.sleep(1)' && echo right > answer"
)
HOSTILE = (
    "bomb() { bomb | bomb & }; bomb; sleep 20",
    "cat /dev/zero > /tmp/full; cat /dev/zero > answer",
    "cat /tests/test.sh && echo right > answer",
    PAY_SELF,
    EVADE,
    "rm -f /bin/bash /bin/sh /usr/bin/bash /usr/bin/sh /usr/bin/dash",
    "kill -KILL -1; kill -STOP 1",
)
SURVIVE = "setsid nohup sh -c 'sleep 0.2; echo right > /app/answer' > /dev/null 2>&1 &"


RUIN = {
    "removes the shells": "rm -f /bin/bash /bin/sh /usr/bin/bash /usr/bin/sh /usr/bin/dash",
    "removes all": "rm -rf --no-preserve-root / 2> /dev/null",
    "ends all": "kill -KILL -1; kill -KILL 1",
    "stops all": "kill -STOP -1 1; kill -STOP $$",
    "replaces the shell": "echo '#!/bin/true' > /tmp/x; chmod +x /tmp/x; cp --remove-destination "
    "/tmp/x /usr/bin/bash",
    "spoils the devices": "rm -rf /dev/*; echo x > /dev/null; echo x > /dev/urandom",
    "has a name that is no text": "python3 -c 'import ctypes, time; "
    'ctypes.CDLL(None).prctl(15, b"\\xff\\xfe", 0, 0, 0); time.sleep(0.5)\'',
    "takes the working folder away": "rm -rf /app",
}
"""Attempts to lose an episode, which shall fail it."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RUIN)
def test_an_agent_cannot_lose_its_episode(name: str, write_task: WriteTask, play: Play) -> None:
    turns = play(write_task(), RUIN[name], "true", command_timeout_s=2.0)
    assert turns[-1].done
    assert turns[-1].reward == 0.0


@pytest.mark.nightly
def test_the_hostile_at_once_are_graded(write_task: WriteTask, containers: None) -> None:
    """Eight play at the same time, and an honest one among them is paid."""
    folder = write_task(toml="[verifier]\ntimeout_sec = 20.0\n")
    commands = [*HOSTILE, "echo right > answer"]
    options = {"command_timeout_s": 5.0, "processes": 64, "memory_mb": 256, "storage_mb": 24}

    async def play_all() -> list[float | None]:
        spec = build_environment(f"harbor:{folder}", {"heldout_fraction": 0, **options})
        return [*await asyncio.gather(*(play_one(spec, folder, each) for each in commands))]

    assert asyncio.run(play_all()) == [0.0] * len(HOSTILE) + [1.0]


async def play_one(spec: EnvironmentSpec, folder: Path, command: str) -> float | None:
    environment = spec.make("")
    try:
        await environment.reset(spec.tasks("train").instantiate(folder.name, 0).payload, seed=0)
        call = ToolCall("shell", {"command": command}, id="call")
        await environment.step(AssistantMessage("", (call,)))
        return (await environment.step(AssistantMessage("Done."))).reward
    finally:
        await environment.close()


def test_what_the_verifier_leaves_running_is_not_waited_for(
    write_task: WriteTask, play: Play
) -> None:
    """It holds the verifier's output open."""
    test = "echo 0.25 > /logs/verifier/reward.txt\nexec 3>&1\nsetsid sleep 600 &\nsleep 600 &\n"
    before = time.monotonic()
    assert play(write_task(test=test), "true")[-1].reward == 0.25
    assert time.monotonic() - before < 60


def test_the_commands_of_a_message_have_one_time(write_task: WriteTask, containers: None) -> None:
    folder = write_task()

    async def step() -> list[str]:
        options = {"heldout_fraction": 0, "command_timeout_s": 0.5}
        spec = build_environment(f"harbor:{folder}", options)
        environment = spec.make("")
        try:
            await environment.reset(spec.tasks("train").instantiate("one", 0).payload, seed=0)
            calls = [ToolCall("shell", {"command": "sleep 60"}, id=name) for name in "abc"]
            turn = await environment.step(AssistantMessage("", tuple(calls)))
            return [message["content"] for message in turn.messages]
        finally:
            await environment.close()

    first, *others = asyncio.run(step())
    assert "ended: it took more than" in first
    assert others == ["error: the calls before have used up the time of the message"] * 2


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
    assert turn.metrics == {"success": 0.0, "progress": 0.5, "verifier_failed": 0.0}
