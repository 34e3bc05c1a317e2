"""JSON schemas from requests: validation of values in bounded time, also for hostile schemas.

The schemas are those of JSON Schema 2020-12, checked with the package ``jsonschema``. References
stay within the schema. ``format`` is not checked, as in that standard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from realhf.api.tool_parser import CallProblem, check_value
from realhf.base.installation import install_command
from realhf.rollout.api_errors import ApiError, unsupported

MAX_SCHEMA_CHARS = 1 << 16
"""Maximum number of characters of a schema as JSON text."""
MAX_PATTERN_CHARS = 512
"""Maximum number of characters of a regular expression."""
_CACHED = 256
"""Number of schemas that are kept ready."""
_MAX_WORK = 20_000
"""Maximum work of one check: about the number of keywords, entries and items that are compared."""
_PATTERN_S = 0.1
"""Maximum time of all regular expressions of one check, in seconds."""
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


class _Budget:
    """What is left of the limits of the running check."""

    def __init__(self, patterns: Mapping[str, Any]) -> None:
        self._patterns = patterns
        self._work = _MAX_WORK
        self._seconds = _PATTERN_S

    def reset(self) -> None:
        """Begin a new check."""
        self._work = _MAX_WORK
        self._seconds = _PATTERN_S

    def charge(self, work: int) -> None:
        """Raise _TooMuchWork if the check exceeds its limit with ``work`` more."""
        self._work -= work
        if self._work < 0:
            raise _TooMuchWork

    def matches(self, pattern: str, text: str) -> bool:
        """Return whether a text contains a match of a pattern of the schema. Raises
        _TooMuchWork."""
        started_at = time.perf_counter()
        try:
            return self._patterns[pattern].search(text, timeout=self._seconds) is not None
        except TimeoutError:
            raise _TooMuchWork from None
        finally:
            # ``regex`` takes a limit of 0 for none.
            spent = time.perf_counter() - started_at
            self._seconds = max(self._seconds - spent, 1e-4)


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
        try:
            # Not even the format "regex" is checked, as patterns are compiled below.
            Draft202012Validator.check_schema(schema, format_checker=FormatChecker(()))
        except SchemaError as error:
            place = "".join(f".{part}" for part in error.absolute_path)
            raise SchemaProblem(f"no valid schema: {place[1:]}: {error.message}"[:300]) from None
        self._text = text
        self._budget = _Budget(_check_parts(schema))
        keywords = {
            name: _charge_keyword(self._budget, keyword)
            for name, keyword in Draft202012Validator.VALIDATORS.items()
        }
        keywords["pattern"] = _charge_keyword(self._budget, self._check_pattern)
        keywords["uniqueItems"] = self._charge_pairs(keywords["uniqueItems"])
        self._validator = extend(Draft202012Validator, keywords)(schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonSchema) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def accepts(self, value: Any) -> bool:
        """Return whether a JSON value fits the schema. A check that exceeds the limits accepts
        nothing."""
        self._budget.reset()
        try:
            return self._validator.is_valid(value)
        except (_TooMuchWork, RecursionError):
            return False

    def _check_pattern(self, validator: Any, pattern: str, value: Any, schema: Any) -> Any:
        from jsonschema import ValidationError

        del validator, schema
        if isinstance(value, str) and not self._budget.matches(pattern, value):
            yield ValidationError("the pattern is not matched")

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
        return _cached_schema(text)
    except (CallProblem, ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_schema", f"{param}: {error}", param) from None
    except ImportError as error:
        raise unsupported(
            param,
            f"schemas are checked with the package {error.name}, which is not installed: "
            f"{install_command('train')}",
        ) from error


@lru_cache(_CACHED)
def _cached_schema(text: str) -> JsonSchema:
    return JsonSchema(text)


def _check_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the compiled patterns of a valid schema by their text. Raises SchemaProblem for parts
    that are not served."""
    patterns: dict[str, Any] = {}
    references: list[str] = []
    places: set[str] = set()
    for place, part in _iterate_schemas(schema):
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


def _iterate_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _charge_keyword(budget: _Budget, keyword: Callable[..., Any]) -> Callable[..., Any]:
    """Return the check of a keyword that is charged for its work."""

    def check(validator: Any, wanted: Any, value: Any, schema: Any) -> Any:
        budget.charge(1 + _measure(wanted) + _measure(value))
        yield from keyword(validator, wanted, value, schema) or ()

    return check


def _measure(value: Any) -> int:
    """Return the number of entries or items of a value, which a check compares at most once."""
    if isinstance(value, str):
        return len(value) // _CHARS_PER_WORK
    return len(value) if isinstance(value, dict | list) else 0
