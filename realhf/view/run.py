"""List of runs, and the data of each run for the page, read while its files grow."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from realhf.api.passport import PASSPORT_FILE, describe_passport
from realhf.monitor.advisories import advise, index_rollouts
from realhf.monitor.provenance import LAUNCH, PROVENANCE_FILE, effective_options, read_launches
from realhf.monitor.run_files import (
    DEATHS_FILE,
    EVALUATIONS_FILE,
    NONFINITE_FILE,
    PLACEMENTS_FILE,
    HostLanes,
    read_deaths,
)
from realhf.monitor.run_log import METRICS_FILE
from realhf.view.rollout_table import RunRollouts
from realhf.view.run_data import RunMetrics, RunSpans, cell
from realhf.view.run_folder import (
    NOTE_FILE,
    FolderState,
    folder_state,
    is_run,
    read_json,
    read_note,
    read_text,
)

MAX_OPTIONS = 5000
"""Maximum number of options that are shown."""
MAX_OPTION_DEPTH = 20
"""Maximum depth of nested options."""
MAX_VISITS = 50_000
"""Maximum number of values visited in a configuration. It is limited, because YAML aliases can
refer to the same values again and again."""
MAX_CHARACTERS = 500
"""Maximum number of characters of a value or an event."""
_HIDDEN_OPTIONS = ("fileroot",)
"""Options that are not shown on the page."""
MAX_EVENTS = 500
"""Maximum number of events; only the last ones are kept."""
EVENT_FILES = (DEATHS_FILE, PLACEMENTS_FILE, NONFINITE_FILE)
"""Files from which events are read."""
_SECRET_NAME = r"[a-z0-9_-]*(?:key|token|secret|password|passwd|passphrase|credentials?)"
"""Pattern for names of options and fields whose values are secrets."""
_SECRET = re.compile(
    rf"""((?<![a-z0-9_-]){_SECRET_NAME}['"]?\s*[=:]\s*)(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s,}}\]]+)""",
    re.IGNORECASE,
)
"""A secret within a text: its name, then its value."""
_SECRET_OPTION = re.compile(rf"((?:[\w-]+\.)*{_SECRET_NAME}=).+", re.IGNORECASE | re.DOTALL)
"""Option whose value is a secret."""
_LOGIN = re.compile(r"(://)[^/\s]+@")
"""User and password in a URL."""


def run_config(run_dir: Path) -> dict[str, str]:
    """Return {option: value} from ``config.yaml``; {} if it is missing or invalid. The size of the
    result is limited, whatever the file contains."""
    import yaml

    try:
        content = yaml.safe_load(read_text(run_dir / "config.yaml"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    options: dict[str, str] = {}
    _flatten("", content, options, 0, itertools.count())
    return options


def run_origin(run_dir: Path) -> dict[str, Any]:
    """Return the command line, commit and versions from ``provenance.json``; each is empty if it is
    missing."""
    content = read_json(run_dir / "provenance.json")
    if not isinstance(content, dict):
        return {}
    git = content.get("git")
    packages = content.get("packages")
    arguments = content.get("arguments")
    return {
        "command": shlex.join([*LAUNCH, *(mask_secrets(str(argument)) for argument in arguments)])
        if isinstance(arguments, list)
        else "",
        "commit": str(git.get("commit") or "") if isinstance(git, dict) else "",
        "modified": bool(git.get("modified")) if isinstance(git, dict) else False,
        "python": str(content.get("python", "")),
        "packages": {str(name): str(version) for name, version in packages.items()}
        if isinstance(packages, dict)
        else {},
    }


def run_events(run_dir: Path, hosts: HostLanes) -> list[dict[str, Any]]:
    """Return the events of a run: resumptions, workers that ended early, lost hosts and skipped
    updates.

    Each event is {at, step, what}: time in seconds since the epoch (None if unknown), last complete
    step (or None), and a text.
    """
    events: list[dict[str, Any]] = []
    for entry in read_launches(run_dir)[1:]:
        changed = entry.get("changed")
        changed_options = [
            f"{name}: {' → '.join(_format_option(str(name), value) for value in values)}"
            for name, values in (changed.items() if isinstance(changed, dict) else ())
            if isinstance(values, list)
        ]
        what = "resumed with " + (", ".join(changed_options) or "the same options")
        events.append({"at": None, "step": entry.get("completed_steps"), "what": what})
    for death in read_deaths(run_dir):
        events.append(
            {"at": death.at, "step": None, "what": f"{death.process}: {death.why}; {death.then}"}
        )
    for lost_at_us, host, why in hosts.lost:
        events.append(
            {"at": lost_at_us / 1e6, "step": None, "what": f"host {host} was lost: {why}"}
        )
    for line in read_text(run_dir / NONFINITE_FILE).splitlines()[-MAX_EVENTS:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            what = f"{row.get('call')} skipped its update: loss or gradient was not finite"
            events.append({"at": None, "step": row.get("step"), "what": what})
    return [
        {
            "at": event["at"],
            "step": event["step"] if isinstance(event["step"], int) else None,
            "what": event["what"][:MAX_CHARACTERS],
        }
        for event in events[-MAX_EVENTS:]
    ]


def mask_secrets(text: str) -> str:
    """Return a text without the values of names such as ``api_key``, and without user and password
    in URLs.

    If the text is itself an option with such a name, like ``env.token=..``, everything after the
    "=" is removed, because the value may contain spaces.
    """
    if option := _SECRET_OPTION.fullmatch(text):
        return f"{option[1]}(not shown)"
    return _LOGIN.sub(r"\1(not shown)@", _SECRET.sub(r"\1(not shown)", text))


def _flatten(
    name: str, value: Any, options: dict[str, str], depth: int, visits: Iterator[int]
) -> None:
    """Add ``value`` and all options nested in it to ``options``, within the limits."""
    if next(visits) >= MAX_VISITS or len(options) >= MAX_OPTIONS or name in _HIDDEN_OPTIONS:
        return
    if isinstance(value, dict) and value and depth < MAX_OPTION_DEPTH:
        for key, inner in value.items():
            _flatten(f"{name}.{key}" if name else str(key)[:200], inner, options, depth + 1, visits)
    elif name and (not isinstance(value, (dict, list)) or _is_small(value)):
        options[name] = _format_option(name, value)


def _format_option(name: str, value: Any) -> str:
    """Return the value of an option as text. A secret, recognised by its name, is removed."""
    return mask_secrets(f"{name}={str(value)[:MAX_CHARACTERS]}").removeprefix(f"{name}=")


def _is_small(value: Any, depth: int = 0) -> bool:
    """Return whether a value is small enough to format. Because of YAML aliases, a short file can
    stand for an endless value."""
    if not isinstance(value, (dict, list)):
        return True
    inner = list(value.values()) if isinstance(value, dict) else value
    return depth < 3 and len(inner) <= 64 and all(_is_small(item, depth + 1) for item in inner)


PARTS = {
    "metrics": ("metrics.jsonl",),
    "evaluations": (EVALUATIONS_FILE,),
    "about": (
        "config.yaml",
        "provenance.json",
        PASSPORT_FILE,
        "summary.json",
        NOTE_FILE,
        *EVENT_FILES,
    ),
    "spans": ("trace",),
    "rollouts": ("rollouts",),
}
"""Parts of a run that change independently, with the files or folders that contain them."""


class Run:
    """A run folder and its data for the page. Thread-safe; methods block."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.metrics = RunMetrics(folder)
        self.spans = RunSpans(folder)
        self.rollouts = RunRollouts(folder)

    def stamps(self) -> dict[str, str]:
        """Return a string for each part of the run, which changes whenever that part changes."""
        return {
            part: " ".join(_stamp(self.folder / name) for name in names)
            for part, names in PARTS.items()
        }

    def state(self) -> FolderState:
        """Return the state of the folder: whether the run is in progress or has ended, or that the
        folder is not a run."""
        try:
            self.metrics.refresh()
        except OSError:
            return folder_state(self.folder, 0, None)
        times = [
            time
            for names in PARTS.values()
            for name in names
            if (time := _newest(self.folder / name))
        ]
        return folder_state(self.folder, self.metrics.steps, max(times, default=None))

    def describe(self) -> dict[str, Any]:
        """Return the entry of this run in the list of runs."""
        state = self.state()
        tags = read_note(self.folder).tags
        entry = {
            "name": self.name,
            "folder": str(self.folder),
            "state": state.kind,
            "text": state.text,
        }
        return entry | {"steps": self.metrics.steps, "tags": list(tags)}

    def about(self) -> dict[str, Any]:
        """Return the run's options, its origin, how far its environment's reward was verified (""
        for a run without an environment), its note, its events, and the processes on each host."""
        hosts = HostLanes(self.folder)
        config = run_config(self.folder)
        return {
            "config": config,
            "passport": self._passport(config),
            "origin": run_origin(self.folder),
            "note": asdict(read_note(self.folder)),
            "events": run_events(self.folder, hosts),
            "hosts": {host: hosts.processes(host) for host in hosts.hosts},
        }

    def _passport(self, config: Mapping[str, str]) -> str:
        """Return how far the environment's reward was verified; "" without an environment."""
        if "env.path" not in config:
            return ""
        if "env.mix" in config:
            return "not recorded for a mixture: each of its environments has a passport of its own"
        return describe_passport(self.folder / PASSPORT_FILE)

    def advisories(self) -> list[dict[str, Any]]:
        """Return the advisories of ``realhf.monitor.advisories`` about the run: {id, severity,
        text, since, advice, filter}."""
        self.metrics.refresh()
        content = read_json(self.folder / EVALUATIONS_FILE)
        reports = content.items() if isinstance(content, dict) else ()
        evaluations = [
            (int(step), report)
            for step, report in reports
            if str(step).isdecimal() and isinstance(report, dict)
        ]
        index = index_rollouts(self.rollouts.index())
        bound = number_or_none(run_config(self.folder).get("async_rl.max_head_offpolicyness", ""))
        rows = list(self.metrics.rows)
        effective = effective_options(read_json(self.folder / PROVENANCE_FILE))
        advisories = advise(
            rows, index, evaluations=evaluations, staleness_bound=bound, effective=effective
        )
        return [asdict(advisory) for advisory in advisories]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return one point per evaluation, sampling method and group, sorted by step: {step, way,
        group, success, low, high, ..}."""
        content = read_json(self.folder / EVALUATIONS_FILE)
        points: list[dict[str, Any]] = []
        for step, report in content.items() if isinstance(content, dict) else ():
            for way, groups in (
                report.items() if isinstance(report, dict) and str(step).isdecimal() else ()
            ):
                for group, entry in groups.items() if isinstance(groups, dict) else ():
                    if isinstance(entry, dict):
                        numbers = {str(name): cell(value) for name, value in entry.items()}
                        points.append(
                            {"step": int(step), "way": str(way), "group": str(group), **numbers}
                        )
        return sorted(points, key=lambda point: point["step"])


def number_or_none(text: str) -> float | None:
    """Return the number that a string contains; None if it does not contain one."""
    try:
        return float(text)
    except ValueError:
        return None


def _stamp(path: Path) -> str:
    """Return a string that changes whenever the file at ``path`` changes (by inode, size and time),
    or any file in the folder at ``path``; "-" if the path cannot be read."""
    try:
        about = path.stat()
        if path.is_dir():
            inner = _entry_stats(path)
            newest = max((item.st_mtime_ns for item in inner), default=0)
            return f"{len(inner)}:{sum(item.st_size for item in inner)}:{newest}"
        return f"{about.st_ino}:{about.st_size}:{about.st_mtime_ns}"
    except OSError:
        return "-"


def _newest(path: Path) -> float | None:
    """Return the time of the last change of a file, or of a folder and the files in it, in seconds
    since the epoch; None if the path cannot be read."""
    try:
        return max(
            [
                path.stat().st_mtime,
                *(item.st_mtime for item in (_entry_stats(path) if path.is_dir() else ())),
            ]
        )
    except OSError:
        return None


def _entry_stats(folder: Path) -> list[os.stat_result]:
    """Return the status of each entry of a folder, except for entries that vanish during the call
    and for broken links."""
    stats = []
    for entry in folder.iterdir():
        with suppress(OSError):
            stats.append(entry.stat())
    return stats


MAX_RUNS = 500
"""Maximum number of runs in a list."""
MAX_FOLDER_DEPTH = 4
"""Maximum depth of a run below a folder of runs."""
_INNER = frozenset(
    {"checkpoints", "logs", "policy", "rollouts", "tensorboard", "trace", "wandb", "mlflow"}
)
"""Folders inside a run, which are not searched for further runs."""


class RunList:
    """Runs in the order in which they were found. The number of a run never changes."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(os.path.abspath(folder)) for folder in folders]
        self._runs: dict[Path, Run] = {}
        self._left_off: list[Path] = []
        self._lock = threading.Lock()

    def refresh(self) -> list[Run]:
        """Look for new runs, and return all runs.

        If there are more than ``MAX_RUNS``, the most recently written ones are added first. A given
        folder that contains no runs is listed as a run itself, so that the page can show what is
        wrong with it.
        """
        with self._lock:
            added: dict[Path, str] = {}
            for folder in self._folders:
                paths = [folder] if is_run(folder) else list(_find_runs(folder, MAX_FOLDER_DEPTH))
                for path in paths or [folder]:
                    if path not in self._runs:
                        added.setdefault(path, _display_name(folder, path))
            room = MAX_RUNS - len(self._runs)
            newest = set(
                sorted(added, key=_last_write, reverse=True)[:room] if len(added) > room else added
            )
            self._runs |= {path: Run(path, name) for path, name in added.items() if path in newest}
            self._left_off = [path for path in added if path not in newest]
            return list(self._runs.values())

    def left_off(self) -> list[Path]:
        """Return the folders of runs that are not listed because there are more than
        ``MAX_RUNS``."""
        with self._lock:
            return list(self._left_off)

    def first(self) -> int:
        """Return the number of the run that the page opens first: the first given run or, for a
        folder of runs, the most recently written one."""
        with self._lock:
            runs = list(self._runs.values())
        if not runs or is_run(self._folders[0]):
            return 0
        return max(range(len(runs)), key=lambda number: _last_write(runs[number].folder))

    def get(self, number: int) -> Run | None:
        """Return the run with this number; None if there is none."""
        with self._lock:
            runs = list(self._runs.values())
        return runs[number] if 0 <= number < len(runs) else None


def _find_runs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the runs below a folder, at most ``depth`` levels down."""
    try:
        inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in inner:
        if path.name in _INNER or path.name.startswith("."):
            continue
        if is_run(path):
            yield path
        elif depth > 1:
            yield from _find_runs(path, depth - 1)


def _last_write(run: Path) -> float:
    """Return the time at which a run wrote its last step, or started, in seconds since the epoch; 0
    if the folder has vanished."""
    for path in (run / METRICS_FILE, run):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0


def _display_name(folder: Path, path: Path) -> str:
    """Return the name under which the page shows a run."""
    if path == folder:
        return "/".join(path.parts[-2:]) if len(path.parts) > 2 else path.name
    return path.relative_to(folder).as_posix()
