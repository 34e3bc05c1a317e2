"""Episodes on a real simulator: the shape of what is returned, endings, failures, hints."""

import itertools
import os
import signal
import socket
from functools import partial
from pathlib import Path

import pytest

from realhf.aws.episode.episode import (
    FINISHED,
    LOST,
    Episode,
    EpisodeError,
    hint_text,
    is_hint_request,
    masked_task,
)
from realhf.aws.episode.validation import play
from realhf.aws.grading.criteria import Criteria, parse_criteria
from realhf.aws.messages import HINT_COMMAND
from realhf.aws.simulator.ministack_process import SIMULATOR_MEMORY_MB
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate, load_templates
from realhf.aws.tasks.task import Task, TaskError

pytestmark = pytest.mark.sim

FIELDS = {
    *(
        "episode_id",
        "step_count",
        "command_success",
        "command_output",
        "error",
        "task",
        "task_achieved",
    ),
    *(
        "partial_progress",
        "hints_used",
        "hint_text",
        "truncated",
        "refusal",
        "steps_left",
        "account_key",
    ),
}
CREATE_BUCKET = 101
VERSIONED = 201
ECR = 110
RETENTION = 205


def test_an_episode_from_reset_to_achievement(episode: Episode) -> None:
    task = instantiate(VERSIONED, 1)
    start = episode.reset(task, episode_id="e1")
    assert set(start.observation) == FIELDS and (start.reward, start.done) == (0.0, False)
    assert start.observation["task"] == masked_task(task)
    assert (start.observation["episode_id"], start.observation["steps_left"]) == ("e1", 15)
    first, second = (episode.step(command) for command in task.solution)
    assert (first.reward, first.done) == (pytest.approx(0.45), False)
    assert first.observation["partial_progress"] == 0.5 and not first.observation["truncated"]
    assert (
        first.observation["command_success"] and "Location" in first.observation["command_output"]
    )
    assert (
        second.done and second.observation["task_achieved"] and first.reward + second.reward == 1.0
    )
    (change,) = second.observation["account_changes"]
    assert (change["service"], change["type"], change["before"], change["after"]) == (
        "s3",
        "bucket",
        "none",
        "there",
    )
    assert [call.partition(" ")[0] for call in change["calls"]] == [
        "CreateBucket",
        "PutBucketVersioning",
    ]
    after = episode.step("aws s3api list-buckets")
    assert (after.reward, after.done, after.observation["step_count"]) == (0.0, True, 2)
    assert after.observation["error"] == FINISHED and after.observation["command_output"] == ""


def test_the_key_of_an_account_is_that_of_what_it_holds(episode: Episode) -> None:
    """Commands in another order, a detour and a read lead to the same key, which used to tell the
    histories apart."""
    make = [
        "aws sqs create-queue --queue-name q",
        "aws sns create-topic --name t",
        "aws sqs tag-queue --queue-url http://localhost:4566/000000000000/q --tags a=1",
        "aws sqs tag-queue --queue-url http://localhost:4566/000000000000/q --tags b=2",
    ]

    def keys(*commands: str) -> list[str]:
        first = episode.reset(instantiate(VERSIONED, 1)).observation["account_key"]
        answers = [episode.step(command).observation for command in commands]
        assert all(answer["command_success"] for answer in answers), answers
        return [first, *(answer["account_key"] for answer in answers)]

    start, queue, both, tagged, end = keys(*make)
    assert len({start, queue, both, tagged, end}) == 5
    again = keys(make[1], make[0], make[3], make[2])
    assert again[0] == start and again[2] == both and again[4] == end != again[3]
    detour = keys(
        make[0],
        "aws sqs delete-queue --queue-url http://localhost:4566/000000000000/q",
        "aws s3api list-buckets",
    )
    assert detour == [start, queue, start, start]


