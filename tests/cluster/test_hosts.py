"""On which host a worker runs, and what the launcher knows of each host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api.config import ConfigError
from realhf.base import process_clock
from realhf.cluster import host_table, own_host
from realhf.cluster.control_endpoint import HostMessage
from realhf.cluster.file_transfer import TransferQueue
from realhf.cluster.host_table import HostTable, JoinedHost, RunningWorker
from realhf.cluster.messages import Exited, HostHello, NotStarted
from realhf.cluster.options import ClusterOptions, placement_problems
from realhf.cluster.own_host import describe_host
from realhf.cluster.placement import (
    LAUNCHER,
    CandidateHost,
    ClusterError,
    choose_gpu,
    choose_host,
    describe_capacity,
    find_placed_host,
)
from realhf.cluster.scheduler import ClusterScheduler
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.scheduler.base import Notice, WorkerSpec
from realhf.scheduler.gpus import VISIBLE, global_gpu_names
from tests.cluster.key_ring import ASYNCHRONOUS, log_of, run_folder


def place(
    name: str, *workers: str, cores: int = 8, gpus: int = 0, shared: bool = True
) -> CandidateHost:
    taken = iter(range(gpus))
    has_gpu = ("generation", "model_worker")
    return CandidateHost(
        name,
        cores,
        gpus,
        shared,
        {worker: next(taken, None) if worker.startswith(has_gpu) else None for worker in workers},
    )


def test_players_go_to_the_host_with_the_fewest_workers_for_its_cores_and_not_to_the_launcher():
    places = [place(LAUNCHER), place("b", "env/0", cores=2), place("c", "env/1", "env/2", cores=16)]
    assert choose_host("rollout_worker/0", places).name == "c"
    assert choose_host("rollout_worker/0", places[:1]).name == LAUNCHER


def test_the_trainer_stays_with_its_checkpoints_unless_another_host_has_more_gpus():
    assert choose_host("model_worker/0", [place(LAUNCHER), place("b")]).name == LAUNCHER
    assert choose_host("model_worker/0", [place(LAUNCHER), place("b", gpus=2)]).name == "b"
    assert (
        choose_host("model_worker/0", [place(LAUNCHER), place("b", gpus=2, shared=False)]).name
        == LAUNCHER
    )


def test_trainers_of_one_run_share_a_host_and_each_has_a_gpu():
    places = [place(LAUNCHER), place("b", "model_worker/0", gpus=2), place("c", gpus=8)]
    found = choose_host("model_worker/1", places)
    assert (found.name, choose_gpu("model_worker/1", found)) == ("b", 1)
    full = place("b", "model_worker/0", "generation/0", gpus=2)
    with pytest.raises(
        ClusterError,
        match="GPU of its own on b, which has 2, all used by generation/0, model_worker",
    ):
        choose_gpu("model_worker/1", full)


def test_engines_take_free_gpus_first_and_then_share():
    places = [
        place(LAUNCHER),
        place("b", "model_worker/0", gpus=1),
        place("c", "generation/0", gpus=2),
    ]
    found = choose_host("generation/1", places)
    assert (found.name, choose_gpu("generation/1", found)) == ("c", 1)
    assert choose_gpu("generation/2", place("b", "model_worker/0", gpus=1)) == 0
    assert choose_gpu("rollout_worker/0", places[2]) is None


def test_a_placement_names_workers_by_name_kind_or_pattern():
    placement = {"generation/1": "c", "generation": "b", "roll*": "d"}
    names = ("generation/1", "generation/2", "rollout_worker/0", "env/0")
    assert [find_placed_host(name, placement) for name in names] == ["c", "b", "d", ""]


def test_a_host_that_is_not_there_is_named_or_at_a_restart_replaced():
    places = [place(LAUNCHER), place("b")]
    with pytest.raises(
        ClusterError, match=r"generation/0: there is no host 'x' .*only launcher, b"
    ):
        choose_host("generation/0", places, "x")
    assert choose_host("generation/0", places, "x", strict=False).name == "b"


def test_a_trainer_on_a_host_without_the_run_folder_is_refused():
    places = [place(LAUNCHER), place("b", shared=False)]
    with pytest.raises(
        ClusterError, match=r"model_worker/0 cannot run on b: it writes checkpoints .*fileroot"
    ):
        choose_host("model_worker/0", places, "b")


def test_capacity_is_said_by_host():
    text = describe_capacity([place(LAUNCHER, cores=2), place("b", "model_worker/0", gpus=2)])
    assert (
        text
        == "launcher: 2 cores, 0 of 0 GPUs free, 0 workers; b: 8 cores, 1 of 2 GPUs free, 1 workers"
    )


@pytest.mark.parametrize("address", ["::1", "[::1]", "tcp://10.0.0.1", "10.0.0.1:7788"])
def test_a_door_is_at_an_address_without_port_that_is_not_of_ipv6(address: str):
    (problem,) = ClusterOptions(address=address).problems("scheduler")
    assert problem.startswith(f"scheduler.address={address}: give an IPv4 address or a host name")
    assert not [*ClusterOptions(address="host.example").problems("scheduler")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": ["a", "rack/b"]}, "scheduler.hosts: no host can have the name 'rack/b'"),
        ({"hosts": [LAUNCHER]}, "scheduler.hosts: no host can have the name 'launcher'"),
        (
            {"placement": {"generation": "../b"}},
            "scheduler.placement.generation=../b: no host can have this name",
        ),
    ],
)
def test_names_that_no_host_can_have_are_refused_and_not_waited_for(
    options: dict[str, Any], said: str
):
    (problem,) = ClusterOptions(**options).problems("scheduler")
    assert problem.startswith(said)


def test_a_placement_of_workers_that_the_run_does_not_have_is_refused():
    """It would have no effect, and the worker would run where nobody wants it."""
    workers = ("master", "generation/0", "rollout_worker/0", "model_worker/0")
    fine = ClusterOptions(
        placement={
            "generation": "b",
            "generation/7": "c",
            "roll*": "d",
            "model_worker/0": "launcher",
        }
    )
    assert not [*placement_problems(fine, workers)]
    wrong = ClusterOptions(placement={"generatoin": "b", "generation": "b", "play*": "c"})
    first, second = placement_problems(wrong, workers)
    assert first.startswith(
        "placement.generatoin: this run has no such worker; did you mean 'generation'?"
    )
    assert second.startswith(
        "placement.play*: this run has no such worker (known: generation, master, "
    )


@pytest.mark.slow
def test_such_a_placement_ends_the_launch_before_anything_starts():
    options = ["experiment=grpo_async", "env=sql", "scheduler=join", "network.bind=127.0.0.1"]
    with pytest.raises(
        ConfigError, match=r"scheduler\.placement\.generatoin: this run has no such worker"
    ):
        build_experiment(compose_config([*options, "scheduler.placement.generatoin=b"]))
    build_experiment(compose_config([*options, "scheduler.placement.generation=b"]))


DOOR = "tcp://127.0.0.1:1"
Sees = Callable[..., None]


@pytest.fixture
def sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sees:
    """Let this process see GPUs of a machine: so many or, in a container, some; all of these or the
    listed ones."""

    def put(gpus: int | Sequence[int], listed: str | None = None, machine: str = "here") -> None:
        driver = tmp_path / f"driver of {machine}, {gpus}"
        driver.mkdir(exist_ok=True)
        for number in range(gpus) if isinstance(gpus, int) else gpus:
            (driver / f"0000:0{number}:00.0").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(
            own_host, "global_gpu_names", lambda boot: global_gpu_names(boot, driver=driver)
        )
        monkeypatch.setattr(own_host, "boot_id", lambda: machine)
        monkeypatch.delenv(VISIBLE, raising=False)
        if listed is not None:
            monkeypatch.setenv(VISIBLE, listed)

    return put


def hello(name: str) -> HostHello:
    """What an agent of this process would register with."""
    return describe_host(name, DOOR, Path("/nowhere"), {})


class Bench:
    """A launcher's scheduler whose workers end at once, and hosts that have joined."""

    def __init__(self, folder: Path, *, asynchronous: bool = True, **options: object) -> None:
        self._run = run_folder(folder, ASYNCHRONOUS if asynchronous else None)
        given = {
            "address": "127.0.0.1",
            "port": 0,
            "key_file": str(folder / "key"),
            "min_hosts": 0,
            **options,
        }
        self.scheduler = ClusterScheduler(ClusterOptions(**given), say=lambda text: None)  # pyright: ignore
        self.table = self.scheduler._table  # pyright: ignore[reportPrivateUsage]
        self.start("master")

    def join(self, name: str) -> None:
        self.table.hosts[name] = JoinedHost(
            hello(name), TransferQueue(lambda kind, message: True), shared=True
        )

    def start(self, name: str, gpu: int | None = None) -> tuple[str, int | None]:
        """Start a worker; its host, and its GPU there."""
        self.scheduler.start(WorkerSpec(name, "platform", (), self.log(name), gpu=gpu))
        worker = self.table.workers[name]
        return worker.host, worker.gpu

    def log(self, name: str) -> Path:
        return log_of(self._run, name)

    def says(self, host: str, message: Exited | NotStarted) -> None:
        """Let a host say something."""
        self.scheduler._process_event(HostMessage(host, message))  # pyright: ignore[reportPrivateUsage]

    def told(self, name: str) -> str:
        """What a worker was told of its GPU."""
        return " ".join(self.table.workers[name].spec.argv)

    def notices(self) -> list[str]:
        return [event.text for event in self.scheduler.wait(0.0) if isinstance(event, Notice)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**given: object) -> Bench:
        made.append(Bench(tmp_path, **given))  # pyright: ignore
        return made[-1]

    yield make
    for each in made:
        each.table.hosts.clear()
        each.scheduler.stop(0.1)


