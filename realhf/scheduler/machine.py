"""The GPUs of a machine as a plain record.

Which engine samples, in which dtype a model trains and which worker gets which GPU is decided from
this record alone, so that the decisions for a machine can be made, and tested, on another one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from realhf.scheduler.gpus import visible_gpus

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which GPUs multiply in bfloat16; vLLM refuses the dtype below it."""
T = TypeVar("T")
_FIELDS = "index,uuid,name,memory.total,memory.free,compute_cap"
"""Fields that ``nvidia-smi`` reports for each GPU, in the order in which they are parsed."""
_TIMEOUT_S = 20.0
"""Seconds that ``nvidia-smi`` may take."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, as far as it is known."""

    name: str = ""
    """Name of its model; "" if unknown."""
    total_bytes: int | None = None
    """Size of its memory; None if unknown."""
    free_bytes: int | None = None
    """Memory that no process uses; None if unknown."""
    capability: tuple[int, int] | None = None
    """Compute capability; None if unknown."""


@dataclass(frozen=True)
class Machine:
    """The GPUs that a process sees, in CUDA's order."""

    gpus: tuple[Gpu, ...] = ()
    """One entry for each GPU; empty on a machine without one."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest known compute capability; None if none is known."""
        return min((gpu.capability for gpu in self.gpus if gpu.capability), default=None)

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether no GPU is known to lack bfloat16."""
        return self.capability is None or self.capability >= BFLOAT16_CAPABILITY

    def free_bytes(self) -> dict[int, int]:
        """Return the free bytes of each GPU for which they are known, by index."""
        known = ((number, gpu.free_bytes) for number, gpu in enumerate(self.gpus))
        return {number: free for number, free in known if free is not None}


NO_GPUS = Machine()
"""A machine without a GPU."""


def read_machine() -> Machine:
    """Return the GPUs that this process sees. What ``nvidia-smi`` does not report is unknown."""
    visible = visible_gpus()
    return Machine(parse_gpus(visible, _query())) if visible else NO_GPUS


def parse_gpus(visible: tuple[str, ...], report: str) -> tuple[Gpu, ...]:
    """Return the GPUs with these driver numbers or UUIDs (of which CUDA accepts a prefix), from the
    lines of ``nvidia-smi``. A GPU that is in no line, such as a MIG instance, is unknown."""
    rows = [[cell.strip() for cell in line.split(",")] for line in report.splitlines()]
    rows = [row for row in rows if len(row) == len(_FIELDS.split(","))]
    gpus: list[Gpu] = []
    for entry in visible:
        row = next((row for row in rows if row[0] == entry or row[1].startswith(entry)), None)
        if row is None:
            gpus.append(Gpu())
            continue
        total, free = (_parse(text, lambda text: int(text) * 2**20) for text in row[3:5])
        gpus.append(Gpu(row[2], total, free, _parse(row[5], _parse_capability)))
    return tuple(gpus)


def _parse_capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _parse(text: str, read: Callable[[str], T]) -> T | None:
    """Return ``read(text)``; None for a text such as "[N/A]"."""
    try:
        return read(text)
    except ValueError:
        return None


def _query() -> str:
    """Return the output of ``nvidia-smi``; "" if it cannot be run."""
    command = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
