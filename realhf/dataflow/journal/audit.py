"""Counts a journal's samples one by one: was any lost, was any trained twice?

``python -m realhf.dataflow.journal.audit FOLDER`` prints the tally as JSON and ends with status 1 where something is
wrong. It keeps a book of its own, apart from the code with which the run recovers. With the archive of the removed
segments (``Journal.open(..., archive=True)``) it sees the whole run, else what happened since the last snapshot.
Source: docs/reference/dataflow.md 9, "Journal".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import realhf
from realhf.dataflow.journal.journal import (
    ARCHIVE,
    Accept,
    Admit,
    Commit,
    Consume,
    Drop,
    End,
    JournalError,
    Record,
    Reject,
    Resume,
    Totals,
    read_segment,
    segments,
)


@dataclass(frozen=True)
class Tally:
    """Samples of the final lineage, in which a resumption after step s undoes what later steps consumed.

    ``accepted``: waiting to be consumed. ``outstanding``: admitted, without a final outcome; a run that came to
    its end has none. ``lost``: admitted, and now nowhere. ``twice``: consumed by more than one step.
    ``impossible``: events that contradict earlier ones. ``head_staleness_max``: greatest distance from a sample's
    admission version to the step that consumed it. ``complete``: seen from the first record of the run on.
    """

    admitted: int
    consumed: int
    rejected: int
    dropped: int
    accepted: int
    outstanding: int
    lost: int
    twice: int
    impossible: int
    steps: int
    resumes: int
    head_staleness_max: int
    ended: bool
    complete: bool

    @property
    def balanced(self) -> bool:
        """Nothing lost, nothing twice, nothing impossible."""
        return self.lost == self.twice == self.impossible == 0


class _Book:
    """Where each sample is, by its id."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        self.step_of: dict[str, int] = {}
        self.version_of: dict[str, int] = {}
        self.attempt_of: dict[str, int] = {}
        self.steps: set[int] = set()
        self.before: Counter[str] = Counter()
        self.twice = self.impossible = self.resumes = self.staleness = 0
        self.complete, self.ended = True, False

    def frame(self, records: Sequence[Record]) -> None:
        """Enter the records of one frame, or begin with the totals of a snapshot."""
        if isinstance(records[0], Totals):
            self._snapshot(records[0], records[1:])
            return
        for record in records:
            self._enter(record)

    def _enter(self, record: Record) -> None:
        match record:
            case Admit():
                self._move(record.id, "outstanding", {None, "outstanding"})
                self.impossible += record.attempt <= self.attempt_of.get(record.id, -1)
                self.version_of[record.id], self.attempt_of[record.id] = record.version, record.attempt
            case Accept():
                self._move(record.id, "accepted", {"outstanding"})
                self.impossible += self.attempt_of.get(record.id) != record.attempt
            case Reject(final=True):
                self._move(record.id, "rejected", {"outstanding"})
            case Drop():
                self._move(record.id, "dropped", {"accepted"})
            case Consume():
                self._consume(record)
            case Resume():
                self._resume(record.step)
            case Commit():
                self.impossible += record.step not in self.steps and self.complete
            case _:
                self.ended = isinstance(record, End)

    def _move(self, id: str, to: str, allowed: set[str | None]) -> None:
        self.impossible += self.place.get(id) not in allowed
        self.place[id] = to

    def _consume(self, record: Consume) -> None:
        self.impossible += record.step in self.steps
        self.steps.add(record.step)
        for id in record.ids:
            if id in self.step_of:
                self.twice += 1
            else:
                self._move(id, "consumed", {"accepted"})
            self.step_of[id] = record.step
            self.staleness = max(self.staleness, record.step - self.version_of.get(id, record.step))

    def _resume(self, step: int) -> None:
        self.resumes += 1
        self.steps = {number for number in self.steps if number <= step}
        for id in [id for id, consumed in self.step_of.items() if consumed > step]:
            del self.step_of[id]
            self.place[id] = "accepted"

    def _snapshot(self, totals: Totals, records: Sequence[Record]) -> None:
        """What is open according to the snapshot must be what the book holds open; what it leaves out is lost."""
        book = _Book()
        book.complete = False
        for record in records:
            book._enter(record)
        closed = {"consumed": totals.consumed, "rejected": totals.rejected, "dropped": totals.dropped}
        self.impossible += totals.admitted != sum(closed.values()) + len(book.place)
        if not self.place and not self.before:
            book.impossible += self.impossible
            self.__dict__.update(vars(book))
            self.before = Counter(closed)
            return
        final = {id for id, step in self.step_of.items() if step <= totals.step}
        held = {id: place for id, place in self.place.items() if place in ("outstanding", "accepted", "consumed")}
        for id, place in held.items():
            if id not in final and id not in book.attempt_of:
                self.place[id] = "lost"
                self.step_of.pop(id, None)
            else:
                self.impossible += id not in final and book.place[id] != place
        self.impossible += book.impossible + len(book.attempt_of.keys() - held.keys())
        counts = self._counts()
        open_consumed = len(self.step_of) - len(final)
        self.impossible += closed != {
            "consumed": counts["consumed"] - open_consumed,
            "rejected": counts["rejected"],
            "dropped": counts["dropped"],
        }

    def _counts(self) -> Counter[str]:
        return self.before + Counter(self.place.values())

    def tally(self) -> Tally:
        """Return the balance of what was entered."""
        counts = self._counts()
        return Tally(
            admitted=counts.total(),
            consumed=counts["consumed"],
            rejected=counts["rejected"],
            dropped=counts["dropped"],
            accepted=counts["accepted"],
            outstanding=counts["outstanding"],
            lost=counts["lost"],
            twice=self.twice,
            impossible=self.impossible,
            steps=len(self.steps),
            resumes=self.resumes,
            head_staleness_max=self.staleness,
            ended=self.ended,
            complete=self.complete,
        )


def audit(frames: Iterable[Sequence[Record]]) -> Tally:
    """The tally of a history: the records of each append, in order."""
    book = _Book()
    for frame in frames:
        book.frame(frame)
    return book.tally()


def audit_folder(folder: Path) -> Tally:
    """The tally of a journal with its archive, also of one that is being written. Raises JournalError where there
    is none or a segment before the last is damaged."""
    paths = [*segments(folder / ARCHIVE), *segments(folder)]
    if not paths:
        raise JournalError(f"there is no journal in {folder}")
    frames: list[list[Record]] = []
    for path in paths:
        read, good = read_segment(path)
        if good < path.stat().st_size and path != paths[-1]:
            raise JournalError(f"{path} is damaged at byte {good}, and it is not the last segment")
        frames += read
    return audit(frames)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if the journal balances."""
    parser = argparse.ArgumentParser(description="Count what became of every sample of an asynchronous run.")
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("folder", type=Path, help="the folder with journal-<n>.log")
    try:
        tally = audit_folder(parser.parse_args(arguments).folder)
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(tally)))
    return 0 if tally.balanced else 1


if __name__ == "__main__":
    raise SystemExit(main())
