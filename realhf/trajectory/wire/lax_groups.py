"""Lax path for JSON: applies the original server's coercions, produces its error lists, and returns
canonical bytes.

It is slow and exact, and handles what the fast path cannot decide. Source:
docs/reference/trajectory.md 2.1, 2.6, 3.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from isal import isal_zlib
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from realhf.trajectory.records import FIELDS, FREE_FIELDS, Encoding, Incoming, invalid
from realhf.trajectory.wire.json_groups import complete_messages
from realhf.web.refusal import Refusal

MAX_ERRORS = 20
"""Maximum number of errors that a response with status 422 lists."""

Loc = list[str | int]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list that reports at most one error, so that a million invalid numbers do not become a million
errors."""


class ScoredData(BaseModel):
    """Pydantic model of one group of sequences, declared as in the original server. Rows may be
    ragged; fields are not checked against each other."""

    model_config = ConfigDict(extra="ignore")

    tokens: Items[Items[int]]
    masks: Items[Items[int]] = Field(description="-100: not trained")
    scores: Items[FiniteFloat]
    advantages: Items[Items[FiniteFloat]] | None = None
    ref_logprobs: Items[Items[FiniteFloat]] | None = None
    messages: Items[Items[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Items[Items[FiniteFloat]] | None = Field(
        None, description="1.0 at masked positions"
    )
    overrides: Items[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Int64 | None = None
    distill_token_ids: Items[Items[Items[int]]] | None = None
    distill_logprobs: Items[Items[Items[FiniteFloat]]] | None = None
    policy_version: Int64 | None = None

    @field_validator("messages")
    @classmethod
    def _role_and_content(cls, value: Any) -> Any:
        if not complete_messages(value):
            raise ValueError("each message needs 'role' and 'content'")
        return value


def read_lax(data: bytes, loc: Loc, *, int64: bool) -> Incoming:
    """Read a group from ``data``. ``int64``: tokens and masks must fit signed 64 bits. Raises
    Refusal 422; ``loc`` is the group's location in the request, for the error."""
    return from_object(parse(data, loc), loc, int64=int64)


def read_lax_list(data: bytes, loc: Loc, *, int64: bool) -> list[Incoming]:
    """Read the groups of a list that the fast path could not split. Raises Refusal 422."""
    value = parse(data, loc)
    if not isinstance(value, list):
        raise invalid(loc, "Input should be a valid list", "list_type", format_input(value))
    return [from_object(item, [*loc, index], int64=int64) for index, item in enumerate(value)]


def parse(data: bytes, loc: Loc) -> Any:
    """Parse JSON. Raises Refusal 422 for malformed or too deeply nested JSON, and for numbers with
    too many digits."""
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise invalid(loc, "JSON is nested too deeply", "json_invalid") from None
    except ValueError as error:
        raise invalid(loc, f"JSON decode error: {error}", "json_invalid") from None


def from_object(value: Any, loc: Loc, *, int64: bool) -> Incoming:
    """Validate and encode one parsed group. Raises Refusal 422."""
    try:
        group = ScoredData.model_validate(value)
        _check_free_fields(group, loc)
        if int64:
            _check_int64(group, loc)
        chosen = {name: getattr(group, name) for name in FIELDS if name in group.model_fields_set}
        data = json.dumps(
            chosen, separators=(",", ":"), allow_nan=False, ensure_ascii=False
        ).encode()
    except ValidationError as error:
        raise Refusal(
            422, problems(error.errors(include_url=False, include_context=False), loc)
        ) from None
    except RecursionError:
        raise invalid(loc, "the group is nested too deeply", "recursion_loop") from None
    except UnicodeEncodeError as error:
        raise invalid(
            loc, f"a text holds half of a surrogate pair: {error}", "string_unicode"
        ) from None
    except (OverflowError, ValueError) as error:
        raise invalid(loc, f"a number cannot be kept: {error}") from None
    present = sum(1 << bit for bit, name in enumerate(FIELDS) if name in chosen)
    return Incoming(
        data,
        Encoding.JSON,
        present,
        isal_zlib.crc32(data),
        len(group.tokens),
        group.env_id,
        group.policy_version,
    )


def problems(errors: Sequence[Any], loc: Loc) -> list[dict[str, Any]]:
    """Return pydantic's errors in the original server's format. Inputs are included if they are
    short and JSON-serialisable."""
    return [
        {
            "type": item["type"],
            "loc": [*loc, *map(format_input, item["loc"])],
            "msg": format_input(str(item["msg"])),
            "input": format_input(item.get("input")),
        }
        for item in errors[:MAX_ERRORS]
    ]


def format_input(value: Any) -> Any:
    """Return a value in the form in which an error shows it: scalars unchanged, other values by
    type name."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else "a large integer"
    if isinstance(value, str):
        return value[:200].encode("utf-8", "replace").decode()
    return f"a {type(value).__name__}"


def _check_free_fields(group: ScoredData, loc: Loc) -> None:
    for name in FREE_FIELDS:
        for where in _find_not_finite(getattr(group, name)):
            raise invalid(
                [*loc, name, *map(format_input, where)],
                "Input should be a finite number",
                "finite_number",
            )


def _find_not_finite(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of numbers that JSON cannot represent."""
    if isinstance(value, float):
        if not math.isfinite(value):
            yield ()
    elif isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            for where in _find_not_finite(item):
                yield (key, *where)


def _check_int64(group: ScoredData, loc: Loc) -> None:
    for name in ("tokens", "masks", "distill_token_ids"):
        for where in _find_beyond_int64(getattr(group, name) or []):
            raise invalid(
                [*loc, name, *where], "Input should fit a signed 64 bit integer", "int_range"
            )


def _find_beyond_int64(values: list[Any]) -> Iterator[tuple[int, ...]]:
    """Yield the paths of integers beyond signed 64 bits in nested lists."""
    if values and isinstance(values[0], int) and min(values) >= -(2**63) and max(values) < 2**63:
        return
    for index, item in enumerate(values):
        if isinstance(item, list):
            for where in _find_beyond_int64(item):
                yield (index, *where)
        elif not -(2**63) <= item < 2**63:
            yield (index,)
