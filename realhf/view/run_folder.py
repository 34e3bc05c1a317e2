"""State of a run's folder (running, finished, stopped), and the notes that a person writes about
the run.

python -m realhf.view note RUN ["text"] [--tag TAG ...] [--untag TAG ...]

writes the note of a run; without a text and tags it prints the note. The page shows notes and
changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import realhf
from realhf.base.files import open_plain, write_atomic
from realhf.base.text import escape_controls

_LOCKS = Path("/proc/locks")
"""Table of the file locks of this machine."""
_FRESH_S = 90.0
"""A run counts as running for this many seconds after its last write even if no lock is visible,
for example because it runs on another host."""
_MAX_FILE_BYTES = 16 * 2**20
"""Maximum bytes of a file that is read."""
MARKS = ("config.yaml", "metrics.jsonl", "provenance.json")
"""Files by which a run folder is recognised."""
GONE = "gone"
"""State of a folder that cannot be read."""
FOREIGN = "foreign"
"""State of a path that is not a run."""
STARTING = "starting"
"""State of a run without a complete step."""
RUNNING = "running"
FINISHED = "finished"
STOPPED = "stopped"


@dataclass(frozen=True)
class FolderState:
    """Whether a folder is a run, and how far the run is."""

    kind: str
    """State: one of the constants above."""
    text: str
    """Sentence about the state, for the page."""


def is_run(folder: Path) -> bool:
    """Return whether a folder contains a file that only runs have."""
    return any(is_plain_file(folder / name) for name in MARKS)


def folder_state(folder: Path, steps: int, last_written: float | None) -> FolderState:
    """Return the state of a folder.

    steps: number of complete steps. last_written: time of the last write to its files, in seconds
    since the epoch; None if there are no files.
    """
    try:
        about = folder.stat()
    except OSError as error:
        return FolderState(
            GONE, f"{folder} cannot be read ({error.strerror}): it was moved or deleted."
        )
    if not stat.S_ISDIR(about.st_mode):
        return FolderState(FOREIGN, f"{folder} is not a folder.")
    if not is_run(folder):
        return FolderState(FOREIGN, f"{folder} is not a run: it has none of {', '.join(MARKS)}.")
    if is_locked(folder / ".lock"):
        if steps == 0:
            return FolderState(STARTING, "The run has started; no step is complete yet.")
        return FolderState(RUNNING, f"The run goes on: {_format_steps(steps)} complete.")
    summary = read_json(folder / "summary.json")
    if isinstance(summary, dict) and summary.get("steps") == steps:
        return finished_state(steps)
    age = None if last_written is None else time.time() - last_written
    if age is not None and abs(age) < _FRESH_S:
        return FolderState(
            RUNNING, f"{_format_steps(steps)} complete; last written {max(0.0, age):.0f} s ago."
        )
    when = (
        ""
        if age is None
        else " Its files bear a time that is yet to come."
        if age < 0
        else _format_age(age)
    )
    return FolderState(
        STOPPED, f"The run was stopped after {_format_steps(steps)}, before its end.{when}"
    )


def finished_state(steps: int) -> FolderState:
    """Return the state of a run that ended after ``steps`` steps."""
    return FolderState(FINISHED, f"The run has ended after {_format_steps(steps)}.")


def is_locked(path: Path) -> bool:
    """Return whether a process on this machine holds a lock on a file. The lock itself is not
    taken."""
    try:
        inode = path.stat().st_ino
        table = _LOCKS.read_text("ascii", "replace")
    except OSError:
        return False
    return any(
        line.split()[5:6] and line.split()[5].rpartition(":")[2] == str(inode)
        for line in table.splitlines()
    )


def is_plain_file(path: Path) -> bool:
    """Return whether a path is a regular file."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def read_text(path: Path) -> str:
    """Return the text of a regular file of bounded size; "" for anything else."""
    try:
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
                return ""
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or invalid."""
    try:
        return json.loads(read_text(path) or "null")
    except (ValueError, RecursionError):
        return None


def _format_steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _format_age(age: float) -> str:
    return f" Its files were last written {_format_duration(age)} ago."


def _format_duration(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"


NOTE_FILE = "note.json"
"""Name of the note's file in the run's folder."""
MAX_CHARACTERS = 20_000
"""Maximum number of characters of a note."""
MAX_TAGS = 32
"""Maximum number of tags of a run."""
MAX_TAG_CHARS = 64
"""Maximum number of characters of a tag."""


@dataclass(frozen=True)
class RunNote:
    """A person's note about a run."""

    text: str = ""
    """The text; "" for none."""
    tags: tuple[str, ...] = ()
    """The tags, in the order in which they were added."""


def read_note(run_dir: Path) -> RunNote:
    """Return the note of a run, truncated to the limits above; an empty note if there is none."""
    content = read_json(run_dir / NOTE_FILE)
    if not isinstance(content, dict):
        return RunNote()
    text = content.get("text")
    tags = content.get("tags")
    shortened = (
        [_shorten(tag, MAX_TAG_CHARS) for tag in tags if isinstance(tag, str)]
        if isinstance(tags, list)
        else []
    )
    return RunNote(
        _shorten(text, MAX_CHARACTERS) if isinstance(text, str) else "",
        tuple(dict.fromkeys(shortened))[:MAX_TAGS],
    )


def _shorten(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters of a string. Unpaired surrogates, which JSON can
    contain but HTTP cannot, are replaced by "?"."""
    return text[:max_chars].encode(errors="replace").decode()


def note_command(arguments: Sequence[str]) -> int:
    """Run the command ``note`` with its arguments. Return the exit code: 0, or 2 after printing one
    line about the mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view note",
        description="Write or print what a person has to say about a run.",
    )
    parser.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "text", nargs="?", help='the note, in place of the one before; "" removes it'
    )
    parser.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="add a tag; may be given again"
    )
    parser.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove a tag")
    options = parser.parse_args(arguments)
    before = read_note(options.run)
    tags = [tag for tag in dict.fromkeys([*before.tags, *options.tag]) if tag not in options.untag]
    note = RunNote(before.text if options.text is None else options.text.strip(), tuple(tags))
    if problem := _find_problem(options.run, note):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if note != before:
        try:
            write_atomic(options.run / NOTE_FILE, json.dumps(asdict(note), indent=1) + "\n")
        except OSError as error:
            print(
                f"error: cannot write {options.run / NOTE_FILE}: {error.strerror}", file=sys.stderr
            )
            return 2
    tags_text = " ".join(f"[{tag}]" for tag in note.tags)
    print(
        escape_controls(
            "\n".join(part for part in (tags_text, note.text) if part)
            or f"no note of {options.run}",
            colours=False,
        )
    )
    return 0


def _find_problem(run: Path, note: RunNote) -> str:
    """Return why a note cannot be written, or ""."""
    if not is_run(run):
        return f"{run} is not a run: it has none of {', '.join(MARKS)}"
    if len(note.text) > MAX_CHARACTERS:
        return f"the note has {len(note.text)} characters, and {MAX_CHARACTERS} are kept"
    if len(note.tags) > MAX_TAGS:
        return f"{len(note.tags)} tags, and {MAX_TAGS} are kept"
    for tag in note.tags:
        if not tag.strip() or len(tag) > MAX_TAG_CHARS or not tag.isprintable():
            return (
                f"--tag {tag!r:.80}: a tag has at most {MAX_TAG_CHARS} characters, which can be "
                f"printed"
            )
    return ""
