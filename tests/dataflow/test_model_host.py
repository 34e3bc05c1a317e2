"""The worker's side of a call: inputs from several places, renamed keys, checked outputs, seeds,
state."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realhf.api.calls import CheckpointRequest, ExportRequest, Nothing
from realhf.api.experiment import InterfaceType, MFCDef, artifact_exists
from realhf.api.model import CallContext, Model, TrainResult
from realhf.api.parallel import WeightsNotGathered
from realhf.api.sample import SequenceSample
from realhf.base.tensor_digest import digest_tensors, joint_digest
from realhf.dataflow.checkpoint import CheckpointError, CheckpointStore
from realhf.dataflow.model_function_call import WrongReply
from realhf.dataflow.model_host import ModelHost
from realhf.transport import rpc_worker as rpc_worker
from realhf.transport.codec import decode_sample
from realhf.transport.errors import CallCancelled
from realhf.transport.rpc_master import RpcMaster
from realhf.transport.rpc_worker import RpcWorker
from realhf.transport.tensor_store import TensorStore
from tests.dataflow.checkpoints import save as save_checkpoint
from tests.dataflow.toy_graph import ToyEngine, ToyInterface


class Doubler(ToyInterface):
    """Reads ``text``, answers ``twice``; its noise comes from torch's global generator."""

    def inference(self, model: Model, sample: SequenceSample, context: Any) -> Any:
        assert sample.keys == {"text"}
        self.seen = sample
        out = SequenceSample.from_tensors(
            sample.ids, {"twice": sample["text"] * 2}, {"twice": sample.seqlens["text"]}
        )
        return self.change(out), {"noise": torch.rand(1).item(), "flag": True}

    def train_step(self, model: Model, sample: SequenceSample, context: Any) -> TrainResult:
        return TrainResult({"loss": float("nan")}, 3.0, True)


def sample(ids: list[str], key: str = "ids") -> SequenceSample:
    values = torch.tensor([int(i[1:]) for i in ids], dtype=torch.int64)
    return SequenceSample.from_tensors(ids, {key: values}, {key: [[1]] * len(ids)})


class Host:
    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.store, self.remote = TensorStore("here"), TensorStore("there")
        self.interface = Doubler()
        inference = MFCDef(
            "double",
            "actor",
            InterfaceType.INFERENCE,
            "doubler",
            input_keys=("ids",),
            output_keys=("result",),
            input_key_remap={"ids": "text"},
            output_key_remap={"twice": "result"},
        )
        train = MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "doubler", input_keys=("ids",))
        self.model = Model("actor", ToyEngine(), None)  # pyright: ignore
        self.host = ModelHost(
            {"actor": self.model},
            {"double": (inference, self.interface), "train": (train, self.interface)},
            self.store,
            lambda endpoint, ids, keys, timeout_s: self.remote.get(ids, keys),
            run_dir=tmp_path,
            **options,
        )

    def call(self, ids: list[str], remote: list[str] | None = None, **more: Any) -> dict[str, Any]:
        fetches = [{"endpoint": "data:there", "ids": remote, "keys": ["ids"]}] if remote else []
        payload = {
            "mfc": "double",
            "role": "actor",
            "ids": ids,
            "keys": ["ids"],
            "metadata": {"task": [f"task {i}" for i in ids]},
            "fetches": fetches,
            "step": 4,
            "seed": 11,
            "endpoints": {},
        }
        return self.host.handlers()["call"]({**payload, **more})


