"""Weights on their way from a trainer to servers by broadcasts: the trainer's end, the master's side
and our client of the servers are real, and so are the broadcasts, over gloo between processes. The
servers stand in for vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.api.calls import (
    GROUP_PLACE,
    PUBLISH_WEIGHTS,
    START_BROADCAST,
    STOP_BROADCAST,
    TRIAL_CHANGE,
    TRIAL_RESTORE,
    UPDATE_WEIGHTS,
    GroupPlaceAnswer,
    Nothing,
    PublishWeightsAnswer,
    PublishWeightsRequest,
    StartBroadcastAnswer,
    StartBroadcastRequest,
    StopBroadcastAnswer,
    UpdateWeightsAnswer,
    UpdateWeightsRequest,
)
from realhf.backends.vllm.broadcast.payloads import BroadcastError
from realhf.backends.vllm.broadcast.sender import WeightSender
from realhf.backends.vllm.generation import VllmGenerator
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.rollouts import group_loads
from realhf.dataflow.rollouts.group_loads import GroupLoads
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.weight_proof import EngineWeightDigests, WeightRecord, WrongWeights
from realhf.transport.errors import RemoteError, WorkerDied
from realhf.transport.weights import WeightPublisher, receive
from tests.backends.vllm.broadcast.stand_in import make_gloo_group, make_tensors, serve

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([serve.__module__])
PACK_BYTES = 64
"""Three packs of the tensors of a version."""
CALLS = ["pause", "start", "update", "finish", "version", "resume"]
LIMIT_S = 30.0


class Server:
    """A server in a process of its own, and our client of it."""

    def __init__(self, workers: int) -> None:
        self._told, sending = PROCESSES.Pipe(duplex=False)
        self.process = PROCESSES.Process(target=serve, args=(workers, sending), daemon=True)
        self.process.start()

    def connect(self) -> None:
        self.url = self._told.recv()
        self.engine = VllmGenerator(self.url)
        self.digests = EngineWeightDigests(self.engine)
        self.take_calls()

    def ask(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())

    def take_calls(self) -> list[list[str]]:
        """Calls since the last time, of each worker."""
        seen = getattr(self, "_seen", 0)
        calls = self.ask("/test")
        self._seen = len(calls[0])
        return [each[seen:] for each in calls]

    def held(self) -> list[dict[str, str]]:
        """Digests of the tensors that each worker holds."""
        body = {"method": "weight_digests", "kwargs": {}}
        results = self.ask("/collective_rpc", **body)["results"]
        return [{name: row[1] for name, row in each["held"].items()} for each in results]

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        if hasattr(self, "engine"):
            self.engine.close()


class Run:
    """A trainer and generation workers, called as the master calls them."""

    def __init__(self, folder: Path) -> None:
        self.servers: dict[str, Server] = {}
        self.sender = WeightSender(
            torch.device("cpu"), make_group=make_gloo_group, pack_bytes=PACK_BYTES
        )
        self.publisher = WeightPublisher("run", "model_worker/0", folder)
        self.tensors = make_tensors(0)
        self.failed: list[str] = []
        self.wrong: list[WrongWeights] = []
        self.versions: list[int] = []
        self.left: set[str] = set()
        self.groups = GroupLoads(self, "model_worker/0", timeout_s=LIMIT_S)  # type: ignore[arg-type]
        self.updates = WeightUpdates(
            self,  # type: ignore[arg-type]
            "model_worker/0",
            "actor",
            on_version=self.versions.append,
            on_failed=self._on_failed,
            on_wrong=self.wrong.append,
            record=WeightRecord(folder, lambda text: None),
            timeout_s=LIMIT_S,
            groups=self.groups,
        )

    def _on_failed(self, worker: str, error: Exception) -> None:
        self.failed.append(f"{worker}: {error}")

    def list_services(self, worker: str, listed: bool) -> None:
        pass

    def call(
        self, worker: str, handler: str, payload: Any, *, timeout_s: float, **more: Any
    ) -> asyncio.Future[Any]:
        handlers = {
            PUBLISH_WEIGHTS.name: PUBLISH_WEIGHTS.with_handler(self._publish)[1],
            START_BROADCAST.name: START_BROADCAST.with_handler(self._start)[1],
            STOP_BROADCAST.name: STOP_BROADCAST.with_handler(self._stop)[1],
            GROUP_PLACE.name: GROUP_PLACE.with_handler(partial(self._place, worker))[1],
            UPDATE_WEIGHTS.name: UPDATE_WEIGHTS.with_handler(partial(self._update, worker))[1],
        }
        return asyncio.ensure_future(self._run(worker, handlers[handler], payload, timeout_s))

    async def _run(
        self, worker: str, handler: Callable[[Any], Any], payload: Any, timeout_s: float
    ) -> Any:
        try:
            return await asyncio.wait_for(asyncio.to_thread(handler, payload), timeout_s)
        except Exception as error:
            server = self.servers.get(worker)
            if server is not None and not server.process.is_alive():
                self.left.add(worker)
                raise WorkerDied(worker, "its server ended") from None
            kind = type(error).__name__
            raise RemoteError(
                worker=worker,
                handler="",
                mfc="",
                step=-1,
                kind=kind,
                message=str(error),
                remote_traceback="",
            ) from error

    def _publish(self, request: PublishWeightsRequest) -> PublishWeightsAnswer:
        self.sender.withdraw()
        publish = self.publisher.announce if request.broadcast else self.publisher.publish
        manifest = publish(request.version, self.tensors, trial=request.trial)
        if request.broadcast:
            self.sender.offer(request.version, request.trial, self.tensors)
        return PublishWeightsAnswer(manifest)

    def _start(self, request: StartBroadcastRequest) -> StartBroadcastAnswer:
        unique_id = self.sender.start(
            request.version, request.trial, request.members, request.world_size, request.timeout_s
        )
        return StartBroadcastAnswer(unique_id is not None, unique_id or b"", PACK_BYTES)

    def _stop(self, request: Nothing) -> StopBroadcastAnswer:
        return StopBroadcastAnswer(self.sender.stop())

    def _place(self, worker: str, request: Nothing) -> GroupPlaceAnswer:
        return GroupPlaceAnswer(*self.servers[worker].engine.count_ranks())

    def _update(self, worker: str, request: UpdateWeightsRequest) -> UpdateWeightsAnswer:
        server = self.servers[worker]
        manifest = request.manifest
        tensors: dict[str, torch.Tensor] = {}
        changed = [] if manifest.trial else server.digests.find_changed()
        again = manifest.trial > 0
        if request.seat is None:
            tensors = receive(manifest, LIMIT_S)
            server.engine.load_weights(manifest.version, tensors, again=again)
        else:
            seat = request.seat
            with server.digests.broadcast():
                server.engine.take_broadcast(manifest.version, manifest.slots, seat, again=again)
        held = server.digests.digest_after_load(manifest, tensors)
        return UpdateWeightsAnswer(1.0, 1.0, 1.0, held, changed)

    def join(self, name: str, server: Server) -> None:
        self.servers[name] = server
        self.updates.worker_joined(name)

    async def publish(self, version: int) -> None:
        """Publish new tensors, and wait until they were loaded or failed."""
        self.sender.withdraw()
        self.tensors = make_tensors(version)
        await self.updates.publish(version)
        await asyncio.wait_for(self.updates.wait_for_all(), LIMIT_S)
        for worker in sorted(self.left & self.updates.versions.keys()):
            self.updates.worker_left(worker)

    def holds(self, name: str) -> bool:
        """Whether every worker of a server has the trainer's tensors."""
        expected = digest_tensors(self.tensors)
        return all(each == expected for each in self.servers[name].held())

    async def close(self) -> None:
        await self.updates.close()
        self.sender.close()
        self.publisher.close()


