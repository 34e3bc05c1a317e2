"""Workers as processes: the environment server in a run, a model worker without a plan, the GPU of
an engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest

from realhf.env.openenv_client import ConnectError, OpenEnvClient, split_token
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.transport.network import Network, RunKeys
from realhf.transport.rpc_master import RpcMaster
from tests.process_family import family, gone
from workers import generation_worker

AWS = ("--pool-size", "1", "--ministack-base-port", "0")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "served", [pytest.param(AWS, marks=pytest.mark.sim), ("--env", "sql")], ids=["aws", "sql"]
)
async def test_it_registers_its_address_and_leaves_with_the_master(served):
    master = RpcMaster("run-1")
    await master.start()
    run = ("--master", master.endpoint, "--run-id", "run-1", "--name", "env/0")
    command = [sys.executable, "-m", "workers.env_worker", "--port", "0", *served, *run]
    process = subprocess.Popen(command)
    try:
        await master.wait_for(["env/0"], 60)
        info = master.roster["env/0"]
        assert (info.kind, info.index, info.pid) == ("env", 0, process.pid)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{info.endpoints['env']}/health")).json() == {
                "status": "healthy"
            }
        children = family(process.pid)
    finally:
        await master.close()
    assert await asyncio.to_thread(process.wait, 15) == 0
    assert bool(children) == (served == AWS) and gone(children, 60)


@pytest.mark.nightly
@pytest.mark.slow
async def test_with_the_keys_of_a_run_it_takes_the_token_of_that_run_only(tmp_path):
    """The address that it registers holds no token; who has the keys puts it there."""
    keys = RunKeys.make()
    keys.write(tmp_path / "keys")
    network = Network(keys=keys)
    master = RpcMaster("run-1", network=network)
    await master.start()
    run = ("--master", master.endpoint, "--run-id", "run-1", "--key-file", str(tmp_path / "keys"))
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.env_worker", "--port", "0", "--env", "sql", *run]
    )
    try:
        await master.wait_for(["env/0"], 60)
        url = master.roster["env/0"].endpoints["env"]
        assert keys.token not in url
        address, token = split_token(network.add_token(url))
        assert (address, token) == (url, keys.token)
        stranger = OpenEnvClient(url)
        ours = OpenEnvClient(url, token=token)
        with pytest.raises(ConnectError, match="401"):
            await stranger.connect()
        await ours.connect()
        await ours.close()
    finally:
        await master.close()
    assert await asyncio.to_thread(process.wait, 15) == 0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_bad_setting_is_one_fatal_line_in_the_log():
    command = [
        sys.executable,
        "-m",
        "workers.env_worker",
        "--pool-size",
        "0",
        "--master",
        "tcp://127.0.0.1:1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1].startswith("FATAL: ")
        and "POOL_SIZE" in done.stderr.splitlines()[-1]
    )


@pytest.mark.slow
def test_without_a_plan_it_ends_with_one_line_about_the_cause(tmp_path):
    words = (
        "--run-dir",
        str(tmp_path),
        "--run-id",
        "r",
        "--index",
        "0",
        "--master",
        "tcp://127.0.0.1:1",
    )
    command = [sys.executable, "-m", "workers.model_worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1].startswith("FATAL: ")
        and "plan.json" in done.stderr.splitlines()[-1]
    )


APART = {"model_worker/0": (0,), "generation/0": (1,)}


@pytest.fixture(scope="module")
def plan(tmp_path_factory, tiny_policy):
    given = ["experiment=grpo_async", "env=sql", f"actor.path={tiny_policy}"]
    built = build_experiment(
        compose_config([*given, f"fileroot={tmp_path_factory.mktemp('runs')}"])
    )
    built.spec.run_dir.mkdir(parents=True)
    return built.plan(built.spec, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "flags", "shared"),
    [
        ({}, (), True),
        (APART, (), False),
        ({}, ("--beside-trainer", "no"), False),
        (APART, ("--beside-trainer", "yes"), True),
    ],
)
def test_who_dealt_out_the_gpu_knows_better_than_the_plan(plan, monkeypatch, gpus, flags, shared):
    """A host agent deals out GPUs of its host, of which the plan knows nothing: every engine there
    took half of what was free on a GPU of its own, and four fifths of a trainer's where the plan
    named that one."""
    replace(plan, gpus=gpus).write()
    seen: list[bool] = []

    def make(*given, **more):
        seen.append(more["shared"])
        raise RuntimeError("it is enough to know")

    monkeypatch.setattr(generation_worker, "make_streaming_generator", make)
    # a worker handles SIGTERM, a test does not
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    words = (
        "--run-dir",
        str(plan.spec.run_dir),
        "--run-id",
        "r",
        "--master",
        "tcp://127.0.0.1:1",
        "--index",
        "0",
    )
    monkeypatch.setattr(sys, "argv", ["generation_worker", *words, *flags])
    assert generation_worker.main() == 1
    assert seen == [shared]
