"""Selectors that MiniStack ignores: they are applied to its answers here, or refused.

A selector restricts the resources that a read returns. If it is ignored, the answer contains too
much, and nothing shows it. For every read operation that agents can use, ``selectors.json`` states
which of its selectors are refused, and which EC2 filters are applied here, with the place of the
value to compare. ``python -m tests.aws.validation.conformance --write`` creates it by trying each
selector. ``narrowings.yaml`` contains the other selectors that are applied here. Both apply to the
requests of agents and of tasks' command lines, but not to the owner's requests.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import yaml

from realhf.aws.simulator.asgi_http import AsgiApp

TABLE = Path(__file__).with_name("selectors.json")
"""The package's table of selectors."""
_NARROWINGS = Path(__file__).with_name("narrowings.yaml")
Rule = Literal["equal", "prefix", "path of the ARN", "not zero", "tag", "glob"]
"""How a resource's value is compared with the requested values."""


@dataclass(frozen=True)
class Narrowing:
    """A selector that is applied to the answer: resources without a requested value are left
    out."""

    service: str
    """Service name in the signature of requests."""
    operation: str
    """The read operation."""
    member: str
    """The selector's name in botocore's model and in requests."""
    items: tuple[str, ...]
    """Path of the resources in the answer, as names of nested lists."""
    place: str
    """Path of the value within a resource, as names joined by dots."""
    rule: Rule
    """How the value is compared."""
    page: str
    """Link to the AWS documentation."""
    filter: str = ""
    """Name of the filter, if the member is a list of filters. ``tag:`` stands for all tags."""
    unknown: tuple[str, str] | None = None
    """(code, message) of the error that AWS returns for a value that no resource has. None if AWS
    returns no error."""


