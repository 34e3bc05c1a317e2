"""Audit of a journal: was any sample lost, was any trained twice?

``python -m realhf.dataflow.journal.audit FOLDER`` prints the tally as JSON; its status is 1 if
there is an error. The audit tracks each sample with separate code, independent of the code with which
a run recovers. With the archive of the removed segments (``Journal.open(..., archive=True)``)
it covers the whole run, otherwise the time since the last snapshot.

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
class JournalTally:
    """Number of samples by outcome. A resumption after step s undoes later steps, which are not
    counted."""

    admitted: int
    """Samples admitted at least once."""
    consumed: int
    """Samples that a step was trained on."""
    rejected: int
    """Samples that were given up."""
    dropped: int
    """Samples accepted and then dropped."""
    accepted: int
    """Samples that are accepted and not yet consumed."""
    outstanding: int
    """Samples admitted without a final outcome; 0 in a run that has ended."""
    lost: int
    """Samples that were admitted but are missing from a later snapshot."""
    twice: int
    """Samples consumed by more than one step."""
    impossible: int
    """Records that contradict earlier ones."""
    steps: int
    """Steps trained."""
    resumes: int
    """Resumptions."""
    head_staleness_max: int
    """Largest difference between the step that consumed a sample and the sample's admission
    version."""
    ended: bool
    """Whether the run has ended normally."""
    complete: bool
    """Whether the audit covers the run from its first record."""

    @property
    def is_balanced(self) -> bool:
        """Whether no sample is lost or consumed twice and no record is impossible."""
        return self.lost == self.twice == self.impossible == 0


class _SampleTracker:
    """State of each sample, by id, updated while the records are read in order."""

    def __init__(self) -> None:
        self.state_of: dict[str, str] = {}
        self.step_of: dict[str, int] = {}
        """Step that consumed each sample."""
        self.version_of: dict[str, int] = {}
        """Policy version at each sample's last admission."""
        self.attempt_of: dict[str, int] = {}
        """Number of each sample's last attempt."""
        self.steps: set[int] = set()
        self.counts_before: Counter[str] = Counter()
        """Number of samples by outcome before the first snapshot that was read."""
        self.twice = 0
        self.impossible = 0
        self.resumes = 0
        self.staleness = 0
        self.complete = True
        self.ended = False

    def read_frame(self, records: Sequence[Record]) -> None:
        """Apply the records of one frame or, if it is a snapshot, compare the state with it."""
        if isinstance(records[0], Totals):
            self._check_snapshot(records[0], records[1:])
            return
        for record in records:
            self._apply(record)

    def _apply(self, record: Record) -> None:
        match record:
            case Admit():
                self._move(record.id, "outstanding", {None, "outstanding"})
                self.impossible += record.attempt <= self.attempt_of.get(record.id, -1)
                self.version_of[record.id] = record.version
                self.attempt_of[record.id] = record.attempt
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

    def _move(self, id: str, new_state: str, allowed: set[str | None]) -> None:
        """Change the state of a sample. The record counts as impossible unless the old state is in
        ``allowed``."""
        self.impossible += self.state_of.get(id) not in allowed
        self.state_of[id] = new_state

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
            self.state_of[id] = "accepted"

    def _check_snapshot(self, totals: Totals, records: Sequence[Record]) -> None:
        """Compare the open samples with those of a snapshot; samples missing from it are lost. If
        no record has been read before, start from the snapshot."""
        snapshot = _SampleTracker()
        snapshot.complete = False
        for record in records:
            snapshot._apply(record)
        closed = {
            "consumed": totals.consumed,
            "rejected": totals.rejected,
            "dropped": totals.dropped,
        }
        self.impossible += totals.admitted != sum(closed.values()) + len(snapshot.state_of)
        if not self.state_of and not self.counts_before:
            snapshot.impossible += self.impossible
            self.__dict__.update(vars(snapshot))
            self.counts_before = Counter(closed)
            return
        final = {id for id, step in self.step_of.items() if step <= totals.step}
        open_states = ("outstanding", "accepted", "consumed")
        open_samples = {id: state for id, state in self.state_of.items() if state in open_states}
        for id, state in open_samples.items():
            if id not in final and id not in snapshot.attempt_of:
                self.state_of[id] = "lost"
                self.step_of.pop(id, None)
            else:
                self.impossible += id not in final and snapshot.state_of[id] != state
        self.impossible += snapshot.impossible + len(
            snapshot.attempt_of.keys() - open_samples.keys()
        )
        counts = self._counts()
        open_consumed = len(self.step_of) - len(final)
        self.impossible += closed != {
            "consumed": counts["consumed"] - open_consumed,
            "rejected": counts["rejected"],
            "dropped": counts["dropped"],
        }

    def _counts(self) -> Counter[str]:
        return self.counts_before + Counter(self.state_of.values())

    def build_tally(self) -> JournalTally:
        """Return the tally of the records read so far."""
        counts = self._counts()
        return JournalTally(
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


def audit(frames: Iterable[Sequence[Record]]) -> JournalTally:
    """Return the tally of a history. ``frames`` are the records of each append, in order."""
    tracker = _SampleTracker()
    for frame in frames:
        tracker.read_frame(frame)
    return tracker.build_tally()


def audit_folder(folder: Path) -> JournalTally:
    """Return the tally of a journal including its archive. A run may be using the journal.

    Raises JournalError if there is no journal, or if a segment before the last one is damaged.
    """
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
    """Audit a folder and return the exit status: 0 if the journal balances, 1 if not, 2 if it
    cannot be read."""
    parser = argparse.ArgumentParser(
        description="Count what became of every sample of an asynchronous run."
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("folder", type=Path, help="the folder with journal-<n>.log")
    try:
        tally = audit_folder(parser.parse_args(arguments).folder)
    except JournalError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(asdict(tally)))
    return 0 if tally.is_balanced else 1


if __name__ == "__main__":
    raise SystemExit(main())
