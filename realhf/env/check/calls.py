"""Calls of an environment's methods with deadlines, and detection of the line of the author's code
that fails, hangs or blocks the event loop.

Every callback of the loop is timed: its processor time by the thread's clock, and its sleeping time
by a thread that samples the stack. The time counted per sample is bounded, so that a process that
the kernel did not schedule for a while is not reported, and garbage collection is subtracted. The
reported line is the one with the most samples. Code that holds the interpreter lock leaves no
samples; it is located by the line at which its coroutine is suspended afterwards, or by the name of
its task, which ``Caller`` sets to the location of the method.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from realhf.api.environment import Environment, EnvironmentFailure
from realhf.base.installation import PACKAGE
from realhf.base.plugin import split_reference
from realhf.env.check.report import fault_key, quote
from realhf.env.loader.reference import split_scheme
from realhf.env.loader.validation import BrokenContract

_DUMPED_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_ENVIRONMENTS = ("environments", "aws")
"""Folders of the package that hold environments, whose code a check treats as user code."""
_MAX_LINKS = 50
"""Maximum number of awaitables followed along a chain of awaits."""


def environment_folders(reference: str) -> list[Path]:
    """Return the folder of the file in ``file.py:Name``; no folder for a registered name, a module,
    or an environment that is named with its option."""
    file = None if split_scheme(reference) else split_reference(reference).file
    return [file.parent] if file else []


class UserCode:
    """Classification of files as the environment's code or other code, and lookup of locations in
    the environment's code from frames, exceptions and stack dumps.

    ``folders``: folders of the environment's code.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        kinds = ("stdlib", "platstdlib", "purelib", "platlib")
        paths = sysconfig.get_paths()
        self._folders = {os.path.realpath(paths[kind]): False for kind in kinds} | {
            os.path.realpath(PACKAGE): False
        }
        self._folders |= {os.path.realpath(PACKAGE / name): True for name in _ENVIRONMENTS}
        self._folders |= {os.path.realpath(folder): True for folder in folders}
        self._here = os.path.realpath(os.getcwd())
        self._ownership: dict[str, bool] = {}

    def add(self, folder: str) -> None:
        """Treat the files in a folder as the environment's code from now on."""
        self._folders[os.path.realpath(folder)] = True
        self._ownership.clear()

    def owns(self, file: str) -> bool:
        """Return whether ``file`` belongs to the environment's code.

        The deepest known folder that contains the file decides. A file outside the known folders
        belongs to the environment, unless it is not a real file (``<frozen ...>``, ``<string>``).
        """
        if file not in self._ownership:
            self._ownership[file] = self._compute_ownership(file)
        return self._ownership[file]

    def _compute_ownership(self, file: str) -> bool:
        if file.startswith("<"):
            return False
        folder = path = os.path.realpath(file)
        while (above := os.path.dirname(folder)) != folder:
            folder = above
            if folder in self._folders:
                return self._folders[folder]
        return os.path.isabs(path)

    def format_location(self, file: str, line: int, name: str) -> str:
        """Return ``file:line in name``; the path is relative if it lies in the working
        directory."""
        path = os.path.realpath(file)
        shown_path = (
            os.path.relpath(path, self._here) if path.startswith(self._here + os.sep) else path
        )
        return f"{shown_path}:{line} in {name}"

    def find_in_exception(self, error: BaseException) -> str:
        """Return the innermost line of the environment's code that raised ``error`` or its cause;
        "" if there is none."""
        for each in reversed([*_walk_causes(error)]):
            if isinstance(each, SyntaxError) and each.filename and self.owns(each.filename):
                return self.format_location(each.filename, each.lineno or 0, "its text")
            frames = [
                (frame.f_code.co_filename, line, frame.f_code.co_name)
                for frame, line in traceback.walk_tb(each.__traceback__)
                if self.owns(frame.f_code.co_filename)
            ]
            if frames:
                return self.format_location(*frames[-1])
        return ""

    def find_in_frame(self, frame: FrameType | None, below: CodeType | None = None) -> str:
        """Return the innermost line of the environment's code among a running frame and its
        callers, up to the frame that runs ``below``."""
        while frame is not None and frame.f_code is not below:
            if self.owns(frame.f_code.co_filename):
                return self.format_location(
                    frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                )
            frame = frame.f_back
        return ""

    def find_in_awaitable(self, awaited: Any) -> str:
        """Return the line of the environment's code at which a coroutine is suspended, or one that
        it awaits.

        The environment may have moved its work to a thread. So if no suspended coroutine is in its
        code, return the line that another thread is executing.
        """
        if location := self.find_in_suspended(awaited):
            return location
        other_frames = (
            frame
            for thread, frame in sys._current_frames().items()
            if thread != threading.get_ident()
        )
        return next(filter(None, map(self.find_in_frame, other_frames)), "")

    def find_in_suspended(self, awaited: Any) -> str:
        """Return the innermost line of the environment's code in a suspended coroutine and the
        awaitables it awaits."""
        location = ""
        task = None
        for _ in range(_MAX_LINKS):
            if awaited is None:
                # A coroutine does not expose the task that it awaits, but the task that runs it
                # does.
                awaited = getattr(task, "_fut_waiter", None)
                task = None
            if awaited is None:
                break
            frame = next(
                (
                    f
                    for n in ("cr_frame", "gi_frame", "ag_frame")
                    if (f := getattr(awaited, n, None))
                ),
                None,
            )
            if frame is not None and self.owns(frame.f_code.co_filename):
                location = self.format_location(
                    frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                )
            if get_coroutine := getattr(awaited, "get_coro", None):
                awaited, task = get_coroutine(), awaited
                continue
            names = ("cr_await", "gi_yieldfrom", "ag_await")
            awaited = next((a for n in names if (a := getattr(awaited, n, None)) is not None), None)
        return location

    def find_definition(self, code: CodeType | None) -> str:
        """Return where a function of the environment is defined; "" for other functions."""
        if code is None or not self.owns(code.co_filename):
            return ""
        return self.format_location(code.co_filename, code.co_firstlineno, code.co_name)

    def find_in_dump(self, text: str) -> str:
        """Return the innermost line of the environment's code in a stack dump by ``faulthandler``;
        the dump's current thread is searched first."""
        threads = re.split(r"(?m)^(?=Thread |Current thread )", text)
        threads.sort(key=lambda thread: not thread.startswith("Current thread"))
        for thread in threads:
            for line in thread.splitlines():
                match = _DUMPED_FRAME.match(line)
                if match and self.owns(match["file"]):
                    return self.format_location(match["file"], int(match["line"]), match["name"])
        return ""


