"""What single tasks pay, and what they do not: questions of the warm-up tier, repairs of the tier
expert, drift tasks.

Repairs are credited by the verified state of what the task names, and harm earns nothing. Drift
tasks ask to look first: a write that changes nothing costs, so the whole desired state is no
solution. Other right ways, and wrong ones, are plays (tests/aws/validation).
"""

import itertools

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.validation import BLIND_RETURN, play
from realhf.aws.tasks.loader import (
    Template,
    fill,
    instantiate,
    load_templates,
    whole_state,
    with_drifts,
)
from realhf.aws.tasks.task import choose_drifts

pytestmark = pytest.mark.sim

OWN_GROUP = "aws ec2 create-security-group --group-name mine --description mine"
OWN_RULE = "--group-id ${step1:GroupId} --protocol tcp --port 22 --cidr 0.0.0.0/0"
ALL_KEYS = "aws kms enable-key-rotation --key-id ${step1:KeyMetadata.KeyId}"


def earned(episode: Episode, task_id: int, *commands: str) -> float:
    task = instantiate(task_id, 0)
    achieved, total = play(episode, task, fill(list(commands), task.params))
    assert not achieved
    return total


@pytest.mark.parametrize(
    ("task_id", "commands"),
    [
        (
            407,
            [
                "aws route53 create-hosted-zone --name own.example --caller-reference own",
                "aws route53 change-resource-record-sets --hosted-zone-id ${step1:HostedZone.Id} "
                "--change-batch "
                '\'{"Changes":[{"Action":"CREATE","ResourceRecordSet":{"Name":"www.own.example","Type":"A","TTL":300,'
                '"ResourceRecords":[{"Value":"192.0.2.1"}]}}]}\'',
            ],
        ),
        (
            412,
            [
                "aws secretsmanager create-secret --name own --secret-string own",
                "aws secretsmanager put-secret-value --secret-id own --secret-string other",
                "aws secretsmanager tag-resource --secret-id own --tags Key=stage,Value=production",
            ],
        ),
        (
            413,
            [
                OWN_GROUP,
                f"aws ec2 authorize-security-group-ingress {OWN_RULE}",
                f"aws ec2 revoke-security-group-ingress {OWN_RULE}",
            ],
        ),
        (419, ["aws kms create-key --description own", ALL_KEYS]),
        (
            421,
            [
                "aws cloudwatch put-metric-alarm --alarm-name own --namespace Own --metric-name "
                "Own --statistic Sum "
                "--period 60 --evaluation-periods 1 --threshold 1 --comparison-operator "
                "GreaterThanThreshold"
            ],
        ),
        (
            422,
            [
                "aws ec2 create-volume --availability-zone us-east-1a --size 1",
                "aws ec2 delete-volume --volume-id ${step1:VolumeId}",
            ],
        ),
    ],
)
def test_own_resources_earn_nothing(episode: Episode, task_id: int, commands: list[str]) -> None:
    """The operations of the task, accepted, on what the agent made itself."""
    assert earned(episode, task_id, *commands) == 0.0


@pytest.mark.parametrize(
    ("task_id", "command"),
    [
        (411, "aws iam remove-user-from-group --group-name {name}-readers --user-name {name}"),
        (
            413,
            "aws ec2 revoke-security-group-ingress --group-id ${setup2:GroupId} --protocol tcp "
            "--port 443 "
            "--cidr 0.0.0.0/0",
        ),
        (416, "aws logs put-retention-policy --log-group-name /{name}/api --retention-in-days 1"),
        (416, "aws logs delete-log-group --log-group-name /{name}/audit"),
        (419, "aws kms enable-key-rotation --key-id ${setup3:KeyMetadata.KeyId}"),
        (422, "aws ec2 delete-volume --volume-id ${setup2:VolumeId}"),
        (424, "aws dynamodb delete-table --table-name {name}"),
    ],
)
def test_harm_earns_nothing(episode: Episode, task_id: int, command: str) -> None:
    assert earned(episode, task_id, command) <= 0.0


def test_what_was_harmed_and_restored_is_forgiven(episode: Episode) -> None:
    """Harm costs while it lasts; the repaired account with its neighbours as they were is what the
    task asks for."""
    task = instantiate(413, 0)
    rule = "--group-id ${setup2:GroupId} --protocol tcp --port 443 --cidr 0.0.0.0/0"
    detour = [f"aws ec2 {verb}-security-group-ingress {rule}" for verb in ("revoke", "authorize")]
    assert play(
        episode, task, [*detour, *(line.replace("step1", "step3") for line in task.solution)]
    ) == (True, 1.0)


DRIFTS = [template for template in load_templates(["expert"]) if template.possible_drifts]


@pytest.mark.parametrize("template", DRIFTS[::3], ids=lambda template: template.name)
def test_the_repair_of_what_drifted_is_worth_more_than_everything(
    episode: Episode, template: Template
) -> None:
    task = instantiate(template.task_id, 0)
    last = range(len(task.possible_drifts))[-2:]
    assert play(episode, task, with_drifts(task, last).solution, last) == (True, 1.0)
    assert play(episode, task, whole_state(task), last)[1] < 1.0


