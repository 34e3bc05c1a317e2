"""Records what produced a run: commit, package versions, Python, command line."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from realhf.base.paths import PACKAGE

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
    "networkx",
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


def git_state(folder: Path) -> dict[str, Any]:
    """Return the commit of the source tree and whether files differ from it; commit None outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes) if commit else None}


def write_provenance(run_dir: Path, arguments: Sequence[str]) -> None:
    """Write ``provenance.json`` into the run folder."""
    content = {
        "git": git_state(PACKAGE),
        "packages": package_versions(),
        "python": platform.python_version(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "arguments": list(arguments),
        "executable": Path(sys.executable).name,
    }
    (run_dir / "provenance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
