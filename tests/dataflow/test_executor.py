"""The executor with real model hosts and tensors; only the wire is replaced (see FakeCaller)."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api.calls import CheckpointRequest
from realhf.api.graph import build_graph
from realhf.api.sample import SequenceSample
from realhf.base import process_clock
from realhf.dataflow import function_executor
from realhf.dataflow.buffer import EndOfData
from realhf.dataflow.function_executor import FunctionExecutor, StallError
from realhf.dataflow.model_function_call import MFCFailed, StepReport
from realhf.dataflow.step_source import SynchronousSteps
from realhf.transport.errors import WorkerDied
from tests.dataflow.toy_buffer import check_invariants
from tests.dataflow.toy_graph import FakeCaller
from tests.dataflow.toy_source import ToySource, toy_mfcs

ONE = {"actor": ["w0"], "ref": ["w0"]}
TWO = {"actor": ["w0"], "ref": ["w1"]}


class Bench:
    """An executor over in-process workers."""

    def __init__(
        self,
        tmp_path: Path,
        workers: dict[str, list[str]],
        *,
        limit: int = 10**9,
        n: int = 4,
        **kw: Any,
    ):
        n_seqs = kw.pop("n_seqs", {})
        resample = kw.pop("resample", 0.0)
        mfcs = [
            replace(mfc, resample=resample if mfc.name == "gen" else 0.0)
            for mfc in toy_mfcs(n, **n_seqs)
        ]
        self.graph = build_graph(mfcs, ["packed_prompts"])
        self.caller = FakeCaller()
        for name in sorted({w for names in workers.values() for w in names}):
            roles = [role for role, names in workers.items() if name in names]
            self.caller.add(name, roles, self.graph, tmp_path)
        self.source = ToySource(limit)
        steps = SynchronousSteps(
            self.source,
            self.caller,
            worker="w0",
            keys=self.graph.required_dataset_keys(),
            n_seqs=self.graph.n_seqs,
            timeout_s=60,
        )
        self.executor = FunctionExecutor(
            self.graph,
            self.caller,
            steps.results,
            make_loader=steps.loader,
            workers=workers,
            seed=7,
            endpoints={"env": ["http://here"]},
            **kw,
        )

    async def run(self, steps: int) -> list[StepReport]:
        async with self.executor as executor:
            return [await executor.execute_step(executor.next_step) for _ in range(steps)]


def weights(reports: list[StepReport]) -> list[float]:
    return [report.stats["train"]["weight"] for report in reports]


async def test_steps_report_results_in_drawing_order_and_free_every_tensor(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TWO)
    reports = await bench.run(3)
    assert [r.id for report in reports for r in report.results] == [f"t{i}" for i in range(12)]
    assert [r.metadata["task"] for r in reports[0].results] == [f"task {i}" for i in range(4)]
    assert reports[0].results[2].rewards == [2.0, None]
    assert reports[0].results[2].achieved == [True, False]
    assert bench.source.recorded == [r for report in reports for r in report.results]
    assert reports[0].stats["gen"]["task"] == "task 0"
    assert set(reports[0].times) == {"gen", "ref", "rew", "train"}
    assert len(bench.executor.storage) == 0
    assert {name: len(store) for name, store in bench.caller.stores.items()} == {"w0": 0, "w1": 0}


async def test_training_saw_the_tensors_of_every_producer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TWO)
    (report,) = await bench.run(1)
    noise = report.stats["gen"]["noise"]
    rewards = 2 * (0 + 1 + 2 + 3)
    rows = 2 * sum(1 + task % 3 for task in range(4))
    assert report.stats["train"]["weight"] == pytest.approx(1 + rewards * rows * noise, rel=1e-5)


async def test_the_same_seed_gives_the_same_weights_wherever_the_reference_is(
    tmp_path: Path,
) -> None:
    here, there, again = [await Bench(tmp_path, where).run(3) for where in (ONE, TWO, TWO)]
    assert weights(here) == weights(there) == weights(again)


async def test_sync_draws_follow_the_results_of_the_step_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)
    seen: list[tuple[int, int]] = []
    draw = bench.source.next_batch
    bench.source.next_batch = lambda n: (
        seen.append((bench.source.count, len(bench.source.recorded))) or draw(n)
    )
    await bench.run(3)
    assert seen[:3] == [(0, 0), (4, 4), (8, 8)]


async def test_calls_of_different_sizes_cover_the_step_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE, n=8, n_seqs={"gen": 8, "ref": 4, "rew": 1, "train": 4})
    reports = await bench.run(2)
    for mfc, calls in (("gen", 1), ("ref", 2), ("rew", 8), ("train", 2)):
        trace = bench.caller.interface("w0", mfc).trace[:calls]
        assert [i for _, ids, _ in trace for i in ids] == [f"t{i}" for i in range(8)], mfc
    versions = {v for _, _, v in bench.caller.interface("w0", "rew").trace[-8:]}
    assert versions == {1}
    assert [len(r.calls) for r in reports] == [13, 13]
    assert reports[0].stats["gen"]["n_tokens"] == 2 * sum(2 + task % 3 for task in range(8))


async def test_training_waits_for_all_other_users_of_its_weights(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE, n=4, n_seqs={"gen": 1, "ref": 1, "rew": 1, "train": 1})
    await bench.run(1)
    order = [payload["mfc"] for _, handler, payload in bench.caller.sent if handler == "call"]
    assert order.index("train") > max(i for i, name in enumerate(order) if name in ("gen", "rew"))


async def test_a_batch_split_over_workers_comes_back_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"actor": ["w0"], "ref": ["w0", "w1", "w2"]}, n=7)
    (report,) = await bench.run(1)
    parts = {w: bench.caller.interface(w, "ref").trace[0][1] for w in ("w0", "w1", "w2")}
    assert sorted(i for ids in parts.values() for i in ids) == [f"t{i}" for i in range(7)]
    assert bench.caller.interface("w0", "train").trace[0][1] == tuple(f"t{i}" for i in range(7))
    costs = {w: sum(2 * (2 + int(i[1:]) % 3) for i in ids) for w, ids in parts.items()}
    assert max(costs.values()) <= 4 / 3 * max(sum(costs.values()) / 3, 8)
    assert next(call for call in report.calls if call.mfc == "ref").n_tokens == sum(costs.values())


async def test_who_holds_the_inputs_of_a_sample_scores_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"actor": ["w0"], "ref": ["w0", "w1"]}, n=6)
    call = bench.executor.calls["ref"]
    storage = bench.executor.storage
    ids = [f"t{i}" for i in range(6)]
    lengths = [[[n]] for n in (8, 2, 8, 2, 6, 6)]
    meta = SequenceSample(
        ids, {"ids": [n for (n,) in lengths]}, {"ids": "i64"}, {"ids": ()}, None, {}
    )
    for sample_id, worker in zip(ids, ("w1", "w0", "w0", "w1", "w1", "w0"), strict=True):
        storage.record([sample_id], call.inputs, worker)
    parts = call._split(meta)
    assert parts == [[1, 2, 5], [0, 3, 4]], "both score 16 tokens, and nothing is fetched"
    placement = {
        worker: [ids[i] for i in part] for worker, part in zip(("w0", "w1"), parts, strict=True)
    }
    assert storage.plan(placement, call.inputs, {"w0": "here", "w1": "here"}) == []
    one = meta.select_ids([1])
    assert call._split(one) == [[0]], "fewer samples than workers, the holder not among the first"


async def test_a_partial_last_step_is_served_and_then_the_data_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE, limit=6, n_seqs={"rew": 2})
    async with bench.executor as executor:
        reports = [await executor.execute_step(step) for step in range(2)]
        assert [r.n_samples for r in reports] == [4, 2]
        with pytest.raises(EndOfData, match="step 2"):
            await executor.execute_step(2)


def spoil_keys(sample: SequenceSample) -> SequenceSample:
    return sample.select(["ids"]).remap_keys({"ids": "idz"})


async def test_wrong_keys_name_the_call_and_the_keys(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)
    bench.caller.interface("w0", "gen").change = spoil_keys
    with pytest.raises(
        MFCFailed,
        match=r"gen failed at step 0 on w0.*missing \['ids', 'logprobs'\], extra \['idz'\]",
    ):
        await bench.run(1)
    assert bench.executor.buffer.stats()["calls"]["gen"]["leased"] == 0


async def test_outputs_in_another_order_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)
    bench.caller.interface("w0", "rew").change = lambda sample: sample.reorder([1, 0, 2, 3])
    with pytest.raises(MFCFailed, match=r"rew failed.*another order"):
        await bench.run(1)


async def test_an_error_cancels_the_siblings(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TWO)
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def before(worker: str, handler: str, payload: Any) -> Any:
        if handler == "call" and payload["mfc"] == "rew":
            raise WorkerDied(worker, "killed by the test")
        return forever() if handler == "call" and payload["mfc"] == "ref" else None

    bench.caller.before = before
    with pytest.raises(
        MFCFailed, match=r"rew failed at step 0 on w0 \(samples t0, .*killed by the test"
    ) as caught:
        await bench.run(1)
    assert isinstance(caught.value.cause, WorkerDied)
    assert cancelled.is_set()
    check_invariants(bench.executor.buffer)


async def test_a_failure_to_load_reaches_the_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)

    def broken(n: int) -> list[Any]:
        raise RuntimeError("no tasks today")

    bench.source.next_batch = broken
    with pytest.raises(RuntimeError, match="no tasks today"):
        await bench.run(1)


async def test_a_source_without_the_key_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)
    draw = bench.source.next_batch
    bench.source.next_batch = lambda n: [type(i)(i.id, i.metadata, {}) for i in draw(n)]
    with pytest.raises(ValueError, match="'t0' without key 'packed_prompts'"):
        await bench.run(1)


@pytest.mark.slow
async def test_a_stall_names_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, ONE, stall_warn_s=0.1, stall_fail_s=1.5)
    run = bench.executor.calls["rew"].run

    async def forgotten(*args: Any) -> Any:
        await asyncio.sleep(30)
        return await run(*args)

    bench.executor.calls["rew"].run = forgotten
    with caplog.at_level(logging.WARNING), pytest.raises(StallError) as caught:
        await bench.run(1)
    text = str(caught.value)
    assert (
        "train: train takes 4 samples of step 0: 0 ready, 4 not yet taken; 4 lack 'rewards' (from "
        "rew)" in text
    )
    assert "no progress" in caplog.text
    assert text.endswith("look first at rew: all other calls need its output"), (
        "the cause among those that wait"
    )


@pytest.mark.slow
async def test_a_pause_before_a_step_does_not_hide_its_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning of a step was taken from another clock than the time since: one stall of a run
    that had stood still for ten minutes was noticed ten minutes late."""
    clock = SimpleNamespace(now=lambda: process_clock.now() - 600.0)
    monkeypatch.setattr(function_executor, "process_clock", clock)
    bench = Bench(tmp_path, ONE, stall_warn_s=0.1, stall_fail_s=0.2)
    bench.executor.calls["gen"].run = lambda *args: asyncio.sleep(5)
    with pytest.raises(StallError, match="look first at gen"):
        await bench.run(1)


