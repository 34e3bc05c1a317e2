"""Transfer of the files that a worker needs on a host: keys, plan, weights, the user's code.

Files are sent in pieces into the agent's own folder. Paths in the plan and on the worker's command
line are replaced by those of the host.
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
from realhf.cluster.messages import PIECE_BYTES, FilePiece, FileReceipt, Message, StartWorker
from realhf.cluster.own_host import fingerprint
from realhf.cluster.placement import ClusterError

PROBLEM_CHARACTERS = 500
"""Maximum length of an error text in a receipt."""
CARRIED = "carried"
"""Subfolder with paths that contain a digest of the content, so that existing files are not sent
again."""


def store_piece(piece: FilePiece, folder: Path) -> FileReceipt:
    """Write a piece of a file below ``folder``; return the receipt.

    A file gets its name with its last piece. If a piece cannot be written, the pieces before it are
    removed and those after it refused. Below ``CARRIED``, bytes that an earlier transfer left are
    kept, and the receipt contains their number.
    """
    path = Path(piece.path)
    try:
        if not path.is_absolute() or ".." in path.parts or not path.is_relative_to(folder):
            raise PermissionError(f"it is not in {folder}")
        resumable = path.is_relative_to(folder / CARRIED)
        if resumable and path.is_file():
            return FileReceipt(piece.path, path.stat().st_size, "")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f".{path.name}.part")
        size = _append_piece(piece, partial, resumable=resumable)
        if piece.last:
            partial.replace(path)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
        return FileReceipt(piece.path, 0, reason[:PROBLEM_CHARACTERS])
    return FileReceipt(piece.path, size, "")


class KeyFiles:
    """Files of keys from a launcher, kept in memory of this process, with symbolic links in
    ``folder``/keys.

    When the process ends, no key is left on the host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "keys"
        self._descriptors: dict[Path, int] = {}

    def is_key_file(self, piece: FilePiece) -> bool:
        """Return whether a piece belongs to a file of keys."""
        return Path(piece.path).parent == self._folder

    def store(self, piece: FilePiece) -> FileReceipt:
        """Store a file of keys, which has only one piece."""
        path = Path(piece.path)
        try:
            if piece.offset or not piece.last or path.name in ("", ".."):
                raise ValueError("no file of keys")
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._remove([path])
            descriptor = self._descriptors[path] = os.memfd_create("keys", os.MFD_CLOEXEC)
            os.fchmod(descriptor, 0o600)
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(piece.data)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        except (OSError, ValueError) as error:
            return FileReceipt(piece.path, 0, str(error)[:PROBLEM_CHARACTERS])
        return FileReceipt(piece.path, len(piece.data), "")

    def remove_all(self) -> None:
        """Remove all keys, and the links that an earlier agent has left."""
        self._remove({*self._descriptors, *self._folder.glob("*")})

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in [*paths]:
            if (descriptor := self._descriptors.pop(path, None)) is not None:
                os.close(descriptor)
            path.unlink(missing_ok=True)


def _append_piece(piece: FilePiece, partial: Path, *, resumable: bool) -> int:
    """Append a piece, if ``resumable`` only its missing bytes; return the size of the file.

    Raises OSError after removing the file.
    """
    if piece.offset == 0 and not resumable:
        partial.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(partial, flags, 0o600), "ab") as file:
            present = file.tell() - piece.offset
            if present < 0 or (present and not resumable):
                raise OSError(f"a part before byte {piece.offset} is missing")
            if piece.last and present > len(piece.data):
                raise OSError("the partial file is longer than the file")
            file.write(piece.data[present:])
            file.flush()
            return file.tell()
    except OSError:
        partial.unlink(missing_ok=True)
        raise


PLAN_FILE = "plan.json"
KEY_FLAG = "--key-file"
"""Flag of a worker for the file of keys."""
_CODE = re.compile(r"(?P<file>/[^:]*\.py)(:\w+)?")


