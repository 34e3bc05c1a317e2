"""Does the default job still learn what it learned, and as fast? Several seeds of it beside a
record of earlier ones.

    python benchmarks/learning_gate.py --record          # once, on a quiet machine: keeps what was found as the record
    python benchmarks/learning_gate.py                   # later: exit code 1 where it falls below the record
        [--seeds 1,2,3] [--record-file FILE] [--runs FOLDER] [--minutes 60] [OPTION=VALUE ...]

Each figure is the mean of the seeds: held-out success after training (sampled, and greedy where it
is played), seconds until the first step was over, until an evaluation was 10 points above the
first, until the end. It is compared with the interval in which the mean of as many new runs lies
with a probability of 95 %, if nothing has changed: Student's t over the recorded runs, widened for
the number of new ones (a prediction interval). Below it success has fallen, above it a time has
grown; either ends with 1. Times are compared only on a machine like that of the record (processor
and number of cores), and only of runs that were not interrupted.

A run whose seed was finished is not repeated, and one that was killed goes on after its last
checkpoint: the same command again. They lie in ``--runs``, without which it is a folder named after
the state of the code. Options are handed to every run; a record with others is refused. Exit code
2: nothing to compare, or a run failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from learning import T_975, Z_975

DEFAULT_RECORD = Path(__file__).with_suffix(".json")
RUNS = Path("runs/learning_gate")
STOP_S = 60.0
"""Seconds within which a run ends after it was asked to."""
FIRST_STEP = re.compile(r"^\s*([\d.]+) s\s+step 1/", re.MULTILINE)
HELD_OUT = re.compile(r"^\s*([\d.]+) s\s+held-out, .*?sampled overall ([\d.]+)%", re.MULTILINE)
RISE = 10.0
"""Rise of held-out success above the first evaluation, in percentage points, that a reader of the
curve would notice."""
FIGURES = {
    "sampled": ("held-out success after training, sampled", "%"),
    "greedy": ("held-out success after training, greedy", "%"),
    "first_step_s": ("seconds until the first step was over", "s"),
    "risen_s": (f"seconds until an evaluation was {RISE:g} points above the first, sampled", "s"),
    "end_s": ("seconds until the end", "s"),
}
"""What is compared, with its label and unit. Percentages must not fall, seconds must not grow."""
Found = dict[str, Any]
"""Results of one run: its seed and each of ``FIGURES``, None for those it does not have."""


class Failed(RuntimeError):
    """A run failed or did not finish, or there is nothing to compare it with."""


def play(seed: int, runs: Path, options: Sequence[str], minutes: float) -> Found:
    """Train with a seed, resuming an unfinished run, and return its results. Raises Failed."""
    folder = runs / "grpo_aws" / f"seed{seed}"
    log = runs / f"seed{seed}.log"
    own = [
        f"fileroot={runs.resolve()}",
        "experiment_name=grpo_aws",
        f"trial_name=seed{seed}",
        f"seed={seed}",
    ]
    asked = ["experiment=grpo_aws", *options, *own]
    if not (folder / "summary.json").is_file():
        runs.mkdir(parents=True, exist_ok=True)
        run([sys.executable, "-m", "realhf.launch", *asked], log, minutes)
    return figures(folder, log, asked, seed)


def code_state() -> str:
    """Return a name for the state of the checkout: its commit, and a digest of uncommitted changes.
    Raises Failed outside a git checkout."""
    here = Path(__file__).parent
    said = [
        subprocess.run(["git", *words], cwd=here, capture_output=True, check=False)
        for words in (("rev-parse", "HEAD"), ("diff", "HEAD"))
    ]
    if any(done.returncode for done in said):
        raise Failed(
            "this is no git checkout, so the state of the code has no name: give --runs FOLDER"
        )
    commit = said[0].stdout.decode().strip()
    changes = said[1].stdout
    return f"{commit[:12]}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else commit[:12]


def run(command: Sequence[str], log: Path, minutes: float) -> None:
    """Run a program to its end and append its output to ``log``. Raises Failed if it fails or takes
    longer than ``minutes``."""
    with log.open("ab") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            code = child.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            raise Failed(
                f"not at its end after {minutes:g} minutes (--minutes); {log} says where it is"
            ) from None
        finally:
            _end(child)
    if code:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])
        raise Failed(f"a run ended with {code}; the end of {log}:\n{tail}")


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def figures(folder: Path, log: Path, asked: Sequence[str], seed: int) -> Found:
    """Return the results of a finished run. Raises Failed if it has no summary or no held-out
    episodes, or was started with other arguments."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Failed(
            f"seed {seed} ended without a summary in {folder}; {log} says what it did"
        ) from None
    launches = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["launches"]
    if other := [
        launch["arguments"] for launch in launches if sorted(launch["arguments"]) != sorted(asked)
    ]:
        raise Failed(f"{folder} is a run of {other[0]}: choose another folder (--runs)")
    success = summary["heldout_success_after"].get("overall")
    if success is None:
        raise Failed(f"{folder}: no held-out episodes were played (evaluation.episodes_per_task)")
    greedy = summary["heldout_success_after_greedy"].get("overall")
    told = log.read_text(encoding="utf-8", errors="replace")
    first = FIRST_STEP.search(told)
    evaluations = [(float(seconds), float(percent)) for seconds, percent in HELD_OUT.findall(told)]
    risen = next(
        (seconds for seconds, percent in evaluations if percent >= evaluations[0][1] + RISE), None
    )
    whole = len(launches) == 1
    return {
        "seed": seed,
        "sampled": 100 * success,
        "greedy": None if greedy is None else 100 * greedy,
        "first_step_s": float(first[1]) if first and whole else None,
        "risen_s": risen if whole else None,
        "end_s": summary["wall_seconds"] if whole else None,
    }


