"""Defines the one exception that becomes an HTTP error: a status, a detail that names the cause, headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """Is raised for a request that cannot be served. ``detail`` is JSON-able: a text, or the list of a 422."""

    def __init__(self, status: int, detail: Any, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def invalid(loc: list[str | int], message: str, kind: str = "value_error", given: Any = None) -> Refusal:
    """Make a 422 in the shape of the contract: ``{"detail": [{"type", "loc", "msg", "input"}]}``."""
    return Refusal(422, [{"type": kind, "loc": loc, "msg": message, "input": given}])
