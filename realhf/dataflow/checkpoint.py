"""Recovery checkpoints, written atomically (docs/reference/dataflow.md 12).

A checkpoint is written into ``ckpt-<step>.tmp``, synced, listed with sizes and hashes in
``MANIFEST.json``, renamed to ``ckpt-<step>``, and only then named by ``LATEST``. Workers sync and
hash the files that they write, so that the master, which only commits, need not read them again. A
process killed at any instant leaves the old checkpoint or the new one, never a mix. Reading
verifies every byte and falls back to an older checkpoint.

A run without any checkpoint starts at step 0, but a run whose checkpoints cannot be read is
refused: it must not start over silently. Reading changes nothing; a damaged checkpoint is renamed
when the next one is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from realhf.api.calls import SavedFile
from realhf.base.files import (
    DAMAGED,
    dangling_link_error,
    describe_disk_error,
    sync,
    unused_name,
    write_atomic,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "MANIFEST.json"
"""File, within a checkpoint, with the sizes and hashes of all other files."""
STATE = "state.json"
"""File, within a checkpoint, with the master's state."""
LATEST = "LATEST"
"""File with the name of the newest checkpoint."""
FOLDER = "checkpoints"
"""Folder, within a run folder, that contains the checkpoints."""
RECORD = "checkpoints.json"
"""File, within a run folder, that names the newest checkpoint, so that the loss of deleted
checkpoints is noticed."""
SUMMARY = "summary.json"
"""File, within a run folder, that only a finished run has; the last step of such a run has a
checkpoint."""
START_OVER = "start over with recover_mode=disabled, which deletes the files of the run"
"""Advice appended to the error messages."""

_NAME = re.compile(r"ckpt-(\d+)(?:-(\d+))?")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Error numbers that mean that a file does not exist. Any other error (EMFILE, EIO, EACCES, ...)
may be temporary and tells nothing about the file."""


class CheckpointError(RuntimeError):
    """Error: a checkpoint could not be written or read. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    """Number of completed steps."""
    folder: Path
    """Folder of the checkpoint."""
    state: dict[str, Any]
    """The master's state."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user, for example why this is not the newest checkpoint that was written."""


