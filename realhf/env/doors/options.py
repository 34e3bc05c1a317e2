"""Reads options of an environment from a command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


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
        options[name] = _json_value(value, name) if value[:1] in ("[", "{") or value == "null" else value
    return options


def _json_value(text: str, name: str) -> Any:
    """Return a JSON value. Raises ValueError that begins with ``name``."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
        raise ValueError(f"{name}: {text[:60]!r} is no JSON: {reason}") from None
