"""The part of a Dockerfile that a container without Docker can follow: FROM a plain Debian, Ubuntu
or Python image, COPY, ENV, WORKDIR and RUN."""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

_BASES = ("debian", "ubuntu", "python")
"""Official images for which the host's userland stands in."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIBRARY = ("", "library/", "docker.io/", "docker.io/library/")
"""Prefixes of the name of an official image."""
_IMAGE = re.compile(r"(?P<name>[a-z0-9./_-]+)(?::(?P<tag>[A-Za-z0-9._-]+))?(?:@sha256:[0-9a-f]+)?")
_VARIABLE = re.compile(r"\\(?P<escaped>.)|\$(?:\{(?P<braced>[^}]*)\}|(?P<plain>[A-Za-z_]\w*))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(.*)")


@dataclass(frozen=True)
class Copy:
    """Files to copy from the folder of the Dockerfile."""

    source: Path
    """File or folder on the host; the content of a folder is copied, not the folder."""
    target: str
    """Absolute path in the container."""


@dataclass(frozen=True)
class Run:
    """A command to run while the container is built."""

    words: tuple[str, ...] | str
    """Command of the shell, or a program with its arguments."""
    folder: str
    """Absolute path of its working folder."""
    variables: Mapping[str, str]
    """Variables that are set before it."""


@dataclass(frozen=True)
class MakeFolder:
    """A folder to make."""

    path: str
    """Absolute path."""


Step = Copy | Run | MakeFolder
"""A step of building the container."""


@dataclass
class Build:
    """What a Dockerfile says."""

    base: str = ""
    """Image of its FROM."""
    steps: list[Step] = field(default_factory=list)
    """Steps in order."""
    folder: str = "/"
    """Working folder of the commands, set by WORKDIR."""
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    """Environment variables: PATH, and those set by ENV."""

    @property
    def runs(self) -> bool:
        """Whether commands run while the container is built."""
        return any(isinstance(step, Run) for step in self.steps)


def read_dockerfile(file: Path) -> Build:
    """Read a Dockerfile. Raises ValueError that names the line for what cannot be followed, and
    OSError."""
    build = Build()
    if (file.parent / ".dockerignore").exists():
        raise ValueError(f"{file.parent / '.dockerignore'}: a .dockerignore is not followed")
    for number, line in _logical_lines(read_text(file, file.parent)):
        word, _, rest = line.partition(" ")
        instruction = word.upper()
        try:
            if not build.base and instruction != "FROM":
                raise ValueError(f"{instruction} before FROM is not followed")
            _follow(build, instruction, rest.strip(), file.parent)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
    if not build.base:
        raise ValueError(f"{file}: has no FROM")
    return build


def read_text(file: Path, folder: Path) -> str:
    """Return the text of a file in ``folder``. Raises ValueError for a link that leaves the folder,
    which may name any file of the host, and for what is no file, and OSError."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{file}: leaves the folder {folder}: put the file there")
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{file}: is no file: write one")
        return stream.read()


def stands_in(image: str) -> bool:
    """Return whether the host's userland stands in for an image: an official image of Debian,
    Ubuntu or Python, of any version."""
    match = _IMAGE.fullmatch(image)
    return match is not None and any(
        match["name"] == f"{prefix}{base}" for prefix in _LIBRARY for base in _BASES
    )


def _follow(build: Build, instruction: str, rest: str, folder: Path) -> None:
    """Add an instruction to the build. Raises ValueError."""
    if instruction == "FROM":
        _follow_from(build, rest)
    elif instruction == "WORKDIR":
        path = _expand(_single_word(rest, "WORKDIR"), build.variables)
        build.folder = str(_normalize(PurePosixPath(build.folder) / path))
        build.steps.append(MakeFolder(build.folder))
    elif instruction == "ENV":
        build.variables |= _read_variables(rest, build.variables)
    elif instruction == "COPY":
        build.steps += _read_copy(build, rest, folder)
    elif instruction == "RUN":
        if rest.startswith("--"):
            raise ValueError(f"the option {rest.split()[0]} of RUN is not followed")
        if "<<" in rest and re.search(r"<<-?[\"']?\w", rest):
            raise ValueError("a here-document in RUN is not followed")
        words = _json_words(rest)
        command = tuple(words) if words is not None else rest
        build.steps.append(Run(command, build.folder, dict(build.variables)))
    else:
        raise ValueError(f"{instruction} is not followed")


