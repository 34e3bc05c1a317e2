"""BACKEND_TYPE=aws against a fake account: a simulator that botocore is pointed at stands for the
cloud."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name
from botocore.model import ListShape, MapShape, Shape, StructureShape
from websockets.sync.client import ClientConnection, connect

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.executor import OutputLimits
from realhf.aws.cli.policy import Verdict
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.episode.episode import Episode
from realhf.aws.real_aws.account import RealAwsExecutor, RealAwsPool, RealAwsSlot, RealState
from realhf.aws.real_aws.permissions import (
    DEFAULT_READS,
    Permissions,
    RealAwsRefused,
    read_allow_file,
)
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.simulator.pool import ACCOUNT, MiniStackPool, Slot
from realhf.aws.tasks.loader import instantiate
from realhf.aws.tasks.task import Task, TaskError
from tests.aws.red_team.inside import NOT_PERMITTED

pytestmark = pytest.mark.sim
TOKEN = "only-for-tests"


@pytest.fixture(scope="module")
def fake_account() -> Iterator[Slot]:
    pool = MiniStackPool(1)
    pool.start()
    yield pool.slots[0]
    pool.stop()


@pytest.fixture
def fake_cloud(fake_account: Slot, monkeypatch: pytest.MonkeyPatch) -> Slot:
    """The fake account, emptied, with botocore's settings leading to it."""
    fake_account.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake_account.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCOUNT)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")
    return fake_account


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    """A listener that must never be called."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
        assert not select.select([listener], [], [], 0)[0], "somebody called"


Executor = Callable[..., RealAwsExecutor]


@pytest.fixture
def executor(fake_cloud: Slot, tmp_path: Path) -> Executor:
    def make(*named: tuple[str, str]) -> RealAwsExecutor:
        permissions = Permissions(frozenset(named))
        endpoints = {"AWS_ENDPOINT_URL": fake_cloud.endpoint}
        session = botocore.session.Session()
        return RealAwsExecutor(
            session, tmp_path, permissions, OutputLimits(timeout_s=60.0), endpoints
        )

    return make


def server(*arguments: str) -> EnvServerProcess:
    return EnvServerProcess(
        1, "--backend-type", "aws", "--token", TOKEN, "--cmd-timeout-s", "60", *arguments
    )


def ask(session: ClientConnection, kind: str, **data: object) -> dict:
    session.send(json.dumps({"type": kind, "data": data}))
    return json.loads(session.recv(timeout=300))["data"]


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_cloud")
def test_an_episode_on_the_confirmed_account(tmp_path: Path) -> None:
    allow = tmp_path / "allow.txt"
    allow.write_text("s3api create-bucket\ns3 mb\ns3api delete-bucket  # emptied by hand before\n")
    task = instantiate(101, 1)
    with server("--allow-real-aws", ACCOUNT, "--allow-file", str(allow)) as process:
        url = process.url.replace("http", "ws") + "/ws"
        with connect(
            url, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None
        ) as session:
            ask(session, "reset", task=task.to_json())
            done = ask(session, "step", command=task.solution[0])
            assert done["observation"]["task_achieved"] and done["reward"] == 1.0
            name = task.params["name"]
            ask(
                session,
                "reset",
                task=task.to_json() | {"success_criteria": {"operation": "iam:ListUsers"}},
            )
            still = ask(session, "step", command="aws s3api list-buckets --query Buckets[].Name")
            assert name in still["observation"]["command_output"], "a reset empties nothing"
            refused = ask(session, "step", command="aws dynamodb delete-table --table-name x")
            assert refused["observation"]["refusal"] == "not-permitted"
            removed = ask(
                session, "step", command=f"aws --output json s3api delete-bucket --bucket {name}"
            )
            assert removed["observation"]["command_success"], removed
            with_setup = next(t for t in range(1, 14) if instantiate(t, 1).setup)
            answer = ask(session, "reset", task=instantiate(with_setup, 1).to_json())
            assert answer["code"] == "VALIDATION_ERROR" and "needs a set-up" in answer["message"]
        process.stop()
        assert "sent s3:CreateBucket, status 200" in process.output()


@pytest.mark.nightly
@pytest.mark.usefixtures("fake_cloud")
def test_another_account_is_not_touched() -> None:
    with pytest.raises(RuntimeError, match=f"belong to account {ACCOUNT}"):
        server("--allow-real-aws", "123456789012")


@pytest.mark.parametrize("command", NOT_PERMITTED)
def test_what_is_no_default_read_does_not_run(
    fake_cloud: Slot, executor: Executor, command: str
) -> None:
    fake_cloud.state.call("s3", "CreateBucket", {"Bucket": "kept"})
    result = executor().run(command)
    assert result.refusal == "not-permitted" and not result.requests
    assert [bucket["Name"] for bucket in fake_cloud.state.call("s3", "ListBuckets")["Buckets"]] == [
        "kept"
    ]


@pytest.mark.nightly
def test_default_reads_and_named_operations_run(
    fake_cloud: Slot, executor: Executor, tmp_path: Path
) -> None:
    shell = executor(("s3api", "put-object"), ("s3api", "get-object"))
    fake_cloud.state.call("s3", "CreateBucket", {"Bucket": "kept"})
    listed = shell.run("aws --output text s3api list-buckets --query Buckets[].Name --no-cli-pager")
    assert (listed.stdout, [sent.operation for sent in listed.requests]) == (
        "kept\n",
        ["ListBuckets"],
    ), listed
    assert shell.run("aws s3 ls s3://kept").success
    (tmp_path / "in.txt").write_text("words")
    put = shell.run("aws s3api put-object --bucket kept --key k --body in.txt")
    assert put.success, put.stderr
    assert shell.run("aws s3api get-object --bucket kept --key k out.txt").success
    assert (tmp_path / "out.txt").read_text() == "words"


def test_urls_and_files_are_not_read_for_a_parameter(
    fake_cloud: Slot, executor: Executor, canary: socket.socket, tmp_path: Path
) -> None:
    """The command line's first version fetches such values; here they are texts."""
    fake_cloud.state.call("cognito-idp", "CreateUserPool", {"PoolName": "p"})
    pool = fake_cloud.state.call("cognito-idp", "ListUserPools", {"MaxResults": 1})["UserPools"][0][
        "Id"
    ]
    url = f"http://127.0.0.1:{canary.getsockname()[1]}/"
    shell = executor(("cognito-idp", "create-user-pool-client"), ("ssm", "put-parameter"))
    made = shell.run(
        f"aws cognito-idp create-user-pool-client --user-pool-id {pool} --client-name c "
        f"--callback-urls {url}"
    )
    assert made.success, made.stderr
    assert made.requests[0].params["CallbackURLs"] == [url]
    (tmp_path / "secret").write_text("content")
    read = shell.run("aws ssm put-parameter --name p --type String --value file://secret")
    assert read.refusal == "local-file" and not read.requests


