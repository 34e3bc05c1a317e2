"""The in-process CLI prints what the ``aws`` program prints, byte for byte, on the same simulator state."""

from __future__ import annotations

import subprocess
import sys

import pytest

from realhf.env.pool import Slot, worker_environment

pytestmark = pytest.mark.sim

SETUP = [
    "aws s3 mb s3://alpha-logs",
    "aws sqs create-queue --queue-name jobs --attributes VisibilityTimeout=45",
    "aws dynamodb create-table --table-name users --attribute-definitions AttributeName=id,AttributeType=S "
    "--key-schema AttributeName=id,KeyType=HASH --billing-mode PAY_PER_REQUEST",
    "aws iam create-user --user-name dana",
    "aws sns create-topic --name alerts",
    "aws logs create-log-group --log-group-name /app/web",
    "aws ssm put-parameter --name /app/mode --value blue --type String",
]
COMMANDS = [
    "aws s3api list-buckets",
    "aws s3api list-buckets --query Buckets[].Name",
    "aws s3api list-buckets --query Buckets[].Name --output text",
    "aws s3api list-buckets --output table",
    "aws s3 ls",
    "aws s3 ls s3://alpha-logs",
    "aws s3 ls s3://missing-bucket",
    "aws s3api head-bucket --bucket alpha-logs",
    "aws s3api get-bucket-location --bucket missing-bucket",
    "aws s3api get-bucket-versioning --bucket alpha-logs",
    "aws s3api create-bucket",
    "aws s3api list-objects-v2 --bucket alpha-logs --max-items 3",
    "aws sqs list-queues",
    "aws sqs get-queue-url --queue-name jobs",
    "aws sqs get-queue-url --queue-name nope",
    "aws sqs get-queue-attributes --queue-url http://localhost:4566/000000000000/jobs --attribute-names All",
    "aws sqs create-queue --queue-nam jobs",
    "aws sqs create-queue --bogus 1",
    "aws dynamodb list-tables",
    "aws dynamodb describe-table --table-name users --query Table.KeySchema",
    "aws dynamodb describe-table --table-name nope",
    "aws dynamodb scan --table-name users",
    "aws dynamodb put-item --table-name users --item '{\"id\": {\"S\": \"1\"}}'",
    "aws dynamodb put-item --table-name users --item not-json",
    "aws dynamodb get-item --table-name users --key '{\"id\": {\"S\": \"1\"}}'",
    "aws iam list-users --query Users[].UserName",
    "aws iam get-user --user-name nobody",
    "aws iam list-roles --no-paginate",
    "aws sns list-topics",
    "aws sns list-topics --output text",
    "aws logs describe-log-groups --query logGroups[].logGroupName",
    "aws ssm get-parameter --name /app/mode --query Parameter.Value",
    "aws ssm get-parameters --names /app/mode /app/none --query InvalidParameters",
    "aws ec2 describe-vpcs",
    "aws ec2 describe-vpcs --output table",
    "aws ec2 describe-vpcs --query",
    "aws ec2 describe-security-groups --filters Name=group-name,Values=default",
    "aws lambda list-functions",
    "aws lambda get-function --function-name none",
    "aws kms list-keys",
    "aws sts get-caller-identity",
    "aws events list-rules --region us-east-1",
    "aws cloudwatch describe-alarms",
    "aws secretsmanager list-secrets",
    "aws stepfunctions list-state-machines",
    "aws ecr describe-repositories",
    "aws route53 list-hosted-zones",
    "aws dynamodb list-tables --query 'TableNames[0'",
]


def _aws_program(slot: Slot, command: str) -> tuple[int, str, str]:
    words = command.split(" ", 1)[1]
    script = (
        "import shlex,sys; from awscli.clidriver import main; "
        f"sys.argv=['aws','--endpoint-url','{slot.endpoint}']+shlex.split({words!r}); sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=worker_environment(), capture_output=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.decode().replace("\r", ""), done.stderr.decode().replace("\r", "")


def test_output_equals_the_aws_program(slot: Slot) -> None:
    for command in SETUP:
        assert slot.executor.run(command).success, command
    different = []
    for command in COMMANDS:
        ours = slot.executor.run(command)
        assert ours.refusal is None, (command, ours.stderr)
        expected = _aws_program(slot, command)
        got = (ours.exit_code, ours.stdout, ours.stderr)
        if got != expected:
            different.append((command, got, expected))
    assert not different, "\n".join(map(repr, different))
    assert len(COMMANDS) >= 40
