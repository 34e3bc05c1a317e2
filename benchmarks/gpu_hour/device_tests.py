"""Plays tests/gpu to the first failure, with a line for each file as it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.gpu_hour.recording import CheckFailed, PartEnded, Recorder, Setting
from benchmarks.gpu_hour.report import FAILED, PASSED, SKIPPED, Line
from realhf.base.installation import IMPORT_ROOT

FOLDER = IMPORT_ROOT / "tests" / "gpu"
FASTEST_FIRST = (
    "head",
    "varlen",
    "engines",
    "adapters",
    "device_memory",
    "weight_ipc",
    "weight_nccl",
    "ranks",
)
"""Files of the folder by their time; others come last."""
_OUTCOME = re.compile(
    r"^tests/gpu/test_(?P<file>\w+)\.py::(?P<test>\S.*?) (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b"
)
_CAUSE = re.compile(r"^(?:FAILED|ERROR) \S+(?: - (?P<cause>.*))?$")


@dataclass
class _File:
    """A test file in progress."""

    name: str
    """Name without test_."""
    start_s: float
    """When its first test began."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of tests by outcome."""
    failed: list[str] = field(default_factory=list)
    """Tests that failed."""


def order_files() -> list[str]:
    """Return the test files, the fastest first."""
    known = {name: place for place, name in enumerate(FASTEST_FIRST)}
    names = [path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py")]
    ordered = sorted(names, key=lambda name: (known.get(name, len(known)), name))
    return [f"tests/gpu/test_{name}.py" for name in ordered]


def run_tests(record: Recorder, setting: Setting) -> None:
    """Play the tests, in one process."""
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-x", "--tb=short", "--color=no"),
        *("--confcutdir=tests/gpu", "-p", "no:cacheprovider", f"--gpu-device={setting.device}"),
        *order_files(),
    ]
    current: _File | None = None
    cause = ""
    with subprocess.Popen(
        command, cwd=IMPORT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        start_s = time.monotonic()
        for text in process.stdout:
            print(text, end="", flush=True)
            if found := _OUTCOME.match(text):
                if current is None or current.name != found["file"]:
                    if current is not None:
                        record.line(_to_line(current, ""))
                        start_s = time.monotonic()
                    current = _File(found["file"], start_s)
                current.outcomes[found["outcome"]] += 1
                if found["outcome"] in ("FAILED", "ERROR"):
                    current.failed.append(found["test"].strip())
            elif found := _CAUSE.match(text.strip()):
                cause = found["cause"] or ""
    if current is not None:
        record.line(_to_line(current, cause))
    if process.returncode and (current is None or not current.failed):
        with record.check("pytest"):
            raise CheckFailed(f"ended with {process.returncode} and no failed test")
    if process.returncode:
        raise PartEnded("tests")


def _to_line(file: _File, cause: str) -> Line:
    """Return the line of a file."""
    counts = {name.lower(): count for name, count in sorted(file.outcomes.items())}
    status = FAILED if file.failed else PASSED if file.outcomes["PASSED"] else SKIPPED
    result = ", ".join(f"{count} {name}" for name, count in counts.items())
    if file.failed:
        result += f": {', '.join(file.failed)}{f': {cause}' if cause else ''}"
    return Line(f"test_{file.name}", status, time.monotonic() - file.start_s, result, counts)
