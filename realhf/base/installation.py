"""Location and commit of the installed package and its configurations, and install instructions for
missing optional dependencies (extras).

No other module derives a folder from the location of its own file, so files can be moved between
packages.

On the package index, the name of our import package belongs to an unrelated distribution, so no
message may suggest installing that name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, TracebackType
from typing import Any

PACKAGE = Path(os.path.abspath(__file__)).parent.parent
"""The folder ``realhf`` itself, in a checkout or among the installed packages."""
IMPORT_ROOT = PACKAGE.parent
"""Folder on the import path that contains ``realhf``, ``workers``, ``experiments`` and
``configs``."""
CONFIGS = IMPORT_ROOT / "configs"
"""Folder of the YAML files from which run configurations are composed."""


DISTRIBUTION = "realhf-agents"
"""Name of this package's distribution, as in ``setup.py``."""


def install_command(extra: str) -> str:
    """Return the command that installs an optional extra, from this checkout or for the installed
    distribution."""
    if not (IMPORT_ROOT / "setup.py").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    folder = "." if os.path.realpath(os.curdir) == os.path.realpath(IMPORT_ROOT) else IMPORT_ROOT
    return f"pip install -e '{folder}[{extra}]'"


class MissingExtra(ModuleNotFoundError):
    """Raised if a package of an extra is not installed. The message names the extra and the install
    command."""


def explain_missing_packages() -> None:
    """Make this program exit with a one-line message if Python is too old or a package is missing.

    A package is typically missing because ``.venv`` was not activated and another Python runs the
    program.
    """
    if sys.version_info < (3, 11):  # noqa: UP036  Users may run a checkout with any Python.
        sys.exit(
            f"error: {sys.executable} is Python {sys.version.split()[0]}, realhf needs 3.11 or "
            f"newer; {_remedy()}"
        )
    sys.excepthook = _explain_missing_package


def _explain_missing_package(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exception hook (``sys.excepthook``) that prints how to install a missing package and handles
    all other exceptions as usual."""
    package = (getattr(error, "name", "") or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package in (
        "",
        "realhf",
        "workers",
        "experiments",
        "configs",
    ):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, MissingExtra):
        print(
            f"error: {error}{'' if _in_own_environment() else f'; or {_remedy()}'}", file=sys.stderr
        )
    else:
        frames = [frame for frame in extract_tb(trace) if not frame.filename.startswith("<frozen ")]
        where = f" (imported in {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        print(
            f"error: {sys.executable} has no package {package!r}{where}; {_remedy()}",
            file=sys.stderr,
        )


def _in_own_environment() -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(IMPORT_ROOT / ".venv")


def _remedy() -> str:
    """Return instructions for getting a Python that has the missing package."""
    if _in_own_environment() or not (IMPORT_ROOT / "setup.py").is_file():
        return f"install it: {install_command('train')}"
    activate = f"source {IMPORT_ROOT / '.venv' / 'bin' / 'activate'}"
    if (IMPORT_ROOT / ".venv" / "bin" / "activate").is_file():
        return f"activate the environment of this checkout: {activate}"
    return f"make install (in {IMPORT_ROOT}) makes an environment with all of them; then {activate}"


def require_modules(extra: str, *modules: str) -> None:
    """Raise MissingExtra with the install command of ``extra`` if one of the modules is not
    installed.

    The modules are not imported, so this function is cheap enough to be called when a package is
    imported.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"not installed here: {', '.join(missing)}; the extra {extra!r} contains it: "
            f"{install_command(extra)}",
            name=missing[0],
        )


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module that the adapter ``env.path=EXTRA`` needs and that the extra of the same name
    installs.

    Raises ValueError that names the extra if the module is missing or cannot be imported.
    """
    install = install_command(extra)
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == package:
            raise ValueError(
                f"env.path={extra} needs the package {package}: {install} ({error})"
            ) from None
        raise ValueError(f"env.path={extra}: {package} is incomplete: {error}; {install}") from None
    except Exception as error:
        raise ValueError(
            f"env.path={extra}: importing {module} raised {type(error).__name__}: {error}"
        ) from None


def git_state(folder: Path) -> dict[str, Any]:
    """Return {commit, modified} of a source tree: the current commit, and whether tracked files
    differ from it. Both are None outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "modified": bool(changes) if commit else None}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
