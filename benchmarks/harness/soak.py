"""Soak tests: many runs of a tiny model whose processes suffer faults, and the summary of their
results."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.killed_run import AWS, KilledRun, Stuck, Verdict, make_policy

Entry = dict[str, Any]
"""Result of a finished run. ``run`` is its number; ``problems`` is empty if the run was correct."""
COMMON = ("runs", "first", "jobs", "json", "keep")
"""Options that do not affect what happens in a run."""


def command_line(about: str | None, *, runs: int, jobs: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every soak test, with these defaults."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=runs, help="so many (%(default)s)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first one (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=jobs, help="runs at the same time (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here, and go on from it")
    parser.add_argument("--keep", type=Path, help="folder for the runs that did not balance")
    return parser


def watched(run: KilledRun, befalls: Callable[[KilledRun], None], end_s: float) -> Verdict:
    """Start a run, call ``befalls`` to inject its faults, and return the verdict on the run. The
    run must end within ``end_s`` seconds after ``befalls`` returns. All its processes are killed at
    the end."""
    run.start()
    try:
        befalls(run)
        return run.verdict(run.wait(end_s))
    except Stuck as error:
        return Verdict(None, run.kills, problems=[str(error)])
    finally:
        run.end()


def entry(number: int, verdict: Verdict, **more: Any) -> Entry:
    """Return the result of a run as JSON-compatible data."""
    return {
        "run": number,
        "seconds": round(verdict.seconds, 1),
        **more,
        "kills": dict(verdict.kills),
        "tally": asdict(verdict.tally) if verdict.tally else None,
        "stop_s": {
            how: [round(value, 2) for value in values] for how, values in verdict.stop_s.items()
        },
        "problems": verdict.problems,
    }


def total(entries: Sequence[Entry], name: str) -> int:
    """Return the sum of one field over the tallies of all runs."""
    return sum((found["tally"] or {}).get(name, 0) for found in entries)


def soak(
    options: argparse.Namespace,
    play: Callable[[Path, Path, int], Entry],
    line: Callable[[Entry], str],
    summary: Callable[[Sequence[Entry]], dict[str, Any]],
    environment: str = AWS,
) -> int:
    """Play all runs with ``play``, each in its own folder and with a policy for ``environment``.
    Print a ``line`` for each run and a ``summary`` at the end.

    Runs whose results are in the file of ``--json`` are not repeated. After Ctrl-C the runs in
    progress are completed, and no others begin. Returns the exit status: 1 if a run has problems.
    Raises SystemExit if the file belongs to other options.
    """
    entries = _earlier(options)
    ended = {found["run"] for found in entries}
    numbers = [
        number
        for number in range(options.first, options.first + options.runs)
        if number not in ended
    ]
    lock, stopped, began = threading.Lock(), threading.Event(), time.monotonic()

    def one(folder: Path, policy: Path, number: int) -> None:
        if stopped.is_set():
            return
        runs = folder / f"runs{number}"
        runs.mkdir()
        found = play(runs, policy, number)
        with lock:
            entries.append(found)
            _save(options, entries, summary)
            print(line(found), *(f"  {text}" for text in found["problems"]), sep="\n", flush=True)
        if found["problems"] and options.keep is not None:
            shutil.copytree(runs, options.keep / f"run{number}", dirs_exist_ok=True)
        shutil.rmtree(runs, ignore_errors=True)

    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        policy = make_policy(folder / "policy", environment)
        with ThreadPoolExecutor(options.jobs) as jobs:
            try:
                for job in [jobs.submit(one, folder, policy, number) for number in numbers]:
                    job.result()
            except KeyboardInterrupt:
                stopped.set()
                print(
                    f"stops after {time.monotonic() - began:.0f} s, with the runs that go on",
                    file=sys.stderr,
                )
                jobs.shutdown(cancel_futures=True)
    found = summary(entries)
    print(json.dumps(found))
    return 1 if found["bad"] or not entries else 0


def bad(entries: Sequence[Entry]) -> list[int]:
    """Return the numbers of the runs with problems."""
    return sorted(found["run"] for found in entries if found["problems"])


def _asked(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in COMMON}


def _earlier(options: argparse.Namespace) -> list[Entry]:
    if options.json is None or not options.json.exists():
        return []
    held = json.loads(options.json.read_text(encoding="utf-8"))
    if held.get("options") != _asked(options):
        raise SystemExit(f"{options.json} holds runs of other options: {held.get('options')}")
    return list(held["entries"])


def _save(
    options: argparse.Namespace,
    entries: Sequence[Entry],
    summary: Callable[[Sequence[Entry]], dict[str, Any]],
) -> None:
    if options.json is not None:
        held = {
            "options": _asked(options),
            "machine": platform.processor() or platform.machine(),
            "summary": summary(entries),
            "entries": list(entries),
        }
        options.json.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
