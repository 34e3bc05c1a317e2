"""References of environments: those of ``realhf.base.plugin``, and a registered name with the option
that it needs, such as ``harbor:FOLDER`` and ``mcp:COMMAND``."""

from __future__ import annotations

from pathlib import Path

from realhf.base.plugin import absolute_reference, split_reference

_HARBOR = "harbor"
SCHEMES = frozenset({_HARBOR, "mcp"})
"""Registered environments that a reference may name together with the option that they need."""


def split_scheme(reference: str) -> tuple[str, str] | None:
    """Return (registered name, value of the option that it needs) of a reference such as
    ``harbor:FOLDER``; None for any other reference."""
    name, colon, value = reference.partition(":")
    return (name, value.strip()) if colon and name in SCHEMES else None


def name_environment(reference: str) -> str:
    """Return the last part of a reference: ``Mine`` for ``mine.py:Mine``, ``mine`` for ``mine.py``
    and ``tasks`` for ``harbor:/data/tasks``; a registered name, and a command, as it is."""
    scheme = split_scheme(reference)
    if scheme is not None:
        return Path(scheme[1]).name if scheme[0] == _HARBOR else reference
    parts = split_reference(reference)
    return parts.name or (Path(parts.place).stem if parts.place else reference)


def absolute_environment(reference: str) -> str:
    """Return the reference of an environment with its file or folder made absolute, so that every
    process of a run can use it."""
    scheme = split_scheme(reference)
    if scheme is None:
        return absolute_reference(reference)
    name, value = scheme
    is_folder = name == _HARBOR and value
    return f"{name}:{Path(value).expanduser().resolve()}" if is_folder else reference
