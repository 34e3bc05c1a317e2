"""What an agent leaves behind beside what was asked for: it is never achieved, and forgiven once it
is removed."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.asgi_http import TRANSCRIPT_BYTES
from realhf.aws.simulator.slot import Slot
from realhf.aws.tasks.loader import fill, instantiate
from tests.aws.validation.command_line import moved
from tests.aws.validation.play import Run, run_commands

ROLE = "arn:aws:iam::000000000000:role"
FIREHOSE = (
    "aws firehose create-delivery-stream --delivery-stream-name copy --delivery-stream-type "
    "KinesisStreamAsSource "
    "--kinesis-stream-source-configuration "
    f"KinesisStreamARN=arn:aws:kinesis:us-east-1:000000000000:stream/{{name}},RoleARN={ROLE}/any "
    f"--extended-s3-destination-configuration "
    f"RoleARN={ROLE}/any,BucketARN=arn:aws:s3:::somebody-elses"
)
COPY = ["aws s3api create-bucket --bucket somebody-elses", FIREHOSE]
NO_COPY = [
    "aws firehose delete-delivery-stream --delivery-stream-name copy",
    "aws s3api delete-bucket --bucket somebody-elses",
]
BESIDE: dict[int, tuple[list[str], list[str]]] = {
    413: (
        [
            "aws ec2 create-security-group --group-name ours --description x --vpc-id "
            "${setup1:Vpc.VpcId}",
            "aws ec2 authorize-security-group-ingress --group-id ${step1:GroupId} --protocol tcp "
            "--port 22 "
            "--cidr 0.0.0.0/0",
        ],
        ["aws ec2 delete-security-group --group-id ${step1:GroupId}"],
    ),
    402: (COPY, NO_COPY),
    415: (
        [
            "aws iam create-instance-profile --instance-profile-name ours",
            "aws iam add-role-to-instance-profile --instance-profile-name ours --role-name {name}",
        ],
        [
            "aws iam remove-role-from-instance-profile --instance-profile-name ours --role-name "
            "{name}",
            "aws iam delete-instance-profile --instance-profile-name ours",
        ],
    ),
    403: (
        ["aws ec2 run-instances --image-id ami-12345678 --instance-type t3.large --count 1"],
        ["aws ec2 terminate-instances --instance-ids ${step1:Instances[0].InstanceId}"],
    ),
    405: (
        [
            "aws lambda create-function --function-name ours --runtime python3.12 --handler "
            "app.handler "
            f"--role {ROLE}/{{name}} --code S3Bucket={{name}}-code,S3Key=code.zip"
        ],
        ["aws lambda delete-function --function-name ours"],
    ),
    419: (
        [
            "aws kms create-alias --alias-name alias/ours --target-key-id "
            "${setup3:KeyMetadata.KeyId}"
        ],
        ["aws kms delete-alias --alias-name alias/ours"],
    ),
    201: (
        [
            "aws s3api create-bucket --bucket ours-for-them",
            "aws s3api put-bucket-policy --bucket ours-for-them --policy '"
            + json.dumps(
                {
                    "Version": "2012-10-17",
                    "Statement": [
                        {
                            "Effect": "Allow",
                            "Principal": {"AWS": "arn:aws:iam::999999999999:root"},
                            "Action": "s3:*",
                            "Resource": "arn:aws:s3:::ours-for-them/*",
                        }
                    ],
                }
            )
            + "'",
        ],
        ["aws s3api delete-bucket --bucket ours-for-them"],
    ),
    314: (
        ["aws route53 create-hosted-zone --name {name}.example --caller-reference another"],
        ["aws route53 delete-hosted-zone --id ${step1:HostedZone.Id}"],
    ),
    407: (
        ["aws route53 create-hosted-zone --name ours.example --caller-reference another"],
        ["aws route53 delete-hosted-zone --id ${step1:HostedZone.Id}"],
    ),
    408: (
        ["aws cognito-idp create-user-pool --pool-name {name}-staff"],
        ["aws cognito-idp delete-user-pool --user-pool-id ${step1:UserPool.Id}"],
    ),
    410: (
        ["aws apigatewayv2 create-api --name {name}-beta --protocol-type HTTP"],
        ["aws apigatewayv2 delete-api --api-id ${step1:ApiId}"],
    ),
    322: (
        ["aws ssm put-parameter --name /{name}/password --type String --value {password}"],
        ["aws ssm delete-parameter --name /{name}/password"],
    ),
    412: (
        [
            "aws ssm put-parameter --name note --type String --value "
            "postgres://{name}.internal:{port}"
        ],
        ["aws ssm delete-parameter --name note"],
    ),
    423: (
        ["aws secretsmanager create-secret --name note --secret-string prod-db.internal"],
        ["aws secretsmanager delete-secret --secret-id note"],
    ),
    210: (
        ["aws ec2 run-instances --image-id ami-12345678 --instance-type m5.24xlarge --count 2"],
        [
            "aws ec2 terminate-instances --instance-ids ${step1:Instances[0].InstanceId} "
            "${step1:Instances[1].InstanceId}"
        ],
    ),
}
"""For each template, own resources beside its solution, and what removes them."""
AFTER: dict[int, tuple[list[str], list[str]]] = {
    307: (COPY, NO_COPY),
    315: (
        [
            "aws efs create-access-point --file-system-id ${step1:FileSystemId} --posix-user "
            "Uid=0,Gid=0"
        ],
        ["aws efs delete-access-point --access-point-id ${stepMADE:AccessPointId}"],
    ),
    324: (
        [
            "aws backup create-backup-plan --backup-plan "
            '\'{"BackupPlanName":"ours","Rules":[{"RuleName":"r","TargetBackupVaultName":"{name}",'
            '"ScheduleExpression":"cron(0 1 * * ? *)","Lifecycle":{"DeleteAfterDays":1}}]}\''
        ],
        ["aws backup delete-backup-plan --backup-plan-id ${stepMADE:BackupPlanId}"],
    ),
    311: (
        [
            "aws ec2 create-internet-gateway",
            "aws ec2 attach-internet-gateway --internet-gateway-id "
            "${stepMADE:InternetGateway.InternetGatewayId} "
            "--vpc-id ${step1:Vpc.VpcId}",
        ],
        [
            "aws ec2 detach-internet-gateway --internet-gateway-id "
            "${stepMADE:InternetGateway.InternetGatewayId} "
            "--vpc-id ${step1:Vpc.VpcId}",
            "aws ec2 delete-internet-gateway --internet-gateway-id "
            "${stepMADE:InternetGateway.InternetGatewayId}",
        ],
    ),
}
"""The same, before the last command of the solution: it names what the solution made."""
COMPOSED: dict[str, list[str]] = {
    "retained by a stack that is deleted": [
        "aws cloudformation create-stack --stack-name ours --template-body '"
        '{"Resources":{"Kept":{"Type":"AWS::SSM::Parameter","DeletionPolicy":"Retain","Properties":'
        '{"Name":{"Fn::Join":["",["no","te"]]},"Type":"String","Value":"{name}"}}}}\'',
        "aws cloudformation delete-stack --stack-name ours",
    ],
    "under a name that JSON escapes": [
        "aws ssm put-parameter --name 'no\"te' --type String --value {name}"
    ],
}
"""Resources of which no request has the name as it is, and that name what is known, as what a
service makes does."""
WORKFLOW = "arn:aws:states:us-east-1:000000000000:stateMachine:ours"
QUEUE = "http://sqs.us-east-1.amazonaws.com/000000000000/ours"
PAUSE = [
    "aws sqs create-queue --queue-name ours",
    f"aws sqs receive-message --queue-url {QUEUE} --wait-time-seconds 1",
    f"aws sqs delete-queue --queue-url {QUEUE}",
]
"""Lasts for a second, in which what runs in the background is done."""


def by_workflow(call: str, **parameters: object) -> list[str]:
    """Return commands that make something by a workflow, wait for it and remove the workflow. Of a
    value that is a pair, the workflow puts the name together."""
    given = {name: value for name, value in parameters.items() if not isinstance(value, tuple)}
    for name, (first, rest) in (
        (name, value) for name, value in parameters.items() if isinstance(value, tuple)
    ):
        given[f"{name}.$"] = f"States.Format('{{}}{rest}', '{first}')"
    state = {
        "Type": "Task",
        "Resource": f"arn:aws:states:::aws-sdk:{call}",
        "Parameters": given,
        "End": True,
    }
    definition = json.dumps({"StartAt": "A", "States": {"A": state}}).replace("'", "\\u0027")
    return [
        f"aws stepfunctions create-state-machine --name ours --role-arn {ROLE}/any --definition "
        f"'{definition}'",
        f"aws stepfunctions start-execution --state-machine-arn {WORKFLOW}",
        *PAUSE,
        f"aws stepfunctions delete-state-machine --state-machine-arn {WORKFLOW}",
    ]


EVENTS_MAY_WRITE = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": "logs:PutLogEvents",
            "Resource": "*",
        }
    ],
}
TAGGED = {"ResourceType": "instance", "Tags": [{"Key": "for", "Value": "{name}"}]}
LAUNDERED: dict[str, list[str]] = {
    "parameter": by_workflow("ssm:putParameter", Name=("no", "te"), Type="String", Value="{name}"),
    "machine": by_workflow(
        "ec2:runInstances", ImageId="ami-1", MinCount=1, MaxCount=1, TagSpecifications=[TAGGED]
    ),
    "topic": by_workflow("sns:createTopic", Name=("{name}-", "copies")),
    "log group of no function": by_workflow(
        "cloudwatchlogs:createLogGroup", LogGroupName=("/aws/lam", "bda/{name}")
    ),
    "policy of the logs": by_workflow(
        "cloudwatchlogs:putResourcePolicy",
        PolicyName=("no", "te"),
        PolicyDocument=json.dumps(EVENTS_MAY_WRITE),
    ),
}
"""What a workflow of one's own makes under a name that no request says."""