def test_the_first_node_of_a_batch_job_deals_out_the_gpus_that_the_trainer_has_not(
    sees: Sees, bench: Callable[..., Bench]
):
    """The launcher's trainer and the agent's engine both got the first GPU of that node."""
    sees(2)
    run = bench()
    run.join("node-0")
    assert run.start("model_worker/0") == (LAUNCHER, 0)
    assert run.start("generation/0") == ("node-0", 1)
    assert run.told("generation/0") == "--beside-trainer no" and not run.told("model_worker/0")
    assert not run.notices()
    sees(2, machine="there")
    run.join("node-1")
    sees(2)
    assert [run.start(f"generation/{number}") for number in (1, 2)] == [
        ("node-1", 0),
        ("node-1", 1),
    ]


def test_a_gpu_that_was_given_by_hand_is_nobody_elses(sees: Sees, bench: Callable[..., Bench]):
    sees(4)
    run = bench()
    run.join("node-0")
    assert run.start("model_worker/0", gpu=2) == (LAUNCHER, 2)
    assert [run.start(f"generation/{number}")[1] for number in range(3)] == [0, 1, 3]


def test_a_trainer_leaves_to_an_agent_the_gpus_that_only_that_one_was_given(
    sees: Sees, bench: Callable[..., Bench]
):
    """Ray gives an actor single GPUs of the machine that the launcher is on."""
    run = bench()
    sees(4, "0")
    run.join("player-0")
    sees(4)
    assert run.start("model_worker/0") == (LAUNCHER, 1)
    assert run.start("generation/0") == ("player-0", 0)