@pytest.mark.nightly
@pytest.mark.parametrize("handler", ["call", "load"])
async def test_what_is_at_work_is_no_stall_however_long_it_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, handler: str
) -> None:
    bench = Bench(tmp_path, ONE, stall_warn_s=0.1, stall_fail_s=1.5)
    bench.caller.before = lambda w, h, p: (
        asyncio.sleep(4.0) if h == handler and p.get("mfc", "gen") == "gen" else None
    )
    with caplog.at_level(logging.WARNING):
        await bench.run(1)
    assert "no progress" in caplog.text, "a person hears of it all the same"


@pytest.mark.slow
async def test_recovery_continues_bit_identically(tmp_path: Path) -> None:
    whole = await Bench(tmp_path, ONE).run(5)
    first = Bench(tmp_path, ONE)
    async with first.executor as executor:
        for step in range(3):
            await executor.execute_step(step)
        await asyncio.sleep(0.01)
        state = executor.state_dict()
        saved = CheckpointRequest(
            {"actor": str(tmp_path / "ckpt" / "actor")}, str(tmp_path / "ckpt")
        )
        first.caller.hosts["w0"].save(saved)
    second = Bench(tmp_path, ONE)
    second.caller.hosts["w0"].restore(saved)
    second.executor.load_state_dict(state)
    assert second.executor.next_step == 3
    rest = await second.run(2)
    assert weights(rest) == weights(whole)[3:]
    assert [r.id for report in rest for r in report.results] == [f"t{i}" for i in range(12, 20)]


