"""A scratch folder with tools, as the plain class that TRL's ``GRPOTrainer`` takes as
``environment_factory``.

The folder is a map from path to text in memory, and not a folder of the disk. So there is no path
out of it, no symbolic link, no device, nothing to clean up after a kill, and no blocking call;
thousands of them live in one process. What the policy sends is bounded before it is kept:
characters, files, depth. Search looks for plain text, never for a pattern.

This module imports nothing of ours: copy it to use it elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

MAX_FILES = 200
MAX_CHARACTERS = 8_000
"""Maximum number of characters of one argument, and thus of one file."""
MAX_TOTAL_CHARACTERS = 64_000
MAX_PATH_CHARS = 120
MAX_DEPTH = 8
"""Maximum number of parts of a path."""
MAX_SHOWN_LINES = 40
MAX_SHOWN_LINE_CHARS = 200


class FilesWorkspace:
    """Plays one episode at a time: a request, a folder, and the folder or the answer that is
    wanted.

    A folder exists while it holds files. Every tool answers with text; a call that cannot be done
    changes nothing and raises ValueError, whose message is for the policy. ``answer`` ends the
    episode: afterwards every call is refused, so only the first answer counts.
    """

    def __init__(self) -> None:
        self._start: dict[str, str] = {}
        self._wanted: dict[str, str] = {}
        self._files: dict[str, str] = {}
        self._right_answer: str | None = None
        self._answer: str | None = None

    def reset(
        self,
        request: str,
        files: Iterable[Mapping[str, str]],
        wanted: Iterable[Mapping[str, str]] | None = None,
        answer: str | None = None,
        **row: Any,
    ) -> str:
        """Begin an episode and return its request.

        Args:
            request: What the policy is asked to do.
            files: The folder at the start; each file has a ``path`` and a ``text``.
            wanted: The folder that earns 1, in the same form; None where nothing is to change.
            answer: The right answer; None or "" where none is asked for.
            row: Other columns do not matter.

        Raises ValueError for a row that is no task.
        """
        start = _build_tree(files)
        goal = start if wanted is None else _build_tree(wanted)
        if start == goal and not answer:
            raise ValueError(
                "the row asks for nothing: 'wanted' equals 'files', and there is no 'answer'"
            )
        self._start = start
        self._wanted = goal
        self._files = dict(start)
        self._right_answer = answer or None
        self._answer = None
        return request

    def list_files(self, folder: str = "") -> str:
        """List a folder.

        Args:
            folder: The folder; empty for the top.
        """
        self._check_open()
        inside = (
            ""
            if folder in ("", ".", "/", "./")
            else f"{_parse_path(_check_text(folder).removesuffix('/'))}/"
        )
        lines = [path.removeprefix(inside) for path in self._files if path.startswith(inside)]
        if inside and not lines:
            raise ValueError(f"there is no folder {inside[:-1]}")
        names = {name.partition("/")[0] + "/" * ("/" in name) for name in lines}
        return _format_lines(sorted(names)) or "(empty)"

    def read_file(self, path: str) -> str:
        """Read a file.

        Args:
            path: The file.
        """
        return self._files[self._find_file(path)] or "(empty)"

    def write_file(self, path: str, text: str) -> str:
        """Write a file.

        Args:
            path: The file.
            text: Its whole text.
        """
        self._check_open()
        target = self._check_free(_parse_path(path))
        self._check_total(target, len(_check_text(text)))
        if target not in self._files and len(self._files) >= MAX_FILES:
            raise ValueError(f"there are at most {MAX_FILES} files")
        self._files[target] = text
        return f"wrote {target}"

    def replace_text(self, path: str, old: str, new: str) -> str:
        """Replace a text everywhere in a file.

        Args:
            path: The file.
            old: The text to replace.
            new: The text to put in its place.
        """
        target = self._find_file(path)
        text = self._files[target]
        if not _check_text(old):
            raise ValueError("the text to replace is empty")
        count = text.count(old)
        if not count:
            raise ValueError(f"{target} does not hold that text")
        # The length is checked first: 8,000 occurrences of a character can become 64 MB.
        length = len(text) + count * (len(_check_text(new)) - len(old))
        if length > MAX_CHARACTERS:
            raise ValueError(f"a text has at most {MAX_CHARACTERS} characters")
        self._check_total(target, length)
        self._files[target] = text.replace(old, new)
        return f"replaced {count} in {target}"

    def search_files(self, text: str) -> str:
        """Find files that hold a text.

        Args:
            text: The text.
        """
        self._check_open()
        if not 0 < len(_check_text(text)) <= MAX_SHOWN_LINE_CHARS:
            raise ValueError(f"search for 1 to {MAX_SHOWN_LINE_CHARS} characters")
        lines = []
        for path in sorted(self._files):
            content = self._files[path]
            if (at := content.find(text)) >= 0:
                begin = content.rfind("\n", 0, at) + 1
                end = content.find("\n", at)
                lines.append(f"{path}: {content[begin : end if end >= 0 else None]}")
        return _format_lines(lines) or "nothing found"

    def move_file(self, source: str, target: str) -> str:
        """Move or rename a file.

        Args:
            source: The file.
            target: Its new path.
        """
        old = self._find_file(source)
        new = _parse_path(target)
        if new in self._files:
            raise ValueError(f"{new} exists")
        self._check_free(new, without=old)
        self._files[new] = self._files.pop(old)
        return f"moved to {new}"

    def delete_file(self, path: str) -> str:
        """Delete a file.

        Args:
            path: The file.
        """
        target = self._find_file(path)
        del self._files[target]
        return f"deleted {target}"

    def answer(self, text: str) -> str:
        """Answer the question.

        Args:
            text: The answer alone.
        """
        self._check_open()
        self._answer = _check_text(text).strip()
        return "answered"

    @property
    def done(self) -> bool:
        """Whether the episode is over: the task is solved, or an answer was given."""
        return self._answer is not None or self.get_reward() == 1

    @property
    def metrics(self) -> dict[str, float]:
        """Completed part of the task, from 0 to 1."""
        return {"progress": max(0.0, self.get_reward())}

    @property
    def state_key(self) -> str:
        """Digest of the current folder and answer."""
        return _digest(repr((sorted(self._files.items()), self._answer)))

    @property
    def view(self) -> dict[str, Any]:
        """Current folder and answer for people. Long texts and many files are replaced by a
        digest."""
        files = sorted(self._files.items())
        rows = [
            [path, text if len(text) <= MAX_SHOWN_LINE_CHARS else _digest(text)]
            for path, text in files
        ]
        if len(rows) > MAX_SHOWN_LINES:
            rows[MAX_SHOWN_LINES:] = [["...", _digest(repr(files))]]
        view = {"title": "The folder", "columns": ["path", "text"], "rows": rows}
        return (
            view
            if self._answer is None
            else view | {"note": f"answer: {self._answer[:MAX_SHOWN_LINE_CHARS]}"}
        )

    def get_reward(self) -> float:
        """Return the value of the current folder and answer, from -1 to 1.

        1: the folder is as wanted, and the right answer was given if one was asked for. Between 0
        and 1: the completed part of the changes, with surplus files counted as missing changes. 0:
        nothing is done. Below 0: minus the part of the files to be kept that is damaged.
        """
        unchanged = [path for path, text in self._start.items() if self._wanted.get(path) == text]
        damaged = sum(self._files.get(path) != self._start[path] for path in unchanged)
        if damaged:
            return -damaged / len(unchanged)
        parts = [*self._parts()]
        strays = len(self._files.keys() - self._wanted.keys() - self._start.keys())
        return sum(parts) / (len(parts) + strays) if parts else 0.0

    def _parts(self) -> Iterable[bool]:
        """Yield, for the answer and for each expected change, whether it is done. Removing a file
        whose text is expected at another path counts only if the text is there, so losing the text
        earns nothing."""
        if self._right_answer is not None:
            yield self._answer == self._right_answer
        new = {path: text for path, text in self._wanted.items() if self._start.get(path) != text}
        for path, text in new.items():
            yield self._files.get(path) == text
        for path, text in self._start.items():
            if path not in self._wanted:
                new_paths = [new_path for new_path, new_text in new.items() if new_text == text]
                is_text_kept = not new_paths or any(
                    self._files.get(new_path) == text for new_path in new_paths
                )
                yield path not in self._files and is_text_kept

    def _check_total(self, path: str, length: int) -> None:
        """Raise ValueError if the folder would hold too much with ``length`` characters in
        ``path``."""
        others = sum(len(text) for other, text in self._files.items() if other != path)
        if others + length > MAX_TOTAL_CHARACTERS:
            raise ValueError(f"all files hold at most {MAX_TOTAL_CHARACTERS} characters")

    def _check_open(self) -> None:
        if self._answer is not None:
            raise ValueError("you have answered, the task is over")

    def _find_file(self, path: str) -> str:
        self._check_open()
        canonical = _parse_path(path)
        if canonical not in self._files:
            raise ValueError(f"there is no file {canonical}")
        return canonical

    def _check_free(self, path: str, *, without: str = "") -> str:
        """Return ``path`` if a file may be created there once the file ``without`` is removed: it
        must not be a folder, and none of its parent parts may be a file."""
        parts = path.split("/")
        folders = ["/".join(parts[:n]) for n in range(1, len(parts))]
        if files := [part for part in folders if part in self._files and part != without]:
            raise ValueError(f"{files[0]} is a file")
        if any(
            other_path.startswith(f"{path}/") and other_path != without
            for other_path in self._files
        ):
            raise ValueError(f"{path} is a folder")
        return path


def _build_tree(files: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the files in a row as a dict. Raises ValueError for paths or texts that the tools
    could not have produced."""
    workspace = FilesWorkspace()
    for file in files:
        if file["path"] in workspace._files:
            raise ValueError(f"the row has two files {file['path']!r}")
        try:
            workspace.write_file(file["path"], file["text"])
        except ValueError as error:
            raise ValueError(f"the row's file {file['path']!r}: {error}") from None
    return workspace._files


