"""The journal together with the state that its records amount to: what cannot follow is never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from realhf.api.streaming import rank_of
from realhf.dataflow.journal.records import Accept, Ckpt, End, Record, Resume
from realhf.dataflow.journal.state import JournalState, Recovery, fold
from realhf.dataflow.journal.writer import Journal, JournalError


class RolloutLedger:
    """Steps are numbered from 0. ``newest_payloads``: by rank of the trainer, where the last sample lies that was
    accepted since the start. Use ``open``."""

    def __init__(self, journal: Journal, state: JournalState) -> None:
        self._journal, self._state = journal, state
        self._settled: int | None = None
        self.last = 0
        self.newest_payloads: dict[int, list[Any]] = {}

    @classmethod
    def open(
        cls, folder: Path, *, completed_steps: int, archive: bool = False
    ) -> tuple[RolloutLedger, Recovery | None]:
        """The journal in ``folder`` and, unless it is new, what a run that goes on after ``completed_steps`` has to do
        with what was open. Raises JournalError, also where journal and checkpoint are not of one history."""
        journal, records = Journal.open(folder, archive=archive)
        try:
            ledger = cls(journal, fold(records))
            if not records:
                return ledger, None
            recovery = ledger._state.resume(completed_steps - 1)
        except ValueError as error:
            journal.close()
            start = f"its checkpoint after step {completed_steps}" if completed_steps else "its beginning"
            raise JournalError(
                f"{folder}: {error}; the run would go on from {start}, because there is no later checkpoint that is "
                "whole. Put its checkpoints back where they were, or begin anew with recover_mode=disabled"
            ) from None
        ledger.append(Resume(completed_steps - 1))
        return ledger, recovery

    def append(self, *records: Record) -> int:
        """Write the records, all or none. Raises ValueError for one that cannot follow."""
        for record in records:
            self._state.apply(record)
            if isinstance(record, Accept):
                self.newest_payloads[rank_of(record.ref)] = record.ref
        self.last = self._journal.append(*records)
        return self.last

    async def durable(self, number: int | None = None) -> None:
        """Wait until an append (None: the last) is on the disk."""
        await self._journal.durable(self.last if number is None else number)

    def accepted_attempt(self, sample_id: str) -> int | None:
        """The attempt of a sample that was accepted, unless its step is final."""
        return self._state.accepted_attempt(sample_id)

    def checkpointed(self, completed_steps: int, folder: str) -> None:
        """A checkpoint is valid. What the one before it covers is final, and leaves the journal: the newest may turn
        out damaged."""
        self.append(Ckpt(completed_steps - 1, folder))
        if self._settled is not None:
            self._state.settle(self._settled)
            self.last = self._journal.checkpointed(self._settled, self._state.snapshot())
        self._settled = completed_steps - 1

    def payloads(self) -> list[list[Any]]:
        """Where the payloads lie that a recovery may need."""
        return self._state.refs()

    def totals(self) -> dict[str, int]:
        """Every admitted sample, counted once."""
        return self._state.totals()

    def end(self) -> None:
        """The run is over."""
        self.append(End())

    def close(self) -> None:
        """Raises JournalError when something was not written."""
        self._journal.close()
