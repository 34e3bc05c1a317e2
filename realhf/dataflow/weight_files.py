"""Writes the digests of a model's weights beside them, into checkpoints and exported policies, and checks them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from realhf.api.model import Engine
from realhf.api.parallel import HeldInParts
from realhf.base.tensor_digest import digests, joint_digest

DIGESTS_FILE = "weight_digests.json"


def write_digests(folder: Path, engine: Engine) -> None:
    """Write ``weight_digests.json``: the policy version, one digest of all tensors as ``weights.jsonl`` of the run has
    it, and the digest of each tensor by its name."""
    tensors = digests(engine.weights())
    content = {"version": engine.version, "digest": joint_digest(tensors), "tensors": tensors}
    partial = folder / f".{DIGESTS_FILE}.tmp"
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(partial, folder / DIGESTS_FILE)


def check_digests(folder: Path, engine: Engine) -> None:
    """Raise ValueError where an engine that has loaded a checkpoint does not hold the weights it was made of; the error
    names the tensor. A folder without digests passes, and an engine that holds a part: its files have checksums."""
    path = folder / DIGESTS_FILE
    if not path.exists():
        return
    expected: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["tensors"]
    try:
        found = digests(engine.weights())
    except HeldInParts:
        return
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {folder}: {name} was saved with digest {expected.get(name, 'none')} and is restored with "
                f"{found.get(name, 'none')}"
            )
