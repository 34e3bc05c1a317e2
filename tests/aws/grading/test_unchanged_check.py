"""What a task protects: harm to it costs more than doing nothing, whatever else was right, until it is made good."""

from typing import Any

import pytest

from realhf.aws.cli.executor import CommandResult
from realhf.aws.episode.episode import Episode, EpisodeError
from realhf.aws.grading.reward import HARM_PENALTY, RewardMeter
from realhf.aws.tasks.task import Task, TaskError

pytestmark = pytest.mark.sim
PENALTY = -HARM_PENALTY
SETUP = [
    {
        "service": "sqs",
        "operation": "CreateQueue",
        "params": {"QueueName": name, "Attributes": {"VisibilityTimeout": "75"}},
    }
    for name in ("jobs", "audit")
] + [{"service": "s3", "operation": "CreateBucket", "params": {"Bucket": "ledger"}}]
DELAY = {"service": "sqs", "type": "queue", "name": "jobs", "attributes": {"DelaySeconds": "9"}}
KEPT = {"unchanged": {"service": "sqs", "type": "queue", "name": "jobs", "fields": ["VisibilityTimeout"]}}


def task(**criteria: Any) -> Task:
    data = {"task_id": 9000, "difficulty": "expert", "description": "delay", "setup_commands": SETUP}
    return Task.from_json(data | {"success_criteria": criteria})


def of_the_queue(name: str, **attributes: str) -> str:
    values = ",".join(f"{key}={value}" for key, value in attributes.items())
    return f"aws sqs set-queue-attributes --queue-url http://localhost/000000000000/{name} --attributes {values}"


class LosingExecutor:
    """A fake whose commands run, but whose workers are lost over them."""

    def __init__(self, real: Any, end: dict[str, bool]) -> None:
        self.real, self._end = real, end

    def run(self, command: str) -> CommandResult:
        assert self.real.run(command).success
        return CommandResult(255, "", "lost", **self._end)


PROTECTED = [
    {"service": "sqs", "type": "queue", "name": "audit", "fields": ["VisibilityTimeout", "DelaySeconds"]},
    {"service": "s3", "type": "bucket", "name": "ledger"},
    {
        "call": {"service": "s3", "operation": "ListObjectsV2", "params": {"Bucket": "ledger"}},
        "json_path": "Contents[].Key",
    },
]


def test_harm_costs_and_is_made_good(episode: Episode) -> None:
    episode.reset(task(state_checks=[DELAY, KEPT], protected=PROTECTED))
    assert episode.step(of_the_queue("audit", DelaySeconds="9")).reward == PENALTY
    right = episode.step(of_the_queue("jobs", DelaySeconds="9"))
    assert (right.reward, right.done) == (0, False), "what was asked for does not make up for harm"
    healed = episode.step(of_the_queue("audit", DelaySeconds="0"))
    assert healed.done and healed.reward == 1 - PENALTY


def test_what_is_gone_is_harmed_and_a_read_harms_nothing(episode: Episode) -> None:
    episode.reset(task(state_checks=[DELAY], protected=PROTECTED))
    assert episode.step("aws s3api list-objects-v2 --bucket ledger").reward == 0
    assert episode.step("aws s3api put-object --bucket ledger --key x").reward == PENALTY
    assert episode.step("aws s3api delete-object --bucket ledger --key x").reward == -PENALTY
    assert episode.step("aws s3api delete-bucket --bucket ledger").reward == PENALTY
    assert episode.step("aws help --task-hint").reward == 0, "a hint does not make harm cheaper"


def test_what_must_not_change_of_the_task_itself_only_keeps_it_from_being_achieved(episode: Episode) -> None:
    episode.reset(task(state_checks=[DELAY, KEPT]))
    step = episode.step(of_the_queue("jobs", DelaySeconds="9", VisibilityTimeout="10"))
    assert (step.reward, step.done) == (0, False)
    episode.reset(task(state_checks=[DELAY, KEPT]))
    assert episode.step(of_the_queue("jobs", DelaySeconds="9")).observation["task_achieved"]


def test_steps_and_creations_protect_too(episode: Episode) -> None:
    create = {"operation": "s3:CreateBucket", "resource_exists": {"service": "s3", "type": "bucket", "name": "new"}}
    for criteria in (create, {"steps": [{"operation": "s3:CreateBucket", "resource": "new"}]}):
        episode.reset(task(**criteria, protected=PROTECTED))
        assert episode.step("aws s3api delete-bucket --bucket ledger").reward == PENALTY
        assert not episode.step("aws s3api create-bucket --bucket new").done
        assert episode.step("aws s3api create-bucket --bucket ledger").done, "there again, as empty as it was"


def test_a_task_cannot_protect_what_does_not_exist(episode: Episode) -> None:
    with pytest.raises((TaskError, EpisodeError), match="does not exist"):
        episode.reset(task(state_checks=[DELAY], protected=[{"service": "s3", "type": "bucket", "name": "nowhere"}]))


@pytest.mark.parametrize("end", [{"timed_out": True}, {"stopped": True}])
def test_harm_by_a_command_that_nobody_saw_the_end_of_counts(episode: Episode, end: Any) -> None:
    """Its worker was lost, and with it the account of what it sent."""
    episode.reset(task(state_checks=[DELAY], protected=PROTECTED))
    assert episode.state()["infra_state"]["s3"]["bucket"] == ["ledger"]
    executor = LosingExecutor(episode._slot.executor, end)
    episode._slot.executor = executor
    try:
        step = episode.step("aws s3api delete-bucket --bucket ledger")
        assert not step.observation["command_success"] and step.reward == PENALTY
        assert "s3" not in episode.state()["infra_state"]
        assert episode.step("aws s3api create-bucket --bucket ledger").reward == -PENALTY
        assert episode.step(of_the_queue("jobs", DelaySeconds="9")).done, "what it brought about counts as well"
    finally:
        episode._slot.executor = executor.real


@pytest.mark.parametrize("mode", ["potential", "level"])
def test_harm_counts_in_both_modes(mode: str) -> None:
    meter = RewardMeter(mode)
    meter.step(0.5, harmed=True, hints=3)
    assert meter.total == pytest.approx(PENALTY)
