"""Provides ``TrajectoryDataset``: the batches of a trajectory server as samples to train on, their leases kept alive.

A batch stays leased until its owner reports that what was learnt from it is safe (``acknowledge``); after a crash the
server hands it out again. Source: docs/reference/trajectory.md 2.8, 3.9, 3.10.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from realhf.api.sample import SequenceSample
from realhf.trajectory.client import (
    AsyncTrajectoryClient,
    LeaseLost,
    NotRegistered,
    TrajectoryClient,
    TrajectoryError,
)
from realhf.trajectory.training.stream_sample import Rescore, RowLimits, groups_to_sample

logger = logging.getLogger(__name__)
_RETRY_S = 1.0


@dataclass(frozen=True)
class StreamRun:
    """Describes a run to the server.

    ``group`` and ``project`` name it; ``batch_size`` in sequences; ``max_tokens`` of a sequence; ``max_staleness`` in
    policy versions (None: no bound). ``fresh``: begin the run anew, because what the server holds is of no use.
    """

    group: str
    project: str
    batch_size: int
    max_tokens: int
    num_steps: int
    max_staleness: int | None = None
    fresh: bool = False


class TrajectoryDataset:
    """Registers as the trainer, or finds its run again, and pulls batches.

    The client belongs to the dataset, which closes it; it must be in explicit mode. ``consumed``: leases whose batches
    were learnt from already. Raises TrajectoryError: no server, no permission, no batch in time.
    """

    def __init__(
        self,
        client: TrajectoryClient,
        run: StreamRun,
        limits: RowLimits,
        *,
        step: int,
        consumed: Sequence[str] = (),
    ) -> None:
        self._client, self._limits = client, limits
        self._held: dict[str, Future[None]] = {}
        known = not run.fresh and self._is_ours(run)
        self._register(run, step, join=known)
        if known:
            logger.info("the server knows this run; it goes on")
        self._settle(consumed)

    @property
    def held(self) -> list[str]:
        """Leases in hand, oldest first."""
        return list(self._held)

    def next(
        self, ids: Sequence[str], *, version: int, wait_s: float, rescore: Rescore
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the next batch, one sample per group (see ``groups_to_sample``), and metrics about it. ``version``: of
        the weights that are about to be trained; ``rescore`` is called where a producer sent no log-probabilities."""
        began = time.perf_counter()
        self._client.set_policy_version(version)
        batch = self._client.pull(wait_s)
        renewal = keep_renewed(self._client.inner, batch.lease_id)
        self._held[batch.lease_id] = asyncio.run_coroutine_threadsafe(renewal, self._client.thread.loop)
        waited = time.perf_counter() - began
        converted = groups_to_sample(ids, batch.groups, self._limits, version=batch.min_version, rescore=rescore)
        stats = {
            "n_groups": float(len(batch.groups)),
            "n_sequences": float(batch.n_sequences),
            "server_step": batch.step,
            "wait_seconds": waited,
            "redelivered": float(batch.redelivered),
            "n_rescored": float(converted.rescored),
            "staleness_max": float(version - batch.min_version),
            "staleness_min": float(version - batch.max_version),
        } | {f"n_{name}": float(count) for name, count in converted.problems.items()}
        if converted.problems:
            logger.warning("step %d: sequences that cannot be trained on: %s", version, dict(converted.problems))
        return converted.sample, stats

    def acknowledge(self, leases: Sequence[str]) -> None:
        """Acknowledge batches that are no longer needed. What does not reach the server now is sent again the next
        time."""
        for lease_id in [lease for lease in self._held if lease in leases]:
            try:
                self._client.ack(lease_id)
            except LeaseLost as error:
                logger.warning("a batch may be trained on twice: %s", error)
            except TrajectoryError as error:
                logger.warning("a batch was not acknowledged: %s", error)
                return
            self._held.pop(lease_id).cancel()

    def close(self) -> None:
        """Close the client. A batch still held is given back when its lease expires, or when the run continues."""
        for renewal in self._held.values():
            renewal.cancel()
        self._client.close()

    def _is_ours(self, run: StreamRun) -> bool:
        if self._client.run_names() != {"group": run.group, "project": run.project}:
            return False
        return self._client.info() == {"batch_size": run.batch_size, "max_token_len": run.max_tokens}

    def _register(self, run: StreamRun, step: int, *, join: bool) -> None:
        self._client.register(
            batch_size=run.batch_size,
            max_token_len=run.max_tokens,
            num_steps=run.num_steps,
            starting_step=step,
            wandb_group=run.group,
            wandb_project=run.project,
            max_staleness=run.max_staleness,
            join=join,
            reset=run.fresh,
        )
        if not self._is_ours(run):
            raise NotRegistered(
                self._client.url,
                f"it keeps the run {self._client.run_names()} and batches of "
                f"{self._client.info()['batch_size']} sequences; is it strict?",
            )

    def _settle(self, consumed: Sequence[str]) -> None:
        """Settle the leases after a restart: batches that a checkpoint contains are acknowledged, the others in hand
        come again."""
        mine = [lease["lease_id"] for lease in self._client.leases() if lease["owner"] == self._client.trainer_id]
        for lease_id in mine:
            if lease_id in consumed:
                self._client.ack(lease_id)
            else:
                self._client.nack(lease_id)
        logger.info("leases of this run: %d, of them %d consumed", len(mine), len(set(mine) & set(consumed)))


async def keep_renewed(client: AsyncTrajectoryClient, lease_id: str) -> None:
    """Renew a lease until it has ended: at once, which shows how long it lasts, and whenever a third of that time has
    gone by."""
    while True:
        try:
            wait_s = await client.renew(lease_id) / 3
        except LeaseLost as error:
            logger.warning("somebody else may train on a batch of ours: %s", error)
            return
        except TrajectoryError as error:
            logger.warning("a lease was not renewed, and is tried again: %s", error)
            wait_s = _RETRY_S
        except Exception:  # Nobody reads the future of this task: a lease that runs out in silence is trained on twice.
            logger.exception("a lease was not renewed, and is tried again")
            wait_s = _RETRY_S
        await asyncio.sleep(wait_s)
