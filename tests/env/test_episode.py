"""Episodes on a real simulator: the shape of what is returned, endings, failures, and exploits of the grader."""

import json

import pytest

from realhf.env.episode import FINISHED, Episode, EpisodeError, masked_task
from realhf.env.pool import Slot
from realhf.env.task import Task, TaskError
from realhf.env.tasks import instantiate, solve

pytestmark = pytest.mark.sim

FIELDS = {
    *("episode_id", "step_count", "command_success", "command_output", "error", "task", "task_achieved"),
    *("partial_progress", "hints_used", "hint_text", "truncated", "refusal", "steps_left"),
}
CREATE_BUCKET, VERSIONED, ECR, RETENTION = 101, 201, 110, 205


def test_an_episode_from_reset_to_achievement(episode: Episode) -> None:
    task = instantiate(VERSIONED, 1)
    start = episode.reset(task, episode_id="e1")
    assert set(start.observation) == FIELDS and (start.reward, start.done) == (0.0, False)
    assert start.observation["task"] == masked_task(task)
    assert (start.observation["episode_id"], start.observation["steps_left"]) == ("e1", 15)
    first, second = (episode.step(command) for command in solve(task))
    assert (first.reward, first.done) == (pytest.approx(0.45), False)
    assert first.observation["partial_progress"] == 0.5 and not first.observation["truncated"]
    assert first.observation["command_success"] and "Location" in first.observation["command_output"]
    assert second.done and second.observation["task_achieved"] and first.reward + second.reward == 1.0
    after = episode.step("aws s3api list-buckets")
    assert (after.reward, after.done, after.observation["step_count"]) == (0.0, True, 2)
    assert after.observation["error"] == FINISHED and after.observation["command_output"] == ""


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
    create, retain = solve(task)
    rewards = [episode.step(command).reward for command in (create, create, retain)]
    assert rewards == pytest.approx([0.45, -0.225, 0.775])


def test_reset_leaves_nothing_behind(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 1)
    episode.reset(task)
    assert episode.step(solve(task)[0]).done
    assert not episode.reset(task).done
    assert task.params["name"] not in episode.step("aws s3api list-buckets").observation["command_output"]


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
        episode.reset(Task.from_json(data | {"success_criteria": {}}))


def test_same_seed_same_observations(episode: Episode) -> None:
    task = instantiate(203, 4)

    def outputs() -> list[str]:
        episode.reset(task, seed=9)
        return [episode.step(command).observation["command_output"] for command in solve(task)]

    assert outputs() == outputs()


def play(episode: Episode, task: Task, *commands: str) -> tuple[bool, float]:
    episode.reset(task)
    steps = [episode.step(command) for command in commands]
    return steps[-1].observation["task_achieved"], sum(step.reward for step in steps)


def test_layer_1_printed_or_unsent_success_is_no_success(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 2)
    name = task.params["name"]
    fakes = [
        f"aws sts get-caller-identity --query \"'Location: /{name}'\"",
        f"aws s3api create-bucket --bucket {name} --generate-cli-skeleton",
        "aws s3api create-bucket help",
        f"aws s3api create-bucket --bucket {name} --endpoint-url http://127.0.0.1:1",
    ]
    assert play(episode, task, *fakes) == (False, 0.0)


def test_layer_3_nothing_shown_holds_criteria_seed_or_solution(episode: Episode) -> None:
    task = instantiate(RETENTION, 3)
    shown = [episode.reset(task).observation]
    shown += [episode.step(command).observation for command in ("aws logs put-retention-policy", *solve(task))]
    text = json.dumps([shown, episode.state()])
    for secret in ("success_criteria", "verify", "retentionInDays", "setup_commands", "solution", '"seed"'):
        assert secret not in text
    assert set(masked_task(task) or {}) == {"task_id", "difficulty", "description"}


def test_layer_4_no_shell(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 4)
    line = solve(task)[0]
    hidden = [f"echo; {line}", f"true && {line}", f"sh -c '{line}'", f"AWS_PROFILE=x {line}", f"aws sts x\n{line}"]
    assert play(episode, task, *hidden) == (False, 0.0)


def test_layer_5_looking_is_not_doing(episode: Episode) -> None:
    task = instantiate(ECR, 5)
    name = task.params["name"]
    looks = [f"aws ecr describe-repositories --repository-names {name}", "aws ecr describe-repositories"]
    assert play(episode, task, *looks) == (False, 0.0)


def test_layer_6_create_and_delete_loops_do_not_pay(episode: Episode) -> None:
    task = instantiate(VERSIONED, 6)
    name = task.params["name"]
    loop = [f"aws s3api create-bucket --bucket {name}", f"aws s3api delete-bucket --bucket {name}"]
    achieved, total = play(episode, task, *loop * 5)
    assert not achieved and total == pytest.approx(0.35), "one create less one rollback"


def test_layer_8_what_was_undone_does_not_count(episode: Episode) -> None:
    task = instantiate(VERSIONED, 7)
    name = task.params["name"]
    create, enable = solve(task)
    episode.reset(task)
    episode.step(create)
    episode._slot.state.call("s3", "DeleteBucket", {"Bucket": name})
    last = episode.step(enable)
    assert not last.observation["task_achieved"], "the bucket is gone"
    suspended = enable.replace("Enabled", "Suspended")
    assert play(episode, task, create, suspended) == (False, pytest.approx(0.45))


def test_another_operation_that_reaches_the_state_is_as_good(episode: Episode) -> None:
    task = instantiate(ECR, 8)
    name = task.params["name"]
    repair = f"aws ecr put-image-tag-mutability --repository-name {name} --image-tag-mutability IMMUTABLE"
    assert play(episode, task, f"aws ecr create-repository --repository-name {name}", repair) == (True, 1.0)
    assert play(episode, instantiate(CREATE_BUCKET, 8), "aws s3 mb s3://" + instantiate(101, 8).params["name"])[0]