@contextlib.contextmanager
def serving(*workers: int) -> Iterator[list[Server]]:
    """Servers with these numbers of workers."""
    servers = [Server(count) for count in workers]
    try:
        for server in servers:
            server.connect()
        yield servers
    finally:
        for server in servers:
            server.close()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    made = Run(tmp_path)
    yield made
    await made.close()


@pytest.mark.slow
async def test_who_is_in_a_group_and_in_which_order_it_is_called(run: Run) -> None:
    with serving(1, 2, 1) as servers:
        await _walk(run, *servers)


async def _walk(run: Run, one: Server, two: Server, late: Server) -> None:
    """``two`` computes on two GPUs, ``late`` joins late."""
    run.join("generation/0", one)
    run.join("generation/1", two)
    await run.publish(0)
    assert (run.failed, run.versions) == ([], [0])
    assert one.take_calls() == [["join", *CALLS]]
    assert two.take_calls() == [["join", *CALLS]] * 2, "each of its workers"
    assert run.holds("generation/0") and run.holds("generation/1")
    assert run.groups.groups_formed == 1

    # The same members are the same group, which is not joined again, also in a self-test.
    await run.publish(1)
    run.tensors["norm.weight"].add_(1)
    await run.updates.publish_trial(TRIAL_CHANGE)
    assert run.holds("generation/0") and run.holds("generation/1")
    run.tensors["norm.weight"].copy_(make_tensors(1)["norm.weight"])
    await run.updates.publish_trial(TRIAL_RESTORE)
    await run.updates.wait_for_all()
    assert one.take_calls() == [CALLS * 3] and run.groups.groups_formed == 1
    assert run.holds("generation/0") and run.holds("generation/1")

    # Who joins late is a group by itself while the trainer has the version, and then one of all.
    run.join("generation/2", late)
    await run.updates.wait_for_all()
    assert run.holds("generation/2") and run.groups.groups_formed == 2
    assert one.take_calls() == [[]], "the others sample on"
    await run.publish(2)
    assert run.groups.groups_formed == 3
    assert all(run.holds(name) for name in run.servers)

    # Once the trainer trains, a successor of one that died waits for the next version.
    run.sender.withdraw()
    run.updates.worker_left("generation/2")
    run.join("generation/2", late)
    await run.updates.wait_for_all()
    assert (run.updates.versions["generation/2"], run.failed) == (-1, [])
    await run.publish(3)
    assert run.groups.groups_formed == 4, "the successor is another member"
    assert all(run.holds(name) for name in run.servers) and run.versions[-1] == 3

    # Weights that are not those of the trainer end the run.
    late.ask("/test", flips=True)
    await run.publish(4)
    (error,) = run.wrong
    assert str(error).startswith(
        "generation/2 does not hold the weights of version 4: norm.weight should have digest"
    )


