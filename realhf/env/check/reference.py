"""Reads how a person names an environment and its options on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.builtins import environments
from realhf.env.check.finding import close_match


def folders_of(reference: str) -> list[Path]:
    """Return the folder of ``file.py:Name``; none for a registered name or a module."""
    place = reference.rpartition(":")[0] or reference
    return [Path(place).expanduser().resolve().parent] if place.endswith(".py") else []


def check_reference(reference: str) -> None:
    """Raise ValueError with one sentence for a name that is not registered and a file that is not there. What is in a
    file is found out by loading it."""
    place, _, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise ValueError(f"there is no file {place}")
    elif (not place or not name) and reference not in environments:
        known = close_match(reference, [*environments])
        raise ValueError(f"unknown environment {reference!r}{known}; one of your own is file.py:Name or module:Name")


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return ``["size=3", "names=[1, 2]"]`` as options. Values stay text, which the environment's own types convert,
    but for lists, maps and ``null``, which are JSON. Raises ValueError with one sentence."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("env.")
        if not equals or not name:
            raise ValueError(f"{text!r} is no option: write option=value")
        if name in options:
            raise ValueError(f"the option {name!r} is given twice")
        options[name] = json_value(value, name) if value[:1] in ("[", "{") or value == "null" else value
    return options


def json_value(text: str, name: str) -> Any:
    """Return a JSON value. Raises ValueError that begins with ``name``."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ValueError(f"{name}: {text[:60]!r} is no JSON: {reason}") from None
