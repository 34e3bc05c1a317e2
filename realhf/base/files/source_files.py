"""Finds the files of the package that a result depends on, so that an artifact is rebuilt when one of them changes."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")


def digest_of(root: Path, folders: Iterable[str]) -> str:
    """Return a digest of the names and contents of all files in these folders of ``root``, but for compiled and hidden
    ones."""
    digest = hashlib.sha256()
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*")):
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            if path.is_file() and path.suffix != ".pyc" and not hidden:
                data = path.read_bytes()
                digest.update(f"{path.relative_to(root)}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def imported_files(package: Path, roots: Iterable[str]) -> list[Path]:
    """Return the files of ``package`` behind the modules ``roots`` (``realhf.api.sample``) and behind everything they
    import or name in a string, as code does that starts ``python -m``. Raises FileNotFoundError for a root that does
    not exist."""
    file_of: dict[str, str] = {}
    waiting = list(roots)
    for root in waiting:
        if not _file(package, root):
            raise FileNotFoundError(f"{package} has no module {root}")
    while waiting:
        name = waiting.pop()
        if name not in file_of:
            file = file_of[name] = _file(package, name)
            if file:
                waiting += _named_in(Path(file).read_text(encoding="utf-8"))
    return sorted({Path(file) for file in file_of.values() if file})


def matching_files(package: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of ``package`` that match any of the patterns. Raises FileNotFoundError for a pattern that
    matches no file."""
    found: set[Path] = set()
    for pattern in patterns:
        files = {path for path in package.glob(pattern) if path.is_file() and path.suffix != ".pyc"}
        if not files:
            raise FileNotFoundError(f"no file of {package} matches {pattern}")
        found |= files
    return sorted(found)


@cache
def _named_in(text: str) -> frozenset[str]:
    return frozenset(_names(ast.parse(text)))


def _names(module: ast.Module) -> Iterator[str]:
    """Yield every name that may be a module: ``from a.b import c`` names ``a.b`` and ``a.b.c``."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _MODULE.fullmatch(node.value):
            yield node.value


def _file(package: Path, module: str) -> str:
    """Return the file of a module of the package, or of a package in it that imports something; empty for others.
    Plain text: thousands of names are looked up, and a ``Path`` costs more than asking the file system."""
    first, _, rest = module.partition(".")
    if first != package.name or not rest:
        return ""
    path = f"{package}/{rest.replace('.', '/')}"
    if os.path.isfile(f"{path}.py"):
        return f"{path}.py"
    initial = f"{path}/__init__.py"
    return initial if os.path.isfile(initial) and os.path.getsize(initial) else ""
