"""Is the command ``export`` of ``python -m realhf.view``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from realhf.monitor.rollouts.export.export import KINDS, ExportFailed, export


def export_command(arguments: Sequence[str]) -> int:
    """Export the rollouts of a run as ``arguments``, what follows the word ``export``, say. Returns the exit code: 0,
    or 1 with one line about what went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view export", description="Write the rollouts of a run for other programs."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", choices=[*KINDS], required=True, help="the format")
    parser.add_argument("out", type=Path, metavar="OUT", help="a file; for inspect a folder")
    given = parser.parse_args(arguments)
    try:
        done = export(given.run, given.to, given.out)
    except ExportFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    lost = f"; of {done.without_record} the record cannot be read" if done.without_record else ""
    print(f"{done.rollouts} rollouts in {given.out}{lost}")
    return 0
