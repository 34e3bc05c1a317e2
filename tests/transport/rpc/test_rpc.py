"""Calls between real processes: order, lanes, errors, deadlines, death."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgpack
import pytest
import zmq

from realhf.transport.envelope import MAX_PAYLOAD_BYTES, PROTOCOL, pack_header
from realhf.transport.errors import (
    MasterLost,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeout,
    WorkerDied,
)
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.rpc_worker import RpcWorker
from tests.transport.fixed_port import At

SCRIPT = str(Path(__file__).with_name("worker_process.py"))


class Cluster:
    """A master in this process and workers in their own."""

    def __init__(self, dead_after_s: float) -> None:
        self.deaths: list[str] = []
        self.master = RpcMaster(
            "run",
            heartbeat_s=0.5,
            dead_after_s=dead_after_s,
            on_death=lambda name, _: self.deaths.append(name),
        )
        self.processes: list[subprocess.Popen[str]] = []

    def launch(
        self, name: str, run_id: str = "run", leave_within_s: str = "", endpoint: str = ""
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            SCRIPT,
            endpoint or self.master.endpoint,
            run_id,
            name,
            leave_within_s,
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    async def join(self, *names: str) -> list[subprocess.Popen[str]]:
        processes = [self.launch(name) for name in names]
        await self.master.wait_for(names, timeout_s=60)
        return processes


@pytest.fixture
async def cluster(request: pytest.FixtureRequest):
    made = Cluster(getattr(request, "param", 30.0))
    await made.master.start()
    yield made
    await made.master.close()
    for process in made.processes:
        try:
            process.communicate(timeout=300)
        finally:
            process.kill()


@pytest.mark.slow
async def test_calls_run_in_order_while_the_immediate_lane_lives(cluster):
    await cluster.join("w")
    delays = [3.0, 0.2, 0.1, 0.0]
    calls = [
        cluster.master.call("w", "append", {"seconds": delay, "number": i}, timeout_s=60)
        for i, delay in enumerate(delays)
    ]
    assert await cluster.master.call("w", "status", timeout_s=60) == [], (
        "answered during the first call"
    )
    assert await asyncio.gather(*calls) == [1, 2, 3, 4]
    assert await cluster.master.call("w", "log", timeout_s=60) == [0, 1, 2, 3]


@pytest.mark.slow
async def test_replies_may_come_out_of_order_across_workers(cluster):
    await cluster.join("a", "b")
    slow = cluster.master.call("a", "append", {"seconds": 3.0, "number": 1}, timeout_s=60)
    fast = cluster.master.call("b", "echo", {"x": b"\0raw", "y": [1, None, 2.5]}, timeout_s=60)
    assert await fast == {"x": b"\0raw", "y": [1, None, 2.5]}
    assert not slow.done()
    assert await slow == 1


@pytest.mark.slow
async def test_remote_exceptions_carry_the_remote_traceback(cluster):
    await cluster.join("w")
    with pytest.raises(RemoteError) as caught:
        await cluster.master.call(
            "w", "boom", {"meal": "pebbles"}, timeout_s=60, step=3, mfc="actor_train"
        )
    text = str(caught.value)
    assert "ValueError: cannot digest pebbles" in text
    assert "worker_process.py" in text and "in boom" in text
    assert "'w'" in text and "actor_train, step 3" in text
    assert (caught.value.kind, caught.value.handler) == ("ValueError", "boom")
    assert await cluster.master.call("w", "echo", 1, timeout_s=60) == 1, "the worker survives"


@pytest.mark.slow
async def test_unknown_names_and_unsendable_values_are_protocol_errors(cluster):
    await cluster.join("w")
    call = cluster.master.call
    with pytest.raises(WorkerDied, match="'nobody'"):
        await call("nobody", "echo", timeout_s=60)
    with pytest.raises(ProtocolError, match=r"no handler 'ecko'.*'echo'"):
        await call("w", "ecko", timeout_s=60)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        await call("w", "echo", object(), timeout_s=60)
    with pytest.raises(ProtocolError, match="data plane"):
        await call("w", "echo", bytes(MAX_PAYLOAD_BYTES + 1), timeout_s=60)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        await call("w", "unsendable", timeout_s=60)
    with pytest.raises(ProtocolError, match="exceeds"):
        await call("w", "huge", MAX_PAYLOAD_BYTES + 1, timeout_s=60)
    assert await call("w", "echo", 1, timeout_s=60) == 1


@pytest.mark.nightly
async def test_a_deadline_names_the_worker_and_its_state(cluster):
    await cluster.join("w")
    late = cluster.master.call(
        "w", "append", {"seconds": 6, "number": 0}, timeout_s=2.5, mfc="ref_inf"
    )
    skipped = cluster.master.call("w", "append", {"seconds": 0, "number": 1}, timeout_s=2.0)
    with pytest.raises(RpcTimeout, match=r"ref_inf did not answer within 2.5 s.* was in append"):
        await late
    assert not skipped.done(), (
        "it had to wait for its turn, which begins when the other has had its time"
    )
    with pytest.raises(RpcTimeout, match=r"append of worker 'w'.* within 2 s"):
        await skipped
    # The late reply is dropped, the call that had not begun is never made, and the order of calls
    # holds.
    assert await cluster.master.call("w", "log", timeout_s=60) == [0]


@pytest.mark.nightly
@pytest.mark.parametrize("ended", ["answered", "given up"])
async def test_a_short_deadline_does_not_run_while_a_long_call_is_before_it(cluster, ended):
    await cluster.join("w")
    long = cluster.master.call("w", "append", {"seconds": 3.0, "number": 0}, timeout_s=60)
    # Cancelled in its turn it is skipped, and cancelled while it runs it is in the way until its
    # end, all the same.
    between = cluster.master.call("w", "append", {"seconds": 0, "number": 1}, timeout_s=60)
    short = cluster.master.call("w", "append", {"seconds": 0, "number": 2}, timeout_s=2.0)
    await asyncio.sleep(0.2)
    if ended == "given up":
        long.cancel()
        between.cancel()
    assert await short == (3 if ended == "answered" else 2)
    assert await cluster.master.call("w", "status", timeout_s=60) == (
        [0, 1, 2] if ended == "answered" else [0, 2]
    )
    assert not cluster.master._pending


@pytest.mark.slow
async def test_a_lane_is_not_waited_for_when_its_worker_dies(cluster):
    (process,) = await cluster.join("w")
    calls = [
        cluster.master.call("w", "append", {"seconds": 60, "number": i}, timeout_s=100)
        for i in range(3)
    ]
    calls[1].cancel()
    await asyncio.sleep(0.1)
    process.kill()
    for call in (calls[0], calls[2]):
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(call, 60)
    assert not cluster.master._pending


@pytest.mark.slow
async def test_immediate_calls_wait_for_their_turn_too(cluster):
    await cluster.join("w")
    long = cluster.master.call("w", "nap", 3.0, timeout_s=60)
    assert await cluster.master.call("w", "status", timeout_s=2.0) == [] and long.done()


@pytest.mark.slow
async def test_a_cancelled_call_is_not_made(cluster):
    await cluster.join("w")
    first = cluster.master.call("w", "append", {"seconds": 0.5, "number": 0}, timeout_s=60)
    second = cluster.master.call("w", "append", {"seconds": 0, "number": 1}, timeout_s=60)
    second.cancel()
    await first
    assert await cluster.master.call("w", "log", timeout_s=60) == [0]


@pytest.mark.slow
async def test_a_killed_worker_fails_its_calls_at_once(cluster):
    (process, _) = await cluster.join("w", "other")
    calls = [
        cluster.master.call("w", "append", {"seconds": 60, "number": i}, timeout_s=100)
        for i in range(3)
    ]
    await asyncio.sleep(0.2)
    process.kill()
    for call in calls:
        with pytest.raises(WorkerDied, match="worker 'w' died: its process ended"):
            await asyncio.wait_for(call, 60)
    assert cluster.deaths == ["w"]
    with pytest.raises(WorkerDied):
        await cluster.master.call("w", "echo", timeout_s=60)
    assert await cluster.master.call("other", "roster", timeout_s=60) == {"other": "model"}


class Wire:
    """Carries connections to an endpoint, and can break all that there are."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    target.write(data)

        await asyncio.gather(pump(reader, back), pump(there, writer))

    def cut(self) -> None:
        """Reset every connection, as a firewall does that has forgotten them."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest.mark.nightly
async def test_a_worker_whose_connection_broke_is_dead_though_it_lives_and_ends(cluster):
    """It connects anew by itself, and gives signs of life; calls would not arrive."""
    async with Wire(cluster.master.endpoint) as wire:
        process = cluster.launch("w", endpoint=wire.endpoint)
        await cluster.master.wait_for(["w"], timeout_s=60)
        assert await cluster.master.call("w", "echo", 1, timeout_s=60) == 1
        wire.cut()
        async with asyncio.timeout(60):
            while True:
                try:
                    await cluster.master.call("w", "echo", 1, timeout_s=1)
                except WorkerDied:
                    break
                except RpcTimeout:
                    continue
            while cluster.deaths != ["w"]:
                await asyncio.sleep(0.05)
        assert process.poll() is None, "it lived until then"
        assert await asyncio.to_thread(process.wait, 60) != 0


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [3.0], indirect=True)
async def test_a_frozen_worker_is_dead_after_the_silence_limit(cluster):
    (process,) = await cluster.join("w")
    call = cluster.master.call("w", "append", {"seconds": 60, "number": 0}, timeout_s=100)
    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(WorkerDied, match="no heartbeat"):
            await asyncio.wait_for(call, 60)
    finally:
        process.kill()


async def until_noticed(master: RpcMaster, name: str) -> None:
    """Waits for a worker again and again: a broken connection fails a call before the death is
    known."""
    while True:
        await master.wait_for([name], timeout_s=60)
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_worker_may_return_under_its_name(cluster):
    (process,) = await cluster.join("w")
    version = cluster.master.announcer.version
    process.kill()
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(
            cluster.master.call("w", "append", {"seconds": 60, "number": 0}, timeout_s=60), 60
        )
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(until_noticed(cluster.master, "w"), 60)
    cluster.master.expect("w")
    await cluster.join("w")
    assert cluster.master.announcer.version > version
    assert await cluster.master.call("w", "echo", 7, timeout_s=60) == 7


@pytest.mark.slow
async def test_registration_publishes_the_roster(cluster):
    await cluster.join("a", "b")
    info = cluster.master.roster["a"]
    assert (info.kind, info.data_endpoint, info.endpoints["env"]) == (
        "model",
        "tcp://127.0.0.1:1",
        "http://127.0.0.1:2",
    )
    assert await cluster.master.call("a", "roster", timeout_s=60) == {"a": "model", "b": "model"}


@pytest.mark.slow
async def test_addresses_can_be_kept_back_from_the_roster(cluster):
    cluster.master._on_join = lambda info: (
        info.name == "a" and cluster.master.list_services("a", False)
    )
    await cluster.join("a", "b")
    listed = {"a": [], "b": ["env"]}
    assert await cluster.master.call("b", "services", timeout_s=60) == listed
    assert cluster.master.roster["a"].endpoints, "the master knows it all the same"
    cluster.master.list_services("a", True)
    assert await cluster.master.call("b", "services", timeout_s=60) == {**listed, "a": ["env"]}
    cluster.master.list_services("nobody", False)


@pytest.mark.slow
async def test_one_that_is_sent_away_leaves_and_may_return(cluster):
    (process,) = await cluster.join("w")
    call = cluster.master.call("w", "append", {"seconds": 0.3, "number": 0}, timeout_s=60)
    cluster.master.dismiss("w", "it is of no use")
    with pytest.raises(WorkerDied, match="it is of no use"):
        await call
    assert cluster.deaths == ["w"] and "w" not in cluster.master.roster
    assert await asyncio.to_thread(process.wait, 60) == 0
    cluster.master.dismiss("w", "it is gone already")
    cluster.master.expect("w")
    await cluster.join("w")
    assert await cluster.master.call("w", "echo", 7, timeout_s=60) == 7


@pytest.mark.slow
async def test_one_that_hangs_when_it_is_sent_away_is_ended(cluster):
    process = cluster.launch("w", leave_within_s="0.3")
    await cluster.master.wait_for(["w"], timeout_s=60)
    cluster.master.call("w", "append", {"seconds": 60, "number": 0}, timeout_s=60)
    assert await cluster.master.call("w", "status", timeout_s=60) == []
    await asyncio.sleep(0.2)  # the call has arrived; its thread has to take it up
    cluster.master.dismiss("w", "it hangs")
    assert await asyncio.to_thread(process.wait, 60) == 1


@pytest.mark.slow
async def test_refusals_say_why(cluster):
    await cluster.join("w")
    stranger = cluster.launch("x", run_id="another")
    _, stderr = await asyncio.to_thread(stranger.communicate, timeout=300)
    assert stranger.returncode == 1
    assert "this is run 'run'" in stderr
    assert list(cluster.master.roster) == ["w"]


@pytest.mark.slow
async def test_a_successor_takes_the_place_of_one_that_is_out_of_reach_and_that_one_leaves(cluster):
    """A worker whose host agent hangs is lost for the launcher and lives on for the master, who
    used to refuse the one that was started elsewhere in its place."""
    (before,) = await cluster.join("w")
    pid = cluster.master.roster["w"].pid
    after = cluster.launch("w")
    assert await asyncio.to_thread(before.wait, 60) == 0
    assert cluster.deaths == ["w"]
    await cluster.master.wait_for(["w"], timeout_s=60)
    assert cluster.master.roster["w"].pid == after.pid != pid
    assert await cluster.master.call("w", "echo", 7, timeout_s=60) == 7


@pytest.mark.slow
async def test_waiting_for_workers_names_the_missing(cluster):
    await cluster.join("a")
    with pytest.raises(RpcTimeout, match=r"\['b', 'c'\]"):
        await cluster.master.wait_for(["a", "b", "c"], timeout_s=0.2)
    waiting = asyncio.ensure_future(cluster.master.wait_for(["b"], timeout_s=60))
    await asyncio.sleep(0)
    cluster.master.fail_worker("b", "exit code 1")
    with pytest.raises(WorkerDied, match="exit code 1"):
        await asyncio.wait_for(waiting, 60)


@pytest.mark.slow
async def test_garbage_and_stale_messages_are_dropped(cluster):
    await cluster.join("w")
    with zmq.Context() as context, context.socket(zmq.DEALER) as rogue:
        rogue.setsockopt(zmq.LINGER, 1000)
        rogue.connect(cluster.master.endpoint)
        for frames in (
            [b""],
            [b"\xc1\xff"],
            [msgpack.packb({"v": 99})],
            [msgpack.packb({"v": PROTOCOL, "kind": "reply", "run": "run", "session": "no"})],
            [pack_header("reply", "run", b"old", id=b"x" * 16), b"\x01"],
            [pack_header("hello", "run", b"new", info={"name": 1})],
            [pack_header("feast", "run", b"new")],
            [b"a", b"b", b"c", b"d"],
        ):
            rogue.send_multipart(frames)
        for _ in range(3000):
            await asyncio.sleep(0.02)
            if cluster.master.dropped_messages >= 8:
                break
    assert cluster.master.dropped_messages == 8
    assert await cluster.master.call("w", "echo", 1, timeout_s=60) == 1


@pytest.mark.slow
async def test_a_worker_that_exits_in_a_handler_reports_it(cluster):
    (process,) = await cluster.join("w")
    with pytest.raises(RemoteError, match="SystemExit"):
        await cluster.master.call("w", "exit", timeout_s=60)
    assert await asyncio.to_thread(process.wait, 60) == 3


@pytest.mark.slow
async def test_close_ends_the_workers(cluster):
    processes = await cluster.join("a", "b")
    waiting = cluster.master.call("a", "append", {"seconds": 0.3, "number": 0}, timeout_s=60)
    await cluster.master.close()
    assert [await asyncio.to_thread(p.wait, 60) for p in processes] == [0, 0]
    with pytest.raises(WorkerDied):
        await waiting


async def test_a_taken_port_is_an_error(cluster):
    second = RpcMaster("run", network=At(endpoint=cluster.master.endpoint))
    with pytest.raises(RpcError, match="cannot listen"):
        await second.start()


@pytest.mark.slow
def test_a_master_that_does_not_answer_is_a_timeout():
    worker = RpcWorker(
        "w", "model", 0, "run", "tcp://127.0.0.1:9", ordered={}, connect_timeout_s=0.3
    )
    with pytest.raises(RpcTimeout, match=r"127.0.0.1:9 did not answer worker 'w'"):
        worker.run()
    worker.stop()


def test_handlers_have_one_lane():
    with pytest.raises(ValueError, match="echo"):
        RpcWorker(
            "w",
            "k",
            0,
            "r",
            "tcp://127.0.0.1:9",
            ordered={"echo": print},
            immediate={"echo": print},
        )


MASTER = """
import asyncio, sys
from realhf.transport.rpc_master import RpcMaster
async def main():
    master = RpcMaster("run", heartbeat_s=0.2)
    await master.start()
    print(master.endpoint, flush=True)
    await master.wait_for(["w"], 60)
    print("it is there", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_worker_notices_the_death_of_the_master():
    process = subprocess.Popen([sys.executable, "-c", MASTER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        endpoint = process.stdout.readline().strip()
        worker = RpcWorker("w", "model", 0, "run", endpoint, ordered={}, connect_timeout_s=60)

        def kill() -> None:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.5)  # it is welcome, and begins to watch
            process.kill()

        threading.Thread(target=kill).start()
        with pytest.raises(MasterLost, match="process ended"):
            worker.run()
    finally:
        process.kill()
        process.communicate(timeout=300)


async def test_stop_leaves_politely(cluster, caplog):
    worker = RpcWorker(
        "local", "model", 0, "run", cluster.master.endpoint, ordered={}, connect_timeout_s=60
    )
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    await cluster.master.wait_for(["local"], timeout_s=60)
    worker.stop()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()
    assert "local" not in cluster.master.roster
    assert "died" not in caplog.text


@pytest.mark.slow
async def test_a_gap_in_the_call_order_ends_the_worker(cluster):
    (process,) = await cluster.join("w")
    cluster.master._peers["w"].next_no = 5
    with pytest.raises(ProtocolError, match="call 5 arrived after call 0"):
        await cluster.master.call("w", "echo", timeout_s=60)
    assert await asyncio.to_thread(process.wait, 60) == 1


@pytest.mark.slow
async def test_a_reply_of_a_previous_process_is_dropped(cluster):
    await cluster.join("w")
    call = cluster.master.call("w", "append", {"seconds": 0.5, "number": 0}, timeout_s=60)
    (request_id,) = cluster.master._pending
    with zmq.Context() as context, context.socket(zmq.DEALER) as ghost:
        ghost.setsockopt(zmq.LINGER, 1000)
        ghost.connect(cluster.master.endpoint)
        ghost.send_multipart(
            [pack_header("reply", "run", b"previous session", id=request_id), msgpack.packb(666)]
        )
        assert await call == 1
    assert cluster.master.dropped_messages == 1


@pytest.mark.slow
async def test_a_worker_that_leaves_by_itself_is_announced_and_is_no_death():
    left: list[tuple[str, str]] = []
    deaths: list[str] = []
    master = RpcMaster(
        "run", on_death=lambda name, _: deaths.append(name), on_left=lambda *who: left.append(who)
    )
    await master.start()
    stays, leaves = (
        RpcWorker(name, "model", 0, "run", master.endpoint, ordered={})
        for name in ("stays", "leaves")
    )
    threads = [threading.Thread(target=worker.run) for worker in (stays, leaves)]
    for thread in threads:
        thread.start()
    await master.wait_for(["stays", "leaves"], timeout_s=60)
    leaves.stop()
    await asyncio.to_thread(threads[1].join, 60)
    assert left == [("leaves", "it left")] and deaths == [] and list(master.roster) == ["stays"]
    await master.close()
    threads[0].join(60)
    assert len(left) == 1, "one that is told to leave is not announced"