@pytest.mark.slow
async def test_one_that_dies_between_two_packs_is_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has no whole version: it stays paused, its layers are put back, and it gets all of
    the version as a group by itself."""
    with serving(1, 1) as servers:
        for index, server in enumerate(servers):
            run.join(f"generation/{index}", server)
        await run.publish(0)
        servers[0].take_calls()
        monkeypatch.setattr(group_loads, "JOIN_S", 3.0)
        servers[1].ask("/test", packs_left=1)
        await run.publish(1)
        (failure,) = run.failed
        assert failure.startswith("generation/1: worker 'generation/1' died")
        assert run.holds("generation/0") and run.versions == [0, 1] and not run.wrong
        (calls,) = servers[0].take_calls()
        broken = ["pause", "start", "update", "start", "finish"]
        assert calls[:5] == broken and calls[-7:] == ["join", *CALLS], "it does not resume between"
        assert "resume" not in calls[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["place", "trainer"])
async def test_where_no_group_comes_about_weights_go_through_the_hosts_memory(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    def fail(device: torch.device) -> Any:
        raise BroadcastError("NCCL: unhandled system error")

    run.sender = WeightSender(torch.device("cpu"), make_group=fail, pack_bytes=PACK_BYTES)
    with serving(1) as (server,):
        if how == "place":
            monkeypatch.setattr(server.engine, "count_ranks", lambda: (0, "shares a GPU"))
        run.join("generation/0", server)
        await run.publish(0)
        await asyncio.wait_for(_until(lambda: run.versions == [0]), LIMIT_S)
        assert run.holds("generation/0") and "reload" in server.take_calls()[0]
        await run.publish(1)
        assert run.holds("generation/0") and run.versions == [0, 1]
    (line,) = [text for text in caplog.messages if "from now on" in text]
    cause = "its engine shares a GPU" if how == "place" else "unhandled system error"
    assert line.startswith("weights go through the host's memory from now on") and cause in line


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)