def _follow_from(build: Build, rest: str) -> None:
    if build.base:
        raise ValueError("a second FROM, a build of several stages, is not followed")
    words = rest.split()
    if words and words[0].startswith("--"):
        raise ValueError(f"the option {words[0]} of FROM is not followed")
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise ValueError(f"FROM {rest!r} is not an image")
    build.base = words[0]


def _read_copy(build: Build, rest: str, folder: Path) -> Iterator[Step]:
    words = _json_words(rest) or shlex.split(rest)
    if words and words[0].startswith("--"):
        raise ValueError(f"the option {words[0].partition('=')[0]} of COPY is not followed")
    if len(words) < 2:
        raise ValueError("COPY needs a source and a target")
    *sources, target = (_expand(word, build.variables) for word in words)
    paths: list[Path] = []
    for source in sources:
        paths += _find_sources(source, folder)
    if len(paths) > 1 and not target.endswith("/"):
        raise ValueError(f"COPY of several files needs a target that ends with /, not {target!r}")
    place = _normalize(PurePosixPath(build.folder) / target)
    for path in paths:
        into = not path.is_dir() and (target.endswith("/") or target in (".", ".."))
        yield Copy(path.resolve(), str(place / path.name if into else place))


def _find_sources(source: str, folder: Path) -> list[Path]:
    """Return the files and folders that a source of COPY names. Raises ValueError if there are
    none, or if they are outside of ``folder``."""
    pattern = source.lstrip("/")
    is_pattern = any(character in pattern for character in "*?[")
    found = (
        [folder / name for name in sorted(glob.glob(pattern, root_dir=folder, include_hidden=True))]
        if is_pattern
        else [folder / pattern]
    )
    inside = folder.resolve()
    for path in found:
        if not path.resolve().is_relative_to(inside):
            raise ValueError(f"COPY {source}: leaves the folder of the Dockerfile")
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"COPY {source}: there is no such file")
    if not found:
        raise ValueError(f"COPY {source}: there is no such file")
    return found


def _read_variables(rest: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an ENV sets: ``NAME=VALUE ...`` or ``NAME VALUE``."""
    first = rest.split(maxsplit=1)
    if not first:
        raise ValueError("ENV needs a name and a value")
    pairs = (
        [word.partition("=")[::2] for word in shlex.split(rest.replace("\\$", "\\\\$"))]
        if "=" in first[0]
        else [(first[0], first[1] if len(first) > 1 else "")]
    )
    for name, _ in pairs:
        if not _NAME.fullmatch(name):
            raise ValueError(f"ENV {name!r} is not the name of a variable")
    return {name: _expand(value, variables) for name, value in pairs}


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace ``$NAME`` and ``${NAME}`` by the values of variables; an unknown one is empty."""

    def value(match: re.Match[str]) -> str:
        """Return the text that replaces a reference."""
        if match["escaped"] is not None:
            return match["escaped"]
        name = match["plain"] or match["braced"]
        if not _NAME.fullmatch(name):
            raise ValueError(f"${{{name}}} is not followed")
        return variables.get(name, "")

    return _VARIABLE.sub(value, text)


def _single_word(rest: str, instruction: str) -> str:
    words = shlex.split(rest)
    if len(words) != 1:
        raise ValueError(f"{instruction} needs one path")
    return words[0]


def _json_words(rest: str) -> list[str] | None:
    """Return the words of the JSON form of an instruction; None if it does not have this form."""
    if not rest.startswith("["):
        return None
    try:
        words: Any = json.loads(rest)
    except ValueError:
        return None
    is_text: Sequence[bool] = [isinstance(word, str) for word in words]
    return words if words and all(is_text) else None


def _normalize(path: PurePosixPath) -> PurePosixPath:
    """Return an absolute path without ``.`` and ``..``."""
    parts: list[str] = []
    for part in path.parts[1:]:
        if part == "..":
            del parts[-1:]
        elif part != ".":
            parts.append(part)
    return PurePosixPath("/", *parts)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the instructions with the numbers of their first lines: comments and blank lines are
    left out, and lines that end with a backslash are joined. Raises ValueError for a parser
    directive other than ``syntax``."""
    parts: list[str] = []
    first = 0
    begins = True
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if begins and (match := _DIRECTIVE.fullmatch(stripped)):
            if match[1].lower() in ("escape", "check"):
                raise ValueError(f"line {number}: the directive {match[1]} is not followed")
            continue
        begins = False
        if not stripped or stripped.startswith("#"):
            continue
        first = first or number
        if stripped.endswith("\\"):
            parts.append(stripped[:-1].rstrip())
            continue
        yield first, " ".join([*parts, stripped])
        parts = []
        first = 0
    if parts:
        yield first, " ".join(parts)
