"""BACKEND_TYPE=aws against a fake account: a simulator that botocore is pointed at stands for the cloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

from realhf.env.pool import ACCOUNT, MiniStackPool
from realhf.env.real_aws import RealAwsRefused, is_destructive, read_allow_file
from realhf.env.server_process import EnvServerProcess
from realhf.env.tasks.loader import instantiate

pytestmark = pytest.mark.sim
TOKEN = "only-for-tests"


@pytest.fixture(scope="module")
def fake_cloud() -> Iterator[str]:
    pool = MiniStackPool(1)
    pool.start()
    yield pool.slots[0].endpoint
    pool.stop()


@pytest.fixture
def credentials(fake_cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", fake_cloud)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCOUNT)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "none")


def server(*arguments: str) -> EnvServerProcess:
    return EnvServerProcess(1, "--backend-type", "aws", "--token", TOKEN, *arguments)


def ask(session: ClientConnection, kind: str, **data: object) -> dict:
    session.send(json.dumps({"type": kind, "data": data}))
    return json.loads(session.recv(timeout=30))["data"]


@pytest.mark.usefixtures("credentials")
def test_an_episode_on_the_confirmed_account(tmp_path: Path) -> None:
    allow = tmp_path / "allow.txt"
    allow.write_text("s3api delete-bucket  # emptied by hand before\n")
    task = instantiate(101, 1)
    with server("--allow-real-aws", ACCOUNT, "--allow-file", str(allow)) as process:
        url = process.url.replace("http", "ws") + "/ws"
        with connect(url, additional_headers={"Authorization": f"Bearer {TOKEN}"}, proxy=None) as session:
            ask(session, "reset", task=task.to_json())
            done = ask(session, "step", command=task.solution[0])
            assert done["observation"]["task_achieved"] and done["reward"] == 1.0
            name = task.params["name"]
            ask(session, "reset", task=instantiate(102, 1).to_json())
            still = ask(session, "step", command="aws s3api list-buckets --query Buckets[].Name")
            assert name in still["observation"]["command_output"], "a reset empties nothing"
            refused = ask(session, "step", command="aws dynamodb delete-table --table-name x")
            assert refused["observation"]["refusal"] == "destructive"
            removed = ask(session, "step", command=f"aws s3api delete-bucket --bucket {name}")
            assert removed["observation"]["command_success"]
            with_setup = next(t for t in range(1, 14) if instantiate(t, 1).setup)
            assert ask(session, "reset", task=instantiate(with_setup, 1).to_json())["code"] == "EXECUTION_ERROR"
        process.stop()
        assert "sent s3:CreateBucket, status 200" in process.output()


@pytest.mark.usefixtures("credentials")
def test_another_account_is_not_touched() -> None:
    with pytest.raises(RuntimeError, match=f"belong to account {ACCOUNT}"):
        server("--allow-real-aws", "123456789012")


def test_what_is_destructive() -> None:
    assert all(map(is_destructive, ("delete-bucket", "terminate-instances", "rm", "batch-delete-image")))
    assert not any(map(is_destructive, ("create-bucket", "list-buckets", "put-object", "describe-instances")))


def test_a_bad_line_of_the_allow_file_is_named(tmp_path: Path) -> None:
    allow = tmp_path / "allow.txt"
    allow.write_text("# fine\ns3api delete-bucket now\n")
    with pytest.raises(RealAwsRefused, match="line 2"):
        read_allow_file(str(allow))
