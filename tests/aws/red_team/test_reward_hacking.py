"""The eight layers against reward hacking, each with the exploit that it is there to stop.

And the property behind the reward: whatever an agent does, its rewards add up to its final score.

Source: docs/reference/environment.md 7.
"""

import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from realhf.aws.cli.policy import check_command
from realhf.aws.episode.chaos import Chaos
from realhf.aws.episode.episode import Episode, masked_task
from realhf.aws.episode.validation import play
from realhf.aws.episode.world import SlotState
from realhf.aws.grading.criteria import CriteriaStep, ListedResource, parse_criteria
from realhf.aws.grading.grader import check_passes, earns_credit, find_unused_request
from realhf.aws.grading.reward import monotone_progress, score
from realhf.aws.grading.tracker import Evidence, same_resource
from realhf.aws.messages import HINT_COMMAND
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import instantiate, load_templates, mistakes
from realhf.aws.tasks.task import Task

pytestmark = pytest.mark.sim
CREATE_BUCKET = 101
VERSIONED = 201
ECR = 110
RETENTION = 205
FAN_OUT = 203


def two_subscriptions(name: str) -> Task:
    """A wire task that wants two subscriptions to one topic."""
    step = {"operation": "sns:Subscribe", "resource": name}
    data = instantiate(FAN_OUT, 1).to_json()
    data["setup_commands"] = [f"aws sns create-topic --name {name}"]
    return Task.from_json(data | {"success_criteria": {"steps": [step, step]}, "solution": []})


def open_bucket(name: str) -> Task:
    """A wire task with state checks: versioning on, and the policy no longer for everybody."""
    bucket = {"Bucket": name}
    policy = json.dumps(
        {"Statement": [{"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": "*"}]}
    )
    look = f"aws s3api get-bucket-versioning --bucket {name}"
    checks = [
        {"command": look, "json_path": "$.Status", "expected": "Enabled"},
        {"command": f"aws s3api get-bucket-policy --bucket {name}", "output_contains": "Deny"},
    ]
    return Task.from_json(
        {
            "task_id": 9001,
            "difficulty": "expert",
            "description": f"Bucket {name} is open to the world and keeps no old versions. Repair "
            f"both.",
            "setup_commands": [
                {"service": "s3", "operation": "CreateBucket", "params": bucket},
                {
                    "service": "s3",
                    "operation": "PutBucketPolicy",
                    "params": bucket | {"Policy": policy},
                },
            ],
            "success_criteria": {"state_checks": checks},
            "hints": None,
        }
    )


def test_layer_1_printed_or_unsent_success_is_no_success(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 2)
    name = task.params["name"]
    fakes = [
        f"aws sts get-caller-identity --query \"'Location: /{name}'\"",
        f"aws s3api create-bucket --bucket {name} --generate-cli-skeleton",
        "aws s3api create-bucket help",
        f"aws s3api create-bucket --bucket {name} --endpoint-url http://127.0.0.1:1",
        f"aws ec2 create-volume --availability-zone us-east-1a --size 1 --dry-run --query "
        f"\"'{name}'\"",
    ]
    assert play(episode, task, fakes) == (False, 0.0)
    assert not check_passes(ListedResource("s3", "bucket", name), SlotState(episode._slot))


def test_layer_2_one_request_pays_once(episode: Episode) -> None:
    subscribe = (
        "aws sns subscribe --topic-arn arn:aws:sns:us-east-1:000000000000:alerts --protocol sqs "
        "--notification-endpoint arn:aws:sqs:us-east-1:000000000000:"
    )
    task = two_subscriptions("alerts")
    assert play(episode, task, [subscribe + "one"]) == (False, pytest.approx(0.45))
    assert play(episode, task, [subscribe + "one", subscribe + "two"]) == (True, 1.0)
    create = f"aws s3api create-bucket --bucket {instantiate(VERSIONED, 1).params['name']}"
    again = [create] * 5 + ["aws s3api list-buckets"]
    assert play(episode, instantiate(VERSIONED, 1), again) == (False, pytest.approx(0.45))
    deed = Evidence(0, "s3:CreateBucket", {}, "a", True, "")
    assert find_unused_request(CriteriaStep("s3:CreateBucket", "a"), [deed], [0]) is None


