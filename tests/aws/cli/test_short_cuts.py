"""The CLI driver with its short cuts against the CLI's own code: the same bytes go to the
simulator, and the same output, errors and requests come out."""

import base64
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import pytest

from realhf.aws.cli.executor import OutputLimits
from realhf.aws.cli.policy import check_command
from realhf.aws.cli.warm_cli import MAX_DEPTH
from realhf.aws.episode.world import build_world
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate, load_templates
from tests.aws.red_team.command_grammar import CommandGrammar

SPELLINGS = (
    "aws s3api create-bucket --bucket b --region us-east-1",
    "aws s3api create-bucket --bucket=b2",
    "aws --output text s3api list-buckets",
    "aws s3api list-buckets --output table --query Buckets[].Name",
    "aws s3api list-buckets --output json --query Buckets[0]",
    "aws s3api create-bucket",
    "aws s3api create-bucket --bucket",
    "aws s3api create-bucket --bucket x y",
    "aws s3api create-bucket --bucket one --bucket two",
    "aws s3api create-bucket --buck three",
    "aws s3api create-bucket --nonsense x --bucket b",
    "aws s3api create-bucket --bucket -b",
    "aws s3api create-bucket --bucket ''",
    "aws s3api create-bucket -- --bucket b",
    "aws s3api create-bucke --bucket b",
    "aws s3apy list-buckets",
    "aws s3api",
    "aws",
    "aws s3api list-buckets --no-paginate",
    "aws s3api list-buckets --max-items 1",
    "aws s3api list-buckets --max-items 1 --starting-token nonsense",
    "aws s3api put-object --bucket b --key k --body file://nothing",
    "aws s3api put-object --bucket b --key 'a b/é' --metadata a=b,c=d --tagging a=b",
    "aws s3api get-object --bucket b --key 'a b/é' out",
    "aws s3api delete-objects --bucket b --delete Objects=[{Key=k}],Quiet=true",
    "aws s3api get-bucket-location --bucket nowhere",
    "aws s3api head-object --bucket b --key none",
    "aws s3api wait bucket-exists --bucket b",
    "aws s3 ls",
    "aws s3 mb s3://made-by-s3",
    "aws s3 rb s3://made-by-s3",
    "aws s3 presign s3://b/k --expires-in 60",
    "aws ec2 run-instances --image-id ami-12345678 --count 1 --dry-run",
    "aws ec2 describe-vpcs --no-dry-run --filters Name=isDefault,Values=true",
    "aws ec2 describe-instances --instance-ids",
    "aws ec2 authorize-security-group-ingress --group-name default --protocol tcp --port 22 "
    "--cidr 10.0.0.0/8",
    "aws dynamodb create-table --table-name t --key-schema AttributeName=id,KeyType=HASH "
    "--attribute-definitions AttributeName=id,AttributeType=S --billing-mode PAY_PER_REQUEST",
    'aws dynamodb put-item --table-name t --item \'{"id": {"S": "a"}, "n": {"N": "1"}}\'',
    "aws dynamodb put-item --table-name t --item nonsense",
    "aws dynamodb scan --table-name t --max-items 1",
    "aws dynamodb scan --table-name t --page-size 1 --max-items x",
    "aws sqs create-queue --queue-name q --attributes DelaySeconds=5",
    "aws sqs send-message --queue-url http://localhost:4566/000000000000/q --message-body 'x y'",
    "aws sqs receive-message --queue-url http://localhost:4566/000000000000/q",
    "aws sqs set-queue-attributes --queue-url http://localhost:4566/000000000000/q",
    "aws logs create-log-group --log-group-name /g",
    "aws logs put-retention-policy --log-group-name /g --retention-in-days seven",
    "aws logs put-retention-policy --log-group-name /g --retention-in-days -7",
    "aws iam create-user --user-name u --tags Key=a,Value=b Key=c,Value=d",
    "aws iam get-user --user-name nobody",
    "aws iam list-users --debug",
    "aws iam create-role --role-name r --assume-role-policy-document '{\"Version\": 1}'",
    "aws iam update-account-password-policy --require-symbols --no-require-numbers",
    "aws lambda list-functions --endpoint-url http://elsewhere",
    'aws kms create-key --cli-input-json \'{"Description": "by document"}\' --enabled',
    "aws kms create-key --description x --multi-region --no-multi-region",
    "aws sns publish --topic-arn arn:aws:sns:us-east-1:000000000000:none --message m",
    'aws sns create-topic --name t --attributes \'{"DisplayName":"d"}\' --region eu-west-1',
    "aws ssm put-parameter --name p --value 5 --type String --overwrite",
    "aws ssm get-parameters-by-path --path / --recursive --no-with-decryption",
    "aws cloudwatch put-metric-alarm --alarm-name a --metric-name m --namespace n --period 60 "
    "--evaluation-periods 1 --threshold -1.5 --comparison-operator LessThanThreshold "
    "--statistic Sum",
    "aws iam create-role --role-name file://nothing --assume-role-policy-document x",
    "aws iam create-role --role-name r --assume-role-policy-document file://../x",
    "aws sqs create-queue --queue-name http://localhost:4566/",
    "aws sqs create-queue --queue-name ' [x'",
    "aws kms create-key --policy '' --output text --query KeyMetadata.Enabled",
    "aws ec2 describe-volumes",
    "aws ec2 describe-volumes --filters Name=status,Values=available --page-size 7",
    "aws ec2 describe-snapshots --owner-ids self",
    "aws dynamodb query --table-name t --key-condition-expression id=:i "
    """--expression-attribute-values '{":i": {"S": "a"}}'""",
    "aws lambda create-function --function-name f --runtime python3.12 --role r --handler h "
    "--zip-file fileb://nothing",
    "aws lambda create-function --function-name f --runtime python3.12 --role r --handler h "
    "--zip-file nothing",
    "aws logs describe-log-groups --limit 1",
    "aws logs describe-log-groups --limit 1 --max-items 1",
    "aws kinesis list-streams --exclusive-start-stream-name s",
    "aws help",
    "aws s3api help",
    "aws s3api list-buckets help",
)

