"""The audit: it finds what is wrong, and after any kill there is nothing wrong
(docs/reference/dataflow.md 9)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from realhf.dataflow.journal.audit import JournalTally, audit, audit_folder, main
from realhf.dataflow.journal.journal import (
    ARCHIVE,
    Commit,
    Consume,
    Drop,
    Journal,
    Record,
    Reject,
    Resume,
    Totals,
)
from realhf.dataflow.journal.ledger import fold
from tests.dataflow.journal.test_writer import STORY, accept, admit
from tests.dataflow.journal.toy_journaled_run import JournaledRun


def tally_of(*records: Record) -> JournalTally:
    return audit([[record] for record in records])


def faults(tally: JournalTally) -> tuple[int, int, int]:
    return tally.lost, tally.twice, tally.impossible


@pytest.mark.parametrize("seed", range(20))
async def test_after_any_kills_nothing_is_lost_and_nothing_trained_twice(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    run = JournaledRun(
        tmp_path, random, total=random.randint(1, 40), batch_size=random.randint(1, 5)
    )
    for _ in range(random.randint(0, 6)):
        if not run.finished:
            await run.live(random.randint(0, 60))
            assert faults(audit_folder(tmp_path)) == (0, 0, 0)
    if not run.finished:
        await run.live(100_000)
    trained = [id for ids in run.weights for id in ids]
    tally = audit_folder(tmp_path)
    assert faults(tally) == (0, 0, 0)
    assert (tally.accepted, tally.outstanding, tally.ended, tally.complete) == (0, 0, True, True)
    assert len(trained) == len(set(trained)) == tally.consumed
    assert tally.admitted == run.total == tally.consumed + tally.rejected + tally.dropped
    assert tally.steps == len(run.weights)
    journal, records = Journal.open(tmp_path)
    journal.close()
    state = fold(records)
    assert {name: getattr(tally, name) for name in state.totals()} == state.totals()
    shutil.rmtree(tmp_path / ARCHIVE, ignore_errors=True)
    recent = audit_folder(tmp_path)
    assert faults(recent) == (0, 0, 0)
    assert (recent.admitted, recent.consumed, recent.rejected) == (
        tally.admitted,
        tally.consumed,
        tally.rejected,
    )


def test_a_good_history_balances() -> None:
    assert tally_of(*STORY) == JournalTally(
        admitted=8,
        consumed=4,
        rejected=1,
        dropped=1,
        accepted=1,
        outstanding=1,
        lost=0,
        twice=0,
        impossible=0,
        steps=2,
        resumes=0,
        head_staleness_max=0,
        ended=False,
        complete=True,
    )
    resumed = tally_of(*STORY, Resume(0), Consume(["f", "d"], 1))
    assert (resumed.consumed, resumed.accepted, resumed.resumes, faults(resumed)) == (
        4,
        1,
        1,
        (0, 0, 0),
    )


def test_staleness_is_that_of_the_attempt_that_was_accepted() -> None:
    story = [
        admit("a", 0),
        admit("b", 1),
        Reject("b", 0, "timeout", "", False),
        admit("b", 2, 1, version=2),
        accept("a"),
    ]
    story += [accept("b", 1), Consume(["a"], 1), Consume(["b"], 3)]
    assert tally_of(*story).head_staleness_max == 1


@pytest.mark.parametrize(
    ("records", "twice", "impossible"),
    [
        ([Consume(["f", "a"], 2)], 1, 0),
        ([Consume(["a", "d"], 2)], 2, 0),
        ([Resume(1), Consume(["d"], 2)], 1, 0),
        ([Resume(0), Consume(["d"], 1), Consume(["d", "e"], 2)], 1, 0),
        ([Resume(0), Consume(["d"], 1)], 0, 0),
        ([Consume(["f"], 1)], 0, 1),
        ([Consume(["c"], 2)], 0, 1),
        ([Consume(["x"], 2)], 0, 1),
        ([Consume(["h"], 2)], 0, 1),
        ([admit("a", 9)], 0, 2),
        ([admit("g", 9, 1)], 0, 1),
        ([admit("c", 9, 1)], 0, 1),
        ([accept("c", 0)], 0, 1),
        ([accept("f", 0)], 0, 1),
        ([Drop("c", "")], 0, 1),
        ([Commit(7, 8)], 0, 1),
    ],
)
def test_faults_are_found(records: list[Record], twice: int, impossible: int) -> None:
    tally = tally_of(*STORY, *records)
    assert faults(tally) == (0, twice, impossible)
    assert tally.is_balanced == (twice == impossible == 0)
    sums = (
        tally.consumed
        + tally.rejected
        + tally.dropped
        + tally.accepted
        + tally.outstanding
        + tally.lost
    )
    assert tally.admitted == sums


@pytest.mark.parametrize("forgotten", ["c", "f", "d"])
def test_what_a_snapshot_forgets_is_lost(forgotten: str) -> None:
    """One that is outstanding, one that is accepted, one of a step that is not final."""
    state = fold(STORY)
    state.settle(0)
    whole = state.snapshot()
    history: list[Sequence[Record]] = [[record] for record in STORY]
    assert faults(audit([*history, whole])) == (0, 0, 0)
    partial = [record for record in whole if getattr(record, "id", "") != forgotten]
    tally = audit([*history, partial, [Resume(0)]])
    assert tally.lost == 1
    assert not tally.is_balanced


def test_a_wrong_total_is_found() -> None:
    state = fold(STORY)
    state.settle(1)
    totals, *rest = state.snapshot()
    assert isinstance(totals, Totals)
    wrong = msgspec.structs.replace(
        totals, consumed=totals.consumed + 1, admitted=totals.admitted + 1
    )
    history: list[Sequence[Record]] = [[record] for record in STORY]
    assert faults(audit([*history, [totals, *rest]])) == (0, 0, 0)
    assert not audit([*history, [wrong, *rest]]).is_balanced
    assert not audit([[msgspec.structs.replace(totals, admitted=3), *rest]]).is_balanced


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no journal" in capsys.readouterr().err
    journal, _ = Journal.open(tmp_path)
    journal.append(*STORY)
    journal.close()
    assert main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["admitted"] == 8
    journal, _ = Journal.open(tmp_path)
    journal.append(Consume(["a"], 2))
    journal.close()
    assert main([str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["twice"] == 1