def test_layer_3_nothing_shown_holds_criteria_seed_or_solution(episode: Episode) -> None:
    shown = []
    told = []
    for task in (instantiate(RETENTION, 3), open_bucket("assets-of-all"), instantiate(FAN_OUT, 3)):
        shown.append(episode.reset(task).observation)
        commands = [
            "aws logs put-retention-policy",
            "aws help",
            *[HINT_COMMAND] * 4,
            *task.solution,
        ]
        shown += [episode.step(command).observation for command in commands]
        shown.append(episode.state())
        told += [change for answer in shown for change in answer.pop("account_changes", [])]
        assert set(masked_task(task) or {}) == {"task_id", "difficulty", "description"}
    assert told, "what the episode's own requests changed is told in their words"
    text = json.dumps(shown)
    changes = json.dumps(told)
    assert "retentionInDays" not in text
    for secret in (
        "success_criteria",
        "verify",
        "setup_commands",
        "solution",
        '"seed"',
        "state_checks",
        "get-bucket-policy",
        "$.Status",
        "json_path",
    ):
        assert secret not in text and secret not in changes


def test_layer_4_no_shell(episode: Episode) -> None:
    task = instantiate(CREATE_BUCKET, 4)
    line = task.solution[0]
    hidden = [
        f"echo; {line}",
        f"true && {line}",
        f"sh -c '{line}'",
        f"AWS_PROFILE=x {line}",
        f"aws sts x\n{line}",
    ]
    assert all(check_command(command).rule for command in hidden)
    assert play(episode, task, hidden) == (False, 0.0)


def test_layer_5_looking_is_not_doing(episode: Episode) -> None:
    name = instantiate(ECR, 5).params["name"]
    looks = [
        f"aws ecr describe-repositories --repository-names {name}",
        "aws ecr describe-repositories",
    ]
    assert play(episode, instantiate(ECR, 5), looks) == (False, 0.0)
    checks = [
        "aws s3api get-bucket-policy --bucket open",
        "aws s3api get-bucket-versioning --bucket open",
    ]
    task = open_bucket("open")
    assert play(episode, task, checks) == (False, 0.0), "all state checks by hand"
    assert not earns_credit(
        Evidence(0, "s3:GetBucketPolicy", {}, "open", True, ""), parse_criteria(task.success)
    )


def test_layer_6_create_and_delete_loops_do_not_pay(episode: Episode) -> None:
    task = instantiate(VERSIONED, 6)
    name = task.params["name"]
    loop = [f"aws s3api create-bucket --bucket {name}", f"aws s3api delete-bucket --bucket {name}"]
    achieved, total = play(episode, task, loop * 5)
    assert not achieved and total == 0, "the state is worth nothing in the end"
    assert monotone_progress(0.5, 0.2) == 0.5


@pytest.mark.parametrize("change", ["{}-2", "{}-", "my-{}", "x{}"])
def test_layer_7_only_the_exact_name(episode: Episode, change: str) -> None:
    task = instantiate(CREATE_BUCKET, 7)
    name = task.params["name"]
    other = change.format(name)
    assert not same_resource(other, name)
    assert play(episode, task, [f"aws s3api create-bucket --bucket {other}"])[0] is False
    assert play(episode, task, [f"aws s3api create-bucket --bucket {name} --region eu-west-1"]) == (
        False,
        0.0,
    )
    assert play(episode, task, [f"aws s3api create-bucket --bucket {name[:-1]}"]) == (False, 0.0)


