"""Runs an experiment: what comes before it, its jobs, then its workers; knows the files of a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from realhf.api.config import ConfigError, RecoverMode
from realhf.api.experiment import ExperimentSpec, Launch, is_made
from realhf.api.passport import PASSPORT_FILE
from realhf.base.files import DAMAGED, write_whole
from realhf.base.terminal import Terminal
from realhf.base.text import printable
from realhf.dataflow.best_policy import BEST_POLICY
from realhf.env.loader.load import passport_file
from realhf.launch.build import BuiltExperiment
from realhf.launch.interrupts import Interrupted, StopSignals
from realhf.launch.plugins import make_scheduler
from realhf.launch.processes import LaunchError, run_job, run_workers
from realhf.launch.resume import Resumption, plain_options, resume_line
from realhf.monitor.display import Display, make_display
from realhf.monitor.provenance import EFFECTIVE, origin, record_launch
from realhf.monitor.summary import build_held_out_table
from realhf.scheduler.base import Scheduler
from realhf.scheduler.process import adopt_orphans, describe

LAUNCHER_LOG = "launcher.log"
"""The file in the logs of a run that says when its terminal was lost."""


def run_to_the_end(
    built: BuiltExperiment,
    arguments: Sequence[str],
    started_at: float,
    resumption: Resumption | None = None,
    terminal: Terminal | None = None,
) -> int:
    """The exit code. Whatever happens, no process of the run is left. ``resumption``: what the run goes on from.
    ``terminal``: where the run is shown; its loss is noted in the logs of the run."""
    launch = _launch(built, arguments, started_at, resumption)
    config, named = built.config, any(text.startswith("trial_name=") for text in arguments)
    signals = StopSignals()
    go_on = "" if named else f"to go on with it: {resume_line(arguments, config.trial_name)}"
    try:
        with adopt_orphans(), signals.installed(), _locked(built.spec.run_dir):
            if config.recover_mode is RecoverMode.disabled:
                for path in list(removable(built.spec.run_dir)):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            check_kinds(built.spec.run_dir)
            if terminal is not None:
                terminal.on_loss(lambda reason: _note_loss(built.spec.run_dir, reason))
            if resumption is None:  # one that goes on keeps its configuration until its master has found from where
                record_launch(built.spec.run_dir, launch, 0)
            environment = getattr(getattr(config, "env", None), "path", "")
            keep_passport(environment, built.spec.run_dir)
            if go_on:
                print(f"run: {built.spec.run_dir}\n{go_on}", flush=True)
            summary = _with_display(built, launch, started_at, resumption, signals)
    except Interrupted as stop:
        text = f"{stop}; what was saved is in {built.spec.run_dir}"
        cause = stop.__context__  # the run was being cleaned up after it
        return _say_error(f"{cause}\n{text}" if isinstance(cause, LaunchError) else text, stop.exit_code, go_on)
    except LaunchError as error:
        return _say_error(str(error), 1, go_on)
    except OSError as error:
        return _say_error(describe(error, built.spec.run_dir), 1, go_on)
    _say_results(summary, built.spec.run_dir)
    return 0


def keep_passport(reference: str, run_dir: Path) -> None:
    """Copy the passport of an environment ("" for none) into a run folder; where it has none, none is left there.
    Raises OSError."""
    kept = run_dir / PASSPORT_FILE
    try:
        write_whole(kept, passport_file(reference).read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ValueError):
        kept.unlink(missing_ok=True)


def _note_loss(run_dir: Path, reason: str) -> None:
    """Write down in the logs that nobody sees the run any more."""
    log = run_dir / "logs" / LAUNCHER_LOG
    with contextlib.suppress(OSError):  # a disk that is full may be the reason
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().astimezone().isoformat()} {reason}; the run goes on without it\n")


def _launch(
    built: BuiltExperiment, arguments: Sequence[str], started_at: float, resumption: Resumption | None
) -> Launch:
    """What is recorded of this launch once the run is accepted."""
    from omegaconf import OmegaConf

    config = built.config
    return Launch(
        datetime.fromtimestamp(started_at).astimezone().isoformat(),
        OmegaConf.to_yaml(OmegaConf.structured(config)),
        plain_options(config),
        resumption.values if resumption else {},
        origin(arguments) | {EFFECTIVE: list(built.effective)},
    )


def _with_display(
    built: BuiltExperiment,
    launch: Launch,
    started_at: float,
    resumption: Resumption | None,
    signals: StopSignals,
) -> dict[str, Any]:
    config = built.config
    display = make_display(f"{config.experiment_name}/{config.trial_name}", live=config.monitor.progress)
    try:
        for text in resumption.warnings() if resumption else ():
            display.show({"kind": "warning", "text": text})
        return _run(built, built.spec, started_at, display, signals, launch)
    finally:
        display.close()


def _run(
    built: BuiltExperiment,
    spec: ExperimentSpec,
    started_at: float,
    display: Display,
    signals: StopSignals,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """An experiment with all that it waits for."""
    for earlier in spec.before:
        if earlier.artifact is not None and is_made(earlier.artifact):
            display.say(f"{earlier.name}: found {earlier.artifact}")
            continue
        display.say(f"{earlier.name}: {earlier.total_train_steps} steps, into {earlier.artifact or earlier.run_dir}")
        _run(built, earlier, time.time(), display, signals)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    for job in spec.jobs:
        if is_made(job.artifact):
            display.say(f"{job.name}: found {job.artifact}")
        else:
            log = spec.run_dir / "logs" / f"{job.name}.log"
            run_job(job, _scheduler(built), log, display)
    plan = replace(built.plan(spec, started_at), launch=launch or Launch())
    return run_workers(plan, _scheduler(built), display, signals)


def _scheduler(built: BuiltExperiment) -> Scheduler:
    try:
        return make_scheduler(built.config.scheduler)
    except ValueError as error:
        raise LaunchError(f"scheduler.path: {error}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One launcher per run folder. Raises ConfigError when there is one already."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(f"fileroot: cannot write to {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"trial_name: another run is using {folder}") from None
        yield


def _say_error(text: str, exit_code: int, more: str = "") -> int:
    print(f"error: {printable(text, colours=False)}", file=sys.stderr)
    if more:
        print(printable(more, colours=False), file=sys.stderr)
    return exit_code


def _say_results(summary: dict[str, Any], run_dir: Path) -> None:
    console = Console()
    table = build_held_out_table(summary)
    if table is not None:
        console.print(table)
    console.print(
        f"{summary['steps']} steps in {summary['wall_seconds']:.0f} s, {summary['tokens_per_second']:.0f} tokens/s",
        highlight=False,
    )
    if best := summary.get("best_policy"):
        after = f"after step {best['step']}" if best["step"] else "before training"
        console.print(
            f"best held-out success {100 * best['success']:.1f} %, {after}, is kept in {run_dir / BEST_POLICY}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for advisory in summary.get("advisories", ()):
        text = f"{advisory['severity']}: {advisory['text']} {advisory['advice']}"
        console.print(Text(printable(text)), soft_wrap=True)
    console.print(f"results: {run_dir}", highlight=False, markup=False, soft_wrap=True)


Written = Literal["whole", "appended", "folder"]


class RunFile(NamedTuple):
    """``name`` may be a pattern. ``written``: replaced when complete, appended to, or a folder that its writer looks
    after. ``kept``: whether it stays when the run begins anew (``recover_mode=disabled``); everything that a run has
    learned or recorded goes, lest two histories be read as one. ``read``: whether a run that goes on reads the file,
    which may then not be replaced unread."""

    name: str
    writer: str
    written: Written
    kept: bool = False
    read: bool = False


RUN_FILES = (
    RunFile("config.yaml", "launcher, master", "whole"),
    RunFile("provenance.json", "launcher, master", "whole", read=True),
    RunFile(PASSPORT_FILE, "launcher", "whole"),
    RunFile("plan.json", "launcher", "whole"),
    RunFile(".lock", "launcher", "whole", kept=True),
    RunFile(".keys-*", "launcher", "whole", kept=True),
    RunFile("note.json", "python -m realhf.view note", "whole", kept=True),
    RunFile("logs", "every process", "folder"),
    RunFile("warm_start-*", "master of the warm start", "folder", kept=True),
    RunFile("placements.jsonl", "launcher", "appended"),
    RunFile("deaths.jsonl", "launcher", "appended"),
    RunFile("graph.md", "master", "whole"),
    RunFile("graph.dot", "master", "whole"),
    RunFile("metrics.jsonl", "master", "appended", read=True),
    RunFile("evaluations.json", "master", "whole", read=True),
    RunFile("summary.json", "master", "whole"),
    RunFile("episodes.txt", "master", "appended"),
    RunFile("nonfinite.jsonl", "master", "appended"),
    RunFile("report.html", "master", "whole"),
    RunFile("trace", "every process", "folder"),
    RunFile("trace.json", "master", "whole"),
    RunFile("rollouts", "model workers, rollout workers", "folder"),
    RunFile("tensorboard", "master", "folder"),
    RunFile("trackers.json", "master", "whole", read=True),
    RunFile("wandb", "master", "folder"),
    RunFile("mlflow", "master", "folder"),
    RunFile("checkpoints", "model workers, master", "folder"),
    RunFile("checkpoints.json", "master", "whole"),
    RunFile("policy", "model worker", "folder"),
    RunFile("best_policy", "model worker", "folder"),
    RunFile(".best_policy.candidate", "model worker", "folder"),
    RunFile("best_policy.json", "master", "whole", read=True),
    RunFile("journal", "master", "folder"),
    RunFile("stream", "model workers", "folder"),
    RunFile("weights", "model workers", "folder"),
    RunFile("weights.jsonl", "master", "appended", read=True),
    RunFile("trajectory", "trajectory server", "folder"),
)
"""All of them. What is not in the table belongs to somebody else and is left alone."""


def removable(run_dir: Path) -> Iterator[Path]:
    """Yield what is there of a run and goes when it begins anew, halves of files that a killed process left and what
    was damaged and put aside with it."""
    for file in RUN_FILES:
        if not file.kept:
            left = (f".{file.name}.*.tmp", f".{file.name}.*.old")
            for pattern in (file.name, f"{file.name}.partial", f"{file.name}{DAMAGED}*", *left):
                yield from run_dir.glob(pattern)


def check_kinds(run_dir: Path) -> None:
    """Raise ConfigError for the first file of a run that is a folder, folder that is none, link to nowhere, or file
    that a run which goes on has to read and may not: later it would fail in the middle of the run, or when others have
    been changed."""
    for file in RUN_FILES:
        for path in sorted(path for path in run_dir.iterdir() if path.match(file.name)):
            if fault := _fault(file, path):
                raise ConfigError(
                    f"trial_name: {path} {fault}; put it in order or take it away, or begin anew with "
                    "recover_mode=disabled"
                )


def _fault(file: RunFile, path: Path) -> str:
    wanted = "folder" if file.written == "folder" else "file"
    if not path.exists():
        return f"should be a {wanted} and is a link to {path.readlink()}, which is not there"
    if path.is_dir() != (wanted == "folder"):
        return f"should be a {wanted} and is something else"
    try:
        if file.read:
            path.open("rb").close()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def unknown_files(run_dir: Path) -> list[str]:
    """Names in a run folder that the table does not have."""
    known = [pattern for file in RUN_FILES for pattern in (file.name, f"{file.name}{DAMAGED}*")]
    return sorted(path.name for path in run_dir.iterdir() if not any(path.match(pattern) for pattern in known))
