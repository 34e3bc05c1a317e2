"""Worlds of tasks: set-up as requests and command lines, captures, decoys, files, drifts; built
whole or not at all."""

import itertools
import json

import pytest

from realhf.aws.episode.episode import Episode, EpisodeError, masked_task
from realhf.aws.episode.validation import find_problems, play
from realhf.aws.tasks.task import Task, TaskError, choose_drifts

pytestmark = pytest.mark.sim


def wire_task(**fields: object) -> Task:
    """A task as another maker would send it."""
    data = {
        "task_id": 9002,
        "difficulty": "expert",
        "description": "The queue jobs must be there.",
        "success_criteria": {
            "operation": "create-queue",
            "resource_exists": {"service": "sqs", "name": "jobs"},
        },
        "solution": ["aws sqs create-queue --queue-name jobs"],
    }
    return Task.from_json(json.dumps(data | fields))


def test_set_up_as_command_lines(episode: Episode) -> None:
    lines = [
        "aws s3 mb s3://first-one",
        {"command": "aws sns create-topic --name t", "description": "a topic"},
    ]
    task = wire_task(setup_commands=lines)
    assert Task.from_json(task.to_json()) == task
    episode.reset(task)
    assert "first-one" in episode.step("aws s3api list-buckets").observation["command_output"]
    assert episode.inventory()["sns"] == {"topic": ["t"]}
    assert episode.state()["tracker"]["commands_executed"] == ["aws s3api list-buckets"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("aws configure list", "refused"),
        ("rm -rf /", "refused"),
        ("aws s3 mb s3://b --endpoint-url http://127.0.0.1:1", "refused"),
        ("aws s3api put-object --bucket none-such --key k", "NoSuchBucket"),
        ("aws s3api put-object --bucket b --key k --body /etc/passwd", "refused"),
    ],
)
def test_set_up_obeys_the_policy_of_agents_and_must_succeed(
    episode: Episode, line: str, said: str
) -> None:
    with pytest.raises(EpisodeError, match=said):
        episode.reset(wire_task(setup_commands=[line]))
    with pytest.raises(EpisodeError, match="call reset"):
        episode.step("aws s3 ls")


def test_a_failure_may_be_ignored_but_not_a_refusal(episode: Episode) -> None:
    missing = {
        "service": "s3",
        "operation": "DeleteBucket",
        "params": {"Bucket": "none-such"},
        "ignore_failure": True,
    }
    line = {"command": "aws s3 rb s3://none-such", "ignore_failure": True}
    assert play(episode, wire_task(setup_commands=[missing, line]), wire_task().solution) == (
        True,
        1.0,
    )
    with pytest.raises(EpisodeError, match="refused"):
        episode.reset(
            wire_task(setup_commands=[{"command": "aws configure list", "ignore_failure": True}])
        )


def test_captures_of_set_up_and_of_steps(episode: Episode) -> None:
    task = wire_task(
        setup_commands=[
            {"service": "ec2", "operation": "CreateVpc", "params": {"CidrBlock": "10.1.0.0/16"}},
            {
                "service": "ec2",
                "operation": "CreateSubnet",
                "params": {"VpcId": "${setup1:Vpc.VpcId}", "CidrBlock": "10.1.1.0/24"},
            },
        ],
        description="Subnet ${setup2:$.Subnet.SubnetId} needs the tag Name=core.",
        success_criteria={
            "state_checks": [
                {
                    "command": "aws ec2 describe-subnets --subnet-ids ${setup2:Subnet.SubnetId}",
                    "json_path": "Subnets[0].Tags[0].Value",
                    "expected": "core",
                }
            ]
        },
        solution=[
            "aws ec2 describe-subnets --subnet-ids ${setup2:Subnet.SubnetId}",
            "aws ec2 create-tags --resources ${step1:Subnets[0].SubnetId} --tags "
            "Key=Name,Value=core",
        ],
    )
    shown = episode.reset(task).observation["task"]["description"]
    assert "subnet-" in shown and "$" not in shown
    assert play(episode, task, task.solution) == (True, 1.0)
    with pytest.raises(EpisodeError, match="matches nothing"):
        episode.reset(
            wire_task(description="${setup1:Nope}", setup_commands=["aws s3 mb s3://bbb"])
        )


def test_assets_lie_in_the_folder_and_are_gone_afterwards(episode: Episode) -> None:
    policy = json.dumps({"Version": "2012-10-17", "Statement": []})
    task = wire_task(setup_commands=["aws s3 mb s3://docs"], assets={"policy.json": policy})
    episode.reset(task)
    put = "aws s3api put-bucket-policy --bucket docs --policy file://policy.json"
    assert episode.step(put).observation["command_success"]
    assert (
        "2012-10-17"
        in episode.step("aws s3api get-bucket-policy --bucket docs").observation["command_output"]
    )
    episode.reset(wire_task(setup_commands=["aws s3 mb s3://docs"]))
    assert not episode.step(put).observation["command_success"]
    with pytest.raises(TaskError, match="plain file name"):
        episode.reset(wire_task(assets={"../x": ""}))


