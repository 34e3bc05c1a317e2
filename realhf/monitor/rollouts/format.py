"""Defines what the folder ``rollouts/`` of a run holds, and how a line of it is written (docs/reference/rollouts.md 1).

Two families of files, ``play`` (a rollout as it was played) and ``train`` (what the trainer saw of it). Each process
appends to files of its own: shards of gzip members that hold records as JSON lines, and an index with a line for each
rollout, which follows the member that holds its record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
"""The version of the format. A reader refuses files of another one by name."""
FOLDER = "rollouts"
PLAY, TRAIN = "play", "train"
FAMILIES = (PLAY, TRAIN)
INDEX_SUFFIX = ".index.jsonl"
SHARD_SUFFIX = ".jsonl.gz"
NO_SHARD = -1
"""The shard of a line that has no record."""
LONGEST_NAME = 300
"""Characters of a task's or group's name in an index line."""


class Header(msgspec.Struct, kw_only=True):
    """Is the first line of an index: the format, who writes the file and since when (s since the epoch). ``by_step``:
    its process works step by step, so that a later incarnation of it which begins at step k takes back what this one
    wrote of step k and later ones."""

    rollouts: int
    family: str
    writer: str
    worker: str
    began: float
    by_step: bool = True


class Place(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Says where the record of a line lies: in the member of ``bytes`` bytes at ``offset`` of shard number ``shard``,
    in its line ``line``, counted from 0. ``id`` is ``<sample>/<row>``, ``time`` in s since the epoch. ``writer`` is in
    no file: a reader numbers its indexes by it. Lines hold numbers and texts only, so the garbage collector passes
    over them: a reader has hundreds of thousands."""

    id: str
    time: float
    step: int
    shard: int = NO_SHARD
    offset: int = 0
    bytes: int = 0
    line: int = 0
    has_tokens: bool = False
    writer: int = NO_SHARD

    @property
    def sample(self) -> str:
        """The sample that the rollout belongs to: its group."""
        return self.id.rpartition("/")[0]

    @property
    def row(self) -> int:
        """The number of the rollout among the rows of its sample."""
        return int(self.id.rpartition("/")[2])


class PlayLine(Place, kw_only=True, omit_defaults=True):
    """Is the index line of a rollout that was played.

    ``step`` is the train step that played it, counted from 1 as in ``metrics.jsonl`` (in an asynchronous run the one
    that followed its admission), or the steps that were complete when an evaluation played it. ``split`` is ``train``
    or ``eval/<name>``. ``version`` is the oldest policy version that sampled a token of it, None without one.
    ``length`` counts sampled tokens. ``failure`` is the kind of failure, None for a rollout that counts; a failure has
    no reward. ``branch``: the row is a further conversation of the rollout in row ``branch``. ``seconds`` is what
    playing took.
    """

    version: int | None = None
    task: str = ""
    template: str = ""
    group: str = ""
    env: str = ""
    split: str = "train"
    reward: float | None = None
    success: bool = False
    length: int = 0
    turns: int = 0
    truncated: bool = False
    failure: str | None = None
    attempt: int = 0
    branch: int | None = None
    seconds: float = 0.0


class TrainLine(Place, kw_only=True, omit_defaults=True):
    """Is the index line of a row that was trained on, in train step ``step``, counted from 1.

    ``version`` is that of the weights that trained. ``advantage`` is the mean over its ``n_tokens`` trained tokens,
    ``ratio_max`` and ``clip_fraction`` those of its last pass, ``mismatch`` the mean of |engine - trainer| of the
    log-probabilities before any update of the step; each is None where it is not known: a row without signal does not
    go through the model. ``staleness`` is how many versions its oldest token lies behind.
    """

    version: int = 0
    advantage: float | None = None
    ratio_max: float | None = None
    clip_fraction: float | None = None
    mismatch: float | None = None
    n_tokens: int = 0
    staleness: int | None = None


class Note(msgspec.Struct, kw_only=True):
    """Is a line of an index about the recording itself: why it ``stopped``, or how much it left out."""

    note: str
    time: float


def rollouts_folder(folder: Path) -> Path:
    """Return the folder of rollouts of a run folder; ``folder`` itself if it is one."""
    return folder if folder.name == FOLDER else folder / FOLDER


def shard_name(family: str, writer: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{family}-{writer}-{number:04d}{SHARD_SUFFIX}"


def index_name(family: str, writer: str) -> str:
    """Return the file name of an index."""
    return f"{family}-{writer}{INDEX_SUFFIX}"


def readable(text: str, most: int = LONGEST_NAME) -> str:
    """Return a text as ``repaired`` does, shortened."""
    return repaired(text if len(text) <= most else text[: most - 3] + "...")


def repaired(text: str) -> str:
    """Return a text as UTF-8 can hold it: halves of characters become replacement characters."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def encode_record(value: Any) -> bytes:
    """Return a record as one JSON line without its end. Halves of characters survive as escapes; numbers that JSON does
    not have become null, keys texts, and values of other types their description."""
    try:
        return _ENCODER.encode(value)
    except Exception:
        return json.dumps(plain(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode()


def decode_record(line: bytes) -> Any:
    """Return the value of a line of ``encode_record``. Raises ValueError."""
    return json.loads(line)


def plain(value: Any, depth: int = 40, text: Callable[[str], str] = str) -> Any:
    """Return a value as JSON can hold it, whatever it is, with ``text`` of its texts; what lies deeper than ``depth``
    becomes its description."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > 0 and isinstance(value, Mapping):
        return {
            text(key) if isinstance(key, str) else ascii(key): plain(item, depth - 1, text)
            for key, item in value.items()
        }
    if depth > 0 and isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (bytes, bytearray)):
        return [plain(item, depth - 1, text) for item in value]
    return _described(value)


def _described(value: Any) -> Any:
    """Stand for a value that JSON does not have: the number of a scalar of numpy, else its description."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return plain(item())
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, (str, bytes, bytearray)):
        return list(value)
    try:
        return ascii(value)[:1000]
    except Exception:
        return f"<{type(value).__name__}>"


_ENCODER = msgspec.json.Encoder(enc_hook=_described)
