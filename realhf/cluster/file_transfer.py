"""Brings files to a host that a worker needs there, in parts, and keeps them there: keys, plan, weights, own code.

What is carried lies in the agent's own folder. Paths in the plan and on the worker's command line are rewritten, so
that the worker finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.base import process_clock
from realhf.cluster.messages import PIECE_BYTES, FilePiece, Kept, Message, StartWorker
from realhf.cluster.own_host import fingerprint
from realhf.cluster.placement import ClusterError

PROBLEM_CHARACTERS = 500
CARRIED = "carried"
"""Below it a path says which content it has, so that what is there already need not come again."""


def keep(piece: FilePiece, folder: Path) -> Kept:
    """Write a part of a file below ``folder``, and say what became of it. A file gets its name with its last part; when
    a part cannot be written, the parts before it are removed, and those after it are refused. What was carried here
    before, in part or whole, is kept, and the answer says how much it is."""
    path = Path(piece.path)
    try:
        if not path.is_absolute() or ".." in path.parts or not path.is_relative_to(folder):
            raise PermissionError(f"it is not in {folder}")
        goes_on = path.is_relative_to(folder / CARRIED)
        if goes_on and path.is_file():
            return Kept(piece.path, path.stat().st_size, "")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.part")
        size = _written(piece, partial, goes_on=goes_on)
        if piece.last:
            partial.replace(path)
    except (OSError, ValueError) as error:
        said = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return Kept(piece.path, 0, said[:PROBLEM_CHARACTERS])
    return Kept(piece.path, size, "")


class HeldKeys:
    """Keeps the keys that a launcher brings to ``folder``/keys in memory of this process, to which their names there
    lead as long as it lives: however it ends, no key is left on the host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "keys"
        self._held: dict[Path, int] = {}

    def takes(self, piece: FilePiece) -> bool:
        """Return whether a part is one of keys."""
        return Path(piece.path).parent == self._folder

    def keep(self, piece: FilePiece) -> Kept:
        """Keep a whole file of keys; it has one part."""
        path = Path(piece.path)
        try:
            if piece.offset or not piece.last or path.name in ("", ".."):
                raise ValueError("no file of keys")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._forget([path])
            descriptor = self._held[path] = os.memfd_create("keys", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(piece.data)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        except (OSError, ValueError) as error:
            return Kept(piece.path, 0, str(error)[:PROBLEM_CHARACTERS])
        return Kept(piece.path, len(piece.data), "")

    def forget(self) -> None:
        """Give up all keys, and what an agent before this one has left."""
        self._forget({*self._held, *self._folder.glob("*")})

    def _forget(self, paths: Iterable[Path]) -> None:
        for path in [*paths]:
            if (descriptor := self._held.pop(path, None)) is not None:
                os.close(descriptor)
            path.unlink(missing_ok=True)


def _written(piece: FilePiece, partial: Path, *, goes_on: bool) -> int:
    """Append a part, or with ``goes_on`` what is missing of it; return how large the file is then. Raises OSError;
    nothing of the file is left."""
    if piece.offset == 0 and not goes_on:
        partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "ab") as file:
            there = file.tell() - piece.offset
            if there < 0 or (there and not goes_on):
                raise OSError(f"a part before byte {piece.offset} is missing")
            if piece.last and there > len(piece.data):
                raise OSError("more of it is there than there is")
            file.write(piece.data[there:])
            file.flush()
            return file.tell()
    except OSError:
        partial.unlink(missing_ok=True)
        raise


PLAN_FILE = "plan.json"
KEY_FLAG = "--key-file"
_CODE = re.compile(r"(?P<file>/[^:]*\.py)(:\w+)?")


@dataclass
class FileTransfer:
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


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Return the plan of a run as JSON. Raises OSError or ValueError for one that cannot be read."""
    return json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))


def needed_paths(run_dir: Path) -> dict[str, str]:
    """Return what a plan names that a worker without the run folder has to have, and the option that names it: weights
    and tokenizers, data files, a person's own code. Raises OSError or ValueError for a plan that cannot be read."""
    plan = read_plan(run_dir)
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


