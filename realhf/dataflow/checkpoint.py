"""Recovery checkpoints that are whole or absent (docs/reference/dataflow.md 12).

A checkpoint is written into ``ckpt-<step>.tmp``, synced, listed with sizes and hashes in ``MANIFEST.json``,
renamed to ``ckpt-<step>``, and only then named by ``LATEST``. Workers sync and hash what they write themselves, so
that the master, who only commits, reads none of it again. A process killed at any instant leaves the old
checkpoint or the new one, never a mix; reading verifies every byte and falls back to an older one.

That there are none and that none can be read are different answers: a run begins at step 0 where there never was one,
and is refused where there was. Whoever reads changes nothing; a damaged checkpoint is put aside, under a name of its
own, by the next one that is written.
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
from realhf.base.files import DAMAGED, dangling, disk_reason, sync, unused_name, write_whole

_log = logging.getLogger(__name__)
T = TypeVar("T")

MANIFEST = "MANIFEST.json"
STATE = "state.json"
LATEST = "LATEST"
FOLDER = "checkpoints"
"""The folder of the checkpoints in a run folder."""
RECORD = "checkpoints.json"
"""The file of a run folder that names the newest checkpoint, so that one that is gone is missed."""
SUMMARY = "summary.json"
"""The file of a run folder that a finished run has, whose last step always has a checkpoint."""
BEGIN_ANEW = "begin anew with recover_mode=disabled, which deletes what the run has"

_NAME = re.compile(r"ckpt-(\d+)(?:-(\d+))?")
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""Errors that say what is there instead of a file. Any other one (EMFILE, EIO, EACCES, ...) says that it cannot be
known now."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was saved before is untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the step it was taken after, its folder and the master's state."""

    step: int
    folder: Path
    state: dict[str, Any]
    warnings: tuple[str, ...] = ()
    """What a person should know: why it is not the newest one that was written."""


