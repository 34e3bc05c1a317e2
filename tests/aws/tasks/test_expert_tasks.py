"""Repairs of the tier expert: credit for the verified state of what the task names, and none for harm."""

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.validation import play
from realhf.aws.tasks.loader import fill, instantiate, load_templates

pytestmark = pytest.mark.sim

REPAIRS = [template for template in load_templates(["expert"]) if not template.possible_drifts]
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
                "aws route53 change-resource-record-sets --hosted-zone-id ${step1:HostedZone.Id} --change-batch "
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
                "aws cloudwatch put-metric-alarm --alarm-name own --namespace Own --metric-name Own --statistic Sum "
                "--period 60 --evaluation-periods 1 --threshold 1 --comparison-operator GreaterThanThreshold"
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
            "aws ec2 revoke-security-group-ingress --group-id ${setup2:GroupId} --protocol tcp --port 443 "
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
    """Harm costs while it lasts; the repaired account with its neighbours as they were is what the task asks for."""
    task = instantiate(413, 0)
    rule = "--group-id ${setup2:GroupId} --protocol tcp --port 443 --cidr 0.0.0.0/0"
    detour = [f"aws ec2 {verb}-security-group-ingress {rule}" for verb in ("revoke", "authorize")]
    assert play(episode, task, [*detour, *(line.replace("step1", "step3") for line in task.solution)]) == (True, 1.0)
