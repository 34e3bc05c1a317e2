"""What is asked of all workers of a run: where a role's state lies, and who is to blame when it
fails. Calls that several workers make together: one batch for all, one answer of all, one failure
for all."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.api.experiment import ExperimentSpec, InterfaceType, MFCDef, ModelSpec, SourceSpec
from realhf.api.parallel import CollectiveBroken, Parallel
from realhf.dataflow.function_executor import FunctionExecutor
from realhf.dataflow.model_function_call import MFCFailed
from realhf.dataflow.step_source import SynchronousSteps
from realhf.dataflow.worker_group import RanksDiffer, Roles, check_agreement, is_group_call
from realhf.transport.errors import RemoteError, WorkerDied
from realhf.transport.roster import WorkerInfo
from tests.dataflow.toy_graph import FakeCaller
from tests.dataflow.toy_source import ToySource, toy_graph


class Answers:
    """Stands for the master's RPC: answers by worker, the first ones at once and later ones after a
    moment."""

    def __init__(self, **failures: Exception) -> None:
        self.roster: dict[str, Any] = {}
        self.failures = {name.replace("_", "/"): error for name, error in failures.items()}
        self.sent: list[tuple[str, str, Any]] = []

    def call(self, worker: str, handler: str, payload: Any = None, **_: Any) -> asyncio.Future[Any]:
        self.sent.append((worker, handler, payload))
        return asyncio.ensure_future(self._answer(worker, handler))

    async def _answer(self, worker: str, handler: str) -> Any:
        if handler == "abort":
            return {}
        await asyncio.sleep(0.02 * int(worker[-1]))
        if worker.replace("model_worker", "worker") in self.failures:
            raise self.failures[worker.replace("model_worker", "worker")]
        if handler == "open_world":
            return {"address": "10.0.0.1:7"}
        return {"files": [[f"/{worker}", 3, "00"]]} if handler == "save" else {}


def failure(kind: str, message: str) -> RemoteError:
    return RemoteError(
        worker="w", handler="save", mfc="", step=1, kind=kind, message=message, remote_traceback=""
    )


def roles_of(caller: Answers, *, trusted: bool = False) -> Roles:
    models = {
        "actor": ModelSpec(
            "actor", "x", (1, 0), trainable=True, backend="ddp", parallel=Parallel(dp=2)
        ),
        "critic": ModelSpec("critic", "x", (2,), trainable=True),
        "ref": ModelSpec("ref", "x", (2,)),
    }
    spec = ExperimentSpec("x", models, (), SourceSpec("s"), 1, 1, 1, Path())
    return Roles(spec, caller, timeout_s=60, trusted=trusted)  # pyright: ignore[reportArgumentType]


async def test_ranks_share_a_folder_and_others_have_their_own(tmp_path: Path) -> None:
    caller = Answers()
    roles = roles_of(caller)
    assert roles.workers_of("actor") == ["model_worker/0", "model_worker/1"]
    files = await roles.save(tmp_path)
    assert [file.path for file in files] == [
        "/model_worker/0",
        "/model_worker/1",
        "/model_worker/2",
    ]
    asked = {
        worker: payload["roles"] for worker, handler, payload in caller.sent if handler == "save"
    }
    together = {"actor": str(tmp_path / "actor")}
    own = {"critic": str(tmp_path / "model_worker-2" / "critic")}
    assert asked == {"model_worker/0": together, "model_worker/1": together, "model_worker/2": own}


async def test_a_checkpoint_is_read_from_where_other_workers_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "model_worker-0" / "actor").mkdir(parents=True)
    (tmp_path / "critic").mkdir()
    caller = Answers()
    await roles_of(caller).restore(tmp_path)
    asked = {
        worker: payload["roles"] for worker, handler, payload in caller.sent if handler == "restore"
    }
    assert asked["model_worker/1"] == {"actor": str(tmp_path / "model_worker-0" / "actor")}
    assert asked["model_worker/2"] == {"critic": str(tmp_path / "critic")}


@pytest.mark.parametrize("trusted", [True, False])
async def test_ranks_are_on_several_hosts_on_a_trusted_network_only(trusted: bool) -> None:
    caller = Answers()
    for index, machine in enumerate(("alpha", "beta", "alpha")):
        name = f"model_worker/{index}"
        caller.roster[name] = WorkerInfo(name, "model_worker", index, machine, 1, machine=machine)
    roles = roles_of(caller, trusted=trusted)
    if not trusted:
        with pytest.raises(
            RuntimeError, match=r"model_worker/0 on alpha, model_worker/1 on beta.*network\.trusted"
        ):
            await roles.load()
        assert caller.sent == []
        return
    await roles.load()
    assert caller.sent[0] == ("model_worker/0", "open_world", {"several_hosts": True})
    asked = {
        worker: payload["world"]
        for worker, handler, payload in caller.sent
        if handler == "initialize"
    }
    assert asked == dict.fromkeys(caller.roster, "10.0.0.1:7")


async def test_the_worker_that_failed_by_itself_is_the_cause(tmp_path: Path) -> None:
    lost = failure(CollectiveBroken.__name__, "lost its peers")
    caller = Answers(worker_0=lost, worker_1=failure("OSError", "No space left on device"))
    with pytest.raises(RemoteError, match="No space left"):
        await roles_of(caller).save(tmp_path)
    assert ("model_worker/1", "abort") in [(worker, handler) for worker, handler, _ in caller.sent]


WORKERS = ("w0", "w1", "w2")


class ToyRanks:
    """Notes what a worker computes together with others, and is broken off by ``abort``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.aborted = ""

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        self.calls.append(what)
        yield

    def abort(self, reason: str) -> None:
        self.aborted = reason


