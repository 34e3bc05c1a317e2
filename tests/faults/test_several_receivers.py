"""A real asynchronous run whose trainer has two ranks, each with a receiver of its own. A rank is
killed, then the launcher; one rank goes on, then two again: every sample is trained once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.harness.killed_run import LAUNCHER, KilledRun
from realhf.api.calls import payload_rank
from realhf.dataflow.journal.journal import ARCHIVE, Accept, read_segment, segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STUCK_S = 300.0
STEPS = 10
TWO = ("actor.workers=[0,1]", "actor.backend=ddp")
ONE = ("actor.workers=[0]",)


def received(folder: Path) -> Counter[int]:
    """Samples by the rank that logged them."""
    journal = folder / "journal"
    paths = [*segments(journal / ARCHIVE), *segments(journal)]
    refs = {
        (record.id, record.attempt): record.ref
        for path in paths
        for frame in read_segment(path)[0]
        for record in frame
        if isinstance(record, Accept)
    }
    return Counter(payload_rank(ref) for ref in refs.values())


def after(run: KilledRun, steps: int) -> None:
    """Wait until so many steps are done."""
    while run.running and len(run.rows()) < steps:
        run.wait_for_progress(run.journal_bytes(), STUCK_S)
    assert run.running, run.tail()


@pytest.mark.nightly
def test_ranks_come_and_go_and_every_sample_is_trained_once(tmp_path: Path, policy: Path) -> None:
    run = KilledRun(tmp_path, "ranks", policy, *TWO, steps=STEPS, environment="sql")
    run.start()
    try:
        after(run, 3)
        assert run.kill("model_worker", random.Random(0))
        after(run, 5)
        by_rank = received(run.folder)
        assert by_rank.keys() == {0, 1} and min(by_rank.values()) >= 2, by_rank
        assert list((run.folder / "stream").glob("payload-*.log"))
        assert list((run.folder / "stream" / "rank-1").glob("payload-*.log"))
        run.options = (*ONE, *run.options[2:])
        run.stop(LAUNCHER, STUCK_S)
        after(run, 7)
        run.options = (*TWO, *run.options[1:])
        before = received(run.folder)
        run.stop(LAUNCHER, STUCK_S)
        verdict = run.verdict(run.wait(STUCK_S))
    finally:
        run.end()
    assert not verdict.problems, (verdict, run.output.read_text())
    assert received(run.folder)[1] > before[1], "the second rank receives again"
    assert verdict.tally is not None and verdict.tally.resumes >= 3