def test_layer_8_what_was_undone_does_not_count(episode: Episode) -> None:
    task = instantiate(VERSIONED, 7)
    name = task.params["name"]
    create, enable = task.solution
    episode.reset(task)
    episode.step(create)
    episode._slot.state.call("s3", "DeleteBucket", {"Bucket": name})
    last = episode.step(enable)
    assert not last.observation["task_achieved"], "the bucket is gone"
    suspended = enable.replace("Enabled", "Suspended")
    assert play(episode, task, [create, suspended]) == (False, pytest.approx(0.45))


def test_layer_8_good_added_and_bad_left_is_half_a_repair(episode: Episode) -> None:
    enable = (
        "aws s3api put-bucket-versioning --bucket ajar --versioning-configuration Status=Enabled"
    )
    refusal = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": "*"}
    close = (
        f"aws s3api put-bucket-policy --bucket ajar --policy "
        f"'{json.dumps({'Statement': [refusal]})}'"
    )
    task = open_bucket("ajar")
    assert play(episode, task, [enable]) == (False, pytest.approx(0.45))
    assert play(episode, task, [enable, close]) == (True, 1.0)
    gone = ["aws s3api delete-bucket --bucket ajar", "aws s3api delete-bucket-policy --bucket ajar"]
    assert play(episode, task, gone)[0] is False, "to tear it down is no repair"


TASKS = [
    template.task_id for template in load_templates(tags=["starter"]) if template.tier != "warmup"
]
JUNK = [
    "aws",
    "aws s3api list-buckets",
    "aws nothing",
    "rm -rf /",
    "aws iam list-users --query '['",
    HINT_COMMAND,
]


def _actions(rng: random.Random, task: Task) -> list[str]:
    """Right, wrong, idle, destructive and repeated commands in any order."""
    wrong = [command for mistake in mistakes(task) for command in mistake.commands]
    undo = [command.replace("create-", "delete-").split(" --", 2) for command in task.solution]
    pool = [*task.solution * 3, *wrong, *JUNK, *(" --".join(words[:2]) for words in undo)]
    return [rng.choice(pool) for _ in range(rng.randint(1, 7))]


@pytest.mark.parametrize("episodes", [100, pytest.param(500, marks=pytest.mark.nightly)])
def test_rewards_of_random_episodes_add_up_to_their_final_scores(
    pool: MiniStackPool, episodes: int
) -> None:
    slots = [pool.acquire() for _ in range(pool.free_count)]
    rngs = [random.Random(f"lane {lane}") for lane in range(len(slots))]

    def lane(number: int) -> list[float]:
        rng = rngs[number]
        episode = Episode(slots[number], max_steps=6, chaos=True)
        totals = []
        for _ in range(episodes // len(slots)):
            task = instantiate(rng.choice(TASKS), rng.randrange(10**6))
            episode.reset(task)
            assert episode._chaos is not None
            episode._chaos = Chaos(0.3, rng, episode._chaos.grader, episode._chaos.state)
            steps = [episode.step(command) for command in _actions(rng, task)]
            tracker = episode._tracker
            last = steps[-1].observation
            final = score(
                last["partial_progress"],
                achieved=last["task_achieved"],
                last_failed=tracker.last_failed,
                rollbacks=tracker.rollbacks,
                idempotent_retries=tracker.idempotent_retries,
                hints=last["hints_used"],
                chaos_survived=last["task_achieved"] and bool(episode._chaos.broken),
            )
            assert sum(step.reward for step in steps) == final
            totals.append(final)
        return totals

    try:
        with ThreadPoolExecutor(len(slots)) as threads:
            totals = list(itertools.chain.from_iterable(threads.map(lane, range(len(slots)))))
    finally:
        for slot in slots:
            pool.release(slot)
    assert len(totals) == episodes and min(totals) >= 0.0 and 1.0 <= max(totals) <= 1.05
    assert len(set(totals)) > 9, "the episodes differ"
