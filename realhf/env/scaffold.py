"""The command ``python -m realhf.env init``: writes a working start for a user's own environment,
with a test."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ENV_FORMATS = {
    "class": "a class with tools; TRL's environment_factory takes it too",
    "message": "a class that reads and answers messages",
    "dataset": "questions of one turn, and a function that judges the answers",
    "agent": "a small world, and an agent that knows only a base URL",
}
"""Formats of environments and their descriptions."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MAX_NAME_CHARS = 60
"""Maximum length of a name."""


class WrittenFiles(NamedTuple):
    """Result of ``write_files``."""

    files: tuple[Path, Path]
    """The written files: (environment, its test)."""
    commands: tuple[str, ...]
    """Shell commands to continue with: check, play and train."""


def write_files(name: str, env_format: str, folder: Path) -> WrittenFiles:
    """Write ``NAME.py`` and ``test_NAME.py``; if one cannot be written, neither is. ``env_format``
    is a key of ``ENV_FORMATS``.

    Raises ValueError for a name that is not a valid module name or is taken by another module, and
    for files that exist or cannot be written.
    """
    check_name(name)
    title = "".join(part.capitalize() for part in name.split("_"))
    words = {
        "module": name,
        "name": title,
        "about": f"{title}: a start for an environment of your own. Change it.",
    }
    files = (folder / f"{name}.py", folder / f"test_{name}.py")
    texts = [
        _template(template).substitute(words) for template in (env_format, f"test_{env_format}")
    ]
    if existing := [file for file in files if file.exists() or file.is_symlink()]:
        raise ValueError(f"{existing[0]} exists already; nothing was written")
    written: list[Path] = []
    try:
        for file, text in zip(files, texts, strict=True):
            with file.open("x", encoding="utf-8") as opened:
                written.append(file)
                opened.write(text)
    except OSError as error:
        for file in written:
            file.unlink(missing_ok=True)
        raise ValueError(f"{folder} cannot be written to: {error.strerror or error}") from None
    return WrittenFiles(files, _next_commands(files[0], title, env_format))


def check_name(name: str) -> None:
    """Raise ValueError for a name that is not a valid module name or is taken by another module."""
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS or keyword.iskeyword(name):
        raise ValueError(
            f"{name[:_MAX_NAME_CHARS]!r} is not a name: write a small letter, then letters, digits "
            f"and "
            f"underscores"
        )
    if importlib.util.find_spec(name) is not None and not Path(f"{name}.py").exists():
        raise ValueError(
            f"{name!r} is the name of another module, which it would hide: choose another name"
        )


def _next_commands(file: Path, title: str, env_format: str) -> tuple[str, ...]:
    reference = f"{file}:{'reward' if env_format == 'dataset' else title}"
    train = f"python -m realhf.launch experiment=grpo env.path={reference}"
    if env_format == "agent":
        train = (
            f"python -m realhf.launch experiment=grpo_async env.path={reference} "
            f"rollout.agent={file}:solve"
        )
    return (
        f"python -m realhf.env check {reference}",
        f"python -m realhf.env play {reference}",
        train,
    )


def _template(name: str) -> Template:
    return Template(
        (resources.files("realhf.env") / "templates" / f"{name}.txt").read_text(encoding="utf-8")
    )


ABOUT = "\n".join(
    [
        "Write NAME.py, a working environment of less than 60 lines to change, and test_NAME.py, "
        "which checks it.",
        "Files that are there already are left alone.",
        "",
        *(f"--door {name:<8} {about}" for name, about in ENV_FORMATS.items()),
    ]
)
"""Shown by ``--help``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = ABOUT
    parser.add_argument(
        "name", metavar="NAME", help="small letters, digits and underscores: guess, my_game"
    )
    parser.add_argument(
        "--door", choices=[*ENV_FORMATS], default="class", help="how it is written (class)"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="where the files go (the working directory)"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Write the files and print the next commands. Return 0; raises ValueError if they cannot be
    written."""
    start = write_files(arguments.name, arguments.door, arguments.folder)
    lines = [
        f"wrote {start.files[0]} and {start.files[1]}; next:",
        *(f"    {command}" for command in start.commands),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return 0
