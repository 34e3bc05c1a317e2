"""Command engine: runs commands on the state in rounds. A command is answered only after its round
is committed.

A command is ``fn(state, now, *args)``. Commands that arrive while a round is being committed form
the next round, so pushes are committed in groups without a timer. A shared store is locked for the
duration of a round. Source: docs/reference/trajectory.md 3.11.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from realhf.base import process_clock
from realhf.trajectory.records import StateOptions
from realhf.trajectory.state import maintenance, registry
from realhf.trajectory.state.server_state import TrajectoryState
from realhf.trajectory.store.base import (
    OutcomeUnknown,
    Snapshot,
    StateLost,
    StoreFailure,
    TrajectoryStore,
)
from realhf.web.refusal import Refusal

logger = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE_AFTER_FAILURE_S = 0.5
"""Seconds after a failed round during which commands are refused at once."""
PAUSE_AFTER_FAILED_COMPACTION_S = 60.0
"""Seconds without compaction after a compaction failed, because a failure also refuses the other
requests of its round."""
ATTEMPTS = 5
"""Number of attempts to run a round, in case another instance takes the write lock away."""
CLOSE_DEADLINE_S = 15.0
"""Seconds that a stopping server waits for a store that does not answer."""


@dataclass
class _PendingCommand:
    """A command that has not been answered yet."""

    command: Callable[..., Any]
    """Function of (state, now, *args)."""
    args: tuple[Any, ...]
    """Arguments of the function after ``now``."""
    changes_state: bool
    """Whether the command may change the state."""
    repeated: bool = False
    """Whether it is run again after a failure, until its changes are durable."""
    answer: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Future of the function's result."""


class SteadyClock:
    """Clock in seconds since 1970 that does not jump when the system clock is set."""

    def __init__(self) -> None:
        self._offset = time.time() - process_clock.now()

    def __call__(self) -> float:
        """Return the time."""
        return process_clock.now() + self._offset

    def continue_from(self, last: float) -> None:
        """Set the clock forward if needed, so that it never returns less than ``last``, the newest
        recorded time."""
        self._offset = max(self._offset, last - process_clock.now())