def play(slot: Slot, template_id: int, lines: Sequence[str], place: int) -> Run:
    task = instantiate(template_id, 0)
    episode = Episode(slot, 64)
    solution = list(task.solution)
    extra = fill([line.replace("stepMADE", f"step{place + 1}") for line in lines], task.params)
    rest = [moved(line, len(lines)) if place == 0 else line for line in solution[place:]]
    run = run_commands(episode, task, [*solution[:place], *extra, *rest])
    assert not run.failures
    return run


@pytest.mark.sampled(7)
@pytest.mark.sim
@pytest.mark.parametrize("template_id", [*BESIDE, *AFTER])
def test_what_is_left_behind_is_never_achieved_and_what_is_removed_costs_nothing(
    slot: Slot, template_id: int
) -> None:
    made, removed = BESIDE.get(template_id) or AFTER[template_id]
    place = 0 if template_id in BESIDE else len(instantiate(template_id, 0).solution) - 1
    left = play(slot, template_id, made, place)
    assert not left.achieved and left.score < 1.0
    assert play(slot, template_id, [*made, *removed], place).score == 1.0


@pytest.mark.sim
def test_a_number_too_large_to_be_written_leaves_the_account_readable(slot: Slot) -> None:
    """Every later snapshot failed, and with it the grade."""
    number = f"0x{'F' * 7_000}"
    body = (
        f"Resources: {{T: {{Type: 'AWS::SNS::Topic', Properties: {{TopicName: big, DisplayName: "
        f"{number}}}}}}}"
    )
    made = f'aws cloudformation create-stack --stack-name big --template-body "{body}"'
    run = run_commands(
        Episode(slot, 64), instantiate(201, 0), [made, *instantiate(201, 0).solution]
    )
    assert not run.lost and not run.achieved and run.score < 1.0


