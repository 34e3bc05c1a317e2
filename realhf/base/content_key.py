"""Names artifacts after their content, so that an artifact is found again exactly when nothing in it has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from realhf.base.dataclass_json import to_json_value


def content_key(options: Any, files: Iterable[Path] = ()) -> str:
    """Return sixteen hex digits of the SHA-256 over ``options`` (dataclasses, maps, scalars) and over the names and
    bytes of ``files``. Raises FileNotFoundError for a file that is missing."""
    digest = hashlib.sha256(json.dumps(to_json_value(options), sort_keys=True).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]
