"""The journal: what was appended comes back after any crash, and the run goes on from it (spec dataflow, section 9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from realhf.dataflow.journal import Journal, JournalError
from realhf.dataflow.journal_records import Accept, Admit, Ckpt, Commit, Consume, Draw, Drop, Record, Reject, Resume
from realhf.dataflow.journal_state import JournalState, fold


def admit(id: str, order: int, attempt: int = 0, version: int = 0) -> Admit:
    return Admit(id, attempt, version, order, "rollout_worker/0", {"metadata": {"task": id}, "values": {"ids": [1]}})


def accept(id: str, attempt: int = 0) -> Accept:
    return Accept(id, attempt, [1, 64, 100], [b"meta", id.encode()])


STORY: list[Record] = [
    admit("a", 0), admit("b", 1), Draw({"cursor": 2}), accept("b"), admit("c", 2), accept("a"),
    Consume(["a", "b"], 0), Commit(0, 1), Reject("c", 0, "env_error", "gone", False), admit("c", 3, 1, 1),
    admit("d", 4, 0, 1), accept("d"), admit("e", 5, 0, 1), accept("e"), Ckpt(0, "ckpt-00000000"),
    Consume(["d", "e"], 1), Commit(1, 2), admit("f", 6, 0, 2), accept("f"), admit("g", 7, 0, 2),
    Reject("g", 0, "timeout", "late", True), admit("h", 8, 0, 2), accept("h"), Drop("h", "stale"),
]  # fmt: skip


async def test_records_come_back_in_order_over_several_openings(tmp_path: Path) -> None:
    for start in range(0, len(STORY), 5):
        journal, records = Journal.open(tmp_path, sync_interval_s=0.001)
        assert records == STORY[:start]
        numbers = [journal.append(record) for record in STORY[start : start + 5]]
        await journal.durable(numbers[-1])
        journal.close()
    assert len(list(tmp_path.glob("journal-*.log"))) == 5


def test_recovery_accepts_again_what_lost_steps_consumed() -> None:
    recovery = fold(STORY).resume(0)
    assert recovery.replay == [(1, ["d", "e"])]
    assert [accept.id for _, accept in recovery.accepted] == ["d", "e", "f"]
    assert [(admit.id, admit.attempt) for admit in recovery.requeue] == [("c", 1)]
    assert (recovery.version, recovery.order, recovery.draw) == (1, 9, {"cursor": 2})
    assert fold(STORY).resume(1).replay == []
    assert fold(STORY).resume(-1).replay == [(0, ["a", "b"]), (1, ["d", "e"])]
    again = fold([*STORY, Resume(0)])
    assert again.resume(0) == recovery
    assert again.totals() == {
        "admitted": 8,
        "consumed": 2,
        "rejected": 1,
        "dropped": 1,
        "accepted": 3,
        "outstanding": 1,
    }


def test_a_snapshot_makes_an_equal_state() -> None:
    state = fold(STORY)
    state.settle(0)
    copy = fold(state.snapshot())
    assert copy.totals() == state.totals()
    assert [copy.resume(step) for step in (0, 1)] == [state.resume(step) for step in (0, 1)]
    with pytest.raises(ValueError, match="final"):
        copy.resume(-1)


async def test_a_checkpoint_replaces_the_earlier_segments(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, sync_interval_s=0.001, archive=True)
    journal.append(*STORY)
    state = fold(STORY)
    state.settle(0)
    await journal.durable(journal.checkpointed(0, state.snapshot()))
    with pytest.raises(JournalError, match="another process"):
        Journal.open(tmp_path)
    journal.close()
    assert [path.name for path in tmp_path.glob("journal-*.log")] == ["journal-000002.log"]
    assert [path.name for path in tmp_path.glob("archive/*")] == ["journal-000001.log"]
    again, records = Journal.open(tmp_path)
    again.close()
    assert fold(records).resume(1) == state.resume(1)


def test_impossible_records_are_refused() -> None:
    for record in (admit("b", 9), accept("c", 0), accept("x"), Consume(["f", "a"], 2), Drop("c", ""),
                   Consume(["f", "f"], 2), Consume(["f"], 1), Reject("f", 0, "timeout", "", True)):  # fmt: skip
        state = fold(STORY)
        with pytest.raises(ValueError):
            state.apply(record)
        assert state.totals() == fold(STORY).totals()
    assert isinstance(state, JournalState)
