"""Writes ``trace.json`` and ``report.html``, the page over a run in one file that can be sent around.

python -m realhf.monitor.report RUN_DIR       # of any run, also of one that goes on or was killed
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import realhf
from realhf.monitor.trace import merge_traces
from realhf.view.report import ROLLOUT_BYTES, write_report
from realhf.view.run_folder import MARKS, is_run


def main() -> int:
    """Write ``trace.json`` and the report of the run folder named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.monitor.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--no-rollouts", action="store_true", help="leave out conversations and tokens")
    given = parser.parse_args()
    if not is_run(given.run_dir):
        print(f"error: {given.run_dir} is not a run: it has none of {', '.join(MARKS)}", file=sys.stderr)
        return 1
    merge_traces(given.run_dir)
    print(write_report(given.run_dir, 0 if given.no_rollouts else ROLLOUT_BYTES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