def flat_rewards(*flat: int) -> Any:
    """Of these tasks, by the number in their ids, all rollouts have one reward."""

    def change(sample: SequenceSample) -> SequenceSample:
        numbers = [int(sample_id[1:]) for sample_id in sample.ids]
        rewards = [
            json.dumps([1.0, 1.0] if number in flat else [float(number), -1.0])
            for number in numbers
        ]
        tensors = {key: sample[key] for key in sample.keys}
        metadata = {**sample.metadata, "rewards": rewards}
        return SequenceSample.from_tensors(sample.ids, tensors, dict(sample.seqlens), metadata)

    return change


def trained(bench: Bench) -> list[str]:
    return [i for _, ids, _ in bench.caller.interface("w0", "train").trace for i in ids]


async def test_groups_without_signal_give_way_before_the_step_trains(tmp_path: Path) -> None:
    """Two of the first step and one of those in their place; the source learns of all, in the order
    of drawing, and nothing of those that gave way stays on a worker."""
    bench = Bench(tmp_path, TWO, resample=1.0)
    bench.caller.interface("w0", "gen").change = flat_rewards(1, 2, 5)
    first, second = await bench.run(2)
    assert trained(bench) == ["t0", "t3", "t4", "t6", "t7", "t8", "t9", "t10"]
    assert [r.id for r in first.results] == ["t0", "t3", "t4", "t6"] and first.n_samples == 4
    assert [r.id for r in bench.source.recorded] == [f"t{i}" for i in range(11)]
    assert (
        bench.source.recorded[2].rewards == [1.0, 1.0]
        and bench.source.recorded[2].metadata["task"] == "task 2"
    )
    assert [ids for _, ids, _ in bench.caller.interface("w0", "gen").trace][:3] == [
        ("t0", "t1", "t2", "t3"),
        ("t4", "t5"),
        ("t6",),
    ]
    found = first.stats["gen"]
    assert (
        found["n_dropped_groups"],
        found["n_resample_rounds"],
        found["n_groups_without_signal"],
    ) == (3, 2, 0)
    assert second.stats["gen"]["n_dropped_groups"] == 0 and found["n_tokens"] == 2 * sum(
        2 + i % 3 for i in range(7)
    )
    assert len(bench.executor.storage) == 0 and not any(
        len(store) for store in bench.caller.stores.values()
    )
    check_invariants(bench.executor.buffer)


