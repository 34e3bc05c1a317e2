"""Workers get their GPUs from the launcher; what cannot be is refused with the numbers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from realhf.api.config import AllocationConfig, ConfigError
from realhf.launch.allocation import allocate
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.local import LocalScheduler


def spec_of(*arguments: str):
    return build_experiment(compose_config(["experiment=grpo_aws_async", *arguments])).spec


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)
    return tmp_path / "gpus"


def test_each_worker_that_computes_gets_one(driver: Path):
    spec = spec_of("actor.workers=[0,1]", "actor.backend=ddp", "async_rl.n_generation_workers=2", "ref.workers=[0]")
    workers = ["model_worker/0", "model_worker/1", "generation/0", "generation/1"]
    assert allocate(spec, AllocationConfig(), driver) == {}
    apart = allocate(spec, AllocationConfig(gpus=[3, 2, 1, 0]), driver)
    assert apart == dict(zip(workers, [3, 2, 1, 0], strict=True))
    beside = allocate(spec, AllocationConfig(gpus=[1, 2], share=True), driver)
    assert beside == dict(zip(workers, [1, 2, 1, 2], strict=True))


def test_too_few_are_refused_with_the_numbers(driver: Path):
    spec = spec_of()
    with pytest.raises(ConfigError, match=r"1 model worker\(s\) and 1 generation worker\(s\) need 2 GPUs, 1 are named"):
        allocate(spec, AllocationConfig(gpus=[0]), driver)
    with pytest.raises(ConfigError, match="this machine has 4 GPUs, so no number 7"):
        allocate(spec, AllocationConfig(gpus=[0, 7]), driver)
    with pytest.raises(ConfigError, match="this machine has 0 GPUs"):
        allocate(spec, AllocationConfig(gpus=[0, 1]), driver / "nothing")
    assert list(AllocationConfig(gpus=[1, 1]).problems("allocation")) == ["allocation.gpus=[1, 1]: give different GPUs"]
    assert list(AllocationConfig(share=True).problems("allocation")) == [
        "allocation.share: has no effect without allocation.gpus"
    ]


def test_a_worker_sees_its_own_gpu_only(tmp_path: Path):
    scheduler, log = LocalScheduler(), tmp_path / "log"
    scheduler.start(WorkerSpec("w", "tests.launch.says_gpu", (), log, gpu=3))
    try:
        end = time.monotonic() + 60
        while not any(isinstance(event, WorkerExit) for event in scheduler.wait(1.0)):
            assert time.monotonic() < end
    finally:
        scheduler.stop()
    assert log.read_text() == "CUDA_VISIBLE_DEVICES=3\n"
