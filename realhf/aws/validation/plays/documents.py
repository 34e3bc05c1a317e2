"""Finds JSON in the values of options, including documents inside documents: a queue's policy is a text in its
attributes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def parsed(text: str) -> Any:
    """Return the object or list that a text holds, None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def each_document(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield every policy-like map in a value: the value itself, and texts inside it that hold one."""
    document = parsed(text)
    if isinstance(document, Mapping):
        yield document
        for item in document.values():
            if isinstance(item, str):
                yield from each_document(item)


def rewritten(text: str, change: Callable[[Any], Any]) -> str:
    """Return the value with ``change`` applied to each policy in it."""
    document = parsed(text)
    if not isinstance(document, Mapping):
        return text
    if "Statement" in document:
        return json.dumps(change(dict(document)))
    changed = {key: rewritten(item, change) if isinstance(item, str) else item for key, item in document.items()}
    return json.dumps(changed)
