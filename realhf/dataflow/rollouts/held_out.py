"""Plays held-out evaluations beside training, in shares that rollout workers take.

Lives in the master's event loop; every change of state is synchronous. Nothing of it is in the journal: an evaluation
trains nothing, and one that a killed run did not finish is played again from its start.

An evaluation begins right after a version was published. Every generation worker keeps that version for it: in a second
engine where it can have one, so that training goes on; else by holding back the next version until the evaluation is
over, so that training goes on for as long as the staleness bound lets it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realhf.api.calls import PIN_WEIGHTS, UNPIN_WEIGHTS, EvaluatedRequest, EvaluationPart, Nothing
from realhf.api.evaluation import EpisodeResult, Report, evaluation_report
from realhf.api.experiment import HeldOutOptions
from realhf.base import process_clock
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RpcError
from realhf.transport.rpc_master import RpcMaster

MAX_ATTEMPTS = 3
"""A share that fails, or whose player dies, so often ends the evaluation."""
LATE_S = 30.0
_Key = tuple[int, int, bool]


class EvaluationFailed(RuntimeError):
    """An evaluation could not be played to its end."""


@dataclass
class _InPlay:
    part: EvaluationPart
    worker: str
    expires: float


class EvaluationBoard:
    """One evaluation at a time. ``most``: shares in play at once while there are samples to play as well."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._waiting: deque[EvaluationPart] = deque()
        self._in_play: dict[_Key, _InPlay] = {}
        self._attempts: Counter[_Key] = Counter()
        self._results: dict[_Key, list[EpisodeResult]] = {}
        self._over: asyncio.Future[None] | None = None

    async def play(self, parts: Sequence[EvaluationPart]) -> dict[bool, list[EpisodeResult]]:
        """Have all shares played. Returns the results by ``greedy``, in the order of the shares. Raises
        EvaluationFailed when one cannot be played."""
        assert self._over is None, "one evaluation at a time"
        self._over = asyncio.get_running_loop().create_future()
        self._waiting.extend(parts)
        try:
            if parts:
                await self._over
            found: dict[bool, list[EpisodeResult]] = {}
            for part in parts:
                found.setdefault(part.greedy, []).extend(self._results[_key(part)])
            return found
        finally:
            self._over = None
            for rest in (self._waiting, self._in_play, self._attempts, self._results):
                rest.clear()

    def take(self, worker: str, count: int, *, alone: bool) -> list[EvaluationPart]:
        """Return up to ``count`` shares for a worker. ``alone``: there are no samples that it could play instead."""
        room = count if alone else min(count, self._most - len(self._in_play))
        taken: list[EvaluationPart] = []
        while self._waiting and len(taken) < room:
            part = self._waiting.popleft()
            self._in_play[_key(part)] = _InPlay(part, worker, process_clock.now() + part.deadline_s + LATE_S)
            taken.append(part)
        return taken

    @property
    def waiting(self) -> bool:
        """Whether there are shares that nobody plays yet."""
        return bool(self._waiting)

    def evaluated(self, worker: str, request: EvaluatedRequest) -> None:
        """A worker has played a share, or failed to. What nobody waits for any more is ignored."""
        key = (request.evaluation, request.part, request.greedy)
        entry = self._in_play.get(key)
        if entry is None or entry.worker != worker:
            return
        if request.error:
            self._again(key, request.error)
            return
        del self._in_play[key]
        self._results[key] = request.results
        if not self._waiting and not self._in_play and self._over is not None and not self._over.done():
            self._over.set_result(None)

    def worker_left(self, worker: str, reason: str) -> None:
        """Others play what it had."""
        for key in [key for key, entry in self._in_play.items() if entry.worker == worker]:
            self._again(key, f"{worker}: {reason}")

    def expire(self) -> None:
        """Take back what was not answered long after its deadline."""
        now = process_clock.now()
        for key in [key for key, entry in self._in_play.items() if entry.expires < now]:
            self._again(key, f"no answer from {self._in_play[key].worker}")

    def _again(self, key: _Key, reason: str) -> None:
        self._waiting.append(self._in_play.pop(key).part)
        self._attempts[key] += 1
        if self._attempts[key] >= MAX_ATTEMPTS and self._over is not None and not self._over.done():
            self._over.set_exception(EvaluationFailed(f"{MAX_ATTEMPTS} attempts at a share failed, at last: {reason}"))


def _key(part: EvaluationPart) -> _Key:
    return part.evaluation, part.part, part.greedy


ATTEMPTS = 3
"""An evaluation whose weights are lost begins again with those of now, so often in all."""
SHARES_PER_PLAYER = 4
_LOOK_S = 0.1
_log = logging.getLogger(__name__)
Deliver = Callable[[Report], None]


