"""Renders an observation as text for the policy: short, and the same in every run.

The text is a pure function of the observation map, shared by rollouts and demonstrations. What differs between runs
(ports, times, request ids) or has no use (response metadata) is normalised or dropped, because a small model would
spend its capacity on copying it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from realhf.base.text import shorten

OBSERVATION_CHARS = 200
"""Largest number of characters by default: what a small model reads after every turn."""
NO_COMMAND = "error: no command; reply with one line that starts with aws"

_DROPPED_KEYS = frozenset(
    {
        "ResponseMetadata",
        "RequestId",
        "RequestCharged",
        "ETag",
        "MD5OfMessageBody",
        "MD5OfMessageAttributes",
        "ServerSideEncryption",
        "ChecksumCRC32",
        "ChecksumCRC64NVME",
        "ChecksumType",
        "IsTruncated",
        "Prefix",
        "ReceiptHandle",
        "Owner",
        "BucketArn",
    }
)
_EMPTY = (None, "", [], {})
_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_TIME = re.compile(
    r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?|\b1[6-9]\d{8}(?:\.\d+|\d{3})?\b"
)
_LOCAL_PORT = re.compile(r"(localhost(?:\.[a-z.]+)?|127\.0\.0\.1|localstack\.cloud):\d{2,5}\b")
_HEX = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{20,}\b")
_IAM_ID = re.compile(r"\bA[A-Z]{3}[0-9A-Z]{15,17}\b")
_SECRET_SUFFIX = re.compile(r"(:secret:[\w/+=.@-]+)-[0-9A-Za-z]{6}\b")
_ERROR_LINE = re.compile(r"error|unknown options|invalid|denied|refused|timed out", re.IGNORECASE)
_CALLED = re.compile(r"^An error occurred \((\w+)\) when calling the (\w+) operation(?: \([^)]*\))?: ?")


def observation_text(observation: Mapping[str, Any], *, max_chars: int = OBSERVATION_CHARS) -> str:
    """Return at most ``max_chars`` characters: minified output of a success ("ok" when there is none), the last
    meaningful line of an error. Longer text keeps its head and its tail."""
    if observation["command_success"]:
        text = _compact(observation["command_output"]) or "ok"
    else:
        text = "error: " + _last_meaningful(observation["error"] or observation["command_output"])
    if observation.get("hint_text"):
        text = f"hint: {observation['hint_text']}\n{text}"
    return shorten(normalise(text), max_chars)


def normalise(text: str) -> str:
    """Replace ports, times, uuids, IAM ids and long hexadecimal strings by fixed words, and drop the random
    end of a secret's ARN (which AWS accepts without it)."""
    text = _LOCAL_PORT.sub(r"\1:4566", text)
    text = _TIME.sub("TIME", text)
    text = _UUID.sub("UUID", text)
    text = _IAM_ID.sub("ID", text)
    text = _SECRET_SUFFIX.sub(r"\1", text)
    return _HEX.sub("HEX", text)


def _compact(output: str) -> str:
    output = output.strip()
    if output[:1] in ("{", "["):
        try:
            return json.dumps(_without_noise(json.loads(output)), separators=(",", ":"), ensure_ascii=False)
        except ValueError:
            pass
    return "\n".join(" ".join(line.split()) for line in output.splitlines() if line.strip())


def _without_noise(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not _is_noise(key)}
        told = {key: _without_noise(item) for key, item in kept.items() if item not in _EMPTY}
        return told or kept
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    return value


def _is_noise(key: str) -> bool:
    return key in _DROPPED_KEYS or key.endswith(("Date", "Time", "Timestamp"))


def _last_meaningful(error: str) -> str:
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "command failed"
    line = next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1])
    line = _CALLED.sub(r"\1: ", line).removeprefix("aws: error: ").removeprefix("error: ")
    return line
