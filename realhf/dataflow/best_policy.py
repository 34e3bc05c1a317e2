"""Decides which evaluated policy of a run is its best one (``exp_ctrl.keep_best``), and remembers its figures."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from realhf.api.evaluation import Report
from realhf.base.files import recover_folder, write_whole

BEST_POLICY = "best_policy"
"""Folder of the run with the best policy in Hugging Face format."""
CANDIDATE = f".{BEST_POLICY}.candidate"
"""Folder with a policy whose evaluation is not over."""
BEST_POLICY_FILE = f"{BEST_POLICY}.json"
"""The figures of the best policy: what ``best_figures`` returns."""
HELD_OUT_FILE = "held_out.json"
"""The same, in the folder of the policy."""
_WAYS = ("sampled", "greedy")
"""Ways of decoding, the one that decides first."""


def best_figures(step: int, report: Report) -> dict[str, Any] | None:
    """Return the figures of an evaluation after ``step`` steps by which policies are compared; None where no episode
    of it was valid.

    They are {step, version, decoding, success, low, high, episodes, report}: the overall success of sampled episodes,
    of greedy ones where none were sampled, with its 95 % interval.
    """
    for way in _WAYS:
        overall = report.get(way, {}).get("overall", {})
        if overall.get("episodes"):
            return {
                "step": step,
                "version": int(overall.get("version", step)),
                "decoding": way,
                "success": float(overall["success"]),
                "low": float(overall["low"]),
                "high": float(overall["high"]),
                "episodes": int(overall["episodes"]),
                "report": report,
            }
    return None


def _read(file: Path) -> dict[str, Any] | None:
    """Return the figures in a file; None where there is none. Raises OSError, ValueError, KeyError and TypeError."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    for name in ("success", "step"):
        float(figures[name])
    return figures


class BestPolicy:
    """Remembers the figures of the best policy in the run folder, across resumptions."""

    def __init__(self, run_dir: Path) -> None:
        """Read the figures, if there are any. Those in the folder of the policy count, since a run that is killed may
        have replaced it and not the file beside it. Raises RuntimeError for a file that cannot be read, since a policy
        that may be better would be replaced, and for a policy that is gone."""
        self.folder = run_dir / BEST_POLICY
        self.candidate = run_dir / CANDIDATE
        self.figures: dict[str, Any] | None = None
        """Those of the policy that is kept; None as long as there is none."""
        self._file = run_dir / BEST_POLICY_FILE
        ways_out = "to have the best policy chosen from now on, or set exp_ctrl.keep_best=false"
        try:
            self.figures = _read(self._file)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"{self._file} cannot be read ({error}): it says how good the policy in {BEST_POLICY} is. Move both "
                f"away {ways_out}"
            ) from None
        recover_folder(self.folder)
        if self.figures is not None and not self.folder.is_dir():
            raise RuntimeError(
                f"{self.folder} is gone, and {self._file} says how good the policy in it was. Put it back, or move the "
                f"file away {ways_out}"
            )
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.figures = _read(self.folder / HELD_OUT_FILE) or self.figures

    def is_beaten_by(self, figures: dict[str, Any]) -> bool:
        """Return whether a policy with these figures is better than the one that is kept; of equals the first stays."""
        return self.figures is None or figures["success"] > self.figures["success"]

    def discard_candidate(self) -> None:
        """Remove the policy whose evaluation is over, where it lies in the run folder of this machine."""
        shutil.rmtree(self.candidate, ignore_errors=True)

    def record(self, figures: dict[str, Any]) -> None:
        """Write the figures of the policy that is now in ``folder``. Raises OSError."""
        write_whole(self._file, json.dumps(figures, indent=1), synced=True)
        self.figures = figures