def test_decoys_are_there(episode: Episode) -> None:
    decoys = [
        {"service": "sqs", "operation": "CreateQueue", "params": {"QueueName": f"jobs-{i}"}}
        for i in range(2)
    ]
    episode.reset(wire_task(decoys=decoys))
    assert episode.inventory()["sqs"]["queue"] == ["jobs-0", "jobs-1"]


def drifting_task(**fields: object) -> Task:
    queue = "http://localhost/000000000000/jobs"
    attributes = {"VisibilityTimeout": "30", "DelaySeconds": "0", "MaximumMessageSize": "1024"}
    changes = {"VisibilityTimeout": "5", "DelaySeconds": "60", "MaximumMessageSize": "2048"}
    look = f"aws sqs get-queue-attributes --queue-url {queue} --attribute-names All"
    checks = [
        {"command": look, "json_path": f"Attributes.{key}", "expected": value}
        for key, value in attributes.items()
    ]
    line = "aws sqs set-queue-attributes --queue-url " + queue + " --attributes "
    return wire_task(
        setup_commands=[
            {
                "service": "sqs",
                "operation": "CreateQueue",
                "params": {"QueueName": "jobs", "Attributes": attributes},
            }
        ],
        desired_state_spec="visibility 30 s, no delay, messages of 1024 bytes",
        possible_drifts=[
            {
                "service": "sqs",
                "operation": "SetQueueAttributes",
                "params": {"QueueUrl": queue, "Attributes": {key: value}},
                "description": key,
            }
            for key, value in changes.items()
        ],
        success_criteria={"state_checks": checks},
        solution=[line + f"{key}={value}" for key, value in attributes.items()],
        **fields,
    )


def test_drifts_are_drawn_by_the_seed() -> None:
    drawn = [tuple(choose_drifts("abcdef", seed)) for seed in range(200)]
    assert drawn == [tuple(choose_drifts("abcdef", seed)) for seed in range(200)]
    assert {len(drifts) for drifts in drawn} == {2, 3} and len(set(drawn)) > 25
    assert {letter for drifts in drawn for letter in drifts} == set("abcdef")
    assert choose_drifts("a", 1) == ["a"] and choose_drifts("", 1) == []


def test_a_drift_task(episode: Episode) -> None:
    task = drifting_task()
    assert Task.from_json(json.dumps(task.to_json())) == task
    observation = episode.reset(task, seed=3).observation
    assert observation["task"] == masked_task(task)
    assert observation["task"]["desired_state_spec"] == task.desired_state_spec

    def world() -> str:
        return episode.step(
            "aws sqs get-queue-attributes --queue-url http://localhost/000000000000/jobs "
            "--attribute-names "
            "VisibilityTimeout DelaySeconds MaximumMessageSize"
        ).observation["command_output"]

    worlds = {seed: (episode.reset(task, seed=seed), world())[1] for seed in range(8)}
    assert len(set(worlds.values())) > 1
    assert all(
        (episode.reset(task, seed=seed), world())[1] == seen for seed, seen in worlds.items()
    )
    for drifts in itertools.chain(*(itertools.combinations(range(3), count) for count in (2, 3))):
        assert play(episode, task, task.solution, drifts) == (True, 1.0)
        assert play(episode, task, task.solution[: min(drifts)], drifts)[0] is False


def test_a_drift_that_fails_fails_the_reset(episode: Episode) -> None:
    broken = {"service": "s3", "operation": "DeleteBucket", "params": {"Bucket": "none-such"}}
    with pytest.raises(EpisodeError, match="drift"):
        episode.reset(wire_task(possible_drifts=[broken]))


def test_acceptance_names_a_drift_that_breaks_nothing(episode: Episode) -> None:
    task = drifting_task()
    data = task.to_json()
    harmless = {
        "service": "sqs",
        "operation": "TagQueue",
        "description": "harmless",
        "params": {"QueueUrl": "http://localhost/000000000000/jobs", "Tags": {"a": "b"}},
    }
    data["possible_drifts"] = [
        harmless,
        harmless | {"params": {**harmless["params"], "Tags": {"c": "d"}}},
    ]
    found = " ".join(_thorough(episode, Task.from_json(data)))
    assert "every state check" in found


def _thorough(episode: Episode, task: Task) -> list[str]:
    try:
        return [*map(str, find_problems(episode, task, thorough=True))]
    except TaskError as error:
        return [str(error)]