class Bench:
    """The toy graph with an actor on three workers that train together."""

    def __init__(self, folder: Path, parallel: Parallel) -> None:
        graph = toy_graph()
        source = ToySource()
        self.caller = FakeCaller()
        self.ranks = {name: ToyRanks() for name in WORKERS}
        self.gathered: list[str] = []
        for name in WORKERS:
            host = self.caller.add(
                name, ["actor", *(["ref"] if name == "w0" else [])], graph, folder
            )
            engine: Any = host._models["actor"].engine
            engine.ranks, engine.gather = (
                self.ranks[name],
                lambda here, name=name: self.gathered.append(name),
            )
        steps = SynchronousSteps(
            source,
            self.caller,
            worker="w0",
            keys=graph.required_dataset_keys(),
            n_seqs=graph.n_seqs,
            timeout_s=60,
        )
        self.executor = FunctionExecutor(
            graph,
            self.caller,
            steps.results,
            make_loader=steps.loader,
            workers={"actor": WORKERS, "ref": ["w0"]},
            parallel={"actor": parallel},
            seed=7,
        )

    async def step(self) -> Any:
        async with self.executor as executor:
            return await executor.execute_step(0)

    def seen(self, mfc: str) -> list[tuple[str, ...]]:
        return [ids for name in WORKERS for _, ids, _ in self.caller.interface(name, mfc).trace]

    def requests(self, mfc: str) -> list[Any]:
        return [p for _, handler, p in self.caller.sent if handler == "call" and p["mfc"] == mfc]


ALL = ("t0", "t1", "t2", "t3")


def broken(*_: Any) -> Any:
    raise CollectiveBroken("lost its peers")


async def test_copies_train_together_on_the_whole_batch_and_play_apart(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Parallel(dp=3))
    report = await bench.step()
    assert bench.seen("train") == [ALL] * 3
    assert (
        sorted(i for ids in bench.seen("gen") for i in ids) == sorted(ALL)
        and len(bench.seen("gen")) == 3
    )
    groups = [request["group"] for request in bench.requests("train")]
    assert [g["rank"] for g in groups] == [0, 1, 2] and {(g["no"], g["size"]) for g in groups} == {
        (1, 3)
    }
    assert len({request["seed"] for request in bench.requests("train")}) == 1
    assert all(request["group"] is None for request in bench.requests("gen"))
    assert [r.calls for r in bench.ranks.values()] == [["actor, group call 1"]] * 3
    assert report.stats["train"]["n_rows"] == 22.0, "what all ranks report alike is reported once"
    assert all(len(store) == 0 for store in bench.caller.stores.values()), (
        "every copy of the inputs is freed"
    )