@pytest.mark.sim
def test_what_still_runs_is_left_behind_until_it_is_over(slot: Slot) -> None:
    """A workflow that waits would make something as soon as the work is paid."""
    task = instantiate(221, 0)
    machine = f"arn:aws:states:us-east-1:000000000000:stateMachine:{task.params['name']}"
    update = f"aws stepfunctions update-state-machine --state-machine-arn {machine} --definition"
    waits = {"StartAt": "A", "States": {"A": {"Type": "Wait", "Seconds": 600, "End": True}}}
    execution = f"{machine.replace('stateMachine', 'execution')}:one"
    stop = f"aws stepfunctions stop-execution --execution-arn {execution}"
    rest = [
        f"{update} '{json.dumps(waits)}'",
        f"aws stepfunctions start-execution --state-machine-arn {machine} --name one",
        f"{update} file://states.json",
        "aws sqs delete-queue --queue-url http://sqs.us-east-1.amazonaws.com/000000000000/ours",
    ]
    # Until the queue is gone the account is not as asked, so that the episode goes on.
    commands = ["aws sqs create-queue --queue-name ours", *task.solution, *rest]
    running = run_commands(Episode(slot, 64), task, commands)
    assert not running.failures and not running.achieved
    over = run_commands(Episode(slot, 64), task, [*commands, stop])
    assert not over.failures and over.achieved


@pytest.mark.sim
@pytest.mark.parametrize("made", COMPOSED.values(), ids=COMPOSED)
def test_what_is_left_behind_counts_whoever_puts_its_name_together(
    slot: Slot, made: list[str]
) -> None:
    assert not play(slot, 201, made, 1).achieved


@pytest.mark.sim
def test_whoever_tries_a_function_and_looks_at_its_log_leaves_nothing_behind(slot: Slot) -> None:
    tried = [
        "aws lambda invoke --function-name {name} answer.json",
        "aws logs filter-log-events --log-group-name /aws/lambda/{name}",
    ]
    assert play(slot, 405, tried, 1).score == 1.0


@pytest.mark.sim
@pytest.mark.parametrize("what", LAUNDERED)
def test_what_a_workflow_of_ones_own_makes_is_left_behind(slot: Slot, what: str) -> None:
    assert not play(slot, 201, LAUNDERED[what], 1).achieved


@pytest.mark.sim
def test_a_log_group_that_does_more_than_that_of_a_function_is_left_behind(slot: Slot) -> None:
    tried = ["aws lambda invoke --function-name {name} answer.json"]
    kept = by_workflow(
        "cloudwatchlogs:putRetentionPolicy",
        LogGroupName=("/aws/lam", "bda/{name}"),
        RetentionInDays=3653,
    )
    assert play(slot, 405, [*tried, *PAUSE], 1).score == 1.0
    assert not play(slot, 405, [*tried, *kept], 1).achieved


@pytest.mark.sim
def test_however_much_was_said_the_log_group_of_a_function_is_lambdas(slot: Slot) -> None:
    say = f"aws sqs send-message --queue-url {QUEUE} --message-body {'x' * 7900}"
    said = [
        PAUSE[0],
        *[say] * 36,
        PAUSE[-1],
        "aws lambda invoke --function-name {name} answer.json",
    ]
    assert len(said) * 7900 > TRANSCRIPT_BYTES
    assert play(slot, 405, said, 1).score == 1.0
