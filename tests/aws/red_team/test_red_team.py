"""Attacks, really attempted: the table of ``red_team_attacks`` row by row, then what needs a closer look.

Each attack goes through the agent's door and, where that refuses it, once more past the policy at the worker
itself; every test looks for the effect, not for the message alone."""

from __future__ import annotations

import io
import os
import random
import shlex
import socket
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from realhf.aws.cli.executor import CommandResult
from realhf.aws.episode.episode import Episode
from realhf.aws.simulator.pool import MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate
from tests.aws.red_team.attacks import ATTACKS, HARMLESS, NO_CREDIT, ROWS
from tests.aws.red_team.firing_range import FiringRange
from tests.aws.red_team.inside import INSIDE_ROWS, not_as_expected, play_inside
from tests.aws.red_team.web import WEB_ATTACKS, WebRange

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def firing_range(pool: MiniStackPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FiringRange]:
    target = FiringRange(pool, tmp_path_factory.mktemp("host"))
    yield target
    target.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row}-{ROWS[row].replace(' ', '-')}")
def test_every_spelling_of_a_row(firing_range: FiringRange, row: int) -> None:
    attacks = [attack for attack in ATTACKS if attack.row == row]
    assert attacks
    for attack in attacks:
        observed = firing_range.attempt(attack)
        assert (observed.door, observed.effects) == (attack.expected, ()), (attack.command[:300], observed)


@pytest.mark.nightly
def test_what_is_left_to_an_agent_that_has_won_somewhere(pool: MiniStackPool) -> None:
    """Its worker, the interpreter's guards, or a real account to play on."""
    tried = list(play_inside(pool))
    assert {one.row for one in tried} == set(INSIDE_ROWS)
    assert not not_as_expected(tried)


def test_what_web_pages_send(pool: MiniStackPool) -> None:
    """To the environment server and to the port of a simulator: nothing is leased, played or changed."""
    target = WebRange(pool)
    try:
        for attack in WEB_ATTACKS:
            assert target.attempt(attack) == (attack.expected, ()), attack
    finally:
        target.close()


def test_the_range_sees_effects(firing_range: FiringRange) -> None:
    """Everything that must not happen is noticed when it does."""
    firing_range.marker.write_text("x")
    socket.create_connection(("127.0.0.1", int(firing_range.url.rpartition(":")[2]))).close()
    firing_range.sibling.state.call("s3", "CreateBucket", {"Bucket": "second"})
    firing_range.slot.reset()
    found = firing_range._effects([f"canary-content-7f3a from {os.path.realpath(os.__file__)} site-packages"])
    assert len(found) == 6, found
    firing_range.marker.unlink()
    firing_range._listener.accept()[0].close()
    firing_range.sibling.state.call("s3", "DeleteBucket", {"Bucket": "second"})


def test_a_refused_step_earns_nothing_and_the_episode_goes_on(pool: MiniStackPool) -> None:
    slot = pool.acquire()
    try:
        episode = Episode(slot, max_steps=100)
        episode.reset(instantiate(1, 1), seed=1)
        refused = {attack.row: attack for attack in ATTACKS if attack.expected not in (HARMLESS, NO_CREDIT)}
        for number, attack in enumerate(refused.values(), 1):
            command = attack.command.replace("{url}", "http://127.0.0.1:1").replace("{secret}", "/etc/passwd")
            step = episode.step(command.replace("{{", "{").replace("}}", "}"))
            assert step.observation["refusal"] == attack.expected and not step.observation["command_success"]
            assert attack.expected in step.observation["error"]
            assert step.reward <= 0 and not step.done and step.observation["step_count"] == number
    finally:
        pool.release(slot)


PIECES = (
    "s3api", "s3", "ssm", "sqs", "iam", "dynamodb", "ec2", "list-buckets", "put-parameter", "create-queue", "ls", "cp",
    "list-queues", "put-item", "describe-vpcs", "--name", "--value", "--queue-name", "--bucket", "--key", "--query",
    "--output", "text", "--tags", "--item", "Key=a,Value=b", "file://x", "file:///etc/passwd", "s3://b/k", "s3://",
    ".", "--filters", "Name=a,Values=b,c", "{", "[", "]", "}", '{"a":', '{"S": "x"}', "[[", "=", ",", ",=", "@=", "--",
    "-", "", " ", "é", "\u202e", "\ud83d", "💥", "%s", "{0}", "%00", "..", "'", '"', "\\", "a" * 300, "0", "-1",
    "1e999", "null", "--max-items", "--page-size", "--no-paginate", "--starting-token", "help", "--dry-run",
    "a.b[?c]", "`1`",
    "*", "$(id)",
)  # fmt: skip


@pytest.mark.nightly
def test_two_thousand_random_commands(slot: Slot) -> None:
    """No traceback, no host path, a worker that answers: at the door and past it."""
    draw = random.Random(2000)
    host = ("Traceback (most recent", "site-packages", "realhf-env-", str(Path(os.__file__).parent))
    kills = slot.executor.counters.worker_kills
    for number in range(2000):
        words = draw.choices(PIECES, k=draw.randint(1, 9))
        if number % 2:
            service = draw.choice(("s3api list-buckets", "ssm put-parameter", "sqs create-queue", "dynamodb put-item"))
            words = [*service.split(), *words]
        command = "aws " + (shlex.join(words) if number % 3 else " ".join(words))
        result = slot.executor.run(command)
        if result.refusal is not None and number % 4 == 0 and not any("\ud800" <= c <= "\udfff" for c in command):
            result = past_policy(slot, *words)
        said = result.stdout + result.stderr
        assert not any(word in said for word in host), (command, said)
        assert not result.timed_out, command
    assert slot.executor.run("aws s3api list-buckets").success
    assert slot.executor.counters.worker_kills == kills


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


def test_symbolic_link_in_the_virtual_folder(slot: Slot, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-content")
    (slot.files.path / "link").symlink_to(secret)
    result = slot.executor.run("aws ssm put-parameter --name leak --type String --value file://link")
    assert_refused(slot, result, "local-file")


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


def test_urls_are_never_fetched(slot: Slot, canary: Canary) -> None:
    refused = f"cloudformation create-stack --stack-name s --template-url {canary.url}/x"
    assert_refused(slot, slot.executor.run(f"aws {refused}"), "url-value")
    past_policy(slot, *refused.split())
    assert slot.executor.run(f"aws ssm put-parameter --name p --type String --value {canary.url}/x").success
    assert not canary.was_called()
    stored = slot.state.call("ssm", "GetParameter", {"Name": "p"})
    assert stored["Parameter"]["Value"] == f"{canary.url}/x"


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
