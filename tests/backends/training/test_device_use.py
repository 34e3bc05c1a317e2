"""What a train call uses of its device."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness.gpu_figures import Shape, train_operations
from realhf.backends.training.device_use import DeviceUse, count_operations, peak_of
from realhf.backends.training.torch_backend import ValueModel
from realhf.dataflow.model_function_call import merge_stats
from realhf.monitor.metrics import public_names
from realhf.scheduler.machine import BFLOAT16_CAPABILITY, KNOWN_GPUS

LENGTHS = (3, 17, 40)


def model_of(tied: bool) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_of_the_benchmark(tied: bool) -> None:
    model = model_of(tied)
    use = DeviceUse(model, peak=1e9)
    use.begin()
    use.count(LENGTHS[:1])
    use.count(LENGTHS[1:])
    stats = use.stats(2.0)
    expected = train_operations(Shape.of(model.config), LENGTHS)
    assert stats["device_utilisation"] == pytest.approx(expected / 2e9)
    assert stats["device_rate"] == 30.0 and stats["device_peak_bytes"] > 1 << 20
    assert "device_reserved_bytes" not in stats, "a CPU reserves nothing"
    use.begin()
    assert use.stats(2.0) == {}, "the next call has trained nothing"
    unknown = DeviceUse(model)
    unknown.count(LENGTHS)
    assert "device_utilisation" not in unknown.stats(2.0), "a CPU has no data sheet"


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA H20", None),
        ("Tesla T4", None),
        ("", None),
    ],
)
def test_only_a_known_device_has_a_peak(name: str, peak: float | None) -> None:
    """A4000 has the letters of A40, and a part of a GPU its whole name: no number is better than a
    wrong one."""
    assert peak_of(name) == peak


def test_every_gpu_that_can_be_planned_for_has_a_peak_if_it_has_bf16() -> None:
    for gpu in KNOWN_GPUS.values():
        assert gpu.capability is not None
        assert (peak_of(gpu.name) is not None) == (gpu.capability >= BFLOAT16_CAPABILITY), gpu.name


def test_frozen_weights_need_no_gradients_and_a_value_head_no_vocabulary() -> None:
    model = model_of(False)
    whole, _ = count_operations(model)
    assert count_operations(ValueModel(model))[0] == whole - 6 * 32 * 96 + 6 * 32
    model.requires_grad_(False)
    assert count_operations(model)[0] == pytest.approx(whole * 2 / 3)


def test_workers_and_calls_have_the_memory_of_the_largest_and_the_rate_of_the_mean() -> None:
    parts = [
        {"device_rate": 10.0, "device_peak_bytes": 5.0},
        {"device_rate": 30.0, "device_peak_bytes": 7.0},
    ]
    for parallel in (True, False):
        merged = merge_stats(parts, [1, 1], parallel=parallel)
        assert merged == {"device_rate": 20.0, "device_peak_bytes": 7.0}
    row = {"actor_train/device_rate": 20.0, "critic_train/device_peak_bytes": 7.0}
    assert public_names(row) == {
        "device/actor_train/tokens_per_second": 20.0,
        "device/critic_train/peak_bytes": 7.0,
    }


def test_metrics_of_a_run_name_them() -> None:
    row = {"actor_gen/weights_seconds": 0.5, "tokens_per_second_per_gpu": 9.0}
    named = {"time/weights": 0.5, "throughput/tokens_per_second_per_gpu": 9.0}
    assert public_names(row) == named
    assert public_names({"rollout/weights_seconds": 0.5}) == {"time/weights": 0.5}
