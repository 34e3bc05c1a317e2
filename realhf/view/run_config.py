"""Reads what a run was started with, as a flat map from option to text."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from realhf.monitor.provenance import LAUNCH
from realhf.view.folder_state import read_json, read_text

MOST_OPTIONS = 5000
MOST_DEPTH = 20
MOST_VISITS = 50_000
"""How many values are looked at: aliases lead to the same ones again and again."""
MOST_CHARACTERS = 500
_NOT_SHOWN = ("fileroot",)


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
        "command": shlex.join([*LAUNCH, *map(str, arguments)]) if isinstance(arguments, list) else "",
        "commit": str(git.get("commit") or "") if isinstance(git, dict) else "",
        "modified": bool(git.get("modified")) if isinstance(git, dict) else False,
        "python": str(content.get("python", "")),
        "packages": {str(name): str(version) for name, version in packages.items()}
        if isinstance(packages, dict)
        else {},
    }


def _flatten(name: str, value: Any, found: dict[str, str], depth: int, visits: Iterator[int]) -> None:
    if next(visits) >= MOST_VISITS or len(found) >= MOST_OPTIONS or name in _NOT_SHOWN:
        return
    if isinstance(value, dict) and value and depth < MOST_DEPTH:
        for key, inner in value.items():
            _flatten(f"{name}.{key}" if name else str(key)[:200], inner, found, depth + 1, visits)
    elif name and (not isinstance(value, (dict, list)) or _is_small(value)):
        found[name] = str(value)[:MOST_CHARACTERS]


def _is_small(value: Any, depth: int = 0) -> bool:
    """Return whether writing a value out is cheap; aliases can make a short file mean an endless one."""
    if not isinstance(value, (dict, list)):
        return True
    inner = list(value.values()) if isinstance(value, dict) else value
    return depth < 3 and len(inner) <= 64 and all(_is_small(item, depth + 1) for item in inner)
