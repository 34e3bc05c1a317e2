"""Changes one field of a command line: every member that botocore's model knows for its operation,
removed, added or given another value.

Values are read as the command line does (shorthand or JSON, texts that hold documents included) and
written back as JSON. Captures (``${step1:Path}``) are kept and exchanged like any other text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from awscli.shorthand import BackCompatVisitor, ShorthandParseError, ShorthandParser
from botocore.model import Shape

from realhf.aws.real_aws.describe_walker import allowed_values as choices
from realhf.aws.real_aws.describe_walker import bounds, element, members, required_members
from realhf.aws.tasks.task import ACCOUNT_ID
from tests.aws.validation.command_line import (
    CAPTURE,
    CommandLine,
    captured_steps,
    masked,
    option_shapes,
    option_words,
    parsed,
    quoted,
    restored,
)

OPEN_POLICY = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"*","Resource":"*"}]}'
"""A policy that lets anybody do anything."""
EVERYWHERE = "0.0.0.0/0"
OTHER_ACCOUNT = "444455556666"
OTHER_REGION = "eu-west-1"
_REGION = "us-east-1"
_OPPOSITES: Mapping[str, str] = MappingProxyType(
    {
        "Allow": "Deny",
        "true": "false",
        "True": "False",
        "Enabled": "Suspended",
        "ENABLED": "DISABLED",
    }
)
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+/\d+")
_DEPTH = 3
"""Deepest structure that is made up; models of some services have no end."""
_ITEMS = 3
"""Most elements of one list that are changed one by one."""
Change = tuple[str, str, Any]
"""Where (a path of members), what was done there, and the changed value."""


@dataclass(frozen=True)
class Words:
    """Holds what values are exchanged for: names, ARNs and captures of the resources that a task
    speaks of."""

    names: tuple[str, ...]
    arns: tuple[str, ...]
    captures: tuple[str, ...]

    @classmethod
    def of(cls, texts: Iterable[str], names: Iterable[str]) -> Words:
        """Collect the words of a task: ``names`` and what stands in ``texts``."""
        texts = list(texts)
        arns = dict.fromkeys(
            arn for text in texts for arn in re.findall(r"arn:aws:[\w:/.*-]+", text)
        )
        captures = dict.fromkeys(capture for text in texts for capture in CAPTURE.findall(text))
        return cls(tuple(dict.fromkeys(names)), tuple(arns), tuple(captures))

    def before(self, place: int) -> Words:
        """Return the words that exist before the command at this place of a list: captures of what
        came earlier."""
        kept = [one for one in self.captures if max(captured_steps(one), default=0) <= place]
        return replace(self, captures=tuple(kept))


def line_changes(line: str, words: Words) -> Iterator[tuple[str, str, str]]:
    """Yield (path, what was done there, changed line) for every change of one field of a
    command."""
    captures: list[str] = []
    command = CommandLine.parse(masked(line, captures))
    inner = replace(words, captures=tuple(masked(capture, captures) for capture in words.captures))
    shapes = option_shapes(command.service, command.operation)
    options = parsed_options(command, shapes)
    for path, what, changed in _members("", shapes, options, inner, 0):
        yield path, restored(what, captures), restored(_written(command, changed), captures)


def with_member(line: str, path: Sequence[str | int], value: str) -> str:
    """Return a command with a value, converted to what the model says, at a path of options,
    members and places in lists; "" where that holds something else."""
    captures: list[str] = []
    command = CommandLine.parse(masked(line, captures))
    shapes = option_shapes(command.service, command.operation)
    changed = _with(parsed_options(command, shapes), path, value, shapes)
    return "" if changed is None else restored(_written(command, changed), captures)


def _with(given: Any, path: Sequence[str | int], value: str, shapes: Mapping[str, Shape]) -> Any:
    step, *rest = path
    if isinstance(step, int):
        return None
    shape = shapes.get(step)
    if not rest:
        return {**(given or {}), step: _typed(shape, value)}
    known = {} if given is None else given
    if not isinstance(known, Mapping) or shape is None:
        return None
    inner = element(shape)
    if shape.type_name == "map":
        return {**known, step: {**known.get(step, {}), str(rest[0]): value}}
    if isinstance(rest[0], int):
        items = list(known[step])
        items[rest[0]] = _with(items[rest[0]], rest[1:], value, members(inner))
        return None if items[rest[0]] is None else {**known, step: items}
    deeper = _with(known.get(step), rest, value, members(shape))
    return None if deeper is None else {**known, step: deeper}


def _typed(shape: Shape | None, value: str) -> Any:
    kind = "" if shape is None else shape.type_name
    if kind == "boolean":
        return value == "true"
    return int(value) if kind in ("integer", "long") else value


def parsed_options(command: CommandLine, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the values of a command's options as the command line reads them, by option; a flag is
    a truth value."""
    options: dict[str, Any] = {}
    for name, values in command.options:
        if not values:
            positive = f"--{name.removeprefix('--no-')}"
            off = name not in shapes and positive in shapes
            options[positive if off else name] = not off
        elif name in shapes:
            options[name] = _value(shapes[name], values)
        else:
            options[name] = values[0] if len(values) == 1 else list(values)
    return options