class StateEngine:
    """Runs one state on one store. ``write`` and ``read`` must be called on the event loop that
    called ``open``."""

    def __init__(
        self, store: TrajectoryStore, options: StateOptions, *, tidy_every_s: float = 2.0
    ) -> None:
        self.store = store
        self.state = TrajectoryState(options)
        self.epoch = self.state.run.epoch
        """Epoch of the last committed state; ``state`` may already be in a later one while a round
        is being committed."""
        self._clock = SteadyClock()
        self._tidy_every_s = tidy_every_s
        self._waiting: list[_PendingCommand] = []
        self._repeat: list[_PendingCommand] = []
        """Commands of a failed round that are repeated before all others."""
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._readers: list[_PendingCommand] = []
        """Reads that arrived while a round is being committed."""
        self._committing = False
        self._failure: tuple[float, StoreFailure] | None = None
        self._must_reload = False
        self._lost_epoch: int | None = None
        """Epoch that the store lost; the next round starts a later one."""

    async def open(self) -> None:
        """Restore the state from the store. Raises StoreFailure."""
        self._load_snapshot(await self.store.open())
        self._clock.continue_from(self.state.newest_time())
        self._tasks.append(asyncio.create_task(self._run_rounds(), name="trajectory-rounds"))
        if not self.store.shared:
            await self.write(maintenance.restart)
        self._tasks.append(asyncio.create_task(self._run_housekeeping(), name="trajectory-tidy"))

    async def close(self) -> None:
        """Finish the waiting commands, then close the store. A store that hangs is abandoned after
        ``CLOSE_DEADLINE_S``."""
        self._closing = True
        self._wake.set()
        for task in self._tasks:
            if task.get_name() == "trajectory-tidy":
                task.cancel()
        if self._tasks:
            _, hanging = await asyncio.wait(self._tasks, timeout=CLOSE_DEADLINE_S)
            for task in hanging:
                logger.error(
                    "%s did not finish a round in %.0f s and is given up",
                    self.store.name,
                    CLOSE_DEADLINE_S,
                )
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        for waiting in self._waiting:
            if not waiting.answer.done():
                waiting.answer.set_exception(StoreFailure("the server is stopping"))
        try:
            await asyncio.wait_for(self.store.close(), CLOSE_DEADLINE_S)
        except TimeoutError:
            logger.error(
                "%s did not close in %.0f s and is given up", self.store.name, CLOSE_DEADLINE_S
            )

    async def write(self, command: Callable[..., T], *args: Any) -> T:
        """Run ``command(state, now, *args)`` and return its result once its changes are durable.
        Raises the command's errors, StoreFailure if nothing was stored, and OutcomeUnknown if it is
        unknown whether anything was stored."""
        return await self._submit(command, args, True)

    async def read(self, command: Callable[..., T], *args: Any) -> T:
        """Return the result of a read-only command. It sees only committed changes, not those of a
        round that may still fail."""
        if self.store.shared:
            return await self._submit(command, args, False)
        return await self.peek(command, *args)

    async def peek(self, command: Callable[..., T], *args: Any) -> T:
        """Like ``read``, but use the committed changes that this server already knows, so that it
        works even while a shared store does not answer."""
        if self._committing:
            waiting = _PendingCommand(command, args, False)
            self._readers.append(waiting)
            return await waiting.answer
        return command(self.state, self._now(), *args)

    def write_until_kept(self, command: Callable[..., Any], *args: Any) -> None:
        """Run a command without waiting for it, and repeat it until its changes are durable."""
        waiting = _PendingCommand(command, args, True, repeated=True)
        waiting.answer.add_done_callback(_log_failure)
        self._waiting.append(waiting)
        self._wake.set()

    async def _submit(
        self, command: Callable[..., T], args: tuple[Any, ...], changes_state: bool
    ) -> T:
        if self._closing:
            raise StoreFailure("the server is stopping")
        if self._failure and process_clock.now() < self._failure[0]:
            raise self._failure[1]
        waiting = _PendingCommand(command, args, changes_state)
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.answer

    async def _run_rounds(self) -> None:
        while self._waiting or not self._closing:
            if not self._waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._wake.wait(), PAUSE_AFTER_FAILURE_S if self._repeat else None
                    )
            self._wake.clear()
            batch = [*self._repeat, *self._waiting]
            self._waiting = []
            self._repeat = []
            if batch:
                await self._round(batch)
        if self._repeat:
            await self._round(self._repeat)

    async def _round(self, batch: Sequence[_PendingCommand]) -> None:
        try:
            for attempt in range(ATTEMPTS):
                try:
                    results = await self._commit_round(batch)
                    break
                except StateLost as error:
                    logger.warning(
                        "the state is reloaded (attempt %d of %d): %s", attempt + 1, ATTEMPTS, error
                    )
                    self._must_reload = True
            else:
                raise StoreFailure(
                    f"{self.store.name}: the write lock was lost {ATTEMPTS} times in a row"
                )
            self._failure = None
        except StoreFailure as error:
            self._failure = (process_clock.now() + PAUSE_AFTER_FAILURE_S, error)
            self._undo_round(certain=not isinstance(error, OutcomeUnknown))
            self._repeat = [waiting for waiting in batch if waiting.repeated]
            batch = [waiting for waiting in batch if not waiting.repeated]
            kept_text = "it is not known what" if isinstance(error, OutcomeUnknown) else "nothing"
            logger.error("%s of %d requests was kept: %s", kept_text, len(batch), error)
            results = [error] * len(batch)
        except Exception as error:
            logger.exception("a round of %d requests failed", len(batch))
            self._undo_round(certain=True)
            results = [error] * len(batch)
        except asyncio.CancelledError:
            waiting = [*batch, *self._readers]
            self._committing = False
            self._answer(waiting, [StoreFailure("the server is stopping")] * len(waiting))
            raise
        self._committing = False
        readers = self._readers
        self._readers = []
        self._answer(batch, results)
        self._answer(readers, self._execute(readers, {}) if readers else [])

    def _undo_round(self, *, certain: bool) -> None:
        """Restore the committed state. If other instances may have written in the meantime, or if
        it is not ``certain`` that nothing was stored, the next round reloads the state from the
        store."""
        self.state.undo()
        if self.store.shared or not certain:
            self._must_reload = True

    def _answer(self, batch: Sequence[_PendingCommand], results: Sequence[Any]) -> None:
        for waiting, result in zip(batch, results, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(result, BaseException):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)

    async def _commit_round(self, batch: Sequence[_PendingCommand]) -> list[Any]:
        """Run one round and return the durable results, or the exceptions that commands raised."""
        if self._must_reload:
            await self._reload()
        changing = self._lost_epoch is not None or any(waiting.changes_state for waiting in batch)
        if self.store.shared:
            others = await (self.store.begin() if changing else self.store.follow())
            for changes in others:
                self.state.follow(changes)
        results = self._execute_isolated(batch)
        changes = self.state.take_changes()
        if changes:
            self._committing = True
            await self.store.commit(changes)
        elif self.store.shared and changing:
            await self.store.abandon()
        self.state.settle()
        self.epoch = self.state.run.epoch
        self._lost_epoch = None
        return results

    async def _reload(self) -> None:
        self._load_snapshot(await self.store.reload())
        self._must_reload = False

    def _load_snapshot(self, snapshot: Snapshot) -> None:
        """Load a snapshot. If the store lost committed data, start a new epoch so that clients
        notice."""
        known = max(self.state.run.epoch, self._lost_epoch or 0)
        self.state.load(snapshot)
        self.epoch = self.state.run.epoch
        if loss := self.store.take_loss():
            logger.critical(
                "%s: %s. What was acknowledged before may be lost; epoch %d has ended, and clients "
                "have to "
                "register again",
                self.store.name,
                loss,
                known,
            )
            self.state.counters["store_losses"] += 1
            self._lost_epoch = known

    def _execute_isolated(self, batch: Sequence[_PendingCommand]) -> list[Any]:
        """Return the commands' results. A command that fails unexpectedly must not leave partial
        changes behind, so all changes are undone and the other commands run again without it."""
        failed: dict[int, Exception] = {}
        while True:
            if self._lost_epoch is not None:
                registry.start_epoch_after(self.state, self._now(), self._lost_epoch)
            results = self._execute(batch, failed)
            unexpected = {
                index: result
                for index, result in enumerate(results)
                if isinstance(result, Exception) and not isinstance(result, Refusal)
            }
            new = {index: error for index, error in unexpected.items() if index not in failed}
            if not new:
                return results
            failed |= new
            self.state.undo()

    def _execute(
        self, batch: Sequence[_PendingCommand], failed: Mapping[int, Exception]
    ) -> list[Any]:
        now = self._now()
        results = []
        for index, waiting in enumerate(batch):
            try:
                known = failed.get(index)
                results.append(
                    waiting.command(self.state, now, *waiting.args) if known is None else known
                )
            except Exception as error:
                results.append(error)
        return results

    async def compact(self) -> int:
        """Return unused space in sparse payload files to the disk. Returns the number of bytes
        freed. Cheap if there is nothing to free. Raises StoreFailure."""
        files = self.store.files
        if files is None or not files.is_wasteful(maintenance.held_bytes(self.state)):
            return 0
        # The payloads in use are listed within a round, because after its commit no other payload
        # can become live again.
        groups, closed_files = await self.write(maintenance.find_in_use, files)
        freed = await self.store.compact((group.payload for group in groups), closed_files)
        if freed:
            logger.info(
                "%s: freed %d MiB of files that were mostly empty", self.store.name, freed >> 20
            )
        return freed

    def _now(self) -> float:
        shared = self.store.now()
        return self._clock() if shared is None else shared

    async def _run_housekeeping(self) -> None:
        compact_from = 0.0
        while True:
            await asyncio.sleep(self._tidy_every_s)
            try:
                while await self.read(maintenance.is_due):
                    await self.write(maintenance.tidy)
                if process_clock.now() >= compact_from:
                    compact_from = process_clock.now() + PAUSE_AFTER_FAILED_COMPACTION_S
                    await self.compact()
                    compact_from = 0.0
            except StoreFailure as error:
                logger.warning("housekeeping waits: %s", error)


def _log_failure(answer: asyncio.Future[Any]) -> None:
    if not answer.cancelled() and (error := answer.exception()):
        logger.warning("a report was not recorded: %s", error)