PAGINATED = (
    ("acm list-certificates", "--next-token t"),
    ("efs describe-file-systems", "--marker m"),
    ("elbv2 describe-load-balancers", "--marker m"),
    ("iam list-users", "--marker m"),
    ("lambda list-functions", "--marker m"),
    ("route53 list-hosted-zones", "--marker m"),
    ("ses list-identities", "--next-token t"),
)
"""Operations with an option that the CLI replaces by its own of the same name, as long as it
paginates, and an option that makes it stop that."""
USERS = b"""<ListUsersResponse><ListUsersResult><Users><member><UserName>a</UserName></member><member>
<UserName>b</UserName></member></Users><IsTruncated>false</IsTruncated></ListUsersResult>
</ListUsersResponse>"""
BUCKETS = b"<ListAllMyBucketsResult><Buckets></Buckets></ListAllMyBucketsResult>"


def pagination_pairs() -> list[str]:
    """Return commands in which each way to paginate an operation, or not to, follows each other
    one."""
    commands = []
    for operation, token in PAGINATED:
        ways = ("", "--max-items 1", token, f"{token} --max-items 5", "--no-paginate --max-items=5")
        ways = (*ways, "--no-paginate --page-size 3", "--no-paginate")
        commands += [
            f"aws {operation} {way}".strip()
            for pair in itertools.product(ways, ways)
            for way in pair
        ]
    return commands


WITHOUT_PLAN = {
    "cloudwatch put-metric-data",
    "lambda invoke",
    "s3api get-object",
    "s3api put-object",
    "s3api upload-part",
}
"""Operations whose requests are compressed, or whose requests or answers are streams."""


def xml(text: bytes) -> list[Any]:
    """Return an answer to be replayed."""
    return [200, {"content-type": "text/xml"}, base64.b64encode(text).decode()]


@dataclass
class Recorder:
    """A process that runs commands."""

    requests: IO[str]
    """Its input."""
    replies: IO[str]
    """Its output."""
    plan_runs: dict[str, int] = field(default_factory=dict)
    """Number of ``commands`` and ``calls`` that were run by plans so far."""
    without_plan: frozenset[str] = frozenset()
    """Operations of which no command, or no call, is run by a plan."""

    def __call__(self, commands: Sequence[str], answers: Sequence[Any] = ()) -> list[Any]:
        """Run commands and return what came of them."""
        line = json.dumps({"commands": [*commands], "answers": [*answers]})
        self.requests.write(line + "\n")
        self.requests.flush()
        reply = json.loads(self.replies.readline())
        self.plan_runs = reply["plan_runs"]
        self.without_plan = frozenset(reply["without_plan"])
        return reply["results"]


@contextmanager
def recorder(mode: str, services: str = "all", slot: Slot | None = None) -> Iterator[Recorder]:
    """Start a process that runs commands."""
    program = [sys.executable, "-m", "tests.aws.cli.command_recorder", mode, services]
    fds = []
    if slot is not None:
        fds.append(slot.ministack.connect())
        program.append(str(fds[0].fileno()))
    numbers = [connection.fileno() for connection in fds]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=numbers
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Recorder(process.stdin, process.stdout)
        process.stdin.close()
    for connection in fds:
        connection.close()


