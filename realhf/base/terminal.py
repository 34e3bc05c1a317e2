"""Standard output that survives the loss of its terminal: further text is dropped."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast


class Terminal:
    """State of the standard streams.

    ``lost`` is the reason why one of them was lost; "" if none was.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._note: Callable[[str], None] | None = None

    def on_loss(self, note: Callable[[str], None]) -> None:
        """Call ``note`` with the reason when a stream is lost, or immediately if one is lost
        already."""
        self._note = note
        if self.lost:
            note(self.lost)

    def lose(self, name: str, error: Exception) -> None:
        """Record that the stream ``name`` cannot be written to any more. Only the first loss
        counts."""
        if self.lost:
            return
        number = error.errno if isinstance(error, OSError) else errno.EBADF
        self.lost = f"{name} is lost: {os.strerror(number or errno.EIO)}"
        if self._note is not None:
            self._note(self.lost)


class _GuardedStream:
    """Wrapper of a stream that drops all text after the first failed write."""

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
        # Buffered text must go somewhere, or else the flush at exit fails and changes the exit
        # code.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        self._terminal.lose(self._name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guard_output() -> Iterator[Terminal]:
    """Redirect stdout and stderr in the block to streams that can fail without an error (closed
    pipe, full disk, lost terminal).

    A standard stream that is closed from the start is replaced by the null device. The original
    streams are restored at the end.
    """
    terminal = Terminal()
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or _null_stream(name, terminal)
        setattr(sys, name, cast(TextIO, _GuardedStream(stream, name, terminal)))
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _null_stream(name: str, terminal: Terminal) -> TextIO:
    """Return a stream on the null device in place of a closed one.

    It takes over the file descriptor of the closed stream if that is free; otherwise another file
    could get that number, and child processes would write to it.
    """
    number = 1 if name == "stdout" else 2
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(null, number)
    terminal.lose(name, OSError(errno.EBADF, ""))
    return open(null, "w", encoding="utf-8")
