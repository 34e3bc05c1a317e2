"""Shows which selectors of the served reads the simulator keeps, where each has something to leave
out.

A *selector* is a member of a request that says which resources are answered. ``population.yaml``
makes an account with two of each kind. For each read of the command table, each selector of
botocore's model and each name of a filter, the answer without it is compared with the answers for
what nothing has and for what one of the resources has:

| class | |
|---|---|
| right | leaves out what it should, and keeps what it should |
| ignored | answers as without it: kept or refused before agents' requests reach the simulator |
| refused | the simulator refuses it by itself |
| not shown | nothing in the account was seen to be kept by it, or there is nothing to leave out |

    python -m tests.aws.validation.conformance            # compares with the two files
    python -m tests.aws.validation.conformance --write    # writes them anew: the table of refusals and the page
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import botocore.session
import jmespath
import yaml
from botocore import xform_name
from botocore.exceptions import DataNotFoundError
from botocore.model import OperationModel

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.cli.state_client import ClientFactory, StateCallError, StateClient
from realhf.aws.simulator.pool import MiniStackPool
from realhf.aws.simulator.selectors import TABLE, read_narrowings, read_selector_table
from realhf.aws.simulator.slot import ACCOUNT, Slot
from realhf.base.installation import IMPORT_ROOT

Call = Callable[[str, str, dict[str, Any]], dict[str, Any]]
"""Sends a request (service, operation, parameters) and returns its answer; raises
StateCallError."""
Class = Literal["right", "ignored", "refused", "not shown"]
PAGE = IMPORT_ROOT / "docs" / "reference" / "conformance.md"

_READ = re.compile(r"(list|describe|get|batch-get|head|scan|query|filter)\b")
_NOTHING = "nothing-has-this"
_MAX_VALUES = 80
_FAR_S = {True: 4102444800, False: 978307200}
"""For the begin of a time span a moment after everything, for its end one before."""
_NO_SELECTOR = re.compile(
    r"""DryRun|.*Token|.*Marker|position|.*ExclusiveStart.*|Start(After|Record\w+)|KeyMarker|HostedZoneId  # pages
    |Return\w+|Consistent\w+|With\w+|include\w*|Include\w*|embed|unmask|interleaved|Show\w*NodeInfo  # more is told
    |List\w+|AttributesToGet|Attribute(Name)?s|ProjectionExpression|ExpressionAttribute\w+|Select|.*Statistics|Fetch\w+
    |OptionalObjectAttributes|includedData|TemplateStage|EncodingType|Response\w+|ChecksumMode|RequestPayer
    |SSECustomer\w+|ConditionalOperator|TotalSegments|Max(Scheduled|Results|Items|Records)\w*|TagsPerPage|GrantTokens
    |AuditContext|TransactionId|ResolveAlias|If\w+|Range|PartNumber|Delimiter|Period|All[A-Z]\w+|startFromHead""",
    re.VERBOSE,
)
"""Names of members that page through an answer or say how much of each resource is told."""


@cache
def _file() -> dict[str, Any]:
    return yaml.load(
        Path(__file__).with_name("population.yaml").read_text(), Loader=yaml.CSafeLoader
    )


@cache
def model(service: str) -> Any:
    """Return botocore's model of a service (its name)."""
    return _session().get_service_model(service)


@cache
def _session() -> botocore.session.Session:
    return botocore.session.get_session()


@dataclass(frozen=True)
class Selector:
    """Names a selector by botocore's service, operation and member; ``filter`` is a name that the
    member takes."""

    service: str
    operation: str
    member: str
    filter: str = ""


@dataclass(frozen=True)
class Finding:
    """Says what a selector was seen to do, and the reason where it was not shown."""

    selector: Selector
    found: Class
    reason: str = ""


def populate(call: Call) -> dict[str, Any]:
    """Make the account and return what its captures name. Raises StateCallError."""
    answers: dict[str, Any] = {"now": int(time.time() * 1000)}
    for entry in _file()["population"]:
        answer = call(entry["service"], entry["operation"], _filled(entry["params"], answers))
        if "as" in entry:
            answers[entry["as"]] = answer
    return answers


