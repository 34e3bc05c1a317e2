"""Workers get their GPUs from the launcher; what cannot be is refused with the numbers."""

import json
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest

from realhf.api.config import AllocationConfig, ConfigError
from realhf.launch import allocation
from realhf.launch.__main__ import main
from realhf.launch.allocation import (
    GIB,
    KEY_VALUES,
    MemoryNeed,
    allocate,
    check_offload,
    estimate_needs,
    find_shortages,
    format_estimate,
)
from realhf.launch.build import build_experiment
from realhf.launch.compose import compose_config
from realhf.launch.plugins import load_scheduler, read_scheduler_options
from realhf.scheduler.base import WorkerExit, WorkerSpec
from realhf.scheduler.gpus import VISIBLE
from realhf.scheduler.local import LocalScheduler
from realhf.scheduler.machine import NO_GPUS, Gpu, Machine


def single(assigned):
    """The GPU of each worker, each of which has one."""
    assert all(len(gpus) == 1 for gpus in assigned.values())
    return {name: gpus[0] for name, gpus in assigned.items()}


def spec_of(*arguments):
    return build_experiment(compose_config(["experiment=grpo_aws_async", *arguments])).spec


@pytest.mark.slow
def test_each_worker_that_computes_gets_one():
    spec = spec_of(
        "actor.workers=[0,1]",
        "actor.backend=ddp",
        "async_rl.n_generation_workers=2",
        "ref.workers=[0]",
    )
    workers = ["model_worker/0", "model_worker/1", "generation/0", "generation/1"]
    assert allocate(spec, AllocationConfig(), 0) == {}
    apart = single(allocate(spec, AllocationConfig(gpus=[3, 2, 1, 0]), 4))
    assert apart == dict(zip(workers, [3, 2, 1, 0], strict=True))
    beside = single(allocate(spec, AllocationConfig(gpus=[1, 2], share=True), 4))
    assert beside == dict(zip(workers, [1, 2, 1, 2], strict=True))


@pytest.mark.slow
def test_workers_that_train_together_get_different_gpus_though_none_are_named():
    spec = spec_of("actor.workers=[0,1]", "actor.backend=ddp", "async_rl.n_generation_workers=1")
    assert single(allocate(spec, AllocationConfig(), 3)) == {
        "model_worker/0": 0,
        "model_worker/1": 1,
        "generation/0": 2,
    }
    with pytest.raises(
        ConfigError,
        match=r"allocation.gpus=\[\]: actor trains on 2 .* need 3 GPUs, 2 are visible here",
    ):
        allocate(spec, AllocationConfig(), 2)
    assert allocate(spec_of(), AllocationConfig(), 1) == {}, "a role on one worker takes the first"


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("there", "gpus"),
    [(2, (0, 1, 0, 1, 0)), (3, (0, 1, 2, 2, 2)), (4, (0, 1, 2, 3, 2)), (8, (0, 1, 2, 3, 4))],
)
def test_roles_are_dealt_out_though_none_are_named(there, gpus):
    """All of them used to take GPU 0 while the others of the machine stood by."""
    spec = spec_of("actor.workers=[0]", "ref.workers=[1]", "async_rl.n_generation_workers=3")
    workers = ("model_worker/0", "model_worker/1", *(f"generation/{number}" for number in range(3)))
    assert single(allocate(spec, AllocationConfig(), there)) == dict(
        zip(workers, gpus, strict=True)
    )
    on_cpu = {
        name: replace(model, backend_args={"device": "cpu"}) for name, model in spec.models.items()
    }
    assert allocate(replace(spec, models=on_cpu), AllocationConfig(), there) == {}


@pytest.mark.slow
def test_workers_on_other_hosts_have_the_gpus_of_those():
    several = (
        "actor.workers=[0,1]",
        "actor.backend=ddp",
        "network.bind=10.0.0.1",
        "network.trusted=true",
    )
    joined = (*several, "scheduler=join", "scheduler.hosts=[beta]")
    spec = spec_of(*joined)

    def given(*options, there):
        scheduler = compose_config(
            ["experiment=grpo_aws_async", *joined, *options]
        ).config.scheduler
        elsewhere = load_scheduler("join").elsewhere
        assert elsewhere is not None
        options_of = read_scheduler_options(scheduler)
        return single(allocate(spec, AllocationConfig(), there, partial(elsewhere, options_of)))

    assert given("scheduler.placement={model_worker/1:beta}", there=1) == {"model_worker/0": 0}, (
        "generation has beta's"
    )
    assert given("scheduler.placement={model_worker:beta}", there=1) == {}
    here = given("scheduler.placement={generation:launcher}", there=3)
    assert here == {"model_worker/0": 0, "model_worker/1": 1, "generation/0": 2}
    with pytest.raises(ConfigError, match=r"2 model worker.* need 2 GPUs, 1 are visible here"):
        given(there=1)


