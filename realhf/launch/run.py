"""Run an experiment: what comes before it, its jobs, then its workers; say at the end what came out."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from realhf.api.config import ConfigError, RecoverMode
from realhf.api.experiment import ExperimentSpec
from realhf.base.text import printable
from realhf.launch.build import BuiltExperiment
from realhf.launch.chosen_scheduler import make_scheduler
from realhf.launch.processes import LaunchError, run_job, run_workers
from realhf.monitor.display import Display, make_display
from realhf.monitor.provenance import write_provenance
from realhf.monitor.summary import held_out_table
from realhf.scheduler.base import Scheduler
from realhf.scheduler.failure import describe
from realhf.scheduler.process_control import orphans_adopted

RESULTS = (
    "checkpoints",
    "metrics.jsonl",
    "evaluations.json",
    "summary.json",
    "episodes.txt",
    "nonfinite.jsonl",
    "tensorboard",
    "trackers.json",
    "wandb",
    "mlflow",
    "policy",
    "logs",
    "learning.png",
    "time.png",
    "async.png",
    "timeline.png",
    "trace",
    "trace.json",
    "placements.jsonl",
    "report.html",
    "rollouts",
    "trajectory",
    "journal",
    "stream",
    "weights",
)


class Interrupted(Exception):
    """SIGINT or SIGTERM reached the launcher."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def run_to_the_end(built: BuiltExperiment, arguments: Sequence[str], started_at: float) -> int:
    """The exit code. Whatever happens, no process of the run is left."""
    try:
        with orphans_adopted(), _signals_raise(), _locked(built.spec.run_dir):
            _prepare(built, arguments)
            summary = _with_display(built, started_at)
    except Interrupted as stop:
        return _say_error(f"{stop}; what was saved is in {built.spec.run_dir}", stop.exit_code)
    except LaunchError as error:
        return _say_error(str(error), 1)
    except OSError as error:
        return _say_error(describe(error), 1)
    _say_results(summary, built.spec.run_dir)
    return 0


def _with_display(built: BuiltExperiment, started_at: float) -> dict[str, Any]:
    config = built.config
    display = make_display(f"{config.experiment_name}/{config.trial_name}", live=config.monitor.progress)
    try:
        return _run(built, built.spec, started_at, display)
    finally:
        display.close()


def _run(built: BuiltExperiment, spec: ExperimentSpec, started_at: float, display: Display) -> dict[str, Any]:
    """An experiment with all that it waits for."""
    for earlier in spec.before:
        if earlier.artifact is not None and earlier.artifact.exists():
            display.say(f"{earlier.name}: found {earlier.artifact}")
            continue
        display.say(f"{earlier.name}: {earlier.total_train_steps} steps, into {earlier.artifact or earlier.run_dir}")
        _run(built, earlier, time.time(), display)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    for job in spec.jobs:
        if job.artifact.exists():
            display.say(f"{job.name}: found {job.artifact}")
        else:
            log = spec.run_dir / "logs" / f"{job.name}.log"
            run_job(job, _scheduler(built), log, display)
    return run_workers(built.plan(spec, started_at), _scheduler(built), display)


def _scheduler(built: BuiltExperiment) -> Scheduler:
    try:
        return make_scheduler(built.config.scheduler)
    except ValueError as error:
        raise LaunchError(f"scheduler.path: {error}") from error


def _prepare(built: BuiltExperiment, arguments: Sequence[str]) -> None:
    """The run folder with its resolved configuration; emptied of results when nothing is to be recovered."""
    from omegaconf import OmegaConf

    folder, config = built.spec.run_dir, built.config
    if config.recover_mode is RecoverMode.disabled:
        for name in RESULTS:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    write_provenance(folder, arguments)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One launcher per run folder. Raises ConfigError when there is one already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"fileroot: cannot write to {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"trial_name: another run is using {folder}") from None
        yield


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """The first SIGINT or SIGTERM unwinds the launcher; later ones do not disturb the clean-up."""
    received: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        del frame
        if not received:
            received.append(signum)
            raise Interrupted(signum)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _say_error(text: str, exit_code: int) -> int:
    print(f"error: {printable(text, colours=False)}", file=sys.stderr)
    return exit_code


def _say_results(summary: dict[str, Any], run_dir: Path) -> None:
    console = Console()
    table = held_out_table(summary)
    if table is not None:
        console.print(table)
    console.print(
        f"{summary['steps']} steps in {summary['wall_seconds']:.0f} s, {summary['tokens_per_second']:.0f} tokens/s",
        highlight=False,
    )
    for advisory in summary.get("advisories", ()):
        text = f"{advisory['severity']}: {advisory['text']} {advisory['advice']}"
        console.print(Text(printable(text)), soft_wrap=True)
    console.print(f"results: {run_dir}", highlight=False, markup=False, soft_wrap=True)
