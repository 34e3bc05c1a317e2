"""Plays held-out evaluations beside training: on the rollout workers, with weights that are kept for them.

An evaluation begins right after a version was published. Every generation worker keeps that version for it: in a second
engine where it can have one, so that training goes on; else by holding back the next version until the evaluation is
over, so that training goes on for as long as the staleness bound lets it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from realhf.api.calls import PIN_WEIGHTS, UNPIN_WEIGHTS, Nothing
from realhf.api.evaluation import EpisodeResult, Report, evaluation_report
from realhf.api.rollout import HeldOutOptions
from realhf.api.streaming import EvaluationPart
from realhf.dataflow.caller import ask
from realhf.dataflow.rollouts.evaluation_board import EvaluationBoard, EvaluationFailed
from realhf.dataflow.rollouts.weight_updates import GenerationCaller, WeightUpdates
from realhf.transport.errors import RpcError

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
        caller: GenerationCaller,
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
        deadline = time.monotonic() + self._timeout_s
        while not self._weights.current and time.monotonic() < deadline:
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