@dataclass
class FileTransfer:
    """Files for one host."""

    files: dict[Path, str] = field(default_factory=dict)
    """Files to send: local path to the path on the host."""
    texts: dict[str, str] = field(default_factory=dict)
    """Contents of files to create, by the path on the host."""
    paths: dict[str, str] = field(default_factory=dict)
    """Paths of the launcher to those of the host; the longest match applies."""

    def map_path(self, text: str) -> str:
        """Return a path, or ``path:Name``, with the path of the host; other text unchanged."""
        for here in sorted(self.paths, key=len, reverse=True):
            if text == here or text.startswith((f"{here}/", f"{here}:")):
                return self.paths[here] + text[len(here) :]
        return text

    def map_paths_in(self, value: Any) -> Any:
        """Apply ``map_path`` to all texts in a JSON value."""
        if isinstance(value, str):
            return self.map_path(value)
        if isinstance(value, dict):
            return {name: self.map_paths_in(item) for name, item in value.items()}
        return [self.map_paths_in(item) for item in value] if isinstance(value, list) else value

    def pieces(self) -> Iterator[FilePiece]:
        """Yield everything in pieces. Raises OSError for a file that cannot be read."""
        for target, text in self.texts.items():
            yield FilePiece(target, 0, text.encode(), True)
        for source, target in self.files.items():
            with source.open("rb") as file:
                size = source.stat().st_size
                offset = 0
                while offset < size or offset == 0:
                    data = file.read(PIECE_BYTES)
                    yield FilePiece(target, offset, data, offset + len(data) >= size)
                    offset += len(data)
                    if not data:
                        break


def find_key_file(argv: Sequence[str]) -> Path | None:
    """Return the file of keys on a worker's command line; None without one."""
    return Path(argv[argv.index(KEY_FLAG) + 1]) if KEY_FLAG in argv[:-1] else None


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Return the plan of a run as JSON. Raises OSError or ValueError if it cannot be read."""
    return json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))


def find_needed_paths(run_dir: Path) -> dict[str, str]:
    """Return the existing paths in a plan that a worker needs, each with the option that names it.

    These are models and tokenizers, data files, and the user's code. Raises OSError or ValueError
    if the plan cannot be read.
    """
    plan = read_plan(run_dir)
    spec = plan["spec"]
    options = {model["path"]: f"{role}.path" for role, model in spec["models"].items()}
    for text in _find_texts(
        [plan["plugins"], spec.get("rollout"), spec.get("environment"), spec["source"]]
    ):
        code = _CODE.fullmatch(text)
        path = code["file"] if code else text
        if path.startswith("/") and _check_path(Path.is_file, path):
            options[path] = path
    return {
        path: option
        for path, option in options.items()
        if path.startswith("/") and _check_path(Path.exists, path)
    }


def _check_path(test: Callable[[Path], bool], text: str) -> bool:
    """Apply ``test`` to a path. Return False for a text that cannot be a path, such as a prompt
    that begins with a slash, and for a path without permission."""
    try:
        return test(Path(text))
    except OSError:
        return False


def find_weights_problem(run_dir: Path, host: str, trainer: str, *, shared: bool) -> str:
    """Return why a generation worker on ``host`` cannot receive weights from the host ``trainer``;
    "" if it can.

    shared: whether ``host`` shares the run folder. Raises OSError or ValueError if the plan cannot
    be read.
    """
    rollout = read_plan(run_dir)["spec"].get("rollout")
    weights = rollout["options"]["weights"] if rollout else ""
    if weights == "shm" and host != trainer:
        return (
            f"async_rl.weights=shm: memory of {trainer}, the trainer's host, does not reach the "
            f"host {host}; use fetch"
        )
    if weights == "disk" and not shared:
        return (
            f"async_rl.weights=disk: the host {host} does not share the run folder (fileroot); use "
            f"fetch"
        )
    return ""


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from _find_texts(item)


def plan_transfer(
    run_dir: Path,
    folder: str,
    key_file: Path | None,
    *,
    shared: bool,
    same_paths: Sequence[str],
    limit_mb: float,
    host: str,
) -> FileTransfer:
    """Return the files to send to a host, with targets in the agent's ``folder``.

    shared: the host shares the run folder, and needs only keys. same_paths: paths with the same content
    on the host, which it uses in place. limit_mb: maximum size for each option, in MB. Raises
    ClusterError beyond it.
    """
    transfer = FileTransfer()
    if key_file is not None:
        transfer.paths[str(key_file)] = f"{folder}/keys/{key_file.name.lstrip('.')}"
        transfer.files[key_file] = transfer.paths[str(key_file)]
    if shared:
        return transfer
    tag = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    # Two names in one, of up to 255 bytes each, must not be longer than 255 bytes.
    transfer.paths[str(run_dir)] = (
        f"{folder}/runs/{run_dir.parent.name[:30]}-{run_dir.name[:30]}-{tag}"
    )
    for path, option in find_needed_paths(run_dir).items():
        if path in same_paths:
            continue
        source = Path(path)
        # What has changed since the last run goes elsewhere: files that are gone here would stay
        # there and be read.
        version = hashlib.sha256(f"{path}\0{fingerprint(source)}".encode()).hexdigest()[:12]
        target = f"{folder}/{CARRIED}/{version}/{source.name}"
        files = (
            [each for each in source.rglob("*") if each.is_file()] if source.is_dir() else [source]
        )
        size = sum(each.stat().st_size for each in files) / 1e6
        if size > limit_mb:
            raise ClusterError(
                f"{option}={path}: host {host} neither shares the run folder (fileroot) nor has "
                f"this under the same "
                f"path, and {size:.0f} MB are more than scheduler.carry_mb={limit_mb:g}; copy it "
                f"there"
            )
        transfer.paths[path] = target
        transfer.files |= {each: target + str(each)[len(path) :] for each in files}
    plan = read_plan(run_dir)
    transfer.texts[f"{transfer.paths[str(run_dir)]}/{PLAN_FILE}"] = json.dumps(
        transfer.map_paths_in(plan)
    )
    return transfer


MAX_IN_FLIGHT = 32
"""Maximum number of pieces in flight to a host, which are in the launcher's memory."""
RECEIPT_S = 60.0
"""Seconds within which a live host must store a piece."""