def weights_problem(run_dir: Path, host: str, trainer: str, *, shared: bool) -> str:
    """Return why a generation worker on ``host`` could not get its weights from the trainer's host, "" if it can.
    Raises OSError or ValueError for a plan that cannot be read."""
    rollout = read_plan(run_dir)["spec"].get("rollout")
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


def files_for_host(
    run_dir: Path, folder: str, key_file: Path | None, *, shared: bool, there: Sequence[str], limit_mb: float, host: str
) -> FileTransfer:
    """Return what a host without it needs, to lie in the agent's ``folder``. ``there`` are paths that look the same on
    the host, which it uses as they are. Raises ClusterError when the rest is more than ``limit_mb``."""
    found = FileTransfer()
    if key_file is not None:
        found.paths[str(key_file)] = f"{folder}/keys/{key_file.name.lstrip('.')}"
        found.files[key_file] = found.paths[str(key_file)]
    if shared:
        return found
    tag = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    # Two names in one, of up to 255 bytes each, must not be longer than 255 bytes.
    found.paths[str(run_dir)] = f"{folder}/runs/{run_dir.parent.name[:30]}-{run_dir.name[:30]}-{tag}"
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
    plan = read_plan(run_dir)
    found.texts[f"{found.paths[str(run_dir)]}/{PLAN_FILE}"] = json.dumps(found.rewritten_value(plan))
    return found


AHEAD = 32
"""So many parts may be on the way to a host: they lie in the launcher's memory."""
KEPT_WITHIN_S = 60.0
"""A host that is there keeps a part within this time."""


class TransferQueue:
    """Is where files for one host wait, and the workers that need them, in order. ``send`` gives a message of a kind to
    the host's agent. Nothing here waits: ``advance`` is called again and again. When the host cannot keep a file, none
    of the workers that wait is started."""

    def __init__(self, send: Callable[[str, Message], object]) -> None:
        self._send = send
        self._queue: deque[tuple[Iterator[FilePiece], StartWorker]] = deque()
        self._on_way = 0
        self._problem = ""
        self._moved = 0.0
        self._there: dict[str, int] = {}
        self.brought: set[str] = set()
        """Paths there of what has been brought, or is about to be."""

    def add(self, pieces: Iterator[FilePiece], start: StartWorker) -> None:
        """Bring parts of files, then start a worker."""
        self._queue.append((pieces, start))

    def has_kept(self, said: Kept) -> None:
        """Note what became of a part; the first that could not be kept says why."""
        self._on_way, self._moved = max(0, self._on_way - 1), process_clock.now()
        self._there[said.path] = said.size
        if said.problem and not self._problem:
            self._problem = f"cannot keep {said.path}: {said.problem} (--folder of its agent)"

    def advance(self) -> list[tuple[str, str]]:
        """Send what may be sent now. Returns the workers that cannot be started, each with what its host cannot do."""
        late = self._on_way > 0 and process_clock.now() - self._moved > KEPT_WITHIN_S
        if late:
            self._on_way, self._problem = 0, self._problem or f"has kept no part of a file for {KEPT_WITHIN_S:g} s"
        while self._queue and not self._problem and self._on_way < AHEAD:
            pieces, start = self._queue[0]
            try:
                piece = self._missing(pieces)
            except OSError as error:
                self._problem = f"cannot be given a file: {error}"
                break
            if piece is not None:
                self._moved = process_clock.now() if not self._on_way else self._moved
                self._on_way += 1
                self.brought.add(piece.path)
                self._send("file", piece)
            elif self._on_way:
                break  # the worker starts when everything before it is there
            else:
                self._queue.popleft()
                self._send("start", start)
        if not self._problem or self._on_way:
            return []
        failed, self._problem = [(name, self._problem) for name in self.withdraw()], ""
        self.brought.clear()
        return failed

    def _missing(self, pieces: Iterator[FilePiece]) -> FilePiece | None:
        """Return the next part that the host has not got already; the last of a file in any case."""
        for piece in pieces:
            if piece.last or piece.offset + len(piece.data) > self._there.get(piece.path, 0):
                return piece
        return None

    def withdraw(self) -> list[str]:
        """Start none of the workers that wait; their names."""
        names = [start.name for _, start in self._queue]
        self._queue.clear()
        return names
