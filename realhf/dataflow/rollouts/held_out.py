"""Held-out evaluation during training, played in shares by the rollout workers.

Runs in the master's event loop; every change of state is synchronous. Nothing is journaled: an
evaluation trains nothing, and one that a killed run did not finish is played again from the start.

An evaluation begins right after a version is published. Every generation worker keeps ("pins") that
version for it: in a second engine where it can have one, so that training continues; otherwise the
next version is held back until the evaluation has finished, and training continues only as far as
the staleness bound allows.

The evaluation loop
  produces: a report, delivered to the master;
  waits for: the previous evaluation, the pinned weights, then the results of all shares;
  unblocked by: rollout workers that answer their shares; a share expires after its deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

from realhf.api.calls import PIN_WEIGHTS, UNPIN_WEIGHTS, EvaluationPart, Nothing
from realhf.api.evaluation import EpisodeResult, Report, evaluation_report
from realhf.api.experiment import HeldOutOptions
from realhf.base import process_clock
from realhf.dataflow.rollouts.rollout_state import EvaluationFailed, EvaluationQueue
from realhf.dataflow.rollouts.weight_updates import WeightUpdates
from realhf.dataflow.worker_group import ask
from realhf.transport.errors import RpcError
from realhf.transport.rpc_master import RpcMaster

ATTEMPTS = 3
"""Maximum number of attempts at an evaluation. If the pinned weights are lost, it starts again with
the current ones."""
SHARES_PER_PLAYER = 4
"""Number of shares per concurrent player, so that shares are small and the players finish at about
the same time."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)
Deliver = Callable[[Report], None]


class HeldOutEvaluations:
    """Runner of held-out evaluations, one at a time.

    Args:
        queue: Evaluation queue shared with the rollouts' control, which hands out the shares.
        players: Number of samples that all rollout workers play at once.
        deadline_s: Deadline of one share, in seconds.
        timeout_s: Timeout of one call to a generation worker, in seconds.
        wake: Called when there are shares to hand out.
        warn: Called with warnings for the user.
        fail: Called with an error that must end the run.
    """

    def __init__(
        self,
        caller: RpcMaster,
        weights: WeightUpdates,
        queue: EvaluationQueue,
        *,
        players: int,
        deadline_s: float,
        timeout_s: float,
        wake: Callable[[], None],
        warn: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._caller = caller
        self._weights = weights
        self._queue = queue
        self._players = players
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._wake = wake
        self._warn = warn
        self._fail = fail
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None
        self._holds_back_publishing = False
        self._lock = asyncio.Lock()
        """Held while weights are being pinned or published, so that the two never overlap."""

    @property
    def is_running(self) -> bool:
        """Whether an evaluation is being played."""
        return self._task is not None

    async def start(self, when: str, options: HeldOutOptions, deliver: Deliver) -> None:
        """Wait for the previous evaluation, pin the current weights and start an evaluation with
        them.

        Returns once the weights are pinned; ``deliver(report)`` is called when the evaluation has
        finished.
        """
        await self.wait()
        pinned = await self._pin()
        self._task = asyncio.create_task(
            self._evaluate(when, options, deliver, pinned), name=f"evaluation {when}"
        )
        self._task.add_done_callback(self._on_done)

    async def wait(self) -> None:
        """Wait until no evaluation is running."""
        while self._task is not None:
            await asyncio.wait([self._task])
            await asyncio.sleep(0)  # let its done callback run

    async def publish(self, version: int) -> None:
        """Publish weights. Where an engine cannot keep two versions, wait for the running
        evaluation first."""
        while True:
            if self._holds_back_publishing:
                await self.wait()
            async with self._lock:
                # a second attempt may have pinned again before we got the lock
                if not self._holds_back_publishing:
                    await self._weights.publish(version)
                    return

    async def close(self) -> None:
        """Cancel the running evaluation."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        self._holds_back_publishing = False
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _evaluate(
        self, when: str, options: HeldOutOptions, deliver: Deliver, pinned: tuple[int, list[str]]
    ) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            version, engines = pinned
            try:
                results = await self._play(options, version, engines)
            except EvaluationFailed as error:
                self._warn(
                    f"the held-out evaluation {when} failed with the weights of version {version}: "
                    f"{error}"
                )
            else:
                names = {False: "sampled", True: "greedy"}
                deliver(
                    {
                        names[greedy]: evaluation_report(episodes, version)
                        for greedy, episodes in sorted(results.items())
                    }
                )
                return
            finally:
                await self._unpin(engines)
            if attempt < ATTEMPTS:
                pinned = await self._pin()
        self._warn(f"the held-out evaluation {when} was given up after {ATTEMPTS} attempts")

    async def _play(
        self, options: HeldOutOptions, version: int, engines: Sequence[str]
    ) -> dict[bool, list[EpisodeResult]]:
        if not engines:
            raise EvaluationFailed("no generation worker keeps these weights")
        number = next(self._numbers)
        n_parts = SHARES_PER_PLAYER * self._players
        shares = [
            EvaluationPart(
                number,
                part,
                n_parts,
                greedy,
                version,
                list(engines),
                options.split,
                episodes,
                options.templates,
                self._deadline_s,
            )
            for greedy, episodes in (
                (False, options.episodes_per_task),
                (True, options.greedy_episodes_per_task),
            )
            if episodes > 0
            for part in range(n_parts)
        ]
        playing = asyncio.ensure_future(self._queue.play(shares))
        await asyncio.sleep(0)  # let it queue the shares before workers are woken
        self._wake()
        try:
            return await playing
        finally:
            playing.cancel()

    async def _pin(self) -> tuple[int, list[str]]:
        """Have the generation workers keep ("pin") the newest weights. Returns the version, and the
        workers that keep it."""
        deadline = process_clock.now() + self._timeout_s
        while not self._weights.current_workers and process_clock.now() < deadline:
            await asyncio.sleep(_POLL_S)  # all workers have died; their successors are starting
        async with self._lock:
            await self._weights.wait_for_current()
            names = sorted(self._weights.current_workers)
            answers = await asyncio.gather(
                *(
                    ask(self._caller, name, PIN_WEIGHTS, Nothing(), timeout_s=self._timeout_s)
                    for name in names
                ),
                return_exceptions=True,
            )
            has_replica: dict[str, bool] = {}
            version = self._weights.published_version
            for name, answer in zip(names, answers, strict=True):
                if isinstance(answer, RpcError):
                    _log.warning("%s does not keep weights for an evaluation: %s", name, answer)
                elif isinstance(answer, BaseException):
                    raise answer
                elif answer.version == version:
                    has_replica[name] = answer.kept
            self._holds_back_publishing = not all(has_replica.values())
            return version, sorted(has_replica)

    async def _unpin(self, engines: Sequence[str]) -> None:
        await asyncio.gather(
            *(
                ask(self._caller, name, UNPIN_WEIGHTS, Nothing(), timeout_s=self._timeout_s)
                for name in engines
            ),
            return_exceptions=True,
        )
