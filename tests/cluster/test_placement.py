"""Which host a worker gets, and what is said when none fits."""

from __future__ import annotations

from typing import Any

import pytest

from realhf.api.config import ConfigError
from realhf.cluster.options import ClusterOptions, placement_problems
from realhf.cluster.placement import LAUNCHER, ClusterError, Place, capacity, choose, gpu_of, wished
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config


def place(name: str, *workers: str, cores: int = 8, gpus: int = 0, shared: bool = True) -> Place:
    taken = iter(range(gpus))
    has_gpu = ("generation", "model_worker")
    return Place(
        name,
        cores,
        gpus,
        shared,
        {worker: next(taken, None) if worker.startswith(has_gpu) else None for worker in workers},
    )


def test_players_go_to_the_host_with_the_fewest_workers_for_its_cores_and_not_to_the_launcher():
    places = [place(LAUNCHER), place("b", "env/0", cores=2), place("c", "env/1", "env/2", cores=16)]
    assert choose("rollout_worker/0", places).name == "c"
    assert choose("rollout_worker/0", places[:1]).name == LAUNCHER


def test_the_trainer_stays_with_its_checkpoints_unless_another_host_has_more_gpus():
    assert choose("model_worker/0", [place(LAUNCHER), place("b")]).name == LAUNCHER
    assert choose("model_worker/0", [place(LAUNCHER), place("b", gpus=2)]).name == "b"
    assert choose("model_worker/0", [place(LAUNCHER), place("b", gpus=2, shared=False)]).name == LAUNCHER


def test_trainers_of_one_run_share_a_host_and_each_has_a_gpu():
    places = [place(LAUNCHER), place("b", "model_worker/0", gpus=2), place("c", gpus=8)]
    found = choose("model_worker/1", places)
    assert (found.name, gpu_of("model_worker/1", found)) == ("b", 1)
    full = place("b", "model_worker/0", "generation/0", gpus=2)
    with pytest.raises(ClusterError, match="GPU of its own on b, which has 2, all taken by generation/0, model_worker"):
        gpu_of("model_worker/1", full)


def test_engines_take_free_gpus_first_and_then_share():
    places = [place(LAUNCHER), place("b", "model_worker/0", gpus=1), place("c", "generation/0", gpus=2)]
    found = choose("generation/1", places)
    assert (found.name, gpu_of("generation/1", found)) == ("c", 1)
    assert gpu_of("generation/2", place("b", "model_worker/0", gpus=1)) == 0
    assert gpu_of("rollout_worker/0", places[2]) is None


def test_a_placement_names_workers_by_name_kind_or_pattern():
    placement = {"generation/1": "c", "generation": "b", "roll*": "d"}
    names = ("generation/1", "generation/2", "rollout_worker/0", "env/0")
    assert [wished(name, placement) for name in names] == ["c", "b", "d", ""]


def test_a_host_that_is_not_there_is_named_or_at_a_restart_replaced():
    places = [place(LAUNCHER), place("b")]
    with pytest.raises(ClusterError, match=r"generation/0: there is no host 'x' .*only launcher, b"):
        choose("generation/0", places, "x")
    assert choose("generation/0", places, "x", strict=False).name == "b"


def test_a_trainer_on_a_host_without_the_run_folder_is_refused():
    places = [place(LAUNCHER), place("b", shared=False)]
    with pytest.raises(ClusterError, match=r"model_worker/0 cannot run on b: it writes checkpoints .*fileroot"):
        choose("model_worker/0", places, "b")


def test_capacity_is_said_by_host():
    text = capacity([place(LAUNCHER, cores=2), place("b", "model_worker/0", gpus=2)])
    assert text == "launcher: 2 cores, 0 of 0 GPUs free, 0 workers; b: 8 cores, 1 of 2 GPUs free, 1 workers"


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
        ({"placement": {"generation": "../b"}}, "scheduler.placement.generation=../b: no host can have this name"),
    ],
)
def test_names_that_no_host_can_have_are_refused_and_not_waited_for(options: dict[str, Any], said: str):
    (problem,) = ClusterOptions(**options).problems("scheduler")
    assert problem.startswith(said)


def test_a_placement_of_workers_that_the_run_does_not_have_is_refused():
    """It would have no effect, and the worker would run where nobody wants it."""
    workers = ("master", "generation/0", "rollout_worker/0", "model_worker/0")
    fine = ClusterOptions(
        placement={"generation": "b", "generation/7": "c", "roll*": "d", "model_worker/0": "launcher"}
    )
    assert not [*placement_problems(fine, workers)]
    wrong = ClusterOptions(placement={"generatoin": "b", "generation": "b", "play*": "c"})
    first, second = placement_problems(wrong, workers)
    assert first.startswith("placement.generatoin: this run has no such worker; did you mean 'generation'?")
    assert second.startswith("placement.play*: this run has no such worker (known: generation, master, ")


@pytest.mark.slow
def test_such_a_placement_ends_the_launch_before_anything_starts():
    options = ["experiment=grpo_async", "env=sql", "scheduler=join", "network.bind=127.0.0.1"]
    with pytest.raises(ConfigError, match=r"scheduler\.placement\.generatoin: this run has no such worker"):
        build_experiment(compose_config([*options, "scheduler.placement.generatoin=b"]))
    build_experiment(compose_config([*options, "scheduler.placement.generation=b"]))