def _filled(value: Any, answers: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, answers) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, answers) for item in value]
    if value == "${now}":
        return answers["now"]
    if isinstance(value, str):
        return re.sub(
            r"\$\{(\w+):([^}]*)\}",
            lambda match: str(jmespath.search(match[2], answers[match[1]])),
            value,
        )
    return value


def served_reads() -> list[tuple[str, str]]:
    """Return service and operation (botocore's names) of every read that the command table
    serves."""
    found = []
    for service, operations in ALLOWED.items():
        name = "s3" if service == "s3api" else service
        if service != "s3":
            known = {
                xform_name(operation, "-"): operation for operation in model(name).operation_names
            }
            found += [
                (name, known[operation])
                for operation in sorted(operations)
                if _READ.match(operation)
            ]
    return found


def selectors(service: str, operation: str) -> Iterator[Selector]:
    """Yield the selectors of a read: members that name or narrow what is answered."""
    shape = model(service).operation_model(operation)
    for member, kind in (shape.input_shape.members if shape.input_shape else {}).items():
        if _NO_SELECTOR.fullmatch(member) or member in _page_sizes(service, operation):
            continue
        names = _filter_names(Selector(service, operation, member), kind)
        yield from (Selector(service, operation, member, name) for name in names or [""])


@cache
def _page_sizes(service: str, operation: str) -> frozenset[str]:
    """Return the members that say how long a page is: the CLI reads on, so they leave nothing
    out."""
    try:
        pages = (
            _session()
            .get_component("data_loader")
            .load_service_model(service, "paginators-1")["pagination"]
        )
    except DataNotFoundError:
        return frozenset()
    return frozenset({pages.get(operation, {}).get("limit_key")})


def _filter_names(selector: Selector, kind: Any) -> list[str]:
    """Return the names that a list of filters takes."""
    written = _file()["filters"].get(
        ".".join((selector.service, selector.operation, selector.member))
    )
    if written is not None:
        return written
    parts = _filter_parts(kind)
    if not parts:
        return []
    listed = re.findall(
        r"<code>([a-z][\w.-]*)(?::&lt;\w+&gt;)?</code>:?(?:&lt;\w+&gt;)? ?[-–]", kind.documentation
    )
    return ["tag:team" if name == "tag" else name for name in dict.fromkeys(listed)] or list(
        getattr(kind.member.members[parts[0]], "enum", ())
    )


def _filter_parts(kind: Any) -> tuple[str, str] | None:
    """Return the members of a filter that hold its name and its values; None for what is no list of
    filters."""
    if kind.type_name != "list" or kind.member.type_name != "structure":
        return None
    members = kind.member.members
    name = next((member for member in ("Name", "Key", "key") if member in members), None)
    values = next((member for member in ("Values", "value") if member in members), None)
    return (name, values) if name and values else None


