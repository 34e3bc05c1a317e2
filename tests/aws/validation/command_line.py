"""Handles command lines as data: words, options and values, JSON in them (documents inside
documents included: a queue's policy is a text in its attributes), and the lines that send the
requests of a set-up.

Captures (``${step1:Items[0].Id}``) are whole words here, whatever blanks and quotes they hold.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from awscli.customizations.argrename import ARGUMENT_RENAMES
from botocore import xform_name
from botocore.model import OperationModel, Shape

from realhf.aws.real_aws.describe_walker import members, operation_models
from realhf.aws.tasks.task import SetupCommand

CAPTURE = re.compile(r"\$\{(?:step|setup)\d+:[^}]+\}")
_STEP = re.compile(r"\$\{step(\d+):")
_SETUP = re.compile(r"\$\{setup(\d+):")
_MARK = "__capture{}__"
_API_SERVICES: Mapping[str, str] = MappingProxyType({"s3api": "s3", "s3": "s3 of many requests"})
"""Services that have another name on the command line than in the API, or none in the API."""


@dataclass(frozen=True)
class CommandLine:
    """Is ``aws SERVICE OPERATION`` with bare words (``arguments``) and options, each a name and its
    values in order."""

    service: str
    operation: str
    options: tuple[tuple[str, tuple[str, ...]], ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, line: str) -> CommandLine:
        """Parse a line. Raises ValueError for one with open quotes or without an operation."""
        captures: list[str] = []
        words = [restored(word, captures) for word in shlex.split(masked(line, captures))]
        if len(words) < 3:
            raise ValueError(f"{line!r} has no operation")
        options: list[tuple[str, tuple[str, ...]]] = []
        arguments: list[str] = []
        for word in words[3:]:
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                options.append((name, (value,) if equals else ()))
            elif options:
                options[-1] = options[-1][0], (*options[-1][1], word)
            else:
                arguments.append(word)
        return cls(words[1], words[2], tuple(options), tuple(arguments))

    def __str__(self) -> str:
        words = [quoted(word) for word in self.arguments]
        for name, values in self.options:
            words += [name, *(quoted(value) for value in values)]
        return " ".join(["aws", self.service, self.operation, *words])

    def value(self, option: str) -> str | None:
        """Return the only value of an option, None where it is not given or has another number of
        values."""
        values = next((values for name, values in self.options if name == option), ())
        return values[0] if len(values) == 1 else None

    def with_value(self, option: str, *values: str) -> CommandLine:
        """Return the same line with other values of an option."""
        return replace(
            self,
            options=tuple((name, values if name == option else old) for name, old in self.options),
        )

    @property
    def api_operation(self) -> str:
        """Return the canonical name, "s3:CreateBucket"; "" for a command that is more than one
        request, such as ``s3 mb``."""
        model = operation_model(self.service, self.operation)
        return f"{model.service_model.service_name}:{model.name}" if model else ""


def quoted(word: str) -> str:
    """Return the word as a shell takes it; captures in it stay as they are."""
    captures: list[str] = []
    return restored(shlex.quote(masked(word, captures)), captures)


def masked(text: str, captures: list[str]) -> str:
    """Return the text with a plain word in the place of each capture, which is added to
    ``captures``."""

    def mark(match: re.Match[str]) -> str:
        captures.append(match[0])
        return _MARK.format(len(captures) - 1)

    return CAPTURE.sub(mark, text)


def restored(text: str, captures: Sequence[str]) -> str:
    """Return a ``masked`` text with its captures."""
    for number, capture in enumerate(captures):
        text = text.replace(_MARK.format(number), capture)
    return text


@functools.cache
def _operations(service: str) -> Mapping[str, OperationModel]:
    """Return the operations of a service by the names that the command line gives them."""
    models = operation_models(_API_SERVICES.get(service, service))
    return {xform_name(name, "-"): model for name, model in models.items()}


def operation_model(service: str, operation: str) -> OperationModel | None:
    """Return the model of an operation as the command line calls it ("s3api", "create-bucket"),
    None where there is none."""
    return _operations(service).get(operation)


@functools.lru_cache(maxsize=512)
def option_shapes(service: str, operation: str) -> Mapping[str, Shape]:
    """Return the shape of what each option of an operation takes."""
    model = operation_model(service, operation)
    known = members(model.input_shape) if model else {}
    return {option_of(service, operation, member): shape for member, shape in known.items()}


def option_of(service: str, operation: str, member: str) -> str:
    """Return the option that stands for a member of an operation's input."""
    name = xform_name(member, "-")
    for key in (f"{service}.{operation}.{name}", f"{service}.*.{name}"):
        name = ARGUMENT_RENAMES.get(key, name)
    return f"--{name}"


def line_of(command: SetupCommand) -> str:
    """Return the line by which an agent sends what a set-up command sends. An object's content is
    left out."""
    if command.command:
        return command.command
    service = "s3api" if command.service == "s3" else command.service
    operation = xform_name(command.operation, "-")
    shapes = option_shapes(service, operation)
    words = ["aws", service, operation]
    for member, value in command.params.items():
        option = option_of(service, operation, member)
        if option in shapes and shapes[option].type_name == "blob":
            continue
        if service == "ec2" and isinstance(value, Mapping) and set(value) == {"Value"}:
            value = value["Value"]
        words.append(option_words(option, value))
    return " ".join(words)


def sendable(command: SetupCommand) -> str:
    """Return the line of a set-up command, "" for one that no line can send, since it holds
    bytes."""
    try:
        return line_of(command)
    except TypeError:
        return ""


def option_words(option: str, value: Any) -> str:
    """Return an option with a value of any type as it stands in a command line."""
    if isinstance(value, bool):
        return option if value else f"--no-{option[2:]}"
    return f"{option} {quoted(value if isinstance(value, str) else json.dumps(value))}"


def moved(text: str, by: int) -> str:
    """Return a command with its captures of other commands moved down the list by this many."""
    return _STEP.sub(lambda match: f"${{step{int(match[1]) + by}:", text)


def as_steps(text: str) -> str:
    """Return a command whose captures of the set-up refer to the commands of its own list."""
    return _SETUP.sub(lambda match: f"${{step{match[1]}:", text)


def captured_steps(text: str) -> set[int]:
    """Return the numbers of the commands whose outputs this one uses."""
    return {int(number) for number in _STEP.findall(text)}


def renumbered(text: str, places: Mapping[int, int]) -> str:
    """Return a command whose captures follow the commands to their new places."""
    return _STEP.sub(lambda match: f"${{step{places[int(match[1])]}:", text)


def parsed(text: str) -> Any:
    """Return the object or list that a text holds, None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def each_document(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield every policy-like map in a value: the value itself, and texts inside it that hold
    one."""
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
    changed = {
        key: rewritten(item, change) if isinstance(item, str) else item
        for key, item in document.items()
    }
    return json.dumps(changed)
