"""Records what produced a run: options, commit, package versions, Python, command line, launch by launch."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from realhf.api.experiment import Launch
from realhf.base.files import kept_aside, write_whole
from realhf.base.installation import PACKAGE, git_state

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
MOST_SHOWN = 8
"""So many changed options are named; another environment or model changes dozens."""
EFFECTIVE = "effective_options"
"""The options that do something in the run's experiment."""

LAUNCH = ("python", "-m", "realhf.launch")
"""What stands before the arguments of a run; whoever shows the whole line quotes it as a shell reads it."""
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "hydra-core",
    "omegaconf",
    "pyzmq",
    "msgpack",
    "numpy",
    "ministack",
    "awscli",
    "safetensors",
)


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Return the installed versions; None for a package that is not installed. Imports none of them."""
    return {name: _installed_version(name) for name in names}


@cache
def _installed_version(package: str) -> str | None:
    """A process keeps what it found: it takes milliseconds, and what is imported does not change any more."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def origin(arguments: Sequence[str]) -> dict[str, Any]:
    """Return what a launch with these arguments runs with, beside its options."""
    return {
        "git": git_state(PACKAGE),
        "packages": package_versions(),
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "arguments": list(arguments),
        "executable": Path(sys.executable).name,
    }


def record_launch(
    run_dir: Path, launch: Launch, completed_steps: int, warn: Callable[[str], None] = lambda text: None
) -> bool:
    """Write ``config.yaml`` and ``provenance.json`` of a run that was accepted and goes on after ``completed_steps``.
    ``launches`` keeps the history: of each launch its time, the steps that were complete, its command line, commit, and
    the options that it changed. The same launch is recorded once, however often the run begins again by itself.
    Returns whether it was recorded now. ``warn`` hears of a history that is damaged and put aside. Raises OSError."""
    if not launch.at:
        return False
    entry = {
        "at": launch.at,
        "completed_steps": completed_steps,
        "arguments": launch.origin["arguments"],
        "commit": launch.origin["git"]["commit"],
        "changed": launch.changed,
    }
    earlier = launches(run_dir)
    if launch.at in [known["at"] for known in earlier]:
        return False
    if not earlier:
        _keep_damaged(run_dir / PROVENANCE_FILE, completed_steps, warn)
    write_whole(run_dir / CONFIG_FILE, launch.config)
    content = {**launch.origin, "launches": [*earlier, entry]}
    write_whole(run_dir / PROVENANCE_FILE, json.dumps(content, indent=1) + "\n")
    return True


def _keep_damaged(path: Path, completed_steps: int, warn: Callable[[str], None]) -> None:
    """Put a history aside that has no launch, or say that there is none where a run has made steps. Raises OSError
    where it cannot be read now."""
    kept = kept_aside(path)
    if kept is not None:
        warn(f"{path} cannot be understood and is kept as {kept.name}: the launches of before are not in the new one")
    elif completed_steps:
        warn(f"{path} is gone: the launches of before are not in the new one")


def listed_changes(changed: Mapping[str, Sequence[Any]]) -> str:
    """Return options that have another value than before, {name: (before, now)}, as a line for a person."""
    shown = [shown_change(name, *values) for name, values in changed.items()]
    more = len(shown) - MOST_SHOWN
    return ", ".join(shown[:MOST_SHOWN]) + (f", and {more} more" if more > 0 else "")


def shown_change(name: str, before: Any, now: Any) -> str:
    """Return an option with both values, as the command line takes them."""
    return f"{name}={_shown(before)} -> {_shown(now)}"


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_shown(item)}" for key, item in value.items()) + "}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) or "''"


def launches(run_dir: Path) -> list[dict[str, Any]]:
    """Return the launches of a run that were recorded, oldest first; [] where that cannot be read."""
    try:
        return [dict(entry) for entry in read_provenance(run_dir)["launches"] if entry["at"]]
    except (ValueError, KeyError, TypeError):
        return []


def effective_options(provenance: Any) -> frozenset[str] | None:
    """Return the options that do something in a run, by the content of its ``provenance.json``; None where that does
    not say so, as in runs of earlier versions."""
    found = provenance.get(EFFECTIVE) if isinstance(provenance, dict) else None
    return frozenset(map(str, found)) if isinstance(found, list) and found else None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the options in ``config.yaml``, nested as they stand there; {} where it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_provenance(run_dir: Path) -> Any:
    """Return the content of ``provenance.json``; None where it cannot be read."""
    try:
        return json.loads((run_dir / PROVENANCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