@cache
def read_narrowings() -> tuple[Narrowing, ...]:
    """Return the selectors in ``narrowings.yaml``. Raises ValueError that shows the row if one is
    malformed."""
    selectors = []
    for row in yaml.load(_NARROWINGS.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader):
        try:
            service, operation = row["at"].split()
            unknown = tuple(row["unknown"]) if "unknown" in row else None
            rest = {
                name: value for name, value in row.items() if name not in ("at", "items", "unknown")
            }
            selectors.append(
                Narrowing(service, operation, items=(row["items"],), unknown=unknown, **rest)
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{_NARROWINGS}: {row}: {error!r}") from None
    return tuple(selectors)


Receive = Callable[[], Awaitable[dict[str, Any]]]
_SIGNED_FOR = re.compile(rb"Credential=[^/]*/\d+/[^/]+/([\w-]+)/aws4_request")
"""Finds the service in a signature."""
_EC2_PAGE = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/"
"""Link to EC2's API documentation."""
_UNSUPPORTED = {
    "query": "InvalidParameterValue",
    "ec2": "InvalidParameterValue",
    "rest-xml": "InvalidArgument",
}
"""Error codes for a refused selector, for the protocols whose code is not ``_INVALID``."""
_INVALID = "ValidationException"


def read_selector_table() -> dict[str, Any]:
    """Return the table of selectors, by the service name in the signature of requests.

    An entry has the keys ``protocol`` and ``operations``. An operation has ``at`` (method and path,
    if the protocol identifies operations by them), ``items`` (EC2 only, as in ``Narrowing``) and
    ``members``. A member has ``place`` (form, body, query or header), ``name`` (in requests),
    ``option`` (the CLI's option, for error messages) and ``accepted`` (values that mean the same as
    no selector). A list of filters has ``kept`` (the filters that MiniStack applies) and
    ``narrowed`` (the filters applied here, with the place of the value).
    """
    return json.loads(TABLE.read_text())


class SelectorGate:
    """ASGI middleware between agents and MiniStack that applies or refuses selectors."""

    def __init__(self, app: AsgiApp, table: Mapping[str, Any]) -> None:
        self._app = app
        self._services = {
            service.encode(): _Service(service, entry) for service, entry in table.items()
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Any) -> None:
        """Refuse a request, or pass it on unchanged and filter the answer."""
        headers = dict(scope.get("headers", ()))
        signed = _SIGNED_FOR.search(headers.get(b"authorization", b""))
        service = self._services.get(signed[1]) if signed else None
        if service is None:
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        waiting = iter(messages)

        async def replay() -> dict[str, Any]:
            message = next(waiting, None)
            return await receive() if message is None else message

        match = service.read(
            scope, headers, b"".join(message.get("body", b"") for message in messages)
        )
        if match is None:
            await self._app(scope, replay, send)
            return
        operation, request = match
        refused = operation.find_refused(request)
        if refused:
            await _answer(
                send,
                *service.error(
                    service.unsupported, f"{refused} is not supported by this simulator"
                ),
            )
            return
        requested = operation.requested_narrowings(request)
        await self._app(
            scope, replay, _AnswerFilter(send, service, requested).send if requested else send
        )


RequestParts = Mapping[str, Mapping[str, Any]]
"""Contents of a request, by place: form, body, query, header."""
RequestedNarrowing = tuple[Narrowing, str, list[str]]
"""(narrowing, requested filter name, requested values)."""


class _Service:
    """The selectors of one service."""

    def __init__(self, name: str, entry: Mapping[str, Any]) -> None:
        self.protocol: str = entry["protocol"]
        self.unsupported = _UNSUPPORTED.get(self.protocol, _INVALID)
        self._operations = {
            operation: _Operation(name, operation, description)
            for operation, description in entry["operations"].items()
        }
        self._paths = [
            (description["at"][0], _path_pattern(description["at"][1]), self._operations[operation])
            for operation, description in entry["operations"].items()
            if "at" in description
        ]

    def read(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], body: bytes
    ) -> tuple[_Operation, RequestParts] | None:
        """Return (operation, contents) of a request, or None for an operation that is not in the
        table."""
        if self.protocol in ("query", "ec2"):
            form = parse_qs(body.decode("utf-8", "replace"))
            operation = self._operations.get(form.get("Action", [""])[0])
            return operation and (operation, {"form": form})
        if self.protocol == "json":
            operation = self._operations.get(
                headers.get(b"x-amz-target", b"").decode("latin-1").rpartition(".")[2]
            )
            return operation and (operation, {"body": _parse_object(body)})
        for method, pattern, operation in self._paths:
            if scope["method"] == method and pattern.fullmatch(scope["path"]):
                query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
                names = {
                    name.decode("latin-1"): value.decode("latin-1")
                    for name, value in headers.items()
                }
                return operation, {"query": query, "header": names, "body": _parse_object(body)}
        return None

    def error(self, code: str, message: str) -> tuple[int, bytes, bytes]:
        """Return (status, content type, body) of an error in AWS's format."""
        if self.protocol in ("json", "rest-json"):
            return (
                400,
                b"application/json",
                json.dumps({"__type": code, "code": code, "message": message}).encode(),
            )
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message></Error>"
        outer = (
            "<Response><Errors>{}</Errors></Response>"
            if self.protocol == "ec2"
            else "<ErrorResponse>{}</ErrorResponse>"
        )
        return 400, b"text/xml", outer.format(error).encode()


class _Operation:
    """The selectors of one read operation."""

    def __init__(self, service: str, name: str, description: Mapping[str, Any]) -> None:
        self._members: Sequence[Mapping[str, Any]] = description["members"]
        self._narrowings = [
            narrowing
            for narrowing in read_narrowings()
            if (narrowing.service, narrowing.operation) == (service, name)
        ]
        items = tuple(description.get("items", ()))
        for member in self._members:
            for filter_name, place in member.get("narrowed", {}).items():
                rule: Rule = "tag" if filter_name == "tag:" else "glob"
                self._narrowings.append(
                    Narrowing(
                        service, name, member["name"], items, place, rule, _EC2_PAGE, filter_name
                    )
                )

    def find_refused(self, request: RequestParts) -> str:
        """Return the first selector in a request that is refused, by the name of its CLI option, or
        "" if there is none."""
        for member in self._members:
            carried = request.get(member["place"], {})
            if "kept" in member:
                known = {*member["kept"], *member.get("narrowed", ())}
                known |= {
                    each.filter
                    for each in self._narrowings
                    if each.filter and each.member == member["name"]
                }
                for name, _ in _filters(member["name"], carried):
                    if name not in known and not (name.startswith("tag:") and "tag:" in known):
                        return f"the filter {name!r} of {member['option']}"
            elif set(_values(member["name"], carried)) - set(member.get("accepted", ())):
                return member["option"]
        return ""

    def requested_narrowings(self, request: RequestParts) -> list[RequestedNarrowing]:
        """Return the narrowings that a request asks for."""
        requested: list[RequestedNarrowing] = []
        for each in self._narrowings:
            for carried in request.values():
                if not each.filter:
                    values = _values(each.member, carried)
                    requested += [(each, "", values)] if values else []
                    continue
                requested += [
                    (each, name, values)
                    for name, values in _filters(each.member, carried)
                    if name == each.filter or (each.filter == "tag:" and name.startswith("tag:"))
                ]
        return requested


