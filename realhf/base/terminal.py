"""Standard output that survives the loss of its terminal. Text that is written afterwards is
dropped."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast


class Terminal:
    """State of the standard streams.

    ``lost`` is the reason why one of the streams was lost; "" if none was lost.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._note: Callable[[str], None] | None = None

    def on_loss(self, note: Callable[[str], None]) -> None:
        """Call ``note`` with the reason when a stream is lost, or immediately if one is already
        lost."""
        self._note = note
        if self.lost:
            note(self.lost)

    def lose(self, name: str, error: Exception) -> None:
        """Record that the stream ``name`` cannot be written any more. Only the first loss is
        recorded."""
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
        # Redirect the stream to the null device. Otherwise flushing the buffered text at exit would
        # fail and change the exit code.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        self._terminal.lose(self._name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guard_output() -> Iterator[Terminal]:
    """Context manager that replaces stdout and stderr with streams whose failure (closed pipe, full
    disk, lost terminal) does not raise an error.

    A standard stream that was already closed is replaced by the null device. The original streams
    are restored at the end.
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
    """Return a stream to the null device that replaces a closed standard stream.

    It uses the closed stream's file descriptor if that number is free. Otherwise another file might
    get that number, and child processes would write to it.
    """
    number = 1 if name == "stdout" else 2
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.fstat(number)
    except OSError:
        os.dup2(null, number)
    terminal.lose(name, OSError(errno.EBADF, ""))
    return open(null, "w", encoding="utf-8")
