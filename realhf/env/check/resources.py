"""Counts what this process holds: threads, file descriptors, child processes, tasks of the event loop and temporary
files. What is left after many closed instances has been leaked by them."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.base.paths import PACKAGE
from realhf.env.check.user_code import UserCode

THREADS, FILES, PROCESSES, TASKS, SCRATCH = KINDS = (
    "threads",
    "file descriptors",
    "child processes",
    "tasks of the event loop",
    "temporary files",
)
_OWN_THREADS = "check-"
_DOORS = str(PACKAGE / "env" / "doors")
"""A door keeps a bounded number of threads for an environment's blocking code."""
_REMEMBERED = 20_000


@dataclass(frozen=True)
class Held:
    """What is held now: kind to (name of the thing to the place that it comes from, "" if unknown)."""

    things: Mapping[str, Mapping[Any, str]]

    def grown_since(self, before: Held) -> Iterator[tuple[str, int, str]]:
        """Yield (kind, how many more there are, the place that most of the new ones come from)."""
        for kind in KINDS:
            new = {thing: place for thing, place in self.things[kind].items() if thing not in before.things[kind]}
            more = len(self.things[kind]) - len(before.things[kind])
            if more > 0:
                places = Counter(place for place in new.values() if place)
                yield kind, more, places.most_common(1)[0][0] if places else ""


class ResourceBook:
    """Remembers which line of the environment opened what, by an audit hook, which cannot be removed: make it in a
    process of its own. ``look`` must be called on the event loop."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._opened: dict[str, str] = {}
        self._scratch: dict[str, str] = {}
        self._sockets = ""
        self._started = ""
        self._busy = threading.local()
        sys.addaudithook(self._hear)

    def look(self) -> Held:
        """Return what this process holds now."""
        return Held(
            {
                THREADS: dict(self._threads()),
                FILES: dict(self._files()),
                PROCESSES: {pid: self._started for pid in _children()},
                TASKS: dict(self._tasks()),
                SCRATCH: {path: place for path, place in self._scratch.items() if os.path.lexists(path)},
            }
        )

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _HEARD or getattr(self._busy, "yes", False):
            return
        self._busy.yes = True
        try:
            self._note(event, args)
        except Exception:  # whatever is wrong here must not fail the environment's call
            pass
        finally:
            self._busy.yes = False

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        place = self._code.of_frame(sys._getframe(2))
        if not place or len(self._opened) > _REMEMBERED or len(self._scratch) > _REMEMBERED:
            return
        if event.startswith("tempfile."):
            self._scratch[os.fspath(args[0])] = place
        elif event.startswith("socket."):
            self._sockets = place
        elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._started = place
        elif isinstance(args[0], str | bytes | os.PathLike):
            self._opened[os.path.realpath(os.fsdecode(args[0]))] = place

    def _threads(self) -> Iterator[tuple[int, str]]:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread is threading.main_thread() or thread.name.startswith(_OWN_THREADS):
                continue
            code = getattr(getattr(thread, "_target", None) or type(thread).run, "__code__", None)
            if code is not None and code.co_filename.startswith(_DOORS):
                continue
            place = self._code.of_code(code)
            yield thread.ident or id(thread), place or self._code.of_frame(frames.get(thread.ident or 0))

    def _files(self) -> Iterator[tuple[str, str]]:
        for number in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if not target.startswith("/proc/"):
                # A number is given again to another file, so the target is part of the name.
                path = target.removesuffix(" (deleted)")
                known = (
                    self._sockets if path.startswith("socket:") else self._opened.get(path) or self._scratch.get(path)
                )
                yield f"{number} {target}", known or ""

    def _tasks(self) -> Iterator[tuple[int, str]]:
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                yield id(task), self._code.of_code(getattr(task.get_coro(), "cr_code", None))


_HEARD = frozenset(
    {
        "open",
        "sqlite3.connect",
        "tempfile.mkstemp",
        "tempfile.mkdtemp",
        "socket.__new__",
        "subprocess.Popen",
        "os.fork",
        "os.posix_spawn",
    }
)


def _children() -> Iterator[int]:
    for listed in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, listed.read_text().split())
        except OSError:
            continue
