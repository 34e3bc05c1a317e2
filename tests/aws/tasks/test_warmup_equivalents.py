"""Warm-up tasks ask what a request is about: every usual way to put the question is the right answer."""

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.tasks.captures import resolve
from realhf.aws.tasks.loader import fill, instantiate

pytestmark = pytest.mark.sim
FUNCTION = "arn:aws:lambda:us-east-1:000000000000:function:"


@pytest.mark.parametrize(
    ("task_id", "command"),
    [
        (1, "aws s3api list-objects --bucket {name}"),
        (1, "aws s3 ls s3://{name}"),
        (2, "aws dynamodb describe-table --table-name arn:aws:dynamodb:us-east-1:000000000000:table/{name}"),
        (6, "aws lambda get-function --function-name {name}"),
        (6, f"aws lambda get-function-configuration --function-name {FUNCTION}{{name}}"),
        (6, "aws lambda get-function --function-name arn:aws:lambda:us-east-1:000000000000:function:{name}"),
        (8, "aws ssm get-parameters --names {name}"),
        (9, "aws kinesis describe-stream-summary --stream-arn arn:aws:kinesis:us-east-1:000000000000:stream/{name}"),
        (13, "aws ecs describe-clusters --clusters arn:aws:ecs:us-east-1:000000000000:cluster/{name}"),
        (14, "aws route53 list-hosted-zones-by-name --dns-name {name}.example.com."),
        (15, "aws kms describe-key --key-id arn:aws:kms:us-east-1:000000000000:alias/{name}"),
        (15, "aws kms describe-key --key-id ${step1:Keys[0].KeyId}"),
        (20, "aws cloudtrail get-trail-status --name arn:aws:cloudtrail:us-east-1:000000000000:trail/{name}"),
        (22, "aws rds describe-db-instances --filters Name=db-instance-id,Values={name}"),
        (24, "aws cloudformation describe-stack-resources --stack-name {name}"),
    ],
)
def test_another_way_to_ask(episode: Episode, task_id: int, command: str) -> None:
    task = instantiate(task_id, 0)
    episode.reset(task)
    outputs = []
    if "${step1" in command:
        outputs.append(episode.step("aws kms list-keys").observation["command_output"])
    step = episode.step(resolve(fill(command, task.params), outputs))
    assert step.observation["task_achieved"], step.observation["error"]


@pytest.mark.parametrize(
    ("task_id", "command"),
    [
        (1, "aws s3api head-bucket --bucket {name}"),
        (6, "aws lambda get-function --function-name arn:aws:lambda:eu-west-1:000000000000:function:{name}"),
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
    create += "--key-schema AttributeName=id,KeyType=HASH --attribute-definitions AttributeName=id,AttributeType=S"
    met = episode.step(fill(create, task.params))
    assert "ResourceInUseException" in met.observation["error"] and met.reward == 0
    assert episode.step("aws sts get-caller-identity").reward == 0
