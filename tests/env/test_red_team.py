"""Attacks, really attempted. First through the agent's door, then past the policy at the worker itself, so that
each is stopped by at least two layers; every test looks for the effect, not for the message alone."""

from __future__ import annotations

import io
import os
import socket
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from realhf.env.executor import CommandResult
from realhf.env.pool import MiniStackPool, Slot

pytestmark = pytest.mark.sim


def past_policy(slot: Slot, *argv: str) -> CommandResult:
    """The worker's own answer, as if the policy had let the words through."""
    return slot.executor._execute(argv)


def assert_refused(slot: Slot, result: CommandResult, rule: str) -> None:
    assert not result.success
    assert result.refusal == rule, (result.refusal, result.stderr)
    assert rule in result.stderr
    assert "/root" not in result.stderr and "Traceback" not in result.stderr
    assert slot.executor.run("aws s3api list-buckets").success


class Canary:
    """A listener that must never be called."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0.3)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def was_called(self) -> bool:
        try:
            self.listener.accept()[0].close()
        except TimeoutError:
            return False
        return True


@pytest.fixture
def canary():
    trap = Canary()
    yield trap
    trap.listener.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("canary-content")
    return path


def test_reading_host_files_as_values(slot: Slot, secret: Path) -> None:
    command = f"ssm put-parameter --name leak --type String --value file://{secret}"
    assert_refused(slot, slot.executor.run(f"aws {command}"), "local-file")
    assert_refused(slot, past_policy(slot, *command.split()), "local-file")
    nested = ["ssm", "put-parameter", "--name", "leak", "--value", "v", "--tags", f"Key=a,Value@=file://{secret}"]
    assert_refused(slot, past_policy(slot, *nested), "local-file")
    assert slot.state.call("ssm", "DescribeParameters")["Parameters"] == []


def test_uploading_host_files(slot: Slot, secret: Path) -> None:
    slot.executor.run("aws s3 mb s3://target")
    for command in (f"s3api put-object --bucket target --key k --body {secret}", f"s3 cp {secret} s3://target/k"):
        assert_refused(slot, slot.executor.run(f"aws {command}"), "local-file")
        result = past_policy(slot, *command.split())
        assert not result.success and "canary-content" not in result.stdout + result.stderr
    assert slot.state.call("s3", "ListObjectsV2", {"Bucket": "target"}).get("Contents", []) == []


def test_symbolic_link_in_the_virtual_folder(slot: Slot, secret: Path) -> None:
    (slot.files.path / "link").symlink_to(secret)
    result = slot.executor.run("aws ssm put-parameter --name leak --type String --value file://link")
    assert_refused(slot, result, "local-file")


def test_writing_host_files(slot: Slot, tmp_path: Path) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "source"})
    slot.state.call("s3", "PutObject", {"Bucket": "source", "Key": "k", "Body": b"payload"})
    evil = tmp_path / "evil"
    for command in (f"s3api get-object --bucket source --key k {evil}", f"s3 cp s3://source/k {evil}"):
        assert_refused(slot, slot.executor.run(f"aws {command}"), "local-file")
        assert not past_policy(slot, *command.split()).success
    assert not evil.exists()


def test_configuration_cannot_be_written_or_chosen(slot: Slot) -> None:
    for command in ("configure set credential_process /bin/sh", "configure set plugins.x evil"):
        assert_refused(slot, slot.executor.run(f"aws {command}"), "unknown-service")
        assert not past_policy(slot, *command.split()).success
    assert_refused(slot, slot.executor.run("aws s3 ls --profile evil"), "global-option")
    assert_refused(slot, past_policy(slot, "s3", "ls", "--prof", "evil"), "global-option")
    assert not Path("/nonexistent").exists()


@pytest.mark.parametrize("spelling", ["--endpoint-url {}", "--endpoint-url={}", "--endpoint {}", "--e={}"])
def test_leaving_for_another_endpoint(slot: Slot, canary: Canary, spelling: str) -> None:
    words = spelling.format(canary.url).split()
    assert_refused(slot, slot.executor.run(" ".join(["aws", *words, "s3", "ls"])), "global-option")
    assert_refused(slot, past_policy(slot, *words, "s3api", "list-buckets"), "global-option")
    assert_refused(slot, past_policy(slot, "s3api", "list-buckets", *words), "global-option")
    assert not canary.was_called()


def test_a_sibling_cannot_be_reached(pool: MiniStackPool, slot: Slot) -> None:
    sibling = pool.acquire()
    try:
        sibling.reset()
        sibling.state.call("s3", "CreateBucket", {"Bucket": "sibling-secret"})
        past_policy(slot, "--endpoint-url", sibling.endpoint, "s3", "rb", "s3://sibling-secret")
        assert slot.executor.run("aws s3api list-buckets --query Buckets").stdout.strip() == "[]"
        assert [b["Name"] for b in sibling.state.call("s3", "ListBuckets")["Buckets"]] == ["sibling-secret"]
    finally:
        pool.release(sibling)


@pytest.mark.parametrize(
    ("bucket", "key"), [("_ministack", "reset"), ("_ministack", "health"), ("_realhf", "reset"), ("_aws", "x")]
)
def test_admin_paths(slot: Slot, bucket: str, key: str) -> None:
    slot.state.call("s3", "CreateBucket", {"Bucket": "survivor"})
    command = f"s3api put-object --bucket {bucket} --key {key}"
    assert_refused(slot, slot.executor.run(f"aws {command}"), "internal-path")
    assert_refused(slot, past_policy(slot, *command.split()), "internal-path")
    names = [b["Name"] for b in slot.state.call("s3", "ListBuckets")["Buckets"]]
    assert names == ["survivor"]


def test_dot_segments_do_not_reach_admin_paths(slot: Slot) -> None:
    slot.executor.run("aws s3 mb s3://survivor")
    for key in ("../_ministack/reset", "x/../../_ministack/reset"):
        result = past_policy(slot, "s3api", "put-object", "--bucket", "survivor", "--key", key)
        assert_refused(slot, result, "internal-path")
    past_policy(slot, "lambda", "get-function", "--function-name", "../../../_ministack/reset")
    assert len(slot.state.call("s3", "ListBuckets")["Buckets"]) == 1


def test_urls_are_never_fetched(slot: Slot, canary: Canary) -> None:
    command = f"ssm put-parameter --name p --type String --value {canary.url}/x"
    assert_refused(slot, slot.executor.run(f"aws {command}"), "url-value")
    past_policy(slot, *command.split())
    assert not canary.was_called()
    stored = slot.state.call("ssm", "GetParameter", {"Name": "p"})
    assert stored["Parameter"]["Value"] == f"{canary.url}/x"


def test_the_simulator_calls_nobody(slot: Slot, canary: Canary) -> None:
    topic = slot.state.call("sns", "CreateTopic", {"Name": "t"})["TopicArn"]
    subscribe = f"aws sns subscribe --topic-arn {topic} --protocol http --notification-endpoint {canary.url}/hook"
    assert slot.executor.run(subscribe).refusal is None
    slot.executor.run(f"aws sns publish --topic-arn {topic} --message hello")
    assert not canary.was_called()


def test_lambda_code_never_runs(slot: Slot, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("index.py", f"open({str(marker)!r}, 'w').write('x')\ndef handler(e, c): return 1\n")
    slot.files.put("code.zip", archive.getvalue())
    slot.state.call("iam", "CreateRole", {"RoleName": "r", "AssumeRolePolicyDocument": "{}"})
    created = slot.executor.run(
        "aws lambda create-function --function-name f --runtime python3.12 --handler index.handler "
        "--role arn:aws:iam::000000000000:role/r --zip-file fileb://code.zip"
    )
    assert created.success, created.stderr
    children = psutil.Process(slot.ministack.pid).children(recursive=True)
    invoked = slot.executor.run("aws lambda invoke --function-name f out.json")
    assert invoked.success, invoked.stderr
    assert "stub" in (slot.files.path / "out.json").read_text()
    slot.executor.run("aws lambda invoke --function-name f --invocation-type Event out2.json")
    time.sleep(0.3)
    assert not marker.exists()
    assert psutil.Process(slot.ministack.pid).children(recursive=True) == children == []


def test_programs_cannot_be_started(slot: Slot) -> None:
    for command in ("ssm start-session --target i-1", "ecs execute-command --cluster c --task t --command sh"):
        assert_refused(slot, slot.executor.run(f"aws {command}"), "operation")
        assert not past_policy(slot, *command.split()).success
    assert_refused(slot, past_policy(slot, "sqs", "create-queue", "help"), "operation")
    assert psutil.Process(slot.worker_pid).children() == []


def test_no_op_success_is_no_evidence(slot: Slot) -> None:
    skeleton = slot.executor.run("aws s3api create-bucket --bucket b --generate-cli-skeleton")
    assert_refused(slot, skeleton, "global-option")
    rehearsal = slot.executor.run("aws ec2 create-vpc --cidr-block 10.0.0.0/16 --dry-run")
    assert rehearsal.requests == ()
    assert slot.executor.run("aws help").requests == ()


def test_environment_of_the_children_is_ours_alone(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REALHF_CANARY", "secret")
    slot.respawn()
    for pid in (slot.ministack.pid, slot.worker_pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"REALHF_CANARY" not in environment and b"TOKEN" not in environment


def test_simulator_listens_on_loopback_only(slot: Slot) -> None:
    inodes = {os.readlink(path) for path in Path(f"/proc/{slot.ministack.pid}/fd").iterdir() if path.is_symlink()}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:] + Path("/proc/net/tcp6").read_text().splitlines()[1:]
    addresses = {
        line.split()[1] for line in lines if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
    }
    assert addresses == {f"0100007F:{slot.port:04X}"}


def test_shell_text_stays_text(slot: Slot, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for tail in (f"; touch {marker}", f"| tee {marker}", f"$(touch {marker})", f"`touch {marker}`", f"> {marker}"):
        assert not slot.executor.run(f"aws sqs list-queues {tail}").success
    assert not marker.exists()
