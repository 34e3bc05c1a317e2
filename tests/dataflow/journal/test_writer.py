"""The journal: what was appended comes back after any crash, and the run goes on from it.

Source: docs/reference/dataflow.md 9.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.dataflow.journal.journal import (
    ARCHIVE,
    FLAT,
    SEGMENT_BYTES,
    Accept,
    Admit,
    Ckpt,
    Commit,
    Consume,
    Draw,
    Drop,
    Journal,
    JournalDamaged,
    JournalError,
    Record,
    Reject,
    Resume,
    Totals,
    read_segment,
    segments,
    write_snapshot,
)
from realhf.dataflow.journal.ledger import JournalState, RolloutLedger, fold


def admit(id: str, order: int, attempt: int = 0, version: int = 0) -> Admit:
    return Admit(
        id,
        attempt,
        version,
        order,
        "rollout_worker/0",
        {"metadata": {"task": id}, "values": {"ids": [1]}},
    )


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
        journal, records = Journal.open(tmp_path)
        assert records == STORY[:start]
        numbers = [journal.append(record) for record in STORY[start : start + 5]]
        await journal.wait_until_durable(numbers[-1], 30.0)
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
    with pytest.raises(ValueError, match="samples up to step 1 are used up"):
        copy.resume(-1)


def test_a_snapshot_remembers_the_groups_that_gave_way_to_others_in_the_step_that_is_open() -> None:
    state = fold([*STORY, admit("i", 9, 0, 2), accept("i"), Drop("i", FLAT)])
    state.settle(0)
    assert fold(state.snapshot()).flat == state.flat == [5]


async def test_a_checkpoint_replaces_the_earlier_segments(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path, archive=True)
    journal.append(*STORY)
    state = fold(STORY)
    state.settle(0)
    await journal.wait_until_durable(journal.start_segment(0, state.snapshot()), 30.0)
    with pytest.raises(JournalError, match="another process"):
        Journal.open(tmp_path)
    journal.close()
    assert [path.name for path in tmp_path.glob("journal-*.log")] == ["journal-000002.log"]
    assert [path.name for path in tmp_path.glob("archive/*")] == ["journal-000001.log"]
    again, records = Journal.open(tmp_path)
    again.close()
    assert fold(records).resume(1) == state.resume(1)


def test_impossible_records_are_refused() -> None:
    for record in (
        admit("b", 9),
        accept("c", 0),
        accept("x"),
        Consume(["f", "a"], 2),
        Drop("c", ""),
        Consume(["f", "f"], 2),
        Consume(["f"], 1),
        Reject("f", 0, "timeout", "", True),
    ):
        state = fold(STORY)
        with pytest.raises(ValueError):
            state.apply(record)
        assert state.totals() == fold(STORY).totals()
    assert isinstance(state, JournalState)


def _written(folder: Path, records: list[Record]) -> Path:
    """A journal with one append for each record; its only segment."""
    journal, _ = Journal.open(folder)
    for record in records:
        journal.append(record)
    journal.close()
    (path,) = segments(folder)
    return path


def _offsets(data: bytes) -> list[int]:
    """Where the frames of a segment begin."""
    found = [0]
    while (
        following := found[-1] + 8 + int.from_bytes(data[found[-1] : found[-1] + 4], "little")
    ) < len(data):
        found.append(following)
    return found


def _flipped(data: bytes, offset: int, bit: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ bit]) + data[offset + 1 :]


def _reopened(folder: Path) -> list[Record]:
    journal, records = Journal.open(folder)
    journal.close()
    return records


@pytest.mark.slow
def test_a_tail_torn_at_any_byte_costs_the_torn_record_alone(tmp_path: Path) -> None:
    path = _written(tmp_path / "whole", STORY[:9])
    data = path.read_bytes()
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 8 + int.from_bytes(data[ends[-1] : ends[-1] + 4], "little"))
    torn = tmp_path / path.name
    for cut in range(len(data) + 1):
        survivors = sum(end <= cut for end in ends[1:])
        torn.write_bytes(data[:cut])
        frames, good = read_segment(torn)
        assert ([record for frame in frames for record in frame], good) == (
            STORY[:survivors],
            ends[survivors],
        )
        if cut in ends or cut + 1 in ends:
            assert _reopened(tmp_path) == STORY[:survivors]
            assert torn.stat().st_size == ends[survivors]
            for later in segments(tmp_path)[1:]:
                later.unlink()


def test_a_changed_byte_ends_the_history_where_it_is(tmp_path: Path) -> None:
    path = _written(tmp_path, STORY[:4])
    data = path.read_bytes()
    for offset in range(len(data)):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 0x20]) + data[offset + 1 :])
        frames, good = read_segment(path)
        assert [record for frame in frames for record in frame] == STORY[: len(frames)]
        assert good <= offset


def test_a_tail_of_zeros_is_no_record(tmp_path: Path) -> None:
    path = _written(tmp_path, STORY[:2])
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert _reopened(tmp_path) == STORY[:2]


def test_damage_before_the_last_segment_is_not_passed_over(tmp_path: Path) -> None:
    path = _written(tmp_path, STORY[:4])
    journal, _ = Journal.open(tmp_path)
    journal.append(*STORY[4:])
    journal.close()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"journal-000001\.log is damaged at byte"):
        Journal.open(tmp_path)


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_flipped_bit_is_damage_wherever_records_follow_it(tmp_path: Path) -> None:
    """It used to be taken for an interrupted write: the records behind it were cut off, and what
    they say was trained was drawn again."""
    written = _written(tmp_path / "written", STORY[:6])
    data = written.read_bytes()
    last = _offsets(data)[-1]
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for offset in range(len(data)):
        for path in damaged.iterdir():
            path.unlink()
        (damaged / written.name).write_bytes(_flipped(data, offset, 1 << offset % 8))
        before = _bytes_in(damaged)
        told = list[str]()
        if offset < last:
            with pytest.raises(
                JournalDamaged, match=r"damaged at byte \d+, and intact records follow at byte"
            ):
                Journal.open(damaged, warn=told.append)
            assert _bytes_in(damaged) == before and not told, "nothing was changed"
            continue
        journal, records = Journal.open(damaged, warn=told.append)
        journal.close()
        assert records == STORY[:5] and len(told) == 1 and "are an incomplete record" in told[0]
        (kept,) = [path for path in damaged.iterdir() if ".cut-" in path.name]
        assert (damaged / written.name).read_bytes() + kept.read_bytes() == before[written.name]


def test_a_damaged_snapshot_is_no_journal_that_begins(tmp_path: Path) -> None:
    """283 of 400 flipped bits in it used to end in an empty journal, and the run began to draw from
    the start."""
    state = fold(STORY)
    state.settle(0)
    _written(tmp_path, STORY)
    journal, _ = Journal.open(tmp_path)
    journal.start_segment(0, state.snapshot())
    journal.close()
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    for damaged in (
        *(_flipped(data, offset, 4) for offset in range(0, len(data), 17)),
        data[: len(data) // 2],
        b"",
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            JournalDamaged, match=r"journal-000003\.log does not begin with a snapshot"
        ):
            Journal.open(tmp_path)
        assert path.read_bytes() == damaged
    path.unlink()
    assert _reopened(tmp_path) == [], "whoever knows of a checkpoint refuses this one"


def test_a_segment_that_is_missing_between_others_is_missed(tmp_path: Path) -> None:
    for begin in range(0, 12, 4):
        journal, _ = Journal.open(tmp_path)
        journal.append(*STORY[begin : begin + 4])
        journal.close()
    segments(tmp_path)[1].unlink()
    with pytest.raises(JournalDamaged, match=r"journal-000002\.log is missing"):
        Journal.open(tmp_path)


@pytest.mark.parametrize(
    "kind", ["folder", "link", "segment_folder", "segment_link", "descriptors"]
)
def test_what_cannot_be_read_now_is_not_taken_for_damage(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journal"
    path = _written(folder, STORY[:4])
    if kind in ("folder", "link"):
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("") if kind == "folder" else folder.symlink_to(tmp_path / "not mounted")
    elif kind == "descriptors":

        def none_left(self: Path) -> bytes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))

        monkeypatch.setattr(Path, "read_bytes", none_left)
    else:
        path.unlink()
        path.mkdir() if kind == "segment_folder" else path.symlink_to(tmp_path / "not mounted")
    with pytest.raises(
        JournalError, match=r"cannot be read: .*nothing was changed.*recover_mode=disabled"
    ) as refused:
        RolloutLedger.open(folder, completed_steps=0)
    assert not isinstance(refused.value, JournalDamaged)


def test_a_damaged_journal_is_made_again_from_what_the_checkpoint_knows(tmp_path: Path) -> None:
    """A sample that the checkpoint has trained is trained no second time, and one that was open is
    played again."""
    folder = tmp_path / "journal"
    snapshot = tmp_path / "journal.snapshot"
    ledger, _ = RolloutLedger.open(folder, completed_steps=0)
    for record in STORY[:15]:
        ledger.append(record)
    write_snapshot(snapshot, ledger.snapshot_after(1))
    known = ledger.state.resume(0)
    for record in STORY[15:]:
        ledger.append(record)
    ledger.close()
    (path,) = segments(folder)
    data = path.read_bytes()
    for number, damaged in enumerate((_flipped(data, 100, 2), data[:300], None), start=1):
        for segment in segments(folder):
            segment.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        told: list[str] = []
        with pytest.raises(JournalError):
            RolloutLedger.open(folder, completed_steps=1, warn=told.append)
        assert not told and (damaged is None or path.read_bytes() == damaged)
        ledger, recovery = RolloutLedger.open(
            folder, completed_steps=1, snapshot=snapshot, warn=told.append
        )
        ledger.close()
        assert recovery is not None and recovery == known
        (line,) = told
        assert (
            "continues with the samples that the checkpoint of step 1 records" in line
            and "were moved to" in line
        )
        aside = folder / ("journal.damaged" if number == 1 else f"journal.damaged-{number}")
        assert damaged is None or (aside / path.name).read_bytes() == damaged
        told.clear()
        ledger, recovery = RolloutLedger.open(
            folder, completed_steps=1, snapshot=snapshot, warn=told.append
        )
        ledger.close()
        assert recovery == known and not told, "the new journal is one like any other"


def test_records_of_one_append_survive_together_or_not_at_all(tmp_path: Path) -> None:
    path = _written(tmp_path, STORY[:1])
    journal, _ = Journal.open(tmp_path)
    journal.append(*STORY[1:4])
    journal.close()
    last = segments(tmp_path)[-1]
    assert last != path
    last.write_bytes(last.read_bytes()[:-1])
    assert _reopened(tmp_path) == STORY[:1]


@pytest.mark.parametrize("archive", [False, True])
def test_a_torn_snapshot_leaves_the_segments_that_it_was_to_replace(
    tmp_path: Path, archive: bool
) -> None:
    state = fold(STORY)
    state.settle(0)
    before = _written(tmp_path, STORY)
    other = tmp_path / "other"
    journal, _ = Journal.open(other)
    journal.start_segment(0, state.snapshot())
    journal.close()
    snapshot = segments(other)[-1].read_bytes()
    following = tmp_path / "journal-000002.log"
    for cut in range(0, len(snapshot), 29):
        following.write_bytes(snapshot[:cut])
        assert fold(_reopened(tmp_path)).resume(1) == fold(STORY).resume(1)
        for path in segments(tmp_path)[2:]:
            path.unlink()
    assert before.exists()
    following.write_bytes(snapshot)
    journal, records = Journal.open(tmp_path, archive=archive)
    journal.close()
    assert isinstance(records[0], Totals)
    assert fold(records).resume(1) == state.resume(1)
    assert not before.exists()
    assert (tmp_path / ARCHIVE / before.name).exists() == archive


@pytest.mark.slow
def test_a_full_segment_is_followed_by_the_next(tmp_path: Path) -> None:
    big = [Accept(f"s{i}", 0, [], [bytes(6 << 20)]) for i in range(4)]
    journal, _ = Journal.open(tmp_path)
    for record in big:
        journal.append(record)
    journal.close()
    assert [path.stat().st_size > SEGMENT_BYTES for path in segments(tmp_path)] == [True, False]
    assert _reopened(tmp_path) == big


def test_a_snapshot_is_one_of_its_step(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    state = fold(STORY)
    state.settle(0)
    for wrong in ([], STORY, state.snapshot()[1:]):
        with pytest.raises(ValueError, match="Totals"):
            journal.start_segment(0, wrong)
    with pytest.raises(ValueError, match="step 1"):
        journal.start_segment(1, state.snapshot())
    journal.close()


async def test_a_failed_write_is_told_to_everybody(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    (tmp_path / "journal-000002.log").mkdir()
    state = fold(STORY)
    state.settle(0)
    number = journal.start_segment(0, state.snapshot())
    with pytest.raises(JournalError, match="could not be written"):
        await journal.wait_until_durable(number, 30.0)
    with pytest.raises(JournalError, match="could not be written"):
        journal.append(STORY[0])
    with pytest.raises(JournalError, match="could not be written"):
        await journal.wait_until_durable(number, 30.0)
    for _ in range(2):
        with pytest.raises(JournalError, match="could not be written"):
            journal.close()


@pytest.fixture
def slow_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realhf.dataflow.journal.journal.SYNC_INTERVAL_S", 3600.0)
    monkeypatch.setattr("realhf.dataflow.journal.journal.SYNC_RECORDS", 8)


@pytest.mark.usefixtures("slow_sync")
async def test_a_closed_journal_has_written_everything_and_takes_no_more(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    await journal.wait_until_durable(journal.append(STORY[0]), 30.0)
    last = journal.append(STORY[1])
    waiting = asyncio.create_task(journal.wait_until_durable(last, 30.0))
    await asyncio.sleep(0)
    with pytest.raises(JournalError, match="took longer"):
        await journal.wait_until_durable(last, timeout_s=0.01)
    journal.close()
    journal.close()
    await waiting
    await journal.wait_until_durable(last, 30.0)
    with pytest.raises(JournalError, match="closed"):
        journal.append(STORY[2])
    assert _reopened(tmp_path) == STORY[:2]


@pytest.mark.usefixtures("slow_sync")
async def test_many_appends_do_not_wait_for_the_interval(tmp_path: Path) -> None:
    journal, _ = Journal.open(tmp_path)
    await journal.wait_until_durable(journal.append(STORY[0]), 30.0)
    numbers = [journal.append(Draw({"cursor": i})) for i in range(8)]
    await asyncio.gather(*(journal.wait_until_durable(number, 30.0) for number in numbers))
    journal.close()


WRITER = """
import asyncio, sys
from pathlib import Path
from realhf.dataflow.journal import journal as journals
from realhf.dataflow.journal.journal import Draw, Journal

