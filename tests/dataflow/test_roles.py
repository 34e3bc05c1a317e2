"""What is asked of all workers of a run: where a role's state lies, and who is to blame when it fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from realhf.api.experiment import ExperimentSpec, ModelSpec, SourceSpec
from realhf.api.parallel import CollectiveBroken, Parallel
from realhf.dataflow.worker_group import Roles
from realhf.transport.errors import RemoteError
from realhf.transport.roster import WorkerInfo


class Answers:
    """Stands for the master's RPC: answers by worker, the first ones at once and later ones after a moment."""

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
    return RemoteError(worker="w", handler="save", mfc="", step=1, kind=kind, message=message, remote_traceback="")


def roles_of(caller: Answers, *, trusted: bool = False) -> Roles:
    models = {
        "actor": ModelSpec("actor", "x", (1, 0), trainable=True, backend="ddp", parallel=Parallel(dp=2)),
        "critic": ModelSpec("critic", "x", (2,), trainable=True),
        "ref": ModelSpec("ref", "x", (2,)),
    }
    spec = ExperimentSpec("x", models, (), SourceSpec("s"), 1, 1, 1, Path())
    return Roles(spec, caller, timeout_s=60, trusted=trusted)  # pyright: ignore[reportArgumentType]


async def test_ranks_share_a_folder_and_others_have_their_own(tmp_path: Path) -> None:
    caller = Answers()
    roles = roles_of(caller)
    assert roles.of("actor") == ["model_worker/0", "model_worker/1"]
    files = await roles.save(tmp_path)
    assert [file.path for file in files] == ["/model_worker/0", "/model_worker/1", "/model_worker/2"]
    asked = {worker: payload["roles"] for worker, handler, payload in caller.sent if handler == "save"}
    together = {"actor": str(tmp_path / "actor")}
    own = {"critic": str(tmp_path / "model_worker-2" / "critic")}
    assert asked == {"model_worker/0": together, "model_worker/1": together, "model_worker/2": own}


async def test_a_checkpoint_is_read_from_where_other_workers_wrote_it(tmp_path: Path) -> None:
    (tmp_path / "model_worker-0" / "actor").mkdir(parents=True)
    (tmp_path / "critic").mkdir()
    caller = Answers()
    await roles_of(caller).restore(tmp_path)
    asked = {worker: payload["roles"] for worker, handler, payload in caller.sent if handler == "restore"}
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
        with pytest.raises(RuntimeError, match=r"model_worker/0 on alpha, model_worker/1 on beta.*network\.trusted"):
            await roles.load()
        assert caller.sent == []
        return
    await roles.load()
    assert caller.sent[0] == ("model_worker/0", "open_world", {"several_hosts": True})
    asked = {worker: payload["world"] for worker, handler, payload in caller.sent if handler == "initialize"}
    assert asked == dict.fromkeys(caller.roster, "10.0.0.1:7")


async def test_the_worker_that_failed_by_itself_is_the_cause(tmp_path: Path) -> None:
    lost = failure(CollectiveBroken.__name__, "lost its peers")
    caller = Answers(worker_0=lost, worker_1=failure("OSError", "No space left on device"))
    with pytest.raises(RemoteError, match="No space left"):
        await roles_of(caller).save(tmp_path)
    assert ("model_worker/1", "abort") in [(worker, handler) for worker, handler, _ in caller.sent]
