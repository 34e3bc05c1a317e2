"""State of all samples that results from applying the journal's records, and recovery after a
restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from realhf.api.calls import payload_rank
from realhf.dataflow.journal.journal import (
    DIED,
    FLAT,
    Accept,
    Admit,
    Ckpt,
    Commit,
    Consume,
    Draw,
    Drop,
    End,
    Journal,
    JournalDamaged,
    JournalError,
    Record,
    Reject,
    Resume,
    Totals,
    read_history,
    read_segment,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """The open samples at a restart from the checkpoint after ``step``, and what the run must do
    with each of them."""

    step: int
    """The last step included in the checkpoint; -1 without a checkpoint."""
    version: int | None
    """Version of the weights after ``step``; None if it is not in the journal."""
    order: int
    """Number of the next admission."""
    draw: dict[str, Any] | None
    """The source's state; None if it is not in the journal."""
    replay: list[tuple[int, list[str]]]
    """Step batches (step, ids) after ``step`` that had been consumed. They are repeated with the
    same samples."""
    accepted: list[tuple[Admit, Accept]]
    """All samples that are accepted and not consumed, including those of ``replay``, in the order
    of acceptance."""
    requeue: list[Admit]
    """Unfinished samples in the order of admission. Each is to be admitted again with ``attempt +
    1``."""


