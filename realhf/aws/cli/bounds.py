"""Bounds what a request may ask for, on its parameters as the CLI made them of whatever spelling.

Here stands every count that a simulator would turn into objects, by the name of its member in botocore's models, and
what a document of YAML may unfold to. The memory and the time of a simulator are bounded beside that, by limits of its
process: a template may hold counts that nobody sees here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml
from botocore.model import OperationModel

MAX_COUNT = 100
MAX_ALIASES = 16
"""Most aliases in a document of YAML. Each may double what the ones before it unfold to, and more."""
_COUNTED = re.compile(
    r"(?<!sample)count$|capacity$|capacitybuffer$|instances$|workers$|nodes$|shards$|replicas|partitions$|buckets$|pools$"
    r"|^m(in|ax)size$|^num(ber)?of|^num(cache|node)|concurrency$|concurrentruns$",
    re.IGNORECASE,
)
_ALIAS, _ANCHOR = (re.compile(rf"(?:^|[\s\[{{,:?-]){sign}[^\s\]}},*&]") for sign in (r"\*", "&"))
_NUMBERS = frozenset({"integer", "long", "float", "double"})


def too_much(model: OperationModel, params: Any) -> str:
    """Say what a request asks too much of; "" where it does not."""
    stored = model.service_model.service_name == "s3"
    for name, shape, value in _leaves(model.input_shape, params):
        if isinstance(value, (str, bytes)):
            if not stored and has_many_aliases(value):
                return f"a document may have {MAX_ALIASES} aliases (*name)"
        elif shape is not None and shape.type_name in _NUMBERS and _COUNTED.search(name):
            most = shape.metadata.get("max") or MAX_COUNT
            if isinstance(value, (int, float)) and value > most:
                return f"{name} may be {most} at most here"
    return ""


def has_many_aliases(document: str | bytes) -> bool:
    """Return whether a text, read as YAML, has more than ``MAX_ALIASES`` aliases."""
    if isinstance(document, bytes) and document.startswith(b"PK\x03\x04"):
        return False  # an archive: no reader of YAML takes these characters
    text = document.decode("utf-8", "replace") if isinstance(document, bytes) else document
    if text.count("*") <= MAX_ALIASES or "&" not in text:
        return False
    found = 0
    try:
        for token in yaml.scan(text, yaml.CSafeLoader):
            found += isinstance(token, yaml.AliasToken)
            if found > MAX_ALIASES:
                return True
    except (yaml.YAMLError, ValueError):  # another reader may be less strict
        return len(_ALIAS.findall(text)) > MAX_ALIASES and _ANCHOR.search(text) is not None
    return False


def _leaves(shape: Any, params: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield every value that holds no others, with its shape and the name of the member that it belongs to. Agents
    write deep documents, so this does not recurse."""
    pending = [("", shape, params)]
    while pending:
        name, shape, value = pending.pop()
        if isinstance(value, dict):
            members = getattr(shape, "members", {})
            other = getattr(shape, "value", None)
            pending += [(str(key), members.get(key, other), item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, getattr(shape, "member", None), item) for item in value]
        else:
            yield name, shape, value
