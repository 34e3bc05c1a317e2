"""Sessions whose commands are slow, and clients that say nothing, roll back or break: a fake player
blocks where a real command would, the server is real."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from realhf.aws.client.session_group import SessionGroup
from realhf.env.openenv_client import CapacityError, ConnectError
from realhf.env.server import wire
from realhf.env.server.capacity import ServerMetrics, SlotLeases
from realhf.env.server.server import PortTaken, listen
from tests.env.server.fake_stage import FakeBlockingPlayer, FakePool, Stage


@pytest.fixture
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    served = Stage(**getattr(request, "param", {}))
    yield served
    for player in served.players:
        player.finish.set()
    served.server.stop()
    assert served.server.ended.is_set()


def send_step(session: ClientConnection, command: str = "slow") -> None:
    session.send(json.dumps({"type": "step", "data": {"command": command}}))


@pytest.mark.slow
def test_client_that_vanishes_in_mid_command_frees_its_slot(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    session.socket.shutdown(socket.SHUT_RDWR)
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    assert stage.players[0].kills == 2


@pytest.mark.slow
def test_a_command_that_ends_within_the_grace_is_not_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realhf.env.server.session.GRACE_S", 60.0)
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    session.socket.shutdown(socket.SHUT_RDWR)
    time.sleep(0.4)
    assert stage.pool.free_count == 0
    stage.players[0].finish.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    assert stage.players[0].kills == 0


@pytest.mark.slow
def test_the_loop_serves_others_while_a_command_blocks(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    time.sleep(0.3)
    with urllib.request.urlopen(stage.server.url + "/health", timeout=30) as reply:
        assert reply.status == 200
    assert not stage.players[0].ended.is_set(), "it is answered while the command blocks"
    session.close()


@pytest.mark.slow
def test_requests_sent_ahead_are_answered_in_order(stage: Stage) -> None:
    session = stage.open()
    send_step(session, "slow")
    for _ in range(3):
        send_step(session, "quick")
    session.send('{"type":"state","id":9}')
    time.sleep(0.4)
    stage.players[0].finish.set()
    replies = [json.loads(session.recv(timeout=300)) for _ in range(5)]
    outputs = [reply["data"].get("observation", {}).get("command_output") for reply in replies]
    assert outputs == ["slow", "quick", "quick", "quick", None] and replies[-1]["id"] == 9
    session.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"idle_timeout_s": 0.3}], indirect=True)
def test_idle_sessions_are_reaped_and_busy_ones_are_not(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    time.sleep(0.8)
    stage.players[0].finish.set()
    assert json.loads(session.recv(timeout=300))["type"] == "observation"
    with pytest.raises(ConnectionClosed) as closed:
        session.recv(timeout=300)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "idle timeout")
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"scrub_s": 0.1}], indirect=True)
def test_reopening_waits_for_the_scrub(stage: Stage) -> None:
    for _ in range(3):
        stage.open().close()


@pytest.mark.slow
def test_a_long_scrub_is_refused_and_counts_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realhf.env.server.capacity._SCRUB_WAIT_S", 0.2)
    stage.pool.scrubbed.clear()
    stage.open().close()
    with pytest.raises(InvalidStatus):
        stage.open()
    stage.pool.scrubbed.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    stage.open().close()


@pytest.mark.slow
def test_stop_ends_a_busy_session_after_its_command(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    threading.Timer(0.4, stage.players[0].finish.set).start()
    stage.server.stop()
    assert json.loads(session.recv(timeout=300))["type"] == "observation"
    with pytest.raises(ConnectionClosed) as closed:
        session.recv(timeout=300)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
    assert stage.pool.free_count == 1


@pytest.mark.slow
def test_a_taken_port_is_named(stage: Stage) -> None:
    port = int(stage.server.url.rpartition(":")[2])
    with pytest.raises(PortTaken, match=str(port)):
        listen("127.0.0.1", port)


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that outlast every kill, as a set-up does whose thread is in the environment's own
    code."""
    monkeypatch.setattr(FakeBlockingPlayer, "kill", lambda player: None)
    monkeypatch.setattr("realhf.env.server.session.GRACE_S", 0.05)
    monkeypatch.setattr("realhf.env.server.session.KILLED_WAIT_S", 0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("unkillable")
def test_a_slot_stays_leased_while_a_thread_is_in_it(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    session.socket.shutdown(socket.SHUT_RDWR)
    stage.wait_for(lambda: not stage.server._endpoint._sessions, 60)
    time.sleep(0.1)
    assert stage.pool.free_count == 0 and not stage.pool.released
    with pytest.raises(InvalidStatus):
        stage.open()
    stage.players[0].finish.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    stage.open().close()


@pytest.mark.slow
@pytest.mark.usefixtures("unkillable")
def test_a_stateless_request_is_answered_in_time_and_its_slot_stays_leased(stage: Stage) -> None:
    body = {"action": {"command": "slow"}, "timeout_s": 0.1}
    reply = httpx.post(stage.server.url + "/step", json=body, timeout=300, trust_env=False)
    assert reply.status_code == 504 and "no answer within 0.1 s" in reply.text
    assert (
        httpx.post(stage.server.url + "/reset", json={}, timeout=300, trust_env=False).status_code
        == 503
    )
    assert stage.pool.free_count == 0
    stage.players[0].finish.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)


def _address(stage: Stage) -> str:
    return stage.server.url.replace("http", "ws") + "/ws"


def _metric(stage: Stage, name: str) -> float:
    with urllib.request.urlopen(f"{stage.server.url}/metrics", timeout=300) as page:
        lines = page.read().decode().splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [{"size": 8, "first_message_timeout_s": 5.0}], indirect=True)