@pytest.mark.slow
def test_a_server_on_several_gpus_has_them_to_itself_if_there_are_enough():
    """Beside a trainer of one GPU, and beside a trainer of several, of which it used to be
    refused."""
    tensor_parallel = ("engine.name=vllm", "engine.tensor_parallel_size=2")
    spec = spec_of(*tensor_parallel)
    names = ("model_worker/0", "generation/0")
    assert allocate(spec, AllocationConfig(), 2) == {}, "every worker sees all of them"
    assert allocate(spec, AllocationConfig(), 4) == dict(zip(names, ((0,), (1, 2)), strict=True))
    named = allocate(spec, AllocationConfig(gpus=[3, 0, 2]), 4)
    assert named == dict(zip(names, ((3,), (0, 2)), strict=True))
    several = ("actor.workers=[0,1]", "actor.backend=fsdp2", "async_rl.n_generation_workers=2")
    spec = spec_of(*tensor_parallel, *several)
    names = ("model_worker/0", "model_worker/1", "generation/0", "generation/1")
    gpus = ((0,), (1,), (2, 3), (4, 5))
    assert allocate(spec, AllocationConfig(), 8) == dict(zip(names, gpus, strict=True))
    with pytest.raises(ConfigError, match="2 vLLM servers would share GPU 6, and each takes what"):
        allocate(spec, AllocationConfig(gpus=[6, 7], share=True), 8)
    spec = spec_of(*tensor_parallel, *several, "engine.gpu_memory_utilization=0.3")
    shared = allocate(spec, AllocationConfig(gpus=[6, 7], share=True), 8)
    assert shared == dict(zip(names, ((6,), (7,), (6, 7), (6, 7)), strict=True))


@pytest.mark.slow
def test_a_server_on_more_gpus_than_there_are_is_refused_with_the_numbers():
    sized = lambda size, *more: spec_of(
        "engine.name=vllm", f"engine.tensor_parallel_size={size}", *more
    )
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel_size=4: .* 2 are visible"):
        allocate(sized(4), AllocationConfig(), 2)
    with pytest.raises(ConfigError, match=r"1 generation worker\(s\) \(of 2 GPUs each.* need 3"):
        allocate(sized(2), AllocationConfig(gpus=[0, 1]), 4)
    with pytest.raises(ConfigError, match=r"leaves it the 1 of training"):
        allocate(sized(2), AllocationConfig(gpus=[0], share=True), 4)
    two = ("actor.workers=[0,1]", "actor.backend=ddp")
    with pytest.raises(ConfigError, match=r"of 2 GPUs each.* need 4 GPUs, 3 are visible here"):
        allocate(sized(2, *two), AllocationConfig(), 3)
    assert allocate(sized(2), AllocationConfig(), 0) == {}, "a CPU has no such limit"
    with pytest.raises(ConfigError, match=r"sees one GPU with a scheduler of several hosts"):
        allocate(sized(2), AllocationConfig(gpus=[0, 1, 2]), 4, lambda name: name == "nowhere")


@pytest.mark.slow
def test_too_few_are_refused_with_the_numbers():
    spec = spec_of()
    with pytest.raises(
        ConfigError,
        match=r"1 model worker\(s\) and 1 generation worker\(s\) need 2 GPUs, 1 are named",
    ):
        allocate(spec, AllocationConfig(gpus=[0]), 4)
    with pytest.raises(ConfigError, match=r"4 GPUs are visible here .*, so there is no number 7"):
        allocate(spec, AllocationConfig(gpus=[0, 7]), 4)
    with pytest.raises(ConfigError, match="0 GPUs are visible here"):
        allocate(spec, AllocationConfig(gpus=[0, 1]), 0)
    assert list(AllocationConfig(gpus=[1, 1]).problems("allocation")) == [
        "allocation.gpus=[1, 1]: give different GPUs"
    ]
    assert list(AllocationConfig(share=True).problems("allocation")) == [
        "allocation.share: has no effect without allocation.gpus"
    ]


@pytest.mark.parametrize(("inherited", "own"), [(None, "3"), ("4,5,6, GPU-7", "GPU-7")])
def test_a_worker_sees_its_own_gpu_only(tmp_path, monkeypatch, inherited, own):
    monkeypatch.delenv(VISIBLE, raising=False)
    if inherited is not None:
        monkeypatch.setenv(VISIBLE, inherited)
    scheduler = LocalScheduler()
    log = tmp_path / "log"
    scheduler.start(WorkerSpec("w", "tests.launch.says_gpu", (), log, gpu=3))
    try:
        end = time.monotonic() + 60
        while not any(isinstance(event, WorkerExit) for event in scheduler.wait(1.0)):
            assert time.monotonic() < end
    finally:
        scheduler.stop()
    assert log.read_text() == f"{VISIBLE}={own}\n"


def built(*options, machine=NO_GPUS):
    arguments = ["experiment=ppo", "env=countdown", *options]
    return build_experiment(compose_config(arguments, machine=machine)).spec