@pytest.mark.nightly
def test_the_child_sends_only_what_was_permitted(
    fake_cloud: Slot, executor: Executor, canary: socket.socket, tmp_path: Path
) -> None:
    """A second layer, should the policy ever be wrong about what a command asks for."""
    fake_cloud.state.call("s3", "CreateBucket", {"Bucket": "kept"})
    past = executor()._execute(
        Verdict(
            ("s3api", "delete-bucket", "--bucket", "kept"),
            service="s3api",
            operation="list-buckets",
        )
    )
    assert not past.success and not past.requests and "not what was permitted" in past.stderr
    assert fake_cloud.state.call("s3", "ListBuckets")["Buckets"]
    (tmp_path / "secret").write_text("content")
    port = canary.getsockname()[1]
    for value in (f"http://127.0.0.1:{port}/", "file://secret"):
        words = (
            "ssm",
            "put-parameter",
            "--name",
            "p",
            "--type",
            "String",
            "--overwrite",
            "--value",
            value,
        )
        assert (
            executor()
            ._execute(Verdict(words, service="ssm", operation="put-parameter"))
            .requests[0]
            .params["Value"]
            == value
        )
    elsewhere = Verdict(
        ("s3", "ls", "--endpoint-url", f"http://127.0.0.1:{port}"), service="s3", operation="ls"
    )
    assert "kept" in executor()._execute(elsewhere).stdout, "the endpoint stays what it was"


def test_requests_leave_for_the_endpoints_of_aws_alone(
    executor: Executor, canary: socket.socket
) -> None:
    """Even where a command could name a host."""
    url = f"http://127.0.0.1:{canary.getsockname()[1]}/000000000000/q"
    result = executor().run(f"aws sqs get-queue-attributes --queue-url {url} --attribute-names All")
    assert [request.params["QueueUrl"] for request in result.requests] == [url], result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"setup_commands": ["aws s3 mb s3://b"]}, "a set-up"),
        (
            {
                "setup_commands": [
                    {"service": "s3", "operation": "CreateBucket", "params": {"Bucket": "b"}}
                ]
            },
            "a set-up",
        ),
        ({"possible_drifts": ["aws s3 rb s3://b"]}, "drift"),
        ({"decoys": ["aws s3 mb s3://b"]}, "decoys"),
        ({"assets": {"a.txt": "x"}}, "files"),
    ],
)
def test_a_task_that_needs_another_world_is_refused_with_the_reason(
    fake_cloud: Slot, tmp_path: Path, task: dict[str, object], reason: str
) -> None:
    episode = Episode(_slot(fake_cloud, tmp_path))
    with pytest.raises(TaskError, match=f"needs {reason}; a real account gets none"):
        episode.reset(_task(**task))
    assert fake_cloud.state.call("s3", "ListBuckets")["Buckets"] == []