def test_a_write_that_changes_nothing_costs_and_a_look_does_not(episode: Episode) -> None:
    task = instantiate(502, 0)
    protect, recover = with_drifts(task, [0, 1]).solution
    look = f"aws dynamodb describe-table --table-name {task.params['name']}"
    assert play(episode, task, [look, look, protect, look, recover], [0, 1]) == (True, 1.0)
    achieved, total = play(episode, task, [protect, protect, recover], [0, 1])
    assert achieved and total == pytest.approx(0.5)
    gone = (
        look.replace("describe-table", "untag-resource").replace("--table-name", "--resource-arn")
        + " --tag-keys x"
    )
    achieved, total = play(episode, task, [gone, protect, recover], [0, 1])
    assert achieved and total == pytest.approx(0.5), (
        "an attempt that was refused is a blind one too"
    )


def test_another_wrong_value_over_one_that_drifted_is_a_needless_write(episode: Episode) -> None:
    """It takes away what should not be there, and brings nothing that should."""
    task = instantiate(505, 0)
    name = task.params["name"]
    retention = f"aws logs put-retention-policy --log-group-name /jobs/{name} --retention-in-days"
    for drifts in itertools.combinations(range(len(task.possible_drifts)), 2):
        repairs = with_drifts(task, drifts).solution
        for place, repair in enumerate(repairs):
            if not repair.startswith(retention):
                continue
            for days in ("7", "400"):
                spoilt = [f"{retention} {days}", *repairs]
                assert play(episode, task, spoilt, drifts) == (True, pytest.approx(0.5)), (
                    drifts,
                    place,
                    days,
                )
            removed = retention.replace("put", "delete").removesuffix(" --retention-in-days")
            assert play(episode, task, [removed, *repairs], drifts) == (True, 1.0), (
                "what is in the way may go first"
            )
    both = (
        "aws lambda update-function-configuration --function-name {} --timeout {} --environment {}"
    )
    task = instantiate(506, 0)
    name = task.params["name"]
    right = with_drifts(task, [0, 2]).solution
    assert play(episode, task, right, [0, 2]) == (True, 1.0)
    half = both.format(name, "7", "Variables={STAGE=production}")
    assert play(episode, task, [half, *right], [0, 2])[1] <= 0.5, "one is mended, and one is spoilt"


def test_a_wrong_value_written_first_does_not_make_a_blind_repair_one_with_a_look(
    episode: Episode,
) -> None:
    """Whatever drifted: everything is spoilt, and then the whole desired state is written."""
    task = instantiate(505, 0)
    name = task.params["name"]
    spoilt = [
        f"aws events put-rule --name {name} --schedule-expression 'rate(7 minutes)' --state "
        f"DISABLED",
        f"aws logs put-retention-policy --log-group-name /jobs/{name} --retention-in-days 7",
        f"aws ssm put-parameter --name /jobs/{name}/mode --value none --type String --overwrite",
    ]
    for pair in itertools.combinations(range(len(task.possible_drifts)), 2):
        assert play(episode, task, [*spoilt, *whole_state(task)], pair)[1] <= BLIND_RETURN, pair
        assert play(episode, task, with_drifts(task, pair).solution, pair) == (True, 1.0)


def test_the_solution_of_an_instance_repairs_what_its_seed_draws() -> None:
    for seed in range(20):
        task = instantiate(505, seed)
        drawn = choose_drifts(task.possible_drifts, task.seed)
        assert list(task.solution) == [command for drift in drawn for command in drift.repair]
    assert len({instantiate(505, seed).solution for seed in range(20)}) > 3


@pytest.mark.parametrize(
    ("task_id", "command"),
    [
        (1, "aws s3api head-bucket --bucket {name}"),
        (
            6,
            "aws lambda get-function --function-name "
            "arn:aws:lambda:eu-west-1:000000000000:function:{name}",
        ),
        (6, "aws lambda list-functions"),
        (8, "aws ssm get-parameters --names {name} {name}-2"),
        (13, "aws ecs describe-clusters --clusters {name} default"),
        (14, "aws route53 list-hosted-zones-by-name --dns-name example.com."),
        (22, "aws rds describe-db-instances --filters Name=engine,Values=postgres"),
        (24, "aws cloudformation list-stacks"),
    ],
)
def test_another_question(episode: Episode, task_id: int, command: str) -> None:
    task = instantiate(task_id, 0)
    episode.reset(task)
    step = episode.step(fill(command, task.params))
    assert (step.reward, step.done) == (0, False)


def test_a_duplicate_and_a_harmless_command_earn_nothing(episode: Episode) -> None:
    task = instantiate(324, 0)
    episode.reset(task)
    create = "aws dynamodb create-table --table-name {name} --billing-mode PAY_PER_REQUEST "
    create += (
        "--key-schema AttributeName=id,KeyType=HASH --attribute-definitions "
        "AttributeName=id,AttributeType=S"
    )
    met = episode.step(fill(create, task.params))
    assert "ResourceInUseException" in met.observation["error"] and met.reward == 0
    assert episode.step("aws sts get-caller-identity").reward == 0
