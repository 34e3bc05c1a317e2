"""The GPUs of a machine as a plain record.

Which engine samples, in which dtype a model trains and which worker gets which GPU is decided from
this record alone, so that the decisions for a machine can be made (``mode=check machine=8xH100``),
and tested, on another one.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from realhf.scheduler.gpus import visible_gpus

BFLOAT16_CAPABILITY = (8, 0)
"""Compute capability from which GPUs multiply in bfloat16; vLLM refuses the dtype below it."""
T = TypeVar("T")
_FIELDS = "index,uuid,name,memory.total,memory.free,compute_cap"
"""Fields that ``nvidia-smi`` reports for each GPU, in the order in which they are parsed."""
QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
"""Command that reports them."""
_MOST = 64
"""Largest number of GPUs of a machine that is planned for by the name of their model."""
_TIMEOUT_S = 20.0
"""Seconds that ``nvidia-smi`` may take."""
_MIB = 2**20
_RESERVED = 640 * _MIB
"""Memory of a GPU that its driver keeps, about."""


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

    def describe(self) -> str:
        """Return its name, memory and capability as text, as far as they are known."""
        known = [
            f"{self.total_bytes / 2**30:.1f} GiB" if self.total_bytes is not None else "",
            "capability {}.{}".format(*self.capability) if self.capability is not None else "",
        ]
        facts = ", ".join(fact for fact in known if fact)
        return f"{self.name or 'unknown GPU'}{f' ({facts})' if facts else ''}"

    def without_processes(self) -> Gpu:
        """Return the GPU with all memory free but what its driver keeps."""
        if self.total_bytes is None:
            return self
        return replace(self, free_bytes=max(0, self.total_bytes - _RESERVED))


@dataclass(frozen=True)
class Machine:
    """The GPUs that a process sees, in CUDA's order."""

    gpus: tuple[Gpu, ...] = ()
    """One entry for each GPU; empty on a machine without one."""
    plan: str = ""
    """How the user named a machine that is only planned for; "" for the one that this process runs
    on. Nothing is known of another machine but its GPUs: neither its memory nor its programs."""

    @property
    def place(self) -> str:
        """Where the machine is, for error messages."""
        return f"of machine={self.plan}" if self.plan else "here"

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest known compute capability; None if none is known."""
        return min((gpu.capability for gpu in self.gpus if gpu.capability), default=None)

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether no GPU is known to lack bfloat16."""
        return self.capability is None or self.capability >= BFLOAT16_CAPABILITY

    def describe(self) -> str:
        """Return its GPUs as text."""
        counts = Counter(self.gpus)
        return ", ".join(f"{count} x {gpu.describe()}" for gpu, count in counts.items()) or "no GPU"

    def free_bytes(self) -> dict[int, int]:
        """Return the free bytes of each GPU for which they are known, by index."""
        known = ((number, gpu.free_bytes) for number, gpu in enumerate(self.gpus))
        return {number: free for number, free in known if free is not None}

    def without_processes(self) -> Machine:
        """Return the machine as it is when no process uses its GPUs."""
        return replace(self, gpus=tuple(gpu.without_processes() for gpu in self.gpus))


NO_GPUS = Machine()
"""A machine without a GPU."""


def _gpu(name: str, mib: int, capability: tuple[int, int]) -> Gpu:
    """Return a GPU that no process uses. ``mib``: its memory as ``nvidia-smi`` reports it."""
    return Gpu(name, mib * _MIB, mib * _MIB - _RESERVED, capability)


KNOWN_GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "B200": _gpu("NVIDIA B200", 183359, (10, 0)),
        "H200": _gpu("NVIDIA H200", 143771, (9, 0)),
        "H100": _gpu("NVIDIA H100 80GB HBM3", 81559, (9, 0)),
        "A100": _gpu("NVIDIA A100-SXM4-80GB", 81920, (8, 0)),
        "A100-40GB": _gpu("NVIDIA A100-SXM4-40GB", 40960, (8, 0)),
        "L40S": _gpu("NVIDIA L40S", 46068, (8, 9)),
        "A6000": _gpu("NVIDIA RTX A6000", 49140, (8, 6)),
        "RTX4090": _gpu("NVIDIA GeForce RTX 4090", 24564, (8, 9)),
        "RTX3090": _gpu("NVIDIA GeForce RTX 3090", 24576, (8, 6)),
        "L4": _gpu("NVIDIA L4", 23034, (8, 9)),
        "A10": _gpu("NVIDIA A10", 23028, (8, 6)),
        "T4": _gpu("Tesla T4", 15360, (7, 5)),
        "V100": _gpu("Tesla V100-SXM2-32GB", 32768, (7, 0)),
    }
)
"""GPUs that can be planned for by name."""


def plan_machine(text: str) -> Machine:
    """Return the machine that a text describes: ``8xH100``, ``cpu`` for one without GPUs, or a file
    with what ``nvidia-smi`` printed there (``QUERY``). Raises ValueError that says what is
    wrong."""
    if text == "cpu":
        return Machine(plan=text)
    known = f"known are {', '.join(KNOWN_GPUS)}"
    if named := re.fullmatch(r"(\d+)x([\w-]+)", text):
        models = {name.lower(): gpu for name, gpu in KNOWN_GPUS.items()}
        gpu = models.get(named[2].lower())
        if gpu is None:
            raise ValueError(
                f"there is no record of a GPU {named[2]!r} ({known}); give a file with what "
                f"`{' '.join(QUERY)}` prints there"
            )
        if not 1 <= int(named[1]) <= _MOST:
            raise ValueError(f"plans for 1 to {_MOST} GPUs, and `cpu` for a machine without one")
        return Machine((gpu,) * int(named[1]), text)
    try:
        report = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"neither COUNTxMODEL, such as 8xH100 ({known}), nor cpu, nor a file that can be read "
            f"({getattr(error, 'strerror', None) or error})"
        ) from None
    numbers = tuple(line.partition(",")[0].strip() for line in report.splitlines())
    gpus = parse_gpus(tuple(number for number in numbers if number.isdecimal()), report)
    if not gpus or any(gpu.total_bytes is None for gpu in gpus):
        raise ValueError(f"the file holds something else than what `{' '.join(QUERY)}` prints")
    return Machine(gpus, text)


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
        total, free = (_parse(text, lambda text: int(text) * _MIB) for text in row[3:5])
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
    try:
        return subprocess.run(
            QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
