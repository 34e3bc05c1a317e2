"""Keeps a program alive whose terminal is gone: what it prints is dropped from then on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast


class Terminal:
    """Remembers whether a standard stream was lost. ``lost`` holds the reason, "" as long as there
    is none."""

    def __init__(self) -> None:
        self.lost = ""
        self._note: Callable[[str], None] | None = None

    def on_loss(self, note: Callable[[str], None]) -> None:
        """Call ``note`` with the reason when a stream is lost, at once where one is lost
        already."""
        self._note = note
        if self.lost:
            note(self.lost)

    def lose(self, name: str, error: Exception) -> None:
        """Record that the stream ``name`` takes nothing any more. The first loss counts."""
        if self.lost:
            return
        number = error.errno if isinstance(error, OSError) else errno.EBADF
        self.lost = f"{name} is lost: {os.strerror(number or errno.EIO)}"
        if self._note is not None:
            self._note(self.lost)


class _Guarded:
    """Passes text on to a stream until that fails; then it drops all text."""

    def __init__(self, stream: TextIO, name: str, terminal: Terminal) -> None:
        self._stream = stream
        self._name = name
        self._terminal = terminal
        self._open = True

    def write(self, text: str) -> int:
        if self._open:
            try:
                return self._stream.write(text)
            except UnicodeError:
                raise
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._open:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._open = False
        # What the stream still holds must go somewhere, else the flush at exit fails and changes
        # the exit code.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        self._terminal.lose(self._name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded_output() -> Iterator[Terminal]:
    """Print within the block to streams that may vanish (closed pipe, full disk, terminal gone)
    without an error.

    A standard stream that is closed from the start is one on the null device. The streams of before
    come back.
    """
    terminal = Terminal()
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or _null_stream(name, terminal)
        setattr(sys, name, cast(TextIO, _Guarded(stream, name, terminal)))
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _null_stream(name: str, terminal: Terminal) -> TextIO:
    """Return a stream on the null device in place of a closed one, under its number where that is
    still free: a file that gets the number would be written into by every child."""
    number = 1 if name == "stdout" else 2
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(null, number)
    terminal.lose(name, OSError(errno.EBADF, ""))
    return open(null, "w", encoding="utf-8")