class CheckpointStore:
    """Store of the checkpoints below ``folder``, which keeps the newest ``keep``.

    ``record`` is a file that is written with each checkpoint. If ``record`` or one of the files
    ``evidence`` exists, a checkpoint must have been written.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 2,
        *,
        record: Path | None = None,
        evidence: Iterable[Path] = (),
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, must be at least 1")
        self.folder = folder
        self.keep = keep
        self._record = record
        self._evidence = [*([record] if record is not None else []), *evidence]
        self._damaged: set[Path] = set()

    @classmethod
    def for_run(cls, run_dir: Path, keep: int = 2) -> CheckpointStore:
        """Return the store of a run folder."""
        return cls(run_dir / FOLDER, keep, record=run_dir / RECORD, evidence=[run_dir / SUMMARY])

    def begin(self, step: int) -> Path:
        """Create an empty temporary folder for the checkpoint of ``step``, which other processes
        may fill, and return it. Raises CheckpointError or OSError (see ``abandon``)."""
        draft = self.folder / f"{_name(step)}.tmp"
        try:
            self.discard(draft)
            draft.mkdir(parents=True)
        except OSError as error:
            raise self.abandon(step, draft, error) from error
        return draft

    def commit(
        self, step: int, draft: Path, state: Mapping[str, Any], saved: Iterable[SavedFile] = ()
    ) -> Path:
        """Make the filled folder the latest checkpoint and return its final path.

        ``saved`` are the files in it that their writers have synced and hashed; all others are
        synced and hashed here. Raises CheckpointError or OSError (see ``abandon``), also for a file
        that is missing or does not have its reported size.
        """
        try:
            write_atomic(draft / STATE, json.dumps(state), synced=True)
            known = _check_saved(draft, saved)
            write_atomic(
                draft / MANIFEST,
                json.dumps(_build_manifest(draft, step, known), indent=1),
                synced=True,
            )
            _sync_tree(draft, known)
            final = self._unused_path(step)
            os.rename(draft, final)
            sync(self.folder)
            self._set_damaged_aside()
            self._point_latest(final)
            if self._record is not None:
                write_atomic(
                    self._record,
                    json.dumps({"newest": final.name, "step": step}) + "\n",
                    synced=True,
                )
        except OSError as error:
            raise self.abandon(step, draft, error) from error
        self._prune(final)
        return final

    def abandon(self, step: int, draft: Path, error: BaseException) -> BaseException:
        """Remove the temporary folder and return the error to raise.

        This is a CheckpointError if the disk is the cause (full, read-only), here or in another
        process; otherwise it is ``error`` itself.
        """
        self.discard(draft)
        reason = describe_disk_error(error) or (str(error) if isinstance(error, OSError) else "")
        if not reason:
            return error
        return CheckpointError(
            f"checkpoint of step {step} was not written to {self.folder}: "
            f"{reason[0].lower()}{reason[1:]}; earlier "
            "checkpoints are intact. When the disk can be written again, the same trial_name "
            "continues "
            "(exp_ctrl.keep=1 "
            "keeps one checkpoint, monitor.rollouts=0 records no rollouts)"
        )

    def discard(self, draft: Path) -> None:
        """Remove the temporary folder of a checkpoint."""
        shutil.rmtree(draft, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, after verifying every byte; None if no checkpoint
        was ever written.

        The result's warnings name the damaged checkpoints that were skipped. Raises CheckpointError
        if all checkpoints are damaged, or if a file cannot be read at the moment. Changes nothing
        on disk.
        """
        defects: list[str] = []
        for path in self._candidates():
            defect = self._read(_find_defect, path)
            if defect is None:
                state = self._read(_read_state, path)
                return Checkpoint(
                    _order(path)[0], path, state, tuple(self._warnings(path, defects))
                )
            _log.warning("checkpoint %s is not valid (%s); trying the one before", path, defect)
            self._damaged.add(path)
            defects.append(f"{path.name} ({defect})")
        self._ensure_none_written(defects)
        return None

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the step and the state of the newest checkpoint that appears intact; None if no
        checkpoint was ever written.

        Large files are checked only by size. Raises CheckpointError as ``latest`` does.
        """
        defects: list[str] = []
        for path in self._candidates():
            defect = self._read(_find_rough_defect, path)
            if defect is None:
                return _order(path)[0], self._read(_read_state, path)
            defects.append(f"{path.name} ({defect})")
        self._ensure_none_written(defects)
        return None

    def _ensure_none_written(self, defects: Sequence[str]) -> None:
        """Raise CheckpointError if a checkpoint was ever written here, although none is usable.
        ``defects`` describes the damaged ones."""
        if defects:
            raise CheckpointError(
                f"{self.folder} has checkpoints, but none can be used: {'; '.join(defects)}. "
                f"Nothing was changed; put "
                f"back what is missing, or {START_OVER}"
            )
        evidence = next((path for path in self._evidence if os.path.lexists(path)), None)
        if evidence is not None:
            raise CheckpointError(
                f"{self.folder} has no checkpoint, though the run has made one ({evidence} "
                f"exists). Nothing was "
                f"changed; put its checkpoints back, or {START_OVER}"
            )

    def _read(self, read: Callable[[Path], T], path: Path) -> T:
        """Return ``read(path)``, converting an OSError to a CheckpointError.

        An OSError does not mean damage: the disk does not answer, or the process lacks permission
        or file descriptors. Falling back to an older checkpoint would throw away good steps.
        """
        try:
            return read(path)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or path} cannot be read: {error.strerror or error}; whether "
                f"the checkpoint {path.name} is intact is unknown, so nothing was changed. Run "
                "again "
                f"when it can be read, "
                f"or {START_OVER}"
            ) from error

    def _warnings(self, path: Path, defects: Sequence[str]) -> Iterator[str]:
        if defects:
            renamed = ", ".join(f"{defect.partition(' ')[0]}{DAMAGED}" for defect in defects)
            yield (
                f"the run resumes from the checkpoint of step {_order(path)[0]}, because later "
                f"ones cannot be used: "
                f"{'; '.join(defects)}. The next checkpoint puts them aside as {renamed}, which "
                "you "
                f"may delete"
            )
        elif (latest_name := self._read_latest()) != path.name:
            yield (
                f"{self.folder / LATEST} does not name the newest checkpoint ({latest_name}); the "
                f"run resumes from "
                f"{path.name}, whose files were all verified"
            )

    def _read_latest(self) -> str:
        """Return the checkpoint name in LATEST, or a phrase that explains why there is none."""
        try:
            text = (self.folder / LATEST).read_bytes()
        except OSError as error:
            return error.strerror or str(error)
        return ascii(text[:40].decode("utf-8", "replace").strip()).strip("'") or "it is empty"

    def _candidates(self) -> list[Path]:
        """Return the paths that have the name of a checkpoint, newest first."""
        paths = [
            self.folder / name
            for name in self._read(_list_names, self.folder)
            if _NAME.fullmatch(name)
        ]
        if paths and (self.folder / LATEST).is_dir():
            raise CheckpointError(
                f"{self.folder / LATEST} is a folder instead of a file; remove it, or {START_OVER}"
            )
        return sorted(paths, key=_order, reverse=True)

    def _folders(self) -> list[Path]:
        return [path for path in self._candidates() if path.is_dir()]

    def _set_damaged_aside(self) -> None:
        """Rename the damaged checkpoints."""
        for path in sorted(self._damaged):
            if os.path.lexists(path):
                os.rename(path, unused_name(path, DAMAGED))
        self._damaged.clear()

    def _point_latest(self, final: Path) -> None:
        write_atomic(self.folder / LATEST, final.name, synced=True)

    def _unused_path(self, step: int) -> Path:
        """Return an unused path for the checkpoint of a step. If there is one from an earlier
        attempt at the step, the path gets a suffix, so that nothing valid is ever moved or
        overwritten."""
        attempt = 0
        while os.path.lexists(final := self.folder / _name(step, attempt)):
            attempt += 1
        return final

    def _prune(self, newest: Path) -> None:
        """Delete the checkpoints older than the last ``keep``. Also delete those newer than the one
        just written, because they belong to a history from before the run was resumed at an earlier
        step."""
        older = sorted(
            (f for f in self._folders() if _order(f) < _order(newest)), key=_order, reverse=True
        )
        superseded = older[self.keep - 1 :] + [
            f for f in self._folders() if _order(f) > _order(newest)
        ]
        for path in [*superseded, *self.folder.glob("ckpt-*.tmp")]:
            shutil.rmtree(path, ignore_errors=True)


def _name(step: int, attempt: int = 0) -> str:
    return f"ckpt-{step:08d}" + (f"-{attempt}" if attempt else "")


def _order(folder: Path) -> tuple[int, int]:
    """Return (step, attempt) of a checkpoint's folder, the sort key of checkpoints."""
    match = _NAME.fullmatch(folder.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST
    )


