"""Real ranks for tests: processes that run one function together, forked from a server that has
imported it once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import torch

from realhf.backends.parallel.process_groups import RendezvousStore, TorchWorld

DEADLINE_S = 120.0
JOBS = ["tests.backends.parallel.jobs", "tests.backends.parallel.training"]
"""Modules that the server imports for all ranks, with what they import: alone it would cost each
two seconds."""

Job = Callable[..., Any]
"""(world, rank, *arguments) -> a result that can be pickled; a function of a module."""


class Outcome(NamedTuple):
    """What a rank returned, or the type and text of what it raised; neither if it was killed."""

    result: Any = None
    error: str = ""
    text: str = ""


def run_ranks(size: int, job: Job, *arguments: Any, timeout_s: float = DEADLINE_S) -> list[Outcome]:
    """Run ``job`` on ``size`` ranks and return the outcome of each. Kills what does not end in
    time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(JOBS)
    meeting = RendezvousStore(size, DEADLINE_S)
    started: list[tuple[Connection, ForkServerProcess]] = []
    outcomes = [Outcome()] * size
    try:
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, meeting.address, rank, size, timeout_s, job, arguments),
                daemon=True,
            )
            process.start()
            there.close()
            started.append((here, process))
        ranks = {here: rank for rank, (here, _) in enumerate(started)}
        while ranks:
            ready = wait([*ranks], timeout_s)
            assert ready, f"ranks {sorted(ranks.values())} did not end within {timeout_s:g} s"
            for here in ready:
                assert isinstance(here, Connection)
                rank = ranks.pop(here)
                try:
                    outcomes[rank] = Outcome(*here.recv())
                except EOFError:
                    outcomes[rank] = Outcome(error="Killed")
    finally:
        for here, process in started:
            here.close()
            process.join(0 if process.exitcode is not None else 5)
            if process.is_alive():
                process.kill()
                process.join()
    return outcomes


def results(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; fails with the first error."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}: {outcome.text}"
    return [outcome.result for outcome in outcomes]


def _serve(
    out: Connection,
    address: str,
    rank: int,
    size: int,
    timeout_s: float,
    job: Job,
    arguments: tuple[Any, ...],
) -> None:
    import traceback

    torch.set_num_threads(1)
    try:
        world = TorchWorld(
            address, rank, range(size), join_s=DEADLINE_S, timeout_s=timeout_s, token="a run"
        )
        out.send(Outcome(job(world, rank, *arguments)))
    except BaseException as error:
        out.send(Outcome(None, type(error).__name__, "".join(traceback.format_exception(error))))
