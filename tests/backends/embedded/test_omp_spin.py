"""Spinning of OpenMP threads is switched while the process runs, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, json, os, time
from pathlib import Path
import torch
from realhf.backends.embedded.compute_threads import OmpSpin

torch.set_num_threads(2)
spin = OmpSpin.find(2)
left, right = torch.randn(64, 4096), torch.randn(4096, 64)

def cpu_ns():
    found = {}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found[task] = int(Path(f"/proc/self/task/{task}/schedstat").read_text().split()[0])
    del found[str(os.getpid())]
    return found

def helper_cpu_s():
    left.exp().sum()
    before = cpu_ns()
    for _ in range(40):
        left.exp()
        time.sleep(0.006)
    after = cpu_ns()
    return 1e-9 * sum(after[task] - before[task] for task in before.keys() & after.keys())

def gradients():
    torch.manual_seed(1)
    layer = torch.nn.Linear(256, 256)
    (layer(torch.randn(512, 256)).tanh() ** 2).sum().backward()
    return [parameter.grad for parameter in layer.parameters()]

n_tasks = len(os.listdir("/proc/self/task"))
spinning, plain = helper_cpu_s(), gradients()
spin.shorten(); spin.shorten()
asleep, parked = helper_cpu_s(), gradients()
spin.lengthen(); spin.lengthen()
print(json.dumps({"spinning": spinning, "asleep": asleep, "again": helper_cpu_s(), "short": spin.short,
                  "equal": all(map(torch.equal, plain, parked)),
                  "left": len(os.listdir("/proc/self/task")) - n_tasks}))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libgomp's spinning is that of Linux")
def test_waiting_threads_burn_no_cpu_while_it_is_short_and_results_stay_the_same() -> None:
    """Between two products an idle helper thread spins for milliseconds, or for next to nothing; what is told is the
    kernel's account of CPU time, so a busy machine changes nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["asleep"] < 0.5 * min(found["spinning"], found["again"]), found
    assert found["equal"] and not found["short"] and found["left"] <= 1, found
