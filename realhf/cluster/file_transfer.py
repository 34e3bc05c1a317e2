"""Transfer of the files that a worker needs to its host: keys, the plan, weights and the user's
code.

Files are sent in pieces and stored in the agent's own folder. Paths in the plan and on the worker's
command line are replaced by the paths on the host.
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
"""Subfolder whose paths contain a digest of each file's content, so that files that the host
already has are not sent again."""


def store_piece(piece: FilePiece, folder: Path) -> FileReceipt:
    """Write a piece of a file, whose path is below ``folder``; return the receipt.

    The file gets its final name when its last piece is written. If a piece cannot be written, the
    earlier pieces are removed and the later ones are refused. Below ``CARRIED`` an interrupted
    transfer is resumed: bytes of an earlier transfer are kept, and the receipt's size includes
    them.
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
    """Key files from a launcher. They are stored in this process's memory, with symbolic links to
    them in ``folder``/keys.

    So no key remains on the host after the process has ended.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "keys"
        self._descriptors: dict[Path, int] = {}

    def is_key_file(self, piece: FilePiece) -> bool:
        """Return whether a piece belongs to a key file."""
        return Path(piece.path).parent == self._folder

    def store(self, piece: FilePiece) -> FileReceipt:
        """Store a key file, which must consist of one piece; return the receipt."""
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
        """Remove all keys, and any links left by an earlier agent."""
        self._remove({*self._descriptors, *self._folder.glob("*")})

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in [*paths]:
            if (descriptor := self._descriptors.pop(path, None)) is not None:
                os.close(descriptor)
            path.unlink(missing_ok=True)


def _append_piece(piece: FilePiece, partial: Path, *, resumable: bool) -> int:
    """Append a piece to the file ``partial``; return the file's size.

    If ``resumable``, the file may already contain bytes of the piece, and only the missing ones are
    appended. On an error the file is removed and OSError raised.
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
"""Worker flag that names the key file."""
_CODE = re.compile(r"(?P<file>/[^:]*\.py)(:\w+)?")


@dataclass
class FileTransfer:
    """Files to send to one host, and the mapping of the launcher's paths to paths on that host."""

    files: dict[Path, str] = field(default_factory=dict)
    """Files to send: {local path: path on the host}."""
    texts: dict[str, str] = field(default_factory=dict)
    """Files to create from a string: {path on the host: content}."""
    paths: dict[str, str] = field(default_factory=dict)
    """Path mapping {path on the launcher's machine: path on the host}, of which the longest
    matching prefix applies."""

    def map_path(self, text: str) -> str:
        """Replace a path of the launcher's machine with the path of its copy on the host.

        ``text`` may be the path or ``path:Name``. Any other string is returned unchanged."""
        for here in sorted(self.paths, key=len, reverse=True):
            if text == here or text.startswith((f"{here}/", f"{here}:")):
                return self.paths[here] + text[len(here) :]
        return text

    def map_paths_in(self, value: Any) -> Any:
        """Return a JSON value with ``map_path`` applied to all its strings."""
        if isinstance(value, str):
            return self.map_path(value)
        if isinstance(value, dict):
            return {name: self.map_paths_in(item) for name, item in value.items()}
        return [self.map_paths_in(item) for item in value] if isinstance(value, list) else value

    def pieces(self) -> Iterator[FilePiece]:
        """Yield the pieces of all files. Raises OSError for a file that cannot be read."""
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
    """Return the key file that a worker's command line names, or None."""
    return Path(argv[argv.index(KEY_FLAG) + 1]) if KEY_FLAG in argv[:-1] else None


def read_plan(run_dir: Path) -> dict[str, Any]:
    """Return the parsed ``plan.json`` of a run. Raises OSError or ValueError if it cannot be
    read."""
    return json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))


def find_needed_paths(run_dir: Path) -> dict[str, str]:
    """Return the existing paths in a run's plan that a worker needs, as {path: option that names
    it}.

    They are models, tokenizers, data files and the user's code. Raises OSError or ValueError if the
    plan cannot be read.
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
    """Return ``test`` of the path ``text``. Return False if the string cannot be a path, such as a
    prompt that begins with a slash, or if the path must not be accessed."""
    try:
        return test(Path(text))
    except OSError:
        return False


def find_weights_problem(run_dir: Path, host: str, trainer: str, *, shared: bool) -> str:
    """Return why a generation worker on ``host`` cannot receive weights from the trainer's host
    ``trainer``; "" if it can.

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
    """Return the files to send to a host, with target paths in the agent's ``folder``.

    shared: whether the host shares the run folder and so needs only keys. same_paths: paths that
    have the same content on the host and are used in place. limit_mb: maximum total size in MB of
    the files that one option names. Raises ClusterError if it is exceeded.
    """
    transfer = FileTransfer()
    if key_file is not None:
        transfer.paths[str(key_file)] = f"{folder}/keys/{key_file.name.lstrip('.')}"
        transfer.files[key_file] = transfer.paths[str(key_file)]
    if shared:
        return transfer
    tag = hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]
    # The folder name is made of two names of up to 255 bytes each, and must itself fit into 255
    # bytes.
    transfer.paths[str(run_dir)] = (
        f"{folder}/runs/{run_dir.parent.name[:30]}-{run_dir.name[:30]}-{tag}"
    )
    for path, option in find_needed_paths(run_dir).items():
        if path in same_paths:
            continue
        source = Path(path)
        # A folder that has changed since the last run gets another target. Otherwise files that
        # were deleted here would remain on the host and be read.
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
"""Maximum number of pieces in flight to a host; they occupy the launcher's memory."""
RECEIPT_S = 60.0
"""Seconds within which a host must confirm that it has stored a piece."""


class TransferQueue:
    """Ordered queue of the files for one host and of the workers to start once their files are
    stored.

    send: (kind, message) -> None sends a message to the host's agent. No method blocks; ``advance``
    must be called repeatedly. If the host cannot store a file, no queued worker is started.
    """

    def __init__(self, send: Callable[[str, Message], object]) -> None:
        self._send = send
        self._queue: deque[tuple[Iterator[FilePiece], StartWorker]] = deque()
        self._in_flight = 0
        self._problem = ""
        self._last_progress = 0.0
        self._stored_bytes: dict[str, int] = {}
        self.sent_paths: set[str] = set()
        """Paths on the host of the files that were sent or are queued."""

    def add(self, pieces: Iterator[FilePiece], start: StartWorker) -> None:
        """Queue file pieces, and a worker to start once they are stored."""
        self._queue.append((pieces, start))

    def on_receipt(self, receipt: FileReceipt) -> None:
        """Process the receipt of a piece. The first problem that a receipt reports is
        remembered."""
        self._in_flight = max(0, self._in_flight - 1)
        self._last_progress = process_clock.now()
        self._stored_bytes[receipt.path] = receipt.size
        if receipt.problem and not self._problem:
            self._problem = f"cannot keep {receipt.path}: {receipt.problem} (--folder of its agent)"

    def advance(self) -> list[tuple[str, str]]:
        """Send pieces and start workers as far as possible now. Return (worker, reason) for each
        worker that cannot start."""
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
                break  # the worker starts once all pieces before it are stored
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
        """Return the next piece that the host still needs; None at the end.

        The last piece of a file is always sent, because it gives the file its final name.
        """
        for piece in pieces:
            if piece.last or piece.offset + len(piece.data) > self._stored_bytes.get(piece.path, 0):
                return piece
        return None

    def withdraw(self) -> list[str]:
        """Empty the queue; return the names of the workers in it, which will not be started."""
        names = [start.name for _, start in self._queue]
        self._queue.clear()
        return names
