"""Finds what else can be done to a resource that a command is about: delete, disable, detach, open,
update.

There is no table: an operation of the same service qualifies when botocore's model demands nothing
of it but what the command's own parameters and answer say, policies that open it to anybody, and
values that are made up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

from botocore.model import OperationModel, Shape

from realhf.aws.cli.command_table import ALLOWED
from realhf.aws.real_aws.describe_walker import element, members, required_members
from tests.aws.validation.command_line import operation_model, option_of, option_words
from tests.aws.validation.field_changes import OPEN_POLICY, Words, samples

Deed = Literal["undone", "updated"]
_READS = re.compile(r"get|list|describe|head|batch-get|lookup|filter|test|validate|simulate")
_UNDOES = re.compile(
    r"delete|remove|detach|disable|stop|revoke|unsubscribe|untag|terminate|deregister|disassociate|schedule-|purge|cancel"
)
_MAKES = re.compile(
    r"create-|run-|register-|request-|start-|publish|send-|invoke|encrypt|decrypt|restore|copy-"
)
_IDENTITY = re.compile(r"(name|id|arn|url|identifier|bucket|key|alias)$", re.IGNORECASE)
_VERB = re.compile(r"^[A-Z][a-z]+")
_API_SERVICES = {"s3": "s3api", "states": "stepfunctions"}
_MAX_UPDATES = 24


@dataclass(frozen=True)
class Request:
    """Describes a request that was sent: the CLI's names of service and operation, its parameters
    by their API names, and ``answer``, the prefix of captures of its answer (``step2``,
    ``setup1``)."""

    service: str
    operation: str
    params: Mapping[str, Any]
    answer: str


def cli_service(service: str) -> str:
    """Return the CLI's name of botocore's service."""
    return _API_SERVICES.get(service, service)


def deeds(request: Request, words: Words) -> Iterator[tuple[Deed, str, str]]:
    """Yield (what becomes of the resource, operation, line) for each operation that can be done to
    what a request is about. Nothing for a request that only looks."""
    model = operation_model(request.service, request.operation)
    if model is None or _READS.match(request.operation):
        return
    known = _known(model, request)
    if not known:
        return
    noun = _VERB.sub("", cast(str, model.name))
    for operation in sorted(ALLOWED.get(request.service, ())):
        other = operation_model(request.service, operation)
        if (
            other is None
            or other.input_shape is None
            or _READS.match(operation)
            or _MAKES.match(operation)
        ):
            continue
        kind: Deed = "undone" if _UNDOES.match(operation) else "updated"
        for params in islice(_filled(other, noun, known, words, kind), _MAX_UPDATES):
            options = (
                option_words(option_of(request.service, operation, name), value)
                for name, value in params.items()
            )
            yield kind, operation, " ".join(["aws", request.service, operation, *options])


def _known(model: OperationModel, request: Request) -> dict[str, Any]:
    """Return what the request and its answer say of the resource, by lower-case name of the
    member."""
    known = {name.lower(): value for name, value in request.params.items()}
    for name, path in identities(model):
        known.setdefault(name.lower(), f"${{{request.answer}:{path}}}")
    return known


def identities(model: OperationModel) -> Iterator[tuple[str, str]]:
    """Yield (member, path) of what identifies something in an operation's answer, two levels deep;
    of a list the first element."""
    for name, member in members(model.output_shape).items():
        if member.type_name == "string" and _IDENTITY.search(name):
            yield name, name
        first = element(member) if member.type_name == "list" else None
        where = name if first is None else f"{name}[0]"
        for inner, deeper in members(first or member).items():
            if deeper.type_name == "string" and _IDENTITY.search(inner):
                yield inner, f"{where}.{inner}"


def _filled(
    model: OperationModel, noun: str, known: Mapping[str, Any], words: Words, kind: Deed
) -> Iterator[dict[str, Any]]:
    """Yield parameters for the operation: what identifies the resource out of ``known``, and for an
    update one more member, made up. None where the operation is not about it."""
    every = members(model.input_shape)
    required = required_members(model.input_shape)
    given: dict[str, Any] = {}
    made_up: dict[str, list[Any]] = {}
    for name, member in every.items():
        value = _identity(name, member, noun, known)
        if value is not None and (name in required or _IDENTITY.search(name)):
            given[name] = value
        elif name in required:
            made_up[name] = (
                [known[name.lower()]] if kind == "undone" and name.lower() in known else []
            )
            made_up[name] += (
                [OPEN_POLICY] if "policy" in name.lower() and member.type_name == "string" else []
            )
            made_up[name] += samples(name, member, words)
    if not any(name in required or not required for name in given):
        return
    if not all(made_up.values()):
        return
    base = {name: values[0] for name, values in made_up.items()} | given
    if kind == "undone":
        yield base
        return
    for name, values in made_up.items():
        yield from ({**base, name: value} for value in values)
    for name, member in every.items():
        if name not in base:
            yield from ({**base, name: value} for value in samples(name, member, words)[:6])
            if name.lower() in known:
                yield {**base, name: known[name.lower()]}
    if made_up or (kind == "updated" and len(every) == len(given)):
        yield base


def _identity(name: str, shape: Shape, noun: str, known: Mapping[str, Any]) -> Any:
    """Return what ``known`` gives a member that identifies the resource; None where it is another
    thing."""
    lower = name.lower()
    noun = noun.lower()
    inner = element(shape) if shape.type_name == "list" else None
    if inner is not None and inner.type_name == "string":
        single = _identity(name.removesuffix("List").removesuffix("s"), inner, noun, known)
        return None if single is None else [single]
    if shape.type_name != "string":
        return None
    if (
        lower in known
        and (_IDENTITY.search(name) or lower == noun)
        and isinstance(known[lower], str)
    ):
        return known[lower]
    own = {noun, f"{noun}name", f"{noun}id", f"{noun}arn", f"{noun}identifier"}
    generic = {"resourcearn", "resourcename", "resourceid", "arn", "id"}
    if lower not in own | generic:
        return None
    kinds = ("arn",) if lower.endswith("arn") else ("id", "identifier", "name", "arn")
    for kind in kinds:
        for key in (f"{noun}{kind}", kind):
            if isinstance(known.get(key), str):
                return known[key]
    return None