@pytest.mark.nightly
@pytest.mark.slow
def test_without_a_gpu_it_is_refused_for_every_role_and_with_one_only_where_it_cannot_be():
    for option in (
        "actor.optimizer.offload",
        "critic.optimizer.offload",
        "warm_start.optimizer.offload",
    ):
        with pytest.raises(ConfigError, match=r"optimizer.offload=true: has no effect on the CPU"):
            built(f"{option}=true")
    spec = built("actor.optimizer.offload=true", machine=Machine((Gpu(),)))
    assert spec.models["actor"].optimizer is not None and spec.models["actor"].optimizer.offload
    with pytest.raises(ConfigError, match="0 GPUs are visible"):
        check_offload(spec, gpu_count=0)
    cut = built("actor.backend=fsdp2", "actor.workers=[0,1]").models["actor"]
    assert cut.optimizer is not None
    offloads = replace(cut, optimizer=replace(cut.optimizer, offload=True))
    with pytest.raises(ConfigError, match="backend fsdp2 cuts moments over workers"):
        check_offload(replace(spec, models={"actor": offloads}), gpu_count=1)


LARGE = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
LARGE |= {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
PARAMETERS = 4.02e9
"""Of Qwen3-4B, whose configuration that is."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **LARGE}))
    return tmp_path


def needs(*arguments, gpus=None, there=0):
    composed = compose_config(arguments)
    built = build_experiment(composed)
    return {
        (need.process, need.role): need
        for need in estimate_needs(built.spec, built.config, gpus or {}, there)
    }


@pytest.mark.slow
def test_each_process_has_a_plan_by_role(folder):
    given = (
        "experiment=grpo_aws_async",
        f"actor.path={folder}",
        "actor.dtype=bfloat16",
        "rollout.max_total_tokens=1000",
    )
    found = needs(
        *given, "env.pool_size=10", gpus={"model_worker/0": 0, "generation/0": 1}, there=2
    )
    assert {key: need.device for key, need in found.items()} == {
        ("model_worker/0", "actor"): 0,
        ("model_worker/0", "ref"): 0,
        ("generation/0", "actor"): 1,
        ("published by model_worker/0", "actor"): None,
    }
    published = found["published by model_worker/0", "actor"]
    assert published.total == pytest.approx(3 * 2 * PARAMETERS, rel=0.01), "three versions"
    trainer = found["model_worker/0", "actor"].bytes or {}
    each = {"weights": 2, "masters": 4, "gradients": 4, "moments": 8}
    assert {part: trainer[part] for part in each} == pytest.approx(
        {part: nbytes * PARAMETERS for part, nbytes in each.items()}, rel=0.01
    )
    assert trainer["activations"] > GIB and trainer[KEY_VALUES] == 0
    assert (found["model_worker/0", "ref"].bytes or {})["weights"] == pytest.approx(
        2 * PARAMETERS, rel=0.01
    )
    tokens = (found["generation/0", "actor"].bytes or {})[KEY_VALUES]
    assert tokens == 10 * 1000 * 2 * 36 * 8 * 128 * 2, (
        "ten episodes of 1,000 tokens, keys and values, 36 layers, bf16"
    )
    adapters = needs(*given, "actor.lora.rank=16")
    assert adapters["model_worker/0", "actor"].total < found["model_worker/0", "actor"].total / 2
    shared = adapters["model_worker/0", "ref"].bytes or {}
    assert shared["weights"] == 0, "it is the actor without its adapters"
    assert {need.device for need in adapters.values()} == {None}


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_told_at_the_check(folder, monkeypatch, capsys):
    """A model too large used to end as 'killed by SIGKILL', after minutes."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text("{}")
    free = {None: 8 * GIB}
    monkeypatch.setattr("realhf.launch.build.free_bytes", lambda there: free)
    arguments = [
        "experiment=grpo_aws",
        f"actor.path={folder}",
        f"fileroot={folder / 'runs'}",
        "mode=check",
    ]
    assert main(arguments) == 0
    said, warned = capsys.readouterr()
    assert "model_worker/0 actor (host): 15 " in said and ", 8.00 free" in said
    assert (
        "this machine has 8.0 GiB free, and this run is estimated to take" in warned
        and "actor.lora.rank" in warned
    )
    assert main(["experiment=grpo_aws", "mode=check", f"fileroot={folder / 'runs'}"]) == 0
    assert not capsys.readouterr().err


def test_what_is_not_known_is_said():
    unknown = MemoryNeed("model_worker/0", "actor", "owner/name", None, None)
    lines = [*format_estimate([unknown], {})]
    assert (
        "the size of owner/name is not known" in lines[1] and [*find_shortages([unknown], {})] == []
    )
    assert [*format_estimate([], {})] == []


def test_free_memory_is_that_of_the_container(monkeypatch):
    for left, free in ((1 << 20, 1 << 20), (1 << 62, psutil.virtual_memory().total), (None, None)):
        monkeypatch.setattr(allocation, "memory_left", lambda left=left: left)
        assert (
            0
            < (allocation.free_bytes(NO_GPUS)[None] or 0)
            <= (free or psutil.virtual_memory().total)
        )