async def test_what_a_roll_back_forgot_comes_back(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that asks for more sessions than there are, and drops the accepted ones without
    closing them, holds them for a short time only; one that speaks keeps its own."""
    caplog.set_level(logging.WARNING, "realhf.env.server.session")
    asked = await asyncio.gather(
        *(connect(_address(stage), proxy=None) for _ in range(16)), return_exceptions=True
    )
    forgotten = [one for one in asked if not isinstance(one, BaseException)]
    refused = [one for one in asked if isinstance(one, InvalidStatus)]
    assert len(forgotten) == 8 and [one.response.status_code for one in refused] == [503] * 8
    await forgotten[0].send('{"type":"state"}')
    await forgotten[0].recv()
    for session in forgotten[1:]:
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(session.recv(), 60)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "no first message")
    await asyncio.to_thread(stage.wait_for, lambda: stage.pool.free_count == 7, 60)
    assert await asyncio.to_thread(_metric, stage, "realhf_env_sessions_unused_total") == 7
    assert sum("FIRST_MESSAGE_TIMEOUT_S" in record.getMessage() for record in caplog.records) == 7
    await forgotten[0].send('{"type":"state"}')
    assert json.loads(await forgotten[0].recv())["type"] == "state"
    async with connect(_address(stage), proxy=None) as next_one:
        await next_one.send('{"type":"state"}')
        assert json.loads(await next_one.recv())["type"] == "state"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [{"idle_timeout_s": 0.2, "first_message_timeout_s": 0.0}], indirect=True
)
async def test_a_first_message_without_a_time_of_its_own_has_that_of_the_others(
    stage: Stage,
) -> None:
    async with connect(_address(stage), proxy=None) as session:
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(session.recv(), 60)
        assert closed.value.rcvd is not None and closed.value.rcvd.reason == "no first message"


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [{"idle_timeout_s": 0.2, "first_message_timeout_s": 60.0}], indirect=True
)
async def test_silence_is_counted_and_logged(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "realhf.env.server.session")
    async with connect(_address(stage), proxy=None) as session:
        await session.send('{"type":"state"}')
        await session.recv()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(session.recv(), 60)
    await asyncio.to_thread(stage.wait_for, lambda: stage.pool.free_count == 1, 60)
    assert await asyncio.to_thread(_metric, stage, "realhf_env_sessions_reaped_total") == 1
    assert [record for record in caplog.records if "IDLE_TIMEOUT_S" in record.getMessage()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"size": 4}], indirect=True)
async def test_our_own_roll_back_leaves_nothing(stage: Stage) -> None:
    """Not by a deadline: every session that was accepted is closed before the error is raised."""
    for _ in range(5):
        group = SessionGroup(
            stage.server.url, 9, connect_timeout_s=10, message_timeout_s=10, retry_capacity_s=0
        )
        with pytest.raises(CapacityError):
            await group.connect()
        await asyncio.to_thread(stage.wait_for, lambda: stage.pool.free_count == 4, 60)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [{"scrub_s": 0.5}], indirect=True)
async def test_a_server_is_healthy_while_its_slot_is_scrubbed(stage: Stage) -> None:
    async with connect(_address(stage), proxy=None):
        pass
    await asyncio.to_thread(
        stage.wait_for, lambda: stage.server._endpoint._leases.cleaning_count == 1, 60
    )
    page = await asyncio.to_thread(urllib.request.urlopen, f"{stage.server.url}/health", None, 60)
    assert page.status == 200 and stage.pool.free_count == 0


class FakeBrokenPlayer(FakeBlockingPlayer):
    def state(self) -> dict[str, Any]:
        raise KeyError("/root/secret")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [{}, {"capacity_mode": "openenv"}], indirect=True, ids=["reject", "openenv"]
)
async def test_an_environment_that_cannot_be_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is told which one, and the slot is not lost."""

    def broken(slot: int) -> FakeBlockingPlayer:
        raise OSError("/root/secret")

    monkeypatch.setattr(stage.server._endpoint, "_make_player", broken)
    group = SessionGroup(
        stage.server.url, 1, connect_timeout_s=10, message_timeout_s=10, retry_capacity_s=0
    )
    with pytest.raises(ConnectError) as refused:
        await group.connect()
    assert not isinstance(refused.value, CapacityError)
    try:
        async with connect(_address(stage), proxy=None) as session:
            told = json.loads(await session.recv())["data"]
    except InvalidStatus as error:
        assert error.response.status_code == 500
        told = json.loads(error.response.body or b"")
    assert (told["code"], told["factory_name"]) == (wire.FACTORY_ERROR, "broken")
    assert "OSError" in told["message"] and "secret" not in told["message"]
    await asyncio.to_thread(stage.wait_for, lambda: stage.pool.free_count == 1, 60)


@pytest.mark.slow
async def test_a_session_that_breaks_says_so_and_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.server._endpoint, "_make_player", lambda slot: FakeBrokenPlayer())
    async with connect(_address(stage), proxy=None) as session:
        await session.send('{"type":"state"}')
        told = json.loads(await session.recv())
        assert (told["type"], told["data"]["code"]) == (
            "error",
            wire.SESSION_ERROR,
        ) and "secret" not in str(told)
        with pytest.raises(ConnectionClosed) as closed:
            await session.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
    await asyncio.to_thread(stage.wait_for, lambda: stage.pool.free_count == 1, 60)


class FakeSlowPool(FakePool):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.asked = threading.Event()
        self.given_up = threading.Event()

    def acquire(self) -> int:
        self.asked.set()
        assert self.given_up.wait(60)
        return super().acquire()


async def test_a_slot_whose_client_gave_up_meanwhile_comes_back() -> None:
    """The thread that fetches it cannot be stopped; what it brings goes back."""
    pool = FakeSlowPool(1)
    with ThreadPoolExecutor(2) as threads:
        leases = SlotLeases(pool, 1, threads, ServerMetrics(pool.metrics))
        asked = asyncio.ensure_future(leases.take())
        await asyncio.to_thread(pool.asked.wait, 60)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert leases.active == 0
        pool.given_up.set()
        for _ in range(5000):
            if pool.released:
                break
            await asyncio.sleep(0.01)
        assert pool.free_count == 1 and await leases.take() == 0