journals.SYNC_INTERVAL_S = 0.001

async def main():
    journal, records = Journal.open(Path(sys.argv[1]))
    for i in range(len(records), 1 << 30):
        number = journal.append(Draw({"i": i}))
        if i % 7 == 0:
            await journal.wait_until_durable(number, 30.0)
            print(i, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_what_was_durable_outlives_a_kill(tmp_path: Path) -> None:
    promised = -1
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(5):
                promised = int(writer.stdout.readline())
            writer.kill()
            promised = max(
                [promised, *(int(line) for line in writer.stdout if line.endswith("\n"))]
            )
        records = _reopened(tmp_path)
        assert records == [Draw({"i": i}) for i in range(len(records))]
        assert len(records) > promised


def test_a_resumed_run_repeats_its_plan_also_after_another_crash() -> None:
    resumed = [*STORY, Resume(0)]
    state = fold(resumed)
    state.settle(0)
    assert fold(state.snapshot()).resume(0).replay == [(1, ["d", "e"])]
    assert fold([*resumed, Consume(["d", "e"], 1), Resume(0)]).resume(0).replay == [(1, ["d", "e"])]
    assert fold([*resumed, Consume(["d", "e"], 1), Resume(1)]).resume(1).replay == []
    assert fold([*resumed, Drop("d", "stale")]).resume(0).replay == []
    first = [*STORY, Resume(-1), Consume(["a", "b"], 0)]
    assert fold([*first, Resume(-1)]).resume(-1).replay == [(0, ["a", "b"]), (1, ["d", "e"])]
    other = [*STORY, Resume(-1), Consume(["a", "d"], 0), Resume(-1)]
    assert fold(other).resume(-1).replay == [(0, ["a", "d"])]


def test_payloads_are_kept_as_long_as_a_recovery_may_need_them() -> None:
    records = [admit(id, order) for order, id in enumerate("abcd")]
    records += [Accept(id, 0, [number], []) for number, id in enumerate("abcd")]
    state = fold([*records, Consume(["a"], 0), Consume(["b"], 1), Drop("c", "stale")])
    assert sorted(state.refs()) == [[0], [1], [3]]
    state.settle(0)
    assert sorted(state.refs()) == [[1], [3]]


def test_a_checkpoint_that_the_journal_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="does not know which samples step 3"):
        fold(STORY).resume(2)


async def test_a_journal_without_the_checkpoints_it_belongs_to_says_what_to_do(
    tmp_path: Path,
) -> None:
    """The message used to say that steps up to 5 are final and the run cannot go on from step
    -1."""
    ledger, _ = RolloutLedger.open(tmp_path, completed_steps=0)
    for record in STORY:
        ledger.append(record)
    ledger.record_checkpoint(1, "ckpt-00000001")
    ledger.record_checkpoint(2, "ckpt-00000002")
    ledger.close()
    for completed, start in ((0, "its beginning"), (7, "its checkpoint after step 7")):
        with pytest.raises(JournalError) as refused:
            RolloutLedger.open(tmp_path, completed_steps=completed)
        told = str(refused.value)
        assert told.startswith(f"{tmp_path}: ") and start in told and "step -1" not in told
        assert "Put its checkpoints back" in told and "recover_mode=disabled" in told
    ledger, recovery = RolloutLedger.open(tmp_path, completed_steps=1)
    assert recovery is not None and recovery.replay == [(1, ["d", "e"])], (
        "a refusal leaves the journal as it was"
    )
    ledger.close()
