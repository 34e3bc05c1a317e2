"""Errors of the agents' endpoint, which each of its APIs writes in a form of its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

_MAX_CHARS = 300
"""Maximum number of characters of a message about an invalid body."""


class ApiError(Exception):
    """Error of a request, with an HTTP status, a code for programs and a message for people.

    It has no form of its own: the API that got the request writes it, for example with
    ``openai_error``.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        """Path of the field at fault, such as ``messages.0.content``; None if it is no field."""


def unsupported(param: str, problem: str) -> ApiError:
    """Return the error for a valid field that the endpoint does not serve. ``problem`` says what is
    served."""
    return ApiError(400, "unsupported", f"{param}: {problem}", param)


def invalid(param: str, problem: str) -> ApiError:
    """Return the error for a field with an invalid value."""
    return ApiError(400, "invalid_request", f"{param}: {problem}", param)


def check_fields(
    extra: Mapping[str, Any] | None,
    ignored: Collection[str],
    refused: Mapping[str, tuple[tuple[Any, ...], str]],
) -> None:
    """Raise ApiError for a field of a body that is not served.

    extra: the fields that the body's model does not declare. refused: known fields, each with the
    values that ask for nothing and what is served instead. Null asks for nothing.
    """
    for name, value in (extra or {}).items():
        if value is None or name in ignored:
            continue
        harmless, served = refused.get(name, ((), "this field is not served"))
        if value not in harmless:
            raise unsupported(name[:64], served)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """Return the error for a body that pydantic refuses. ``errors`` are FastAPI's, whose locations
    begin with ``body``."""
    first = errors[0]
    # its location is a position in the text
    if first["type"] == "json_invalid":
        return ApiError(400, "invalid_request", "the body is not JSON")
    param = ".".join(str(part) for part in first["loc"][1:])
    # of another type, or bytes, because the request has another content type
    if not param:
        text = "the body is no JSON object of the content type application/json"
        return ApiError(400, "invalid_request", text)
    # pydantic's prefix for errors of our validators
    problem = first["msg"].removeprefix("Value error, ")
    return ApiError(400, "invalid_request", f"{param}: {problem}"[:_MAX_CHARS], param)


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in the form of the OpenAI APIs."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "code": error.code,
            "param": error.param,
        }
    }
