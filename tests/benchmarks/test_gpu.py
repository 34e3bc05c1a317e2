"""What the GPU benchmark works out without a GPU, and that the program runs from end to end on the
CPU."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness.gpu_figures import (
    Row,
    Shape,
    Timing,
    forward_operations,
    table,
    timed,
    train_operations,
)
from realhf.backends.training.device_use import peak_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_operations_are_those_that_torch_counts():
    """Torch counts whole squares of attention, of which a causal model needs the lower half with
    its diagonal."""
    config = Qwen3Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=40, attn_implementation="eager",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = 2
    length = 12
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(rows, length, dtype=torch.int64), use_cache=False)
    shape = Shape.of(config)
    above = (
        4
        * shape.layers
        * shape.heads
        * shape.head_dim
        * rows
        * (length * length - length * (length + 1) // 2)
    )
    # The angles of the positions, which are not counted here.
    positions = 2 * length * config.head_dim // 2
    found = forward_operations(shape, [length] * rows)
    assert counter.get_total_flops() - above - found in (0, positions, rows * positions)
    assert train_operations(shape, [length] * rows) == 3 * found
    assert found - forward_operations(shape, [length] * rows, scored=5) == 2 * 32 * 96 * (
        rows * length - 5
    )
    assert forward_operations(shape, [4, 8]) > forward_operations(shape, [6, 6]), (
        "a longer text attends to more"
    )


def test_the_models_of_the_table_have_the_sizes_it_says(gpu):
    assert Shape.of(gpu.BILLIONS_06).weights == pytest.approx(0.596e9, rel=1e-3)
    assert Shape.of(gpu.MILLION).weights == 4 * (128 * 32 * 16 + 3 * 128 * 384) + 128 * 1536


def test_a_device_is_known_by_its_name():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA L40S") == 362e12 and peak_of("NVIDIA L4") == 121e12
    assert peak_of("A card of next year") is None


def test_timing_leaves_the_warm_up_out_and_waits_for_the_device():
    events: list[str] = []
    clock = itertools.accumulate([0.0, 2.0, 5.0, 1.0, 5.0, 4.0])  # Runs of 2, 1 and 4 s.
    found = timed(
        lambda: events.append("run"),
        rounds=3,
        warm_up=2,
        finish=lambda: events.append("finish"),
        clock=lambda: next(clock),
    )
    assert found.seconds == (2.0, 1.0, 4.0) and found.median == 2.0 and found.rate(10) == 5.0
    assert found.spread == "1 to 4 s"
    assert events == ["run", "run", *["finish", "run", "finish"] * 3]
    assert Timing((3.0,)).rate(6.0) == 2.0


def test_the_table_says_where_there_is_no_number():
    text = table(
        [
            Row("speed", 12345.6, "tokens/s", "a | b\nc"),
            Row("small", 0.01234, "s"),
            Row("none", None, "", "why"),
        ]
    )
    lines = text.splitlines()
    assert lines[2:] == [
        "| speed | 12,346 | tokens/s | a / b c |",
        "| small | 0.0123 | s        |         |",
        "| none  |      - |          | why     |",
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.slow
def test_the_program_runs_on_the_cpu(gpu, monkeypatch):
    """All that it does to a model, on one of no size; and a part that fails, or has no time left,
    is a row."""
    torch.set_num_threads(1)
    rows = gpu.measure(torch.device("cpu"), ["1m"], 5.0, lambda text: None)
    found = {row.what.partition(": ")[2]: row for row in rows[1:]}
    parts = {
        "generation",
        "scoring",
        "training",
        "training, groups",
        "the head alone",
        "weight update",
        "a step",
    }
    assert {*found} == parts
    assert all(row.number is not None and row.number > 0 for row in found.values())
    monkeypatch.setattr(gpu, "Bench", lambda *_: 1 / 0)
    rows = gpu.measure(torch.device("cpu"), ["1m"], 5.0, lambda text: None)
    assert rows[-1].number is None and "failed: ZeroDivisionError" in rows[-1].remark
    rows = gpu.measure(torch.device("cpu"), ["0.6b"], -1.0, lambda text: None)
    assert (rows[-1].number, rows[-1].remark) == (None, "left out: -1 minutes are over")


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    assert gpu.main() == 0
    assert "no GPU" in capsys.readouterr().out


def test_the_default_experiment_is_read_from_its_run(gpu, monkeypatch):
    def run(command, **_):
        root = next(
            word.removeprefix("fileroot=") for word in command if word.startswith("fileroot=")
        )
        folder = Path(root) / "grpo_aws" / "measured"
        folder.mkdir(parents=True)
        rows = [{"step": n, "time/step": float(n)} for n in range(1, 6)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    (row,) = gpu.default_rows(torch.device("cpu"))
    assert (row.number, row.unit) == (4.0, "s") and "of 3 steps" in row.remark
    failed = subprocess.CompletedProcess(
        [], 1, "", "a line\nModuleNotFoundError: No module named 'ministack'\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    (row,) = gpu.default_rows(torch.device("cpu"))
    assert (
        row.number is None
        and row.remark == "ended with 1: ModuleNotFoundError: No module named 'ministack'"
    )
