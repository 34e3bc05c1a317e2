"""What tasks accept and what they do not: every right way earns all, and what misses the goal does
not."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from realhf.aws.episode.episode import Episode
from realhf.aws.episode.validation import play
from realhf.aws.tasks.loader import fill, instantiate

pytestmark = pytest.mark.sim
SEED = 0


def played(episode: Episode, task_id: int, *commands: str, **places: Any) -> float:
    """The return of a script, its places filled with the task's parameters and ``places``."""
    task = instantiate(task_id, SEED)
    lines = fill(list(commands), {**task.params, "account": "000000000000", **places})
    achieved, total = play(episode, task, lines)
    assert achieved is (total == 1.0)
    return total


def policy(*statements: dict[str, Any]) -> str:
    """A document with a list of statements, or, for one, the statement itself."""
    written: Any = statements[0] if len(statements) == 1 else list(statements)
    return json.dumps({"Version": "2012-10-17", "Statement": written})


def listed(statement: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def allow(action: Any, resource: Any = None, principal: Any = None, **more: Any) -> dict[str, Any]:
    parts = {
        "Effect": "Allow",
        "Principal": principal,
        "Action": action,
        "Resource": resource,
        **more,
    }
    return {key: value for key, value in parts.items() if value is not None}


PUT_ROLE_POLICY = (
    "aws iam put-role-policy --role-name {name} --policy-name app --policy-document '{policy}'"
)
DATA = "arn:aws:s3:::{name}-data/*"


@pytest.mark.parametrize(
    ("document", "right"),
    [
        (policy(allow("s3:GetObject", DATA)), True),
        (
            policy(
                allow(["s3:GetObject"], [DATA]),
                {"Effect": "Deny", "Action": "iam:*", "Resource": "*"},
            ),
            True,
        ),
        (policy(allow(["s3:GetObject", "iam:*", "s3:*"], [DATA, "*"])), False),
        (listed(allow(["s3:GetObject", "iam:*", "s3:*"], [DATA, "*"])), False),
        (policy(allow("s3:*", DATA)), False),
        (policy({"Effect": "Deny", "Action": "s3:GetObject", "Resource": DATA}), False),
    ],
)
def test_least_privilege(episode: Episode, document: str, right: bool) -> None:
    name = instantiate(415, SEED).params["name"]
    total = played(episode, 415, PUT_ROLE_POLICY, policy=document.replace("{name}", name))
    assert (total == 1.0) is right


def test_least_privilege_is_not_kept_by_a_second_policy(episode: Episode) -> None:
    small = policy(allow("s3:GetObject", DATA))
    all_of_it = policy(allow("*", "*"))
    name = instantiate(415, SEED).params["name"]
    second = (
        f"aws iam put-role-policy --role-name {name} --policy-name more --policy-document "
        f"'{all_of_it}'"
    )
    assert played(episode, 415, second, PUT_ROLE_POLICY, policy=small.replace("{name}", name)) < 1


TRUST = "aws iam update-assume-role-policy --role-name {name} --policy-document '{policy}'"


@pytest.mark.parametrize(
    ("statement", "right"),
    [
        (allow("sts:AssumeRole", principal={"Service": ["lambda.amazonaws.com"]}), True),
        (allow(["sts:AssumeRole"], principal={"Service": "lambda.amazonaws.com"}), True),
        (
            allow("sts:AssumeRole", principal={"Service": "lambda.amazonaws.com"}, Effect="Deny"),
            False,
        ),
        (allow("sts:AssumeRole", principal={"Service": "lambda.amazonaws.com", "AWS": "*"}), False),
        (allow("sts:*", principal={"Service": "lambda.amazonaws.com"}), False),
    ],
)
def test_who_may_assume_a_role(episode: Episode, statement: dict[str, Any], right: bool) -> None:
    for document in (policy(statement), listed(statement)):
        assert (played(episode, 403, TRUST, policy=document) == 1.0) is right


GROUP = "aws ec2 describe-security-groups --filters Name=group-name,Values={name}-front"
OF_IT = "--group-id ${step1:SecurityGroups[0].GroupId}"
REVOKE = f"aws ec2 revoke-security-group-ingress {OF_IT} --protocol tcp --port 22 --cidr 0.0.0.0/0"


@pytest.mark.parametrize("more", ["tcp --port 1-442", "tcp --port 20-25", "-1", "tcp --port 80"])
def test_a_port_stays_open_in_a_range(episode: Episode, more: str) -> None:
    added = f"aws ec2 authorize-security-group-ingress {OF_IT} --cidr 0.0.0.0/0 --protocol {more}"
    assert played(episode, 413, GROUP, added, REVOKE) < 1
    assert played(episode, 413, GROUP, REVOKE) == 1


@pytest.mark.parametrize(
    ("bucket", "table", "right"),
    [
        ("KeyId", "KeyId", True),
        ("KeyId", "Arn", True),
        ("KeyId", "alias", True),
        ("Origin", "KeyId", False),
    ],
)
def test_a_key_is_named_as_aws_lets_it_be(
    episode: Episode, bucket: str, table: str, right: bool
) -> None:
    """By its alias, its ARN or its id, for each of the two stores; nothing else is that key."""
    lines = list(instantiate(323, SEED).solution)
    for place, option, name in ((4, '"KMSMasterKeyID":"', bucket), (5, "KMSMasterKeyId=", table)):
        assert option in lines[place]
        if name != "alias":
            capture = f"${{step1:KeyMetadata.{name}}}"
            lines[place] = re.sub(
                f"(?<={re.escape(option)})alias/[\\w-]+", lambda _, own=capture: own, lines[place]
            )
    assert (played(episode, 323, *lines) == 1.0) is right


ALARM = (
    "aws cloudwatch put-metric-alarm --alarm-name {name}-errors --namespace Shop --metric-name "
    "Errors "
    "--actions-enabled --alarm-actions arn:aws:sns:us-east-1:{account}:{name}-oncall "
    "--evaluation-periods 2 "
    "--threshold 5 --comparison-operator {comparison} --statistic {statistic} --period {period}"
)


@pytest.mark.parametrize(
    ("statistic", "period", "comparison"),
    [
        ("Sum", 60, "GreaterThanThreshold"),
        ("Average", 60, "GreaterThanThreshold"),
        ("Sum", 300, "GreaterThanThreshold"),
        ("Sum", 60, "LessThanThreshold"),
    ],
)
def test_an_alarm_measures_what_it_measured(
    episode: Episode, statistic: str, period: int, comparison: str
) -> None:
    right = (statistic, period, comparison) == ("Sum", 60, "GreaterThanThreshold")
    total = played(episode, 421, ALARM, statistic=statistic, period=period, comparison=comparison)
    assert (total == 1.0) is right


def test_a_table_is_billed_as_asked(episode: Episode) -> None:
    create = (
        "aws dynamodb create-table --table-name {name} --key-schema AttributeName=id,KeyType=HASH "
        "--attribute-definitions AttributeName=id,AttributeType=S --billing-mode "
    )
    item = "aws dynamodb put-item --table-name {name} --item id={S={item}}"
    units = "PROVISIONED --provisioned-throughput ReadCapacityUnits=1,WriteCapacityUnits=1"
    assert played(episode, 204, create + units, item) < 0.5, "the item alone"
    mend = "aws dynamodb update-table --table-name {name} --billing-mode PAY_PER_REQUEST"
    assert played(episode, 204, create + units, item, mend) == 1


def test_a_bucket_policy_keeps_its_partner_and_loses_everybody(episode: Episode) -> None:
    read = allow(
        "s3:GetObject",
        "arn:aws:s3:::{name}/*",
        {"AWS": ["arn:aws:iam::111122223333:root"]},
        Sid="Partner",
    )
    for document, right in (
        (policy(read), True),
        (policy({**read, "Effect": "Deny"}), False),
        (policy(read, allow("s3:*", "*", "*")), False),
        (policy(read, {**read, "Sid": "More", "Action": "s3:PutObject"}), False),
    ):
        name = instantiate(401, SEED).params["name"]
        put = "aws s3api put-bucket-policy --bucket {name} --policy '{policy}'"
        assert (played(episode, 401, put, policy=document.replace("{name}", name)) == 1.0) is right


def refusing(command: str) -> str:
    return command.replace("Allow", "Deny")


def with_more(command: str) -> str:
    return re.sub(r'(\\?")Action\1:(\\?"[^"]+")', r"\1Action\1:[\2,\1*\1]", command)


def for_everybody(command: str) -> str:
    return re.sub(r'(\\?")Principal\1:\{[^}]*\}', r"\1Principal\1:\1*\1", command)


@pytest.mark.parametrize("task_id", [305, 306, 325])
def test_policies_of_another_meaning(episode: Episode, task_id: int) -> None:
    """Of what a task creates. (In other words of the same meaning they are among the plays.)"""
    task = instantiate(task_id, SEED)
    for rewrite in (refusing, with_more, for_everybody):
        commands = [rewrite(command) for command in task.solution]
        assert commands != list(task.solution) and not play(episode, task, commands)[0], (
            rewrite.__name__
        )


def test_a_function_may_be_called_by_whom_it_should(episode: Episode) -> None:
    commands = list(instantiate(301, SEED).solution)
    permit = commands[-1]
    foreign = permit + " --source-arn arn:aws:execute-api:us-east-1:{account}:abc/*"
    assert played(episode, 301, *commands[:-1], foreign) < 1, (
        "by no other interface than the one that was made"
    )
    for wrong in ("lambda:*", "lambda:GetFunction"):
        assert (
            played(episode, 301, *commands[:-1], permit.replace("lambda:InvokeFunction", wrong)) < 1
        )
    second = permit.replace("api-gateway", "all").replace(
        "--principal apigateway.amazonaws.com", "--principal '*'"
    )
    assert played(episode, 301, *commands[:-1], second, permit) < 1, "and by nobody else"
    refused = [commands[0].replace("Allow", "Deny"), *commands[1:]]
    assert played(episode, 301, *refused) < 1


def after(first: str, commands: Sequence[str]) -> list[str]:
    """The commands after another one; their captures follow them."""
    return [
        first,
        *(
            re.sub(r"\$\{step(\d+)", lambda step: f"${{step{int(step[1]) + 1}", line)
            for line in commands
        ),
    ]


def test_a_namesake_is_in_nobodys_way(episode: Episode) -> None:
    """The network of the task is found beside another one with the same tag, and has to have
    everything itself."""
    task = instantiate(311, SEED)
    tag = f'--tag-specifications "ResourceType=vpc,Tags=[{{Key=Name,Value={task.params["name"]}}}]"'
    commands = after(f"aws ec2 create-vpc --cidr-block 10.99.0.0/16 {tag}", task.solution)
    assert not play(episode, task, commands)[0], "the other network is left behind"
    assert play(episode, task, [*commands, "aws ec2 delete-vpc --vpc-id ${step1:Vpc.VpcId}"]) == (
        True,
        1.0,
    )
    alike = after(
        f"aws ec2 create-vpc --cidr-block {task.params['net']}.0.0/16 {tag}", task.solution
    )
    elsewhere = [
        line.replace("step2:Vpc", "step1:Vpc") if "security-group " in line else line
        for line in alike
    ]
    assert elsewhere != alike and not play(episode, task, elsewhere)[0], (
        "the firewall is in the other network"
    )


@pytest.mark.parametrize("task_id", [221, 301])
def test_nobody_becomes_an_administrator_by_the_way(episode: Episode, task_id: int) -> None:
    task = instantiate(task_id, SEED)
    kind = "role"
    place = 1
    who = f"--{kind}-name {task.params['name']}"
    for right in ("logs:PutLogEvents", "*", "iam:*"):
        put = (
            f"aws iam put-{kind}-policy {who} --policy-name more --policy-document "
            f"'{policy(allow(right, '*'))}'"
        )
        lines = [*task.solution[:place], put, *after("", task.solution[place:])[1:]]
        assert not play(episode, task, lines)[0], "nobody asked for more rights"
    attach = (
        f"aws iam attach-{kind}-policy {who} --policy-arn "
        f"arn:aws:iam::aws:policy/AdministratorAccess"
    )
    assert not play(
        episode, task, [*task.solution[:place], attach, *after("", task.solution[place:])[1:]]
    )[0]


def test_what_belongs_together_is_looked_up_together(episode: Episode) -> None:
    """A load balancer's own firewall, the app client that an API accepts, the check that asks the
    right path."""
    task = instantiate(313, SEED)
    other = 'aws ec2 create-security-group --group-name other --description other --vpc-id "${setup1:Vpc.VpcId}"'
    lines = after(other, task.solution)
    assert not play(episode, task, lines)[0], "the other group is left behind"
    removal = "aws ec2 delete-security-group --group-id ${step1:GroupId}"
    assert play(episode, task, [*lines, removal]) == (True, 1.0)
    assert not play(
        episode, task, [re.sub(r"(--security-groups \$\{step)2", r"\g<1>1", line) for line in lines]
    )[0]
    task = instantiate(320, SEED)
    stranger = [
        line.replace("${step2:UserPoolClient.ClientId}", "1h57kf5cpq17m0eml12EXAMPLE")
        for line in task.solution
    ]
    assert not play(episode, task, stranger)[0]
    task = instantiate(314, SEED)
    wrong = "aws route53 create-health-check --caller-reference wrong --health-check-config "
    wrong += f"Type=HTTP,FullyQualifiedDomainName=www.{task.params['name']}.example,Port=80"
    removal = "aws route53 delete-health-check --health-check-id ${step1:HealthCheck.Id}"
    assert play(episode, task, [*after(wrong, task.solution), removal]) == (True, 1.0)
    by_mail = [
        line.replace("--validation-method DNS", "--validation-method EMAIL")
        for line in task.solution
    ]
    assert not play(episode, task, by_mail)[0]
