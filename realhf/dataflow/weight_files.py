"""Writes the digests of a model's weights beside them, into checkpoints and exported policies, and checks them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realhf.api.model import Engine
from realhf.api.parallel import HeldInParts
from realhf.base.files.whole_file import write_whole
from realhf.base.tensor_digest import SCHEME, digests, joint_digest

if TYPE_CHECKING:
    from torch import Tensor

DIGESTS_FILE = "weight_digests.json"
_log = logging.getLogger(__name__)


def write_digests(folder: Path, engine: Engine, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write ``weight_digests.json`` about ``weights``, by default those of the engine: how digests are computed, the
    policy version, one digest of all tensors as ``weights.jsonl`` of the run has it, and that of each by its name."""
    tensors = digests(engine.weights() if weights is None else weights)
    content = {"scheme": SCHEME, "version": engine.version, "digest": joint_digest(tensors), "tensors": tensors}
    write_whole(folder / DIGESTS_FILE, json.dumps(content, indent=1))


def stored_weights(engine: Engine) -> dict[str, Tensor]:
    """Return what a checkpoint of an engine restores to the bit: its weights, unless it says something else, because
    those are computed from others. Raises HeldInParts as ``weights`` does."""
    return getattr(engine, "stored_weights", engine.weights)()


def check_digests(folder: Path, engine: Engine) -> None:
    """Raise ValueError where an engine that has loaded a checkpoint does not hold the weights it was made of; the error
    names the tensor. A folder without digests passes, an engine that holds a part, and, with a warning, digests that
    another version of the package computed otherwise: the files have checksums."""
    path = folder / DIGESTS_FILE
    if not path.exists():
        return
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stored.get("scheme") != SCHEME:
        _log.warning("%s was computed otherwise than by %r and is not compared", path, SCHEME)
        return
    expected: dict[str, str] = stored["tensors"]
    try:
        found = digests(stored_weights(engine))
    except HeldInParts:
        return
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"checkpoint {folder}: {name} was saved with digest {expected.get(name, 'none')} and is restored with "
                f"{found.get(name, 'none')}"
            )
