"""Says what the master has to know to run asynchronous rollouts, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realhf.api.experiment import RolloutSpec
from realhf.dataflow.rollouts.control import RolloutRules
from realhf.dataflow.rollouts.staleness import StalenessManager
from realhf.transport.network.network import LOOPBACK, Network


@dataclass(frozen=True)
class RolloutPlan:
    """``trainers``: the model workers that train the role and hold its samples, in the order of ranks; ``batch_size``
    samples per step; ``seconds``: deadline of a control call; ``load_s``: of loading weights; ``needs_env``: episodes
    are played on a service; ``network``: where the master listens."""

    spec: RolloutSpec
    trainers: Sequence[str]
    batch_size: int
    total_steps: int
    completed_steps: int
    folder: Path
    run_id: str
    seconds: float
    load_s: float
    archive: bool = False
    needs_env: bool = True
    network: Network = LOOPBACK

    @property
    def trainer(self) -> str:
        """The first of the trainers, which does what one does for all."""
        return self.trainers[0]

    @property
    def group_size(self) -> int:
        """Episodes that are played for one sample."""
        return self.spec.episodes.group_size

    @property
    def max_concurrent(self) -> int:
        """Samples admitted and not yet accepted: in play, or on their way to the trainer."""
        return self.spec.options.max_concurrent_rollouts or self.players + self.credits

    @property
    def players(self) -> int:
        """Samples that all rollout workers play at once."""
        return self.spec.options.n_rollout_workers * max(1, self.spec.sessions // self.group_size)

    @property
    def credits(self) -> int:
        """Samples of one rollout worker that may be on their way."""
        return max(8, 2 * self.batch_size)

    @property
    def drops_stale(self) -> bool:
        """Whether stale samples are dropped, not waited for."""
        return self.spec.options.staleness_policy == "drop"

    def rules(self) -> RolloutRules:
        """Return what ends a sample, or the run."""
        options = self.spec.options
        return RolloutRules(
            self.total_steps * self.batch_size,
            options.rollout_deadline_s,
            options.max_attempts,
            self.spec.episodes.on_failure == "fail_fast",
            self.drops_stale,
            options.max_deaths,
        )

    def staleness(self) -> StalenessManager:
        """Return the counters of admission, after the steps that are complete."""
        consumed = self.completed_steps * self.batch_size
        return StalenessManager(
            batch_size=self.batch_size,
            max_head_offpolicyness=self.spec.options.max_head_offpolicyness,
            max_concurrent=self.max_concurrent,
            version=self.completed_steps,
            accepted=consumed,
            consumed=consumed,
        )
