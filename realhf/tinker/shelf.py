"""Keeps saved weights: where they are, whose, until when; and refuses what is not there."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from realhf.tinker.store import CheckpointRow, Store

KINDS = {"training": "weights", "sampler": "sampler_weights"}
"""Kinds of saved weights, and how a path of the client names them."""


class Refused(Exception):
    """A request is not taken; ``status`` is that of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Shelf:
    """Holds the weights that were saved below ``root``; of those without a name the last ``keep_ephemeral`` of each
    model."""

    def __init__(self, store: Store, root: Path, keep_ephemeral: int) -> None:
        self._store, self._root, self._keep = store, root, keep_ephemeral

    def find(self, owner: str, path: str) -> CheckpointRow:
        """Return saved weights of an owner. Raises Refused (404)."""
        row = self._store.checkpoint(path)
        if row is None or row.owner != owner or (row.expires is not None and row.expires < time.time()):
            raise Refused(404, f"there are no weights {path!r:.200} here")
        return row

    def folder_of(self, row: CheckpointRow) -> Path:
        """Return where saved weights are."""
        return Path(row.info["folder"])

    def folder(self, model: str, kind: str, name: str) -> Path:
        """Return where weights of this name are to be saved."""
        return self._root / "checkpoints" / safe_name(model) / KINDS[kind] / name

    def drop(self, row: CheckpointRow) -> None:
        """Delete saved weights."""
        self._store.drop_checkpoint(row.path)
        shutil.rmtree(self.folder_of(row), ignore_errors=True)

    def drop_expired(self) -> None:
        """Delete weights whose time is over."""
        now = time.time()
        for row in self._store.checkpoints():
            if row.expires is not None and row.expires < now:
                self.drop(row)

    def older_ephemeral(self, model: str) -> list[Path]:
        """Forget weights without a name that samplers of this model had, but for the last ones; return their
        folders."""
        own = [row for row in self._store.checkpoints(model=model) if row.info.get("ephemeral")]
        older = own[self._keep :]
        for row in older:
            self._store.drop_checkpoint(row.path)
        return [self.folder_of(row) for row in older]


def safe_name(text: str) -> str:
    """Return a name for a folder, one for one."""
    return text.replace(":", "_")