async def test_a_model_that_is_cut_scores_together_and_one_rank_keeps_the_outputs(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, Parallel(fsdp=3))
    held: dict[str, bool] = {}

    def before(worker: str, handler: str, payload: Any) -> None:
        if handler == "call" and payload["mfc"] == "train":
            held[worker] = bench.caller.stores[worker].has("t0", "rewards")

    bench.caller.before = before
    await bench.step()
    assert sorted(bench.gathered) == list(WORKERS), "before the actor plays, on each of its workers"
    assert bench.seen("rew") == [ALL] * 3
    assert held == {"w0": True, "w1": False, "w2": False}
    assert [len(r.calls) for r in bench.ranks.values()] == [3] * 3


@pytest.mark.slow
async def test_the_rank_that_failed_is_named_and_not_those_that_lost_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Parallel(dp=3))

    def out_of_memory(*_: Any) -> Any:
        raise MemoryError("no room for the batch")

    for name in WORKERS:
        bench.caller.interface(name, "train").train_step = out_of_memory if name == "w1" else broken
    # The cause is heard of last.
    bench.caller.before = lambda w, h, p: asyncio.sleep(0.1) if h == "call" and w == "w1" else None
    with pytest.raises(
        MFCFailed, match=r"train failed at step 0 on w1 .*MemoryError: no room for the batch"
    ):
        await bench.step()


async def test_the_others_are_told_to_break_off_when_a_rank_dies(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Parallel(dp=3))

    async def until_told(worker: str) -> None:
        while not bench.ranks[worker].aborted:
            await asyncio.sleep(0.01)
        bench.caller.interface(worker, "train").train_step = broken

    def before(worker: str, handler: str, payload: Any) -> Any:
        if handler == "call" and payload["mfc"] == "train":
            if worker == "w2":
                raise WorkerDied("w2", "killed by the test")
            return until_told(worker)
        return None

    bench.caller.before = before
    with pytest.raises(MFCFailed, match=r"train failed at step 0 on w2 .*killed by the test"):
        await bench.step()
    assert bench.ranks["w0"].aborted and bench.ranks["w1"].aborted


@pytest.mark.slow
async def test_ranks_that_answer_differently_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Parallel(dp=3))
    engine: Any = bench.caller.hosts["w2"]._models["actor"].engine
    engine.weight = 2.0
    with pytest.raises(MFCFailed, match=r"train failed .*: weight is .* on w0 and .* on w2"):
        await bench.step()


def test_statistics_agree_to_rounding_and_durations_need_not() -> None:
    nan = {"loss": math.nan, "step_seconds": 1.0}
    check_agreement([nan, {"loss": math.nan, "step_seconds": 2.0}], ["w0", "w1"])
    check_agreement([{"device_peak_bytes": 1.0}, {"device_peak_bytes": 2.0}], ["w0", "w1"])
    check_agreement([{"loss": 1.0}, {"loss": 1.0 + 1e-7}], ["w0", "w1"])
    with pytest.raises(RanksDiffer, match="logits_s is 1"):
        check_agreement([{"logits_s": 1.0}, {"logits_s": 2.0}], ["w0", "w1"])
    with pytest.raises(RanksDiffer, match=r"loss is None on w0 and 1\.0 on w1"):
        check_agreement([{}, {"loss": 1.0}], ["w0", "w1"])


def test_which_calls_are_made_together() -> None:
    def together(kind: InterfaceType, parallel: Parallel) -> bool:
        return is_group_call(MFCDef("x", "actor", kind, "x"), parallel)

    train = InterfaceType.TRAIN_STEP
    score = InterfaceType.INFERENCE
    play = InterfaceType.GENERATE
    assert [together(kind, Parallel()) for kind in (train, score, play)] == [False] * 3
    assert [together(kind, Parallel(dp=2)) for kind in (train, score, play)] == [True, False, False]
    assert [together(kind, Parallel(dp=2, fsdp=2)) for kind in (train, score, play)] == [
        True,
        True,
        False,
    ]