def play_both(
    ids: Sequence[int], spellings: Sequence[str], commands_per_request: float = 0.5
) -> int:
    """Run the solutions of these templates and then the spellings in both drivers, and compare.
    Return the number of requests. ``commands_per_request``: how many commands are run by plans at
    least."""
    n_requests = 0
    pool = MiniStackPool(1, limits=OutputLimits())
    pool.start()
    try:
        slot = pool.acquire()
        with recorder("plain", slot=slot) as plain, recorder("quick") as quick:
            worlds = [build_and_read(slot, number) for number in ids]
            for world in [*worlds, lambda: spellings]:
                commands = world()
                expected = plain(commands)
                answers = [answer for result in expected for answer in result.pop("got")]
                n_requests += len(answers)
                actual = quick(commands, answers)
                for command, one, other in zip(commands, expected, actual, strict=True):
                    del other["got"]
                    assert other == one, command
            assert plain.plan_runs == {"commands": 0, "calls": 0}
            assert quick.plan_runs["calls"] >= 0.5 * n_requests
            assert quick.plan_runs["commands"] >= commands_per_request * n_requests
            assert quick.without_plan == WITHOUT_PLAN
    finally:
        pool.stop()
    return n_requests


def build_and_read(slot: Slot, number: int) -> Any:
    """Return a function that sets a template's task up and returns its solution."""
    return lambda: [
        *build_world(slot, task := instantiate(number, seed=1), task.seed).task.solution
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "quick"])
def test_a_command_leaves_no_option_of_its_own_to_the_next(mode: str) -> None:
    """Without pagination, an operation's own --max-items takes the place of the CLI's."""
    befores = ["", "--no-paginate", "--marker m --max-items 5", "--no-paginate --max-items 5"]
    commands = [
        line
        for before in befores
        for line in (f"aws iam list-users {before}", "aws iam list-users --max-items 1")
    ]
    with recorder(mode, "iam") as warm, recorder(mode, "iam") as fresh:
        last = warm(commands, [xml(USERS)] * len(commands))
        alone = fresh(commands[1:2], [xml(USERS)])
    assert [result["exit_code"] for result in last] == [0] * len(commands)
    assert "NextToken" in alone[0]["stdout"]
    for result in [*last, *alone]:
        del result["sent"]  # contains the number of the request
    assert last[1::2] == alone * len(befores)


@pytest.mark.slow
@pytest.mark.parametrize("n_doublings", [18, 100])
def test_an_endless_answer_ends_before_it_takes_memory(n_doublings: int) -> None:
    command = f"aws s3api list-buckets --query '{'|'.join(['[@,@]'] * n_doublings)}'"
    assert check_command(command).rule is None
    with recorder("quick", "s3api") as quick:
        small, large = quick(["aws s3api list-buckets", command], [xml(BUCKETS)] * 2)
    assert small["exit_code"] == 0 and large["runaway"]
    assert large["peak_bytes"] < 250 << 20


