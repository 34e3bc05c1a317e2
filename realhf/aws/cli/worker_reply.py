"""Reads what a CLI worker answers, as the words of a process that an agent may have taken over.

Nothing of a reply is believed before its size, its time and the type of every field are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from realhf.aws.cli.command_result import CommandResult, OutputLimits, SentRequest
from realhf.env.containment.frames import BadFrame

_MAX_REQUESTS = 10_000
_NOTE_CHARS = 64
"""Longest remark that a stream was cut; it comes on top of what is kept."""
_FIELDS: Mapping[str, type] = {
    "exit_code": int,
    "stdout": str,
    "stderr": str,
    "requests": list,
    "last": bool,
    "truncated": bool,
}
_REQUEST_FIELDS: Mapping[str, type] = {
    "service": str,
    "operation": str,
    "params": dict,
    "status": int,
    "error_code": str,
}


@dataclass(frozen=True)
class WorkerReply:
    """Holds a checked reply. ``refusal``: rule and text; ``last``: the worker ends by itself now."""

    result: CommandResult
    refusal: tuple[str, str] | None
    last: bool


def parse_reply(data: Any, limits: OutputLimits) -> WorkerReply:
    """Check a reply. Raises BadFrame for anything but a well-formed answer to a command that ran under ``limits``."""
    if not isinstance(data, dict):
        raise BadFrame("not an object")
    _check_types(data, _FIELDS)
    for stream, most in (("stdout", limits.stdout_bytes), ("stderr", limits.stderr_bytes)):
        if len(data[stream]) > most + _NOTE_CHARS:
            raise BadFrame(f"more {stream} than was asked for")
    refusal = data.get("refusal")
    if refusal is not None:
        if not isinstance(refusal, list) or [type(part) for part in refusal] != [str, str]:
            raise BadFrame("a malformed refusal")
        refusal = (refusal[0], refusal[1])
    if len(data["requests"]) > _MAX_REQUESTS:
        raise BadFrame("more requests than a command can send")
    result = CommandResult(
        data["exit_code"],
        data["stdout"],
        data["stderr"],
        truncated=data["truncated"],
        requests=tuple(_sent(entry) for entry in data["requests"]),
    )
    return WorkerReply(result, refusal, data["last"])


def _sent(entry: Any) -> SentRequest:
    if not isinstance(entry, dict) or set(entry) != set(_REQUEST_FIELDS):
        raise BadFrame("a malformed request")
    _check_types(entry, _REQUEST_FIELDS)
    return SentRequest(**entry)


def _check_types(data: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    for name, kind in fields.items():
        if type(data.get(name)) is not kind:
            raise BadFrame(f"{name} is not of type {kind.__name__}")
