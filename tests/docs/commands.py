"""The commands that the pages print, in blocks and within sentences."""

from __future__ import annotations

import ast
import bisect
import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = frozenset(
    {
        "aws-env",
        "curl",
        "docker",
        "git",
        "make",
        "nsys",
        "openenv",
        "pip",
        "printf",
        "python",
        "python3",
        "ray",
        "run-api",
        "train-api",
    }
    | {"sbatch", "sh", "srun", "vllm"}
)
"""What a line begins with that is a command, with or without a folder before it."""
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_CHOICE = re.compile(r"(\w+)(?:\|\w+)+")
_JOINTS = frozenset({"|", "&&", ";", "||", "&", "\n"})
_REDIRECTIONS = frozenset({">", "<", ">>", "2>"})
_KEYWORDS = frozenset({"do", "then", "else", "time"})


class Command(NamedTuple):
    """A simple command: where it stands, its ``words`` as a shell reads them, the whole ``line``
    that it is part of, and what the page shows below the line. ``whole``: it stands on a line of
    its own and not in a sentence."""

    page: str
    number: int
    words: tuple[str, ...]
    line: str
    shown: tuple[str, ...]
    whole: bool

    @property
    def program(self) -> str:
        """The name of what is run: of a Python module, the module."""
        name = self.words[0].rpartition("/")[2]
        if name.startswith("python") and len(self.words) > 1:
            return self.words[2] if self.words[1] == "-m" and len(self.words) > 2 else self.words[1]
        return name

    @property
    def arguments(self) -> list[str]:
        """What follows the program."""
        return [
            *self.words[1 + self.words.index(self.program) if self.program in self.words else 1 :]
        ]

    @property
    def where(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.number}"


def pages() -> list[Path]:
    """The Markdown files of the repository, and the examples, whose docstrings say how they are
    run."""
    listed = ["git", "ls-files", "*.md", "examples/*.py", "docs/extend/examples/*.py"]
    names = subprocess.run(
        listed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return [ROOT / name for name in names]


@functools.cache
def commands_of(page: Path) -> tuple[Command, ...]:
    """Every command of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(text)) or "" if page.suffix == ".py" else text
    return tuple(commands_in(text, page.relative_to(ROOT).as_posix()))


def commands_in(text: str, name: str) -> list[Command]:
    """Every command of a text; those of a line that a shell joins are commands of their own."""
    found = []
    prose = []
    for number, line, shown, block in _lines(text):
        if block:
            found += [Command(name, number, words, line, shown, True) for words in _simple(line)]
        prose.append((number, "" if block else line))
    starts = []
    joined = ""
    for number, line in prose:
        starts.append((len(joined), number))
        joined += line + "\n"
    for match in _SPAN.finditer(joined):
        at = bisect.bisect_right(starts, match.start(), key=lambda start: start[0])
        number = starts[at - 1][1]
        span = " ".join(match[1].split())
        found += [Command(name, number, words, span, (), False) for words in _simple(span)]
    return sorted(found, key=lambda each: each.number)


def _lines(text: str) -> Iterator[tuple[int, str, tuple[str, ...], bool]]:
    """The lines of a text, those that go on joined: number, the line, what follows within its
    block, and whether it is one of a block. Blocks of other languages than a shell are left out."""
    lines = text.split("\n")
    fence = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        number = at + 1
        at += 1
        if line.lstrip().startswith("```"):
            fence = "" if fence else line.strip().removeprefix("```") or "text"
            continue
        block = bool(fence) or line.startswith("    ")
        if not block:
            yield number, line, (), False
            continue
        line = line.strip()
        while line.endswith("\\") and at < len(lines):
            line = f"{line[:-1].rstrip()} {lines[at].strip()}"
            at = at + 1
        below = []
        for other in lines[at:]:
            if not other.startswith("    ") and not (fence and not other.startswith("```")):
                break
            below.append(other.strip())
        if fence in ("", "text", "sh", "bash", "console"):
            yield number, line.removeprefix("$ "), tuple(below), True


def _simple(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a line that begin with one of the programs, or with
    ``experiment=``."""
    lexer = shlex.shlex(_CHOICE.sub(r"\1", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    try:
        tokens = [*lexer]
    except ValueError:  # Prose with an apostrophe, or a text over several lines.
        return
    words: list[str] = []
    for token in [*tokens, "\n"]:
        if token not in _JOINTS:
            words.append(token)
            continue
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in _KEYWORDS):
            words.pop(0)
        end = next((at for at, word in enumerate(words) if word in _REDIRECTIONS), len(words))
        name = words[0].rpartition("/")[2] if words else ""
        if (
            (name in PROGRAMS and end > 1)
            or name in ("run-api", "aws-env")
            or name.startswith("experiment=")
        ):
            yield tuple(words[:end])
        words = []