class Prober:
    """Asks one account. ``answers`` are the captures of its population."""

    def __init__(self, call: Call, answers: Mapping[str, Any]) -> None:
        self._call = call
        self._known = _filled(_file()["known"], answers)
        self._tried = _filled(_file()["values"], answers)
        self.answers: dict[tuple[str, str], list[str]] = {}
        """What the reads that were probed answered without a selector."""

    def findings(self, service: str, operation: str) -> list[Finding]:
        """Return what each selector of a read does."""
        asked = list(selectors(service, operation))
        given = self._given(service, operation)
        whole = self._items(service, operation, given) if asked else []
        self.answers[service, operation] = whole if isinstance(whole, list) else []
        if isinstance(whole, str):
            return [Finding(selector, "not shown", f"without it: {whole}") for selector in asked]
        if not whole:
            return [
                Finding(selector, "not shown", "the account has none of these")
                for selector in asked
            ]
        return [self._probe(selector, given, whole) for selector in asked]

    def _given(self, service: str, operation: str) -> dict[str, Any]:
        shape = model(service).operation_model(operation)
        required = shape.input_shape.required_members if shape.input_shape else []
        known = self._known.get(service, {})
        special = self._known.get(f"{service}.{operation}", {})
        return {name: known[name] for name in required if name in known} | special

    def _items(self, service: str, operation: str, params: dict[str, Any]) -> list[str] | str:
        """Return the parts of the answer, as JSON, or the code of the error."""
        try:
            return _parts_of(self._call(service, operation, params))
        except StateCallError as error:
            return error.code or "Unknown"

    def _probe(self, selector: Selector, given: dict[str, Any], whole: list[str]) -> Finding:
        shape = (
            model(selector.service)
            .operation_model(selector.operation)
            .input_shape.members[selector.member]
        )

        def ask(value: Any) -> list[str] | str:
            told = given | (value if isinstance(value, _Params) else {selector.member: value})
            told = {name: each for name, each in told.items() if each is not None}
            return self._items(selector.service, selector.operation, told)

        place = ".".join(filter(None, (selector.service, selector.operation, selector.member)))
        tried = self._tried.get(f"{place}.{selector.filter}" if selector.filter else place)
        if tried is not None:
            found = self._by_values([_Params(value) for value in tried], ask, whole)
        elif shape.type_name == "boolean":
            found = _effect([ask(True), ask(False)], whole)
        elif getattr(shape, "enum", ()) and shape.type_name == "string":
            found = _effect([ask(value) for value in shape.enum], whole)
        elif shape.type_name in ("integer", "long", "timestamp"):
            found = _of_number(selector.member, shape, ask, whole)
        else:
            wrap = _wrapper(shape, selector.filter)
            if wrap is None:
                found = ("not shown", "no value of it is known")
            elif selector.member in given and not selector.filter:
                # ``given`` has the value that keeps something
                found = _of_identity(ask(wrap(_NOTHING)), whole)
            else:
                found = self._by_text(selector, wrap, ask, whole)
        return Finding(selector, *found)

    @staticmethod
    def _by_values(
        values: Sequence[Any], ask: Callable[[Any], list[str] | str], whole: list[str]
    ) -> _Found:
        """Each value written in the file must keep something; the last one leaves out
        everything."""
        *some, none = (ask(value) for value in values)
        if isinstance(none, list) and set(none) & set(whole):
            return "ignored", ""
        if any(isinstance(items, str) for items in some):
            return "refused", _errors(some)
        return (
            ("right", "") if all(some) else ("not shown", "nothing in the account was kept by it")
        )

    @staticmethod
    def _by_text(
        selector: Selector,
        wrap: Callable[[str], Any],
        ask: Callable[[Any], list[str] | str],
        whole: list[str],
    ) -> _Found:
        nothing = ask(wrap(_NOTHING))
        if nothing == whole:
            return "ignored", ""
        leaves = _leaves(whole, selector.filter or selector.member)
        errors = []
        shared = False
        for value in itertools.islice(leaves, _MAX_VALUES):
            kept = ask(wrap(value))
            if isinstance(kept, str):
                errors.append(kept)
            elif kept and kept != nothing and _consistent(value, kept, whole):
                if len(kept) < len(whole) or len(whole) == 1:
                    return "right", ""
                shared = True
        if shared:
            return "right", ""
        if isinstance(nothing, str) and len(errors) == min(len(leaves), _MAX_VALUES):
            return "refused", nothing
        return "not shown", "nothing in the account was kept by it"


class _Params(dict[str, Any]):
    """Members of a request, where a selector needs others beside it."""


_Found = tuple[Class, str]


def _errors(seen: Iterable[list[str] | str]) -> str:
    return ", ".join(sorted({code for code in seen if isinstance(code, str)}))


def _of_identity(nothing: list[str] | str, whole: list[str]) -> _Found:
    return (
        ("ignored", "")
        if isinstance(nothing, list) and set(nothing) & set(whole)
        else ("right", "")
    )


def _effect(seen: Sequence[list[str] | str], whole: list[str]) -> _Found:
    """Judge all values of a flag or of an enumeration."""
    if any(items != whole for items in seen if isinstance(items, list)):
        return "right", ""
    return ("refused", _errors(seen)) if _errors(seen) else ("ignored", "")


