"""How a part of the first hour says what it finds."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_hour.report import FAILED, PASSED, SKIPPED, Line

NO_CUDA = "not on a CPU"
"""How the reason begins for which a check is skipped in a rehearsal."""


@dataclass(frozen=True)
class Setting:
    """Where the parts run, and with what."""

    device: str
    """cuda, or cpu for a rehearsal."""
    folder: Path
    """Empty folder for files and logs."""
    vllm: Path | None
    """Program that starts vLLM; None without one."""
    model: Path | None
    """Folder of a pretrained model; None for models with random weights."""

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"


class CheckFailed(Exception):
    """A check found something wrong. The text says what."""


class PartEnded(Exception):
    """A check failed that the rest of the part needs."""


@dataclass
class Check:
    """A check in progress."""

    result: str = ""
    """What came out, for a reader."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same as figures."""

    def say(self, result: str, **figures: Any) -> None:
        """Set the result and add figures."""
        self.result = result
        self.figures |= figures


class Recorder:
    """Passes the lines of a part on, as each one ends."""

    def __init__(self, send: Callable[[Line], object]) -> None:
        self._send = send

    @contextlib.contextmanager
    def check(self, name: str, *, needed: bool = False) -> Iterator[Check]:
        """Context manager for a check. An error in it becomes a failed line; the part goes on
        unless the check is ``needed``."""
        check = Check()
        start_s = time.monotonic()
        status = PASSED
        try:
            yield check
        except Exception as error:
            traceback.print_exc()
            status = FAILED
            check.result = _describe(error)
        self._send(Line(name, status, time.monotonic() - start_s, check.result, check.figures))
        if needed and status == FAILED:
            raise PartEnded(name)

    def skip(self, name: str, reason: str) -> None:
        """Record a check that cannot run here."""
        self._send(Line(name, SKIPPED, 0.0, reason))

    def skip_on_cpu(self, name: str, reason: str) -> None:
        """Record a check that needs CUDA, in a rehearsal."""
        self.skip(name, f"{NO_CUDA}: {reason}")

    def line(self, line: Line) -> None:
        """Record a line that is made elsewhere."""
        self._send(line)


def _describe(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    if len(text) > 400:
        text = f"{text[:200]} ... {text[-200:]}"
    return text if isinstance(error, CheckFailed) else f"{type(error).__name__}: {text}"