def machine() -> dict[str, Any]:
    """Return what the duration of a run depends on: the processor and the number of cores that this
    program may use."""
    try:
        names = re.findall(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE
        )
    except OSError:
        names = []
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }


def prediction_interval(values: Sequence[float], new: int) -> tuple[float, float]:
    """Return the interval that contains the mean of ``new`` further values with a probability of 95
    %: mean +- t(n - 1) s sqrt(1/n + 1/new), for n >= 2 independent values of one normal
    distribution."""
    n = len(values)
    mean = statistics.mean(values)
    half = T_975.get(n - 1, Z_975) * statistics.stdev(values) * math.sqrt(1 / n + 1 / new)
    return mean - half, mean + half


def compare(
    record: Mapping[str, Any], found: Sequence[Found], here: Mapping[str, Any]
) -> tuple[list[str], bool]:
    """Return (lines of a Markdown table, whether any result is worse than the record allows)."""
    rows = ["| figure | record | 95 % of new means | now | |", "|---|---|---|---|---|"]
    worse = False
    for name, (label, unit) in FIGURES.items():
        past = [run[name] for run in record["runs"] if run[name] is not None]
        now = [run[name] for run in found if run[name] is not None]
        head = f"| {label} | {_mean(past, unit)} |"
        if not now or len(past) < 2:
            rows.append(f"{head} | {_mean(now, unit)} | not compared: too few runs tell it |")
            continue
        low, high = prediction_interval(past, len(now))
        verdict = "as before"
        bad = False
        if unit == "s" and dict(record["machine"]) != dict(here):
            verdict = "not compared: another machine"
        elif unit == "s":
            bad = statistics.mean(now) > high
        else:
            bad = statistics.mean(now) < low
        worse |= bad
        verdict = "WORSE" if bad else verdict
        rows.append(
            f"{head} {low:.1f} to {high:.1f} | {_mean(now, unit)} ({_each(now)}) | {verdict} |"
        )
    return rows, worse


def _mean(values: Sequence[float], unit: str) -> str:
    return f"{statistics.mean(values):.1f} {unit}" if values else "not measured"


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def read_record(file: Path, options: Sequence[str]) -> dict[str, Any]:
    """Return the record with which runs with these options are compared. Raises Failed if there is
    none or it has other options."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        told = record["options"]
        runs = record["runs"]
        if any(name not in run for run in runs for name in FIGURES) or "machine" not in record:
            raise KeyError("runs")
    except FileNotFoundError:
        raise Failed(f"there is no record {file}; --record makes one from runs of now") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Failed(
            f"{file} is no record of this program ({type(error).__name__}: {error})"
        ) from None
    if sorted(told) != sorted(options):
        raise Failed(
            f"{file} was recorded with the options {told}, and these runs have {list(options)}"
        )
    return record


def write_record(file: Path, options: Sequence[str], found: Sequence[Found], code: str) -> None:
    """Write the results of runs with this state of the code as the new record."""
    record = {"options": list(options), "code": code, "machine": machine(), "runs": list(found)}
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def _numbers(text: str) -> list[int]:
    """Parse a comma-separated list of distinct integers. Raises ValueError."""
    found = [int(word) for word in text.split(",")]
    if len({*found}) < len(found):
        raise ValueError("the same number twice")
    return found


def _interrupt(signum: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Return the exit status: 1 if a result is worse than the record, 2 if a run
    failed or there is nothing to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "options", nargs="*", metavar="OPTION=VALUE", help="of realhf.launch, for every run"
    )
    parser.add_argument(
        "--seeds", type=_numbers, default="1,2,3", help="with commas between them (%(default)s)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep what is found as the record, and compare nothing",
    )
    parser.add_argument("--record-file", type=Path, default=DEFAULT_RECORD, help="(%(default)s)")
    parser.add_argument("--runs", type=Path, help=f"folder of the runs ({RUNS}/STATE)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="a run that takes longer failed (%(default)s)"
    )
    asked = parser.parse_intermixed_args(arguments)
    own = ("seed=", "trial_name=", "experiment=", "experiment_name=", "fileroot=", "mode=")
    if taken := [text for text in asked.options if "=" not in text or text.startswith(own)]:
        parser.error(
            f"{taken[0]}: give options of the runs as name=value; {', '.join(own)} are set here"
        )
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        record = None if asked.record else read_record(asked.record_file, asked.options)
        if asked.record and len(asked.seeds) < 2:
            raise Failed("a record takes two seeds at least: one run says nothing of the spread")
        try:
            state = code_state()
        except Failed:
            if asked.runs is None:
                raise
            state = "unknown"
        found = []
        for seed in asked.seeds:
            found.append(play(seed, asked.runs or RUNS / state, asked.options, asked.minutes))
            print(json.dumps(found[-1]), flush=True)
        if record is None:
            write_record(asked.record_file, asked.options, found, state)
            print(f"recorded: {asked.record_file}")
            return 0
        rows, worse = compare(record, found, machine())
    except Failed as error:
        print(f"learning_gate: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, previous)
    print("\n".join(rows))
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
