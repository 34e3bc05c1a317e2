"""Compares what engines say that they hold with what the trainer published, and keeps the digest of every version."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from realhf.api.calls import UpdateWeightsAnswer
from realhf.api.generation import WeightsManifest
from realhf.base.tensor_digest import joint_digest

WEIGHTS_FILE = "weights.jsonl"


class WrongWeights(RuntimeError):
    """An engine holds, or computes with, other weights than those that it was given: what it samples proves nothing."""


def check_held(worker: str, manifest: WeightsManifest, answer: UpdateWeightsAnswer, before: int) -> None:
    """Raise WrongWeights where an engine does not hold the tensors of the manifest, or did not hold those of version
    ``before`` until now. The error names the tensor, what was expected and what was found."""
    if answer.changed:
        first = answer.changed[0]
        raise WrongWeights(
            f"{worker}: {first.name} changed while version {before} was in use: its digest was {first.before} and is "
            f"{first.now} ({_share(len(answer.changed), manifest)}); what it sampled since is not of these weights"
        )
    if answer.held is None:
        return
    wrong: list[str] = []
    for slot in manifest.slots:
        held = answer.held.get(slot.name)
        expected = slot.digest if held is None or held.dtype == slot.dtype else held.expected
        if held is None or held.digest != expected:
            found = "nothing of that name" if held is None else f"{held.digest} ({held.dtype})"
            wrong.append(f"{slot.name} should have digest {expected}, found {found}")
    if wrong:
        share = _share(len(wrong), manifest)
        raise WrongWeights(f"{worker} does not hold the weights of version {manifest.version}: {wrong[0]} ({share})")


def _share(count: int, manifest: WeightsManifest) -> str:
    return f"{count} of {len(manifest.slots)} tensors"


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
            digest = joint_digest({name: tensor.digest for name, tensor in answer.held.items()})
            self._write(event="held", version=manifest.version, digest=digest, engine=worker)
            return
        if worker not in self._untold:
            self._untold.add(worker)
            self._warn(f"the engine of {worker} cannot tell which weights it holds; the self-test alone speaks for it")

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
