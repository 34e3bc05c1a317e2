"""Reader of CloudFormation templates: finds the declared resources and resolves their
properties."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from realhf.aws.cli.pinned_http import REGION
from realhf.aws.tasks.task import ACCOUNT_ID

_MAX_DEPTH = 40
"""Maximum depth of a template, of its values, and of nested function calls."""
_MAX_PARTS = 20_000
"""Maximum number of parts of one template. YAML aliases can multiply the parts without limit."""
_MAX_CHARS = 1_000_000
"""Maximum number of characters of one template with all values filled in."""
_MAX_BITS = 10_000
"""Maximum size of an integer, in bits. Python refuses to convert much larger ones to decimal."""
_NESTED = "AWS::CloudFormation::Stack"
"""Type of a nested stack. Its template is not part of the request."""
_PLACE = re.compile(r"\$\{([^!}]+)\}")
"""A placeholder in the text given to ``Fn::Sub``."""
OF_STACK = "<of the stack>"
"""Placeholder for a value that comes from another resource of the template."""
UNKNOWN = (OF_STACK, "<unknown>")
"""All placeholders for values that only CloudFormation knows."""
_NO_VALUE = object()
"""The value of ``AWS::NoValue``, which removes a property."""


class UnreadTemplate(ValueError):
    """The resources that a template declares cannot be determined."""


@dataclass(frozen=True)
class DeclaredResource:
    """One resource that a template declares."""

    name: str
    """Logical name in the template."""
    type: str
    """CloudFormation type, e.g. "AWS::S3::Bucket"."""
    properties: Mapping[str, Any]
    """Resolved properties. Values from other resources are replaced by ``OF_STACK``."""


class _Loader(yaml.CSafeLoader):
    """YAML loader that expands the short forms of functions (``!Ref name``)."""


def _construct_function(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    """Return a function in its long form, e.g. ``{"Fn::GetAtt": [name, attribute]}``."""
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _construct_function)


def parse_template(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template in a request that creates or updates a stack, or {} if it is missing or
    invalid."""
    text = str(params.get("TemplateBody", ""))
    try:
        template = json.loads(text)  # JSON permits tabs, which YAML does not
    except (ValueError, RecursionError):
        try:
            template = yaml.load(text, Loader=_Loader)
        except Exception:  # constructors of YAML tags may raise anything for an agent's text
            return {}
    return (
        template
        if isinstance(template, dict) and isinstance(template.get("Resources"), Mapping)
        else {}
    )


def read_declared_resources(params: Mapping[str, Any]) -> list[DeclaredResource]:
    """Return the resources declared by the template in a create or update request.

    Resources whose condition is false are left out. Raises UnreadTemplate if the declared resources
    cannot be determined: the template is invalid, external, transformed or too large, or a
    condition depends on values that only CloudFormation knows.
    """
    template = parse_template(params)
    if not template or "Transform" in template:
        raise UnreadTemplate
    _check_size(template)
    reader = _TemplateResolver(template, params)
    resources = []
    for name, entry in template["Resources"].items():
        if not isinstance(entry, Mapping) or entry.get("Type") == _NESTED:
            raise UnreadTemplate
        if "Condition" in entry and not reader.holds(entry["Condition"]):
            continue
        properties = reader.resolve(entry.get("Properties") or {})
        if not isinstance(properties, Mapping):
            raise UnreadTemplate
        resources.append(DeclaredResource(str(name), str(entry.get("Type", "")), properties))
    return resources


def _check_size(template: Any) -> None:
    """Raise UnreadTemplate if a template has too many parts, is nested too deeply or contains too
    large a number."""
    parts_left = _MAX_PARTS
    waiting = [(template, 0)]
    while waiting:
        value, depth = waiting.pop()
        parts_left -= 1
        too_large = isinstance(value, int) and value.bit_length() > _MAX_BITS
        if parts_left < 0 or depth > _MAX_DEPTH or too_large:
            raise UnreadTemplate
        if isinstance(value, Mapping):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(part, depth + 1) for part in value]