class TransferQueue:
    """Queue of the files for one host and the workers that need them, in order.

    send: (kind, message) -> None sends a message to the host's agent. No method blocks; call
    ``advance`` repeatedly. If the host cannot store a file, none of the queued workers is started.
    """

    def __init__(self, send: Callable[[str, Message], object]) -> None:
        self._send = send
        self._queue: deque[tuple[Iterator[FilePiece], StartWorker]] = deque()
        self._in_flight = 0
        self._problem = ""
        self._last_progress = 0.0
        self._stored_bytes: dict[str, int] = {}
        self.sent_paths: set[str] = set()
        """Paths on the host of files that were sent or are queued."""

    def add(self, pieces: Iterator[FilePiece], start: StartWorker) -> None:
        """Queue pieces of files, and a worker to start after them."""
        self._queue.append((pieces, start))

    def on_receipt(self, receipt: FileReceipt) -> None:
        """Process the receipt of a piece; the first problem is kept."""
        self._in_flight = max(0, self._in_flight - 1)
        self._last_progress = process_clock.now()
        self._stored_bytes[receipt.path] = receipt.size
        if receipt.problem and not self._problem:
            self._problem = f"cannot keep {receipt.path}: {receipt.problem} (--folder of its agent)"

    def advance(self) -> list[tuple[str, str]]:
        """Send the pieces and start the workers that are due; return (worker, reason) for those
        that cannot start."""
        late = self._in_flight > 0 and process_clock.now() - self._last_progress > RECEIPT_S
        if late:
            self._in_flight = 0
            self._problem = self._problem or f"has kept no part of a file for {RECEIPT_S:g} s"
        while self._queue and not self._problem and self._in_flight < MAX_IN_FLIGHT:
            pieces, start = self._queue[0]
            try:
                piece = self._next_piece(pieces)
            except OSError as error:
                self._problem = f"cannot be given a file: {error}"
                break
            if piece is not None:
                self._last_progress = (
                    process_clock.now() if not self._in_flight else self._last_progress
                )
                self._in_flight += 1
                self.sent_paths.add(piece.path)
                self._send("file", piece)
            elif self._in_flight:
                break  # the worker starts when everything before it has been stored
            else:
                self._queue.popleft()
                self._send("start", start)
        if not self._problem or self._in_flight:
            return []
        failed = [(name, self._problem) for name in self.withdraw()]
        self._problem = ""
        self.sent_paths.clear()
        return failed

    def _next_piece(self, pieces: Iterator[FilePiece]) -> FilePiece | None:
        """Return the next piece that the host does not have, but the last piece of a file in any
        case; None at the end.

        The last piece gives the file its name.
        """
        for piece in pieces:
            if piece.last or piece.offset + len(piece.data) > self._stored_bytes.get(piece.path, 0):
                return piece
        return None

    def withdraw(self) -> list[str]:
        """Drop the queue; return the names of its workers, which are not started."""
        names = [start.name for _, start in self._queue]
        self._queue.clear()
        return names
