"""Shipped policies: folders with a warm-started built-in policy and the record of what it was made
from.

``experiments.shipped_policy`` writes one; a run uses it if its own warm start would have the same
inputs. The file ``provenance.json`` holds the inputs, the command, the commit and the SHA-256 of
each file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.api.config import ConfigError
from realhf.base.files import atomic_folder

PROVENANCE = "provenance.json"
LESSONS = "lessons"
"""Key in ``made_from`` for the digest of the system prompt, the tasks and the scripts."""


def find_shipped_policy(folder: Path | None, made_from: Mapping[str, Any]) -> Path | None:
    """Return the shipped policy's folder if the policy was made from the inputs ``made_from``, else
    None.

    Raises ConfigError if its files do not match their recorded SHA-256.
    """
    if folder is None or not (folder / PROVENANCE).is_file():
        return None
    try:
        provenance = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / PROVENANCE}: {error}; reinstall the package") from None
    if provenance["made_from"] != json.loads(json.dumps(made_from)):
        return None
    digests = hash_files(folder)
    for name, digest in provenance["sha256"].items():
        if digests.get(name) != digest:
            raise ConfigError(
                f"{folder / name}: SHA-256 {digests.get(name, 'of no such file')}, shipped with "
                f"{digest}; reinstall "
                "the package, or make a policy of your own with warm_start.shipped=false"
            )
    return folder


def is_outdated(folder: Path, made_from: Mapping[str, Any]) -> bool:
    """Return whether a shipped policy matches ``made_from`` in everything but the system prompt,
    tasks and scripts, which means that those have changed since."""
    if not (folder / PROVENANCE).is_file():
        return False
    shipped = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["made_from"]
    current = json.loads(json.dumps(made_from))
    return shipped.pop(LESSONS, None) != current.pop(LESSONS) and shipped == current


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a shipped policy by file name, except for its provenance
    file."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != PROVENANCE)
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def ship(policy: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write a trained policy in bfloat16 to ``folder``, replacing the folder atomically."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with atomic_folder(folder) as whole:
        AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(whole)
        AutoTokenizer.from_pretrained(policy).save_pretrained(whole)
        for file in whole.iterdir():
            # Other users than the one who trained it must be able to read the package.
            file.chmod(0o644)
        content = {**provenance, "sha256": hash_files(whole)}
        (whole / PROVENANCE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
