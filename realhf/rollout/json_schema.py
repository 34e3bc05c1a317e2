"""JSON schemas from requests: validation of values in bounded time, also for hostile schemas.

The schemas are those of JSON Schema 2020-12, checked with the package ``jsonschema``. References
stay within the schema. ``format`` is not checked, as in that standard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from realhf.api.tool_parser import CallProblem, check_value
from realhf.base.installation import install_command
from realhf.rollout.api_errors import ApiError, unsupported

MAX_SCHEMA_CHARS = 1 << 16
"""Maximum number of characters of a schema as JSON text, and of all schemas of a request's strict
tools together."""
MAX_SCHEMA_PARTS = 2000
"""Maximum number of objects, arrays and booleans of a schema, and of all schemas of a request's
strict tools together. Checking a schema takes up to half a millisecond for each."""
_MAX_TYPES = 7
"""Number of types of JSON, which is the maximum length of a list of types."""
MAX_PATTERN_CHARS = 512
"""Maximum number of characters of a regular expression."""
_CACHED = 256
"""Number of schemas that are kept ready."""
_MAX_WORK = 20_000
"""Maximum work of the checks of one answer: about the number of keywords, entries and items that
are compared."""
_PATTERN_S = 0.1
"""Maximum time of all regular expressions of the checks of one answer, in seconds."""
_CHARS_PER_WORK = 64
"""Number of characters of a string that count as one entry."""
_UNIQUE_PAIRS_PER_WORK = 8
"""Number of pairs of items compared by ``uniqueItems`` that count as one entry."""
_REFUSED = (
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "patternProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords whose work is not bounded here."""
_IDENTITY = ("$schema", "$id")
"""Keywords that name a schema; within a schema they would change how the rest is read."""
_WITH_SCHEMA = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames")
"""Keywords whose value is a schema, with ``then``."""
_WITH_SCHEMAS = (
    "$defs",
    "allOf",
    "anyOf",
    "definitions",
    "dependentSchemas",
    "oneOf",
    "prefixItems",
    "properties",
)
"""Keywords whose value holds schemas by name or position."""


class SchemaProblem(ValueError):
    """Raised for a schema that is invalid, too large or not served. The message says why."""


class _TooMuchWork(Exception):
    """Raised by a check that exceeds its limits."""


class CheckBudget:
    """What is left of the limits of the checks of one answer."""

    def __init__(self) -> None:
        self._work = _MAX_WORK
        self._seconds = _PATTERN_S

    def charge(self, work: int) -> None:
        """Raise _TooMuchWork if the check exceeds its limit with ``work`` more."""
        self._work -= work
        if self._work < 0:
            raise _TooMuchWork

    def matches(self, pattern: Any, text: str) -> bool:
        """Return whether a text contains a match of a compiled pattern. Raises _TooMuchWork."""
        # ``regex`` takes a limit of 0 for none.
        if self._seconds <= 0:
            raise _TooMuchWork
        started_at = time.perf_counter()
        try:
            return pattern.search(text, timeout=self._seconds) is not None
        except TimeoutError:
            raise _TooMuchWork from None
        finally:
            self._seconds -= time.perf_counter() - started_at


