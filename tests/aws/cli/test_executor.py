"""The executor with real workers: what was sent, limits, timeouts, recycling; it prints what
``aws`` prints."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from realhf.aws.cli.executor import SentRequest
from realhf.aws.cli.virtual_folder import MAX_FOLDERS
from realhf.aws.cli.worker import CappedSink
from realhf.aws.server.program import make_pool
from realhf.aws.server_config import AwsServerConfig, output_limits
from realhf.aws.simulator.pool import MiniStackPool, Slot, worker_environment
from tests.process_family import freeze

pytestmark = pytest.mark.sim


def test_requests_are_what_was_sent(slot: Slot) -> None:
    made = slot.executor.run("aws s3 mb s3://photos-1")
    assert made.success and made.stdout == "make_bucket: photos-1\n"
    assert made.requests == (SentRequest("s3", "CreateBucket", {"Bucket": "photos-1"}, 200, ""),)
    failed = slot.executor.run("aws s3api head-bucket --bucket nobody")
    assert not failed.success
    assert [(r.operation, r.status, r.ok) for r in failed.requests] == [("HeadBucket", 404, False)]
    missing = slot.executor.run("aws sqs get-queue-url --queue-name none")
    assert missing.requests[0].error_code.endswith("NonExistentQueue")
    unsent = slot.executor.run("aws sqs create-queue")
    assert unsent.exit_code == 2 and unsent.requests == ()


def test_pages_are_separate_requests(slot: Slot) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "paged"})
    for number in range(3):
        slot.state.call("s3", "PutObject", {"Bucket": "paged", "Key": f"k{number}"})
    result = slot.executor.run(
        "aws s3api list-objects-v2 --bucket paged --page-size 1 --query Contents[].Key"
    )
    assert [f"k{number}" in result.stdout for number in range(3)] == [True] * 3
    assert [request.operation for request in result.requests] == ["ListObjectsV2"] * 3


def test_files_travel_through_the_virtual_folder(slot: Slot) -> None:
    slot.executor.run("aws s3 mb s3://box")
    slot.files.put("in.txt", "grüße\n".encode())
    assert slot.executor.run("aws s3 cp in.txt s3://box/a.txt").success
    assert slot.executor.run("aws s3api get-object --bucket box --key a.txt out.txt").success
    assert slot.executor.run("aws s3 cp s3://box/a.txt copy.txt").success
    assert (
        (slot.files.path / "out.txt").read_text()
        == (slot.files.path / "copy.txt").read_text()
        == "grüße\n"
    )
    named = slot.executor.run("aws ssm put-parameter --name p --type String --value file://in.txt")
    assert named.requests[0].params["Value"] == "grüße\n"


def test_a_file_that_is_too_large_is_not_kept(slot: Slot) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "box"})
    slot.state.call("s3", "PutObject", {"Bucket": "box", "Key": "big", "Body": b"x" * (2 << 20)})
    assert not slot.executor.run("aws s3api get-object --bucket box --key big big.bin").success


def test_folders_are_few_and_not_deep(pool: MiniStackPool, slot: Slot) -> None:
    """Keys of a thousand folders used to make a folder that no scrub could remove: the slot was
    lost for good."""
    slot.state.call("s3", "CreateBucket", {"Bucket": "deep"})
    download = "aws s3 cp s3://deep/ . --recursive"
    for depth in (8, 850, 1060):
        slot.state.call("s3", "PutObject", {"Bucket": "deep", "Key": "a/" * depth + "f"})
        done = slot.executor.run(download)
        assert done.success == (depth == 8), done
    assert done.refusal == "local-file" and (slot.files.path / ("a/" * 8) / "f").exists()
    for number in range(80):
        slot.state.call("s3", "PutObject", {"Bucket": "deep", "Key": f"b{number}/f"})
    assert not slot.executor.run(download).success
    assert sum(len(folders) for _, folders, _ in os.walk(slot.files.path)) <= MAX_FOLDERS
    slot.reset()
    assert slot.files.names() == []


MANY = (
    "kinesis create-stream --stream-name s --shard-count 3000000",
    "kinesis create-stream --stream-name s --shard-c=3000000",
    "ec2 run-instances --image-id ami-1 --count 40000",
    "ec2 run-instances --image-id ami-1 --count 1:40000",
    "opensearch create-domain --domain-name d --cluster-config InstanceCount=5000",
    "opensearch create-domain --domain-name d --cluster-config '{\"InstanceCount\": 5000}'",
    "ecs create-service --service-name s --task-definition t --desired-count file://number",
)


def test_counts_are_bounded_in_every_spelling(slot: Slot) -> None:
    """A command line used to make a simulator take gigabytes."""
    slot.files.put("number", b"5000")
    for command in MANY:
        result = slot.executor.run(f"aws {command}")
        assert result.refusal == "too-many" and " may be 100 at most here" in result.stderr, (
            command,
            result,
        )
        assert not any(request.ok for request in result.requests)
    assert slot.executor.run("aws ec2 run-instances --image-id ami-1 --count 20").success


def test_options_do_not_stick(slot: Slot) -> None:
    table = slot.executor.run("aws sqs list-queues --output text --no-paginate --query QueueUrls")
    assert table.stdout == "None\n" or table.stdout == ""
    slot.executor.run("aws sqs create-queue --queue-name q")
    plain = slot.executor.run("aws sqs list-queues")
    assert plain.stdout.startswith("{\n")


def test_a_timeout_kills_one_worker_only(pool: MiniStackPool, slot: Slot) -> None:
    other = pool.acquire()
    try:
        other.executor.run("aws s3 ls")
        others_worker = other.worker_pid
        stopped = slot.worker_pid
        slot.executor._limits = type(slot.executor._limits)(timeout_s=0.3)
        freeze(stopped)
        started = time.monotonic()
        result = slot.executor.run("aws s3 ls")
        assert result.timed_out and not result.success and result.stderr == "command timed out"
        assert time.monotonic() - started < 5
        slot.executor._limits = other.executor._limits
        assert slot.executor.run("aws s3 ls").success and slot.worker_pid != stopped
        assert other.executor.run("aws s3 ls").success and other.worker_pid == others_worker
    finally:
        pool.release(other)


def test_a_worker_that_dies_is_replaced(slot: Slot) -> None:
    slot.executor.run("aws s3 ls")
    dead = slot.worker_pid
    os.kill(dead, signal.SIGKILL)
    result = slot.executor.run("aws s3 ls")
    # it may have died just before or just after the command came
    assert result.success or "stopped" in result.stderr
    assert slot.executor.run("aws s3 ls").success and slot.worker_pid != dead


def test_long_output_is_cut(slot: Slot) -> None:
    for number in range(8):
        slot.state.call(
            "ssm", "PutParameter", {"Name": f"p{number}", "Value": "é" * 2000, "Type": "String"}
        )
    result = slot.executor.run("aws ssm get-parameters --names p0 p1 p2 p3 p4 p5 p6 p7")
    assert result.success
    assert len(result.stdout.encode()) < 16384 + 64
    assert "\n...[truncated " in result.stdout and result.stdout.endswith(" bytes]")


def test_the_sink_cuts_on_a_character_and_replaces_controls() -> None:
    sink = CappedSink(4)
    sink.write("aéé".encode())
    sink.write(b"xyz")
    assert sink.text() == "aé\n...[truncated 4 bytes]"
    other = CappedSink(100)
    other.write(b"a\r\n\tb\x1b[0m\x00")
    assert other.text() == "a\n\tb\ufffd[0m\ufffd"


def test_slots_work_at_the_same_time(pool: MiniStackPool) -> None:
    slots = [pool.acquire() for _ in range(3)]
    outputs: dict[int, str] = {}

    def play(slot: Slot) -> None:
        for number in range(5):
            slot.executor.run(f"aws sqs create-queue --queue-name q{slot.index}-{number}")
        outputs[slot.index] = slot.executor.run(
            "aws sqs list-queues --query QueueUrls --output text"
        ).stdout

    threads = [threading.Thread(target=play, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for slot in slots:
        assert [url.rsplit("/")[-1] for url in outputs[slot.index].split()] == [
            f"q{slot.index}-{n}" for n in range(5)
        ]
        pool.release(slot)


def test_every_allowed_operation_exists_in_the_cli(slot: Slot) -> None:
    """An unknown operation would have stopped the zygote; one of every service answers or explains
    itself."""
    for words in (
        "glue get-databases",
        "wafv2 list-web-acls --scope REGIONAL",
        "efs describe-file-systems",
    ):
        command = f"aws {words}"
        result = slot.executor.run(command)
        assert result.exit_code in (0, 255) and result.requests, (command, result.stderr)


def test_whole_folders_are_synchronised(slot: Slot) -> None:
    slot.executor.run("aws s3 mb s3://site-1")
    for name in ("a.txt", "b.txt"):
        slot.files.put(name, name.encode())
    up = slot.executor.run("aws s3 sync . s3://site-1")
    assert up.success and sorted(r.operation for r in up.requests) == [
        "ListObjectsV2",
        "PutObject",
        "PutObject",
    ]
    slot.files.clear()
    assert slot.executor.run("aws s3 sync s3://site-1 . --exclude b.txt").success
    assert slot.files.names() == ["a.txt"]
    assert slot.executor.run("aws s3 sync . s3://site-1 --delete").success
    assert [
        o["Key"] for o in slot.state.call("s3", "ListObjectsV2", {"Bucket": "site-1"})["Contents"]
    ] == ["a.txt"]


def test_presigning_sends_nothing(slot: Slot) -> None:
    signed = slot.executor.run("aws s3 presign s3://bucket-1/key --expires-in 60")
    assert signed.success and signed.requests == ()
    assert (
        signed.stdout.startswith("http://localhost:4566/bucket-1/key?")
        and "Expires" in signed.stdout
    )


def test_one_command_writes_only_so_many_files(slot: Slot) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "crowd"})
    for number in range(300):
        slot.state.call(
            "s3", "PutObject", {"Bucket": "crowd", "Key": f"deep/folder/{number}", "Body": b"x"}
        )
    result = slot.executor.run("aws s3 cp s3://crowd/ below --recursive")
    assert not result.success and result.refusal == "local-file"
    assert sum(path.is_file() for path in slot.files.path.rglob("*")) <= 64
    assert slot.executor.run("aws s3 ls").success
    slot.files.clear()
    assert slot.files.names() == []


def test_the_length_of_a_command_is_the_configured_one(
    slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the default too, and the pool is made with it."""
    config = AwsServerConfig(max_command_bytes=30_000, ministack_base_port=0)
    made = make_pool(config)
    assert isinstance(made, MiniStackPool) and made._limits.command_bytes == 30_000
    monkeypatch.setattr(slot.executor, "_limits", output_limits(config))
    value = "x" * 12_000
    put = slot.executor.run(f"aws secretsmanager create-secret --name p --secret-string {value}")
    assert put.success, put.stderr
    assert (
        slot.state.call("secretsmanager", "GetSecretValue", {"SecretId": "p"})["SecretString"]
        == value
    )
    longer = slot.executor.run(
        f"aws secretsmanager create-secret --name q --secret-string {value * 3}"
    )
    assert longer.refusal == "too-long" and "30000" in longer.stderr


