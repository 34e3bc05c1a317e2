"""The trajectory server as a member of a run."""

import asyncio
import socket
import subprocess
import sys

import pytest

from realhf.trajectory.client import AsyncTrajectoryClient
from realhf.transport.rpc_master import RpcMaster

pytestmark = pytest.mark.slow

GROUP = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}


@pytest.mark.nightly
async def test_it_registers_its_address_and_leaves_with_the_master(tmp_path):
    master = RpcMaster("run-1")
    await master.start()
    command = [
        sys.executable,
        "-m",
        "workers.trajectory_worker",
        "--port",
        "0",
        "--store",
        f"sqlite:{tmp_path}",
        "--master",
        master.endpoint,
        "--run-id",
        "run-1",
        "--name",
        "trajectory/0",
    ]
    process = subprocess.Popen(command)
    try:
        await master.wait_for(["trajectory/0"], 60)
        info = master.roster["trajectory/0"]
        assert (info.kind, info.index, info.pid) == ("trajectory", 0, process.pid)
        async with AsyncTrajectoryClient(info.endpoints["trajectory"]) as client:
            await client.push(GROUP)
            assert (await client.status())["queue_size"] == 1
    finally:
        await master.close()
    assert await asyncio.to_thread(process.wait, 15) == 0


SERVER_THAT_NEVER_STOPS = """
import asyncio, sys
from realhf.scheduler.child import exit_process
from realhf.trajectory.state.engine import StateEngine
from workers import trajectory_worker

async def never(self):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

StateEngine.close, trajectory_worker.STOP_TIMEOUT_S = never, 0.3
exit_process(trajectory_worker.main(sys.argv[1:]))  # as the module does
"""


@pytest.mark.nightly
async def test_a_server_that_never_stops_does_not_keep_the_process():
    master = RpcMaster("run-1")
    await master.start()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SERVER_THAT_NEVER_STOPS,
            "--port",
            "0",
            "--store",
            "memory",
            "--master",
            master.endpoint,
            "--run-id",
            "run-1",
            "--name",
            "trajectory/0",
        ]
    )
    try:
        await master.wait_for(["trajectory/0"], 60)
        await master.close()
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()


TELLS_THAT_THE_INTERPRETER_IS_TAKEN_DOWN = """
import runpy, threading
threading._register_atexit(lambda: print("taken down", flush=True))
runpy.run_module("workers.trajectory_worker", run_name="__main__", alter_sys=True)
"""


def test_it_ends_without_taking_down_the_interpreter_under_a_server_that_may_still_run():
    flags = [
        "--master",
        "tcp://127.0.0.1:1",
        "--run-id",
        "r",
        "--store",
        "memory",
        "--gzip-level",
        "9",
    ]
    command = [sys.executable, "-c", TELLS_THAT_THE_INTERPRETER_IS_TAKEN_DOWN, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("FATAL: "), done.stderr
    assert "taken down" not in done.stdout


@pytest.mark.nightly
def test_what_keeps_it_from_starting_is_one_fatal_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, said in (
            (["--port", str(port)], f"cannot listen on 127.0.0.1:{port} (--port)"),
            (["--port", "0", "--gzip-level", "9"], "REALHF_TRAJ_GZIP_LEVEL (--gzip-level) is 9"),
        ):
            command = [
                sys.executable,
                "-m",
                "workers.trajectory_worker",
                "--master",
                "tcp://127.0.0.1:1",
                "--run-id",
                "r",
                "--store",
                f"sqlite:{tmp_path}",
                *flags,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 1
            assert done.stderr.splitlines()[-1].startswith(f"FATAL: {said}"), done.stderr