def _of_number(
    member: str, shape: Any, ask: Callable[[Any], list[str] | str], whole: list[str]
) -> _Found:
    if re.search(r"time|after|before|bound|stamp", member, re.IGNORECASE):
        begins = re.match(r"start|from|.*lower|.*after", member, re.IGNORECASE) is not None
        moment = _FAR_S[begins] * (1000 if shape.type_name == "long" else 1)
        kept = ask(moment)
        return (
            ("ignored", "")
            if kept == whole
            else ("right", "")
            if not kept
            else ("not shown", str(kept)[:60])
        )
    fewest = int(shape.metadata.get("min", 1)) or 1
    kept = ask(fewest)
    if isinstance(kept, str):
        return "refused", kept
    if len(whole) <= fewest:
        return "not shown", f"the account has no more than {fewest} of these"
    return ("ignored", "") if len(kept) > fewest else ("right", "")


def _wrapper(shape: Any, name: str) -> Callable[[str], Any] | None:
    """Return what makes a member's value of a text; None where none does."""
    if shape.type_name == "string":
        return lambda text: text
    if shape.type_name != "list":
        return None
    parts = _filter_parts(shape)
    if name and parts:
        plain = shape.member.members[parts[1]].type_name == "string"
        return lambda text: [{parts[0]: name, parts[1]: text if plain else [text]}]
    return (lambda text: [text]) if shape.member.type_name == "string" else None


def _parts_of(answer: Mapping[str, Any]) -> list[str]:
    """Return the resources in an answer, as JSON in order: elements of its lists; where it has none
    those of its maps, and where it has none of these either its fields."""
    lists = {name: value for name, value in answer.items() if isinstance(value, list)}
    parts: list[Any] = [[name, item] for name, value in lists.items() for item in value]
    if not lists:
        maps = {name: value for name, value in answer.items() if isinstance(value, dict)}
        parts = [[name, key, item] for name, value in maps.items() for key, item in value.items()]
    if not parts and not lists:
        parts = [
            [name, value] for name, value in answer.items() if not _NO_SELECTOR.fullmatch(name)
        ]
    return [json.dumps(part, default=_plain, sort_keys=True) for part in parts]


def _plain(value: Any) -> str:
    return value.read().decode("utf-8", "replace") if hasattr(value, "read") else str(value)


@cache
def _texts(item: str) -> tuple[tuple[str, str], ...]:
    """Return place and text of every leaf of an item."""

    def walk(value: Any, place: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, f"{place}.{key}")
        elif isinstance(value, list):
            for position, inner in enumerate(value):
                yield from walk(inner, place if place else f"{position}")
        elif value is not None and value != "":
            yield place, str(value).lower() if isinstance(value, bool) else str(value)

    return tuple(walk(json.loads(item), ""))


def _leaves(whole: Sequence[str], name: str) -> list[str]:
    """Return the texts of all items, those at places called like ``name`` first."""
    wanted = _letters(name)

    def unlike(place: str) -> int:
        letters = _letters(place)
        last = _letters(place.rpartition(".")[2])
        return (
            0
            if letters.endswith(wanted)
            else 1
            if last and (last in wanted or wanted in last)
            else 2
        )

    leaves = [
        (unlike(place), text) for item in whole for place, text in _texts(item) if len(text) < 300
    ]
    return list(dict.fromkeys(text for _, text in sorted(leaves, key=lambda leaf: leaf[0])))


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("s")


def _consistent(value: str, kept: Sequence[str], whole: Sequence[str]) -> bool:
    """Return whether what was kept are the items that have the value at some place, and no
    others."""
    if not set(kept) <= set(whole):
        return True  # told in another form: by a request for one resource
    for place in {place for place, text in _texts(kept[0]) if value in text}:
        held = {
            item
            for item in whole
            if any(at == place and value in text for at, text in _texts(item))
        }
        same = {
            item
            for item in whole
            if any(at == place and value == text for at, text in _texts(item))
        }
        if set(kept) in (held, same):
            return True
    return False


