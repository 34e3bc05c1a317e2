"""Reads lines from a person at a terminal, or from a pipe."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO

from rich.console import Console
from rich.text import Text


class Lines(Protocol):
    """Is where the lines of a game come from."""

    def read(self) -> str | None:
        """Return the next line without its end, or None when there is no more."""
        ...


class TerminalLines:
    """Asks a person, with the editing and history of the terminal."""

    def __init__(self, prompt: str = "> ") -> None:
        # Importing it is what gives ``input`` its editing.
        import readline  # noqa: F401

        self._prompt = prompt

    def read(self) -> str | None:
        """Return the next line; one that ends with a backslash goes on in the next. None at Ctrl-D."""
        text = ""
        while True:
            try:
                line = input("… " if text else self._prompt)
            except EOFError:
                return text or None
            if not line.endswith("\\"):
                return text + line
            text += line[:-1] + "\n"


class PipedLines:
    """Reads a pipe or a file and repeats every line, so that the output is a transcript."""

    def __init__(self, console: Console, stream: TextIO | None = None) -> None:
        self._console = console
        self._stream = stream or sys.stdin

    def read(self) -> str | None:
        """Return the next line; one that ends with a backslash goes on in the next. None at the end."""
        text = ""
        while line := self._stream.readline():
            text += line.rstrip("\r\n")
            if not text.endswith("\\"):
                break
            text = text[:-1] + "\n"
        if not line and not text:
            return None
        self._console.print(Text(f"> {text}"), soft_wrap=True)
        return text
