"""Reads what a template of CloudFormation declares: resources with their properties, parameters filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from realhf.aws.cli.pinned_http import REGION
from realhf.aws.tasks.task import ACCOUNT_ID

_DEEPEST = 40
_MOST_PARTS = 20_000
"""Most parts of one template that are read: aliases of YAML multiply them without end."""
_MOST_CHARS = 1_000_000
"""Most characters of one template with all values filled in."""
_MOST_BITS = 10_000
"""Python refuses to write larger numbers in decimals."""
_NESTED = "AWS::CloudFormation::Stack"
"""The type of a stack in a stack, whose template lies elsewhere."""
_PLACE = re.compile(r"\$\{([^!}]+)\}")
OF_STACK = "<of the stack>"
"""Stands for what a property takes from another resource of its template."""
UNKNOWN = (OF_STACK, "<unknown>")
"""What stands for values that only CloudFormation knows."""
_NO_VALUE = object()
"""What ``AWS::NoValue`` means: the property is not there."""


class UnreadTemplate(ValueError):
    """It is not known what a template declares."""


@dataclass(frozen=True)
class Declared:
    """Holds a resource of a template: its name there, its type, and its properties. What a property takes from another
    resource of the template is ``OF_STACK``."""

    name: str
    type: str
    properties: Mapping[str, Any]


class _Loader(yaml.CSafeLoader):
    """Reads the short forms of functions (``!Ref name``) as the long ones."""


def _function(loader: _Loader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        if suffix == "GetAtt":
            value = value.split(".", 1)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _function)


def template_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template in a request that makes or changes a stack; {} where it is not readable or not there."""
    text = str(params.get("TemplateBody", ""))
    try:
        template = json.loads(text)  # which may have tabs, and YAML not
    except (ValueError, RecursionError):
        try:
            template = yaml.load(text, Loader=_Loader)
        except Exception:  # constructors of YAML's own tags raise whatever they like at what an agent wrote
            return {}
    return template if isinstance(template, dict) and isinstance(template.get("Resources"), Mapping) else {}


def declared(params: Mapping[str, Any]) -> list[Declared]:
    """Return the resources in the template of a request that makes or changes a stack, without those whose condition
    does not hold. Raises UnreadTemplate where some of it is not known: it is not readable, lies elsewhere, is
    transformed or larger than anybody writes, or a condition rests on what only CloudFormation knows."""
    template = template_of(params)
    if not template or "Transform" in template:
        raise UnreadTemplate
    _check_size(template)
    reader = _Reader(template, params)
    found = []
    for name, held in template["Resources"].items():
        if not isinstance(held, Mapping) or held.get("Type") == _NESTED:
            raise UnreadTemplate
        if "Condition" in held and not reader.holds(held["Condition"]):
            continue
        properties = reader.resolved(held.get("Properties") or {})
        if not isinstance(properties, Mapping):
            raise UnreadTemplate
        found.append(Declared(str(name), str(held.get("Type", "")), properties))
    return found


def _check_size(template: Any) -> None:
    """Raise UnreadTemplate for a template with more parts, deeper ones or larger numbers than are read."""
    left = _MOST_PARTS
    waiting = [(template, 0)]
    while waiting:
        value, depth = waiting.pop()
        left -= 1
        too_large = isinstance(value, int) and value.bit_length() > _MOST_BITS
        if left < 0 or depth > _DEEPEST or too_large:
            raise UnreadTemplate
        if isinstance(value, Mapping):
            waiting += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list | tuple | set):
            waiting += [(part, depth + 1) for part in value]