def table_of(
    findings: Iterable[Finding], answers: Mapping[tuple[str, str], list[str]]
) -> dict[str, Any]:
    """Return the table of ``realhf.aws.simulator.selectors`` for what was found. Raises ValueError
    for a selector that is ignored, that a request cannot do without, and that nothing keeps."""
    table: dict[str, Any] = {}
    by_member: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        chosen = finding.selector
        by_member.setdefault((chosen.service, chosen.operation, chosen.member), []).append(finding)
    for (name, operation_name, member), found in by_member.items():
        service = model(name)
        operation = service.operation_model(operation_name)
        place, wire = _wire_name(service, operation, member)
        narrowed = [
            each
            for each in read_narrowings()
            if (each.operation, each.member) == (operation_name, wire)
        ]
        entry = {"place": place, "name": wire, "option": f"--{xform_name(member, '-')}"}
        if found[0].selector.filter:
            entry |= _filters_of(found, answers[name, operation_name])
            if not any(finding.found == "ignored" for finding in found):
                continue
        elif found[0].found != "ignored" or narrowed:
            if not narrowed:
                continue
            entry = {}
        elif member in operation.input_shape.required_members:
            raise ValueError(
                f"{name}.{operation_name}.{member} is ignored and required: it must be corrected"
            )
        else:
            entry |= {"accepted": _accepted(name, operation_name, member)}
        described = (
            {}
            if service.resolved_protocol in ("query", "ec2", "json")
            else {"at": _address(operation)}
        )
        if service.resolved_protocol == "ec2":
            described["items"] = [part for part, _ in _listed(operation)[0]]
        services = table.setdefault(
            service.signing_name, {"protocol": service.resolved_protocol, "operations": {}}
        )
        services["operations"].setdefault(operation_name, {**described, "members": []})[
            "members"
        ] += [entry] if entry else []
    return table


def _accepted(service: str, operation: str, member: str) -> list[str]:
    """Return the values of a selector that mean the same as none."""
    if re.fullmatch(
        r"ExpectedBucketOwner|registryId|CatalogId|\w*AccountId|OwningAccount|accountIdentifiers",
        member,
    ):
        return [ACCOUNT]
    return _file()["accepted"].get(f"{service}.{operation}.{member}", [])


def _filters_of(found: Sequence[Finding], whole: Sequence[str]) -> dict[str, Any]:
    names = {finding.selector.filter: finding for finding in found}
    kept = [_any_tag(name) for name, finding in names.items() if finding.found != "ignored"]
    operation = model(found[0].selector.service).operation_model(found[0].selector.operation)
    narrowed = {
        _any_tag(name): place
        for name, finding in names.items()
        if finding.found == "ignored" and finding.selector.service == "ec2"
        for place in [_place_of(name, operation, whole)]
        if place
    }
    return {"kept": kept, "narrowed": narrowed}


def _any_tag(name: str) -> str:
    return "tag:" if name.startswith("tag:") else name


_OTHER_WORDS = {
    "ip-permission.cidr": "IpPermissions.IpRanges.CidrIp",
    "ip-permission.ipv6-cidr": "IpPermissions.Ipv6Ranges.CidrIpv6",
    "ip-permission.protocol": "IpPermissions.IpProtocol",
    "ip-permission.group-id": "IpPermissions.UserIdGroupPairs.GroupId",
    "ip-permission.from-port": "IpPermissions.FromPort",
    "ip-permission.to-port": "IpPermissions.ToPort",
    "egress.ip-permission.cidr": "IpPermissionsEgress.IpRanges.CidrIp",
    "egress.ip-permission.protocol": "IpPermissionsEgress.IpProtocol",
    "egress.ip-permission.from-port": "IpPermissionsEgress.FromPort",
    "egress.ip-permission.to-port": "IpPermissionsEgress.ToPort",
    "instance.group-id": "SecurityGroups.GroupId",
    "instance.group-name": "SecurityGroups.GroupName",
    "instance-state-code": "State.Code",
    "availability-zone": "Placement.AvailabilityZone",
    "tenancy": "Placement.Tenancy",
    "ip-address": "PublicIpAddress",
    "monitoring-state": "Monitoring.State",
    "group-id": "Groups.GroupId",
    "entry.cidr": "Entries.CidrBlock",
    "entry.protocol": "Entries.Protocol",
    "entry.rule-action": "Entries.RuleAction",
    "entry.rule-number": "Entries.RuleNumber",
    "entry.egress": "Entries.Egress",
    "vpc-endpoint-state": "State",
    "vpc-endpoint-type": "VpcEndpointType",
    "tag-key": "Tags.Key",
}
"""Where the value of a filter is in an answer, in the words of botocore, when its name is none of
these words."""