@pytest.mark.parametrize(
    ("resample", "limit", "kept"), [(0.5, 10**9, ["t2", "t3", "t4", "t5"]), (2.0, 5, None)]
)
async def test_the_bound_and_the_end_of_the_source_end_the_replacement(
    tmp_path: Path, resample: float, limit: int, kept: list[str] | None
) -> None:
    """All groups are without signal: as many as the bound allows, or the source has, give way; the
    rest trains."""
    bench = Bench(tmp_path, ONE, resample=resample, limit=limit)
    bench.caller.interface("w0", "gen").change = flat_rewards(*range(100))
    (report,) = await bench.run(1)
    assert trained(bench) == (kept or ["t1", "t2", "t3", "t4"])
    assert report.stats["gen"]["n_groups_without_signal"] == 4
    assert report.stats["gen"]["n_dropped_groups"] == (2 if kept else 1)
    assert [r.id for r in bench.source.recorded] == [f"t{i}" for i in range(6 if kept else 5)]


@pytest.mark.slow
async def test_a_run_that_goes_on_replaces_the_same_groups(tmp_path: Path) -> None:
    def bench() -> Bench:
        made = Bench(tmp_path, ONE, resample=1.0)
        made.caller.interface("w0", "gen").change = flat_rewards(1, 4, 5, 9)
        return made

    whole = await bench().run(4)
    first = bench()
    second = bench()
    async with first.executor as executor:
        for step in range(2):
            await executor.execute_step(step)
        await asyncio.sleep(0.01)
        state = executor.state_dict()
        saved = CheckpointRequest(
            {"actor": str(tmp_path / "again" / "actor")}, str(tmp_path / "again")
        )
        first.caller.hosts["w0"].save(saved)
    second.caller.hosts["w0"].restore(saved)
    second.executor.load_state_dict(state)
    rest = await second.run(2)
    assert weights(rest) == weights(whole)[2:]
    assert [r.id for one in rest for r in one.results] == [
        r.id for one in whole[2:] for r in one.results
    ]


