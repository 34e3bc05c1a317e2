"""Master and worker in network namespaces of their own, as on two hosts: with keys, without them,
with others, and with a firewall between them."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.network.hosts import Host, NoNamespaces, two_hosts
from realhf.base.process import host_token
from realhf.transport.network import Network, RunKeys
from realhf.transport.rpc_master import RpcMaster
from tests.process_family import gone
from tests.transport.network.listeners import listeners, takes_a_stranger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DEADLINE_S = 60.0


@dataclass
class Lan:
    """Two hosts, the keys of a run, and its master on the first."""

    first: Host
    second: Host
    folder: Path
    keys: RunKeys

    def master(self, **options: object) -> RpcMaster:
        network = Network(self.first.address, self.first.address, self.keys)
        return RpcMaster("run", network=network, heartbeat_s=0.5, dead_after_s=4.0, **options)  # pyright: ignore

    def worker(self, master: RpcMaster, keys: RunKeys | None = None) -> subprocess.Popen[str]:
        """Start a worker on the second host."""
        file = self.folder / f"keys-{len(list(self.folder.iterdir()))}"
        (keys or self.keys).write(file)
        script = str(Path(__file__).with_name("host_process.py"))
        command = [
            *self.second.enter,
            sys.executable,
            script,
            master.endpoint,
            self.first.address,
            str(file),
            "w",
        ]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Lan]:
    """The test's own thread is on the first host, with all that it starts."""
    try:
        with two_hosts() as (first, second), first.entered():
            yield Lan(first, second, tmp_path, RunKeys.make())
    except NoNamespaces as error:
        pytest.skip(str(error))


async def said(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a worker; the last line of what it wrote."""
    try:
        _, text = await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    finally:
        process.kill()
    return text.strip().splitlines()[-1]


async def said_or_killed(process: subprocess.Popen[str]) -> None:
    """The worker ends with the bye of its master."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.communicate, timeout=DEADLINE_S)
    process.kill()
    assert gone([process.pid], 60)


async def test_a_worker_on_another_host_serves_and_every_socket_of_the_run_refuses_strangers(
    lan: Lan,
):
    master = lan.master()
    await master.start()
    process = lan.worker(master)
    try:
        await master.wait_for(["w"], DEADLINE_S)
        info = master.roster["w"]
        assert await master.call("w", "echo", "hello", timeout_s=DEADLINE_S) == "hello"
        assert info.machine and info.machine != host_token(), "another network is another host"
        theirs = listeners(str(info.pid))
        ours = listeners("thread-self")
        assert set(theirs.values()) == {lan.second.address} and len(theirs) == 4
        assert set(ours.values()) == {lan.first.address} and len(ours) == 2
        told = {info.data_endpoint, *info.endpoints.values()}
        silent = {f"tcp://{lan.second.address}:{port}" for port in theirs} - told
        assert len(silent) == 1, "pieces of large values come over a port that is told when they do"
        for port, address in [*theirs.items(), *ours.items()]:
            assert not await asyncio.to_thread(takes_a_stranger, address, port)
    finally:
        await master.close()
        await said_or_killed(process)
    assert process.returncode == 0


async def test_a_worker_with_the_keys_of_another_run_says_so_and_is_not_in_the_roster(lan: Lan):
    master = lan.master()
    await master.start()
    try:
        text = await said(lan.worker(master, RunKeys.make()))
        assert f"FATAL: worker 'w': the master at {master.endpoint} " in text and "key" in text
        assert master.roster == {}
    finally:
        await master.close()


@pytest.mark.nightly
async def test_a_firewall_in_one_direction_is_named_long_before_the_deadline_of_the_start(lan: Lan):
    """The worker's packets arrive, but those of the master do not. The start itself may take a
    minute."""
    master = lan.master()
    await master.start()
    try:
        with lan.first.cut_off_from(lan.second):
            text = await said(lan.worker(master))
        assert f"the master at {master.endpoint} was not reached within 8 s" in text
        assert "firewall" in text
    finally:
        await master.close()


@pytest.mark.nightly
async def test_a_cable_that_is_cut_later_is_noticed_by_both_ends(lan: Lan):
    deaths: list[str] = []
    master = lan.master(on_death=lambda name, reason: deaths.append(f"{name}: {reason}"))
    await master.start()
    process = lan.worker(master)
    try:
        await master.wait_for(["w"], DEADLINE_S)
        with lan.first.cut_off_from(lan.second):
            text = await said(process)
            assert f"lost the master at {master.endpoint}: no answer for 4.0 s" in text
        async with asyncio.timeout(DEADLINE_S):
            while not deaths:
                await asyncio.sleep(0.05)
        assert deaths[0].startswith("w: ")
    finally:
        process.kill()
        await master.close()