@pytest.mark.parametrize(("mode", "rewards"), [("potential", (0.45, 0.0)), ("level", (0.5, 0.5))])
def test_a_command_that_ends_the_simulator_ends_the_episode_with_its_score(
    slot: Slot, mode: str, rewards: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to count as a failure of the environment, so that an episode that went badly could be
    had anew."""
    episode = Episode(slot, reward_mode=mode)
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    first, second = task.solution
    steps = [episode.step(first)]
    connect = slot.ministack.connect

    def killed_while_it_runs(timeout_s: float = 10.0) -> socket.socket:
        connection = connect(timeout_s)
        os.kill(slot.ministack.pid, signal.SIGKILL)
        return connection

    monkeypatch.setattr(
        slot.executor, "_spawn", partial(slot._spawn_worker, slot.files, killed_while_it_runs)
    )
    slot.executor.stop()
    steps.append(episode.step(second))
    assert [step.reward for step in steps] == [pytest.approx(reward) for reward in rewards]
    last = steps[-1].observation
    assert steps[-1].done and last["simulator_lost"] and last["truncated"] and last["error"] == LOST
    assert episode.inventory() == {} and episode.step(second).observation["error"] == FINISHED
    monkeypatch.undo()
    assert "simulator_lost" not in episode.reset(task).observation, (
        "the next episode has another simulator"
    )
    assert [episode.step(command).done for command in (first, second)] == [False, True]


@pytest.mark.nightly
def test_a_simulator_without_memory_ends_and_the_episode_with_it(
    episode: Episode, slot: Slot, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to go on: some answers came, others were errors, and its owner's own reads failed for
    good."""
    task = instantiate(VERSIONED, 1)
    limit = SIMULATOR_MEMORY_MB << 20
    episode.reset(task)
    slot.state.call("s3", "CreateBucket", {"Bucket": "large"})
    number = itertools.count()
    for size in (32 << 20, 4 << 20, 1 << 19):
        while private_bytes(slot.ministack.pid) < limit - 3 * size:
            content = {"Bucket": "large", "Key": str(next(number)), "Body": b"x" * size}
            slot.state.call("s3", "PutObject", content)
    slot.files.put("b", b"y" * (1 << 20))
    step = episode.step("aws s3api put-object --bucket large --key last --body b")
    assert step.done and step.reward == 0.0 and step.observation["simulator_lost"]
    episode.reset(task)
    assert "its simulator had ended: 'no memory is left; this process ends itself'" in caplog.text
    assert episode.step(task.solution[0]).reward > 0


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def test_steps_run_out(slot: Slot) -> None:
    episode = Episode(slot, max_steps=2)
    episode.reset(instantiate(CREATE_BUCKET, 1))
    assert not episode.step("aws s3api list-buckets").done
    last = episode.step("aws s3api list-buckets")
    assert last.done and last.observation["truncated"] and last.observation["steps_left"] == 0


def test_failed_commands_say_why(episode: Episode) -> None:
    episode.reset(instantiate(CREATE_BUCKET, 1))
    missing = episode.step("aws s3api get-bucket-versioning --bucket none-such").observation
    assert not missing["command_success"] and "NoSuchBucket" in missing["error"]
    refused = episode.step("aws configure list").observation
    assert refused["refusal"] and refused["error"] and not refused["command_success"]
    assert refused["step_count"] == 2


def test_a_failed_command_lowers_the_score_until_the_next_success(episode: Episode) -> None:
    task = instantiate(RETENTION, 1)
    episode.reset(task)
    create, retain = task.solution
    rewards = [episode.step(command).reward for command in (create, create, retain)]
    assert rewards == pytest.approx([0.45, -0.225, 0.775])


def test_reset_leaves_nothing_behind(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 1)
    episode.reset(task)
    assert episode.step(task.solution[0]).done
    assert not episode.reset(task).done
    assert (
        task.params["name"]
        not in episode.step("aws s3api list-buckets").observation["command_output"]
    )


def test_step_before_reset_and_after_a_failed_reset(slot: Slot) -> None:
    episode = Episode(slot)
    with pytest.raises(EpisodeError, match="call reset"):
        episode.step("aws s3 ls")
    task = instantiate(1, 1)
    data = task.to_json()
    data["setup_commands"].append(
        {"service": "s3", "operation": "PutBucketVersioning", "params": {"Bucket": "none-such"}}
    )
    with pytest.raises(EpisodeError, match="PutBucketVersioning"):
        episode.reset(Task.from_json(data))
    with pytest.raises(EpisodeError, match="call reset"):
        episode.step("aws s3 ls")
    forbidden = [{"service": "athena", "operation": "StartQueryExecution", "params": {}}]
    with pytest.raises(EpisodeError, match="StartQueryExecution"):
        episode.reset(Task.from_json(data | {"setup_commands": forbidden}))
    with pytest.raises(TaskError):
        episode.reset(Task.from_json(data | {"success_criteria": {"no such": "criterion"}}))


def test_same_seed_same_observations(episode: Episode) -> None:
    task = instantiate(203, 4)

    def outputs() -> list[str]:
        episode.reset(task, seed=9)
        return [episode.step(command).observation["command_output"] for command in task.solution]

    assert outputs() == outputs()


def test_another_operation_that_reaches_the_state_is_as_good(episode: Episode) -> None:
    task = instantiate(ECR, 8)
    name = task.params["name"]
    repair = (
        f"aws ecr put-image-tag-mutability --repository-name {name} --image-tag-mutability "
        f"IMMUTABLE"
    )
    assert play(episode, task, [f"aws ecr create-repository --repository-name {name}", repair]) == (
        True,
        1.0,
    )
    assert play(
        episode,
        instantiate(CREATE_BUCKET, 8),
        ["aws s3 mb s3://" + instantiate(101, 8).params["name"]],
    )[0]


def test_three_levels() -> None:
    task = instantiate(VERSIONED, 1)
    texts = [hint_text(level, Criteria(), task.solution) for level in (1, 2, 3, 4)]
    assert texts[0] == "services: s3api"
    assert texts[1] == "operations in order: s3api create-bucket, s3api put-bucket-versioning"
    assert texts[2] == (
        "commands: aws s3api create-bucket --bucket ...; "
        "aws s3api put-bucket-versioning --bucket ... --versioning-configuration ..."
    )
    assert texts[3] == texts[2]


def test_no_value_is_told() -> None:
    for template in load_templates():
        task = instantiate(template.task_id, 2)
        told = hint_text(3, Criteria(), task.solution)
        for key, value in task.params.items():
            assert template.params[key] != "words" or value not in told
        assert "{" not in told and "arn:" not in told


@pytest.mark.parametrize(
    ("criteria", "level", "text"),
    [
        (
            {"steps": [{"operation": "s3:CreateBucket"}, {"operation": "sns:CreateTopic"}]},
            1,
            "services: s3api, sns",
        ),
        ({"operation": "iam:CreateUser"}, 3, "commands: aws iam create-user ..."),
        ({"state_checks": [{"command": "aws sns list-topics"}]}, 3, "commands: aws sns help"),
    ],
)
def test_a_task_without_a_solution_is_hinted_at_from_its_criteria(
    criteria: dict, level: int, text: str
) -> None:
    assert hint_text(level, parse_criteria(criteria), ()) == text


def test_what_is_no_command_is_left_out() -> None:
    criteria = parse_criteria({"operation": "iam:CreateUser"})
    assert hint_text(3, criteria, ("x", "aws 'sqs", "")) == "commands: aws iam create-user ..."


@pytest.mark.parametrize(
    "command",
    ["aws help", "aws help --task-hint x", "aws s3 help --task-hint", "AWS help --task-hint"],
)
def test_other_spellings_are_commands(command: str) -> None:
    assert is_hint_request(HINT_COMMAND) and not is_hint_request(command)


def test_each_hint_costs_up_to_three_and_no_command_is_counted(slot: Slot) -> None:
    episode = Episode(slot, max_steps=8)
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    create, enable = task.solution
    first = episode.step(create)
    hints = [episode.step(HINT_COMMAND) for _ in range(4)]
    assert [hint.observation["hints_used"] for hint in hints] == [1, 2, 3, 3]
    assert [hint.observation["step_count"] for hint in hints] == [2, 3, 4, 5]
    assert hints[2].observation["hint_text"] == hints[3].observation["hint_text"]
    assert all(
        hint.observation["command_success"] and not hint.observation["command_output"]
        for hint in hints
    )
    assert hints[0].reward == pytest.approx(0.45 * 0.85 - 0.45, abs=1e-8) and hints[3].reward == 0.0
    assert episode.state()["tracker"]["commands_executed"] == [create]
    last = episode.step(enable)
    total = first.reward + sum(hint.reward for hint in hints) + last.reward
    assert last.observation["task_achieved"] and total == pytest.approx(0.85**3, abs=1e-8)


def test_a_hint_does_not_make_up_for_a_failed_command(slot: Slot) -> None:
    episode = Episode(slot)
    task = instantiate(VERSIONED, 1)
    episode.reset(task)
    episode.step(task.solution[0])
    episode.step("aws s3api get-bucket-policy --bucket none-such")
    assert episode.step(HINT_COMMAND).reward < 0


def test_hints_use_up_steps(slot: Slot) -> None:
    episode = Episode(slot, max_steps=2)
    episode.reset(instantiate(VERSIONED, 1))
    assert not episode.step(HINT_COMMAND).done
    assert episode.step(HINT_COMMAND).observation["truncated"]
