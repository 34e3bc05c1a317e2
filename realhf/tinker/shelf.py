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

from realhf.tinker.store import CheckpointRow, Store
from realhf.web.refusal import Refusal

KINDS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""Kinds of saved weights, with the names that the client's paths have for them."""


class Shelf:
    """The weights that are saved below ``root``."""

    def __init__(self, store: Store, root: Path) -> None:
        self._store, self._root = store, root
        self._secret = store.once("secret", secrets.token_hex(32)).encode()

    def find(self, owner: str, path: str) -> CheckpointRow:
        """Return saved weights of an owner. Raises Refusal (404)."""
        row = self._store.checkpoint(path)
        if row is None or row.owner != owner or (row.expires is not None and row.expires < time.time()):
            raise Refusal(404, f"there are no weights {path!r:.200} here")
        return row

    def folder_of(self, row: CheckpointRow) -> Path:
        """Return the folder of saved weights."""
        return Path(row.info["folder"])

    def folder(self, model: str, kind: str, name: str, seq: int) -> Path:
        """Return the folder in which request ``seq`` of a model saves weights of this name. Each request has its own
        folder: a sampler of weights that were deleted or replaced must not get later weights of the same name."""
        return self._root / "checkpoints" / safe_name(model) / KINDS[kind] / f"{name}.{seq}"

    def sweep(self) -> None:
        """Remove the partly written folders of a killed process."""
        for top in ("checkpoints", "state"):
            for partial in (self._root / top).rglob(".*.tmp"):
                shutil.rmtree(partial, ignore_errors=True)

    def files(self, row: CheckpointRow) -> list[str]:
        """Return the names of the files of saved weights, within their folder."""
        folder = self.folder_of(row)
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

    def signature(self, path: str, file: str, expires: int) -> str:
        """Return the signature that allows a download of a file until ``expires``."""
        said = json.dumps([path, file, expires]).encode()
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()

    def signed_file(self, path: str, file: str, expires: int, signature: str) -> Path:
        """Return the path of a file for a signed address. Raises Refusal (403, 404)."""
        proved = hmac.compare_digest(self.signature(path, file, expires).encode(), signature.encode())
        if not proved or expires < time.time():
            raise Refusal(403, "this address was not given out here, or its time is over")
        row = self._store.checkpoint(path)
        if row is None or file not in self.files(row):
            raise Refusal(404, "the weights are not here any more")
        return self.folder_of(row) / file

    def set_expiry(self, row: CheckpointRow, ttl_s: int | None) -> None:
        """Keep saved weights for ``ttl_s`` seconds from now, or without a limit (None)."""
        self._store.put_checkpoint(replace(row, expires=None if ttl_s is None else time.time() + ttl_s))

    def drop(self, row: CheckpointRow) -> None:
        """Delete saved weights."""
        self._store.drop_checkpoint(row.path)
        shutil.rmtree(self.folder_of(row), ignore_errors=True)

    def drop_expired(self, unnamed_before: float) -> None:
        """Delete expired weights, and unnamed weights of unloaded models that are older than ``unnamed_before``: no
        client can list them."""
        now = time.time()
        for row in self._store.checkpoints():
            model = self._store.model(row.model)
            left = model is None or model.unloaded
            over = row.expires is not None and row.expires < now
            if over or (left and row.info.get("ephemeral") and row.created < unnamed_before):
                self.drop(row)

    def forget_ephemeral(self, model: str, keep: int = 0) -> list[Path]:
        """Unregister the unnamed weights of a model's samplers, except for the last ``keep``; return their folders."""
        own = [row for row in self._store.checkpoints(model=model) if row.info.get("ephemeral")]
        older = own[keep:]
        for row in older:
            self._store.drop_checkpoint(row.path)
        return [self.folder_of(row) for row in older]


def safe_name(text: str) -> str:
    """Return the name of a folder for an id; different ids have different names."""
    return text.replace(":", "_")