class CheckpointStore:
    """Checkpoints below ``folder``; the newest ``keep`` stay. ``record`` is written with each of them; it and
    ``evidence`` are files that are there only if there was a checkpoint."""

    def __init__(
        self, folder: Path, keep: int = 2, *, record: Path | None = None, evidence: Iterable[Path] = ()
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, must be at least 1")
        self.folder = folder
        self.keep = keep
        self._record = record
        self._evidence = [*([record] if record is not None else []), *evidence]
        self._damaged: set[Path] = set()

    @classmethod
    def of_run(cls, run_dir: Path, keep: int = 2) -> CheckpointStore:
        """Return the checkpoints of a run folder."""
        return cls(run_dir / FOLDER, keep, record=run_dir / RECORD, evidence=[run_dir / SUMMARY])

    def begin(self, step: int) -> Path:
        """An empty temporary folder for the checkpoint of ``step``, for a writer in other processes."""
        draft = self.folder / f"{_name(step)}.tmp"
        try:
            self.discard(draft)
            draft.mkdir(parents=True)
        except OSError as error:
            raise self.failed(step, draft, error) from error
        return draft

    def commit(self, step: int, draft: Path, state: Mapping[str, Any], saved: Iterable[SavedFile] = ()) -> Path:
        """Make the filled folder the latest checkpoint. ``saved`` are files in it that their writers have synced and
        hashed; all others are synced and hashed here. Raises what ``failed`` returns, also for a file that is not as
        its writer said."""
        try:
            write_whole(draft / STATE, json.dumps(state), synced=True)
            known = _known(draft, saved)
            write_whole(draft / MANIFEST, json.dumps(_manifest(draft, step, known), indent=1), synced=True)
            _sync_tree(draft, known)
            final = self._unused(step)
            os.rename(draft, final)
            sync(self.folder)
            self._set_aside()
            self._point_latest(final)
            if self._record is not None:
                write_whole(self._record, json.dumps({"newest": final.name, "step": step}) + "\n", synced=True)
        except OSError as error:
            raise self.failed(step, draft, error) from error
        self._prune(final)
        return final

    def failed(self, step: int, draft: Path, error: BaseException) -> BaseException:
        """Remove the temporary folder; the error to raise: a CheckpointError with one clear message when the
        disk (full, read-only) is to blame, here or in a writer elsewhere, otherwise ``error`` itself."""
        self.discard(draft)
        reason = disk_reason(error) or (str(error) if isinstance(error, OSError) else "")
        if not reason:
            return error
        return CheckpointError(
            f"checkpoint of step {step} was not written to {self.folder}: {reason[0].lower()}{reason[1:]}; earlier "
            "checkpoints are intact. When the disk takes more again, the same trial_name goes on (exp_ctrl.keep=1 "
            "keeps one checkpoint, monitor.rollouts=0 records no rollouts)"
        )

    def discard(self, draft: Path) -> None:
        """Remove a temporary folder."""
        shutil.rmtree(draft, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte is as written, None where there never was one. Its warnings
        say which ones were passed over. Raises CheckpointError where there are some and none can be used, and where
        that cannot be known now; then nothing was changed."""
        defects: list[str] = []
        for path in self._candidates():
            reason = self._known_now(_defect, path)
            if reason is None:
                state = self._known_now(_state, path)
                return Checkpoint(_order(path)[0], path, state, tuple(self._warnings(path, defects)))
            _log.warning("checkpoint %s is not valid (%s); trying the one before", path, reason)
            self._damaged.add(path)
            defects.append(f"{path.name} ({reason})")
        self._refuse_none(defects)
        return None

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the step and the state of the newest checkpoint that looks whole, without reading its large files;
        None where there never was one. Raises CheckpointError as ``latest`` does."""
        defects: list[str] = []
        for path in self._candidates():
            reason = self._known_now(_rough_defect, path)
            if reason is None:
                return _order(path)[0], self._known_now(_state, path)
            defects.append(f"{path.name} ({reason})")
        self._refuse_none(defects)
        return None

    def _refuse_none(self, defects: Sequence[str]) -> None:
        """Raise CheckpointError unless there never was a checkpoint."""
        if defects:
            raise CheckpointError(
                f"{self.folder} holds checkpoints and none can be used: {'; '.join(defects)}. Nothing was changed; put "
                f"back what is missing, or {BEGIN_ANEW}"
            )
        known = next((path for path in self._evidence if os.path.lexists(path)), None)
        if known is not None:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint, though the run has made one ({known} is there). Nothing was "
                f"changed; put its checkpoints back, or {BEGIN_ANEW}"
            )

    def _known_now(self, look: Callable[[Path], T], path: Path) -> T:
        """Return what ``look`` says. Raises CheckpointError for what is no damage: the disk does not answer, the
        process may not read or has no descriptor left. An older checkpoint instead would throw away good steps."""
        try:
            return look(path)
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or path} cannot be read: {error.strerror or error}; this says nothing of the "
                f"checkpoint {path.name}, so nothing was changed. Run again when it can be read, or {BEGIN_ANEW}"
            ) from error

    def _warnings(self, path: Path, defects: Sequence[str]) -> Iterator[str]:
        if defects:
            kept = ", ".join(f"{defect.partition(' ')[0]}{DAMAGED}" for defect in defects)
            yield (
                f"the run goes on from the checkpoint of step {_order(path)[0]}, because later ones cannot be used: "
                f"{'; '.join(defects)}. The next checkpoint puts them aside as {kept}, which you may delete"
            )
        elif (named := self._named()) != path.name:
            yield (
                f"{self.folder / LATEST} does not name the newest checkpoint ({named}); the run goes on from "
                f"{path.name}, whose every byte is as written"
            )

    def _named(self) -> str:
        """Return what LATEST names, or in words why it names nothing."""
        try:
            text = (self.folder / LATEST).read_bytes()
        except OSError as error:
            return error.strerror or str(error)
        return ascii(text[:40].decode("utf-8", "replace").strip()).strip("'") or "it is empty"

    def _candidates(self) -> list[Path]:
        """Return what has the name of a checkpoint, from new to old."""
        found = [self.folder / name for name in self._known_now(_names, self.folder) if _NAME.fullmatch(name)]
        if found and (self.folder / LATEST).is_dir():
            raise CheckpointError(
                f"{self.folder / LATEST} is a folder, and a file is wanted; remove it, or {BEGIN_ANEW}"
            )
        return sorted(found, key=_order, reverse=True)

    def _folders(self) -> list[Path]:
        return [path for path in self._candidates() if path.is_dir()]

    def _set_aside(self) -> None:
        """Give the checkpoints that could not be used another name."""
        for path in sorted(self._damaged):
            if os.path.lexists(path):
                os.rename(path, unused_name(path, DAMAGED))
        self._damaged.clear()

    def _point_latest(self, final: Path) -> None:
        write_whole(self.folder / LATEST, final.name, synced=True)

    def _unused(self, step: int) -> Path:
        """A step that is run again gets a name of its own: nothing valid is ever moved or overwritten."""
        attempt = 0
        while os.path.lexists(final := self.folder / _name(step, attempt)):
            attempt += 1
        return final

    def _prune(self, newest: Path) -> None:
        """Remove what is older than the last ``keep``, and what is newer than the one just written: that
        belongs to a history which was resumed from an earlier step."""
        older = sorted((f for f in self._folders() if _order(f) < _order(newest)), key=_order, reverse=True)
        gone = older[self.keep - 1 :] + [f for f in self._folders() if _order(f) > _order(newest)]
        for path in [*gone, *self.folder.glob("ckpt-*.tmp")]:
            shutil.rmtree(path, ignore_errors=True)


