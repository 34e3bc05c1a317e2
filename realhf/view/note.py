"""Keeps what a person writes about a run: a note and tags, in the run's folder.

    python -m realhf.view note RUN ["text"] [--tag TAG ...] [--untag TAG ...]

writes them; without a text or a tag it prints what is written. The page shows them and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from realhf.base.files.whole_file import write_whole
from realhf.base.text import printable
from realhf.view.folder_state import MARKS, is_run, read_json

NOTE_FILE = "note.json"
MOST_CHARACTERS = 20_000
MOST_TAGS = 32
MOST_OF_TAG = 64


@dataclass(frozen=True)
class Note:
    """Holds the text, "" for none, and the tags in the order in which they were given."""

    text: str = ""
    tags: tuple[str, ...] = ()

    def to_map(self) -> dict[str, Any]:
        """Return the note as JSON holds it."""
        return asdict(self)


def read_note(run_dir: Path) -> Note:
    """Return the note of a run, within bounds whatever its file holds; an empty one where there is none."""
    content = read_json(run_dir / NOTE_FILE)
    if not isinstance(content, dict):
        return Note()
    text, tags = content.get("text"), content.get("tags")
    known = [_told(tag, MOST_OF_TAG) for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Note(_told(text, MOST_CHARACTERS) if isinstance(text, str) else "", tuple(dict.fromkeys(known))[:MOST_TAGS])


def _told(text: str, most: int) -> str:
    """Return the beginning of a text; of halves of characters, which JSON can name and no page can be sent, a "?"."""
    return text[:most].encode(errors="replace").decode()


def note_command(arguments: Sequence[str]) -> int:
    """Do what ``arguments``, those behind the word ``note``, say. Returns the exit code: 0, or 2 with one line about
    what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m realhf.view note", description="Write or print what a person has to say about a run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("text", nargs="?", help='the note, in place of the one before; "" removes it')
    parser.add_argument("--tag", action="append", default=[], metavar="TAG", help="add a tag; may be given again")
    parser.add_argument("--untag", action="append", default=[], metavar="TAG", help="remove a tag")
    given = parser.parse_args(arguments)
    before = read_note(given.run)
    tags = [tag for tag in dict.fromkeys([*before.tags, *given.tag]) if tag not in given.untag]
    note = Note(before.text if given.text is None else given.text.strip(), tuple(tags))
    if problem := _problem(given.run, note):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if note != before:
        try:
            write_whole(given.run / NOTE_FILE, json.dumps(note.to_map(), indent=1) + "\n")
        except OSError as error:
            print(f"error: cannot write {given.run / NOTE_FILE}: {error.strerror}", file=sys.stderr)
            return 2
    said = " ".join(f"[{tag}]" for tag in note.tags)
    print(printable("\n".join(part for part in (said, note.text) if part) or f"no note of {given.run}", colours=False))
    return 0


def _problem(run: Path, note: Note) -> str:
    if not is_run(run):
        return f"{run} is not a run: it has none of {', '.join(MARKS)}"
    if len(note.text) > MOST_CHARACTERS:
        return f"the note has {len(note.text)} characters, and {MOST_CHARACTERS} are kept"
    if len(note.tags) > MOST_TAGS:
        return f"{len(note.tags)} tags, and {MOST_TAGS} are kept"
    for tag in note.tags:
        if not tag.strip() or len(tag) > MOST_OF_TAG or not tag.isprintable():
            return f"--tag {tag!r:.80}: a tag has at most {MOST_OF_TAG} characters, which can be printed"
    return ""