def _path_pattern(template: str) -> re.Pattern[str]:
    """Return a regular expression for an operation's request paths, given botocore's path
    template."""
    parts = re.split(r"\{\w+(\+?)\}", template.partition("?")[0])
    pattern = "".join(
        re.escape(part) if place % 2 == 0 else ".+" if part else "[^/]+"
        for place, part in enumerate(parts)
    )
    return re.compile(pattern.rstrip("/") + "/?")


def _parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, or {} for anything else."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _values(name: str, carried: Mapping[str, Any]) -> list[str]:
    """Return the values of a member as strings, from a form, a query, a header or JSON. A false
    flag counts as absent."""
    value_or_list = carried.get(name)
    listed = (
        value_or_list
        if isinstance(value_or_list, list)
        else []
        if value_or_list is None
        else [value_or_list]
    )
    numbered = re.compile(rf"{re.escape(name)}\.(?:\w+\.)*\d+(?:\..*)?")
    numbered_values = [
        value for key, values in carried.items() if numbered.fullmatch(key) for value in values
    ]
    texts = [
        str(value).lower() if isinstance(value, bool) else str(value)
        for value in [*listed, *numbered_values]
    ]
    return [text for text in texts if text != "false"]


def _filters(name: str, carried: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, values) for each filter in a request, from a form or JSON."""
    listed = carried.get(name)
    if isinstance(listed, list) and all(isinstance(item, dict) for item in listed):
        for item in listed:
            values = item.get("Values", item.get("value", []))
            yield (
                str(item.get("Name") or item.get("Key") or item.get("key")),
                [str(value) for value in (values if isinstance(values, list) else [values])],
            )
        return
    named = re.compile(rf"({re.escape(name)}\.(?:\w+\.)*?\d+)\.(?:Name|Key)")
    for key, values in carried.items():
        match = named.fullmatch(key)
        if match:
            value_pattern = re.compile(rf"{re.escape(match[1])}\.Values?\.(?:\w+\.)?\d+")
            yield (
                values[0],
                [
                    value
                    for other, texts in carried.items()
                    if value_pattern.fullmatch(other)
                    for value in texts
                ],
            )


class _AnswerFilter:
    """ASGI ``send`` callable that collects an answer and sends it on with only the requested
    resources."""

    def __init__(self, send: Any, service: _Service, requested: list[RequestedNarrowing]) -> None:
        self._send = send
        self._service = service
        self._requested = requested
        self._start: dict[str, Any] = {}
        self._body = bytearray()

    async def send(self, message: dict[str, Any]) -> None:
        """Store an ASGI message of the answer. After the last one, send the filtered answer."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body.extend(message.get("body", b""))
        if message.get("more_body"):
            return
        body = bytes(self._body)
        if self._start["status"] == 200:
            answer = (
                _JsonAnswer(body)
                if self._service.protocol in ("json", "rest-json")
                else _XmlAnswer(body)
            )
            for narrowing, name, values in self._requested:
                missing = answer.narrow(narrowing, name, values)
                if missing and narrowing.unknown:
                    code, text = narrowing.unknown
                    await _answer(self._send, *self._service.error(code, text.format(missing[0])))
                    return
            body = answer.to_bytes()
        headers = [
            (name, value)
            for name, value in self._start["headers"]
            if name.lower() != b"content-length"
        ]
        await self._send({**self._start, "headers": headers})
        await self._send({**message, "body": body})


class _JsonAnswer:
    """A JSON response of a list operation, from which resources can be removed."""

    def __init__(self, body: bytes) -> None:
        self._content = _parse_object(body)

    def narrow(self, narrowing: Narrowing, name: str, values: list[str]) -> list[str]:
        """Remove the resources that have none of the values. Return the values that no resource
        has."""
        (items,) = narrowing.items
        listed = self._content.get(items) or []
        kept = [item for item in listed if _has_value(narrowing, name, values, item)]
        self._content[items] = kept
        return [
            value
            for value in values
            if not any(_has_value(narrowing, name, [value], item) for item in kept)
        ]

    def to_bytes(self) -> bytes:
        """Return the answer, encoded."""
        return json.dumps(self._content).encode()