def sync_and_hash(path: Path) -> SavedFile:
    """Sync a newly written file to disk, and return its size in bytes and its hash."""
    sync(path)
    return SavedFile(str(path), path.stat().st_size, _sha256(path))


def _check_saved(folder: Path, saved: Iterable[SavedFile]) -> dict[Path, SavedFile]:
    """Return the files that writers reported, by path. Raises OSError for a file that is missing or
    has a different size."""
    known = {}
    for file in saved:
        path = Path(file.path)
        if (
            not path.is_relative_to(folder)
            or not path.is_file()
            or path.stat().st_size != file.size
        ):
            raise OSError(
                f"{file.path} is not there with the {file.size} bytes that its writer reported"
            )
        known[path] = file
    return known


def _build_manifest(folder: Path, step: int, known: Mapping[Path, SavedFile]) -> dict[str, Any]:
    files = [
        {
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "sha256": known[path].sha256 if path in known else _sha256(path),
        }
        for path in _files(folder)
    ]
    return {"step": step, "files": files}


def _list_names(folder: Path) -> list[str]:
    """Return the names in a folder; [] if the folder does not exist. Raises OSError, also for a
    dangling link, which may point to a disk that is not mounted."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise dangling_link_error(folder) from None
        return []


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    """Return the size and hash of every file according to a checkpoint's manifest.

    Raises OSError, ValueError, KeyError or TypeError.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes().decode())
    files = {
        str(entry["path"]): (int(entry["size"]), str(entry["sha256"]))
        for entry in manifest["files"]
    }
    if manifest["step"] != _order(folder)[0] or STATE not in files:
        raise ValueError("it is about something else")
    return files


def _find_defect(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used; None if it is intact. Raises OSError if it cannot be
    read at the moment."""
    return _compare(folder, lambda name: True)


def _find_rough_defect(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used, without reading its large files; None if no defect
    was found."""
    return _compare(folder, lambda name: name == STATE)


def _compare(folder: Path, is_hashed: Callable[[str], bool]) -> str | None:
    """Compare a checkpoint with its manifest: by hash for the files that ``is_hashed`` selects, and
    by size for the others.

    Returns the first difference; None if there is none. Raises OSError if a file cannot be read at
    the moment.
    """
    if not folder.is_dir():
        return "it is not a folder" if folder.exists() else "it is a broken link"
    try:
        files = _read_manifest(folder)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error or type(error).__name__}"
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or (is_hashed(name) and _sha256(path) != digest):
                return f"{name} differs from the manifest"
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return f"{name} is missing"
    return None


def _read_state(folder: Path) -> dict[str, Any]:
    """Return the master's state in a checkpoint. Raises OSError."""
    return json.loads((folder / STATE).read_bytes().decode())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path, already_synced: Iterable[Path]) -> None:
    skipped = set(already_synced)
    for path in [*folder.rglob("*"), folder]:
        if path not in skipped:
            sync(path)
