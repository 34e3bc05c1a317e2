"""The engine: runs commands on the state in rounds, and answers nobody before the round's commit.

A command is ``fn(state, now, *args)``. While one round is being committed the next one gathers, so pushes are
committed in groups without a timer. Shared stores are locked for the length of a round. Source: trajectory
specification 3.11.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from realhf.trajectory import maintenance
from realhf.trajectory.options import StateOptions
from realhf.trajectory.state import TrajectoryState
from realhf.trajectory.store.base import StateLost, Store, StoreFailure

logger = logging.getLogger(__name__)
T = TypeVar("T")
PAUSE_AFTER_FAILURE_S = 0.5
ATTEMPTS = 5
"""How often a round is begun anew when another instance took the write lock away."""


@dataclass
class _Waiting:
    command: Callable[..., Any]
    args: tuple[Any, ...]
    changes_state: bool
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Engine:
    """One state over one store. ``write`` and ``read`` are called from the event loop that called ``open``."""

    def __init__(self, store: Store, options: StateOptions, *, tidy_every_s: float = 2.0,
                 clock: Callable[[], float] = time.time) -> None:  # fmt: skip
        self.store = store
        self.state = TrajectoryState(options)
        self._clock = clock
        self._tidy_every_s = tidy_every_s
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._failure: tuple[float, StoreFailure] | None = None
        self._must_reload = False

    async def open(self) -> None:
        """Restore what the store holds. Raises StoreFailure."""
        self.state.load(await self.store.open())
        self._tasks.append(asyncio.create_task(self._run_rounds(), name="trajectory-rounds"))
        if not self.store.shared:
            await self.write(maintenance.restart)
        self._tasks.append(asyncio.create_task(self._tidy(), name="trajectory-tidy"))

    async def close(self) -> None:
        """Finish the commands that wait, then close the store."""
        self._closing = True
        self._wake.set()
        for task in reversed(self._tasks):
            if task.get_name() == "trajectory-tidy":
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.store.close()

    async def write(self, command: Callable[..., T], *args: Any) -> T:
        """Result of ``command(state, now, *args)``, once its changes are durable. Raises what the command raises,
        and StoreFailure when nothing could be kept."""
        return await self._submit(command, args, True)

    async def read(self, command: Callable[..., T], *args: Any) -> T:
        """Result of a command that changes nothing; of a shared store, as new as its last commit."""
        if not self.store.shared:
            return command(self.state, self._clock(), *args)
        return await self._submit(command, args, False)

    async def _submit(self, command: Callable[..., T], args: tuple[Any, ...], changes_state: bool) -> T:
        if self._closing:
            raise StoreFailure("the server is stopping")
        if self._failure and self._clock() < self._failure[0]:
            raise self._failure[1]
        waiting = _Waiting(command, args, changes_state)
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.answer

    async def _run_rounds(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._waiting = self._waiting, []
            if batch:
                await self._round(batch)
            elif self._closing:
                return

    async def _round(self, batch: Sequence[_Waiting]) -> None:
        try:
            for attempt in range(ATTEMPTS):
                try:
                    results = await self._commit_round(batch)
                    break
                except StateLost as error:
                    logger.warning("the state is loaded anew (attempt %d of %d): %s", attempt + 1, ATTEMPTS, error)
                    self._must_reload = True
            else:
                raise StoreFailure(f"{self.store.name}: the write lock was lost {ATTEMPTS} times in a row")
        except StoreFailure as error:
            self._failure = (self._clock() + PAUSE_AFTER_FAILURE_S, error)
            self._must_reload = True
            logger.error("nothing of %d requests was kept: %s", len(batch), error)
            results = [error] * len(batch)
        except Exception as error:
            logger.exception("a round of %d requests failed", len(batch))
            self._must_reload = True
            results = [error] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(result, BaseException):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)

    async def _commit_round(self, batch: Sequence[_Waiting]) -> list[Any]:
        """Results (or the exceptions that commands raised) of one round, durable."""
        if self._must_reload:
            self.state.load(await self.store.reload())
            self._must_reload = False
        changing = any(waiting.changes_state for waiting in batch)
        if self.store.shared:
            others = await (self.store.begin() if changing else self.store.follow())
            for changes in others:
                self.state.follow(changes)
        results = self._execute(batch)
        changes = self.state.take_changes()
        if changes:
            await self.store.commit(changes)
        elif self.store.shared and changing:
            await self.store.abandon()
        return results

    def _execute(self, batch: Sequence[_Waiting]) -> list[Any]:
        now, results = self._clock(), []
        for waiting in batch:
            try:
                results.append(waiting.command(self.state, now, *waiting.args))
            except Exception as error:
                results.append(error)
        return results

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(self._tidy_every_s)
            try:
                if await self.read(maintenance.due):
                    await self.write(maintenance.tidy)
            except StoreFailure as error:
                logger.warning("housekeeping waits: %s", error)
