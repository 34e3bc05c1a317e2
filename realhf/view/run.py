"""One run as the page sees it: its files, read as they grow."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from realhf.monitor.advisories import advise, as_json, index_of
from realhf.monitor.provenance import PROVENANCE_FILE, effective_options
from realhf.monitor.run_files import EVALUATIONS_FILE, HostLanes
from realhf.view.folder_state import FolderState, read_json, state_of
from realhf.view.note import NOTE_FILE, read_note
from realhf.view.rollout_table import RunRollouts
from realhf.view.run_config import EVENT_FILES, run_config, run_events, run_origin
from realhf.view.run_metrics import RunMetrics, cell
from realhf.view.spans import RunSpans

PARTS = {
    "metrics": ("metrics.jsonl",),
    "evaluations": (EVALUATIONS_FILE,),
    "about": ("config.yaml", "provenance.json", "summary.json", NOTE_FILE, *EVENT_FILES),
    "spans": ("trace",),
    "rollouts": ("rollouts",),
}
"""The parts of a run that change on their own, with the files or folders that they lie in."""


class Run:
    """Is a run folder that is looked at. Methods block; they may be called from several threads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.metrics = RunMetrics(folder)
        self.spans = RunSpans(folder)
        self.rollouts = RunRollouts(folder)

    def stamps(self) -> dict[str, str]:
        """Return a text for each part that is another one once the part has changed."""
        return {part: " ".join(_stamp(self.folder / name) for name in names) for part, names in PARTS.items()}

    def state(self) -> FolderState:
        """Say whether the run goes on, has ended, or is no run."""
        try:
            self.metrics.refresh()
        except OSError:
            return state_of(self.folder, 0, None)
        times = [time for names in PARTS.values() for name in names if (time := _newest(self.folder / name))]
        return state_of(self.folder, self.metrics.steps, max(times, default=None))

    def described(self) -> dict[str, Any]:
        """Return what a list of runs says of this one."""
        state, tags = self.state(), read_note(self.folder).tags
        known = {"name": self.name, "folder": str(self.folder), "state": state.kind, "text": state.text}
        return known | {"steps": self.metrics.steps, "tags": list(tags)}

    def about(self) -> dict[str, Any]:
        """Return what the run was started with, where it came from, what a person has written about it, what happened
        to it, and which processes each host had."""
        hosts = HostLanes(self.folder)
        return {
            "config": run_config(self.folder),
            "origin": run_origin(self.folder),
            "note": read_note(self.folder).to_map(),
            "events": run_events(self.folder, hosts),
            "hosts": {host: hosts.processes(host) for host in hosts.hosts},
        }

    def advisories(self) -> list[dict[str, Any]]:
        """Return what is to be said about the run, as ``realhf.monitor.advisories`` judges it: {id, severity, text,
        since, advice, filter}."""
        self.metrics.refresh()
        content = read_json(self.folder / EVALUATIONS_FILE)
        reports = content.items() if isinstance(content, dict) else ()
        evaluations = [
            (int(step), report) for step, report in reports if str(step).isdecimal() and isinstance(report, dict)
        ]
        index = index_of(self.rollouts.index())
        bound = number_or_none(run_config(self.folder).get("async_rl.max_head_offpolicyness", ""))
        rows = list(self.metrics.rows)
        known = effective_options(read_json(self.folder / PROVENANCE_FILE))
        found = advise(rows, index, evaluations=evaluations, staleness_bound=bound, effective=known)
        return [as_json(one) for one in found]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return a point for each evaluation, way of sampling and group: {step, way, group, success, low, high, ..}."""
        content = read_json(self.folder / EVALUATIONS_FILE)
        points: list[dict[str, Any]] = []
        for step, report in content.items() if isinstance(content, dict) else ():
            for way, groups in report.items() if isinstance(report, dict) and str(step).isdecimal() else ():
                for group, entry in groups.items() if isinstance(groups, dict) else ():
                    if isinstance(entry, dict):
                        numbers = {str(name): cell(value) for name, value in entry.items()}
                        points.append({"step": int(step), "way": str(way), "group": str(group), **numbers})
        return sorted(points, key=lambda point: point["step"])


def number_or_none(text: str) -> float | None:
    """Return the number that a text is; None for any other text."""
    try:
        return float(text)
    except ValueError:
        return None


def _stamp(path: Path) -> str:
    """Describe a file by its identity, size and time; a folder by those of the files in it."""
    try:
        about = path.stat()
        if path.is_dir():
            inner = _inside(path)
            newest = max((item.st_mtime_ns for item in inner), default=0)
            return f"{len(inner)}:{sum(item.st_size for item in inner)}:{newest}"
        return f"{about.st_ino}:{about.st_size}:{about.st_mtime_ns}"
    except OSError:
        return "-"


def _newest(path: Path) -> float | None:
    try:
        return max([path.stat().st_mtime, *(item.st_mtime for item in (_inside(path) if path.is_dir() else ()))])
    except OSError:
        return None


def _inside(folder: Path) -> list[os.stat_result]:
    """Describe the entries of a folder, but those that vanish meanwhile or lead nowhere."""
    found = []
    for entry in folder.iterdir():
        with suppress(OSError):
            found.append(entry.stat())
    return found