class JsonSchema:
    """A schema of a request. Schemas with the same text are equal. Use it in one thread.

    Raises SchemaProblem, and ImportError without the packages ``jsonschema`` and ``regex``.
    """

    def __init__(self, text: str) -> None:
        from jsonschema import Draft202012Validator, FormatChecker, SchemaError
        from jsonschema.validators import extend

        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise SchemaProblem("a schema is a JSON object")
        for key in _IDENTITY:
            schema.pop(key, None)
        self.parts = _count_parts(schema)
        """Number of objects, arrays and booleans of the schema."""
        try:
            # Not even the format "regex" is checked, as patterns are compiled below.
            Draft202012Validator.check_schema(schema, format_checker=FormatChecker(()))
        except SchemaError as error:
            place = "".join(f".{part}" for part in error.absolute_path)
            raise SchemaProblem(f"no valid schema: {place[1:]}: {error.message}"[:300]) from None
        self.value: dict[str, Any] = schema
        """The schema as JSON."""
        self._text = text
        self.chars = len(text)
        """Number of characters of the schema as JSON text."""
        self._patterns = _check_parts(schema)
        self._budget = CheckBudget()
        keywords = {
            name: self._charge_keyword(keyword)
            for name, keyword in Draft202012Validator.VALIDATORS.items()
        }
        keywords["pattern"] = self._charge_keyword(self._check_pattern)
        keywords["uniqueItems"] = self._charge_pairs(keywords["uniqueItems"])
        self._validator = extend(Draft202012Validator, keywords)(schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonSchema) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def accepts(self, value: Any, budget: CheckBudget | None = None) -> bool:
        """Return whether a JSON value fits the schema. A check that exceeds the limits accepts
        nothing. ``budget`` is that of several checks; None for one of its own."""
        self._budget = CheckBudget() if budget is None else budget
        try:
            return self._validator.is_valid(value)
        except (_TooMuchWork, RecursionError):
            return False

    def _check_pattern(self, validator: Any, pattern: str, value: Any, schema: Any) -> Any:
        from jsonschema import ValidationError

        del validator, schema
        if isinstance(value, str) and not self._budget.matches(self._patterns[pattern], value):
            yield ValidationError("the pattern is not matched")

    def _charge_keyword(self, keyword: Callable[..., Any]) -> Callable[..., Any]:
        """Return the check of a keyword that is charged for its work."""

        def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
            self._budget.charge(1 + _measure(wanted) + _measure(value))
            yield from keyword(validator, wanted, value, schema) or ()

        return check

    def _charge_pairs(self, keyword: Callable[..., Any]) -> Callable[..., Any]:
        def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
            if wanted and isinstance(value, list):
                self._budget.charge(len(value) ** 2 // _UNIQUE_PAIRS_PER_WORK)
            yield from keyword(validator, wanted, value, schema)

        return check


def read_schema(value: Any, param: str) -> JsonSchema:
    """Return the schema that a request gives in the field ``param``.

    Raises ApiError for an invalid schema, one beyond the limits or with keywords that are not
    served, and if the packages that check schemas are not installed.
    """
    try:
        check_value(value)
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if len(text) > MAX_SCHEMA_CHARS:
            raise SchemaProblem(f"a schema has at most {MAX_SCHEMA_CHARS} characters")
        schema = _build_schema(text)
        if isinstance(schema, str):
            raise SchemaProblem(schema)
        return schema
    except (CallProblem, ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_schema", f"{param}: {error}", param) from None
    except ImportError as error:
        raise unsupported(
            param,
            f"schemas are checked with the package {error.name}, which is not installed: "
            f"{install_command('train')}",
        ) from error


def read_strict_schemas(schemas: Iterable[tuple[str, Any, str]]) -> dict[str, JsonSchema]:
    """Return the schemas of the strict tools of a request by the tool's name.

    schemas: for each, the tool's name, the schema and its field. Raises ApiError as ``read_schema``
    does, and if they exceed the limits together.
    """
    found: dict[str, JsonSchema] = {}
    chars = 0
    parts = 0
    for name, value, param in schemas:
        schema = read_schema(value, param)
        chars += schema.chars
        parts += schema.parts
        if chars > MAX_SCHEMA_CHARS or parts > MAX_SCHEMA_PARTS:
            text = (
                f"{param}: the schemas of strict tools have at most {MAX_SCHEMA_CHARS} characters "
                f"and {MAX_SCHEMA_PARTS} objects, arrays and booleans together"
            )
            raise ApiError(400, "invalid_schema", text, param)
        found[name] = schema
    return found


@lru_cache(_CACHED)
def _build_schema(text: str) -> JsonSchema | str:
    """Return the schema with this text, or why it is refused; so refusals are cached, too."""
    try:
        return JsonSchema(text)
    except (ValueError, RecursionError) as error:
        return str(error)


def _count_parts(schema: dict[str, Any]) -> int:
    """Return the number of objects, arrays and booleans of a schema that has not been checked.

    Raises SchemaProblem if they are too many, or if a list of types or names would take too long
    to check.
    """
    waiting: list[tuple[str, Any]] = [("", schema)]
    count = 0
    while waiting:
        key, part = waiting.pop()
        if not isinstance(part, dict | list | bool):
            continue
        count += 1
        if count > MAX_SCHEMA_PARTS:
            raise SchemaProblem(
                f"a schema has at most {MAX_SCHEMA_PARTS} objects, arrays and booleans"
            )
        if isinstance(part, dict):
            # each list in these two keywords is like one of ``required``
            has_names = key in ("dependencies", "dependentRequired")
            waiting += [("required" if has_names else name, inner) for name, inner in part.items()]
        elif isinstance(part, list):
            if key == "type" and len(part) > _MAX_TYPES:
                raise SchemaProblem(f"no valid schema: a type list has at most {_MAX_TYPES} items")
            # whether other items are unique is compared pair by pair
            if key == "required" and not all(isinstance(item, str) for item in part):
                raise SchemaProblem("no valid schema: lists of required names contain text only")
            waiting += [("", inner) for inner in part]
    return count


def _check_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the compiled patterns of a valid schema by their text. Raises SchemaProblem for parts
    that are not served."""
    patterns: dict[str, Any] = {}
    references: list[str] = []
    places: set[str] = set()
    for place, part in iterate_schemas(schema):
        places.add(place)
        for key in _REFUSED:
            if key in part:
                raise SchemaProblem(f"{key} is not served")
        for key in _IDENTITY:
            if key in part:
                raise SchemaProblem(f"{key} is served at the top of a schema only")
        if "$ref" in part:
            references.append(part["$ref"])
        if "pattern" in part:
            patterns.setdefault(part["pattern"], _compile_pattern(part["pattern"]))
    for reference in references:
        if not reference.startswith("#") or unquote(reference[1:]) not in places:
            raise SchemaProblem(f"$ref {reference[:64]!r} names no schema within this one")
    return patterns


def iterate_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a valid schema and those within it, each with its JSON pointer."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield place, part
        waiting += [(f"{place}/{key}", part[key]) for key in (*_WITH_SCHEMA, "then") if key in part]
        for key in _WITH_SCHEMAS:
            inner = part.get(key, {})
            named = inner.items() if isinstance(inner, dict) else enumerate(inner)
            waiting += [
                (f"{place}/{key}/{str(name).replace('~', '~0').replace('/', '~1')}", each)
                for name, each in named
            ]


def _compile_pattern(pattern: str) -> Any:
    """Return a compiled regular expression. Raises SchemaProblem."""
    import regex

    if len(pattern) > MAX_PATTERN_CHARS:
        raise SchemaProblem(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
    try:
        return regex.compile(pattern)
    except (regex.error, ValueError, RecursionError, OverflowError) as error:
        raise SchemaProblem(f"the pattern {pattern[:64]!r} is invalid: {error}") from None


def _measure(value: Any) -> int:
    """Return the number of entries or items of a value, which a check compares at most once."""
    if isinstance(value, str):
        return len(value) // _CHARS_PER_WORK
    return len(value) if isinstance(value, dict | list) else 0
