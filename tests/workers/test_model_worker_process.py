"""Parts of the model worker that need no master."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.model_worker import set_torch_threads


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    torch.set_num_threads(1)


def test_model_workers_share_the_cores():
    cores = len(os.sched_getaffinity(0))
    set_torch_threads(0, 1)
    assert torch.get_num_threads() == cores
    set_torch_threads(0, 1, taken=cores)
    assert torch.get_num_threads() == 1
    set_torch_threads(0, 1)
    set_torch_threads(0, cores + 1)
    assert torch.get_num_threads() == 1
    set_torch_threads(3, 2)
    assert torch.get_num_threads() == 3


def test_without_a_plan_it_ends_with_one_line_about_the_cause(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "workers.model_worker", "--run-dir", str(tmp_path), "--run-id", "r", "--index", "0",
         "--master", "tcp://127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("FATAL: ") and "plan.json" in done.stderr.splitlines()[-1]
