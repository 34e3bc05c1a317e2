"""Sends a run to Weights & Biases, or with ``WANDB_MODE=offline`` into ``wandb/`` of the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realhf.monitor.trackers.tracker import RunFacts
from realhf.monitor.trackers.wandb_logs import logs_of, taken_back

PROJECT = "realhf"
STEP = "step"


class WandbTracker:
    """Is the ``Tracker`` of W&B. Every metric is drawn over ``step``, which W&B takes in any order; its own counter of
    steps would refuse an evaluation that comes late. A resumed run has the id it had before. Offline, W&B keeps up to
    32 KiB in memory and a killed run loses them: a resumed one writes again what its logs lack of the steps before its
    checkpoint, and they forget the steps after it."""

    def __init__(self, facts: RunFacts) -> None:
        import wandb  # type: ignore[import-not-found]

        self._wandb: Any = wandb
        logs = logs_of(facts.run_dir, facts.id) if facts.resumed else []
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
            kept = taken_back(logs, facts.first_step, _parsed)
            for step, values in facts.past:
                lost = {name: value for name, value in values.items() if step not in kept.get(name, ())}
                if lost:
                    self.metrics(step, lost)

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


def _parsed(data: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    record: Any = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    return record
