"""Keeps on a host what a launcher brings there: files in the agent's own folder, whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

from realhf.cluster.messages import FilePiece, Kept

PROBLEM_CHARACTERS = 500


def keep(piece: FilePiece, folder: Path) -> Kept:
    """Write a part of a file below ``folder``, and say what became of it. A file gets its name with its last part; when
    a part cannot be written, the parts before it are removed, and those after it are refused."""
    path = Path(piece.path)
    try:
        if not path.is_absolute() or ".." in path.parts or not path.is_relative_to(folder):
            raise PermissionError(f"it is not in {folder}")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.part")
        size = _written(piece, partial)
        if piece.last:
            partial.replace(path)
    except (OSError, ValueError) as error:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return Kept(piece.path, 0, said[:PROBLEM_CHARACTERS])
    return Kept(piece.path, size, "")


def _written(piece: FilePiece, partial: Path) -> int:
    """Append a part; return how large the file is then. Raises OSError; nothing of the file is left."""
    if piece.offset == 0:
        partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "ab") as file:
            if file.tell() != piece.offset:
                raise OSError(f"a part before byte {piece.offset} is missing")
            file.write(piece.data)
            file.flush()
            return file.tell()
    except OSError:
        partial.unlink(missing_ok=True)
        raise
