"""``TrajectoryDataset``: batches of a trajectory server as training samples, with automatic lease
renewal.

A batch stays leased until its owner reports that the result of training on it is saved
(``acknowledge``); after a crash the server delivers it again. Source: docs/reference/trajectory.md
2.8, 3.9, 3.10.
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
"""Seconds until a failed renewal is retried."""


@dataclass(frozen=True)
class StreamRun:
    """Data with which the trainer registers its run at the server."""

    group: str
    """Group of the run; part of its name."""
    project: str
    """Project of the run; part of its name."""
    batch_size: int
    """Number of sequences in a batch."""
    max_tokens: int
    """Maximum length of a sequence, in tokens."""
    num_steps: int
    """Number of steps of the run."""
    max_staleness: int | None = None
    """Largest number of policy versions that a group may lag; None for no bound."""
    fresh: bool = False
    """Whether to start a new run and discard the data on the server."""


class TrajectoryDataset:
    """Trainer's view of a trajectory server: it registers as the trainer, or continues its earlier
    run, and pulls batches.

    The dataset owns the client and closes it; the client must use explicit acks. ``consumed``: ids
    of leases whose batches were already trained on. Raises TrajectoryError if there is no server,
    no permission, or no batch in time.
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
        self._client = client
        self._limits = limits
        self._renewals: dict[str, Future[None]] = {}
        known = not run.fresh and self._is_ours(run)
        self._register(run, step, join=known)
        if known:
            logger.info("the server has this run; it continues")
        self._settle_leases(consumed)

    @property
    def lease_ids(self) -> list[str]:
        """Ids of the leases that are held, oldest first."""
        return list(self._renewals)

    def next(
        self, ids: Sequence[str], *, version: int, wait_s: float, rescore: Rescore
    ) -> tuple[SequenceSample, dict[str, float]]:
        """Return the next batch as (sample with one entry per group, see ``groups_to_sample``;
        metrics about it). ``version``: version of the weights that will be trained. ``rescore``
        computes log-probabilities that a producer did not send."""
        began = time.perf_counter()
        self._client.set_policy_version(version)
        batch = self._client.pull(wait_s)
        renewal = renew_lease(self._client.inner, batch.lease_id)
        self._renewals[batch.lease_id] = asyncio.run_coroutine_threadsafe(
            renewal, self._client.thread.loop
        )
        waited = time.perf_counter() - began
        converted = groups_to_sample(
            ids, batch.groups, self._limits, version=batch.min_version, rescore=rescore
        )
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
            logger.warning(
                "step %d: sequences that cannot be trained on: %s",
                version,
                dict(converted.problems),
            )
        return converted.sample, stats

    def acknowledge(self, leases: Sequence[str]) -> None:
        """Acknowledge batches that are no longer needed. An acknowledgement that fails is retried
        at the next call."""
        for lease_id in [lease for lease in self._renewals if lease in leases]:
            try:
                self._client.ack(lease_id)
            except LeaseLost as error:
                logger.warning("a batch may be trained on twice: %s", error)
            except TrajectoryError as error:
                logger.warning("a batch was not acknowledged: %s", error)
                return
            self._renewals.pop(lease_id).cancel()

    def close(self) -> None:
        """Close the client. A batch that is still held is delivered again when its lease expires,
        or when the run continues."""
        for renewal in self._renewals.values():
            renewal.cancel()
        self._client.close()

    def _is_ours(self, run: StreamRun) -> bool:
        if self._client.run_names() != {"group": run.group, "project": run.project}:
            return False
        return self._client.info() == {
            "batch_size": run.batch_size,
            "max_token_len": run.max_tokens,
        }

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

    def _settle_leases(self, consumed: Sequence[str]) -> None:
        """Resolve the leases that are still held after a restart: batches whose training is saved
        in a checkpoint are acknowledged, all others are given back."""
        mine = [
            lease["lease_id"]
            for lease in self._client.leases()
            if lease["owner"] == self._client.trainer_id
        ]
        for lease_id in mine:
            if lease_id in consumed:
                self._client.ack(lease_id)
            else:
                self._client.nack(lease_id)
        logger.info(
            "leases of this run: %d, of them %d consumed", len(mine), len(set(mine) & set(consumed))
        )


async def renew_lease(client: AsyncTrajectoryClient, lease_id: str) -> None:
    """Keep renewing a lease until it ends. The first renewal is immediate, to learn the lease's
    duration; each further one follows after a third of that time."""
    while True:
        try:
            wait_s = await client.renew(lease_id) / 3
        except LeaseLost as error:
            logger.warning("somebody else may train on a batch of ours: %s", error)
            return
        except TrajectoryError as error:
            logger.warning("a lease was not renewed, and is tried again: %s", error)
            wait_s = _RETRY_S
        except Exception:
            # The future of this task is not awaited. If it died silently, the lease would expire
            # and the batch would be trained on twice.
            logger.exception("a lease was not renewed, and is tried again")
            wait_s = _RETRY_S
        await asyncio.sleep(wait_s)