def _name(step: int, attempt: int = 0) -> str:
    return f"ckpt-{step:08d}" + (f"-{attempt}" if attempt else "")


def _order(folder: Path) -> tuple[int, int]:
    """(step, attempt) of a checkpoint's folder."""
    match = _NAME.fullmatch(folder.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def saved_file(path: Path) -> SavedFile:
    """Sync a file that was just written, and say how long it is and what it holds."""
    sync(path)
    return SavedFile(str(path), path.stat().st_size, _sha256(path))


def _known(folder: Path, saved: Iterable[SavedFile]) -> dict[Path, SavedFile]:
    """What writers said about the files of a folder. Raises OSError for a file that is not there, or not so long."""
    known = {}
    for file in saved:
        path = Path(file.path)
        if not path.is_relative_to(folder) or not path.is_file() or path.stat().st_size != file.size:
            raise OSError(f"{file.path} is not there with the {file.size} bytes that its writer reported")
        known[path] = file
    return known


def _manifest(folder: Path, step: int, known: Mapping[Path, SavedFile]) -> dict[str, Any]:
    files = [
        {
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "sha256": known[path].sha256 if path in known else _sha256(path),
        }
        for path in _files(folder)
    ]
    return {"step": step, "files": files}


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; [] where there is none. Raises OSError, also for a link to nowhere, which is what
    is left of a disk that is not mounted."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise dangling(folder) from None
        return []


def _listed(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and hash of every file of a checkpoint by its manifest. Raises OSError, ValueError, KeyError and
    TypeError."""
    manifest = json.loads((folder / MANIFEST).read_bytes().decode())
    listed = {str(entry["path"]): (int(entry["size"]), str(entry["sha256"])) for entry in manifest["files"]}
    if manifest["step"] != _order(folder)[0] or STATE not in listed:
        raise ValueError("it is about something else")
    return listed


def _defect(folder: Path) -> str | None:
    """Return why a checkpoint cannot be used; None if it is as it was written. Raises OSError where that cannot be
    known now."""
    return _difference(folder, lambda name: True)


def _rough_defect(folder: Path) -> str | None:
    """Return what ``_defect`` does, as far as it can be known without reading large files."""
    return _difference(folder, lambda name: name == STATE)


def _difference(folder: Path, hashed: Callable[[str], bool]) -> str | None:
    """Compare a checkpoint with its manifest, by the hash for files that are to be ``hashed``, else by the size."""
    if not folder.is_dir():
        return "it is no folder" if folder.exists() else "it is a link to nowhere"
    try:
        listed = _listed(folder)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return f"{MANIFEST} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{MANIFEST} cannot be read: {error or type(error).__name__}"
    for name, (size, digest) in listed.items():
        path = folder / name
        try:
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or (hashed(name) and _sha256(path) != digest):
                return f"{name} differs from the manifest"
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return f"{name} is missing"
    return None


def _state(folder: Path) -> dict[str, Any]:
    """Return the master's state in a checkpoint. Raises OSError."""
    return json.loads((folder / STATE).read_bytes().decode())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path, synced: Iterable[Path]) -> None:
    done = set(synced)
    for path in [*folder.rglob("*"), folder]:
        if path not in done:
            sync(path)
