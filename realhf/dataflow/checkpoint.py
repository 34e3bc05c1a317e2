"""Recovery checkpoints that are whole or absent (docs/reference/dataflow.md 12).

A checkpoint is written into ``ckpt-<step>.tmp``, synced, listed with sizes and hashes in ``MANIFEST.json``,
renamed to ``ckpt-<step>``, and only then named by ``LATEST``. Workers sync and hash what they write themselves, so
that the master, who only commits, reads none of it again. A process killed at any instant leaves the old
checkpoint or the new one, never a mix; reading verifies every byte and falls back to an older one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.api.calls import SavedFile
from realhf.base.files import disk_reason, sync, write_whole

_log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
STATE = "state.json"
LATEST = "LATEST"

_NAME = re.compile(r"ckpt-(\d+)(?:-(\d+))?")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; what was saved before is untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: the step it was taken after, its folder and the master's state."""

    step: int
    folder: Path
    state: dict[str, Any]


class CheckpointStore:
    """Checkpoints below ``folder``; the newest ``keep`` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}, must be at least 1")
        self.folder = folder
        self.keep = keep

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
            self._point_latest(final)
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
        """The newest checkpoint whose every byte is as written; broken ones are reported and skipped."""
        for folder in self._candidates():
            reason = _defect(folder)
            if reason is None:
                manifest = json.loads((folder / MANIFEST).read_text())
                return Checkpoint(manifest["step"], folder, json.loads((folder / STATE).read_text()))
            _log.warning("checkpoint %s is not valid (%s); trying the one before", folder, reason)
        return None

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """The step and the state of the checkpoint that would be tried first, without a look at its other files; None
        where there is none that can be read."""
        for folder in self._candidates():
            try:
                return _order(folder)[0], json.loads((folder / STATE).read_text())
            except (OSError, ValueError):
                continue
        return None

    def _candidates(self) -> Iterator[Path]:
        """Folders to try: the one LATEST names, then the others from new to old."""
        named = self.folder / _read_text(self.folder / LATEST)
        folders = sorted(self._folders(), key=_order, reverse=True)
        if named in folders:
            yield named
        yield from (folder for folder in folders if folder != named)

    def _folders(self) -> list[Path]:
        found = self.folder.glob("ckpt-*") if self.folder.is_dir() else []
        return [path for path in found if path.is_dir() and _NAME.fullmatch(path.name)]

    def _point_latest(self, final: Path) -> None:
        write_whole(self.folder / LATEST, final.name, synced=True)

    def _unused(self, step: int) -> Path:
        """A step that is run again gets a name of its own: nothing valid is ever moved or overwritten."""
        attempt = 0
        while (final := self.folder / _name(step, attempt)).exists():
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


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


def _defect(folder: Path) -> str | None:
    """Why a checkpoint cannot be used; None if it is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        listed = {entry["path"]: (entry["size"], entry["sha256"]) for entry in manifest["files"]}
        if manifest["step"] != _order(folder)[0] or STATE not in listed:
            return "its manifest is about something else"
        for name, (size, digest) in listed.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size or _sha256(path) != digest:
                return f"{name} differs from the manifest"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read: {error}"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_tree(folder: Path, synced: Iterable[Path]) -> None:
    done = set(synced)
    for path in [*folder.rglob("*"), folder]:
        if path not in done:
            sync(path)
