"""Threads sleep at barriers while other programs keep cores busy, and spin otherwise; results stay
the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from realhf.api.config import GenConfig, OptimizerConfig
from realhf.api.model import GenRequest
from realhf.api.sample import MicroBatchSpec
from realhf.backends.embedded.compute_threads import (
    STEADY_WINDOWS,
    WINDOW_S,
    ComputeThreads,
    LinuxCoreAccount,
    threads,
    unmanaged_threads,
)
from realhf.backends.training.torch_engine import TorchEngine
from workers.model_worker import set_compute_threads


class SimulatedMachine:
    """Cores, strangers that keep some of them busy, and a clock: the account and the spinning of
    one process."""

    def __init__(self, cores: int, strangers: float = 0.0) -> None:
        self.cores = cores
        self.strangers = strangers
        self.now = 0.0
        self.is_short = False
        self.switches = 0
        self._waited = 0.0

    def compute(self, threads: ComputeThreads, windows: int) -> None:
        with threads.computing():
            for _ in range(windows):
                self.pass_time(1.01 * WINDOW_S, threads.count)
                threads.measure_if_due()

    def pass_time(self, seconds: float, threads: int) -> None:
        self.now += seconds
        self._waited += seconds * max(0.0, threads + self.strangers - self.cores) / 2

    def total_waiting_s(self) -> float:
        return self._waited

    def shorten(self) -> None:
        self.is_short, self.switches = True, self.switches + 1

    def lengthen(self) -> None:
        self.is_short, self.switches = False, self.switches + 1


def threads_on(machine: SimulatedMachine, count: int) -> ComputeThreads:
    return ComputeThreads(
        count, machine, machine, clock=lambda: machine.now, set_threads=lambda _: None
    )


def test_on_a_quiet_machine_threads_spin_from_the_first_window_on():
    machine = SimulatedMachine(cores=8)
    some = threads_on(machine, 8)
    assert machine.is_short, "a start among strangers must not be slow"
    machine.compute(some, 1)
    assert not machine.is_short
    machine.compute(some, 1000)
    assert not machine.is_short and machine.switches == 2


@pytest.mark.parametrize(("cores", "strangers"), [(2, 1), (2, 5), (8, 1), (8, 20)])
def test_beside_strangers_threads_sleep_and_their_number_stays(cores: int, strangers: int):
    machine = SimulatedMachine(cores)
    some = threads_on(machine, cores)
    machine.compute(some, 4)
    machine.strangers = strangers
    machine.compute(some, 2)
    assert machine.is_short
    machine.compute(some, 50)
    assert machine.is_short and some.count == cores and machine.switches == 3
    machine.strangers = 0
    machine.compute(some, 2)
    assert not machine.is_short


def test_spinning_that_does_not_last_becomes_rare():
    machine = SimulatedMachine(cores=2)
    some = threads_on(machine, 2)
    for _ in range(200):
        machine.strangers = 0.0 if machine.is_short else 2.0
        machine.compute(some, 1)
    assert machine.switches < 60, "spinning was tried in more than one window of six"
    machine.strangers = 0.0
    machine.compute(some, 2 * STEADY_WINDOWS)
    assert not machine.is_short


def test_a_burst_of_other_work_now_and_then_hardly_costs_any_spinning():
    """Whatever was burst upon before: the threads spin again soon, because sleep on idle cores is
    slow."""
    machine = SimulatedMachine(cores=2)
    some = threads_on(machine, 2)
    spinning = 0
    for window in range(1000):
        machine.strangers = 2.0 if window % 30 == 29 else 0.0
        machine.compute(some, 1)
        spinning += not machine.is_short
    assert spinning > 700


def test_threads_that_cannot_be_switched_go_on_as_they_are():
    """Beside strangers that is slow; a train step that fails would be worse."""

    class Stubborn(SimulatedMachine):
        def shorten(self) -> None:
            raise RuntimeError("no more threads")

    machine = Stubborn(cores=2, strangers=2)
    some = threads_on(machine, 2)
    machine.compute(some, 20)
    assert some.count == 2 and not machine.is_short


def test_what_happens_between_two_calls_is_not_looked_at():
    machine = SimulatedMachine(cores=2)
    some = threads_on(machine, 2)
    machine.compute(some, 4)
    for _ in range(50):
        machine.strangers = 2.0
        machine.pass_time(10 * WINDOW_S, 2)
        machine.strangers = 0.0
        machine.compute(some, 1)
        assert not machine.is_short


def test_short_calls_are_looked_at_together():
    machine = SimulatedMachine(cores=2)
    some = threads_on(machine, 2)
    for _ in range(30):
        with some.computing():
            machine.pass_time(WINDOW_S / 10, some.count)
    assert not machine.is_short


def test_one_thread_waits_for_nobody_and_an_engine_on_its_own_changes_nothing(
    one_thread_afterwards: None,
):
    with ComputeThreads(3).computing():
        assert torch.get_num_threads() == 3
    with unmanaged_threads().computing():
        assert torch.get_num_threads() == 3
    with threads(1).computing():
        assert torch.get_num_threads() == 1


def test_model_workers_share_the_cores_and_keep_a_configured_number(one_thread_afterwards: None):
    cores = len(os.sched_getaffinity(0))
    assert set_compute_threads(3, 2).count == torch.get_num_threads() == 3
    assert set_compute_threads(0, 1).count == torch.get_num_threads() == cores
    assert set_compute_threads(0, 1, reserved=cores).count == torch.get_num_threads() == 1
    assert set_compute_threads(0, cores + 1).count == torch.get_num_threads() == 1


@pytest.mark.slow
def test_everything_that_an_engine_computes_follows_the_cores(tiny_model: Any, ragged_sample: Any):
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(lr=1e-3))
    sample, whole = ragged_sample([[20, 5], [11], [30, 8, 8]]), MicroBatchSpec()
    request = GenRequest(0, [7, 8, 9])
    calls: list[Callable[[], object]] = [
        lambda: engine.logprobs(sample, temperature=1.0, mb_spec=whole),
        lambda: engine.train_batch(
            sample, lambda outputs, _: (-outputs.logprobs()[0].sum(), {}), mb_spec=whole
        ),
        lambda: engine.generator().generate(
            [request], GenConfig(max_new_tokens=4), stop_ids=(), seed=1
        ),
    ]
    for call in calls:
        machine = SimulatedMachine(cores=4)

        def later(machine: SimulatedMachine = machine) -> float:
            machine.pass_time(WINDOW_S, 1)
            return machine.now

        engine.use_threads(
            ComputeThreads(4, machine, machine, clock=later, set_threads=lambda _: None)
        )
        call()
        assert machine.switches >= 2 and not machine.is_short, (
            "the call is looked at while it goes on"
        )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the account is Linux's")
def test_the_kernel_tells_that_a_thread_waits_for_a_core_that_a_stranger_keeps_busy():
    mine = os.sched_getaffinity(0)
    account = LinuxCoreAccount.open()
    assert account is not None
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(stranger.pid, {min(mine)})
        os.sched_setaffinity(0, {min(mine)})
        before = account.total_waiting_s()
        deadline = time.monotonic() + 60
        while account.total_waiting_s() - before < 0.02 and time.monotonic() < deadline:
            sum(range(100_000))
        assert account.total_waiting_s() - before >= 0.02
    finally:
        os.sched_setaffinity(0, mine)
        stranger.kill()
        stranger.wait()
        account.close()


@pytest.fixture
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


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
        # A thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
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

helper_cpu_s(), gradients()
spin.shorten(); gradients(); spin.lengthen(); gradients()
n_tasks = len(os.listdir("/proc/self/task"))
spinning, plain = helper_cpu_s(), gradients()
spin.shorten(); spin.shorten()
asleep, parked = helper_cpu_s(), gradients()
spin.lengthen(); spin.lengthen()
print(json.dumps({"spinning": spinning, "asleep": asleep, "again": helper_cpu_s(),
                  "short": spin.is_short,
                  "equal": all(map(torch.equal, plain, parked)),
                  "left": len(os.listdir("/proc/self/task")) - n_tasks}))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="libgomp's spinning is that of Linux"
)
def test_waiting_threads_burn_no_cpu_while_it_is_short_and_results_stay_the_same() -> None:
    """Between two products an idle helper thread spins for milliseconds, or for next to nothing;
    what is told is the kernel's account of CPU time, so a busy machine changes nothing."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["asleep"] < 0.5 * min(found["spinning"], found["again"]), found
    assert found["equal"] and not found["short"] and found["left"] <= 0, found
