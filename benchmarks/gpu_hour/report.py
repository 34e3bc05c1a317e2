"""What the first hour found: lines, parts and the report, which is written as JSON and contains
nothing that identifies its user."""

from __future__ import annotations

import getpass
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realhf.base.dataclass_json import from_json_value, to_json_value
from realhf.base.installation import IMPORT_ROOT

SCHEMA = "realhf gpu hour 1"
"""Version of the report's fields."""
PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
"""Status of what cannot run on this machine; the result says why."""
LEFT_OUT = "left out"
"""Status of a part that did not begin, because one that it needs has failed."""
STATUSES = (PASSED, FAILED, SKIPPED, LEFT_OUT)
_KEPT = ("dev", "proc", "sys")
"""Folders of every Linux, whose paths identify nobody."""
_FOLDERS = re.compile(
    rf"(?<![\w:/.~-])(?:~|/(?!(?:{'|'.join(_KEPT)})/)[^\s/:'\",;()\[\]<>=]+)/"
    r"(?:[^\s/:'\",;()\[\]<>=]+/)*"
)
"""The folders of a path from the root or home; not those of a URL or a relative path."""


@dataclass(frozen=True)
class Line:
    """A finding, printed when it is made."""

    name: str
    """What was done."""
    status: str
    """One of ``STATUSES``."""
    seconds: float
    """Duration."""
    result: str
    """What came out, or why it failed or was skipped, for a reader."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The same as numbers, texts, truth values and lists of these, by name. A unit is the last word
    of the name (``peak_gib``)."""


@dataclass(frozen=True)
class PartResult:
    """A part of the program."""

    name: str
    """Name, as ``--only`` takes it."""
    status: str
    """One of ``STATUSES``; failed if one of its lines failed, skipped if all were."""
    seconds: float
    """Duration, with the start of its process."""
    lines: tuple[Line, ...]
    """Findings, in order."""


@dataclass(frozen=True)
class Report:
    """The whole result. It is built from scrubbed lines (``scrub``)."""

    schema: str
    """``SCHEMA``."""
    started: str
    """Begin, in UTC, as 2026-01-31T12:00:00Z."""
    seconds: float
    """Duration."""
    device: str
    """cuda, or cpu for a rehearsal."""
    project: str
    """Version of realhf."""
    commit: str
    """Commit of the checkout, with "+" if files were changed; "" if it is not known."""
    passed: bool
    """Whether nothing failed and nothing was left out."""
    parts: tuple[PartResult, ...]
    """Parts that were asked for, in order."""
    next: str
    """Command to run next."""

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(to_json_value(self), indent=1, allow_nan=False) + "\n"


def read_report(text: str) -> Report:
    """Return the report that ``Report.to_json`` wrote. Raises ValueError that names what does not
    fit."""
    try:
        report = from_json_value(Report, json.loads(text))
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"not a report of the first hour on a GPU: {error}") from None
    if report.schema != SCHEMA:
        raise ValueError(f"schema: {report.schema!r} is not {SCHEMA!r}")
    for part in report.parts:
        for status in (part.status, *(line.status for line in part.lines)):
            if status not in STATUSES:
                raise ValueError(f"{part.name}: status {status!r} is none of {', '.join(STATUSES)}")
        for line in part.lines:
            if not all(_is_figure(value) for value in line.figures.values()):
                raise ValueError(f"{part.name}, {line.name}: figures are numbers, texts and lists")
    return report


def _is_figure(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_figure(each) for each in value)
    return isinstance(value, (bool, int, float, str))


def part_status(lines: Sequence[Line]) -> str:
    """Return the status of a part with these lines."""
    statuses = {line.status for line in lines}
    if FAILED in statuses or not statuses:
        return FAILED
    return PASSED if PASSED in statuses else SKIPPED


def scrub(text: str) -> str:
    """Return a text without the names of this machine and user, and without the folders of paths:
    those of the project become relative, of others the last name is left."""
    text = text.replace(f"{IMPORT_ROOT}/", "").replace(str(IMPORT_ROOT), ".")
    text = _FOLDERS.sub(".../", text)
    for name, placeholder in _find_names().items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", placeholder, text)
    return text


def scrub_line(line: Line) -> Line:
    """Return a line with scrubbed texts, and figures that JSON can hold."""
    figures = {name: _scrub_figure(value) for name, value in line.figures.items()}
    return Line(scrub(line.name), line.status, round(line.seconds, 2), scrub(line.result), figures)


def _scrub_figure(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_scrub_figure(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return scrub(value) if isinstance(value, str) else value


def _find_names() -> Mapping[str, str]:
    """Return the names of this host and user, with what is written instead. A name that is also a
    common word is kept."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    host = platform.node()
    names = {host: "HOST", host.partition(".")[0]: "HOST", user: "USER"}
    return {name: placeholder for name, placeholder in names.items() if _identifies(name)}


def _identifies(name: str) -> bool:
    return len(name) > 2 and name not in ("localhost", "root", "user", "ubuntu", "gpu", "cuda")


def table(parts: Sequence[PartResult]) -> str:
    """Return the parts as a table: name, status, seconds, and the number of lines by status."""
    rows = [("part", "status", "seconds", "lines")]
    for part in parts:
        counts = [
            f"{count} {status}"
            for status in STATUSES
            if (count := sum(line.status == status for line in part.lines))
        ]
        rows.append((part.name, part.status, f"{part.seconds:.1f}", ", ".join(counts)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {status:<{widths[1]}}  {seconds:>{widths[2]}}  {count}".rstrip()
        for name, status, seconds, count in rows
    ]
    return "\n".join(lines)


def format_line(part: str, line: Line) -> str:
    """Return a line as it is printed."""
    return f"{part:<9} {line.name:<34} {line.seconds:7.1f} s  {line.status:<8} {line.result}"