def _value(shape: Shape, values: Sequence[str]) -> Any:
    """Return the value that the command line makes of an option's words; the words where it could
    not."""
    kind = shape.type_name
    if kind not in ("structure", "list", "map"):
        return (
            int(values[0]) if kind in ("integer", "long") and values[0].isdecimal() else values[0]
        )
    document = parsed(values[0])
    if document is not None:
        return document
    inner = element(shape) if kind == "list" else None
    if inner is not None and inner.type_name not in ("structure", "list", "map"):
        return list(values)
    try:
        found = [ShorthandParser().parse(value) for value in values]
    except ShorthandParseError:
        return values[0]
    whole: Any = found if kind == "list" else found[0]
    BackCompatVisitor().visit(whole, shape)
    return whole


def _written(command: CommandLine, options: Mapping[str, Any]) -> str:
    words = ["aws", command.service, command.operation, *map(quoted, command.arguments)]
    return " ".join([*words, *(option_words(name, value) for name, value in options.items())])


def _members(
    path: str, shapes: Mapping[str, Shape], value: Mapping[str, Any], words: Words, depth: int
) -> Iterator[Change]:
    """Yield the changes of what has named members: each removed, changed, and each missing one
    added."""
    for name, item in value.items():
        place = f"{path}.{name}" if path else name
        yield place, "removed", {key: other for key, other in value.items() if key != name}
        for inner, what, new in changes(place, shapes.get(name), item, words, depth + 1):
            yield inner, what, {**value, name: new}
    for name, shape in shapes.items():
        if name not in value:
            for sample in samples(name, shape, words):
                yield (
                    f"{path}.{name}" if path else name,
                    f"added {_short(sample)}",
                    {**value, name: sample},
                )


def changes(
    path: str, shape: Shape | None, value: Any, words: Words, depth: int = 0
) -> Iterator[Change]:
    """Yield (path, what, changed value) for each change of one field in a value; ``shape`` None: a
    document that no model describes."""
    if depth > 2 * _DEPTH:
        return
    if isinstance(value, str) and (document := parsed(value)) is not None:
        for place, what, new in changes(path, None, document, words, depth + 1):
            yield place, what, json.dumps(new)
    elif isinstance(value, Mapping):
        yield from _map_changes(path, shape, value, words, depth)
    elif isinstance(value, list):
        yield from _list_changes(path, shape, value, words, depth)
    elif isinstance(value, bool):
        yield path, f"{not value}", not value
    elif isinstance(value, int | float):
        yield from ((path, f"{new} for {value}", new) for new in _numbers(shape, value))
    elif isinstance(value, str):
        yield from (
            (path, f"{_short(new)} for {_short(value)}", new)
            for new in _strings(shape, value, words)
        )


def _map_changes(
    path: str, shape: Shape | None, value: Mapping[str, Any], words: Words, depth: int
) -> Iterator[Change]:
    known = members(shape)
    if shape is not None and shape.type_name == "map" and (inner := element(shape)) is not None:
        known = dict.fromkeys([*value, *(choices(shape) or ("other",))], inner)
    yield from _members(path, known, value, words, depth)
    if shape is None and "Statement" in value:
        statements = (
            value["Statement"] if isinstance(value["Statement"], list) else [value["Statement"]]
        )
        yield (
            path,
            "lets anybody do anything as well",
            {**value, "Statement": [*statements, *_open_statement(value)]},
        )


def _open_statement(policy: Mapping[str, Any]) -> list[Any]:
    statements = (
        policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
    )
    first = next((one for one in statements if isinstance(one, Mapping)), {})
    wide = {key: "*" for key in ("Action", "Resource", "Principal") if key in first}
    return [{"Sid": "Wide", "Effect": "Allow", **wide}]


