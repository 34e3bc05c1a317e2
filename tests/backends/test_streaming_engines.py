"""How a generation engine is started on a GPU, and beside a trainer."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realhf.api.config import AsyncConfig, EngineConfig, LoraConfig, OptimizerConfig
from realhf.api.experiment import ModelSpec
from realhf.backends.streaming_engines import compute_cache_bytes, server_options
from realhf.backends.vllm.server import _build_command, _build_environment
from realhf.transport.network import Network

SPEC = ModelSpec(
    "actor",
    "org/model",
    engine=EngineConfig(name="vllm", max_model_len=640, tensor_parallel_size=2),
)


def flags(spec: ModelSpec, shared: bool) -> list[str]:
    return list(_build_command("vllm", spec.path, 1, server_options(spec, AsyncConfig(), shared)))


def test_a_server_on_a_gpu_has_what_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = flags(SPEC, shared=True)
    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= {*on_cpu}
    assert "--weight-transfer-config" not in on_cpu and "--gpu-memory-utilization" not in on_cpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 << 30, 8 << 30))
    on_gpu = flags(SPEC, shared=False)
    assert not {"--enforce-eager", "--no-enable-chunked-prefill"} & {*on_gpu}
    after = dict(itertools.pairwise(on_gpu))
    assert (
        after["--weight-transfer-config"] == '{"backend": "ipc"}'
        and "--enable-prefix-caching" in on_gpu
    )
    assert after["--max-model-len"] == "640" and after["--tensor-parallel-size"] == "2"
    assert "--gpu-memory-utilization" not in on_gpu, (
        "vLLM's own choice, where it has the GPU for itself"
    )
    beside = dict(itertools.pairwise(flags(SPEC, shared=True)))
    assert beside["--kv-cache-memory-bytes"] == str(5 << 27), (
        "a quarter of half of what is free, where that is little"
    )
    assert beside["--gpu-memory-utilization"] == "0.01", (
        "vLLM does not start unless this share is free, and ignores it otherwise"
    )
    asked = replace(SPEC, engine=replace(SPEC.engine, gpu_memory_utilization=0.7))
    assert dict(itertools.pairwise(flags(asked, shared=True)))["--gpu-memory-utilization"] == "0.7"
    assert "--kv-cache-memory-bytes" not in flags(asked, shared=True)


def test_a_cache_beside_a_trainer_leaves_the_server_what_it_computes_with() -> None:
    unknown = replace(SPEC, engine=replace(SPEC.engine, tensor_parallel_size=1))
    assert compute_cache_bytes(unknown, 60 << 30, 80 << 30) == 27 << 30
    assert compute_cache_bytes(unknown, 4 << 30, 80 << 30) == 1 << 29


def test_logits_of_a_bf16_server_are_fp32_like_the_trainers() -> None:
    narrow = dict(itertools.pairwise(flags(replace(SPEC, dtype="bfloat16"), shared=False)))
    assert json.loads(narrow["--hf-overrides"]) == {"head_dtype": "float32"}
    assert "--hf-overrides" not in flags(SPEC, shared=False), "they are in fp32 anyway"


@pytest.mark.parametrize(("runner", "variable"), [("auto", None), ("v1", "0"), ("v2", "1")])
def test_the_runner_is_that_of_the_option(
    runner: str, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    spec = replace(SPEC, engine=replace(SPEC.engine, vllm_runner=runner))
    environment = _build_environment(server_options(spec, AsyncConfig(), False), tmp_path)
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == variable


def test_nccl_listens_on_the_loopback_of_one_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It authenticates nobody, and prefers an interface to other machines."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    options = server_options(SPEC, AsyncConfig(), False)
    assert _build_environment(options, tmp_path)["NCCL_SOCKET_IFNAME"] == "=lo"
    over = _build_environment(replace(options, interface="eth1"), tmp_path)
    assert over["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert Network().interface == "lo"


def test_a_server_leaves_a_trainer_what_its_first_update_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to take half of what was free before gradients and moments were there: a model of 3.1
    billion parameters on 79 GiB ended at its first update. In what order the two start makes no
    difference."""
    described = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
    }
    described |= {"num_key_value_heads": 2, "intermediate_size": 11008, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    engine = EngineConfig(name="vllm")
    spec = ModelSpec(
        "actor",
        str(tmp_path),
        trainable=True,
        dtype="bfloat16",
        engine=engine,
        optimizer=OptimizerConfig(),
    )
    total = 79 << 30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def share(spec: ModelSpec, free: float) -> float:
        """The share of the GPU that the server's weights, KV cache and computations take."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), total))
        options = server_options(spec, AsyncConfig(), shared=True)
        if options.kv_cache_bytes is None:
            return options.gpu_memory_utilization or 0.0
        return (options.kv_cache_bytes + 2 * 3.086e9 + (3 << 30)) / total

    weights = 6 * 3.086e9
    later = 12 * 3.086e9
    wanted = (total - weights - later) / 2 / total
    for free in (total, total - weights):
        assert wanted - 0.011 < share(spec, free) <= wanted + 0.001
    offloaded = replace(spec, optimizer=OptimizerConfig(offload=True))
    assert share(offloaded, total) > share(spec, total) + 0.1
    assert share(replace(spec, lora=LoraConfig(rank=16)), total) > 0.44
    asked = replace(spec, engine=replace(engine, gpu_memory_utilization=0.7))
    assert share(asked, total) == 0.7
    total = 60 << 30
    with pytest.raises(
        RuntimeError,
        match=r"vLLM does not fit next to the trainer of actor .*engine\.gpu_memory_utiliz",
    ):
        share(spec, total)
    assert share(asked, total) == 0.7, "who says it takes the blame"


def test_an_option_of_another_engine_is_refused() -> None:
    problems = lambda **options: list(EngineConfig(**options).problems("engine"))
    assert problems(kv_cache_gib=1.0) == [] == problems(name="vllm", tensor_parallel_size=2)
    assert problems(name="vllm", kv_cache_gib=1.0) == [
        "engine.kv_cache_gib: has no effect with engine.name=vllm"
    ]
    assert problems(max_model_len=9) == [
        "engine.max_model_len: has no effect with engine.name=embedded"
    ]
    url = {"name": "vllm", "vllm_url": "http://127.0.0.1:8000"}
    assert problems(**url) == []
    assert problems(**url, max_model_len=9) == [
        f"engine.max_model_len: has no effect with engine.vllm_url={url['vllm_url']}"
    ]
    assert problems(**url, kv_cache_gib=1.0) == [
        "engine.kv_cache_gib: has no effect with engine.name=vllm"
    ]