def _walk_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, that error's cause, and so on."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup) and current.exceptions:
            current = current.exceptions[0]
        else:
            current = current.__cause__ or (
                None if current.__suppress_context__ else current.__context__
            )


BLOCKED_S = 0.05
"""Seconds from which a callback is reported as blocking the event loop."""
CALL = "environment: "
"""Prefix of the names of tasks that call the environment; the rest of the name is the location of
the method."""
_SAMPLE_S = 0.01
"""Seconds between two samples of the stack."""
_MAX_PER_SAMPLE_S = 0.025
"""Maximum sleeping time, in seconds, that one sample can account for."""
_MIN_SAMPLES = 3
"""Minimum number of samples for a sleeping callback; with fewer, it was only waiting for a
processor."""


class Block(NamedTuple):
    """A callback that blocked the event loop."""

    where: str
    """Location in the environment's code, in the format of ``UserCode.format_location``."""
    seconds: float
    """Duration of the callback in seconds, without garbage collection."""


class LoopWatchdog:
    """Detector of blocking callbacks on the event loop of the thread that creates it, between
    ``start`` and ``stop``."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(
            target=self._sample_stack, name="check-watchdog", daemon=True
        )
        self._stop_requested = threading.Event()
        self._blocks: list[Block] = []
        self._callback = 0
        """Number of the current callback; negative while none runs."""
        self._slept_s = 0.0
        self._places: Counter[str] = Counter()
        self._collecting_s = 0.0
        self._collection_began = 0.0
        self._run = asyncio.Handle._run

    def start(self) -> None:
        """Start watching."""
        gc.callbacks.append(self._on_collection)
        asyncio.Handle._run = lambda handle: self._run_timed(handle)  # type: ignore[method-assign]
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        asyncio.Handle._run = self._run  # type: ignore[method-assign]
        gc.callbacks.remove(self._on_collection)
        self._stop_requested.set()
        self._thread.join(1.0)

    def take_blocks(self) -> list[Block]:
        """Return the blocks detected since the last call. Must be called on the loop."""
        blocks = self._blocks
        self._blocks = []
        return blocks

    def _run_timed(self, handle: Any) -> None:
        callback = getattr(handle, "_callback", None)
        self._slept_s = 0.0
        self._collecting_s = 0.0
        if self._places:
            self._places = Counter()
        number = self._callback = abs(self._callback) + 1
        began = time.thread_time()
        try:
            self._run(handle)
        finally:
            busy_s = time.thread_time() - began
            self._callback = -number
            seconds = max(busy_s, self._slept_s) - self._collecting_s
            if seconds >= BLOCKED_S and (where := self._locate(callback, busy_s)):
                self._blocks.append(Block(where, seconds))

    def _locate(self, callback: Any, busy_s: float) -> str:
        """Return the location of a callback that took too long; "" if the time was spent outside
        the environment's code or only waiting for a processor."""
        busy = busy_s - self._collecting_s >= BLOCKED_S
        if self._places:
            return (
                self._places.most_common(1)[0][0]
                if busy or self._places.total() >= _MIN_SAMPLES
                else ""
            )
        if not busy:
            return ""
        task = getattr(callback, "__self__", None)
        if not isinstance(task, asyncio.Task) or not task.get_name().startswith(CALL):
            return ""
        location = "" if task.done() else self._code.find_in_suspended(task)
        return location or task.get_name().removeprefix(CALL)

    def _sample_stack(self) -> None:
        last = time.monotonic()
        before = 0
        while not self._stop_requested.wait(_SAMPLE_S):
            now = time.monotonic()
            number = self._callback
            frame = sys._current_frames().get(self._loop_thread)
            place = (
                self._code.find_in_frame(frame, LoopWatchdog._run_timed.__code__)
                if number > 0
                else ""
            )
            del frame
            if number > 0 and number == self._callback:
                if number == before:
                    self._slept_s += min(now - last, _MAX_PER_SAMPLE_S)
                if place:
                    self._places[place] += 1
            last = now
            before = number

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == self._loop_thread:
            if phase == "start":
                self._collection_began = time.thread_time()
            else:
                self._collecting_s += time.thread_time() - self._collection_began


