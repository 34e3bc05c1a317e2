"""Captures that are filled at run time: ``${step1:QueueUrl}`` in commands, ``${setup2:Vpc.VpcId}``
anywhere in a task.

The number counts from 1; ``step`` refers to the JSON output of that command, ``setup`` to the
response to that set-up request. The text after the colon is a JMESPath expression that is evaluated
on it (a leading ``$.`` is accepted). Source: docs/reference/environment.md 6.
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
    """A capture could not be filled. The message quotes the capture."""


def resolve(command: str, outputs: Sequence[str]) -> str:
    """Return ``command`` with its ``${stepN:...}`` captures filled.

    ``outputs``: outputs of the earlier commands in the same list. A capture that matches nothing,
    because its command failed, is left unchanged, so that the command fails as it would for a
    person.
    """

    def value(match: re.Match[str]) -> str:
        try:
            return _to_text(_evaluate(match, [_parse_json(output) for output in outputs]))
        except CaptureError:
            return match[0]

    return _STEP.sub(value, command)


def fill_setup(value: Any, answers: Sequence[Mapping[str, Any]]) -> Any:
    """Return ``value``, any nesting of strings, lists and mappings, with every ``${setupN:...}``
    capture filled from ``answers``.

    A string that consists of a single capture becomes the captured value and keeps the value's
    type. Raises CaptureError.
    """
    if isinstance(value, str):
        whole = _SETUP.fullmatch(value)
        if whole:
            return _evaluate(whole, answers)
        return _SETUP.sub(lambda match: _to_text(_evaluate(match, answers)), value)
    if isinstance(value, Mapping):
        return {fill_setup(key, answers): fill_setup(item, answers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(fill_setup(item, answers) for item in value)
    return value


def setup_captures(value: Any) -> set[str]:
    """Return all set-up captures that occur in ``value``, as strings."""
    return {match[0] for match in _SETUP.finditer(repr(value))}


def _evaluate(match: re.Match[str], documents: Sequence[Any]) -> Any:
    number = int(match[1])
    path = match[2].removeprefix("$.")
    if not 1 <= number <= len(documents):
        raise CaptureError(
            f"{match[0]} refers to a command or request that does not exist or has not run yet"
        )
    try:
        value = jmespath.search(path, documents[number - 1])
    except JMESPathError as error:
        raise CaptureError(f"{match[0]}: {error}") from None
    if value is None:
        raise CaptureError(f"{match[0]} matches nothing")
    return value


def _parse_json(output: str) -> Any:
    try:
        return json.loads(output)
    except ValueError:
        return None


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