def _build_values(template: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of references by name: the stack's parameters, pseudo parameters, and
    resources."""
    values: dict[str, Any] = {
        "AWS::AccountId": ACCOUNT_ID,
        "AWS::Region": REGION,
        "AWS::Partition": "aws",
    }
    values["AWS::StackName"] = params.get("StackName", "")
    values["AWS::NoValue"] = _NO_VALUE
    values |= dict.fromkeys(map(str, template["Resources"]), OF_STACK)
    known = template.get("Parameters")
    for name, parameter in known.items() if isinstance(known, Mapping) else ():
        if isinstance(parameter, Mapping) and "Default" in parameter:
            values[str(name)] = _check_scalar(parameter["Default"])
    for given in params.get("Parameters") or ():
        if isinstance(given, Mapping) and "ParameterValue" in given:
            values[str(given.get("ParameterKey"))] = _check_scalar(given["ParameterValue"])
    return values


def _check_scalar(value: Any) -> Any:
    """Return a parameter's value. Raises UnreadTemplate if it is a list or a mapping."""
    if isinstance(value, Mapping | list | tuple | set):
        raise UnreadTemplate
    return "" if value in UNKNOWN else value


class _TemplateResolver:
    """Resolver of the references in a template. A value that only CloudFormation knows becomes one
    of ``UNKNOWN``."""

    def __init__(self, template: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        self._values = _build_values(template, params)
        self._conditions = _mapping_at(template, "Conditions")
        self._mappings = _mapping_at(template, "Mappings")
        self._parts_left = _MAX_PARTS
        self._chars_left = _MAX_CHARS

    def resolve(self, value: Any, depth: int = 0) -> Any:
        """Return a property with its function calls evaluated. Raises UnreadTemplate."""
        self._parts_left -= 1
        if depth > _MAX_DEPTH or self._parts_left < 0:
            raise UnreadTemplate
        if isinstance(value, list):
            items = [self.resolve(item, depth + 1) for item in value]
            return [item for item in items if item is not _NO_VALUE]
        if not isinstance(value, Mapping):
            return "" if isinstance(value, str) and value in UNKNOWN else self._count_chars(value)
        if len(value) == 1:
            ((function, argument),) = value.items()
            if function == "Ref" or str(function).startswith("Fn::"):
                return self._count_chars(self._call(str(function), argument, depth + 1))
        inner = {str(name): self.resolve(item, depth + 1) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item is not _NO_VALUE}

    def holds(self, condition: Any, depth: int = 0) -> bool:
        """Return whether a condition is true. ``condition``: its name, or the expression itself.
        Raises UnreadTemplate if that is unknown."""
        self._parts_left -= 1
        if depth > _MAX_DEPTH or self._parts_left < 0:
            raise UnreadTemplate
        if isinstance(condition, str):
            if condition not in self._conditions:
                raise UnreadTemplate
            return self.holds(self._conditions[condition], depth + 1)
        if not isinstance(condition, Mapping) or len(condition) != 1:
            raise UnreadTemplate
        ((function, argument),) = condition.items()
        if function == "Condition":
            return self.holds(argument, depth + 1)
        if not isinstance(argument, list) or not argument:
            raise UnreadTemplate
        if function == "Fn::Equals" and len(argument) == 2:
            one, other = (self.resolve(part, depth + 1) for part in argument)
            if one in UNKNOWN or other in UNKNOWN:
                raise UnreadTemplate
            return str(one) == str(other)
        if function == "Fn::Not" and len(argument) == 1:
            return not self.holds(argument[0], depth + 1)
        if function in ("Fn::And", "Fn::Or"):
            results = [self.holds(part, depth + 1) for part in argument]
            return all(results) if function == "Fn::And" else any(results)
        raise UnreadTemplate

    def _call(self, function: str, argument: Any, depth: int) -> Any:
        """Return the value of a function call. Raises UnreadTemplate."""
        if function == "Ref":
            return self._values.get(str(argument), UNKNOWN[1])
        if function == "Fn::GetAtt":
            return OF_STACK
        if function == "Fn::Sub":
            return self._substitute(argument, depth)
        if not isinstance(argument, list):
            return UNKNOWN[1]
        if function == "Fn::If" and len(argument) == 3:
            return self.resolve(
                argument[1] if self.holds(argument[0], depth) else argument[2], depth
            )
        parts = [self.resolve(part, depth) for part in argument]
        texts = [part for part in parts if isinstance(part, str)]
        for unknown in UNKNOWN:
            if unknown in texts:
                return unknown
        if function == "Fn::Join" and len(parts) == 2 and isinstance(parts[1], list):
            return self._join(str(parts[0]), parts[1])
        if function == "Fn::Split" and len(texts) == 2 and texts[0]:
            return texts[1].split(texts[0])
        if function == "Fn::Select" and len(parts) == 2 and isinstance(parts[1], list):
            place = str(parts[0])
            if place.isdecimal() and len(place) < 6 and int(place) < len(parts[1]):
                return parts[1][int(place)]
        if function == "Fn::FindInMap" and len(texts) == 3:
            value = _mapping_at(_mapping_at(self._mappings, texts[0]), texts[1]).get(
                texts[2], UNKNOWN[1]
            )
            return self.resolve(value, depth)
        return UNKNOWN[1]

    def _join(self, between: str, parts: list[Any]) -> str:
        """Return the value of ``Fn::Join``. ``between``: the separator."""
        for unknown in UNKNOWN:
            if unknown in parts:
                return unknown
        if not all(isinstance(part, str | int) for part in parts):
            return UNKNOWN[1]
        texts = [str(part) for part in parts]
        self._spend(len(between) * len(texts) + sum(map(len, texts)))
        return between.join(texts)

    def _substitute(self, argument: Any, depth: int) -> str:
        """Return the value of ``Fn::Sub``, or ``OF_STACK`` if part of the text comes from another
        resource."""
        own: Any = {}
        if isinstance(argument, list) and len(argument) == 2 and isinstance(argument[1], Mapping):
            own = self.resolve(argument[1], depth)
            argument = argument[0]
        if not isinstance(argument, str):
            return UNKNOWN[1]
        names = [match[1].strip() for match in _PLACE.finditer(argument)]
        values = {name: self._value_of_place(name, own) for name in names}
        for unknown in UNKNOWN:
            if unknown in values.values():
                return unknown
        texts = {name: str(value) for name, value in values.items()}
        self._spend(sum(len(texts[name]) for name in names))
        return _PLACE.sub(lambda match: texts[match[1].strip()], argument)

    def _value_of_place(self, name: str, own: Mapping[str, Any]) -> Any:
        """Return the value of a placeholder: one of the variables ``own`` given to the function, a
        stack parameter, or an attribute of a resource."""
        value = own.get(name, self._values.get(name))
        if value is None:
            value = OF_STACK if self._values.get(name.partition(".")[0]) == OF_STACK else UNKNOWN[1]
        return value if isinstance(value, str | int) else UNKNOWN[1]

    def _count_chars(self, value: Any) -> Any:
        """Subtract the length of ``value`` from the budget if it is a string. Return ``value``."""
        if isinstance(value, str):
            self._spend(len(value))
        return value

    def _spend(self, chars: int) -> None:
        """Subtract characters from the budget. Raises UnreadTemplate if it is exhausted."""
        self._chars_left -= chars
        if self._chars_left < 0:
            raise UnreadTemplate


def _mapping_at(value: Any, name: str) -> Mapping[str, Any]:
    """Return the mapping under ``name``, or an empty one if there is none."""
    mapping = value.get(name) if isinstance(value, Mapping) else None
    return mapping if isinstance(mapping, Mapping) else {}
