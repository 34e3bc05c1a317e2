"""Sends a run to Weights & Biases, or with ``WANDB_MODE=offline`` into ``wandb/`` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.monitor.trackers.tracker import RunFacts

PROJECT = "realhf"
STEP = "step"


class WandbTracker:
    """Is the ``Tracker`` of W&B. Every metric is drawn over ``step``, which W&B takes in any order; its own counter of
    steps would refuse an evaluation that comes late. A resumed run has the id it had before. Offline, W&B keeps up to
    32 KiB in memory and a killed run loses them; so a resumed one writes the steps before its checkpoint again."""

    def __init__(self, facts: RunFacts) -> None:
        import wandb  # type: ignore[import-not-found]

        self._wandb: Any = wandb
        self._run = wandb.init(
            dir=str(facts.run_dir),
            project=PROJECT,
            group=facts.experiment,
            name=f"{facts.experiment}/{facts.trial}",
            id=facts.id,
            resume="allow",
            config=dict(facts.config),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.offline:
            for step, values in facts.past:
                self.metrics(step, values)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """See ``Tracker``."""
        self._run.log({**values, STEP: step})

    def rollouts(self, step: int, texts: Sequence[str]) -> None:
        """Log a table with a row for each transcript."""
        table = self._wandb.Table(columns=["step", "rollout"], data=[[step, text] for text in texts])
        self._run.log({"rollouts": table, STEP: step})

    def close(self, failed: bool) -> None:
        """See ``Tracker``."""
        self._run.finish(exit_code=int(failed))