class JournalState:
    """State that results from applying a journal's records in order.

    The master applies each record before it appends it. An impossible record raises ValueError and
    changes nothing, so the appended records can always be applied again.
    """

    def __init__(self) -> None:
        self.outstanding: dict[str, Admit] = {}
        """Admitted samples without a final outcome."""
        self.accepted: dict[str, Accept] = {}
        """Samples that are accepted and not consumed."""
        self.consumed: dict[int, list[str]] = {}
        """Samples of each consumed step that is not final."""
        self.planned: dict[int, list[str]] = {}
        """Step batches that a resumed run has yet to repeat."""
        self.versions: dict[int, int] = {}
        """Version of the weights after each committed step that is not final."""
        self.checkpoint: Ckpt | None = None
        """The last checkpoint."""
        self.draw: dict[str, Any] | None = None
        """The source's state."""
        self.order = 0
        """Number of the next admission."""
        self.ended = False
        """Whether the run has ended."""
        self.flat: list[int] = []
        """One entry for each sample that was dropped without learning signal and whose step is not
        consumed yet: the number of samples accepted before it that were or will be trained."""
        self._settled = -1
        """The last final step. The run will never be resumed from a checkpoint before the end of
        this step."""
        self._admits: dict[str, Admit] = {}
        """Last admission record of each open sample, including consumed ones."""
        self._trained: dict[str, Accept] = {}
        """Acceptance records of the samples of consumed steps that are not final."""
        self._rejected = 0
        self._dropped = 0
        self._consumed = 0
        """Number of samples consumed by final steps."""
        self._apply: dict[type, Callable[[Any], None]] = {
            Admit: self._on_admit,
            Accept: self._on_accept,
            Reject: self._on_reject,
            Drop: self._on_drop,
            Consume: self._on_consume,
            Commit: self._on_commit,
            Ckpt: self._on_ckpt,
            Resume: self._on_resume,
            Draw: self._on_draw,
            End: self._on_end,
            Totals: self._on_totals,
        }

    def apply(self, record: Record) -> None:
        """Apply a record. Raises ValueError for one that contradicts those before it."""
        self._apply[type(record)](record)

    def totals(self) -> dict[str, int]:
        """Return the number of samples admitted, consumed, rejected, dropped, accepted and
        outstanding. ``admitted`` is the sum of the others.

        A sample counts once, regardless of its number of attempts and of how often its step was
        repeated.
        """
        return {
            "admitted": self._consumed + self._rejected + self._dropped + len(self._admits),
            "consumed": self._consumed + len(self._trained),
            "rejected": self._rejected,
            "dropped": self._dropped,
            "accepted": len(self.accepted),
            "outstanding": len(self.outstanding),
        }

    def refs(self) -> list[list[Any]]:
        """Return the locations of the payloads that a recovery may need: those of accepted samples
        and of the samples of steps that are not final."""
        return [accept.ref for table in (self.accepted, self._trained) for accept in table.values()]

    def accepted_attempt(self, id: str) -> int | None:
        """Return the number of a sample's accepted attempt; None if there is none or its step is
        final."""
        accept = self.accepted.get(id) or self._trained.get(id)
        return accept.attempt if accept else None

    def resume(self, step: int) -> Recovery:
        """Return what to do after a restart from the checkpoint after ``step`` (-1: from the
        beginning).

        Changes nothing; to resume, append and apply ``Resume(step)``. Raises ValueError for a step
        before the last final one, and for a step that is not in the journal: ``Consume`` is durable
        before the checkpoint of its step is valid, so such a checkpoint belongs to another history.
        """
        voided, plan = self._plan_replay(step)
        accepted_again = {
            id: self._trained[id] for number in voided for id in self.consumed[number]
        }
        accepted = [
            (self._admits[id], accept) for id, accept in {**accepted_again, **self.accepted}.items()
        ]
        requeue = sorted(self.outstanding.values(), key=lambda admit: admit.order)
        draw = None if self.draw is None else dict(self.draw)
        return Recovery(
            step, self.versions.get(step), self.order, draw, list(plan.items()), accepted, requeue
        )

    def ends_before(self, step: int) -> bool:
        """Return whether the records end before ``step`` consumed its samples."""
        return step > self._settled and step not in self.consumed

    def settle(self, step: int) -> None:
        """Make the steps up to ``step`` final: the run will never be resumed from a checkpoint
        before the end of ``step``."""
        for number in [number for number in self.consumed if number <= step]:
            for id in self.consumed.pop(number):
                del self._trained[id], self._admits[id]
                self._consumed += 1
        self.planned = {number: ids for number, ids in self.planned.items() if number > step}
        self.versions = {
            number: version for number, version in self.versions.items() if number >= step
        }
        self._settled = max(self._settled, step)

    def snapshot(self) -> list[Record]:
        """Return records that restore an equal state when applied, for
        ``Journal.start_segment``."""
        admitted = self.totals()["admitted"]
        records: list[Record] = [
            Totals(
                self._settled,
                admitted,
                self._consumed,
                self._rejected,
                self._dropped,
                self.order,
                list(self.planned.items()),
                list(self.flat),
            ),
            *(Commit(step, version) for step, version in self.versions.items()),
            *self._admits.values(),
        ]
        if self.checkpoint is not None:
            records.append(self.checkpoint)
        if self.draw is not None:
            records.append(Draw(self.draw))
        records += [accept for table in (self._trained, self.accepted) for accept in table.values()]
        records += [Consume(ids, step) for step, ids in self.consumed.items()]
        return records

    # ---- records

    def _on_admit(self, record: Admit) -> None:
        known = self._admits.get(record.id)
        if known is not None and (
            record.id not in self.outstanding or record.attempt <= known.attempt
        ):
            raise ValueError(
                f"attempt {record.attempt} of {record.id} after attempt {known.attempt} is not open"
            )
        self.outstanding[record.id] = self._admits[record.id] = record
        self.order = max(self.order, record.order + 1)

    def _on_accept(self, record: Accept) -> None:
        self._check_open(record.id, record.attempt)
        del self.outstanding[record.id]
        self.accepted[record.id] = record

    def _on_reject(self, record: Reject) -> None:
        self._check_open(record.id, record.attempt)
        if record.final:
            del self.outstanding[record.id], self._admits[record.id]
            self._rejected += 1
            return
        # Keep the counts: otherwise a sample that crashes workers would get all its attempts again
        # after each recovery.
        admit = self._admits[record.id]
        died = record.outcome == DIED
        updated = replace(admit, failures=admit.failures + (not died), deaths=admit.deaths + died)
        self._admits[record.id] = updated
        self.outstanding[record.id] = updated

    def _on_drop(self, record: Drop) -> None:
        if record.id not in self.accepted:
            raise ValueError(f"{record.id} is dropped without being accepted")
        del self.accepted[record.id], self._admits[record.id]
        self._dropped += 1
        if record.reason == FLAT:
            self.flat.append(self._consumed + len(self._trained) + len(self.accepted))

    def _on_consume(self, record: Consume) -> None:
        if record.step in self.consumed or record.step <= self._settled:
            raise ValueError(f"step {record.step} has consumed its samples already")
        unknown = [id for id in record.ids if id not in self.accepted]
        if unknown or len(set(record.ids)) != len(record.ids):
            raise ValueError(
                f"step {record.step} consumes {unknown or 'a sample twice'}, which are not accepted"
            )
        for id in record.ids:
            self._trained[id] = self.accepted.pop(id)
        self.consumed[record.step] = list(record.ids)
        self.flat = [
            number for number in self.flat if number >= self._consumed + len(self._trained)
        ]
        if self.planned.pop(record.step, record.ids) != record.ids:
            self.planned.clear()  # the step was not repeated as planned, so later plans are void

    def _on_commit(self, record: Commit) -> None:
        self.versions[record.step] = record.version

    def _on_ckpt(self, record: Ckpt) -> None:
        self.checkpoint = record

    def _on_draw(self, record: Draw) -> None:
        self.draw = record.state

    def _on_end(self, record: End) -> None:
        self.ended = True

    def _on_resume(self, record: Resume) -> None:
        voided, plan = self._plan_replay(record.step)
        accepted_again = {
            id: self._trained.pop(id) for number in voided for id in self.consumed.pop(number)
        }
        self.accepted = {**accepted_again, **self.accepted}
        self.planned = plan
        self.versions = {
            step: version for step, version in self.versions.items() if step <= record.step
        }
        if self.checkpoint is not None and self.checkpoint.step > record.step:
            self.checkpoint = None
        self.ended = False

    def _on_totals(self, record: Totals) -> None:
        empty = JournalState()
        self.__dict__.update(
            {name: value for name, value in vars(empty).items() if name != "_apply"}
        )
        self.order = record.order
        self._settled = record.step
        self._consumed = record.consumed
        self._rejected = record.rejected
        self._dropped = record.dropped
        self.planned = {step: list(ids) for step, ids in record.planned}
        self.flat = list(record.flat)

    def _check_open(self, id: str, attempt: int) -> None:
        """Raise ValueError unless this attempt at a sample is outstanding."""
        admit = self.outstanding.get(id)
        if admit is None or admit.attempt != attempt:
            raise ValueError(f"attempt {attempt} of {id} is not outstanding")

    def _plan_replay(self, step: int) -> tuple[list[int], dict[int, list[str]]]:
        """Return the consumed steps that a restart after ``step`` undoes, and the step batches to
        repeat.

        The step batches start at ``step + 1`` and end before the first one that is unknown or has
        lost a sample.
        """
        if step < self._settled:
            raise ValueError(f"the samples up to step {self._settled + 1} are used up for good")
        if self.ends_before(step):
            raise ValueError(f"the journal does not know which samples step {step + 1} consumed")
        voided = sorted(number for number in self.consumed if number > step)
        known = {**self.planned, **{number: self.consumed[number] for number in voided}}
        available = self.accepted.keys() | {id for number in voided for id in self.consumed[number]}
        plan: dict[int, list[str]] = {}
        while (ids := known.get(step + 1 + len(plan))) and available.issuperset(ids):
            plan[step + 1 + len(plan)] = list(ids)
        return voided, plan


