"""Opens the recorder of a process of a run, as the run's plan says."""

from __future__ import annotations

from realhf.api.experiment import ExperimentSpec, RunPlan
from realhf.monitor.rollouts.selection import selection_of
from realhf.monitor.rollouts.writer import RolloutWriter


def open_rollouts(plan: RunPlan, worker: str, *, by_step: bool = True) -> RolloutWriter:
    """Return the recorder of the process ``kind/index``. ``by_step``: it works step by step, and not as samples
    come."""
    spec = plan.spec
    selection = selection_of(plan.monitor, n_seqs=spec.n_seqs, group_size=_group_size(spec))
    return RolloutWriter(spec.run_dir, worker, selection, limit_bytes=plan.monitor.rollout_bytes, by_step=by_step)


def _group_size(spec: ExperimentSpec) -> int:
    """Return how many rollouts a sample has, 1 where nothing says it."""
    if spec.rollout is not None:
        return spec.rollout.episodes.group_size
    return max((int(mfc.interface_args.get("group_size") or 1) for mfc in spec.mfcs), default=1)
