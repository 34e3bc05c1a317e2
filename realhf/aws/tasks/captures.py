"""Run-time captures: ``${step1:QueueUrl}`` in commands, ``${setup2:Vpc.VpcId}`` anywhere in a task.

The text after the colon is a JMESPath expression (a leading ``$.`` is accepted). It is evaluated on
the JSON output of that command, or on the response to that set-up request; both count from 1.
Source: docs/reference/environment.md 6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

_STEP = re.compile(r"\$\{step(\d+):([^}]+)\}")
_SETUP = re.compile(r"\$\{setup(\d+):([^}]+)\}")


class CaptureError(ValueError):
    """A capture matches nothing; the message contains the capture."""


def resolve(command: str, outputs: Sequence[str]) -> str:
    """Return ``command`` with its ``${stepN:...}`` captures filled from the outputs so far.

    ``outputs`` holds the outputs of the earlier commands of the same list. A capture that matches
    nothing (its command failed) is left as it is, so that the command fails as it would for a
    person.
    """

    def value(match: re.Match[str]) -> str:
        try:
            return _text(_find(match, [_parse_json(output) for output in outputs]))
        except CaptureError:
            return match[0]

    return _STEP.sub(value, command)


def fill_setup(value: Any, answers: Sequence[Mapping[str, Any]]) -> Any:
    """Return ``value`` (texts, lists and mappings) with every ``${setupN:...}`` capture filled.

    A text that consists of one capture becomes the captured value and keeps its type. Raises
    CaptureError.
    """
    if isinstance(value, str):
        whole = _SETUP.fullmatch(value)
        if whole:
            return _find(whole, answers)
        return _SETUP.sub(lambda match: _text(_find(match, answers)), value)
    if isinstance(value, Mapping):
        return {fill_setup(key, answers): fill_setup(item, answers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fill_setup(item, answers) for item in value)
    return value


def setup_captures(value: Any) -> set[str]:
    """Return the texts of all set-up captures in ``value``."""
    return {match[0] for match in _SETUP.finditer(repr(value))}


def _find(match: re.Match[str], documents: Sequence[Any]) -> Any:
    number = int(match[1])
    path = match[2].removeprefix("$.")
    if not 1 <= number <= len(documents):
        raise CaptureError(f"{match[0]} refers to what has not happened")
    try:
        value = jmespath.search(path, documents[number - 1])
    except JMESPathError as error:
        raise CaptureError(f"{match[0]}: {error}") from None
    if value is None:
        raise CaptureError(f"{match[0]} finds nothing")
    return value


def _parse_json(output: str) -> Any:
    try:
        return json.loads(output)
    except ValueError:
        return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
