"""Compares what two accounts answer to list and describe calls, without regard to generated ids:
each stands for what is said of its owner."""

import functools
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from realhf.aws.real_aws.describe_walker import ID, Answers, inner_noun, noun_of, own_names

_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d|\d{8}T\d{6}Z")
_DAY_S = 86_400.0
_VOLATILE = frozenset(
    {
        "sid",
        "etag",
        "revisionid",
        "clientrequesttoken",
        "creationtoken",
        "callerreference",
        "locktoken",
    }
)
_HARMLESS = re.compile(r"\.(tags?|taglist|tagset|description)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Said:
    """Is one leaf of an answer, in a form that two accounts share when they differ in times and
    generated ids alone: an id is written as a digest of what is said of its owner. ``arguments`` is
    JSON, ``subject`` names what in the answer the leaf belongs to."""

    operation: str
    arguments: str
    subject: str
    path: str
    value: str

    def __str__(self) -> str:
        return f"{self.operation} {self.arguments} {self.subject}{self.path} = {self.value}"


def told(answers: Answers) -> frozenset[Said]:
    """Return all that the answers say. An error says nothing."""
    marks = _marks(answers)

    def known(text: str) -> str:
        return ID.sub(lambda match: f"#{marks.get(match[0], '')}", text)

    found: set[Said] = set()
    for key, answer in answers.items():
        if set(answer) == {"error"}:
            continue
        operation, arguments = key.split(" ", 1)
        leaves = _leaves(answer, noun_of(operation.split(":")[1].split("/")[0]), "", "")
        for subject, path, value in [("", "", "an answer"), *leaves]:
            texts = (arguments, subject, path, json.dumps(value))
            found.add(Said(operation, *map(known, texts)))
    return frozenset(found)


def disagreements(
    start: frozenset[Said], target: frozenset[Said], end: frozenset[Said]
) -> list[str]:
    """Say what an account tells otherwise than the target: everything that it lacks, what should be
    gone, and what it has more of things that ``start``, the account before, or the target has as
    well. Tags, descriptions and things of one's own are left out."""
    known = start | target
    subjects = {(one.operation, one.subject) for one in known if one.arguments == "{}"}
    things = {value for one in known for value in _values(one.arguments)}

    def counts(one: Said) -> bool:
        if one in start or one.arguments == "{}":
            return one in start or (one.operation, one.subject) in subjects
        return not things.isdisjoint(_values(one.arguments))

    more = [one for one in end - target if counts(one) and not _HARMLESS.search(one.path)]
    return sorted([f"- {one}" for one in target - end] + [f"+ {one}" for one in more])


@functools.lru_cache(maxsize=4096)
def _values(arguments: str) -> tuple[str, ...]:
    values = json.loads(arguments).values()
    return tuple(
        item for value in values for item in (value if isinstance(value, list) else [value])
    )


def _marks(answers: Answers) -> dict[str, str]:
    """Return for each generated id a digest of what is said of its owner; of one without, of who
    mentions it."""
    owned: dict[str, list[tuple[str, str]]] = {}
    mentioned: dict[str, list[tuple[str, str]]] = {}
    for key, answer in answers.items():
        operation = key.split(" ", 1)[0]
        for noun, part in _structures(answer, noun_of(operation.split(":")[1].split("/")[0])):
            text = json.dumps(part, sort_keys=True)
            own = {name for _, value in own_names(part, noun) for name in ID.findall(value)}
            for name in set(ID.findall(text)):
                (owned if name in own else mentioned).setdefault(name, []).append((operation, text))
    marks: dict[str, str] = {}
    for _ in range(3):
        marks = {name: _digest(said, marks) for name, said in {**mentioned, **owned}.items()}
    return marks


def _digest(said: Iterable[tuple[str, str]], marks: Mapping[str, str]) -> str:
    lines = {
        f"{where} {ID.sub(lambda match: marks.get(match[0], ''), text)}" for where, text in said
    }
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:7]


def _structures(value: Any, noun: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (what it is about, scalars) of every structure, volatile and harmless ones left out."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if not _HARMLESS.search(f".{key}")}
        scalars = {key: item for key, item in kept.items() if not isinstance(item, Mapping | list)}
        yield noun, {key: item for key, item in scalars.items() if _lasts(key, item)}
        for key, item in kept.items():
            yield from _structures(item, inner_noun(key, noun))
    elif isinstance(value, list):
        for item in value:
            yield from _structures(item, noun)


def _lasts(key: str, value: Any) -> bool:
    """Return whether a value says something of the account, rather than when or how often something
    was done."""
    if key.lower() in _VOLATILE or value in ("", None):
        return False
    if key == "Version" and isinstance(value, int):
        return False  # how often it was written
    if isinstance(value, str):
        found = _TIME.search(value)
        if found:
            return "X-Amz-Date" not in value and not _is_now(
                datetime.fromisoformat(found[0]).timestamp()
            )
        return not (value.isdecimal() and len(value) in (10, 13) and _is_now(int(value)))
    return isinstance(value, bool) or not isinstance(value, int | float) or not _is_now(value)


def _is_now(number: float) -> bool:
    now = time.time()
    return abs(number - now) < _DAY_S or abs(number / 1000 - now) < _DAY_S


def _leaves(value: Any, noun: str, subject: str, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (subject, path, value) of every leaf; a structure that names itself is the subject of
    what it holds."""
    if isinstance(value, Mapping):
        own = own_names(value, noun)
        subject = f"{subject}[{own[0][1]}]" if own else subject
        for key, item in value.items():
            if isinstance(item, Mapping | list) or _lasts(key, item):
                yield from _leaves(item, inner_noun(key, noun), subject, f"{path}.{key}")
    elif isinstance(value, list):
        for item in value:
            names_itself = not path.count(".") > 1 and not isinstance(item, Mapping | list)
            yield from _leaves(item, noun, f"{subject}[{item}]" if names_itself else subject, path)
    else:
        yield subject, path, value