def _place_of(name: str, operation: OperationModel, whole: Sequence[str]) -> str:
    """Return where an answer of EC2 has the value of a filter, as names in its XML; "" where it has
    none."""
    items, element = _listed(operation)
    there = {place for item in whole for place, _ in _texts(item)}
    words = ".".join(word for _, word in items[1:])
    for place, xml in _members_of(element):
        inside = f"1.{words}.{place}" if words else f"1.{place}"
        if name.startswith("tag:"):
            if place == "Tags.Key" and inside in there:
                return xml.rpartition(".")[0]
        elif inside in there and (
            place == _OTHER_WORDS.get(name)
            or [*map(_letters, place.split("."))] == [*map(_letters, name.split("."))]
        ):
            return xml
    return ""


@cache
def _listed(operation: OperationModel) -> tuple[list[tuple[str, str]], Any]:
    """Return the lists that hold the resources of an answer of EC2, names in XML and in botocore,
    and the shape of a resource."""
    output: Any = operation.output_shape
    word, shape = next(
        (word, shape) for word, shape in output.members.items() if shape.type_name == "list"
    )
    items = [(shape.serialization["name"], word)]
    if operation.name == "DescribeInstances":
        shape = shape.member.members["Instances"]
        items.append((shape.serialization["name"], "Instances"))
    return items, shape.member


def _members_of(shape: Any, depth: int = 4) -> Iterator[tuple[str, str]]:
    """Yield the places in a resource, in the words of botocore and in XML."""
    if shape.type_name == "list":
        yield from _members_of(shape.member, depth)
    elif shape.type_name != "structure":
        yield "", ""
    elif depth:
        for word, member in shape.members.items():
            xml = member.serialization.get("name", word)
            for inner, inner_xml in _members_of(member, depth - 1):
                yield f"{word}.{inner}".rstrip("."), f"{xml}.{inner_xml}".rstrip(".")


def _wire_name(service: Any, operation: OperationModel, member: str) -> tuple[str, str]:
    """Return where a request carries a member, and under which name."""
    inputs: Any = operation.input_shape
    shape = inputs.members[member]
    name = shape.serialization.get("name", member)
    match service.resolved_protocol:
        case "ec2":
            return "form", shape.serialization.get("queryName") or name[0].upper() + name[1:]
        case "query":
            return "form", name
        case "json":
            return "body", name
        case _:
            place = {"querystring": "query", "header": "header"}.get(
                shape.serialization.get("location", ""), "body"
            )
            return place, name.lower() if place == "header" else name


def _address(operation: OperationModel) -> list[str]:
    return [operation.http["method"], operation.http["requestUri"]]


