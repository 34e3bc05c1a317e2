"""Maps a name to an object, or to a ``"module:attribute"`` string that is imported on first use.

So naming a part costs no import of torch. ``realhf.builtins`` holds the registries and what they know from the start.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class Registry:
    """Maps names to objects; an unknown name lists the known ones, a second registration is an error."""

    def __init__(self, kind: str, builtin: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(builtin or {})

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds an object under ``name``. Raises ValueError if the name is taken."""

        def add(item: T) -> T:
            """Register ``item`` and return it."""
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already")
            self._entries[name] = item
            return item

        return add

    def get(self, name: str) -> Any:
        """Return the object called ``name``. Raises KeyError that names close and known names."""
        if name not in self._entries:
            close = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise KeyError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(sorted(self._entries))})")
        item = self._entries[name]
        if isinstance(item, str):
            module, _, attribute = item.partition(":")
            item = self._entries[name] = getattr(importlib.import_module(module), attribute)
        return item

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
