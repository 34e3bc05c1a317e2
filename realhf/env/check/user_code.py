"""Finds the line of a person's own code in tracebacks, running frames, suspended coroutines and dumps of a dead
process."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from realhf.base.paths import PACKAGE
from realhf.base.plugin import split_reference

_DUMPED_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_ENVIRONMENTS = ("environments", "aws")
"""Folders of the package that hold environments: to a check, they are a person's code."""
_MOST_LINKS = 50


def folders_of(reference: str) -> list[Path]:
    """Return the folder of ``file.py:Name``; none for a registered name or a module."""
    file = split_reference(reference).file
    return [file.parent] if file else []


class UserCode:
    """Tells the environment's code from the code around it. ``folders``: where the environment lies."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        kinds = ("stdlib", "platstdlib", "purelib", "platlib")
        paths = sysconfig.get_paths()
        self._folders = {_real(paths[kind]): False for kind in kinds} | {_real(PACKAGE): False}
        self._folders |= {_real(PACKAGE / name): True for name in _ENVIRONMENTS}
        self._folders |= {_real(folder): True for folder in folders}
        self._here = _real(os.getcwd())
        self._owned: dict[str, bool] = {}

    def add(self, folder: str) -> None:
        """Count what lies in a folder to the environment's code, from now on."""
        self._folders[_real(folder)] = True
        self._owned.clear()

    def owns(self, file: str) -> bool:
        """Return whether ``file`` is the environment's; the deepest known folder above it decides. A file below none
        of them is the environment's, unless it is no file at all (``<frozen ...>``, ``<string>``)."""
        if file not in self._owned:
            self._owned[file] = self._owns(file)
        return self._owned[file]

    def _owns(self, file: str) -> bool:
        if file.startswith("<"):
            return False
        folder = path = _real(file)
        while (above := os.path.dirname(folder)) != folder:
            folder = above
            if folder in self._folders:
                return self._folders[folder]
        return os.path.isabs(path)

    def place(self, file: str, line: int, name: str) -> str:
        """Return ``file:line in name``, the path relative to the working directory where it lies below it."""
        path = _real(file)
        shown = os.path.relpath(path, self._here) if path.startswith(self._here + os.sep) else path
        return f"{shown}:{line} in {name}"

    def of_exception(self, error: BaseException) -> str:
        """Return the innermost line of the environment's code that led to ``error`` or to its cause; "" if none did."""
        for each in reversed([*_chain(error)]):
            if isinstance(each, SyntaxError) and each.filename and self.owns(each.filename):
                return self.place(each.filename, each.lineno or 0, "its text")
            frames = [
                (frame.f_code.co_filename, line, frame.f_code.co_name)
                for frame, line in traceback.walk_tb(each.__traceback__)
                if self.owns(frame.f_code.co_filename)
            ]
            if frames:
                return self.place(*frames[-1])
        return ""

    def of_frame(self, frame: FrameType | None, below: CodeType | None = None) -> str:
        """Return the innermost line of the environment's code among a running frame and its callers, up to the one
        that runs ``below``."""
        while frame is not None and frame.f_code is not below:
            if self.owns(frame.f_code.co_filename):
                return self.place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            frame = frame.f_back
        return ""

    def of_awaitable(self, awaited: Any) -> str:
        """Return where a suspended coroutine, or what it awaits, stands in the environment's code; else where another
        thread stands in it, because a method may have been handed to a thread."""
        if found := self.of_suspended(awaited):
            return found
        others = (frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident())
        return next(filter(None, map(self.of_frame, others)), "")

    def of_suspended(self, awaited: Any) -> str:
        """Return the innermost line of the environment's code in a suspended coroutine and in what it awaits."""
        found, task = "", None
        for _ in range(_MOST_LINKS):
            if awaited is None:
                # A coroutine does not say which task it awaits, but the task that runs it does.
                awaited, task = getattr(task, "_fut_waiter", None), None
            if awaited is None:
                break
            frame = next((f for n in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, n, None))), None)
            if frame is not None and self.owns(frame.f_code.co_filename):
                found = self.place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if get_coroutine := getattr(awaited, "get_coro", None):
                awaited, task = get_coroutine(), awaited
                continue
            names = ("cr_await", "gi_yieldfrom", "ag_await")
            awaited = next((a for n in names if (a := getattr(awaited, n, None)) is not None), None)
        return found

    def of_code(self, code: CodeType | None) -> str:
        """Return where a function of the environment begins; "" for a function that is not its own."""
        if code is None or not self.owns(code.co_filename):
            return ""
        return self.place(code.co_filename, code.co_firstlineno, code.co_name)

    def of_dump(self, text: str) -> str:
        """Return the innermost line of the environment's code in what ``faulthandler`` wrote; the thread that it calls
        current comes first."""
        threads = re.split(r"(?m)^(?=Thread |Current thread )", text)
        threads.sort(key=lambda thread: not thread.startswith("Current thread"))
        for thread in threads:
            for line in thread.splitlines():
                found = _DUMPED_FRAME.match(line)
                if found and self.owns(found["file"]):
                    return self.place(found["file"], int(found["line"]), found["name"])
        return ""


def _real(path: str | Path) -> str:
    return os.path.realpath(path)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup) and each.exceptions:
            each = each.exceptions[0]
        else:
            each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
