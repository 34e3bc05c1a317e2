"""Keeps on a host what a launcher brings there: files in the agent's own folder, whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from realhf.cluster.messages import FilePiece, Kept

PROBLEM_CHARACTERS = 500
CARRIED = "carried"
"""Below it a path says which content it has, so that what is there already need not come again."""


def keep(piece: FilePiece, folder: Path) -> Kept:
    """Write a part of a file below ``folder``, and say what became of it. A file gets its name with its last part; when
    a part cannot be written, the parts before it are removed, and those after it are refused. What was carried here
    before, in part or whole, is kept, and the answer says how much it is."""
    path = Path(piece.path)
    try:
        if not path.is_absolute() or ".." in path.parts or not path.is_relative_to(folder):
            raise PermissionError(f"it is not in {folder}")
        goes_on = path.is_relative_to(folder / CARRIED)
        if goes_on and path.is_file():
            return Kept(piece.path, path.stat().st_size, "")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.part")
        size = _written(piece, partial, goes_on=goes_on)
        if piece.last:
            partial.replace(path)
    except (OSError, ValueError) as error:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return Kept(piece.path, 0, said[:PROBLEM_CHARACTERS])
    return Kept(piece.path, size, "")


class HeldKeys:
    """Keeps the keys that a launcher brings to ``folder``/keys in memory of this process, to which their names there
    lead as long as it lives: however it ends, no key is left on the host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "keys"
        self._held: dict[Path, int] = {}

    def takes(self, piece: FilePiece) -> bool:
        """Return whether a part is one of keys."""
        return Path(piece.path).parent == self._folder

    def keep(self, piece: FilePiece) -> Kept:
        """Keep a whole file of keys; it has one part."""
        path = Path(piece.path)
        try:
            if piece.offset or not piece.last or path.name in ("", ".."):
                raise ValueError("no file of keys")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._forget([path])
            descriptor = self._held[path] = os.memfd_create("keys", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(piece.data)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        except (OSError, ValueError) as error:
            return Kept(piece.path, 0, str(error)[:PROBLEM_CHARACTERS])
        return Kept(piece.path, len(piece.data), "")

    def forget(self) -> None:
        """Give up all keys, and what an agent before this one has left."""
        self._forget({*self._held, *self._folder.glob("*")})

    def _forget(self, paths: Iterable[Path]) -> None:
        for path in [*paths]:
            if (descriptor := self._held.pop(path, None)) is not None:
                os.close(descriptor)
            path.unlink(missing_ok=True)


def _written(piece: FilePiece, partial: Path, *, goes_on: bool) -> int:
    """Append a part, or with ``goes_on`` what is missing of it; return how large the file is then. Raises OSError;
    nothing of the file is left."""
    if piece.offset == 0 and not goes_on:
        partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "ab") as file:
            there = file.tell() - piece.offset
            if there < 0 or (there and not goes_on):
                raise OSError(f"a part before byte {piece.offset} is missing")
            if piece.last and there > len(piece.data):
                raise OSError("more of it is there than there is")
            file.write(piece.data[there:])
            file.flush()
            return file.tell()
    except OSError:
        partial.unlink(missing_ok=True)
        raise
