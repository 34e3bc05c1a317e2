"""Check that plays many instances concurrently, to detect resources that they leak and state that
they share."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from realhf.base.installation import PACKAGE
from realhf.env.check.calls import CallFailed, UserCode
from realhf.env.check.episodes import Case, CheckHarness, first_difference
from realhf.env.check.report import Finding

THREADS = "threads"
"""Kind of resource that has its own limit."""
_CHECK_THREADS = "check-"
"""Prefix of the names of the check's own threads, which are ignored."""
_LOADERS = str(PACKAGE / "env" / "loader")
"""Folder of the loaders of env formats; their thread pools for blocking code have a maximum size
and are ignored."""
_MAX_PATHS = 20_000
"""Maximum number of paths for which the opening line is remembered."""
Resources = Mapping[str, Mapping[Any, str]]
"""Resources by kind; each kind maps a resource's name to the location of the code that opened it
("" if unknown)."""


def find_growth(before: Resources, after: Resources) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, increase in number, most frequent location of the new resources) for each kind
    that grew."""
    for kind, resources in after.items():
        increase = len(resources) - len(before[kind])
        if increase > 0:
            places = Counter(
                place
                for resource, place in resources.items()
                if place and resource not in before[kind]
            )
            yield kind, increase, places.most_common(1)[0][0] if places else ""


class ResourceBook:
    """Record of the lines of the environment's code that open resources, kept by an audit hook.

    An audit hook cannot be removed, so the record must be created in a process of its own.
    ``snapshot`` must be called on the event loop.
    """

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._opened: dict[str, str] = {}
        self._scratch: dict[str, str] = {}
        self._sockets = ""
        self._started = ""
        self._busy = threading.local()
        sys.addaudithook(self._on_audit_event)

    def snapshot(self) -> Resources:
        """Return the resources that this process holds now."""
        return {
            THREADS: dict(self._threads()),
            "file descriptors": dict(self._files()),
            "child processes": {child.pid: self._started for child in psutil.Process().children()},
            "tasks of the event loop": dict(self._tasks()),
            "temporary files": {
                path: place for path, place in self._scratch.items() if os.path.lexists(path)
            },
        }

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _AUDIT_EVENTS or getattr(self._busy, "yes", False):
            return
        self._busy.yes = True
        try:
            self._record_location(event, args)
        except Exception:  # errors here must not fail the environment's call
            pass
        finally:
            self._busy.yes = False

    def _record_location(self, event: str, args: tuple[Any, ...]) -> None:
        place = self._code.find_in_frame(sys._getframe(2))
        if not place or len(self._opened) > _MAX_PATHS or len(self._scratch) > _MAX_PATHS:
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
            if thread is threading.main_thread() or thread.name.startswith(_CHECK_THREADS):
                continue
            code = getattr(getattr(thread, "_target", None) or type(thread).run, "__code__", None)
            if code is not None and code.co_filename.startswith(_LOADERS):
                continue
            place = self._code.find_definition(code)
            yield (
                thread.ident or id(thread),
                place or self._code.find_in_frame(frames.get(thread.ident or 0)),
            )

    def _files(self) -> Iterator[tuple[str, str]]:
        for number in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if not target.startswith("/proc/"):
                # Descriptor numbers are reused for other files, so the target is part of the name.
                path = target.removesuffix(" (deleted)")
                location = (
                    self._sockets
                    if path.startswith("socket:")
                    else self._opened.get(path) or self._scratch.get(path)
                )
                yield f"{number} {target}", location or ""

    def _tasks(self) -> Iterator[tuple[int, str]]:
        current = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not current:
                yield (
                    id(task),
                    self._code.find_definition(getattr(task.get_coro(), "cr_code", None)),
                )


_AUDIT_EVENTS = frozenset((
    "open", "sqlite3.connect", "tempfile.mkstemp", "tempfile.mkdtemp", "socket.__new__", "subprocess.Popen", "os.fork",
    "os.posix_spawn",
))  # fmt: skip
"""Audit events that open resources."""


_ROUNDS = 3
"""Number of rounds. The first one fills pools and caches; only growth in the last one is a leak."""
_MIN_EPISODES = 20
"""Minimum number of episodes in a round."""
_EPISODES_PER_LEAK = 10
_EPISODES_PER_THREAD_LEAK = 4
"""A leak is reported from one remaining resource per this number of episodes. The number is lower
for threads, because thread pools fill up slowly."""
_ROUND_S = 8.0
"""Seconds; if the first round takes longer, the further rounds have fewer episodes."""
_RELEASE_S = 0.5
"""Seconds that closed instances may take to release their resources."""


async def check_concurrency(
    harness: CheckHarness,
    cases: Sequence[Case],
    transcripts: Mapping[str, Sequence[Any]],
    count: int,
) -> float:
    """Play ``count`` instances concurrently in several rounds; report leaks and differing
    transcripts.

    ``transcripts`` holds the transcripts of the cases when played one by one; cases without one are
    not compared. Return the number of turns per second. Raises CallFailed if a call hung.
    """
    book = ResourceBook(harness.code)
    turns_before = harness.turns
    seconds = 0.0
    episodes = 0
    snapshots: list[Resources] = []
    for number in range(_ROUNDS):
        began = time.monotonic()
        waves = max(1, math.ceil(_MIN_EPISODES / count)) if not harness.is_cut_short else 1
        for _ in range(waves):
            await _play_concurrently(harness, cases, transcripts, count)
        seconds += time.monotonic() - began
        snapshots.append(await _wait_until_released(book, snapshots[-1] if snapshots else None))
        episodes = waves * count
        if number == 0 and seconds > _ROUND_S:
            # All further rounds must have the same number of instances to be comparable.
            harness.is_cut_short = True
            count = max(2, int(count * _ROUND_S / seconds))
    for kind, increase, place in find_growth(snapshots[-2], snapshots[-1]):
        if increase >= max(
            2, episodes // (_EPISODES_PER_THREAD_LEAK if kind == THREADS else _EPISODES_PER_LEAK)
        ):
            what = f"{episodes} closed instances left {increase} {kind} behind"
            harness.add(
                Finding("leaks", what, "Release in close whatever reset and step took", place)
            )
    return (harness.turns - turns_before) / max(seconds, 1e-9)


async def _play_concurrently(
    harness: CheckHarness, cases: Sequence[Case], alone: Mapping[str, Sequence[Any]], count: int
) -> None:
    # Each case is played on an instance that has left another episode, while the others play
    # between its turns.
    played = [cases[index % len(cases)] for index in range(count)]
    crowd = [asyncio.create_task(harness.play(case, unfinished=case)) for case in played]
    transcripts = await asyncio.gather(*crowd, return_exceptions=True)
    for case, outcome in zip(played, transcripts, strict=True):
        if isinstance(outcome, CallFailed):
            if outcome.hung:
                raise outcome
        elif isinstance(outcome, BaseException):
            raise outcome
        elif case.key in alone and (
            differs := first_difference(alone[case.key], outcome.transcript)
        ):
            what = f"among {count} instances a task is answered differently than alone: {differs}"
            mend = (
                "Keep what an episode changes in the instance (self), not in the class, the module "
                "or a shared object"
            )
            place = harness.place(None, "reset")
            harness.add(Finding("instances", what, mend, place, case.task.id, kind="otherwise"))


async def _wait_until_released(book: ResourceBook, before: Resources | None) -> Resources:
    """Return the held resources once there are no more of any kind than in ``before``, or after
    ``_RELEASE_S`` seconds."""
    deadline = time.monotonic() + _RELEASE_S
    while True:
        await asyncio.sleep(0.02)
        gc.collect()
        resources = book.snapshot()
        if before is None or time.monotonic() > deadline or not any(find_growth(before, resources)):
            return resources