def test_the_other_way_round_a_worker_of_the_launcher_takes_what_an_agent_has_not_dealt_out(
    sees: Sees, bench: Callable[..., Bench]
):
    run = bench(placement={"model_worker": "node-0", "generation": LAUNCHER})
    sees(2)
    run.join("node-0")
    assert run.start("model_worker/0") == ("node-0", 0)
    assert run.start("generation/0") == (LAUNCHER, 1)


def test_where_there_are_too_few_the_sharing_is_told(sees: Sees, bench: Callable[..., Bench]):
    run = bench()
    sees(1)
    run.join("node-0")
    assert [run.start("model_worker/0")[1], run.start("generation/0")[1]] == [0, 0]
    assert run.told("generation/0") == "--beside-trainer yes"
    (text,) = run.notices()
    assert text == "generation/0: GPU 0 of node-0 is also that of model_worker/0"


def test_without_an_agent_on_its_machine_the_launchers_workers_see_all_gpus(
    sees: Sees, bench: Callable[..., Bench]
):
    """As before: a synchronous trainer may compute on several of them."""
    run = bench()
    sees(2, machine="there")
    run.join("node-1")
    sees(2)
    assert run.start("model_worker/0") == (LAUNCHER, None)


def test_a_synchronous_trainer_sees_all_gpus(sees: Sees, bench: Callable[..., Bench]):
    run = bench(asynchronous=False)
    sees(2)
    run.join("node-0")
    assert run.start("model_worker/0") == (LAUNCHER, None)


