"""The pool with real processes: leases, isolation, replacement of what died, and nothing left
behind."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from realhf.aws.cli import virtual_folder
from realhf.aws.cli.executor import OutputLimits, SimulatorLost
from realhf.aws.cli.state_client import StateCallError
from realhf.aws.simulator import pool as pool_module
from realhf.aws.simulator.ministack_process import (
    SIMULATOR_CPU_S,
    SIMULATOR_MEMORY_MB,
    MiniStackProcess,
)
from realhf.aws.simulator.pool import MiniStackPool, Slot
from tests.process_family import freeze, gone, lives, until

pytestmark = pytest.mark.sim


@pytest.fixture(scope="module")
def small_pool():
    pool = MiniStackPool(2, limits=OutputLimits(timeout_s=5.0))
    pool.start()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def nothing_stays_leased(request: pytest.FixtureRequest):
    """A test that fails leaves the pool whole to those after it."""
    yield
    if "small_pool" in request.fixturenames:
        pool: MiniStackPool = request.getfixturevalue("small_pool")
        for lease in [*pool._book._leases.values()]:
            pool.release(lease)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def slot(small_pool: MiniStackPool) -> Slot:
    return small_pool.acquire()


def _zygotes() -> set[int]:
    """This process's own living children. What they forked may change at any moment: the tests'
    shared pool forks a used simulator again in the background."""
    return {child.pid for child in psutil.Process().children() if lives(child)}


def _nothing_left(before: set[int], pool: MiniStackPool) -> bool:
    """Whether all children end that were not there before. Those of ``pool`` do not count: a test
    that killed some lets it start them again in the background."""
    return until(lambda: not _zygotes() - before - {zygote.pid for zygote in pool._zygotes}, 5.0)


def _bucket_names(slot: Slot) -> list[str]:
    return [bucket["Name"] for bucket in slot.state.call("s3", "ListBuckets")["Buckets"]]


def _kill(slot: Slot) -> None:
    os.kill(slot.ministack.pid, signal.SIGKILL)
    assert until(lambda: not slot.ministack.alive())


@pytest.mark.nightly
def test_leases_are_exclusive_and_exhaustion_says_so(small_pool: MiniStackPool) -> None:
    first = small_pool.acquire()
    second = small_pool.acquire()
    try:
        assert {first.index, second.index} == {0, 1}
        assert small_pool.free_count == 0
        with pytest.raises(RuntimeError, match=r"^MiniStack pool exhausted$"):
            small_pool.acquire()
    finally:
        small_pool.release(first)
        small_pool.release(second)
    assert small_pool.free_count == 2
    with pytest.raises(ValueError, match="not leased"):
        small_pool.release(first)
    assert small_pool.free_count == 2


def test_worlds_are_separate_and_scrubbed(small_pool: MiniStackPool) -> None:
    first = small_pool.acquire()
    second = small_pool.acquire()
    assert first.executor.run("aws s3 mb s3://only-here").success
    assert second.executor.run("aws s3 mb s3://only-here").success
    first.files.put("note.txt", b"x")
    old_worker = first.worker_pid
    small_pool.release(second)
    small_pool.release(first)
    again = [small_pool.acquire(), small_pool.acquire()]
    for slot in again:
        assert _bucket_names(slot) == []
        assert slot.files.names() == []
        assert slot.worker_pid != old_worker
        small_pool.release(slot)


def test_reset_empties_the_world_and_keeps_the_worker(slot: Slot) -> None:
    slot.executor.run("aws s3 mb s3://gone")
    slot.files.put("asset.txt", b"x")
    worker = slot.worker_pid
    slot.reset(seed=3)
    assert _bucket_names(slot) == [] and slot.files.names() == []
    assert slot.executor.run("aws s3 ls").stdout == ""
    assert slot.worker_pid == worker


def test_the_same_seed_draws_the_same_ids(small_pool: MiniStackPool) -> None:
    commands = [
        "aws kms create-key --query KeyMetadata.KeyId",
        "aws ec2 create-vpc --cidr-block 10.0.0.0/16 --query Vpc.VpcId",
        "aws iam create-user --user-name u --query User.UserId",
        "aws secretsmanager create-secret --name s --secret-string x --query ARN",
        "aws cognito-idp create-user-pool --pool-name p --query UserPool.Id",
    ]
    slots = [small_pool.acquire(), small_pool.acquire()]

    def play(slot: Slot, seed: int) -> list[str]:
        slot.reset(seed)
        return [slot.executor.run(command).stdout for command in commands]

    first = play(slots[0], 7)
    other_slot = play(slots[1], 7)
    other_seed = play(slots[0], 8)
    for slot in slots:
        small_pool.release(slot)
    assert all(first) and first == other_slot
    assert all(a != b for a, b in zip(first, other_seed, strict=True))


def test_a_dead_simulator_is_never_handed_out(small_pool: MiniStackPool) -> None:
    for slot in small_pool.slots:
        _kill(slot)
    slots = [small_pool.acquire(), small_pool.acquire()]
    for slot in slots:
        assert slot.executor.run("aws s3 ls").success
        small_pool.release(slot)


def test_a_simulator_that_dies_during_a_lease_is_reported_and_comes_back(slot: Slot) -> None:
    slot.executor.run("aws s3 ls")
    _kill(slot)
    with pytest.raises(SimulatorLost, match="simulator"):
        slot.executor.run("aws s3 ls")
    with pytest.raises(ConnectionError, match=str(slot.port)):
        slot.state.call("s3", "ListBuckets")
    slot.reset()
    assert slot.executor.run("aws s3 mb s3://back").success
    assert _bucket_names(slot) == ["back"]


@pytest.mark.nightly
def test_a_hanging_simulator_is_replaced_by_reset(slot: Slot) -> None:
    hanging = slot.ministack.pid
    freeze(hanging)
    slot.reset()
    assert slot.ministack.pid != hanging and not psutil.pid_exists(hanging)
    assert slot.executor.run("aws s3 ls").success


@pytest.mark.nightly
def test_dead_zygotes_are_started_again(small_pool: MiniStackPool) -> None:
    pids = [zygote.pid for zygote in small_pool._zygotes]
    pids += [pid for slot in small_pool.slots for pid in (slot.ministack.pid, slot.worker_pid)]
    for zygote in small_pool._zygotes:
        os.kill(zygote.pid, signal.SIGKILL)
    assert gone(pids, 60)
    slot = small_pool.acquire()
    slot.reset()
    assert slot.executor.run("aws s3 ls").success
    small_pool.release(slot)


def test_a_taken_port_is_named_and_nothing_is_left(small_pool: MiniStackPool) -> None:
    before = _zygotes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} for MiniStack is taken"):
            MiniStackPool(1, base_port=port).start()
    assert _nothing_left(before, small_pool)


@pytest.mark.nightly
def test_memory_is_bounded_and_a_simulator_that_grew_is_replaced(slot: Slot) -> None:
    """It used to take gigabytes, and to keep most of them over resets."""
    pid = slot.ministack.pid
    slot.reset()
    assert slot.ministack.pid == pid
    with pytest.raises((StateCallError, ConnectionError)):
        slot.state.call("kinesis", "CreateStream", {"StreamName": "s", "ShardCount": 3_000_000})
    body = b"x" * (8 << 20)
    slot.state.call("s3", "CreateBucket", {"Bucket": "large"})
    for number in range(9):
        slot.state.call("s3", "PutObject", {"Bucket": "large", "Key": str(number), "Body": body})
    slot.ministack.wait_healthy(60.0)  # which is not the moment that it is compared with
    slot.reset()
    assert slot.ministack.pid != pid and not psutil.pid_exists(pid)
    assert slot.executor.run("aws s3 ls").stdout == ""


def test_a_service_that_the_simulator_lacks_costs_nothing(slot: Slot) -> None:
    """It used to read all of botocore's models to find out, 400 MB and five seconds, again after
    every reset."""
    with pytest.raises(OSError, match="Unsupported service: polly"):
        slot.ministack.ask("POST", "/v1/speech", "polly", timeout_s=60.0, body=b"{}")
    assert not slot.ministack.is_worn_out()


def test_a_control_request_that_fails_says_why(slot: Slot) -> None:
    with pytest.raises(OSError, match=r"status 500 .ValueError: invalid literal"):
        slot.ministack._request("GET", "/_realhf/requests?x", 60.0)
    assert slot.ministack.requests()["count"] > 0


def test_the_cpu_of_a_simulator_is_bounded_and_one_that_took_much_of_it_is_replaced(
    small_pool: MiniStackPool, slot: Slot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document that unfolds kept one busy for as long as it liked."""
    pid = slot.ministack.pid
    (resident, _) = slot.ministack.usage()
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(
        rf"^Max cpu time +{SIMULATOR_CPU_S} +{SIMULATOR_CPU_S} ", limits, re.MULTILINE
    ), limits
    assert (
        f"{SIMULATOR_MEMORY_MB} MiB of memory and {SIMULATOR_CPU_S} s of CPU"
        in small_pool.containment()
    )
    assert "1.0 GiB for all 2" in small_pool.containment()
    monkeypatch.setattr(
        MiniStackProcess, "usage", lambda simulator: (resident, SIMULATOR_CPU_S / 2)
    )
    slot.reset()
    assert slot.ministack.pid != pid