def _list_changes(
    path: str, shape: Shape | None, value: list[Any], words: Words, depth: int
) -> Iterator[Change]:
    inner = element(shape)
    yield path, "emptied", []
    if value:
        yield path, "its last element twice", [*value, value[-1]]
    if len(value) > 1:
        yield path, "reversed", value[::-1]
        for place in range(min(len(value), _ITEMS)):
            yield f"{path}[{place}]", "removed", value[:place] + value[place + 1 :]
    for place, item in enumerate(value[:_ITEMS]):
        for where, what, new in changes(f"{path}[{place}]", inner, item, words, depth + 1):
            yield where, what, [*value[:place], new, *value[place + 1 :]]
            if place == len(value) - 1 and not isinstance(item, Mapping | list):
                yield where, f"beside it, {what}", [*value, new]


def _numbers(shape: Shape | None, value: int | float) -> list[int | float]:
    known = bounds(shape)
    found = [0, 1, value * 2, value + 1, known.get("min"), known.get("max")]
    return list(dict.fromkeys(number for number in found if number is not None and number != value))


def _strings(shape: Shape | None, value: str, words: Words) -> list[str]:
    if known := choices(shape):
        return [other for other in known if other != value]
    found: list[str] = [_OPPOSITES[value]] if value in _OPPOSITES else []
    if value.lstrip("-").isdecimal():
        found += [str(number) for number in _numbers(shape, int(value))]
    if _ADDRESS.fullmatch(value):
        return [other for other in (*found, EVERYWHERE, "10.99.0.0/16") if other != value]
    found += [value.replace(ACCOUNT_ID, OTHER_ACCOUNT), value.replace(_REGION, OTHER_REGION)]
    if value.startswith("arn:"):
        found += islice((arn for arn in words.arns if arn != value), 3)
    elif value.startswith("__capture"):
        return [
            *islice((capture for capture in words.captures if capture != value), 3),
            *words.names[:1],
            "",
        ]
    else:
        found += islice((name for name in words.names if name != value), 3)
        others = [*words.names[1:], "other"]
        found += [
            value.replace(name, other) for name, other in zip(words.names, others, strict=False)
        ]
    found += [f"{value}2", value[:-1], value.upper(), "*", ""]
    return [text for text in dict.fromkeys(found) if text != value]


def samples(name: str, shape: Shape, words: Words, depth: int = 0) -> list[Any]:
    """Return values that a member of this name could have; every value of an enumeration, and none
    for what is deeper than anybody writes."""
    if depth > _DEPTH:
        return []
    kind = shape.type_name
    inner = element(shape)
    if kind == "structure":
        return _structures(shape, words, depth)
    if kind == "list" and inner is not None:
        return [[item] for item in samples(name.removesuffix("s"), inner, words, depth + 1)[:3]]
    if inner is not None:
        keys = choices(shape) or ["other"]
        return [{key: item} for key in keys for item in samples(key, inner, words, depth + 1)[:2]]
    if kind == "boolean":
        return [True, False]
    if kind in ("integer", "long", "float", "double"):
        return list(dict.fromkeys([bounds(shape).get("min", 0), 1, bounds(shape).get("max", 2)]))
    if kind == "timestamp":
        return ["2031-01-01T00:00:00Z"]
    return list(choices(shape)) or _texts(name.lower(), shape, words)


def _structures(shape: Shape, words: Words, depth: int) -> list[Any]:
    known = members(shape)
    least: dict[str, Any] = {}
    for required in required_members(shape):
        found = samples(required, known[required], words, depth + 1)
        if not found:
            return []
        least[required] = found[0]
    rest = [
        {**least, name: sample}
        for name, member in known.items()
        if name not in least
        for sample in samples(name, member, words, depth + 1)[:2]
    ]
    return ([least] if least else []) + rest[:12]


def _texts(name: str, shape: Shape, words: Words) -> list[str]:
    if ("policy" in name or "document" in name) and not name.endswith(("name", "arn", "id")):
        return [OPEN_POLICY]
    if "cidr" in name:
        return [EVERYWHERE]
    if name.endswith("arn"):
        return [*words.arns[:2], f"arn:aws:iam::{OTHER_ACCOUNT}:root"]
    if name.endswith(("name", "id", "key", "identifier")):
        return [*words.captures[:1], *words.names[:2], "other"]
    if name == "path":
        return ["/other/"]
    return ["other".ljust(int(bounds(shape).get("min", 0)), "x"), "1"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
