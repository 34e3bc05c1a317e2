"""Execution of an experiment (the experiments and jobs that must run first, then the workers), and
the table of files in a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from realhf.api.config import ConfigError, RecoverMode
from realhf.api.experiment import ExperimentSpec, Launch, artifact_exists
from realhf.api.passport import PASSPORT_FILE
from realhf.base.files import DAMAGED, write_atomic
from realhf.base.terminal import Terminal
from realhf.base.text import escape_controls
from realhf.dataflow.best_policy import BEST_POLICY
from realhf.env.loader.load import passport_file
from realhf.launch.build import BuiltExperiment
from realhf.launch.interrupts import LaunchInterrupted, StopSignals
from realhf.launch.plugins import make_scheduler
from realhf.launch.processes import LaunchError, run_job, run_workers
from realhf.launch.resume import Resumption, plain_options, resume_command
from realhf.monitor.display import Display, make_display
from realhf.monitor.provenance import EFFECTIVE, describe_origin, record_launch
from realhf.monitor.summary import build_held_out_table, describe_rows
from realhf.scheduler.base import Scheduler
from realhf.scheduler.process import adopt_orphans, describe_failure

LAUNCHER_LOG = "launcher.log"
"""Log file of the launcher, which records the loss of its terminal."""


def run_to_the_end(
    built: BuiltExperiment,
    arguments: Sequence[str],
    started_at: float,
    resumption: Resumption | None = None,
    terminal: Terminal | None = None,
) -> int:
    """Run an experiment and return the exit code. All processes of the run have ended afterwards,
    even after an error.

    ``resumption`` is the state from which the run resumes. The loss of ``terminal`` is recorded in
    the launcher's log.
    """
    launch = _describe_launch(built, arguments, started_at, resumption)
    config = built.config
    has_trial_name = any(text.startswith("trial_name=") for text in arguments)
    signals = StopSignals()
    resume_hint = (
        "" if has_trial_name else f"to resume it: {resume_command(arguments, config.trial_name)}"
    )
    try:
        with adopt_orphans(), signals.install(), _lock_folder(built.spec.run_dir):
            if config.recover_mode is RecoverMode.disabled:
                for path in list(find_removable_files(built.spec.run_dir)):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
                        missing_ok=True
                    )
            check_kinds(built.spec.run_dir)
            if terminal is not None:
                terminal.on_loss(lambda reason: _record_terminal_loss(built.spec.run_dir, reason))
            # In a resumed run the master records the launch once it knows the checkpoint.
            if resumption is None:
                record_launch(built.spec.run_dir, launch, 0)
            environment = getattr(getattr(config, "env", None), "path", "")
            copy_passport(environment, built.spec.run_dir)
            if resume_hint:
                print(f"run: {built.spec.run_dir}\n{resume_hint}", flush=True)
            summary = _run_with_display(built, launch, started_at, resumption, signals)
    except LaunchInterrupted as stop:
        text = f"{stop}; what was saved is in {built.spec.run_dir}"
        cause = stop.__context__  # A failure whose clean-up was interrupted.
        return _print_error(
            f"{cause}\n{text}" if isinstance(cause, LaunchError) else text,
            stop.exit_code,
            resume_hint,
        )
    except LaunchError as error:
        return _print_error(str(error), 1, resume_hint)
    except OSError as error:
        return _print_error(describe_failure(error, built.spec.run_dir), 1, resume_hint)
    _print_results(summary, built.spec.run_dir)
    return 0


def copy_passport(reference: str, run_dir: Path) -> None:
    """Copy the passport of the environment ``reference`` ("" for no environment) to a run folder.
    If there is no passport to copy, an old copy in the run folder is deleted. Raises OSError."""
    copy = run_dir / PASSPORT_FILE
    try:
        write_atomic(copy, passport_file(reference).read_text(encoding="utf-8", errors="replace"))
    except (FileNotFoundError, ValueError):
        copy.unlink(missing_ok=True)


def _record_terminal_loss(run_dir: Path, reason: str) -> None:
    """Append the loss of the terminal to the launcher's log."""
    log = run_dir / "logs" / LAUNCHER_LOG
    with contextlib.suppress(OSError):  # A full disk may be the reason.
        log.parent.mkdir(exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(
                f"{datetime.now().astimezone().isoformat()} {reason}; the run continues without it\n"
            )


def _describe_launch(
    built: BuiltExperiment,
    arguments: Sequence[str],
    started_at: float,
    resumption: Resumption | None,
) -> Launch:
    """Return the record of this launch for the run folder."""
    from omegaconf import OmegaConf

    config = built.config
    return Launch(
        datetime.fromtimestamp(started_at).astimezone().isoformat(),
        OmegaConf.to_yaml(OmegaConf.structured(config)),
        plain_options(config),
        resumption.values if resumption else {},
        describe_origin(arguments) | {EFFECTIVE: list(built.effective)},
    )


def _run_with_display(
    built: BuiltExperiment,
    launch: Launch,
    started_at: float,
    resumption: Resumption | None,
    signals: StopSignals,
) -> dict[str, Any]:
    config = built.config
    display = make_display(
        f"{config.experiment_name}/{config.trial_name}", live=config.monitor.progress
    )
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
    """Run an experiment after the experiments and jobs that it depends on, and return its
    summary."""
    for earlier in spec.before:
        if earlier.artifact is not None and artifact_exists(earlier.artifact):
            display.print_line(f"{earlier.name}: found {earlier.artifact}")
            continue
        display.print_line(
            f"{earlier.name}: {earlier.total_train_steps} steps, into "
            f"{earlier.artifact or earlier.run_dir}"
        )
        _run(built, earlier, time.time(), display, signals)
    spec.run_dir.mkdir(parents=True, exist_ok=True)
    _run_jobs(built, spec, display, spec.run_dir / "logs")
    plan = replace(built.plan(spec, started_at), launch=launch or Launch())
    return run_workers(plan, _scheduler(built), display, signals)


def _run_jobs(built: BuiltExperiment, spec: ExperimentSpec, display: Display, logs: Path) -> None:
    """Run the jobs of an experiment whose artifacts do not exist, and print the jobs' reports.
    ``logs``: folder of their logs."""
    for job in spec.jobs:
        if artifact_exists(job.artifact):
            display.print_line(f"{job.name}: found {job.artifact}")
        else:
            run_job(job, _scheduler(built), logs / f"{job.name}.log", display)
        if job.report:
            for line in (job.artifact / job.report).read_text(encoding="utf-8").splitlines():
                display.print_line(line)


def show_rows(built: BuiltExperiment) -> int:
    """Run the jobs that prepare an experiment's data, print their reports, and return the exit
    code. The run folder, which another launcher may use, is left alone.

    Raises ConfigError for an experiment whose jobs have no report.
    """
    spec = built.spec
    if not any(job.report for job in spec.jobs):
        raise ConfigError(
            f"mode=show: experiment {spec.name} trains on no file; set dataset.path, or leave it out"
        )
    display = make_display(f"{built.config.experiment_name}/{built.config.trial_name}", live=False)
    cache = spec.jobs[-1].artifact.parent
    try:
        with adopt_orphans(), StopSignals().install():
            cache.mkdir(parents=True, exist_ok=True)
            logs = Path(tempfile.mkdtemp(prefix=".logs-", dir=cache))
            _run_jobs(built, spec, display, logs)
    except LaunchInterrupted as stop:
        return _print_error(str(stop), stop.exit_code)
    except LaunchError as error:
        return _print_error(str(error), 1)  # It names the log, which is kept.
    except OSError as error:
        return _print_error(describe_failure(error, cache), 1)
    finally:
        display.close()
    shutil.rmtree(logs, ignore_errors=True)
    return 0


def _scheduler(built: BuiltExperiment) -> Scheduler:
    try:
        return make_scheduler(built.config.scheduler)
    except ValueError as error:
        raise LaunchError(f"scheduler.path: {error}") from error


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Context manager that locks a run folder for this launcher. Raises ConfigError if another
    launcher uses the folder."""
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


def _print_error(text: str, exit_code: int, more: str = "") -> int:
    """Print an error and further lines to standard error, and return ``exit_code``."""
    print(f"error: {escape_controls(text, colours=False)}", file=sys.stderr)
    if more:
        print(escape_controls(more, colours=False), file=sys.stderr)
    return exit_code


def _print_results(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the results of a finished run."""
    console = Console()
    table = build_held_out_table(summary)
    if table is not None:
        console.print(table)
    for when in ("before", "after"):
        if results := summary.get(f"heldout_rows_{when}"):
            console.print(
                f"held-out rows {when} training: {describe_rows(results)}", highlight=False
            )
    console.print(
        f"{summary['steps']} steps in {summary['wall_seconds']:.0f} s, "
        f"{summary['tokens_per_second']:.0f} tokens/s",
        highlight=False,
    )
    if best := summary.get("best_policy"):
        after = f"after step {best['step']}" if best["step"] else "before training"
        console.print(
            f"best held-out success {100 * best['success']:.1f} %, {after}, is kept in "
            f"{run_dir / BEST_POLICY}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    for advisory in summary.get("advisories", ()):
        text = f"{advisory['severity']}: {advisory['text']} {advisory['advice']}"
        console.print(Text(escape_controls(text)), soft_wrap=True)
    console.print(f"results: {run_dir}", highlight=False, markup=False, soft_wrap=True)


WriteMode = Literal["whole", "appended", "folder"]
"""How a file is written: replaced atomically (``whole``), appended to (``appended``), or as a
folder that its writer manages (``folder``)."""


class RunFile(NamedTuple):
    """A file or folder in a run folder."""

    name: str
    """Name or glob pattern."""
    writer: str
    """The processes that write it."""
    written: WriteMode
    """How it is written."""
    survives_reset: bool = False
    """Whether it is kept when the run starts over (``recover_mode=disabled``). Everything that a
    run has learned or recorded is deleted, so that the records of two runs are not mixed."""
    read: bool = False
    """Whether a resumed run reads the file, so that it must be readable."""


RUN_FILES = (
    RunFile("config.yaml", "launcher, master", "whole"),
    RunFile("provenance.json", "launcher, master", "whole", read=True),
    RunFile(PASSPORT_FILE, "launcher", "whole"),
    RunFile("plan.json", "launcher", "whole"),
    RunFile(".lock", "launcher", "whole", survives_reset=True),
    RunFile(".keys-*", "launcher", "whole", survives_reset=True),
    RunFile("note.json", "python -m realhf.view note", "whole", survives_reset=True),
    RunFile("logs", "every process", "folder"),
    RunFile("warm_start-*", "master of the warm start", "folder", survives_reset=True),
    RunFile("placements.jsonl", "launcher", "appended"),
    RunFile("deaths.jsonl", "launcher", "appended"),
    RunFile("graph.md", "master", "whole"),
    RunFile("graph.dot", "master", "whole"),
    RunFile("metrics.jsonl", "master", "appended", read=True),
    RunFile("evaluations.json", "master", "whole", read=True),
    RunFile("held_out_reference.json", "model worker", "whole", read=True),
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
"""All files and folders that a run writes. Other files in a run folder are never changed."""


def find_removable_files(run_dir: Path) -> Iterator[Path]:
    """Yield the existing files to delete when a run starts over. They include incomplete files that
    killed processes have left, and damaged files that were renamed."""
    for file in RUN_FILES:
        if not file.survives_reset:
            leftovers = (f".{file.name}.*.tmp", f".{file.name}.*.old")
            for pattern in (
                file.name,
                f"{file.name}.partial",
                f"{file.name}{DAMAGED}*",
                *leftovers,
            ):
                yield from run_dir.glob(pattern)


def check_kinds(run_dir: Path) -> None:
    """Raise ConfigError for the first entry of ``RUN_FILES`` that is a folder instead of a file (or
    vice versa), is a broken link, or cannot be read although a resumed run reads it. Otherwise the
    run would fail later, after it has changed some files."""
    for file in RUN_FILES:
        for path in sorted(path for path in run_dir.iterdir() if path.match(file.name)):
            if fault := _find_fault(file, path):
                raise ConfigError(
                    f"trial_name: {path} {fault}; repair or remove it, or start over "
                    "with recover_mode=disabled"
                )


def _find_fault(file: RunFile, path: Path) -> str:
    """Return the problem of an existing path that belongs to ``file``; "" if there is none."""
    expected = "folder" if file.written == "folder" else "file"
    if not path.exists():
        return f"should be a {expected} and is a link to {path.readlink()}, which does not exist"
    if path.is_dir() != (expected == "folder"):
        return f"should be a {expected} and is something else"
    try:
        if file.read:
            path.open("rb").close()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""


def find_unknown_files(run_dir: Path) -> list[str]:
    """Return the names in a run folder that are not in ``RUN_FILES``."""
    known = [pattern for file in RUN_FILES for pattern in (file.name, f"{file.name}{DAMAGED}*")]
    return sorted(
        path.name for path in run_dir.iterdir() if not any(path.match(pattern) for pattern in known)
    )
