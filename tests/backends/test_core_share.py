"""The number of computing threads follows the cores that others leave free."""

from __future__ import annotations

import itertools
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
from realhf.backends.core_account import LinuxCoreAccount
from realhf.backends.core_share import STEADY_WINDOWS, WINDOW_S, CoreShare, fixed_threads, unmanaged, up_to
from realhf.backends.torch_engine import TorchEngine
from workers.model_worker import share_of_cores


class SimulatedMachine:
    """Cores, strangers that keep some of them busy, and a clock: a ``CoreAccount`` of one process that computes."""

    def __init__(self, cores: int, strangers: float = 0.0) -> None:
        self.cores, self.strangers, self.now = cores, strangers, 0.0
        self._waited = self._idle = 0.0

    def compute(self, share: CoreShare, windows: int) -> None:
        with share.computing():
            for _ in range(windows):
                self.pass_time(1.01 * WINDOW_S, share.threads)
                share.pace()

    def pass_time(self, seconds: float, threads: int) -> None:
        self.now += seconds
        crowd = threads + self.strangers - self.cores
        self._waited += seconds * max(0.0, crowd) / 2
        self._idle += seconds * max(0.0, -crowd)

    def waited_s(self) -> float:
        return self._waited

    def idle_s(self) -> float:
        return self._idle


def share_on(machine: SimulatedMachine, most: int) -> tuple[CoreShare, list[int]]:
    told: list[int] = []
    return CoreShare(most, machine, clock=lambda: machine.now, set_threads=told.append), told


def test_on_a_quiet_machine_it_takes_all_cores_at_once():
    machine = SimulatedMachine(cores=8)
    share, told = share_on(machine, 8)
    machine.compute(share, 2)
    assert share.threads == 8 and told[0] == 1 and told[-1] == 8
    machine.compute(share, 1000)
    assert share.threads == 8 and len(told) == 3


@pytest.mark.parametrize(("cores", "strangers", "threads"), [(2, 1, 1), (2, 5, 1), (8, 1, 7), (8, 3, 5), (8, 20, 1)])
def test_it_leaves_to_strangers_the_cores_that_they_keep_busy(cores: int, strangers: int, threads: int):
    machine = SimulatedMachine(cores)
    share, _ = share_on(machine, cores)
    machine.compute(share, 4)
    machine.strangers = strangers
    machine.compute(share, 4)
    assert share.threads == threads
    machine.compute(share, 50)
    assert share.threads == threads
    machine.strangers = 0
    machine.compute(share, 4)
    assert share.threads == cores


def test_a_start_among_strangers_is_made_with_one_thread():
    machine = SimulatedMachine(cores=2, strangers=2)
    share, told = share_on(machine, 2)
    machine.compute(share, 20)
    assert told == [1]


def test_rises_that_do_not_last_become_rare():
    machine = SimulatedMachine(cores=2)
    share, told = share_on(machine, 2)
    for _ in range(200):
        machine.strangers = 2.0 if share.threads == 2 else 0.0
        machine.compute(share, 1)
    assert sum(after > before for before, after in itertools.pairwise(told)) < 12
    machine.strangers = 0.0
    machine.compute(share, 2 * STEADY_WINDOWS + 200)
    assert share.threads == 2


def test_what_happens_between_two_calls_is_not_looked_at():
    machine = SimulatedMachine(cores=2)
    share, _ = share_on(machine, 2)
    machine.compute(share, 4)
    for _ in range(50):
        machine.strangers = 2.0
        machine.pass_time(10 * WINDOW_S, 2)
        machine.strangers = 0.0
        machine.compute(share, 1)
        assert share.threads == 2


def test_short_calls_are_looked_at_together():
    machine = SimulatedMachine(cores=2)
    share, _ = share_on(machine, 2)
    for _ in range(30):
        with share.computing():
            machine.pass_time(WINDOW_S / 10, share.threads)
    assert share.threads == 2


def test_a_given_number_stays_and_an_engine_on_its_own_changes_nothing(one_thread_afterwards: None):
    with fixed_threads(3).computing():
        assert torch.get_num_threads() == 3
    with unmanaged().computing():
        assert torch.get_num_threads() == 3
    with up_to(1).computing():
        assert torch.get_num_threads() == 1


def test_model_workers_share_the_cores_and_keep_a_configured_number(one_thread_afterwards: None):
    cores = len(os.sched_getaffinity(0))
    assert share_of_cores(3, 2).threads == torch.get_num_threads() == 3
    share_of_cores(0, 1)
    assert torch.get_num_threads() == cores
    share_of_cores(0, 1, taken=cores)
    assert torch.get_num_threads() == 1
    share_of_cores(0, cores + 1)
    assert torch.get_num_threads() == 1


def test_everything_that_an_engine_computes_follows_the_cores(tiny_model: Any, ragged_sample: Any):
    engine = TorchEngine(tiny_model(), None, optimizer=OptimizerConfig(lr=1e-3))
    sample, whole = ragged_sample([[20, 5], [11], [30, 8, 8]]), MicroBatchSpec()
    request = GenRequest(0, [7, 8, 9])
    calls: list[Callable[[], object]] = [
        lambda: engine.logprobs(sample, temperature=1.0, mb_spec=whole),
        lambda: engine.train_batch(sample, lambda logprobs, *_: (-logprobs.sum(), {}), temperature=1.0, mb_spec=whole),
        lambda: engine.generator().generate([request], GenConfig(max_new_tokens=4), stop_ids=(), seed=1),
    ]
    for call in calls:
        machine = SimulatedMachine(cores=4)
        told: list[int] = []

        def later(machine: SimulatedMachine = machine) -> float:
            machine.pass_time(WINDOW_S, 1)
            return machine.now

        engine.share_cores(CoreShare(4, machine, clock=later, set_threads=told.append))
        call()
        assert told[0] == 1 and told[1] == 4, "the number changes while the call goes on"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the account is Linux's")
def test_the_kernel_tells_that_a_thread_waits_for_a_core_that_a_stranger_keeps_busy():
    mine = os.sched_getaffinity(0)
    account = LinuxCoreAccount.open()
    assert account is not None
    stranger = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        os.sched_setaffinity(stranger.pid, {min(mine)})
        os.sched_setaffinity(0, {min(mine)})
        before, deadline = account.waited_s(), time.monotonic() + 60
        while account.waited_s() - before < 0.02 and time.monotonic() < deadline:
            sum(range(100_000))
        assert account.waited_s() - before >= 0.02
    finally:
        os.sched_setaffinity(0, mine)
        stranger.kill()
        stranger.wait()
        account.close()
    assert account.idle_s() >= 0


@pytest.fixture
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)
