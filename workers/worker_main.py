"""How a worker of a run begins: its command line, the plan of the run, what the plan's plugins register."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

from realhf.api.experiment import RunPlan
from realhf.base.plugin import load_plugin
from realhf.scheduler.failure import run_guarded

_CHATTY = ("httpx", "httpx2")
"""Libraries that write a line about every request."""


def run_planned(about: str, work: Callable[[RunPlan, argparse.Namespace], None]) -> int:
    """Read ``--run-dir --run-id --master --index`` and run ``work(plan, arguments)``; the exit code."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with plan.json")
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--master", required=True, help="the master's endpoint")
    parser.add_argument("--index", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)

    def begin() -> None:
        plan = RunPlan.read(arguments.run_dir)
        for plugin in plan.plugins:
            load_plugin(plugin)
        work(plan, arguments)

    return run_guarded(begin)