def fold(records: Iterable[Record]) -> JournalState:
    """Apply all records in order and return the resulting state. Raises ValueError if one is
    impossible."""
    state = JournalState()
    for record in records:
        state.apply(record)
    return state


def _find_damage(folder: Path, completed_steps: int, *, has_snapshot: bool) -> str:
    """Return why a run cannot be resumed after ``completed_steps`` from the journal in ``folder``;
    "" if it can.

    Also returns "" if the journal cannot be read at the moment, because opening it will raise that
    error. ``has_snapshot``: the checkpoint contains a snapshot of the journal, so a journal that
    ends before the checkpoint may be replaced. Changes nothing. Raises JournalError if journal and
    checkpoint belong to different histories.
    """
    step = completed_steps - 1
    try:
        records = read_history(folder).records
    except JournalDamaged as error:
        return str(error)
    except OSError:
        return ""
    if not records:
        if completed_steps == 0 or (folder.is_symlink() and not folder.exists()):
            return ""
        return f"{folder} has no journal, but the run has trained {completed_steps} steps"
    try:
        state = fold(records)
        if has_snapshot and state.ends_before(step):
            return f"{folder} ends before step {step + 1}, after which there is a checkpoint"
        state.resume(step)
    except ValueError as error:
        start = (
            f"its checkpoint after step {completed_steps}" if completed_steps else "its beginning"
        )
        raise JournalError(
            f"{folder}: {error}; the run would resume from {start}, because no later intact "
            f"checkpoint exists. "
            "Put its checkpoints back where they were, or start over with "
            "recover_mode=disabled"
        ) from None
    return ""


