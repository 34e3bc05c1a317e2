"""Commands that nobody thought of: every operation of the table with hostile values in every place
of its grammar.

A command is drawn from botocore's own models, so that it gets through the CLI's parsers as far as
possible: required parameters are there, values have the right shape, and what is hostile sits where
it becomes a header, a path, a query or a host. The same seed draws the same commands.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import botocore.session
from botocore import xform_name
from botocore.model import MapShape, Shape, StructureShape

from realhf.aws.cli.command_table import ALLOWED

CONFIGURATION_PATHS = (
    "/_ministack/reset",
    "/_ministack/config",
    "/_realhf/reset",
    "/_localstack/health",
)
_NAMES = (
    "survivor",
    "own-thing",
    "jobs",
    "role-one",
    "key.txt",
    "arn:aws:sqs:us-east-1:000000000000:jobs",
)
_FRAGMENTS = (
    "\r\n", "\n", "\r", "\r\n\r\n", "\0", "\t", "\x0b", "\x7f", "\x85", "\u2028", "\u560d\u560a", "\udc80",
    "\U0001f600", "%0d%0a", "%250d%250a", "%00", "%2e%2e%2f", "..", "/../", "//", "\\", "?a=b&", "#", ":", "@", "=",
    ",", ";", "|", "`", "'", '"', "[", "{", "}", "$(touch {marker})", "${IFS}", "~", "*", "&", "x: 1",
    "Host: "
    "{sibling}", "Content-Length: "
                 "0", "Content-Length: 9", "Transfer-Encoding: chunked", "Connection: close",
    "Expect: 100-continue", "HTTP/1.1", "GET / HTTP/1.1", "POST {path} HTTP/1.1", "{path}",
    "X-Amz-Target: "
    "DynamoDB_20120810.ListTables", "file://{secret}", "fileb://{secret}", "{url}", "http://{sibling}",
    "s3://survivor/_ministack", "{secret}", "{marker}", "-", "--endpoint-url", "!!python/object:os.system",
    "&x [*x,*x]", "0" * 40, "A" * 3000, "\u0130\u0131\u017f", "",
)  # fmt: skip
_SMUGGLED = (
    "x: 1\r\nContent-Length: 0\r\n\r\nPOST {path} HTTP/1.1\r\nX-Y",
    "x\r\n\r\nGET {path} HTTP/1.1\r\nHost: localhost:4566\r\n\r\n",
    "0\r\n\r\nPOST {path} HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nPOST {path} HTTP/1.1\r\n\r\n",
    " HTTP/1.1\r\nHost: x\r\n\r\nPOST {path} HTTP/1.1\r\nHost: x\r\n\r\n",
)
_NUMBERS = (0, 1, -1, 60, 2**31, 2**63, -(2**63), 10**400, 1.5, 1e308)
_TIMES = ("2026-01-01", "0", "-1", "9" * 30, "2026-13-45T99:99:99Z", "now")
_TRANSFER_ENDS = (
    "s3://survivor",
    "s3://survivor/k",
    "s3://own-thing/",
    "key.txt",
    ".",
    "-",
    "s3://",
)
_WHERE_IT_HURTS: Mapping[str, float] = MappingProxyType(
    {"headers": 0.8, "header": 0.35, "uri": 0.35, "querystring": 0.35}
)
"""How often an optional parameter is given that leaves outside the body, by the place where it
leaves."""
_SELDOM = 0.12
_FAVOURED = (frozenset({"headers"}), frozenset({"header", "uri", "querystring"}))
"""Places whose operations are drawn more often: few let an agent name a header, and that is where
it hurts."""
_MAX_OPTIONAL = 6
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Command:
    """``line``: as an agent would write it; ``words``: the same without ``aws``, as a shell splits
    it."""

    line: str
    words: tuple[str, ...]


class CommandGrammar:
    """Draws commands over ``services`` (CLI names; None: all of the table). ``places`` fills
    ``{secret}``, ``{marker}``, ``{url}`` and ``{sibling}``: what must not be read, written or
    called."""

    def __init__(
        self, seed: int, places: Mapping[str, str], services: Iterable[str] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._places = dict(places)
        chosen = sorted(ALLOWED) if services is None else sorted(services)
        self._pairs = [(service, name) for service in chosen for name in sorted(ALLOWED[service])]
        self._favourites = [
            [pair for pair in self._pairs if places & _locations(*pair)] for places in _FAVOURED
        ]

    def draw(self) -> Command:
        """The next command."""
        favourites = self._random.choice(self._favourites) if self._random.random() < 0.4 else []
        service, operation = self._random.choice(favourites or self._pairs)
        words = self._transfer(operation) if service == "s3" else self._call(service, operation)
        words = [service, operation, *words, *self._globals()]
        if self._random.random() < 0.1:
            self._random.shuffle(words)
        words = [
            word.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass") for word in words
        ]
        return Command(self._wrap(f"aws {self._quoted(words)}"), tuple(words))

    def _wrap(self, line: str) -> str:
        """Mostly one line; sometimes several, in a fence or behind a prompt."""
        style = self._random.random()
        if style < 0.8:
            return line
        if style < 0.95:
            parts = line.split(" ")
            joins = self._random.choices(
                (" ", " \\\n  ", "\\\r\n", "\n", "\\ \n"), (8, 4, 1, 1, 1), k=len(parts)
            )
            line = "".join(part + join for part, join in zip(parts, joins, strict=True))
        forms = ("{}", "$ {}", "`{}`", "```{}```", "```bash\n{}\n```", "```\n$ {}\naws s3 ls\n```")
        return self._random.choice(forms).replace("{}", line)

    def _quoted(self, words: Sequence[str]) -> str:
        """Mostly as a careful shell user writes it; sometimes in double quotes or not at all."""
        style = self._random.random()
        if style < 0.85:
            return shlex.join(words)
        if style < 0.95:
            return " ".join(
                '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"' for word in words
            )
        return " ".join(words)

    def _transfer(self, operation: str) -> list[str]:
        ends = [
            self._mutated(self._random.choice(_TRANSFER_ENDS))
            for _ in range(self._random.randint(0, 2))
        ]
        options = [
            "--recursive",
            "--dryrun",
            "--delete",
            "--content-type",
            "--metadata",
            "--website-redirect",
        ]
        extra = self._random.sample(options, self._random.randint(0, 2))
        return [*ends, *(part for option in extra for part in self._transfer_option(option))]

    def _transfer_option(self, option: str) -> list[str]:
        if option == "--metadata":
            return [option, json.dumps({self._hostile(): self._hostile()})]
        return (
            [option, self._hostile()]
            if option in ("--content-type", "--website-redirect")
            else [option]
        )

    def _call(self, service: str, operation: str) -> list[str]:
        shape = _input_shape(service, operation)
        if shape is None:
            return []
        members = self._members(shape)
        if self._random.random() < 0.06:
            text = json.dumps(
                {name: self._value(member, 0) for name, member in members.items()}, default=str
            )
            return [
                self._random.choice(("--cli-input-json", "--cli-input-yaml", "--cli-input-js")),
                text,
            ]
        words = []
        for name, member in members.items():
            if name != "DryRun":  # a rehearsal is no evidence, and leaves none
                words += self._option(name, member)
        return words

    def _members(self, shape: StructureShape) -> dict[str, Shape]:
        optional = [name for name in shape.members if name not in shape.required_members]
        chances = {
            name: _WHERE_IT_HURTS.get(_location(shape.members[name]), _SELDOM) for name in optional
        }
        some = [name for name, chance in chances.items() if self._random.random() < chance]
        required = [name for name in shape.required_members if self._random.random() < 0.97]
        some.sort(key=lambda name: -chances[name])
        return {name: shape.members[name] for name in [*required, *some[:_MAX_OPTIONAL]]}

    def _option(self, name: str, member: Shape) -> list[str]:
        option = f"--{xform_name(name, '-')}"
        if self._random.random() < 0.05:
            option = option[: self._random.randint(4, len(option))]
        if member.type_name == "boolean":
            return [option if self._random.random() < 0.6 else option.replace("--", "--no-", 1)]
        if member.type_name == "list" and self._random.random() < 0.4:
            return [
                option,
                *(
                    self._text(self._value(member.member, 1))
                    for _ in range(self._random.randint(1, 3))
                ),
            ]  # type: ignore[attr-defined]
        value = self._value(member, 0)
        text = self._shorthand(value) if self._random.random() < 0.3 else self._text(value)
        return [f"{option}={text}"] if self._random.random() < 0.2 else [option, text]

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=self._random.random() < 0.7, default=str)

    def _shorthand(self, value: Any) -> str:
        if isinstance(value, dict):
            sign = "@=" if self._random.random() < 0.1 else "="
            return ",".join(f"{key}{sign}{self._shorthand(item)}" for key, item in value.items())
        if isinstance(value, list):
            return f"[{','.join(self._shorthand(item) for item in value)}]"
        return str(value)

    def _value(self, shape: Shape, depth: int) -> Any:
        kind = shape.type_name
        if depth > _MAX_DEPTH:
            return self._hostile()
        if isinstance(shape, StructureShape):
            return {
                name: self._value(member, depth + 1)
                for name, member in self._members(shape).items()
            }
        if isinstance(shape, MapShape):
            pairs = range(self._random.randint(1, 2))
            return {self._string(shape.key): self._value(shape.value, depth + 1) for _ in pairs}
        if kind == "list":
            return [self._value(shape.member, depth + 1) for _ in range(self._random.randint(1, 2))]  # type: ignore[attr-defined]
        if kind in ("integer", "long", "float", "double") and self._random.random() < 0.8:
            return self._random.choice(_NUMBERS[:4] if self._random.random() < 0.6 else _NUMBERS)
        if kind == "boolean" and self._random.random() < 0.8:
            return self._random.random() < 0.5
        if kind == "timestamp" and self._random.random() < 0.7:
            return self._random.choice(_TIMES)
        return self._string(shape)

    def _string(self, shape: Shape) -> str:
        known = getattr(shape, "enum", None)
        if known and self._random.random() < 0.7:
            return self._random.choice(known)
        return self._random.choice(_NAMES) if self._random.random() < 0.5 else self._hostile()

    def _hostile(self) -> str:
        if self._random.random() < 0.25:
            return self._filled(self._random.choice(_SMUGGLED))
        parts = [self._random.choice(_FRAGMENTS) for _ in range(self._random.randint(1, 4))]
        return self._filled("".join(parts))

    def _mutated(self, text: str) -> str:
        if self._random.random() < 0.4:
            return text
        place = self._random.randint(0, len(text))
        return text[:place] + self._hostile() + text[place:]

    def _filled(self, text: str) -> str:
        for name, value in {
            **self._places,
            "path": self._random.choice(CONFIGURATION_PATHS),
        }.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _globals(self) -> list[str]:
        if self._random.random() < 0.85:
            return []
        return self._random.choice(
            [
                ["--query", self._hostile()],
                ["--output", self._random.choice(("text", "table", self._hostile()))],
                ["--region", self._hostile()],
                ["--endpoint-url", self._filled("http://{sibling}")],
                ["--no-paginate"],
                ["--max-items", "3"],
                ["--page-size", "1"],
                ["--starting-token", self._hostile()],
                ["--debug"],
                ["--generate-cli-skeleton", "output"],
                ["--profile", self._hostile()],
                ["--no-cli-pager"],
            ]
        )


def _location(shape: Shape) -> str:
    return str(shape.serialization.get("location", "body"))


@cache
def _locations(service: str, operation: str) -> frozenset[str]:
    shape = None if service == "s3" else _input_shape(service, operation)
    return frozenset() if shape is None else frozenset(map(_location, shape.members.values()))


@cache
def _models() -> botocore.session.Session:
    return botocore.session.Session()


@cache
def _service_operations(service: str) -> Mapping[str, str]:
    return {
        xform_name(name, "-"): name for name in _models().get_service_model(service).operation_names
    }


def _input_shape(service: str, operation: str) -> StructureShape | None:
    service = "s3" if service == "s3api" else service
    name = _service_operations(service).get(operation)
    return (
        None
        if name is None
        else _models().get_service_model(service).operation_model(name).input_shape
    )
