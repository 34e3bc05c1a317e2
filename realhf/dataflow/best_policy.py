"""Selection of a run's best evaluated policy (``exp_ctrl.keep_best``), and the record of its
metrics."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from realhf.api.evaluation import Report
from realhf.base.files import recover_folder, write_atomic

BEST_POLICY = "best_policy"
"""Folder, within the run folder, with the best policy in Hugging Face format."""
CANDIDATE = f".{BEST_POLICY}.candidate"
"""Folder, within the run folder, with a policy whose evaluation has not finished."""
BEST_POLICY_FILE = f"{BEST_POLICY}.json"
"""File, within the run folder, with the best policy's metrics as returned by
``best_policy_metrics``."""
HELD_OUT_FILE = "held_out.json"
"""File with the same metrics, within the policy's own folder."""
_DECODINGS = ("sampled", "greedy")
"""Decoding modes in order of preference: the first one with valid episodes decides."""


def best_policy_metrics(step: int, report: Report) -> dict[str, Any] | None:
    """Return the metrics of an evaluation after ``step`` steps, by which policies are compared.

    The keys are step, version, decoding, success, low, high, episodes and report. ``success`` is
    the overall success rate of sampled episodes, or of greedy ones if none were sampled; ``low``
    and ``high`` are its 95 % confidence interval. Returns None if no episode was valid.
    """
    for decoding in _DECODINGS:
        overall = report.get(decoding, {}).get("overall", {})
        if overall.get("episodes"):
            return {
                "step": step,
                "version": int(overall.get("version", step)),
                "decoding": decoding,
                "success": float(overall["success"]),
                "low": float(overall["low"]),
                "high": float(overall["high"]),
                "episodes": int(overall["episodes"]),
                "report": report,
            }
    return None


def _read(file: Path) -> dict[str, Any] | None:
    """Return the metrics in a file; None if it does not exist. Raises OSError, ValueError, KeyError
    or TypeError."""
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for name in ("success", "step"):
        float(metrics[name])
    return metrics


class BestPolicy:
    """The best policy in the run folder and its metrics. Both survive resumptions of the run."""

    def __init__(self, run_dir: Path) -> None:
        """Read the metrics of the kept policy, if there is one.

        The file in the policy's folder takes precedence over the one in the run folder, because a
        killed run may have replaced only the former. Raises RuntimeError for a file that cannot be
        read, since a policy that may be better would then be replaced, and if the policy itself is
        missing.
        """
        self.folder = run_dir / BEST_POLICY
        self.candidate = run_dir / CANDIDATE
        self.metrics: dict[str, Any] | None = None
        """Metrics of the kept policy; None if there is none yet."""
        self._file = run_dir / BEST_POLICY_FILE
        ways_out = "to have the best policy chosen from now on, or set exp_ctrl.keep_best=false"
        try:
            self.metrics = _read(self._file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"{self._file} cannot be read ({error}): it has the metrics of the policy in "
                f"{BEST_POLICY}. Move both "
                f"away {ways_out}"
            ) from None
        recover_folder(self.folder)
        if self.metrics is not None and not self.folder.is_dir():
            raise RuntimeError(
                f"{self.folder} is missing, although {self._file} has the metrics of the policy in "
                f"it. Put it back, or move the "
                f"file away {ways_out}"
            )
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.metrics = _read(self.folder / HELD_OUT_FILE) or self.metrics

    def is_beaten_by(self, metrics: dict[str, Any]) -> bool:
        """Return whether a policy with these metrics is better than the kept one. Of equally good
        policies the first is kept."""
        return self.metrics is None or metrics["success"] > self.metrics["success"]

    def discard_candidate(self) -> None:
        """Remove the candidate's folder after its evaluation, if the run folder on this machine has
        one."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def record(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of the policy that now is the best one. Raises OSError."""
        write_atomic(self._file, json.dumps(metrics, indent=1), synced=True)
        self.metrics = metrics