def test_a_dry_run_changes_nothing_and_is_answered_as_aws_answers(slot: Slot) -> None:
    result = slot.executor.run("aws ec2 create-vpc --cidr-block 10.9.0.0/16 --dry-run")
    assert (
        not result.success
        and "(DryRunOperation) when calling the CreateVpc operation" in result.stderr
    )
    assert not result.requests
    seen = slot.executor.run(
        "aws ec2 describe-vpcs --filters Name=cidr,Values=10.9.0.0/16 --query Vpcs"
    )
    assert json.loads(seen.stdout) == []


SETUP = [
    "aws s3 mb s3://alpha-logs",
    "aws sqs create-queue --queue-name jobs --attributes VisibilityTimeout=45",
    "aws dynamodb create-table --table-name users --attribute-definitions "
    "AttributeName=id,AttributeType=S "
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
    "aws sqs get-queue-attributes --queue-url http://localhost:4566/000000000000/jobs "
    "--attribute-names All",
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
"""The program itself, untouched, in a fresh process per command, two at a time; only its imports
are shared."""


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


@pytest.mark.slow
def test_the_worker_takes_the_cli_s_own_botocore() -> None:
    code = "import realhf.aws.cli.zygote, botocore; print(botocore.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert "/awscli/botocore/" in done.stdout
