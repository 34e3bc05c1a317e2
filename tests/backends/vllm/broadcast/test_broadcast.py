"""Weights on their way from a trainer to servers by broadcasts. The trainer, the master and the
generation workers are real, and so are the broadcasts, over gloo between processes. The servers
stand in for vLLM's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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
    PublishWeightsRequest,
    StartBroadcastRequest,
)
from realhf.api.experiment import ModelSpec
from realhf.api.trace import Tracer
from realhf.backends.vllm.broadcast.payloads import (
    BroadcastError,
    build_init_info,
    build_update_info,
    describe_tensors,
)
from realhf.backends.vllm.broadcast.sender import WeightSender
from realhf.backends.vllm.generation import VllmGenerator
from realhf.base.tensor_digest import digest_tensors
from realhf.dataflow.rollouts import group_loads
from realhf.dataflow.rollouts.group_loads import GroupLoads
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.weight_proof import (
    EngineWeightDigests,
    WeightRecord,
    WeightTrial,
    WrongWeights,
)
from realhf.transport.errors import RemoteError, WorkerDied
from realhf.transport.network import Network
from realhf.transport.weights import WeightPublisher
from tests.backends.vllm.broadcast.stand_in import Worker, make_gloo_group, make_tensors, serve
from workers.generation_worker import GenerationWorker, VersionGate
from workers.model_worker import ModelWorker

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


class Trained:
    """A model whose tensors the test sets."""

    def __init__(self) -> None:
        self.tensors = make_tensors(0)

    def weights(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def engine(self, role: str, version: int) -> Trained:
        return self


class Run:
    """A trainer and generation workers without their processes, called as the master calls them."""

    def __init__(self, folder: Path) -> None:
        self.servers: dict[str, Server] = {}
        self.workers: dict[str, GenerationWorker] = {}
        self.model = Trained()
        self.trainer: Any = ModelWorker.__new__(ModelWorker)
        self.trainer._host = self.model
        self.trainer._trial = WeightTrial()
        self.trainer._tracer = Tracer()
        spec = SimpleNamespace(models={"actor": ModelSpec("actor", "a folder")})
        self.trainer._plan = SimpleNamespace(spec=spec)
        self.trainer._publisher = WeightPublisher("run", "model_worker/0", folder)
        self.trainer._sender = WeightSender(
            torch.device("cpu"), make_group=make_gloo_group, pack_bytes=PACK_BYTES
        )
        self.failed: list[str] = []
        self.wrong: list[WrongWeights] = []
        self.versions: list[int] = []
        self.left: set[str] = set()
        caller: Any = self
        self.groups = GroupLoads(caller, "model_worker/0", timeout_s=LIMIT_S)
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
        if worker in self.workers:
            of_worker = self.workers[worker]
            handlers = [
                GROUP_PLACE.with_handler(of_worker._report_place),
                UPDATE_WEIGHTS.with_handler(of_worker._update_weights),
            ]
        else:
            handlers = [
                PUBLISH_WEIGHTS.with_handler(self.trainer._publish_weights),
                START_BROADCAST.with_handler(self.trainer._start_broadcast),
                STOP_BROADCAST.with_handler(self.trainer._stop_broadcast),
            ]
        return asyncio.ensure_future(self._run(worker, dict(handlers)[handler], payload, timeout_s))

    async def _run(
        self, worker: str, handler: Callable[[Any], Any], payload: Any, timeout_s: float
    ) -> Any:
        try:
            return await asyncio.wait_for(asyncio.to_thread(handler, payload), timeout_s)
        except Exception as error:
            server = self.servers.get(worker)
            if server is not None and "disconnected" in str(error):
                await asyncio.to_thread(server.process.join, 5.0)
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

    def join(self, name: str, server: Server) -> None:
        worker: Any = GenerationWorker.__new__(GenerationWorker)
        worker._engine = server.engine
        worker._tracer = Tracer()
        worker._held_weights = EngineWeightDigests(server.engine)
        worker._network = Network()
        worker._gate = VersionGate(lambda: server.engine.version)
        worker._plan = SimpleNamespace(rpc=SimpleNamespace(control_timeout_s=LIMIT_S))
        self.workers[name] = worker
        self.servers[name] = server
        self.updates.worker_joined(name)

    def train(self) -> None:
        """What a call of the model does before it changes weights."""
        self.trainer._host = SimpleNamespace(
            handlers=lambda: {"call": lambda payload: None}, immediate_handlers=dict
        )
        self.trainer._host_handler("call")(None)
        self.trainer._host = self.model

    async def publish(self, version: int) -> None:
        """Publish new tensors, and wait until they were loaded or failed."""
        self.train()
        self.model.tensors = make_tensors(version)
        await self.updates.publish(version)
        await asyncio.wait_for(self.updates.wait_for_all(), LIMIT_S)
        for worker in sorted(self.left & self.updates.versions.keys()):
            self.updates.worker_left(worker)

    def holds(self, name: str) -> bool:
        """Whether every worker of a server has the trainer's tensors."""
        expected = digest_tensors(self.model.tensors)
        return all(each == expected for each in self.servers[name].held())

    async def close(self) -> None:
        await self.updates.close()
        self.trainer._sender.close()
        self.trainer._publisher.close()


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
    original = digest_tensors(run.model.tensors)
    await run.updates.publish_trial(TRIAL_CHANGE)
    assert digest_tensors(run.model.tensors) != original
    assert run.holds("generation/0") and run.holds("generation/1")
    await run.updates.publish_trial(TRIAL_RESTORE)
    await run.updates.wait_for_all()
    assert one.take_calls() == [CALLS * 3] and run.groups.groups_formed == 1
    assert run.holds("generation/0") and run.holds("generation/1")
    assert digest_tensors(run.model.tensors) == original

    # Who joins late is a group by itself while the trainer has the version, and then one of all.
    run.join("generation/2", late)
    await run.updates.wait_for_all()
    assert run.holds("generation/2") and run.groups.groups_formed == 2
    assert one.take_calls() == [[]], "the others sample on"
    await run.publish(2)
    assert run.groups.groups_formed == 3
    assert all(run.holds(name) for name in run.servers)

    # Once the trainer trains, a successor of one that died waits for the next version.
    run.train()
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

    run.trainer._sender = WeightSender(torch.device("cpu"), make_group=fail, pack_bytes=PACK_BYTES)
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