class RolloutLedger:
    """The journal together with the state that results from its records. Create it with ``open``.
    Steps are numbered from 0."""

    def __init__(self, journal: Journal, state: JournalState, timeout_s: float) -> None:
        self._journal = journal
        self.state = state
        self._timeout_s = timeout_s
        self._settled: int | None = None
        """The last step in the newest checkpoint; it becomes final at the next checkpoint."""
        self.last = 0
        """Number of the last append."""
        self.newest_payloads: dict[int, list[Any]] = {}
        """For each rank of the trainer, the location of the payload that was accepted last since
        the start."""

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        completed_steps: int,
        archive: bool = False,
        snapshot: Path | None = None,
        warn: Callable[[str], None] = _log.warning,
        timeout_s: float = 30.0,
    ) -> tuple[RolloutLedger, Recovery | None]:
        """Open the journal in ``folder`` for a run that resumes after ``completed_steps``.

        Returns the ledger and, unless the journal is new, what to do with the open samples. A
        journal that is damaged or ends before the checkpoint is rebuilt from ``snapshot``, a file
        of the checkpoint, with a warning through ``warn``. Checkpoints of earlier package versions
        have no such file (None). ``timeout_s`` is the time in seconds that the disk has for writing
        a record. Raises JournalError, also if journal and checkpoint belong to different histories.
        """
        has_snapshot = snapshot is not None and snapshot.is_file()
        damage = _find_damage(folder, completed_steps, has_snapshot=has_snapshot)
        if damage and not has_snapshot:
            raise JournalDamaged(
                f"{damage}; which samples the run has trained is not known. Nothing was changed; "
                f"put {folder} back as "
                "it was, or start over with recover_mode=disabled"
            )
        restart = None
        if damage:
            assert snapshot is not None
            restart = [record for frame in read_segment(snapshot)[0] for record in frame]
        notes: list[str] = []
        journal, records = Journal.open(folder, archive=archive, restart=restart, warn=notes.append)
        if damage:
            warn(
                f"{damage}; the run continues with the samples that the checkpoint of step "
                f"{completed_steps} records, samples leased since then are leased again, and "
                f"{notes.pop()}"
            )
        for note in notes:
            warn(note)
        ledger = cls(journal, fold(records), timeout_s)
        if not records:
            return ledger, None
        recovery = ledger.state.resume(completed_steps - 1)
        ledger.append(Resume(completed_steps - 1))
        return ledger, recovery

    def snapshot_after(self, completed_steps: int) -> list[Record]:
        """Return a snapshot, for a checkpoint's ``write_snapshot``, of the state in which
        ``completed_steps`` steps are final."""
        state = fold(self.state.snapshot())
        state.settle(completed_steps - 1)
        return state.snapshot()

    def append(self, *records: Record) -> int:
        """Apply the records and append them as one frame; return the number of the append.

        Raises ValueError for a record that contradicts earlier ones.
        """
        for record in records:
            self.state.apply(record)
            if isinstance(record, Accept):
                self.newest_payloads[payload_rank(record.ref)] = record.ref
        self.last = self._journal.append(*records)
        return self.last

    async def wait_until_durable(self, number: int | None = None) -> None:
        """Wait until an append (None: the last one) is on disk. Raises JournalError."""
        await self._journal.wait_until_durable(
            self.last if number is None else number, self._timeout_s
        )

    def record_checkpoint(self, completed_steps: int, folder: str) -> None:
        """Record a valid checkpoint, and remove the steps before the previous checkpoint from the
        journal.

        The steps since then stay, because the newest checkpoint may turn out to be damaged.
        """
        self.append(Ckpt(completed_steps - 1, folder))
        if self._settled is not None:
            self.state.settle(self._settled)
            self.last = self._journal.start_segment(self._settled, self.state.snapshot())
        self._settled = completed_steps - 1

    def close(self) -> None:
        """Close the journal. Raises JournalError if a record was not written."""
        self._journal.close()
