"""Provenance of a run: options, commit, versions of Python and packages, and command line of each
launch."""

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
from realhf.base.files import set_aside, write_atomic
from realhf.base.installation import PACKAGE, git_state

CONFIG_FILE = "config.yaml"
PROVENANCE_FILE = "provenance.json"
MAX_SHOWN = 8
"""Maximum number of changed options to name in a message, because another environment or model
changes dozens of options."""
EFFECTIVE = "effective_options"
"""Key in ``provenance.json`` of the options that have an effect in the run's experiment."""

LAUNCH = ("python", "-m", "realhf.launch")
"""Words of the launch command that precede a run's arguments, not quoted for a shell."""
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
    """Return the versions of packages by name, without importing them; None for a package that is
    not installed."""
    return {name: _installed_version(name) for name in names}


@cache
def _installed_version(package: str) -> str | None:
    """Return the version of a package, or None. The result is cached, because a look-up takes
    milliseconds."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_origin(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the provenance of a launch with these arguments, except its options."""
    return {
        "git": git_state(PACKAGE),
        "packages": package_versions(),
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "arguments": list(arguments),
        "executable": Path(sys.executable).name,
    }


def record_launch(
    run_dir: Path,
    launch: Launch,
    completed_steps: int,
    warn: Callable[[str], None] = lambda text: None,
) -> bool:
    """Record a launch that continues after ``completed_steps`` in ``config.yaml`` and
    ``provenance.json``.

    The key ``launches`` of ``provenance.json`` contains the history: the time of each launch, its
    completed steps, command line, commit and changed options. A launch is recorded only once, even
    if the run restarts by itself. Returns whether the launch was recorded by this call. warn:
    called with a message if a damaged history is replaced. Raises OSError.
    """
    if not launch.at:
        return False
    entry = {
        "at": launch.at,
        "completed_steps": completed_steps,
        "arguments": launch.origin["arguments"],
        "commit": launch.origin["git"]["commit"],
        "changed": launch.changed,
    }
    earlier = read_launches(run_dir)
    if launch.at in [known["at"] for known in earlier]:
        return False
    if not earlier:
        _warn_of_lost_history(run_dir / PROVENANCE_FILE, completed_steps, warn)
    write_atomic(run_dir / CONFIG_FILE, launch.config)
    content = {**launch.origin, "launches": [*earlier, entry]}
    write_atomic(run_dir / PROVENANCE_FILE, json.dumps(content, indent=1) + "\n")
    return True


def _warn_of_lost_history(path: Path, completed_steps: int, warn: Callable[[str], None]) -> None:
    """Warn that the history of earlier launches is lost: if the file contains no launch, which is
    then renamed, or if it is missing although the run has completed steps.

    Raises OSError if the file cannot be accessed.
    """
    new_path = set_aside(path)
    if new_path is not None:
        warn(
            f"{path} cannot be parsed and was renamed to {new_path.name}: the new file lacks the "
            "earlier launches"
        )
    elif completed_steps:
        warn(f"{path} is missing: the new file lacks the earlier launches")


def describe_changes(changed: Mapping[str, Sequence[Any]]) -> str:
    """Describe changed options, {name: (before, now)}, in one line."""
    texts = [describe_change(name, *values) for name, values in changed.items()]
    more = len(texts) - MAX_SHOWN
    return ", ".join(texts[:MAX_SHOWN]) + (f", and {more} more" if more > 0 else "")


def describe_change(name: str, before: Any, now: Any) -> str:
    """Describe a changed option, with both values in the form of the command line."""
    return f"{name}={_format_value(before)} -> {_format_value(now)}"


def _format_value(value: Any) -> str:
    """Return a value in the form of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_format_value(item)}" for key, item in value.items()) + "}"
    return (
        "null"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else str(value) or "''"
    )


def read_launches(run_dir: Path) -> list[dict[str, Any]]:
    """Return the recorded launches of a run, oldest first; [] if the file cannot be read."""
    try:
        return [dict(entry) for entry in read_provenance(run_dir)["launches"] if entry["at"]]
    except (ValueError, KeyError, TypeError):
        return []


def effective_options(provenance: Any) -> frozenset[str] | None:
    """Return the options that have an effect in a run, given the content of its
    ``provenance.json``.

    The result is None if they were not recorded, as in runs of earlier versions.
    """
    options = provenance.get(EFFECTIVE) if isinstance(provenance, dict) else None
    return frozenset(map(str, options)) if isinstance(options, list) and options else None


def read_config(run_dir: Path) -> dict[str, Any]:
    """Return the nested options in ``config.yaml``; {} if it cannot be read."""
    import yaml

    try:
        content = yaml.safe_load((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_provenance(run_dir: Path) -> Any:
    """Return the content of ``provenance.json``; None if it cannot be read."""
    try:
        return json.loads((run_dir / PROVENANCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