_CANCELLED_S = 1.0
"""Seconds that a cancelled call may take to end."""


class CallFailed(Exception):
    """Raised if an episode failed because a call raised an error, did not return in time, or
    returned an invalid value.

    Args:
        what: Description in one sentence.
        where: Line of the environment's code.
        kind: Key shared by failures with the same cause; derived from ``what`` if empty.
        hung: Whether the call did not return in time.
        shape: Whether the returned value was invalid.
        mend: How to fix it, if that is specific to this failure and not to the called method.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        kind: str = "",
        *,
        hung: bool = False,
        shape: bool = False,
        mend: str = "",
    ) -> None:
        super().__init__(what)
        self.what, self.where, self.kind, self.mend = what, where, kind or fault_key(what), mend
        self.hung = hung
        self.shape = shape


class Caller:
    """Caller of an environment's methods, with a deadline of ``timeout_s`` seconds per call.

    ``announce`` is called with (name of the call, task) before each call, so that the supervising
    process knows what was running if this process dies.
    """

    def __init__(
        self, code: UserCode, timeout_s: float, announce: Callable[[str, str], None]
    ) -> None:
        self.code = code
        self._timeout_s = timeout_s
        self._announce = announce

    async def call(
        self, name: str, task: str, method: Callable[[], Awaitable[Any]], location: str = ""
    ) -> Any:
        """Await ``method()`` and return its result. ``name`` is the name of the call (``reset``,
        ``step``, ``close``), and ``location`` the place where the author defined it.

        Raises CallFailed.
        """
        self._announce(name, task)
        running = asyncio.create_task(_capture_outcome(method), name=f"{CALL}{location}")
        finished, _ = await asyncio.wait({running}, timeout=self._timeout_s)
        if finished:
            result, error = running.result()
            if error is not None:
                raise self._build_failure(name, error) from None
            return result
        where = self.code.find_in_awaitable(running)
        running.cancel()
        await asyncio.wait({running}, timeout=_CANCELLED_S)
        stubborn = "" if running.done() else " and cannot be cancelled"
        raise CallFailed(
            f"{name} gave no answer within {self._timeout_s:g} s{stubborn}",
            where,
            "hung",
            hung=True,
        )

    def make(self, make: Callable[[str], Environment], address: str) -> Environment:
        """Create an instance. Raises CallFailed."""
        self._announce("make", "")
        try:
            return make(address)
        except (Exception, SystemExit) as error:
            raise self._build_failure("make", error) from None

    def _build_failure(self, name: str, error: BaseException) -> CallFailed:
        where = self.code.find_in_exception(error)
        if isinstance(error, EnvironmentFailure) and error.kind == "internal":
            # The loader of an env format chains an error of the author's code as the cause; an
            # error about a broken contract is the context.
            contract_error = (
                error.__context__ if isinstance(error.__context__, BrokenContract) else None
            )
            error = error.__cause__ or contract_error or error
        if isinstance(error, BrokenContract):
            return CallFailed(f"{name} breaks the contract: {quote(error)}", where, shape=True)
        return CallFailed(f"{name} raised {describe_error(error)}", where, type(error).__name__)


def describe_error(error: BaseException) -> str:
    """Return an exception's type and text in one line; for an EnvironmentFailure also its kind."""
    text = quote(error)
    if isinstance(error, EnvironmentFailure):
        return f"EnvironmentFailure({error.kind!r}): {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def _capture_outcome(
    method: Callable[[], Awaitable[Any]],
) -> tuple[Any, BaseException | None]:
    """Return (result, error) of a call.

    SystemExit and KeyboardInterrupt are caught too, because they would otherwise leave the event
    loop without reaching the awaiting code.
    """
    try:
        return await method(), None
    except BaseException as error:
        return None, error
