"""The environment server as a member of a run."""

import asyncio
import subprocess
import sys

import httpx
import pytest

from realhf.env.openenv_client import ConnectError, OpenEnvClient, without_token
from realhf.transport.network import Network, RunKeys
from realhf.transport.rpc_master import RpcMaster
from tests.process_family import family, gone

AWS = ("--pool-size", "1", "--ministack-base-port", "0")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("served", [pytest.param(AWS, marks=pytest.mark.sim), ("--env", "sql")], ids=["aws", "sql"])
async def test_it_registers_its_address_and_leaves_with_the_master(served):
    master = RpcMaster("run-1")
    await master.start()
    command = [
        sys.executable,
        "-m",
        "workers.env_worker",
        "--port",
        "0",
        *served,
        "--master",
        master.endpoint,
        "--run-id",
        "run-1",
        "--name",
        "env/0",
    ]
    process = subprocess.Popen(command)
    try:
        await master.wait_for(["env/0"], 60)
        info = master.roster["env/0"]
        assert (info.kind, info.index, info.pid) == ("env", 0, process.pid)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{info.endpoints['env']}/health")).json() == {"status": "healthy"}
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
    process = subprocess.Popen([sys.executable, "-m", "workers.env_worker", "--port", "0", "--env", "sql", *run])
    try:
        await master.wait_for(["env/0"], 60)
        url = master.roster["env/0"].endpoints["env"]
        assert keys.token not in url
        address, token = without_token(network.with_token(url))
        assert (address, token) == (url, keys.token)
        stranger, ours = OpenEnvClient(url), OpenEnvClient(url, token=token)
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
    command = [sys.executable, "-m", "workers.env_worker", "--pool-size", "0", "--master", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("FATAL: ") and "POOL_SIZE" in done.stderr.splitlines()[-1]
