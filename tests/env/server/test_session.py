"""Sessions whose commands are slow: a fake player blocks where a real command would, the server is real."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

from realhf.env.server.server import PortTaken, listen
from tests.env.server.fake_stage import FakeBlockingPlayer, Stage


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


def test_client_that_vanishes_in_mid_command_frees_its_slot(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    session.socket.shutdown(socket.SHUT_RDWR)
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    assert stage.players[0].kills == 2


def test_a_command_that_ends_within_the_grace_is_not_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.env.server.session._GRACE_S", 60.0)
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    session.socket.shutdown(socket.SHUT_RDWR)
    time.sleep(0.4)
    assert stage.pool.free_count == 0
    stage.players[0].finish.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    assert stage.players[0].kills == 0


def test_the_loop_serves_others_while_a_command_blocks(stage: Stage) -> None:
    session = stage.open()
    send_step(session)
    assert stage.players[0].started.wait(60)
    time.sleep(0.3)
    with urllib.request.urlopen(stage.server.url + "/health", timeout=30) as reply:
        assert reply.status == 200
    assert not stage.players[0].ended.is_set(), "it is answered while the command blocks"
    session.close()


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


@pytest.mark.parametrize("stage", [{"scrub_s": 0.1}], indirect=True)
def test_reopening_waits_for_the_scrub(stage: Stage) -> None:
    for _ in range(3):
        stage.open().close()


def test_a_long_scrub_is_refused_and_counts_nobody(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.env.server.capacity._SCRUB_WAIT_S", 0.2)
    stage.pool.scrubbed.clear()
    stage.open().close()
    with pytest.raises(InvalidStatus):
        stage.open()
    stage.pool.scrubbed.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
    stage.open().close()


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


def test_a_taken_port_is_named(stage: Stage) -> None:
    port = int(stage.server.url.rpartition(":")[2])
    with pytest.raises(PortTaken, match=str(port)):
        listen("127.0.0.1", port)


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that outlast every kill, as a set-up does whose thread is in the environment's own code."""
    monkeypatch.setattr(FakeBlockingPlayer, "kill", lambda player: None)
    monkeypatch.setattr("realhf.env.server.session._GRACE_S", 0.05)
    monkeypatch.setattr("realhf.env.server.session.KILLED_WAIT_S", 0.1, raising=False)
    monkeypatch.setattr("realhf.env.server.session._KILLED_WAIT_S", 0.1, raising=False)


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


@pytest.mark.usefixtures("unkillable")
def test_a_stateless_request_is_answered_in_time_and_its_slot_stays_leased(stage: Stage) -> None:
    body = {"action": {"command": "slow"}, "timeout_s": 0.1}
    reply = httpx.post(stage.server.url + "/step", json=body, timeout=300, trust_env=False)
    assert reply.status_code == 504 and "no answer within 0.1 s" in reply.text
    assert httpx.post(stage.server.url + "/reset", json={}, timeout=300, trust_env=False).status_code == 503
    assert stage.pool.free_count == 0
    stage.players[0].finish.set()
    stage.wait_for(lambda: stage.pool.free_count == 1, 60)