class _XmlAnswer:
    """An XML answer that can be narrowed."""

    def __init__(self, body: bytes) -> None:
        self._root = ElementTree.fromstring(body)
        space, brace, _ = self._root.tag.rpartition("}")
        if brace:  # write the default namespace once, at the root, so that no name gets a prefix
            for element in self._root.iter():
                element.tag = element.tag.removeprefix(f"{space}}}")
            self._root.set("xmlns", space[1:])

    def narrow(self, narrowing: Narrowing, name: str, values: list[str]) -> list[str]:
        """Remove the resources that have none of the values. Return the values that no resource
        has."""
        missing = set(values)
        for outer in [
            element for element in self._root.iter() if _local_name(element) == narrowing.items[0]
        ]:
            for listed in [outer] if len(narrowing.items) == 1 else [*outer]:
                for item in self._find_lists(listed, narrowing.items[1:]):
                    for element in [*item]:
                        content = _as_data(element)
                        missing -= {
                            value
                            for value in missing
                            if _has_value(narrowing, name, [value], content)
                        }
                        if not _has_value(narrowing, name, values, content):
                            item.remove(element)
                if len(narrowing.items) > 1 and not any(
                    len(item) for item in self._find_lists(listed, narrowing.items[1:])
                ):
                    outer.remove(listed)
        return [value for value in values if value in missing]

    @staticmethod
    def _find_lists(
        element: ElementTree.Element, names: Sequence[str]
    ) -> list[ElementTree.Element]:
        """Return the child elements whose name is the first of ``names``, or the element itself if
        there are no names."""
        return (
            [child for child in element if _local_name(child) == names[0]] if names else [element]
        )

    def to_bytes(self) -> bytes:
        """Return the answer, encoded."""
        return ElementTree.tostring(self._root, encoding="utf-8", xml_declaration=True)


def _local_name(element: ElementTree.Element) -> str:
    """Return an element's name without the namespace."""
    return element.tag.rpartition("}")[2]


def _as_data(element: ElementTree.Element) -> Any:
    """Return an element as dicts, lists and strings."""
    children = [*element]
    if not children:
        return element.text or ""
    if all(_local_name(child) in ("item", "member") for child in children):
        return [_as_data(child) for child in children]
    return {_local_name(child): _as_data(child) for child in children}


def _has_value(narrowing: Narrowing, name: str, values: list[str], item: Any) -> bool:
    """Return whether a resource has one of the values, compared by the narrowing's rule. ``name``:
    the requested filter's name."""
    if narrowing.rule == "tag":
        tag = name.removeprefix("tag:")
        tags = list(_values_at(item, narrowing.place.split(".")))
        pairs = [
            {key.lower(): text for key, text in each.items()}
            for each in tags
            if isinstance(each, dict)
        ]
        item_values = [pair.get("value", "") for pair in pairs if pair.get("key") == tag]
    else:
        item_values = [str(text) for text in _values_at(item, narrowing.place.split("."))]
    match narrowing.rule:
        case "prefix":
            return any(text.startswith(value) for text in item_values for value in values)
        case "path of the ARN":
            paths = [
                "/" + text.partition(":policy/")[2].rpartition("/")[0] + "/" for text in item_values
            ]
            return any(
                path.replace("//", "/").startswith(value) for path in paths for value in values
            )
        case "not zero":
            return any(text not in ("", "0") for text in item_values)
        case "equal":
            return any(text in values for text in item_values)
        case _:
            return any(
                fnmatch.fnmatchcase(text, _fnmatch_pattern(value))
                for text in item_values
                for value in values
            )


def _fnmatch_pattern(value: str) -> str:
    """Return a filter value as an fnmatch pattern."""
    return value.replace("[", "[[]")  # EC2 has only * and ? as wildcards


def _values_at(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path. A list on the way stands for each of its elements."""
    if isinstance(value, list):
        for each in value:
            yield from _values_at(each, names)
    elif not names:
        yield value
    elif isinstance(value, dict) and names[0] in value:
        yield from _values_at(value[names[0]], names[1:])


async def _answer(send: Any, status: int, kind: bytes, body: bytes) -> None:
    """Send a complete response. ``kind``: its content type."""
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
    )
    await send({"type": "http.response.body", "body": body})