def _parse_path(path: str) -> str:
    """Return a path in canonical form: parts joined by "/", relative to the folder."""
    text = _check_text(path).removeprefix("./")
    if len(text) > MAX_PATH_CHARS or not text.isprintable() or "\\" in text:
        raise ValueError(f"a path is at most {MAX_PATH_CHARS} printable characters without \\")
    parts = text.split("/")
    if any(part in ("", ".", "..") or part != part.strip() for part in parts):
        raise ValueError("a path is relative, such as folder/name.txt")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"a path has at most {MAX_DEPTH} parts")
    return text


def _check_text(value: object) -> str:
    """Return ``value`` if it is text of allowed length that can be encoded."""
    if not isinstance(value, str):
        raise ValueError("an argument must be text")
    if len(value) > MAX_CHARACTERS:
        raise ValueError(f"a text has at most {MAX_CHARACTERS} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("a text must not contain an unpaired surrogate") from None
    if "\0" in value:
        raise ValueError("a text must not contain NUL")
    return value


def _digest(text: str) -> str:
    return (
        f"{text[:40]}... ({len(text)} characters, sha256 "
        f"{hashlib.sha256(text.encode()).hexdigest()[:16]})"
    )


def _format_lines(lines: list[str]) -> str:
    short_lines = [
        line if len(line) <= MAX_SHOWN_LINE_CHARS else f"{line[:MAX_SHOWN_LINE_CHARS]}..."
        for line in lines
    ]
    omitted = len(lines) - MAX_SHOWN_LINES
    return "\n".join(short_lines[:MAX_SHOWN_LINES] + [f"({omitted} more)"] * (omitted > 0))
