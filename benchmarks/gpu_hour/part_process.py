"""Runs a part in a process of its own, within a deadline: what it allocates is free afterwards, and
no hang or crash ends the program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.gpu_hour.recording import PartEnded, Recorder, Setting
from benchmarks.gpu_hour.report import FAILED, Line, PartResult, part_status, scrub_line

if TYPE_CHECKING:
    from benchmarks.gpu_hour.parts import Part

INTERRUPTED = "interrupted"
"""Name of the line of a part that Ctrl-C ended."""
_START_S = 120.0
"""Seconds that the process of a part has to import what it needs, before its deadline counts."""
_END_S = 20.0
"""Seconds that a part has to stop what it started, after its last line."""


def run_part(part: Part, setting: Setting, show: Callable[[Line], object]) -> PartResult:
    """Run a part, pass each line to ``show``, and return its result. When the deadline is over, or
    after Ctrl-C, all of its processes are killed."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    log = setting.folder / f"{part.name}.log"
    process = context.Process(target=_run, args=(sender, part.run, setting, log))
    start_s = time.monotonic()
    limit_s = part.limit_s(setting)
    lines: list[Line] = []

    def take(line: Line) -> None:
        lines.append(scrub_line(line))
        show(lines[-1])

    process.start()
    sender.close()
    ended = False
    try:
        if receiver.poll(_START_S):
            receiver.recv()
        begin_s = time.monotonic()
        while not ended:
            left_s = begin_s + limit_s - time.monotonic()
            if not receiver.poll(max(0.0, left_s)):
                take(Line("the deadline", FAILED, limit_s, f"not done within {limit_s:g} s"))
                break
            line = receiver.recv()
            ended = line is None
            if line is not None:
                take(line)
    except KeyboardInterrupt:
        take(Line(INTERRUPTED, FAILED, time.monotonic() - start_s, "by Ctrl-C"))
    except EOFError:
        process.join(_END_S)
        result = f"the process ended with {process.exitcode}: {_read_end(log)}"
        take(Line("the process", FAILED, time.monotonic() - start_s, result))
    finally:
        process.join(_END_S if ended else 0.0)
        if process.is_alive():
            _kill_tree(process.pid)
        process.join()
        receiver.close()
    seconds = round(time.monotonic() - start_s, 2)
    return PartResult(part.name, part_status(lines), seconds, tuple(lines))


def _run(
    sender: Connection, run: Callable[[Recorder, Setting], None], setting: Setting, log: Path
) -> None:
    """Run a part in this process, with its output in a file. None is sent at its end, and before
    its first line."""
    with log.open("ab") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    sender.send(None)
    with contextlib.suppress(PartEnded):
        run(Recorder(sender.send), setting)
    sender.send(None)


def _kill_tree(pid: int | None) -> None:
    """Kill a process and its descendants, if it is alive."""
    try:
        root = psutil.Process(pid)
        found = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _read_end(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no output"