def test_two_agents_of_one_machine_deal_out_its_gpus_once(sees: Sees):
    """One of them is in a container that has two of four GPUs, and counts them from 0."""
    table = HostTable()
    sees(4)
    table.hosts["a"] = JoinedHost(hello("a"), TransferQueue(lambda kind, message: True))
    sees([2, 3], "1,0")
    table.hosts["b"] = JoinedHost(hello("b"), TransferQueue(lambda kind, message: True))
    sees(0, machine="of the launcher")
    where: list[tuple[str, int | None]] = []
    for number in range(4):
        name = f"generation/{number}"
        place = choose_host(name, table.candidates())
        gpu = choose_gpu(name, place)
        table.workers[name] = RunningWorker(
            WorkerSpec(name, "m", (), Path("l")), place.name, process_clock.now(), gpu
        )
        where.append((place.name, gpu))
    assert sorted(where) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert all(not place.free_gpus for place in table.candidates())


def test_a_host_on_which_workers_fail_rests_and_others_get_them(bench: Callable[..., Bench]):
    """A host with a full disk got the same worker eight times in six seconds and ended the run,
    while a healthy one stood by."""
    run = bench()
    run.join("bad")
    run.join("good")
    spec = WorkerSpec("rollout_worker/0", "platform", (), Path("l"))
    hosts: list[str] = []
    for _ in range(4):
        host, _ = run.start("rollout_worker/0")
        hosts.append(host)
        if host == "bad":
            run.says("bad", NotStarted(spec.name, "No space left on device"))
        else:
            run.says("good", Exited(spec.name, 0, "l", 0, b""))
    assert hosts.count("bad") == 1, hosts
    (text,) = run.notices()
    assert text == (
        "host bad gets no workers for 15 s: rollout_worker/0 cannot be started there: No space "
        "left on device"
    )
    (line,) = [line for line in run.table.lines("door") if line.startswith("bad")]
    assert line.endswith("gets no workers for 15 s: " + text.partition("s: ")[2])


@pytest.mark.nightly
def test_quick_ends_count_for_a_host_and_long_lives_clear_it(
    bench: Callable[..., Bench], monkeypatch
):
    """Two ends in a row within seconds of the start let it rest, each time twice as long as before;
    a worker that has run for a while shows that the host is well. What it was counts on when the
    run begins again."""
    run = bench()
    run.join("a")
    now = process_clock.now()
    monkeypatch.setattr(host_table, "process_clock", SimpleNamespace(now=lambda: now))
    rests: list[float] = []
    for lived_s in (1, 1, 1, 1, 20, 1):
        run.start("rollout_worker/0")
        run.table.workers["rollout_worker/0"].since = now
        now += lived_s
        run.says("a", Exited("rollout_worker/0", 1, "l", 0, b""))
        rests.append(run.table.backoff_s("a"))
        now += rests[-1]
    assert rests == pytest.approx([0, 15, 30, 60, 0, 0])
    run.table.backoffs["a"].until = now + 5
    run.scheduler.stop(0.1)
    assert run.scheduler._table.backoff_s("a") == 5  # pyright: ignore[reportPrivateUsage]


def test_where_all_hosts_rest_a_worker_waits_for_the_first_that_has_rested(
    bench: Callable[..., Bench], monkeypatch
):
    """It does not go to the launcher's machine instead, and the run does not end over a burst of
    attempts."""
    run = bench()
    run.join("a")
    run.start("rollout_worker/0")
    run.says("a", NotStarted("rollout_worker/0", "No space left on device"))
    run.notices()
    spec = WorkerSpec("rollout_worker/0", "platform", (), run.log("rollout_worker/0"))
    run.scheduler.start(spec)
    with pytest.raises(ValueError, match="was started already"):
        run.scheduler.start(spec)
    run.scheduler.wait(0.0)
    assert "rollout_worker/0" not in run.table.workers
    run.table.backoffs["a"].until = 0.0
    run.scheduler.wait(0.0)
    assert run.table.workers["rollout_worker/0"].host == "a"