def test_a_port_that_is_taken_meanwhile_costs_no_slot(slot: Slot) -> None:
    """Whoever has it, the next simulator of the slot listens elsewhere; every respawn used to
    fail."""
    port = slot.port
    slot.ministack.stop()
    with socket.create_server(("127.0.0.1", port)):
        slot.reset()
    assert slot.port != port and str(slot.port) in slot.endpoint
    assert slot.executor.run("aws s3 mb s3://elsewhere").success and _bucket_names(slot) == [
        "elsewhere"
    ]


def test_a_folder_that_cannot_be_emptied_costs_no_slot(
    small_pool: MiniStackPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise PermissionError("not today")

    slot = small_pool.acquire()
    slot.files.put("old.txt", b"x")
    monkeypatch.setattr(virtual_folder, "empty_folder", broken)
    slot.reset()
    assert slot.files.names() == []
    assert slot.executor.run("aws s3 mb s3://box").success
    (slot.files.path / "new.txt").write_text("new")
    assert slot.executor.run("aws s3 cp new.txt s3://box/").success, (
        "the worker is in the new folder"
    )
    small_pool.release(slot)
    monkeypatch.undo()
    assert small_pool.free_count == 2


def test_a_simulator_that_does_not_come_up_shows_its_log(
    small_pool: MiniStackPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "ministack"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise SystemError('broken installation')")
    healthy = pool_module.zygote_environment

    def environment(folder: Path) -> dict[str, str]:
        return {**healthy(folder), "PYTHONPATH": str(tmp_path)}

    monkeypatch.setattr(pool_module, "zygote_environment", environment)
    before = _zygotes()
    with pytest.raises(RuntimeError, match="broken installation"):
        MiniStackPool(
            1, sandbox="plain"
        ).start()  # bubblewrap would not even show it the broken package
    assert _nothing_left(before, small_pool)


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="pool size"):
        MiniStackPool(size)


OWNER = """
import sys, time
from realhf.aws.simulator.pool import MiniStackPool
pool = MiniStackPool(2)
pool.start()
print(*[z.pid for z in pool._zygotes], *[p for s in pool.slots for p in (s.ministack.pid, s.worker_pid)], pool._root,
      flush=True)
if sys.argv[1] == "stop":
    pool.stop()
    print("stopped", flush=True)
time.sleep(60)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["stop", "exit", "kill"])
def test_nothing_survives(how: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    *words, folder = owner.stdout.readline().split()
    pids = [int(word) for word in words]
    assert Path(folder).is_dir() and len(pids) == 6 and all(lives(pid) for pid in pids)
    try:
        if how == "stop":
            assert owner.stdout.readline() == "stopped\n"
        else:
            owner.send_signal(signal.SIGTERM if how == "exit" else signal.SIGKILL)
        assert gone(pids, 60) and until(lambda: not Path(folder).exists())
    finally:
        owner.kill()
        owner.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_health_loop_replaces_free_simulators(
    small_pool: MiniStackPool, how: signal.Signals
) -> None:
    victim = small_pool.slots[0].ministack.pid
    os.kill(victim, how)
    health = small_pool._health
    assert health is not None
    assert until(lambda: health.sweep() or small_pool.slots[0].ministack.pid not in (victim, -1))
    assert until(lambda: small_pool.free_count == 2)
    assert small_pool.slots[0].ministack.pid != victim and small_pool.metrics()["respawns"] > 0


@pytest.mark.parametrize("victim", ["simulator", "worker"])
def test_a_stopped_child_is_never_handed_out(small_pool: MiniStackPool, victim: str) -> None:
    for slot in small_pool.slots:
        freeze(slot.ministack.pid if victim == "simulator" else slot.worker_pid)
    slot = small_pool.acquire()
    assert slot.executor.run("aws s3 ls").success
    small_pool.release(slot)
    assert until(lambda: small_pool.free_count == 2)


def test_a_dirty_slot_is_never_handed_out(
    small_pool: MiniStackPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = small_pool.acquire()
    dirty = slot.ministack.pid
    monkeypatch.setattr(slot.ministack, "leftovers", lambda: "a-bucket")
    small_pool.release(slot)
    monkeypatch.undo()
    assert until(lambda: small_pool.free_count == 2)
    assert dirty not in [slot.ministack.pid for slot in small_pool.slots] and not psutil.pid_exists(
        dirty
    )


def test_an_old_lease_gives_nothing_back(small_pool: MiniStackPool) -> None:
    old = small_pool.acquire()
    small_pool.release(old)
    leases = [small_pool.acquire(), small_pool.acquire()]
    with pytest.raises(ValueError, match="not leased"):
        small_pool.release(old)
    assert small_pool.free_count == 0 and small_pool.metrics()["leased"] == 2
    for lease in leases:
        small_pool.release(lease)


def test_leftovers_are_seen(slot: Slot) -> None:
    assert slot.ministack.leftovers() == ""
    slot.executor.run("aws s3 mb s3://left-behind")
    slot.executor.run(
        "aws dynamodb create-table --table-name left-table --billing-mode PAY_PER_REQUEST "
        "--attribute-definitions AttributeName=k,AttributeType=S "
        "--key-schema AttributeName=k,KeyType=HASH"
    )
    assert slot.ministack.leftovers() == "left-behind, left-table"


def test_metrics_know_every_state(small_pool: MiniStackPool, slot: Slot) -> None:
    figures = small_pool.metrics()
    states = ("starting", "free", "leased", "scrubbing", "unhealthy", "respawning")
    assert [figures[state] for state in states] == [0, 1, 1, 0, 0, 0]
    before = figures["scrubs"]
    small_pool.release(slot)
    assert (
        small_pool.metrics()["scrubs"] == before + 1 and small_pool.metrics()["scrub_seconds"] > 0
    )


def test_a_record_is_the_same_however_its_name_is_spelt(slot: Slot) -> None:
    """As with AWS: an agent that spells a name otherwise changes the record and makes no second
    one."""
    zone = slot.state.call(
        "route53", "CreateHostedZone", {"Name": "Shop.example", "CallerReference": "1"}
    )["HostedZone"]
    assert zone["Name"] == "shop.example."
    for name, address in (("www.shop.example", "192.0.2.1"), ("WWW.Shop.example", "192.0.2.2")):
        record = {"Name": name, "Type": "A", "TTL": 60, "ResourceRecords": [{"Value": address}]}
        changes = {"Changes": [{"Action": "UPSERT", "ResourceRecordSet": record}]}
        slot.state.call(
            "route53",
            "ChangeResourceRecordSets",
            {"HostedZoneId": zone["Id"], "ChangeBatch": changes},
        )
    records = slot.state.call("route53", "ListResourceRecordSets", {"HostedZoneId": zone["Id"]})[
        "ResourceRecordSets"
    ]
    found = [(one["Name"], one["ResourceRecords"]) for one in records if one["Type"] == "A"]
    assert found == [("www.shop.example.", [{"Value": "192.0.2.2"}])]
