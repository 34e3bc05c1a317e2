"""Checkpoint registry: location, owner and expiry of saved weights."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import shutil
import time
from dataclasses import replace
from pathlib import Path

from realhf.tinker.store import CheckpointRow, TrainingStore
from realhf.web.refusal import Refusal

KINDS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""Kinds of checkpoints, each with its path component in the client's ``tinker://`` paths."""


class ServerCheckpoints:
    """Registry of the checkpoints below the folder ``root``."""

    def __init__(self, store: TrainingStore, root: Path) -> None:
        self._store = store
        self._root = root
        self._secret = store.get_or_set("secret", secrets.token_hex(32)).encode()

    def find(self, owner: str, path: str) -> CheckpointRow:
        """Return the checkpoint at a ``tinker://`` path. Raises Refusal (404) if the owner has no
        checkpoint there, or if it has expired."""
        row = self._store.checkpoint(path)
        if (
            row is None
            or row.owner != owner
            or (row.expires is not None and row.expires < time.time())
        ):
            raise Refusal(404, f"there are no weights {path!r:.200} here")
        return row

    def folder_of(self, row: CheckpointRow) -> Path:
        """Return the folder of a checkpoint."""
        return Path(row.info["folder"])

    def new_folder(self, model: str, kind: str, name: str, seq: int) -> Path:
        """Return the folder into which a model's request ``seq`` saves the checkpoint ``name``.
        Each request gets a separate folder, because samplers of a deleted or replaced checkpoint
        with the same name must not get the new weights."""
        return self._root / "checkpoints" / safe_name(model) / KINDS[kind] / f"{name}.{seq}"

    def remove_partial(self) -> None:
        """Remove incomplete folders left behind by a killed process."""
        for top in ("checkpoints", "state"):
            for partial in (self._root / top).rglob(".*.tmp"):
                shutil.rmtree(partial, ignore_errors=True)

    def files(self, row: CheckpointRow) -> list[str]:
        """Return the sorted paths of the files of a checkpoint, relative to its folder."""
        folder = self.folder_of(row)
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def signature(self, path: str, file: str, expires: int) -> str:
        """Return the signature (HMAC-SHA256, hex) of a download URL. It permits reading ``file`` of
        the checkpoint at ``path`` until ``expires``, in seconds since the epoch."""
        payload = json.dumps([path, file, expires]).encode()
        return hmac.new(self._secret, payload, hashlib.sha256).hexdigest()

    def resolve_signed_file(self, path: str, file: str, expires: int, signature: str) -> Path:
        """Return the path of the file that a signed download URL refers to. Raises Refusal: 403 if
        the signature is wrong or has expired, 404 if the checkpoint or the file is gone."""
        is_valid = hmac.compare_digest(
            self.signature(path, file, expires).encode(), signature.encode()
        )
        if not is_valid or expires < time.time():
            raise Refusal(403, "the signature of this URL is invalid or has expired")
        row = self._store.checkpoint(path)
        if row is None or file not in self.files(row):
            raise Refusal(404, "the weights have been deleted")
        return self.folder_of(row) / file

    def set_expiry(self, row: CheckpointRow, ttl_s: int | None) -> None:
        """Make a checkpoint expire ``ttl_s`` seconds from now, or never (None)."""
        self._store.put_checkpoint(
            replace(row, expires=None if ttl_s is None else time.time() + ttl_s)
        )

    def delete(self, row: CheckpointRow) -> None:
        """Delete a checkpoint and its folder."""
        self._store.delete_checkpoint(row.path)
        shutil.rmtree(self.folder_of(row), ignore_errors=True)

    def delete_expired(self, ephemeral_before: float) -> None:
        """Delete expired checkpoints. Also delete ephemeral checkpoints (saved without a name, and
        not listed anywhere) of unloaded models that were created before ``ephemeral_before``, in
        seconds since the epoch."""
        now = time.time()
        for row in self._store.checkpoints():
            model = self._store.model(row.model)
            is_unloaded = model is None or model.unloaded
            has_expired = row.expires is not None and row.expires < now
            if has_expired or (
                is_unloaded and row.info.get("ephemeral") and row.created < ephemeral_before
            ):
                self.delete(row)

    def unregister_ephemeral(self, model: str, keep: int = 0) -> list[Path]:
        """Remove a model's ephemeral checkpoints, except the newest ``keep``, from the registry.
        Returns their folders, which the caller deletes."""
        ephemeral = [
            row for row in self._store.checkpoints(model=model) if row.info.get("ephemeral")
        ]
        older = ephemeral[keep:]
        for row in older:
            self._store.delete_checkpoint(row.path)
        return [self.folder_of(row) for row in older]


def safe_name(text: str) -> str:
    """Return a folder name for a model id; different ids get different names."""
    return text.replace(":", "_")
