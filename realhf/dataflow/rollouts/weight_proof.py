"""Keeps the digest of every version that was published, and which engines held it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from realhf.api.calls import UpdateWeightsAnswer
from realhf.api.generation import WeightsManifest
from realhf.base.tensor_digest import joint_digest

WEIGHTS_FILE = "weights.jsonl"


class WeightRecord:
    """Appends to ``weights.jsonl`` of a run: the digest of every version that was published, and that every engine
    held it. Versions of a run that goes on are compared with what was published before; ``warn`` is told of a
    difference, and of engines that cannot tell what they hold."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = folder / WEIGHTS_FILE, warn
        self._untold: set[str] = set()
        self._last = (-1, "")
        self._earlier = _published(self._path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._path.open("a").write("\n")  # who wrote the last line was killed meanwhile

    def published(self, manifest: WeightsManifest) -> None:
        """The trainer has published a version. The second time in a row, as by the self-test, is not written down."""
        if (manifest.version, manifest.digest) == self._last:
            return
        self._last = manifest.version, manifest.digest
        digest, earlier = manifest.digest, self._earlier.pop(manifest.version, None)
        if earlier is not None and earlier != digest:
            self._warn(
                f"the weights of version {manifest.version} are not those that this run published before it was "
                f"interrupted: digest {digest}, then {earlier}"
            )
        self._earlier.clear()  # later versions of an earlier process are another history
        self._write(
            event="published",
            version=manifest.version,
            digest=digest,
            tensors=len(manifest.slots),
            nbytes=manifest.nbytes,
        )

    def held(self, worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer) -> None:
        """An engine has loaded a version, and holds it as far as it can tell."""
        if answer.held is not None:
            digest = joint_digest({name: tensor.digest for name, tensor in answer.held.items() if tensor.proven})
            unproven = sorted(name for name, tensor in answer.held.items() if not tensor.proven)
            row = {"version": manifest.version, "digest": digest, "engine": worker}
            self._write(event="held", **row, **({"unproven": len(unproven)} if unproven else {}))
            if unproven:
                count = f"{len(unproven)} of {len(manifest.slots)} tensors, e.g. {unproven[0]}"
                self._warn_once(worker, f"the engine of {worker} cannot tell what it holds of {count}")
            return
        self._warn_once(worker, f"the engine of {worker} cannot tell which weights it holds")

    def _warn_once(self, worker: str, text: str) -> None:
        if worker not in self._untold:
            self._untold.add(worker)
            self._warn(f"{text}; the self-test alone speaks for it")

    def proven(self, version: int, workers: list[str]) -> None:
        """The self-test has passed."""
        self._write(event="self-test", version=version, engines=workers)

    def _write(self, **row: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **row}) + "\n")


def _published(path: Path) -> dict[int, str]:
    """Return the digest of the last weights that were published under each version; a torn last line is left out."""
    found: dict[int, str] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["event"] == "published":
                    found[int(row["version"])] = str(row["digest"])
            except (ValueError, KeyError, TypeError):
                continue
    return found
