"""Selectors that MiniStack ignores: applied to its answers here, or refused.

A selector restricts the resources that a read returns. If it is ignored, the answer contains too
much without notice. ``selectors.json`` states for every read operation that agents can use which of
its selectors are refused, and which filters of EC2 are applied here, with the place of their value;
``python -m tests.aws.validation.conformance --write`` creates it by trying each of them.
``narrowings.yaml`` contains other selectors that are applied here. Both affect the requests of
agents and of tasks' command lines; the owner's requests bypass them.
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
"""The table of the package."""
_NARROWINGS = Path(__file__).with_name("narrowings.yaml")
Rule = Literal["equal", "prefix", "path of the ARN", "not zero", "tag", "glob"]
"""How a value is compared with the requested ones."""


@dataclass(frozen=True)
class Narrowing:
    """A selector that is applied to the answer: resources with other values are left out."""

    service: str
    """Service in the signature of requests."""
    operation: str
    """The read operation."""
    member: str
    """Name of the selector in botocore's model and on the wire."""
    items: tuple[str, ...]
    """Path of the resources in the answer: names of nested lists."""
    place: str
    """Path of the value within a resource, names joined by dots."""
    rule: Rule
    """How the value is compared."""
    page: str
    """Link to the documentation of AWS."""
    filter: str = ""
    """Name of the filter, if the member is a list of filters; ``tag:`` for all tags."""
    unknown: tuple[str, str] | None = None
    """Code and message of the error for a value that no resource has, if AWS returns one."""


@cache
def read_narrowings() -> tuple[Narrowing, ...]:
    """Return the selectors of ``narrowings.yaml``. Raises ValueError with the row for a malformed
    one."""
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
"""The service in a signature."""
_EC2_PAGE = "https://docs.aws.amazon.com/AWSEC2/latest/APIReference/"
"""Link to the documentation of EC2."""
_UNSUPPORTED = {
    "query": "InvalidParameterValue",
    "ec2": "InvalidParameterValue",
    "rest-xml": "InvalidArgument",
}
"""Error code of a refused selector by protocol, where it is not ``_INVALID``."""
_INVALID = "ValidationException"


def read_selector_table() -> dict[str, Any]:
    """Return the table, by the service in the signature of requests.

    An entry has the keys ``protocol`` and ``operations``. An operation has ``at`` (method and path,
    for protocols that identify it so), ``items`` (EC2 only) and ``members``. A member has
    ``place``, ``name`` on the wire, ``option`` of the CLI in refusals, the values ``accepted``
    because they mean the same as none, and for filters ``kept`` (applied by MiniStack) and
    ``narrowed`` (place by name).
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
        """Refuse a request, or pass it on unchanged and filter its answer."""
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
"""Contents of a request by place (form, body, query, header)."""
RequestedNarrowing = tuple[Narrowing, str, list[str]]
"""A narrowing, the requested name of the filter, and the requested values."""


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
        """Return the operation and the contents of a request; None for an operation that is not in
        the table."""
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
        """Return status, content type and body of an error in the format of AWS."""
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
        """Return the refused selector of a request, as the CLI calls it; "" for none."""
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
    """Return the pattern of the request paths of an operation, from botocore's template."""
    parts = re.split(r"\{\w+(\+?)\}", template.partition("?")[0])
    pattern = "".join(
        re.escape(part) if place % 2 == 0 else ".+" if part else "[^/]+"
        for place, part in enumerate(parts)
    )
    return re.compile(pattern.rstrip("/") + "/?")


def _parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object, {} for anything else."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _values(name: str, carried: Mapping[str, Any]) -> list[str]:
    """Return the values of a member, from a form, a query, a header or JSON. A false flag counts as
    absent."""
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
    """Yield (name, values) of the filters in a request, from a form or JSON."""
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
    """Collects an answer and sends it on with only the requested resources."""

    def __init__(self, send: Any, service: _Service, requested: list[RequestedNarrowing]) -> None:
        self._send = send
        self._service = service
        self._requested = requested
        self._start: dict[str, Any] = {}
        self._body = bytearray()

    async def send(self, message: dict[str, Any]) -> None:
        """Add an ASGI message of the answer; send the filtered answer after the last one."""
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
    """An answer in JSON."""

    def __init__(self, body: bytes) -> None:
        self._content = _parse_object(body)

    def narrow(self, narrowing: Narrowing, name: str, values: list[str]) -> list[str]:
        """Remove the items without one of the values; return the values that no item has."""
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
        """Return the encoded answer."""
        return json.dumps(self._content).encode()


class _XmlAnswer:
    """An answer in XML."""

    def __init__(self, body: bytes) -> None:
        self._root = ElementTree.fromstring(body)
        space, brace, _ = self._root.tag.rpartition("}")
        if brace:  # write the default namespace once, at the root, so that no name gets a prefix
            for element in self._root.iter():
                element.tag = element.tag.removeprefix(f"{space}}}")
            self._root.set("xmlns", space[1:])

    def narrow(self, narrowing: Narrowing, name: str, values: list[str]) -> list[str]:
        """Remove the items without one of the values; return the values that no item has."""
        missing = set(values)
        for outer in [
            element for element in self._root.iter() if _local_name(element) == narrowing.items[0]
        ]:
            for listed in [outer] if len(narrowing.items) == 1 else [*outer]:
                for item in self._lists(listed, narrowing.items[1:]):
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
                    len(item) for item in self._lists(listed, narrowing.items[1:])
                ):
                    outer.remove(listed)
        return [value for value in values if value in missing]

    @staticmethod
    def _lists(element: ElementTree.Element, names: Sequence[str]) -> list[ElementTree.Element]:
        """Return the child lists with the next name of a path, the element itself at the end of the
        path."""
        return (
            [child for child in element if _local_name(child) == names[0]] if names else [element]
        )

    def to_bytes(self) -> bytes:
        """Return the encoded answer."""
        return ElementTree.tostring(self._root, encoding="utf-8", xml_declaration=True)


def _local_name(element: ElementTree.Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def _as_data(element: ElementTree.Element) -> Any:
    """Return an element as mappings, lists and texts."""
    children = [*element]
    if not children:
        return element.text or ""
    if all(_local_name(child) in ("item", "member") for child in children):
        return [_as_data(child) for child in children]
    return {_local_name(child): _as_data(child) for child in children}


def _has_value(narrowing: Narrowing, name: str, values: list[str], item: Any) -> bool:
    """Return whether an item has one of the values."""
    if narrowing.rule == "tag":
        tag = name.removeprefix("tag:")
        tags = list(_at(item, narrowing.place.split(".")))
        pairs = [
            {key.lower(): text for key, text in each.items()}
            for each in tags
            if isinstance(each, dict)
        ]
        item_values = [pair.get("value", "") for pair in pairs if pair.get("key") == tag]
    else:
        item_values = [str(text) for text in _at(item, narrowing.place.split("."))]
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
                fnmatch.fnmatchcase(text, _pattern(value))
                for text in item_values
                for value in values
            )


def _pattern(value: str) -> str:
    """Return a filter value as a pattern of fnmatch."""
    return value.replace("[", "[[]")  # EC2 has only * and ? as wildcards


def _at(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the values at a path, in each element of the lists on the way."""
    if isinstance(value, list):
        for each in value:
            yield from _at(each, names)
    elif not names:
        yield value
    elif isinstance(value, dict) and names[0] in value:
        yield from _at(value[names[0]], names[1:])


async def _answer(send: Any, status: int, kind: bytes, body: bytes) -> None:
    """Send an answer."""
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
    )
    await send({"type": "http.response.body", "body": body})