def _values(template: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a stack's parameters, given or by default, and of what AWS knows by itself."""
    values: dict[str, Any] = {"AWS::AccountId": ACCOUNT_ID, "AWS::Region": REGION, "AWS::Partition": "aws"}
    values["AWS::StackName"] = params.get("StackName", "")
    values["AWS::NoValue"] = _NO_VALUE
    values |= dict.fromkeys(map(str, template["Resources"]), OF_STACK)
    known = template.get("Parameters")
    for name, held in known.items() if isinstance(known, Mapping) else ():
        if isinstance(held, Mapping) and "Default" in held:
            values[str(name)] = _scalar(held["Default"])
    for given in params.get("Parameters") or ():
        if isinstance(given, Mapping) and "ParameterValue" in given:
            values[str(given.get("ParameterKey"))] = _scalar(given["ParameterValue"])
    return values


def _scalar(value: Any) -> Any:
    """Return the value of a parameter. Raises UnreadTemplate for one that is none."""
    if isinstance(value, Mapping | list | tuple | set):
        raise UnreadTemplate
    return "" if value in UNKNOWN else value


class _Reader:
    """Fills in what a template refers to. What only CloudFormation knows becomes one of ``UNKNOWN``."""

    def __init__(self, template: Mapping[str, Any], params: Mapping[str, Any]) -> None:
        self._values = _values(template, params)
        self._conditions = _part(template, "Conditions")
        self._mappings = _part(template, "Mappings")
        self._left = _MOST_PARTS
        self._left_chars = _MOST_CHARS

    def resolved(self, value: Any, depth: int = 0) -> Any:
        """Return a property as it is set. Raises UnreadTemplate."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise UnreadTemplate
        if isinstance(value, list):
            items = [self.resolved(item, depth + 1) for item in value]
            return [item for item in items if item is not _NO_VALUE]
        if not isinstance(value, Mapping):
            return "" if isinstance(value, str) and value in UNKNOWN else self._counted(value)
        if len(value) == 1:
            ((function, held),) = value.items()
            if function == "Ref" or str(function).startswith("Fn::"):
                return self._counted(self._called(str(function), held, depth + 1))
        inner = {str(name): self.resolved(item, depth + 1) for name, item in value.items()}
        return {name: item for name, item in inner.items() if item is not _NO_VALUE}

    def holds(self, condition: Any, depth: int = 0) -> bool:
        """Return whether a condition holds, by its name or as it is written. Raises UnreadTemplate where that is not
        known."""
        self._left -= 1
        if depth > _DEEPEST or self._left < 0:
            raise UnreadTemplate
        if isinstance(condition, str):
            if condition not in self._conditions:
                raise UnreadTemplate
            return self.holds(self._conditions[condition], depth + 1)
        if not isinstance(condition, Mapping) or len(condition) != 1:
            raise UnreadTemplate
        ((function, held),) = condition.items()
        if function == "Condition":
            return self.holds(held, depth + 1)
        if not isinstance(held, list) or not held:
            raise UnreadTemplate
        if function == "Fn::Equals" and len(held) == 2:
            one, other = (self.resolved(part, depth + 1) for part in held)
            if one in UNKNOWN or other in UNKNOWN:
                raise UnreadTemplate
            return str(one) == str(other)
        if function == "Fn::Not" and len(held) == 1:
            return not self.holds(held[0], depth + 1)
        if function in ("Fn::And", "Fn::Or"):
            found = [self.holds(part, depth + 1) for part in held]
            return all(found) if function == "Fn::And" else any(found)
        raise UnreadTemplate

    def _called(self, function: str, held: Any, depth: int) -> Any:
        """Return the value of a function."""
        if function == "Ref":
            return self._values.get(str(held), UNKNOWN[1])
        if function == "Fn::GetAtt":
            return OF_STACK
        if function == "Fn::Sub":
            return self._substituted(held, depth)
        if not isinstance(held, list):
            return UNKNOWN[1]
        if function == "Fn::If" and len(held) == 3:
            return self.resolved(held[1] if self.holds(held[0], depth) else held[2], depth)
        parts = [self.resolved(part, depth) for part in held]
        texts = [part for part in parts if isinstance(part, str)]
        for unknown in UNKNOWN:
            if unknown in texts:
                return unknown
        if function == "Fn::Join" and len(parts) == 2 and isinstance(parts[1], list):
            return self._joined(str(parts[0]), parts[1])
        if function == "Fn::Split" and len(texts) == 2 and texts[0]:
            return texts[1].split(texts[0])
        if function == "Fn::Select" and len(parts) == 2 and isinstance(parts[1], list):
            place = str(parts[0])
            if place.isdecimal() and len(place) < 6 and int(place) < len(parts[1]):
                return parts[1][int(place)]
        if function == "Fn::FindInMap" and len(texts) == 3:
            found = _part(_part(self._mappings, texts[0]), texts[1]).get(texts[2], UNKNOWN[1])
            return self.resolved(found, depth)
        return UNKNOWN[1]

    def _joined(self, between: str, parts: list[Any]) -> str:
        for unknown in UNKNOWN:
            if unknown in parts:
                return unknown
        if not all(isinstance(part, str | int) for part in parts):
            return UNKNOWN[1]
        texts = [str(part) for part in parts]
        self._spend(len(between) * len(texts) + sum(map(len, texts)))
        return between.join(texts)

    def _substituted(self, held: Any, depth: int) -> str:
        """Return a text with the values of its places; one that takes a part from another resource is that part."""
        own: Any = {}
        if isinstance(held, list) and len(held) == 2 and isinstance(held[1], Mapping):
            own = self.resolved(held[1], depth)
            held = held[0]
        if not isinstance(held, str):
            return UNKNOWN[1]
        names = [match[1].strip() for match in _PLACE.finditer(held)]
        values = {name: self._of_place(name, own) for name in names}
        for unknown in UNKNOWN:
            if unknown in values.values():
                return unknown
        texts = {name: str(value) for name, value in values.items()}
        self._spend(sum(len(texts[name]) for name in names))
        return _PLACE.sub(lambda match: texts[match[1].strip()], held)

    def _of_place(self, name: str, own: Mapping[str, Any]) -> Any:
        """Return what a place in a text stands for: a value of its own, a parameter, or a part of a resource."""
        value = own.get(name, self._values.get(name))
        if value is None:
            value = OF_STACK if self._values.get(name.partition(".")[0]) == OF_STACK else UNKNOWN[1]
        return value if isinstance(value, str | int) else UNKNOWN[1]

    def _counted(self, value: Any) -> Any:
        if isinstance(value, str):
            self._spend(len(value))
        return value

    def _spend(self, chars: int) -> None:
        self._left_chars -= chars
        if self._left_chars < 0:
            raise UnreadTemplate


def _part(value: Any, name: str) -> Mapping[str, Any]:
    """Return a part of a template that is a map, an empty one where there is none."""
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}
