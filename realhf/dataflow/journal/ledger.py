"""Folds the journal's records into what they amount to, and refuses a record that cannot follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from realhf.api.calls import rank_of
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
    """What a run that resumes from the checkpoint after ``step`` does with the samples that are open.

    ``replay``: step batches of the steps from ``step + 1`` on that were consumed before, to be repeated as they were;
    their samples are among ``accepted``, which holds all that are accepted and not consumed, in the order of
    acceptance. ``requeue``: unfinished samples in the order of admission, each to be admitted with ``attempt + 1``
    (a new admission with the version of that moment). ``order``: the next admission's. ``draw``: the source's
    state, ``version``: that of the last committed step up to ``step``; None where the journal does not know.
    """

    step: int
    version: int | None
    order: int
    draw: dict[str, Any] | None
    replay: list[tuple[int, list[str]]]
    accepted: list[tuple[Admit, Accept]]
    requeue: list[Admit]


class JournalState:
    """The fold of a journal's records. The master applies each record before it appends it: an impossible one
    raises ValueError and changes nothing, so whatever was appended can be folded again.

    ``outstanding``: admitted, outcome not final. ``accepted``: accepted, not consumed. ``consumed``: samples of the
    steps that are not final. ``planned``: step batches which a resumed run has yet to repeat. ``order``: the next
    admission's. ``draw``: the source's state. ``versions``: of the weights after each committed step that is not
    final. ``flat``: for each sample that was dropped because it teaches nothing, and whose step is not consumed yet,
    the number of those before it that were or will be trained. ``totals()`` counts each sample once, however often it
    was tried or its step repeated.
    """

    def __init__(self) -> None:
        self.outstanding: dict[str, Admit] = {}
        self.accepted: dict[str, Accept] = {}
        self.consumed: dict[int, list[str]] = {}
        self.planned: dict[int, list[str]] = {}
        self.versions: dict[int, int] = {}
        self.checkpoint: Ckpt | None = None
        self.draw: dict[str, Any] | None = None
        self.order = 0
        self.ended = False
        self.flat: list[int] = []
        self._settled = -1
        self._admits: dict[str, Admit] = {}
        self._trained: dict[str, Accept] = {}
        self._rejected = self._dropped = self._consumed = 0
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
        """Raises ValueError for a record that cannot follow what was applied before."""
        self._apply[type(record)](record)

    def totals(self) -> dict[str, int]:
        """{admitted, consumed, rejected, dropped, accepted, outstanding}; the first is the sum of the others."""
        return {
            "admitted": self._consumed + self._rejected + self._dropped + len(self._admits),
            "consumed": self._consumed + len(self._trained),
            "rejected": self._rejected,
            "dropped": self._dropped,
            "accepted": len(self.accepted),
            "outstanding": len(self.outstanding),
        }

    def refs(self) -> list[list[Any]]:
        """Where the payloads lie that a recovery may need: of accepted samples and of steps that are not final."""
        return [accept.ref for table in (self.accepted, self._trained) for accept in table.values()]

    def accepted_attempt(self, id: str) -> int | None:
        """The attempt at a sample that was accepted; None where there is none, or where its step is final."""
        accept = self.accepted.get(id) or self._trained.get(id)
        return accept.attempt if accept else None

    def resume(self, step: int) -> Recovery:
        """What to do after a restart from the checkpoint after ``step`` (-1: from the beginning). Changes nothing:
        append and apply ``Resume(step)`` for that. Raises ValueError for a step before the last final one, and for one
        that the journal does not know: ``Consume`` is durable before the checkpoint of its step is valid."""
        voided, plan = self._voided(step)
        back = {id: self._trained[id] for number in voided for id in self.consumed[number]}
        accepted = [(self._admits[id], accept) for id, accept in {**back, **self.accepted}.items()]
        requeue = sorted(self.outstanding.values(), key=lambda admit: admit.order)
        draw = None if self.draw is None else dict(self.draw)
        return Recovery(step, self.versions.get(step), self.order, draw, list(plan.items()), accepted, requeue)

    def ends_before(self, step: int) -> bool:
        """Return whether ``step`` consumed samples that are not known here."""
        return step > self._settled and step not in self.consumed

    def settle(self, step: int) -> None:
        """Steps up to ``step`` are final: no checkpoint before the one after it will ever be resumed from."""
        for number in [number for number in self.consumed if number <= step]:
            for id in self.consumed.pop(number):
                del self._trained[id], self._admits[id]
                self._consumed += 1
        self.planned = {number: ids for number, ids in self.planned.items() if number > step}
        self.versions = {number: version for number, version in self.versions.items() if number >= step}
        self._settled = max(self._settled, step)

    def snapshot(self) -> list[Record]:
        """Records of one append that make an equal state, for ``Journal.checkpointed``."""
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
        if known is not None and (record.id not in self.outstanding or record.attempt <= known.attempt):
            raise ValueError(f"attempt {record.attempt} of {record.id} after attempt {known.attempt} is not open")
        self.outstanding[record.id] = self._admits[record.id] = record
        self.order = max(self.order, record.order + 1)

    def _on_accept(self, record: Accept) -> None:
        self._open(record.id, record.attempt)
        del self.outstanding[record.id]
        self.accepted[record.id] = record

    def _on_reject(self, record: Reject) -> None:
        self._open(record.id, record.attempt)
        if record.final:
            del self.outstanding[record.id], self._admits[record.id]
            self._rejected += 1
            return
        # Else a sample that kills who plays it would have all its attempts again after each recovery.
        admit, died = self._admits[record.id], record.outcome == DIED
        counted = replace(admit, failures=admit.failures + (not died), deaths=admit.deaths + died)
        self.outstanding[record.id] = self._admits[record.id] = counted

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
        strangers = [id for id in record.ids if id not in self.accepted]
        if strangers or len(set(record.ids)) != len(record.ids):
            raise ValueError(f"step {record.step} consumes {strangers or 'a sample twice'}, which are not accepted")
        for id in record.ids:
            self._trained[id] = self.accepted.pop(id)
        self.consumed[record.step] = list(record.ids)
        self.flat = [number for number in self.flat if number >= self._consumed + len(self._trained)]
        if self.planned.pop(record.step, record.ids) != record.ids:
            self.planned.clear()

    def _on_commit(self, record: Commit) -> None:
        self.versions[record.step] = record.version

    def _on_ckpt(self, record: Ckpt) -> None:
        self.checkpoint = record

    def _on_draw(self, record: Draw) -> None:
        self.draw = record.state

    def _on_end(self, record: End) -> None:
        self.ended = True

    def _on_resume(self, record: Resume) -> None:
        voided, plan = self._voided(record.step)
        back = {id: self._trained.pop(id) for number in voided for id in self.consumed.pop(number)}
        self.accepted = {**back, **self.accepted}
        self.planned = plan
        self.versions = {step: version for step, version in self.versions.items() if step <= record.step}
        if self.checkpoint is not None and self.checkpoint.step > record.step:
            self.checkpoint = None
        self.ended = False

    def _on_totals(self, record: Totals) -> None:
        fresh = JournalState()
        self.__dict__.update({name: value for name, value in vars(fresh).items() if name != "_apply"})
        self.order, self._settled = record.order, record.step
        self._consumed, self._rejected, self._dropped = record.consumed, record.rejected, record.dropped
        self.planned = {step: list(ids) for step, ids in record.planned}
        self.flat = list(record.flat)

    def _open(self, id: str, attempt: int) -> None:
        admit = self.outstanding.get(id)
        if admit is None or admit.attempt != attempt:
            raise ValueError(f"attempt {attempt} of {id} is not outstanding")

    def _voided(self, step: int) -> tuple[list[int], dict[int, list[str]]]:
        """Consumed steps that a restart after ``step`` undoes, and the step batches from ``step + 1`` on to repeat,
        up to the first that is unknown or has lost a sample."""
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
    """The state after all of the records. Raises ValueError where one is impossible."""
    state = JournalState()
    for record in records:
        state.apply(record)
    return state


def _damage(folder: Path, completed_steps: int, *, kept: bool) -> str:
    """Return why the journal in ``folder`` does not say what a run that goes on after ``completed_steps`` must know; ""
    where it does, and where it cannot be read now, as who opens it will say. ``kept``: the checkpoint knows it as well,
    so that a journal that ends before it is not of another history. Changes nothing. Raises JournalError where journal
    and checkpoint do not go together."""
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
        return f"{folder} holds no journal, though the run has trained {completed_steps} steps"
    try:
        state = fold(records)
        if kept and state.ends_before(step):
            return f"{folder} ends before step {step + 1}, after which there is a checkpoint"
        state.resume(step)
    except ValueError as error:
        start = f"its checkpoint after step {completed_steps}" if completed_steps else "its beginning"
        raise JournalError(
            f"{folder}: {error}; the run would go on from {start}, because there is no later checkpoint that is "
            "whole. Put its checkpoints back where they were, or begin anew with recover_mode=disabled"
        ) from None
    return ""


class RolloutLedger:
    """Steps are numbered from 0. ``newest_payloads``: by rank of the trainer, where the last sample lies that was
    accepted since the start. Use ``open``."""

    def __init__(self, journal: Journal, state: JournalState, timeout_s: float) -> None:
        self._journal, self.state = journal, state
        self._timeout_s = timeout_s
        self._settled: int | None = None
        self.last = 0
        self.newest_payloads: dict[int, list[Any]] = {}

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
        """The journal in ``folder`` and, unless the run is new, what one that goes on after ``completed_steps`` has to
        do with what was open. A journal that is damaged, or ends before the checkpoint, is made again from
        ``snapshot``, which the checkpoint holds (None: one of an earlier version, which has none); ``warn`` is told.
        The disk has ``timeout_s`` for a record.
        Raises JournalError, also where journal and checkpoint are not of one history."""
        kept = snapshot is not None and snapshot.is_file()
        damage = _damage(folder, completed_steps, kept=kept)
        if damage and not kept:
            raise JournalDamaged(
                f"{damage}; which samples the run has trained is not known. Nothing was changed; put {folder} back as "
                "it was, or begin anew with recover_mode=disabled"
            )
        restart = None
        if damage:
            assert snapshot is not None
            restart = [record for frame in read_segment(snapshot)[0] for record in frame]
        notes: list[str] = []
        journal, records = Journal.open(folder, archive=archive, restart=restart, warn=notes.append)
        if damage:
            warn(
                f"{damage}; the run goes on from what the checkpoint of step {completed_steps} knows of its samples, "
                f"those that were given out since are given out again, and {notes.pop()}"
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
        """Return what is open after ``completed_steps``, for ``write_snapshot`` in a checkpoint and then ``open``."""
        state = fold(self.state.snapshot())
        state.settle(completed_steps - 1)
        return state.snapshot()

    def append(self, *records: Record) -> int:
        """Write the records, all or none. Raises ValueError for one that cannot follow."""
        for record in records:
            self.state.apply(record)
            if isinstance(record, Accept):
                self.newest_payloads[rank_of(record.ref)] = record.ref
        self.last = self._journal.append(*records)
        return self.last

    async def durable(self, number: int | None = None) -> None:
        """Wait until an append (None: the last) is on the disk."""
        await self._journal.durable(self.last if number is None else number, self._timeout_s)

    def checkpointed(self, completed_steps: int, folder: str) -> None:
        """A checkpoint is valid. What the one before it covers is final, and leaves the journal: the newest may turn
        out damaged."""
        self.append(Ckpt(completed_steps - 1, folder))
        if self._settled is not None:
            self.state.settle(self._settled)
            self.last = self._journal.checkpointed(self._settled, self.state.snapshot())
        self._settled = completed_steps - 1

    def close(self) -> None:
        """Raises JournalError when something was not written."""
        self._journal.close()