async def test_freeing_tensors_does_not_wait_for_a_long_call(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ONE)
    bench.caller.before = lambda w, h, p: asyncio.sleep(60) if h == "save" else None
    async with bench.executor as executor:
        await executor.execute_step(0)
        await asyncio.sleep(0.05)
        saving = bench.caller.call("w0", "save", {}, timeout_s=100.0)
        await asyncio.sleep(0)
        executor._to_clear += executor.storage.ids()
        await asyncio.wait_for(executor._clear(), 60)
        assert len(bench.caller.stores["w0"]) == 0 and not saving.done()
        saving.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("stopped_in", ["gen", "ref", "rew"])
async def test_a_step_that_is_broken_off_before_it_trains_is_repeated_to_the_bit(
    tmp_path: Path, stopped_in: str
) -> None:
    """Also where groups were replaced in it: those that were drawn for it are drawn again. The call
    that runs is not cut off, and nothing is sent after it."""

    def bench() -> Bench:
        made = Bench(tmp_path, ONE, resample=1.0)
        made.caller.interface("w0", "gen").change = flat_rewards(1, 5, 6, 13)
        return made

    whole = await bench().run(4)
    first = bench()
    second = bench()
    async with first.executor as executor:
        await executor.execute_step(0)
        reached = asyncio.Event()
        ended: list[str] = []

        async def slow(mfc: str) -> None:
            reached.set()
            await asyncio.sleep(0.2)
            ended.append(mfc)

        first.caller.before = lambda w, h, p: (
            slow(p["mfc"]) if h == "call" and p["mfc"] == stopped_in else None
        )
        step = asyncio.create_task(executor.execute_step(1))
        await asyncio.wait_for(reached.wait(), 10)
        assert not executor.has_begun_training(1)
        await executor.settle()
        assert set(ended) == {stopped_in}
        step.cancel()
        await asyncio.wait([step])
        assert (
            step.cancelled()
            and not executor.has_begun_training(1)
            and executor.has_begun_training(0)
        )
        state = json.loads(json.dumps(executor.state_dict()))
        folder = tmp_path / f"ckpt-{stopped_in}"
        saved = CheckpointRequest({"actor": str(folder / "actor")}, str(folder))
        first.caller.hosts["w0"].save(saved)
        check_invariants(executor.buffer)
    second.caller.hosts["w0"].restore(saved)
    second.executor.load_state_dict(state)
    rest = await second.run(3)
    assert weights(rest) == weights(whole)[1:]
    assert [[r.id for r in report.results] for report in rest] == [
        [r.id for r in report.results] for report in whole[1:]
    ]