@dataclass(frozen=True)
class Report:
    """Holds what the simulator does by itself, what agents see, and the table that makes the
    difference."""

    alone: list[Finding]
    for_agents: list[Finding]
    table: dict[str, Any]

    def counts(self) -> Counter[str]:
        """Return how many selectors there are of each class of the page."""
        return Counter(map(self._class_of, self.alone, self.for_agents))

    def leaks(self) -> list[str]:
        """Return the selectors that agents' requests may carry and that are ignored."""
        return [
            _name(finding.selector) for finding in self.for_agents if finding.found == "ignored"
        ]

    def page(self) -> str:
        """Return the page of the docs."""
        rows: dict[tuple[str, str], dict[str, list[str]]] = {}
        for one, other in zip(self.alone, self.for_agents, strict=True):
            chosen = one.selector
            row = rows.setdefault((chosen.service, chosen.operation), {})
            row.setdefault(self._class_of(one, other), []).append(_option(chosen))
        counts = self.counts()
        lines = [
            _PAGE_HEAD.format(
                operations=len(rows), **{name.replace(" ", "_"): counts[name] for name in _COLUMNS}
            ),
            f"| service | operation | {' | '.join(_COLUMNS)} |",
            "|---" * (2 + len(_COLUMNS)) + "|",
        ]
        for (service, operation), row in rows.items():
            cells = " | ".join(
                " ".join(f"`{each}`" for each in row.get(column, ())) for column in _COLUMNS
            )
            lines.append(f"| {service} | {xform_name(operation, '-')} | {cells} |")
        return "\n".join(lines) + "\n"

    @staticmethod
    def _class_of(alone: Finding, for_agents: Finding) -> str:
        if alone.found != "ignored":
            return alone.found
        return {"right": "kept here", "not shown": "not shown"}.get(for_agents.found, "refused")


_COLUMNS = ("right", "kept here", "refused", "not shown")
_PAGE_HEAD = """# What the simulated AWS answers to selectors

Written by `python -m tests.aws.validation.conformance --write`; do not edit.

A selector says which resources a read answers. Each one that botocore's model knows, of all {operations} reads that are
served and take any, was asked in an account with two resources of each kind, where it should leave something out:

- {right} are *right*; what `realhf/aws/simulator/corrections.py` sets right is among them.
- {kept_here} MiniStack ignores, and `realhf/aws/simulator/selectors.py` keeps them (*kept here*).
- {refused} are *refused* with an error that names them, most of them filters of EC2 over what the simulator lacks.
- {not_shown} are *not shown*: nothing in that account could tell, because there are none of these resources, or because
  no value of it was seen to keep anything.

No selector is ignored.
"""


def _option(selector: Selector) -> str:
    option = f"--{xform_name(selector.member, '-')}"
    return f"{option} {selector.filter}" if selector.filter else option


def _name(selector: Selector) -> str:
    return f"{selector.service} {xform_name(selector.operation, '-')} {_option(selector)}"


def examine(slot: Slot, reads: Sequence[tuple[str, str]]) -> Report:
    """Populate the account in a slot that was reset, and ask for every selector of these reads,
    past the gate and as agents do."""
    answers = populate(slot.state.call)
    prober = Prober(slot.state.call, answers)
    alone = [
        finding for service, operation in reads for finding in prober.findings(service, operation)
    ]
    gated = Prober(
        StateClient(slot.endpoint, ACCOUNT, slot.ministack.connect, ClientFactory()).call, answers
    )
    for_agents = [
        finding for service, operation in reads for finding in gated.findings(service, operation)
    ]
    return Report(alone, for_agents, table_of(alone, prober.answers))


def main() -> None:
    """Compare table and page with what the simulator does, or write them; a new table is used by
    the next start."""
    parser = argparse.ArgumentParser(
        description="which selectors of the served reads the simulator keeps"
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write {TABLE.name} and {PAGE.name} anew"
    )
    write = parser.parse_args().write
    for last in (False, True) if write else (True,):  # a table has its effect in a new simulator
        pool = MiniStackPool(1)
        pool.start()
        try:
            slot = pool.acquire()
            slot.reset(1)
            report = examine(slot, served_reads())
        finally:
            pool.stop()
        if write:
            TABLE.write_text(json.dumps(report.table, indent=1, sort_keys=True) + "\n")
        if last and write:
            PAGE.write_text(report.page())
    print(", ".join(f"{count} {name}" for name, count in report.counts().items()))
    stale = report.table != read_selector_table() or report.page() != PAGE.read_text()
    for leak in report.leaks():
        print(f"ignored: {leak}")
    if stale:
        print(f"{TABLE.name} or {PAGE.name} is not what was found: --write writes them anew")
    sys.exit(bool(report.leaks() or stale))


if __name__ == "__main__":
    main()