def items_of_depth(depth: int) -> tuple[str, str, str]:
    """Return commands whose parameters have this many levels, given as JSON, in the CLI's own
    notation and as a document."""
    is_odd = depth % 2
    in_json = '{"S": "x"}' if is_odd else '{"L": []}'
    in_words = "{S=x}" if is_odd else "{L=[]}"
    for _ in range((depth - 3) // 2):  # in the parameters, the item and its attribute
        in_json = f'{{"M":{{"b":{in_json}}}}}'
        in_words = f"{{M={{b={in_words}}}}}"
    document = f'{{"TableName": "t", "Item": {{"a": {in_json}}}}}'
    return (
        f"aws dynamodb put-item --table-name t --item '{{\"a\": {in_json}}}'",
        f"aws dynamodb put-item --table-name t --item 'a={in_words}'",
        f"aws dynamodb put-item --cli-input-json '{document}'",
    )


@pytest.mark.slow
def test_depth_has_one_limit() -> None:
    services = "dynamodb"
    answers = [[200, {}, base64.b64encode(b"{}").decode()]]
    with recorder("plain", services) as plain, recorder("quick", services) as quick:
        for depth in (MAX_DEPTH, MAX_DEPTH + 1, 161, 319, 901):
            for command in items_of_depth(depth):
                expected = plain([command], answers)
                assert quick([command], answers) == expected
                (result,) = expected
                if depth <= MAX_DEPTH:
                    assert result["exit_code"] == 0 and len(result["sent"]) == 1
                    assert len(result["requests"]) == 1 and result["refusal"] is None
                else:
                    assert result["exit_code"] > 0 and result["sent"] == []
                    assert result["refusal"] == [
                        "malformed",
                        f"the parameters of a command may have {MAX_DEPTH} levels",
                    ]
                    assert "recursion" not in result["stderr"]
    assert quick.plan_runs["commands"] >= 2  # those of the largest depth, without a document


@pytest.mark.slow
def test_a_command_with_an_unknown_kind_of_argument_has_no_plan() -> None:
    """Its outfiles are written by a handler that the argument registers when it has a value."""
    command = "aws iot create-keys-and-certificate --certificate-pem-outfile new.pem"
    answers = [[200, {}, base64.b64encode(b'{"certificatePem": "text"}').decode()]]
    with recorder("quick", "iot/create-keys-and-certificate") as quick:
        (result,) = quick([command], answers)
    assert result["exit_code"] == 0 and result["requests"][0]["status"] == 200
    assert quick.without_plan == {"iot create-keys-and-certificate"}
    assert quick.plan_runs["commands"] == 0


JSON_ERROR = {"content-type": "application/x-amz-json-1.0", "x-amzn-errortype": "e"}
FAILURES = (
    ("aws iam list-users", [[503, {}, ""], [500, {}, "eA=="], xml(USERS)]),
    ("aws iam list-users", [[503, {}, ""]] * 9),
    ("aws iam list-users", [[302, {}, ""]]),
    ("aws iam list-users", [[200, {}, base64.b64encode(b"<broken").decode()]]),
    ("aws dynamodb list-tables", [[200, {"x-amz-crc32": "7"}, "e30="]] * 20),
    ("aws dynamodb list-tables", [[200, {"X-Amz-Crc32": "2745614147"}, "e30="]]),
    (
        "aws dynamodb list-tables",
        [[400, JSON_ERROR, base64.b64encode(b'{"__type": "ThrottlingException"}').decode()]] * 20,
    ),
    ("aws s3api list-buckets", [[200, {}, base64.b64encode(b"<Error/>").decode()]] * 9),
    ("aws s3api list-objects --bucket b", [[301, {"x-amz-bucket-region": "eu-west-1"}, ""]] * 9),
    ("aws s3api create-bucket --bucket b", [[200, {"Location": "/b", "location": "/c"}, ""]]),
)
"""Commands and answers that make the CLI try again, or end in errors."""
FIELDS = (
    "aws s3api create-multipart-upload --bucket b --key k --metadata a=1,A=2",
    "aws s3api create-multipart-upload --bucket b --key k --metadata a=\u00e9",
    "aws s3api create-multipart-upload --bucket b --key k --metadata \u00e9=a",
    "aws s3api create-multipart-upload --bucket b --key k --content-type \u00e9",
    'aws s3api create-multipart-upload --bucket b --key k --content-type "a\nb"',
    "aws s3api create-multipart-upload --bucket _ministack --key k --metadata a=b",
    "aws s3api list-objects --bucket health",
    "aws s3api list-objects --bucket b --prefix ../_ministack",
    "aws lambda get-function --function-name a/b",
    "aws sns publish --topic-arn arn:aws:sns:us-east-1:000000000000:t --message '\u00e9 &=+%'",
)
"""Commands whose requests have unusual headers, paths or bodies."""


@pytest.mark.slow
def test_failures_come_out_the_same() -> None:
    """Of each command, the same requests are sent again after the same answers."""
    n_requests = 0
    services = "iam,dynamodb,s3api"
    with recorder("plain", services) as plain, recorder("quick", services) as quick:
        for command, answers in FAILURES:
            expected = plain([command], answers)
            n_requests += len(expected[0]["sent"])
            assert quick([command], answers) == expected, command
    assert n_requests > 2 * len(FAILURES)
    assert quick.plan_runs == {"commands": len(FAILURES), "calls": len(FAILURES)}


@pytest.mark.slow
def test_unusual_fields_come_out_the_same() -> None:
    assert play_both((), FIELDS) > 2


@pytest.mark.slow
def test_spellings_and_solutions_come_out_the_same() -> None:
    numbers = [template.task_id for template in load_templates()][::25]
    assert play_both(numbers, SPELLINGS) > 40


@pytest.mark.slow
def test_ways_to_paginate_come_out_the_same() -> None:
    # by plans only if they paginate without options
    assert play_both((), pagination_pairs(), commands_per_request=0.1) > 500


@pytest.mark.nightly
def test_all_solutions_come_out_the_same() -> None:
    numbers = [template.task_id for template in load_templates()]
    assert play_both(numbers, ()) > 250


@pytest.mark.nightly
def test_drawn_commands_come_out_the_same() -> None:
    places = ("secret", "marker", "url", "sibling")
    grammar = CommandGrammar(48, {place: "nowhere" for place in places})
    drawn = [grammar.draw().line for _ in range(1500)]
    # what the policy refuses is not run outside of a sandbox
    lines = [line for line in drawn if check_command(line).rule is None]
    assert play_both((), lines, commands_per_request=0.3) > 300