@pytest.mark.nightly
def test_there_is_no_chaos_and_no_secret_in_checks(fake_cloud: Slot, tmp_path: Path) -> None:
    episode = Episode(_slot(fake_cloud, tmp_path), chaos=True)
    episode.reset(_task())
    assert episode._chaos is None
    with pytest.raises(TaskError, match="not disturbed"):
        episode.reset(_task(), chaos=True)
    with pytest.raises(StateCallError, match="not one of the default reads"):
        RealState(botocore.session.Session()).call(
            "secretsmanager", "GetSecretValue", {"SecretId": "s"}
        )


def test_default_reads_are_operations_that_agents_have() -> None:
    for service, operations in DEFAULT_READS.items():
        assert operations <= ALLOWED[service]
        assert all(
            name.startswith(("get-", "list-", "describe-", "head-", "ls")) for name in operations
        )
    secrets = {
        ("secretsmanager", "get-secret-value"),
        ("ssm", "get-parameter"),
        ("s3api", "get-object"),
        ("dynamodb", "scan"),
        ("lambda", "get-function"),
        ("cognito-idp", "describe-user-pool-client"),
    }
    assert not any(Permissions().permits(*pair) for pair in secrets)


_TELLING = frozenset({
    "clientsecret", "environment", "environmentvariables", "input", "outputs", "outputvalue", "parametervalue",
    "password", "plaintext", "resourceproperties", "secretaccesskey", "secretbinary", "secretstring",
    "stagevariables", "userdata", "variables",
})  # fmt: skip
"""Names of members in which people put passwords and keys."""
_NEVER_FILLED = {("elbv2", "describe-listeners", "ClientSecret")}
"""The member is there because one shape serves requests and answers; no answer has it."""


def _members(shape: Shape, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names of all members of a shape, nested ones too; a shape within itself is not entered
    again."""
    if shape.name in above:
        return
    above |= {shape.name}
    if isinstance(shape, StructureShape):
        for name, member in shape.members.items():
            yield name
            yield from _members(member, above)
    elif isinstance(shape, ListShape):
        yield from _members(shape.member, above)
    elif isinstance(shape, MapShape):
        yield from _members(shape.value, above)


@pytest.mark.nightly
def test_no_default_read_returns_what_may_hold_a_secret() -> None:
    """By the shapes of all answers. An inventory that lacks a permission leaves the type out."""
    session = botocore.session.Session()
    telling = set()
    seen = 0
    for service, operations in DEFAULT_READS.items():
        if service == "s3":
            continue
        model = session.get_service_model("s3" if service == "s3api" else service)
        for api_name in model.operation_names:
            operation = xform_name(api_name, "-")
            answer = model.operation_model(api_name).output_shape
            if operation in operations:
                seen += 1
                named = set(_members(answer)) if answer is not None else set()
                telling |= {
                    (service, operation, name) for name in named if name.lower() in _TELLING
                }
    assert seen == sum(map(len, DEFAULT_READS.values())) - 1, "s3 ls is no operation of the API"
    assert telling == _NEVER_FILLED


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("s3api delete-bucket now", "not 'service operation'"),
        ("s3api delete-everything", "agents have no operation"),
        ("organizations leave-organization", "agents have no operation"),
    ],
)
def test_a_bad_line_of_the_allow_file_is_named(tmp_path: Path, line: str, said: str) -> None:
    allow = tmp_path / "allow.txt"
    allow.write_text(f"# fine\n{line}\n")
    with pytest.raises(RealAwsRefused, match=f"line 2: {said}"):
        read_allow_file(str(allow))


def _slot(fake_cloud: Slot, tmp_path: Path) -> RealAwsSlot:
    pool = RealAwsPool(
        ACCOUNT, "", OutputLimits(), MiniStackPool(1), {"AWS_ENDPOINT_URL": fake_cloud.endpoint}
    )
    pool.start()
    return pool.acquire()


def _task(**fields: object) -> Task:
    data = {
        "task_id": 9200,
        "difficulty": "expert",
        "description": "List the buckets.",
        "success_criteria": {"state_checks": [{"command": "aws s3api head-bucket --bucket b"}]},
    }
    return Task.from_json(data | fields)