@pytest.mark.slow
def test_a_deadline_that_passes_after_the_last_byte_keeps_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group used to be left during the digests, and the next version to reach nobody, without
    an error."""
    worker = Worker(0, 1)
    finish = worker.finish_weight_update

    def finish_late() -> None:
        time.sleep(2.5)
        finish()

    monkeypatch.setattr(worker, "finish_weight_update", finish_late)
    sender = WeightSender(torch.device("cpu"), make_group=make_gloo_group, pack_bytes=PACK_BYTES)
    for version in range(2):
        tensors = make_tensors(version)
        sender.offer(version, 0, tensors)
        unique_id = sender.start(version, 0, ["one"], 2, LIMIT_S)
        assert bool(unique_id) == (version == 0)
        if unique_id:
            assert worker.join_group(build_init_info(unique_id, 1, 2, PACK_BYTES))["ok"]
        update = build_update_info(describe_tensors(tensors))
        answer = worker.take_broadcast(f"{version}", update, 2.0)
        assert answer == {"ok": True, "version": version}
        held = {name: row[1] for name, row in worker.weight_digests()["held"].items()}
        assert digest_tensors(tensors).items() <= held.items()
    sender.close()


def test_a_server_with_an_older_extension_takes_no_broadcasts() -> None:
    """Its answer to ``place`` names no transfer."""
    engine = VllmGenerator.__new__(VllmGenerator)
    engine._places = [{"uuid": "GPU-9"}]
    ranks, reason = engine.count_ranks()
    assert ranks == 0 and "--weight-transfer-config" in reason


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
async def test_servers_that_come_and_go(
    run: Run, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever dies, joins or trains when, a current server has every bit of the version."""
    monkeypatch.setattr(group_loads, "JOIN_S", 6.0)
    chance = random.Random(seed)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> None:
            (server,) = stack.enter_context(serving(chance.choice((1, 1, 2))))
            run.join(name, server)

        for index in range(3):
            start(f"generation/{index}")
        for version in range(8):
            dying = chance.choice([*run.servers, ""]) if version else ""
            if dying:
                packs = chance.choice((0, 1, 2))
                run.servers[dying].ask("/test", packs_left=packs)
            await run.publish(version)
            assert run.updates.versions.keys() == run.servers.keys() - {dying}
            assert not run.wrong
            assert all(text.startswith("generation/") for text in run.failed)
            for name in run.updates.versions:
                assert run.updates.versions[name] == version and run.holds(name), (name, version)
            if dying:
                run.servers.pop(dying).close()
                run.left.discard(dying)
                if chance.random() < 0.5:
                    run.train()
                start(dying)
                await asyncio.wait_for(run.updates.wait_for_all(), LIMIT_S)
        assert run.versions == list(range(8))


async def test_a_version_is_not_offered_while_a_self_test_changes_it(run: Run) -> None:
    """Who joined late could get a mixture of the two."""
    answers: list[bool] = []

    def step(trial: int, *others: Any) -> tuple[list[Any], list[Any]]:
        request = StartBroadcastRequest(0, 0, ["late"], 2, LIMIT_S)
        answers.append(run.trainer._start_broadcast(request).offered)
        return [], []

    run.trainer._publish_weights(PublishWeightsRequest("actor", 0, broadcast=True))
    run.trainer._trial = SimpleNamespace(step=step, names=[])
    request = PublishWeightsRequest("actor", 0, TRIAL_CHANGE, broadcast=True)
    run.trainer._publish_weights(request)
    assert answers == [False]
