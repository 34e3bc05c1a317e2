"""The playground's routes on a real server with a real simulator of its own."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from realhf.aws.episode.player import EpisodePlayer
from realhf.aws.playground.playground import Playground, PlaygroundSession
from realhf.aws.server.program import EnvServerProcess
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.tasks.loader import load_templates
from realhf.base.loopback import free_port
from realhf.web.refusal import Refusal
from tests.packaging.running_server import ROOT, typed
from tests.process_family import family, gone

pytestmark = pytest.mark.sim
Visit = Callable[[], httpx.Client]


def play(client: httpx.Client, command: str) -> dict:
    reply = client.post("/web/step", json={"command": command})
    assert reply.status_code == 200, reply.text
    return reply.json()["step"]


def start(client: httpx.Client, **order: object) -> dict:
    reply = client.post("/web/reset", json=order)
    assert reply.status_code == 200, reply.text
    return reply.json()["log"]


@pytest.mark.nightly
def test_dedicated_mounts_the_page_at_any_pool_size(web_server: EnvServerProcess) -> None:
    root = httpx.get(web_server.url + "/")
    assert root.status_code == 307 and root.headers["location"] == "/web"
    page = httpx.get(web_server.url + "/web")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")


@pytest.mark.nightly
def test_an_episode_from_reset_to_its_log(visit: Visit) -> None:
    client = visit()
    log = start(client, task_id=201, seed=3, chaos=False)
    assert log["seed"] == 3 and log["steps"] == [] and log["infra_state"] == {}
    assert set(log["task"]) == {"task_id", "difficulty", "description"}
    bucket = log["names"][0]
    assert bucket in log["task"]["description"]
    first = play(client, f"aws s3api create-bucket --bucket {bucket}")
    assert first["infra_state"] == {"s3": {"bucket": [bucket]}}
    assert first["partial_progress"] == 0.5 and first["score"] == first["reward"] == pytest.approx(
        0.45
    )
    hint = play(client, "aws help --task-hint")
    assert hint["hint_text"] == "services: s3api" and hint["score"] == pytest.approx(0.45 * 0.85)
    last = play(
        client,
        f"aws s3api put-bucket-versioning --bucket {bucket} --versioning-configuration "
        f"Status=Enabled",
    )
    assert last["task_achieved"] and last["done"] and last["score"] == pytest.approx(0.85)
    assert client.post("/web/step", json={"command": "aws s3 ls"}).json()["code"] == "NO_EPISODE"
    download = client.get("/web/log")
    assert download.headers["content-disposition"] == 'attachment; filename="episode-201-3.json"'
    assert download.json() == client.get("/web/state").json()["log"]
    assert [step["command"] for step in download.json()["steps"]][1] == "aws help --task-hint"
    for secret in ("success_criteria", "setup", "solution", "chaos"):
        assert secret not in download.text


def test_agents_and_people_obey_the_same_policy(visit: Visit) -> None:
    client = visit()
    start(client, task_id=101, seed=1)
    refused = play(client, "aws s3api put-object --bucket b --key k --body /etc/passwd")
    assert (
        refused["refusal"] == "local-file"
        and not refused["command_success"]
        and "root:" not in refused["error"]
    )
    assert play(client, "ls; id")["refusal"] == "not-aws"
    pasted = play(client, "```bash\r\n$ aws s3api create-bucket \\\r\n    --bucket pasted\r\n```")
    assert (
        pasted["command"] == "aws s3api create-bucket --bucket pasted" and pasted["command_success"]
    )
    assert play(client, "```\naws s3 ls\naws s3 rb s3://pasted\n```")["refusal"] == "newline"
    for body in ({"command": "aws " + "x" * 9000}, {"command": 3}, {}, []):
        assert client.post("/web/step", json=body).status_code == 422
    said = {"Content-Type": "application/json"}
    assert client.post("/web/step", content=b"{", headers=said).status_code == 422
    assert client.post("/web/step", content=b" " * 70000, headers=said).status_code == 413
    assert client.post("/web/step", content=b"{}").status_code == 415


@pytest.mark.parametrize(
    "order",
    [{"task_id": 987654}, {"tier": "master"}, {"seed": -1}, {"seed": "x"}, {"seed": 1 << 60}],
)
def test_a_reset_that_makes_no_sense_is_422(visit: Visit, order: dict) -> None:
    assert visit().post("/web/reset", json=order).status_code == 422
    assert not visit().get("/web/state").json()["busy"], "who starts nothing keeps nobody out"


def test_a_tier_is_drawn_from(visit: Visit) -> None:
    client = visit()
    assert start(client, tier="beginner")["task"]["difficulty"] == "beginner"
    first = start(client, task_id=101)
    assert any(start(client, task_id=101)["seed"] != first["seed"] for _ in range(3))


def test_the_catalog_has_every_task_and_no_answer(visit: Visit) -> None:
    tasks = visit().get("/web/tasks").json()
    assert {task["task_id"] for task in tasks} == {
        template.task_id for template in load_templates()
    }
    text = json.dumps(tasks)
    assert "${" not in text and "{name}" not in text and "aws s3api" not in text
    assert not any(template.name in text for template in load_templates(["warmup"]))


def test_the_solution_is_told_command_by_command_until_the_end(visit: Visit) -> None:
    client = visit()
    assert client.get("/web/solution").json()["code"] == "NO_EPISODE"
    start(client, task_id=301, seed=2, chaos=False)
    for position in range(1, 20):
        told = client.get("/web/solution").json()
        assert told["position"] == position and "${" not in told["command"]
        step = play(client, told["command"])
        if step["done"]:
            break
        play(client, "aws sts get-caller-identity")
    assert step["task_achieved"] and position == told["total"]
    assert client.get("/web/solution").json()["command"] is None


def test_it_shares_nothing_with_a_pool_session(web_server: EnvServerProcess, visit: Visit) -> None:
    client = visit()
    with connect(web_server.url.replace("http", "ws") + "/ws", proxy=None) as session:

        def ask(message: dict) -> dict:
            session.send(json.dumps(message))
            return json.loads(session.recv(timeout=300))["data"]

        ask({"type": "reset", "data": {"task_id": 101, "seed": 1}})
        ask(
            {"type": "step", "data": {"command": "aws s3api create-bucket --bucket of-the-session"}}
        )
        start(client, task_id=101, seed=1)
        assert "of-the-session" not in play(client, "aws s3api list-buckets")["command_output"]
        play(client, "aws s3api create-bucket --bucket of-the-playground")
        listed = ask({"type": "step", "data": {"command": "aws s3api list-buckets"}})[
            "observation"
        ]["command_output"]
        assert "of-the-session" in listed and "of-the-playground" not in listed
        metrics = httpx.get(web_server.url + "/metrics").text
        assert "realhf_env_pool_size 2.0" in metrics


def test_a_second_visitor_is_told_to_wait_until_the_first_leaves(visit: Visit) -> None:
    first = visit()
    second = visit()
    start(first, task_id=101, seed=1)
    play(first, "aws s3api create-bucket --bucket left-behind")
    refused = second.post("/web/reset", json={"task_id": 101})
    assert (
        refused.status_code == 409
        and refused.json()["code"] == "BUSY"
        and 0 < refused.json()["free_in_s"] <= 600
    )
    assert second.post("/web/step", json={"command": "aws s3 ls"}).json()["code"] == "BUSY"
    state = second.get("/web/state").json()
    assert state["busy"] and state["log"] is None and "left-behind" not in str(state)
    assert (
        second.get("/web/log").status_code == 409 and second.get("/web/solution").status_code == 409
    )
    second.post("/web/leave", json={})
    assert play(first, "aws s3api list-buckets")["command_success"]
    first.post("/web/leave", json={})
    start(second, task_id=101, seed=1)
    assert "left-behind" not in play(second, "aws s3api list-buckets")["command_output"]
    assert first.post("/web/step", json={"command": "aws s3 ls"}).json()["code"] == "BUSY"


def test_markup_is_data(visit: Visit) -> None:
    client = visit()
    start(client, task_id=101, seed=1)
    command = "aws s3api create-bucket --bucket '<img src=x onerror=alert(1)>'"
    reply = client.post("/web/step", json={"command": command})
    assert (
        reply.headers["content-type"] == "application/json"
        and reply.headers["x-content-type-options"] == "nosniff"
    )
    assert reply.json()["step"]["command"] == command


@pytest.mark.nightly
async def test_its_simulator_is_started_once_after_a_failed_try_and_set_free_when_idle() -> None:
    port = free_port()
    made: list[MiniStackPool] = []

    def make_pool() -> MiniStackPool:
        made.append(MiniStackPool(1, port))
        return made[-1]

    playground = Playground(
        PlaygroundSession(make_pool, lambda slot: EpisodePlayer(slot, 15), summed=True),
        5.0,
        away_release_s=0.5,
    )
    try:
        with socket.socket() as occupant:
            occupant.bind(("127.0.0.1", port))
            occupant.listen()
            with pytest.raises(Refusal, match="simulator did not start") as refused:
                await playground.reset("ann", {"task_id": 101})
        assert refused.value.status == 503 and str(port) in str(refused.value)
        before = set(family(os.getpid()))
        logs = await asyncio.gather(
            *(playground.reset("ann", {"task_id": 101, "seed": seed}) for seed in range(8))
        )
        assert len(made) == 2 and len({log["episode_id"] for log in logs}) == 8
        simulators = set(family(os.getpid())) - before
        assert made[-1].slots[0].port == port and simulators
        await playground.step("ann", "aws s3api create-bucket --bucket anns")
        with pytest.raises(Refusal, match="busy"):
            await playground.reset("bob", {"task_id": 101})
        deadline = time.monotonic() + 60
        while (await playground.state("bob"))["busy"]:
            assert time.monotonic() < deadline, "an idle visitor was not released"
            await asyncio.sleep(0.05)
        with pytest.raises(Refusal) as late:
            await playground.step("ann", "aws s3api list-buckets")
        assert late.value.code == "NO_EPISODE"
        await playground.reset("bob", {"task_id": 101, "seed": 1})
        assert (
            "anns" not in (await playground.step("bob", "aws s3api list-buckets"))["command_output"]
        )
        assert len(made) == 2
        await playground.away("ann")
        assert (await playground.state("ann"))["free_in_s"] > 4, (
            "only the player's own page sets the seat free"
        )
        await playground.away("bob")
        assert (await playground.state("ann"))["free_in_s"] <= 0.5, (
            "a closed page used to keep its seat for ten minutes"
        )
        assert (await playground.state("bob"))["log"], "it was loaded anew"
        assert (await playground.state("ann"))["free_in_s"] > 4
        await playground.away("bob")
        deadline = time.monotonic() + 60
        while (await playground.state("ann"))["busy"]:
            assert time.monotonic() < deadline, "the seat of a closed page was not set free"
            await asyncio.sleep(0.05)
    finally:
        playground.close()
    assert gone(simulators, 60)
    with pytest.raises(Refusal):
        await playground.reset("bob", {"task_id": 101})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "aws-env",
        pytest.param("aws-env --pool-size 8 --web dedicated", marks=pytest.mark.nightly),
        pytest.param("aws-env --pool-size 8", marks=pytest.mark.nightly),
    ],
)
def test_what_the_pages_print_serves_a_playground_or_says_how_to_get_one(
    line: str, tmp_path: Path
) -> None:
    """The README promised a playground with a command that serves none."""
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs" / "environment.md").read_text()
    assert f"`{line}`" in pages
    with typed(line, tmp_path, {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}) as (
        url,
        printed,
    ):
        answer = httpx.get(f"{url}/web")
        sessions = httpx.get(f"{url}/metadata").json()["max_concurrent_envs"]
    assert sessions == (8 if "8" in line else 1)
    if line == "aws-env --pool-size 8":
        assert answer.status_code == 404
        assert [
            text
            for text in printed
            if "no playground at /web beside 8 sessions; --web dedicated" in text
        ]
    else:
        assert answer.status_code == 200 and f"aws-env: a page for people at {url}/web\n" in printed
