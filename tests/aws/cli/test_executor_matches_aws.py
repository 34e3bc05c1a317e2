"""The in-process CLI prints what the ``aws`` program prints, byte for byte, on the same simulator state."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from realhf.aws.simulator.pool import Slot, worker_environment

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
    'aws dynamodb put-item --table-name users --item \'{"id": {"S": "1"}}\'',
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
    'aws dynamodb put-item --table-name users --item \'{"id": {"S": "1"}}\'',
    "aws dynamodb put-item --table-name users --item not-json",
    'aws dynamodb get-item --table-name users --key \'{"id": {"S": "1"}}\'',
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


PROGRAM = """
import json, os, shlex, sys, tempfile
import awscli.handlers
from awscli import clidriver

def start(command):
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.argv = ["aws", "--endpoint-url", sys.argv[1], *shlex.split(command)[1:]]
        try:
            code = clidriver.main()
        except SystemExit as error:
            code = error.code
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)
    return pid, out, err

def result(pid, *streams):
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read().decode().replace("\\r", ""))
    return [code, *texts]

commands, results = json.loads(sys.argv[2]), []
for at in range(0, len(commands), 2):
    results += [result(*started) for started in [start(command) for command in commands[at:at + 2]]]
print(json.dumps(results))
"""
"""The program itself, untouched, in a fresh process per command, two at a time; only its imports are shared."""


def _aws_program(slot: Slot, commands: list[str]) -> list[list[object]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, slot.endpoint, json.dumps(commands)],
        env=worker_environment(),
        capture_output=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_output_equals_the_aws_program(slot: Slot) -> None:
    for command in SETUP:
        assert slot.executor.run(command).success, command
    ours = [slot.executor.run(command) for command in COMMANDS]
    assert [result.refusal for result in ours] == [None] * len(COMMANDS)
    for command, result, expected in zip(COMMANDS, ours, _aws_program(slot, COMMANDS), strict=True):
        assert [result.exit_code, result.stdout, result.stderr] == expected, command
    assert len(COMMANDS) >= 40