class HeldOutEvaluations:
    """One evaluation at a time; the next one waits for it. ``players``: samples that all rollout workers play at once;
    ``deadline_s``: for one share. ``wake`` is called when there is something to play, ``warn`` with what a person has
    to know, ``fail`` with an error that must end the run."""

    def __init__(
        self,
        caller: RpcMaster,
        weights: WeightUpdates,
        *,
        players: int,
        deadline_s: float,
        timeout_s: float,
        wake: Callable[[], None],
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.board = EvaluationBoard(players // 2)
        self._caller, self._weights = caller, weights
        self._players, self._deadline_s, self._timeout_s = players, deadline_s, timeout_s
        self._wake, self._warn, self._fail = wake, warn, fail
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._holding = False
        self._lock = asyncio.Lock()

    @property
    def running(self) -> bool:
        """Whether an evaluation is being played."""
        return self._task is not None

    async def begin(self, when: str, wanted: HeldOutOptions, deliver: Deliver) -> None:
        """Begin an evaluation with the weights of now, after the one before is over; returns when they are kept for it.
        ``deliver`` is called with the report."""
        await self.over()
        pinned = await self._pin()
        self._task = asyncio.create_task(self._evaluate(when, wanted, deliver, pinned), name=f"evaluation {when}")
        self._task.add_done_callback(self._ended)

    async def over(self) -> None:
        """Wait for the evaluation in play."""
        while self._task is not None:
            await asyncio.wait([self._task])
            await asyncio.sleep(0)  # its callback has run

    async def publish(self, version: int) -> None:
        """Publish weights; where an evaluation needs the present ones, after it."""
        while True:
            if self._holding:
                await self.over()
            async with self._lock:
                if not self._holding:  # an evaluation that began again may have them held by now
                    await self._weights.publish(version)
                    return

    async def close(self) -> None:
        """End the evaluation in play without a result."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task, self._holding = None, False
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _evaluate(
        self, when: str, wanted: HeldOutOptions, deliver: Deliver, pinned: tuple[int, list[str]]
    ) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            version, engines = pinned
            try:
                results = await self._played(wanted, version, engines)
            except EvaluationFailed as error:
                self._warn(f"the held-out evaluation {when} failed with the weights of version {version}: {error}")
            else:
                ways = {False: "sampled", True: "greedy"}
                deliver({ways[way]: evaluation_report(found, version) for way, found in sorted(results.items())})
                return
            finally:
                await self._unpin(engines)
            if attempt < ATTEMPTS:
                pinned = await self._pin()
        self._warn(f"the held-out evaluation {when} was given up after {ATTEMPTS} attempts")

    async def _played(
        self, wanted: HeldOutOptions, version: int, engines: Sequence[str]
    ) -> dict[bool, list[EpisodeResult]]:
        if not engines:
            raise EvaluationFailed("no generation worker keeps these weights")
        number, parts = next(self._numbers), SHARES_PER_PLAYER * self._players
        shares = [
            EvaluationPart(
                number,
                part,
                parts,
                greedy,
                version,
                list(engines),
                wanted.split,
                episodes,
                wanted.templates,
                self._deadline_s,
            )
            for greedy, episodes in ((False, wanted.episodes_per_task), (True, wanted.greedy_episodes_per_task))
            if episodes > 0
            for part in range(parts)
        ]
        playing = asyncio.ensure_future(self.board.play(shares))
        await asyncio.sleep(0)  # the shares are on the board
        self._wake()
        try:
            return await playing
        finally:
            playing.cancel()

    async def _pin(self) -> tuple[int, list[str]]:
        """Have the generation workers keep the newest weights. Returns the version, and who keeps it."""
        deadline = process_clock.now() + self._timeout_s
        while not self._weights.current and process_clock.now() < deadline:
            await asyncio.sleep(_LOOK_S)  # all have died, and their successors are on their way
        async with self._lock:
            await self._weights.settled()
            names = sorted(self._weights.current)
            answers = await asyncio.gather(
                *(ask(self._caller, name, PIN_WEIGHTS, Nothing(), timeout_s=self._timeout_s) for name in names),
                return_exceptions=True,
            )
            kept: dict[str, bool] = {}
            version = self._weights.published
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, RpcError):
                    _log.warning("%s does not keep weights for an evaluation: %s", name, answer)
                elif isinstance(answer, BaseException):
                    raise answer
                elif answer.version == version:
                    kept[name] = answer.kept
            self._holding = not all(kept.values())
            return version, sorted(kept)

    async def _unpin(self, engines: Sequence[str]) -> None:
        await asyncio.gather(
            *(ask(self._caller, name, UNPIN_WEIGHTS, Nothing(), timeout_s=self._timeout_s) for name in engines),
            return_exceptions=True,
        )
