"""A request that is not served, with its HTTP status and reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """A request that is not served.

    Each API has its own form of an error body, so a server turns a refusal into a response itself.
    """

    status: int
    """HTTP status."""
    detail: Any
    """The reason: a text, or for status 422 a JSON list of problems."""
    headers: dict[str, str]
    """Response headers, such as ``Retry-After``."""
    code: str
    """A word that programs compare, such as ``BUSY``; "" where the API has none."""
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
        """Support pickling: a parser process raises refusals for its parent."""
        return (
            Refusal,
            (self.status, self.detail, self.headers),
            {"code": self.code, "more": self.more},
        )
