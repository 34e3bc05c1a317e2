"""Workers get their GPUs from the launcher; what cannot be is refused with the numbers."""

import time
from dataclasses import replace
from functools import partial

import pytest

from realhf.api.config import AllocationConfig, ConfigError
from realhf.launch.allocation import allocate
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.plugins import definition_of, options_of
from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.gpus import VISIBLE
from realhf.scheduler.local import LocalScheduler


def spec_of(*arguments):
    return build_experiment(compose_config(["experiment=grpo_aws_async", *arguments])).spec


def test_each_worker_that_computes_gets_one():
    spec = spec_of("actor.workers=[0,1]", "actor.backend=ddp", "async_rl.n_generation_workers=2", "ref.workers=[0]")
    workers = ["model_worker/0", "model_worker/1", "generation/0", "generation/1"]
    assert allocate(spec, AllocationConfig(), 0) == {}
    apart = allocate(spec, AllocationConfig(gpus=[3, 2, 1, 0]), 4)
    assert apart == dict(zip(workers, [3, 2, 1, 0], strict=True))
    beside = allocate(spec, AllocationConfig(gpus=[1, 2], share=True), 4)
    assert beside == dict(zip(workers, [1, 2, 1, 2], strict=True))


def test_workers_that_train_together_get_different_gpus_though_none_are_named():
    spec = spec_of("actor.workers=[0,1]", "actor.backend=ddp", "async_rl.n_generation_workers=1")
    assert allocate(spec, AllocationConfig(), 3) == {"model_worker/0": 0, "model_worker/1": 1, "generation/0": 2}
    with pytest.raises(
        ConfigError, match=r"allocation.gpus=\[\]: actor trains on 2 .* need 3 GPUs, 2 are visible here"
    ):
        allocate(spec, AllocationConfig(), 2)
    assert allocate(spec_of(), AllocationConfig(), 1) == {}, "a role on one worker takes the first"


@pytest.mark.parametrize(
    ("there", "gpus"), [(2, (0, 1, 0, 1, 0)), (3, (0, 1, 2, 2, 2)), (4, (0, 1, 2, 3, 2)), (8, (0, 1, 2, 3, 4))]
)
def test_roles_are_dealt_out_though_none_are_named(there, gpus):
    """All of them used to take GPU 0 while the others of the machine stood by."""
    spec = spec_of("actor.workers=[0]", "ref.workers=[1]", "async_rl.n_generation_workers=3")
    workers = ("model_worker/0", "model_worker/1", *(f"generation/{number}" for number in range(3)))
    assert allocate(spec, AllocationConfig(), there) == dict(zip(workers, gpus, strict=True))
    on_cpu = {name: replace(model, backend_args={"device": "cpu"}) for name, model in spec.models.items()}
    assert allocate(replace(spec, models=on_cpu), AllocationConfig(), there) == {}


def test_workers_on_other_hosts_have_the_gpus_of_those():
    several = ("actor.workers=[0,1]", "actor.backend=ddp", "network.bind=10.0.0.1", "network.trusted=true")
    joined = (*several, "scheduler=join", "scheduler.hosts=[beta]")
    spec = spec_of(*joined)

    def given(*options, there):
        scheduler = compose_config(["experiment=grpo_aws_async", *joined, *options]).config.scheduler
        elsewhere = definition_of("join").elsewhere
        assert elsewhere is not None
        return allocate(spec, AllocationConfig(), there, partial(elsewhere, options_of(scheduler)))

    assert given("scheduler.placement={model_worker/1:beta}", there=1) == {"model_worker/0": 0}, "generation has beta's"
    assert given("scheduler.placement={model_worker:beta}", there=1) == {}
    here = given("scheduler.placement={generation:launcher}", there=3)
    assert here == {"model_worker/0": 0, "model_worker/1": 1, "generation/0": 2}
    with pytest.raises(ConfigError, match=r"2 model worker.* need 2 GPUs, 1 are visible here"):
        given(there=1)


def test_a_server_on_several_gpus_does_not_fit_workers_that_see_one():
    spec = spec_of("engine.name=vllm", "engine.tensor_parallel_size=2")
    assert allocate(spec, AllocationConfig(), 4) == {}, "every worker sees all of them"
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel_size=2: each worker sees one GPU here"):
        allocate(spec, AllocationConfig(gpus=[0, 1]), 4)


def test_too_few_are_refused_with_the_numbers():
    spec = spec_of()
    with pytest.raises(ConfigError, match=r"1 model worker\(s\) and 1 generation worker\(s\) need 2 GPUs, 1 are named"):
        allocate(spec, AllocationConfig(gpus=[0]), 4)
    with pytest.raises(ConfigError, match=r"4 GPUs are visible here .*, so there is no number 7"):
        allocate(spec, AllocationConfig(gpus=[0, 7]), 4)
    with pytest.raises(ConfigError, match="0 GPUs are visible here"):
        allocate(spec, AllocationConfig(gpus=[0, 1]), 0)
    assert list(AllocationConfig(gpus=[1, 1]).problems("allocation")) == ["allocation.gpus=[1, 1]: give different GPUs"]
    assert list(AllocationConfig(share=True).problems("allocation")) == [
        "allocation.share: has no effect without allocation.gpus"
    ]


@pytest.mark.parametrize(("inherited", "own"), [(None, "3"), ("4,5,6, GPU-7", "GPU-7")])
def test_a_worker_sees_its_own_gpu_only(tmp_path, monkeypatch, inherited, own):
    monkeypatch.delenv(VISIBLE, raising=False)
    if inherited is not None:
        monkeypatch.setenv(VISIBLE, inherited)
    scheduler, log = LocalScheduler(), tmp_path / "log"
    scheduler.start(WorkerSpec("w", "tests.launch.says_gpu", (), log, gpu=3))
    try:
        end = time.monotonic() + 60
        while not any(isinstance(event, WorkerExit) for event in scheduler.wait(1.0)):
            assert time.monotonic() < end
    finally:
        scheduler.stop()
    assert log.read_text() == f"{VISIBLE}={own}\n"