def test_inputs_from_here_and_there_come_in_the_order_of_the_call(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.store.put(sample(["s1", "s2"]))
    host.remote.put(sample(["s3", "s4"]))
    reply = host.call(["s3", "s1", "s4", "s2"], remote=["s3", "s4"])
    assert host.interface.seen["text"].tolist() == [3, 1, 4, 2]
    assert host.interface.seen.metadata == {"task": ["task s3", "task s1", "task s4", "task s2"]}
    meta = decode_sample(reply["meta"])
    assert meta.data is None and meta.keys == {"result"} and meta.ids == ("s3", "s1", "s4", "s2")
    assert host.store.get(["s4"], ["result"])["result"].tolist() == [8]
    assert host.model.engine.version == 4
    assert reply["stats"]["flag"] == 1.0 and reply["compute_s"] >= 0 and reply["fetch_s"] >= 0


def test_a_call_depends_on_its_seed_and_not_on_what_ran_before(tmp_path: Path) -> None:
    noises = []
    for warm in (0, 3):
        host = Host(tmp_path)
        host.store.put(sample(["s1"]))
        torch.rand(warm + 1)
        noises.append(host.call(["s1"])["stats"]["noise"])
    assert noises[0] == noises[1]
    host = Host(tmp_path)
    host.store.put(sample(["s1"]))
    assert host.call(["s1"], seed=12)["stats"]["noise"] != noises[0]


def test_how_far_a_call_has_come_is_told_while_it_runs(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.store.put(sample(["s1"]))
    told = host.host.immediate_handlers()["progress"]
    during: list[Any] = []

    def play(model: Model, sample: SequenceSample, context: CallContext) -> Any:
        during.append(told({}))
        context.progress.finished = 2
        context.progress.total = 5
        during.append(told({}))
        return Doubler.inference(host.interface, model, sample, context)

    host.interface.inference = play  # type: ignore[method-assign]
    for _ in range(2):
        host.call(["s1"])
    assert during == [{"over": 0, "wanted": 0}, {"over": 2, "wanted": 5}] * 2


def test_outputs_are_checked_before_they_are_stored(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.store.put(sample(["s1", "s2"]))
    host.interface.change = lambda out: out.remap_keys({"twice": "thrice"})
    with pytest.raises(WrongReply, match=r"double: .*missing \['result'\], extra \['thrice'\]"):
        host.call(["s1", "s2"])
    host.interface.change = lambda out: out.reorder([1, 0])
    with pytest.raises(WrongReply, match="another order"):
        host.call(["s1", "s2"])
    assert not host.store.has("s1", "result") and not host.store.has("s1", "thrice")


def test_a_skipped_train_step_is_passed_on(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.store.put(sample(["s1"]))
    reply = host.call(["s1"], mfc="train")
    assert reply["meta"] is None
    assert reply["stats"]["skipped"] == 1.0 and reply["stats"]["grad_norm"] == 3.0


def test_roles_give_the_memory_of_generation_back_before_another_computes(tmp_path: Path) -> None:
    """Those of the same worker, the call's own among them; an engine that cannot is left alone."""

    class Generating(ToyEngine):
        """Counts how often its memory was wanted."""

        released = 0

        def release_generation(self) -> None:
            self.released += 1

    host, other = Host(tmp_path), Generating()
    host.host = ModelHost(
        {"critic": host.model, "actor": Model("actor", other, None)},  # pyright: ignore
        host.host._interfaces,
        host.store,
        lambda endpoint, ids, keys, timeout_s: host.remote.get(ids, keys),
        run_dir=tmp_path,
    )
    host.store.put(sample(["s1"]))
    host.call(["s1"], role="critic")
    assert other.released == 1
    host.call(["s1"], mfc="train", role="critic")
    assert other.released == 2


def test_the_host_owns_the_policy_version(tmp_path: Path) -> None:
    """A step begins with the version of its number and makes the next, whatever the interface does;
    and weights are given away only as what they are."""
    host = Host(tmp_path)
    host.store.put(sample(["s1"]))
    host.call(["s1"], mfc="train")
    assert host.model.engine.version == 5, "also where the update was skipped"
    assert host.host.engine("actor", 5) is host.model.engine
    with pytest.raises(RuntimeError, match="actor has weights of version 5, not of version 4"):
        host.host.engine("actor", 4)


def test_an_unknown_role_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no model role 'critic'"):
        Host(tmp_path).call(["s1"], role="critic")


def test_interfaces_hear_of_a_complete_checkpoint_if_they_want_to(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert host.host.handlers()["committed"]({}) == {}
    told: list[str] = []
    host.interface.committed = lambda: told.append("committed")  # pyright: ignore
    host.host.committed(Nothing())
    assert told == ["committed"] * 2, "once for each call that has the interface"


@pytest.mark.slow
def test_state_is_saved_and_restored(tmp_path: Path) -> None:
    first = Host(tmp_path)
    second = Host(tmp_path)
    first.model.engine.weight = 0.1 + 0.2  # pyright: ignore
    first.interface.calls = 5
    request = CheckpointRequest({"actor": str(tmp_path / "ckpt" / "actor")}, str(tmp_path / "ckpt"))
    first.host.save(request)
    second.host.restore(request)
    assert second.model.engine.weight == 0.1 + 0.2  # pyright: ignore
    assert second.interface.calls == 5
    second.host.export(ExportRequest("actor", str(tmp_path / "hf")))
    assert (tmp_path / "hf" / "model.txt").read_text() == repr(0.1 + 0.2)


def test_what_is_cleared_while_a_call_makes_it_is_not_left_behind(tmp_path: Path) -> None:
    bench = Host(tmp_path)
    bench.store.put(sample(["s1", "s2"]))

    def cleared_by_another(out: SequenceSample) -> SequenceSample:
        bench.host.immediate_handlers()["clear"]({"ids": ["s1", "s9"]})
        return out

    bench.interface.change = cleared_by_another
    bench.call(["s1", "s2"])
    assert not bench.store.has("s1", "result") and bench.store.has("s2", "result")
    bench.store.put(sample(["s1"]))
    bench.interface.change = lambda out: out
    bench.call(["s1"])
    assert bench.store.has("s1", "result"), "another call about the same sample is another matter"


async def test_a_call_that_is_cancelled_and_cleared_as_it_begins_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Host(tmp_path, given_up=lambda: worker.is_running_call_cancelled())
    master = RpcMaster("run", heartbeat_s=0.5, dead_after_s=10)
    await master.start()
    worker = RpcWorker(
        "w",
        "model",
        0,
        "run",
        master.endpoint,
        ordered=bench.host.handlers(),
        immediate=bench.host.immediate_handlers(),
        connect_timeout_s=20,
    )
    thread = threading.Thread(target=worker.run)
    thread.start()
    begins = threading.Event()
    goes_on = threading.Event()
    unpack = rpc_worker.unpack_payload

    def unpack_slowly(frames: list[bytes]) -> Any:
        if threading.current_thread() is thread:
            begins.set()
            assert goes_on.wait(60)
        return unpack(frames)

    monkeypatch.setattr(rpc_worker, "unpack_payload", unpack_slowly)
    try:
        await master.wait_for(["w"], timeout_s=60)
        load = {"ids": ["s1"], "values": {"ids": [[1]]}, "metadata": {}}
        cancelled = master.call("w", "load", load, timeout_s=60)
        assert await asyncio.to_thread(begins.wait, 20)
        cancelled.cancel()
        await asyncio.sleep(0)  # the worker is told in the next pass of the loop
        await master.call("w", "clear", {"ids": ["s1"]}, timeout_s=60)
        goes_on.set()
        assert (await master.call("w", "stats", {}, timeout_s=60))["samples"] == 0
        await master.call("w", "load", load, timeout_s=60)
        assert bench.store.has("s1", "ids"), "another call is another matter"
    finally:
        goes_on.set()
        await master.close()
        await asyncio.to_thread(thread.join, 20)


def test_a_call_that_nobody_waits_for_is_not_made(tmp_path: Path) -> None:
    bench = Host(tmp_path, given_up=lambda: True)
    bench.store.put(sample(["s1"]))
    with pytest.raises(CallCancelled, match="as it began"):
        bench.call(["s1"])
    assert not bench.store.has("s1", "result")


@pytest.mark.slow
def test_checkpoints_and_exports_carry_digests_and_another_weight_than_was_saved_is_not_restored(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path)
    request = CheckpointRequest({"actor": str(tmp_path / "ckpt" / "actor")}, str(tmp_path / "ckpt"))
    host.host.save(request)
    host.host.restore(request)
    host.host.export(ExportRequest("actor", str(tmp_path / "policy")))
    said = json.loads((tmp_path / "policy" / "weight_digests.json").read_text())
    assert said == json.loads((tmp_path / "ckpt" / "actor" / "weight_digests.json").read_text())
    assert said["tensors"] == digest_tensors(host.model.engine.weights()) and said[
        "digest"
    ] == joint_digest(said["tensors"])
    (tmp_path / "ckpt" / "actor" / "weight.txt").write_text("1.0000001 0")
    with pytest.raises(
        ValueError, match=r"weight was saved with digest [0-9a-f]+ and is restored with [0-9a-f]+"
    ):
        host.host.restore(request)


def test_an_export_that_is_killed_at_any_moment_leaves_the_folder_of_before_or_none(
    tmp_path: Path,
) -> None:
    """The launcher takes the folder of a warm start for done when it is there: it used to be made,
    empty, before the export, so that a kill then ended every later launch with "no such folder"."""
    host = Host(tmp_path)
    out = tmp_path / "made" / "policy-key"
    engine: Any = host.model.engine
    export = engine.export_hf
    seen = []

    def killed(folder: Path) -> None:
        export(folder)
        seen.append(sorted(path.name for path in out.iterdir()) if out.exists() else None)
        raise SystemExit

    for before in (None, ["model.txt", "weight_digests.json"]):
        engine.export_hf = killed
        with pytest.raises(SystemExit):
            host.host.export(ExportRequest("actor", str(out)))
        assert seen.pop() == before and artifact_exists(out) == (before is not None)
        engine.export_hf = export
        host.host.export(ExportRequest("actor", str(out)))
        assert sorted(path.name for path in out.iterdir()) == ["model.txt", "weight_digests.json"]
    assert [path.name for path in out.parent.iterdir()] == ["policy-key"]
    (tmp_path / "empty").mkdir()
    assert not artifact_exists(tmp_path / "empty"), "what an older version left is made anew"


def test_a_disk_that_takes_no_more_is_the_cause_that_is_told_and_nothing_of_it_stays(
    tmp_path: Path,
) -> None:
    """torch spoke of an unexpected position in inline_container.cc."""
    host, store = Host(tmp_path), CheckpointStore(tmp_path / "checkpoints")
    engine: Any = host.model.engine
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def large(folder: Path) -> None:
        torch.save({"weight": torch.zeros(200_000)}, folder / "engine.pt")

    def save(draft: Path) -> None:
        host.host.save(CheckpointRequest({"actor": str(draft / "actor")}, str(draft)))

    save_checkpoint(store, 1, save, {})
    engine.save_checkpoint = engine.export_hf = large
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(CheckpointError) as failed:
            save_checkpoint(store, 2, save, {})
        with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/\.hf\.") as exported:
            host.host.export(ExportRequest("actor", str(tmp_path / "hf")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        f"step 2 was not written to {store.folder}: file too large; earlier checkpoints are"
        in str(failed.value)
    )
    assert isinstance(failed.value.__cause__, OSError) and "inline_container" in str(
        exported.value.__cause__
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]
    assert sorted(path.name for path in store.folder.iterdir()) == ["LATEST", "ckpt-00000001"]


@pytest.mark.parametrize(
    ("rank", "whole"), [(0, True), (1, True), (0, False)], ids=["first", "second", "in parts"]
)
def test_the_first_of_several_workers_writes_digests_of_whole_weights(
    tmp_path: Path, rank: int, whole: bool
) -> None:
    host = Host(tmp_path)
    engine: Any = host.model.engine

    def parts() -> Any:
        raise WeightsNotGathered("actor: cut")

    engine.ranks = SimpleNamespace(number=rank)
    engine.save_checkpoint = lambda folder: []
    if not whole:
        engine.weights = parts
    saved = host.host.save(
        CheckpointRequest({"actor": str(tmp_path / "ckpt" / "actor")}, str(tmp_path / "ckpt"))
    )
    written = [Path(file.path).name for file in saved.files]
    assert ("weight_digests.json" in written) == (rank == 0 and whole)


def test_an_error_of_an_engine_is_no_reason_to_skip_the_check_of_digests(tmp_path: Path) -> None:
    host = Host(tmp_path)
    request = CheckpointRequest({"actor": str(tmp_path / "ckpt" / "actor")}, str(tmp_path / "ckpt"))
    host.host.save(request)

    def broken() -> Any:
        raise RuntimeError("CUDA error")

    engine: Any = host.model.engine
    engine.weights = broken
    with pytest.raises(RuntimeError, match="CUDA error"):
        host.host.restore(request)
