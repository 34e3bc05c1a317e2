"""A role on several ranks over NCCL: on one rank, which one GPU can run, and on two where there are
two GPUs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from realhf.backends.parallel.process_groups import RendezvousStore
from realhf.scheduler.gpus import VISIBLE, visible_gpus
from tests.gpu.rank_process import JOIN_S, RankJob, outcome

DEADLINE_S = 180.0
NOTICED_S = 30.0
"""Within this time a rank ends whose peer is dead, once it is told."""
backends = pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
DTYPES = ("float32", "bfloat16")


class Rank(NamedTuple):
    """A process, and the pipe to it."""

    process: SpawnProcess
    pipe: Connection

    def told(self) -> dict[str, Any]:
        assert self.pipe.poll(DEADLINE_S), f"a rank did not end within {DEADLINE_S:g} s"
        return self.pipe.recv()


@contextlib.contextmanager
def ranks_of(
    size: int, device: torch.device, folder: Path, backend: str, dies: int = -1
) -> Iterator[list[Rank]]:
    """Processes of their own, each of which sees one GPU: a process group stays until its process
    ends. Rank ``dies`` does so."""
    context = multiprocessing.get_context("spawn")
    meeting = RendezvousStore(size, JOIN_S)
    gpus = visible_gpus()
    before = os.environ.get(VISIBLE)
    started: list[Rank] = []
    try:
        for rank in range(size):
            here, there = context.Pipe()
            job = RankJob(
                meeting.address, rank, size, backend, DTYPES, device.type, folder, rank == dies
            )
            process = context.Process(target=outcome, args=(there, job), daemon=True)
            if device.type == "cuda":
                os.environ[VISIBLE] = gpus[rank]
            process.start()
            there.close()
            started.append(Rank(process, here))
        yield started
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        else:
            os.environ.pop(VISIBLE, None)
        for process, _ in started:
            process.join(5)
            if process.is_alive():
                process.kill()


def check(told: dict[str, Any], device: torch.device, size: int) -> None:
    assert "error" not in told, told["error"]
    for dtype, found in told.items():
        assert device.type == "cpu" or "cuda:nccl" in found["backends"]
        # Two ranks round sums of bf16 products elsewhere than one.
        off = 1e-4 if dtype == "float32" else 2e-3 * size
        assert found["losses"] == pytest.approx(found["expected"], rel=off), dtype
        assert found["resumed"] == pytest.approx(found["losses"][-1:], rel=1e-4), dtype
        assert found["digests"], "rank 0 has all weights"
        assert found["digests"] == found["held"], "a checkpoint restores the weights to the bit"


@backends
def test_one_rank_trains_as_an_engine_alone(
    device: torch.device, tmp_path: Path, backend: str
) -> None:
    with ranks_of(1, device, tmp_path, backend) as (rank,):
        check(rank.told(), device, 1)


def skip_without_two(device: torch.device) -> None:
    if device.type == "cuda" and len(visible_gpus()) < 2:
        pytest.skip("needs two GPUs, one is visible here")


@backends
def test_two_ranks_train_as_an_engine_alone(
    device: torch.device, tmp_path: Path, backend: str
) -> None:
    skip_without_two(device)
    with ranks_of(2, device, tmp_path, backend) as ranks:
        first, second = (rank.told() for rank in ranks)
    check(first, device, 2)
    assert "error" not in second, second["error"]
    for dtype in DTYPES:
        assert first[dtype]["losses"] == second[dtype]["losses"], dtype


@backends
def test_a_rank_whose_peer_is_killed_ends_when_it_is_told(
    device: torch.device, tmp_path: Path, backend: str
) -> None:
    """Over NCCL it would wait for a minute else, or for ever."""
    skip_without_two(device)
    with ranks_of(2, device, tmp_path, backend, dies=1) as (first, second):
        second.process.join(DEADLINE_S)
        assert second.process.exitcode == -9
        first.pipe.send("rank 1 died")
        start_s = time.monotonic()
        assert first.told().get("kind") == "CollectiveBroken"
        assert time.monotonic() - start_s < NOTICED_S
