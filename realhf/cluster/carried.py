"""Brings to a host what a worker needs there: keys always; plan, weights and a person's own code where the run
folder is not shared.

What is carried lies in the agent's own folder. Paths in the plan and on the worker's command line are rewritten, so
that the worker finds it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.cluster.errors import ClusterError
from realhf.cluster.kept_files import CARRIED
from realhf.cluster.messages import PIECE_BYTES, FilePiece
from realhf.cluster.own_host import fingerprint

PLAN_FILE = "plan.json"
KEY_FLAG = "--key-file"
_CODE = re.compile(r"(?P<file>/[^:]*\.py)(:\w+)?")


@dataclass
class Cargo:
    """What goes to one host: ``files`` from path here to path there, ``texts`` by their path there; ``paths`` maps
    paths of the launcher to those of the host, longest first when applied."""

    files: dict[Path, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def rewritten(self, text: str) -> str:
        """Return a path, or ``path:Name``, as it is on the host; other text as it is."""
        for here in sorted(self.paths, key=len, reverse=True):
            if text == here or text.startswith((f"{here}/", f"{here}:")):
                return self.paths[here] + text[len(here) :]
        return text

    def rewritten_value(self, value: Any) -> Any:
        """Return a JSON value with all its texts rewritten."""
        if isinstance(value, str):
            return self.rewritten(value)
        if isinstance(value, dict):
            return {name: self.rewritten_value(item) for name, item in value.items()}
        return [self.rewritten_value(item) for item in value] if isinstance(value, list) else value

    def pieces(self) -> Iterator[FilePiece]:
        """Yield everything in pieces. Raises OSError for a file that cannot be read."""
        for there, text in self.texts.items():
            yield FilePiece(there, 0, text.encode(), True)
        for here, there in self.files.items():
            with here.open("rb") as file:
                size, offset = here.stat().st_size, 0
                while offset < size or offset == 0:
                    data = file.read(PIECE_BYTES)
                    yield FilePiece(there, offset, data, offset + len(data) >= size)
                    offset += len(data)
                    if not data:
                        break


def key_file_in(argv: Sequence[str]) -> Path | None:
    """Return the file with the keys of the run that a worker is given."""
    return Path(argv[argv.index(KEY_FLAG) + 1]) if KEY_FLAG in argv[:-1] else None


def needed_paths(run_dir: Path) -> dict[str, str]:
    """Return what a plan names that a worker without the run folder has to have, and the option that names it: weights
    and tokenizers, data files, a person's own code. Raises OSError or ValueError for a plan that cannot be read."""
    plan = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
    spec = plan["spec"]
    found = {model["path"]: f"{role}.path" for role, model in spec["models"].items()}
    for text in _texts([plan["plugins"], spec.get("rollout"), spec.get("environment"), spec["source"]]):
        code = _CODE.fullmatch(text)
        path = code["file"] if code else text
        if path.startswith("/") and _is(Path.is_file, path):
            found[path] = path
    return {path: option for path, option in found.items() if path.startswith("/") and _is(Path.exists, path)}


def _is(what: Callable[[Path], bool], text: str) -> bool:
    """Return what is asked of a path; False for a text that cannot be one, such as a prompt that begins with a slash,
    and for a path that this user cannot look at."""
    try:
        return what(Path(text))
    except OSError:
        return False


def takes_more(run_dir: Path) -> bool:
    """Return whether a run takes more workers while it goes on: an asynchronous one does. Raises OSError or ValueError
    for a plan that cannot be read."""
    return bool(json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))["spec"].get("rollout"))


def weights_problem(run_dir: Path, host: str, trainer: str, *, shared: bool) -> str:
    """Return why a generation worker on ``host`` could not get its weights from the trainer's host, "" if it can.
    Raises OSError or ValueError for a plan that cannot be read."""
    rollout = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))["spec"].get("rollout")
    weights = rollout["options"]["weights"] if rollout else ""
    if weights == "shm" and host != trainer:
        return (
            f"async_rl.weights=shm: memory of {trainer}, the trainer's host, does not reach the host {host}; use fetch"
        )
    if weights == "disk" and not shared:
        return f"async_rl.weights=disk: the host {host} does not share the run folder (fileroot); use fetch"
    return ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def cargo(
    run_dir: Path, folder: str, key_file: Path | None, *, shared: bool, there: Sequence[str], limit_mb: float, host: str
) -> Cargo:
    """Return what a host without it needs, to lie in the agent's ``folder``. ``there`` are paths that look the same on
    the host, which it uses as they are. Raises ClusterError when the rest is more than ``limit_mb``."""
    found = Cargo()
    if key_file is not None:
        found.paths[str(key_file)] = f"{folder}/keys/{key_file.name.lstrip('.')}"
        found.files[key_file] = found.paths[str(key_file)]
    if shared:
        return found
    tag = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    found.paths[str(run_dir)] = f"{folder}/runs/{run_dir.parent.name}-{run_dir.name}-{tag}"
    for path, option in needed_paths(run_dir).items():
        if path in there:
            continue
        own = Path(path)
        # What has changed since the last run goes elsewhere: files that are gone here would stay there and be read.
        version = hashlib.sha256(f"{path}\0{fingerprint(own)}".encode()).hexdigest()[:12]
        target = f"{folder}/{CARRIED}/{version}/{own.name}"
        files = [each for each in own.rglob("*") if each.is_file()] if own.is_dir() else [own]
        size = sum(each.stat().st_size for each in files) / 1e6
        if size > limit_mb:
            raise ClusterError(
                f"{option}={path}: host {host} neither shares the run folder (fileroot) nor has this under the same "
                f"path, and {size:.0f} MB are more than scheduler.carry_mb={limit_mb:g}; copy it there"
            )
        found.paths[path] = target
        found.files |= {each: target + str(each)[len(path) :] for each in files}
    plan = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
    found.texts[f"{found.paths[str(run_dir)]}/{PLAN_FILE}"] = json.dumps(found.rewritten_value(plan))
    return found


def prints_of(paths: Sequence[str]) -> list[str]:
    """Return how these paths look here."""
    return [fingerprint(Path(path)) for path in paths]
