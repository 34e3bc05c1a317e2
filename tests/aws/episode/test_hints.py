"""Hints: their levels, what they never tell, what they cost."""

import pytest

from realhf.aws.episode.episode import HINT_COMMAND, Episode, hint_text, is_hint_request
from realhf.aws.grading.criteria import Criteria, parse_criteria
from realhf.aws.simulator.pool import Slot
from realhf.aws.tasks.loader import instantiate, load_templates

VERSIONED = 201


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
        ({"steps": [{"operation": "s3:CreateBucket"}, {"operation": "sns:CreateTopic"}]}, 1, "services: s3api, sns"),
        ({"operation": "iam:CreateUser"}, 3, "commands: aws iam create-user ..."),
        ({"state_checks": [{"command": "aws sns list-topics"}]}, 3, "commands: aws sns help"),
    ],
)
def test_a_task_without_a_solution_is_hinted_at_from_its_criteria(criteria: dict, level: int, text: str) -> None:
    assert hint_text(level, parse_criteria(criteria), ()) == text


def test_what_is_no_command_is_left_out() -> None:
    criteria = parse_criteria({"operation": "iam:CreateUser"})
    assert hint_text(3, criteria, ("x", "aws 'sqs", "")) == "commands: aws iam create-user ..."


@pytest.mark.parametrize(
    "command", ["aws help", "aws help --task-hint x", "aws s3 help --task-hint", "AWS help --task-hint"]
)
def test_other_spellings_are_commands(command: str) -> None:
    assert is_hint_request(HINT_COMMAND) and not is_hint_request(command)


@pytest.mark.sim
def test_each_hint_costs_up_to_three_and_no_command_is_counted(slot: Slot) -> None:
    episode, task = Episode(slot, max_steps=8), instantiate(VERSIONED, 1)
    episode.reset(task)
    create, enable = task.solution
    first = episode.step(create)
    hints = [episode.step(HINT_COMMAND) for _ in range(4)]
    assert [hint.observation["hints_used"] for hint in hints] == [1, 2, 3, 3]
    assert [hint.observation["step_count"] for hint in hints] == [2, 3, 4, 5]
    assert hints[2].observation["hint_text"] == hints[3].observation["hint_text"]
    assert all(hint.observation["command_success"] and not hint.observation["command_output"] for hint in hints)
    assert hints[0].reward == pytest.approx(0.45 * 0.85 - 0.45, abs=1e-8) and hints[3].reward == 0.0
    assert episode.state()["tracker"]["commands_executed"] == [create]
    last = episode.step(enable)
    total = first.reward + sum(hint.reward for hint in hints) + last.reward
    assert last.observation["task_achieved"] and total == pytest.approx(0.85**3, abs=1e-8)


@pytest.mark.sim
def test_a_hint_does_not_make_up_for_a_failed_command(slot: Slot) -> None:
    episode, task = Episode(slot), instantiate(VERSIONED, 1)
    episode.reset(task)
    episode.step(task.solution[0])
    episode.step("aws s3api get-bucket-policy --bucket none-such")
    assert episode.step(HINT_COMMAND).reward < 0


@pytest.mark.sim
def test_hints_use_up_steps(slot: Slot) -> None:
    episode = Episode(slot, max_steps=2)
    episode.reset(instantiate(VERSIONED, 1))
    assert not episode.step(HINT_COMMAND).done
    assert episode.step(HINT_COMMAND).observation["truncated"]
