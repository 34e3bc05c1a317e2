"""Exception for a request that is not served, with its HTTP status and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """Raised for a request that is not served.

    APIs have different formats for error bodies, so each server converts a refusal to a response
    itself.
    """

    status: int
    """HTTP status."""
    detail: Any
    """The reason: a string, or for status 422 a JSON list of problems."""
    headers: dict[str, str]
    """Response headers, such as ``Retry-After``."""
    code: str
    """Error code for programs, such as ``BUSY``; "" if the API has none."""
    more: dict[str, Any]
    """Further keys of the error body."""

    def __init__(
        self,
        status: int,
        detail: Any,
        headers: Mapping[str, str] | None = None,
        *,
        code: str = "",
        **more: Any,
    ) -> None:
        super().__init__(detail if isinstance(detail, str) else f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.code = code
        self.more = more

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling, because the parser process raises refusals in its parent."""
        return (
            Refusal,
            (self.status, self.detail, self.headers),
            {"code": self.code, "more": self.more},
        )
