"""What the environment itself runs and believes does not depend on the agent's worker, even one
that lies."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot
from tests.aws.red_team.compromised_worker import (
    SENT,
    CompromisedWorker,
    forged,
    framed,
    versioning_task,
)

pytestmark = pytest.mark.sim

Compromise = Callable[[bytes], CompromisedWorker]


@pytest.fixture
def compromise(slot: Slot) -> Iterator[Compromise]:
    made: list[CompromisedWorker] = []

    def make(answer: bytes) -> CompromisedWorker:
        made.append(CompromisedWorker(slot.executor, answer))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


def test_forged_replies_do_not_change_a_grade_by_command(
    slot: Slot, episode: Episode, compromise: Compromise
) -> None:
    """The bucket has no versioning, however often the agent's worker says that it has."""
    episode.reset(versioning_task())
    compromise(framed(forged('{"Status": "Enabled"}', [SENT])))
    for command in ("aws s3api get-bucket-versioning --bucket ledger", "aws s3 ls"):
        step = episode.step(command)
        assert step.observation["command_output"] == '{"Status": "Enabled"}', (
            "the agent's worker does lie"
        )
        assert not step.observation["task_achieved"] and step.observation["partial_progress"] < 1.0
    assert "Status" not in slot.state.call("s3", "GetBucketVersioning", {"Bucket": "ledger"})


def test_set_up_and_drift_do_not_use_the_agents_worker(
    slot: Slot, episode: Episode, compromise: Compromise
) -> None:
    compromise(framed(forged()))
    drift = {
        "command": "aws s3api put-bucket-tagging --bucket ledger --tagging TagSet=[{Key=a,Value=b}]"
    }
    before = slot.executor.counters.commands
    episode.reset(versioning_task(possible_drifts=[drift]), drifts=[0])
    assert slot.executor.counters.commands == before
    assert slot.state.call("s3", "GetBucketTagging", {"Bucket": "ledger"})["TagSet"] == [
        {"Key": "a", "Value": "b"}
    ]


def test_the_agents_files_are_not_read_by_checks(slot: Slot, episode: Episode) -> None:
    """A file of the same name, written by the agent, is not the one that a check's command
    names."""
    check = {
        "command": "aws s3api list-buckets --query file://wanted.txt",
        "output_contains": "ledger",
    }
    task = versioning_task(
        success_criteria={"state_checks": [check]}, assets={"wanted.txt": "Buckets[?Name==`none`]"}
    )
    episode.reset(task)
    slot.files.put("wanted.txt", b"Buckets")
    assert not episode.step("aws s3 mb s3://another").observation["task_achieved"]


def test_the_environments_worker_does_not_outlive_the_lease(pool: MiniStackPool) -> None:
    slot = pool.acquire()
    Episode(slot).reset(versioning_task())
    pids = slot.worker_pids
    assert len(pids) == 2 and slot.worker_pid == pids[0]
    pool.release(slot)
    assert len(slot.worker_pids) == 1 and not set(pids) & set(slot.worker_pids)


def test_half_a_reply_is_waited_for_only_as_long_as_a_command_may_take(
    slot: Slot, compromise: Compromise
) -> None:
    limits = slot.executor._limits
    slot.executor._limits = replace(slot.executor._limits, timeout_s=0.3)
    try:
        compromise(framed(forged())[:20])
        started = time.monotonic()
        assert slot.executor.run("aws s3 ls").timed_out
        assert time.monotonic() - started < 30
    finally:
        slot.executor._limits = limits


def test_a_second_reply_is_not_taken_for_the_next_commands(
    slot: Slot, compromise: Compromise
) -> None:
    """Two frames for one command: answers would be off by one from there on."""
    compromise(framed(forged("first")) + framed(forged("second")))
    assert slot.executor.run("aws s3 ls").stdout == "first"
    assert slot.executor.run("aws s3 ls").stopped


def test_a_lost_check_is_no_grade(slot: Slot, episode: Episode) -> None:
    """A check must not fail or hold because its worker died; what it read is of the agent's
    making."""
    episode.reset(versioning_task())
    worker = CompromisedWorker(slot.own_executor, framed({}))
    try:
        lost = episode.step("aws s3 mb s3://some-other")
    finally:
        worker.close()
    assert (
        not lost.done and lost.reward == 0.0 and lost.observation["account_unreadable"] == "silence"
    )
    after = episode.step("aws s3 mb s3://another")
    assert not lost.observation["task_achieved"] and not after.observation["task_achieved"]
    assert slot.ministack.alive()


def test_a_flooded_answer_shows_nothing(slot: Slot, episode: Episode) -> None:
    """Of what was cut off nobody knows what it said."""
    slot.own_executor._limits = replace(slot.own_executor._limits, stdout_bytes=64)
    check = {"command": "aws s3api list-buckets", "output_contains": "aaaa"}
    try:
        episode.reset(versioning_task(success_criteria={"state_checks": [check]}))
        assert not episode.step("aws s3 mb s3://aaaaaaaaaaaaaaaaaaaaaaaa").observation[
            "task_achieved"
        ]
    finally:
        slot.own_executor._limits = replace(slot.own_executor._limits, stdout_bytes=1 << 20)


def test_a_server_of_many_sessions_has_many_descriptors(slot: Slot) -> None:
    """Workers are talked to and waited for also where descriptors have numbers beyond 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this machine allows no more than 1024 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < 1100:
            taken.append(os.dup(taken[0]))
        slot.executor.stop()
        assert slot.executor.run("aws s3 ls").success and slot.executor.responsive(30.0)
        slot.executor.stop()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
