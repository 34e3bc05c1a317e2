"""A master in small that writes a journal, is killed at random places and goes on from checkpoint
and journal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from realhf.dataflow.journal.journal import (
    Accept,
    Admit,
    Ckpt,
    Commit,
    Consume,
    Draw,
    Drop,
    End,
    Journal,
    Record,
    Reject,
    Resume,
    segments,
)
from realhf.dataflow.journal.ledger import fold


@dataclass
class JournaledRun:
    """``total`` prompts p0, p1, ..., in batches of ``batch_size``. ``weights`` stands for the
    trained weights: the step batches that went into them; ``checkpoints``: (step, weights), the
    newest two, as they lie on the disk."""

    folder: Path
    random: Random
    total: int
    batch_size: int
    weights: list[list[str]] = field(default_factory=list)
    checkpoints: list[tuple[int, list[list[str]]]] = field(default_factory=list)
    finished: bool = False

    async def live(self, events: int) -> None:
        """Resume, go on for so many events or to the end, and die: what was not durable may be
        gone."""
        self.journal, records = Journal.open(self.folder, archive=True)
        self.state = fold(records)
        self._resume(had_records=bool(records))
        self.safe = 0
        for _ in range(events):
            await self._event()
            if self.finished:
                break
        self.journal.close()
        if not self.finished:
            self._tear()

    def _resume(self, *, had_records: bool) -> None:
        newest, self.weights = self.checkpoints[-1] if self.checkpoints else (-1, [])
        if len(self.checkpoints) > 1 and self.random.random() < 0.2:
            self.checkpoints.pop()
            newest, self.weights = self.checkpoints[-1]
        self.weights = list(self.weights)
        recovery = self.state.resume(newest)
        if had_records:
            self._append(Resume(newest))
        self.cursor = recovery.draw["cursor"] if recovery.draw else 0
        self.queue = [(admit.id, admit.attempt + 1) for admit in recovery.requeue]
        self.replay = dict(recovery.replay)
        self.order = recovery.order
        assert [admit.id for admit, _ in recovery.accepted] == [
            accept.id for _, accept in recovery.accepted
        ]
        assert [accept.id for _, accept in recovery.accepted] == list(self.state.accepted)

    def _append(self, *records: Record) -> int:
        for record in records:
            self.state.apply(record)
        return self.journal.append(*records)

    async def _event(self) -> None:
        state = self.state
        random = self.random
        waiting = {id for id, _ in self.queue}
        playing = [id for id in state.outstanding if id not in waiting]
        planned = {id for ids in self.replay.values() for id in ids}
        kind = random.choice(
            [
                "admit",
                "admit",
                "admit",
                "accept",
                "accept",
                "accept",
                "fail",
                "drop",
                "train",
                "train",
            ]
        )
        if kind == "admit" and (self.queue or self.cursor < self.total):
            self._admit()
        elif kind == "accept" and playing:
            id = random.choice(playing)
            self._append(Accept(id, state.outstanding[id].attempt, [len(id)], [id.encode()]))
        elif kind == "fail" and playing:
            id = random.choice(playing)
            final = random.random() < 0.5
            attempt = state.outstanding[id].attempt
            self._append(Reject(id, attempt, "env_error", "gone", final))
            if not final:
                self.queue.append((id, attempt + 1))
        elif kind == "drop" and state.accepted and random.random() < 0.2:
            if (id := random.choice(list(state.accepted))) not in planned:
                self._append(Drop(id, "stale"))
        elif kind == "train":
            await self._train()

    def _admit(self) -> None:
        step = len(self.weights)
        if self.queue:
            id, attempt = self.queue.pop(0)
            self._append(Admit(id, attempt, step, self.order, "rollout_worker/0", {}))
        else:
            id = f"p{self.cursor}"
            self.cursor = self.cursor + 1
            self._append(
                Admit(id, 0, step, self.order, "rollout_worker/0", {}),
                Draw({"cursor": self.cursor}),
            )
        self.order += 1

    async def _train(self) -> None:
        step = len(self.weights)
        state = self.state
        over = self.cursor == self.total and not state.outstanding
        if step in self.replay:
            ids = self.replay.pop(step)
        elif len(state.accepted) >= self.batch_size or (over and state.accepted):
            ids = self.random.sample(
                list(state.accepted), min(self.batch_size, len(state.accepted))
            )
        elif over:
            self._append(End())
            self.finished = True
            return
        else:
            return
        number = self._append(Consume(ids, step), Commit(step, step + 1))
        self.weights.append(ids)
        if self.random.random() < 0.25:
            await self._checkpoint(step, number)

    async def _checkpoint(self, step: int, number: int) -> None:
        await self.journal.wait_until_durable(number, 30.0)
        self.checkpoints = [*self.checkpoints, (step, list(self.weights))][-2:]
        self._append(Ckpt(step, f"ckpt-{step:08d}"))
        oldest = self.checkpoints[0][0]
        self.state.settle(oldest)
        await self.journal.wait_until_durable(
            self.journal.start_segment(oldest, self.state.snapshot()), 30.0
        )
        self.safe = segments(self.folder)[-1].stat().st_size

    def _tear(self) -> None:
        last = segments(self.folder)[-1]
        with last.open("r+b") as file:
            file.truncate(self.random.randint(self.safe, last.stat().st_size))
