"""Reads what a run was started with, as a flat map from option to text, and what happened to it. Values that look like
secrets are not shown: pages and reports are sent around."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realhf.monitor.provenance import LAUNCH, launches
from realhf.monitor.run_files import DEATHS_FILE, NONFINITE_FILE, PLACEMENTS_FILE, HostLanes, deaths
from realhf.view.folder_state import read_json, read_text

MOST_OPTIONS = 5000
MOST_DEPTH = 20
MOST_VISITS = 50_000
"""How many values are looked at: aliases lead to the same ones again and again."""
MOST_CHARACTERS = 500
_NOT_SHOWN = ("fileroot",)
MOST_EVENTS = 500
EVENT_FILES = (DEATHS_FILE, PLACEMENTS_FILE, NONFINITE_FILE)
_NAME = r"[a-z0-9_-]*(?:key|token|secret|password|passwd|passphrase|credentials?)"
_SECRET = re.compile(
    rf"""((?<![a-z0-9_-]){_NAME}['"]?\s*[=:]\s*)(?:"[^"]*(?:"|$)|'[^']*(?:'|$)|[^\s,}}\]]+)""", re.IGNORECASE
)
_SECRET_OPTION = re.compile(rf"((?:[\w-]+\.)*{_NAME}=).+", re.IGNORECASE | re.DOTALL)
_LOGIN = re.compile(r"(://)[^/\s]+@")


def run_config(run_dir: Path) -> dict[str, str]:
    """Return {option: value} of ``config.yaml``; {} when there is none or it cannot be understood. Bounded,
    whatever the file holds."""
    import yaml

    try:
        content = yaml.safe_load(read_text(run_dir / "config.yaml"))
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    found: dict[str, str] = {}
    _flatten("", content, found, 0, itertools.count())
    return found


def run_origin(run_dir: Path) -> dict[str, Any]:
    """Return the command line, commit and versions of ``provenance.json``, as far as they are there."""
    content = read_json(run_dir / "provenance.json")
    if not isinstance(content, dict):
        return {}
    git, packages = content.get("git"), content.get("packages")
    arguments = content.get("arguments")
    return {
        "command": shlex.join([*LAUNCH, *(masked(str(argument)) for argument in arguments)])
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
    """Return what happened to a run {at (s since the epoch, None where it is not known), step (the last complete one,
    or None), what}: that it went on, workers that ended before it did, hosts that were lost, updates that were
    skipped."""
    found: list[dict[str, Any]] = []
    for entry in launches(run_dir)[1:]:
        changed = entry.get("changed")
        told = [
            f"{name}: {' → '.join(_shown(str(name), value) for value in values)}"
            for name, values in (changed.items() if isinstance(changed, dict) else ())
            if isinstance(values, list)
        ]
        what = "the run went on with " + (", ".join(told) or "the same options")
        found.append({"at": None, "step": entry.get("completed_steps"), "what": what})
    for death in deaths(run_dir):
        found.append({"at": death.at, "step": None, "what": f"{death.process}: {death.why}; {death.then}"})
    for moment, host, why in hosts.lost:
        found.append({"at": moment / 1e6, "step": None, "what": f"host {host} was lost: {why}"})
    for line in read_text(run_dir / NONFINITE_FILE).splitlines()[-MOST_EVENTS:]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            what = f"{row.get('call')} skipped its update: loss or gradient was not finite"
            found.append({"at": None, "step": row.get("step"), "what": what})
    return [
        {
            "at": event["at"],
            "step": event["step"] if isinstance(event["step"], int) else None,
            "what": event["what"][:MOST_CHARACTERS],
        }
        for event in found[-MOST_EVENTS:]
    ]


def masked(text: str) -> str:
    """Return a text without what stands behind a name such as ``api_key``, and without the login of an address. Of one
    that is an option with such a name, as ``env.token=``, nothing of the value is kept: it may have spaces."""
    if option := _SECRET_OPTION.fullmatch(text):
        return f"{option[1]}(not shown)"
    return _LOGIN.sub(r"\1(not shown)@", _SECRET.sub(r"\1(not shown)", text))


def _flatten(name: str, value: Any, found: dict[str, str], depth: int, visits: Iterator[int]) -> None:
    if next(visits) >= MOST_VISITS or len(found) >= MOST_OPTIONS or name in _NOT_SHOWN:
        return
    if isinstance(value, dict) and value and depth < MOST_DEPTH:
        for key, inner in value.items():
            _flatten(f"{name}.{key}" if name else str(key)[:200], inner, found, depth + 1, visits)
    elif name and (not isinstance(value, (dict, list)) or _is_small(value)):
        found[name] = _shown(name, value)


def _shown(name: str, value: Any) -> str:
    """Return the value of an option as a text, unless it is a secret by its name."""
    return masked(f"{name}={str(value)[:MOST_CHARACTERS]}").removeprefix(f"{name}=")


def _is_small(value: Any, depth: int = 0) -> bool:
    """Return whether writing a value out is cheap; aliases can make a short file mean an endless one."""
    if not isinstance(value, (dict, list)):
        return True
    inner = list(value.values()) if isinstance(value, dict) else value
    return depth < 3 and len(inner) <= 64 and all(_is_small(item, depth + 1) for item in inner)
