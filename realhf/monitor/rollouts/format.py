"""Format of the folder ``rollouts/`` in a run folder (docs/reference/rollouts.md 1).

There are two families of files: ``play`` (rollouts as played) and ``train`` (the trainer's data
about them). Each process appends to its own files: shards, which consist of gzip members that
contain records as JSON lines, and an index with a line for each rollout. An index line is written
after the member that contains its record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 1
"""Version of the format. A reader refuses files of other versions."""
FOLDER = "rollouts"
PLAY = "play"
TRAIN = "train"
FAMILIES = (PLAY, TRAIN)
INDEX_SUFFIX = ".index.jsonl"
SHARD_SUFFIX = ".jsonl.gz"
NO_SHARD = -1
"""Shard number of an index line without a record."""
MAX_NAME_CHARS = 300
"""Maximum number of characters of a task or group name in an index line."""


class Header(msgspec.Struct, kw_only=True):
    """First line of an index."""

    rollouts: int
    """Version of the format."""
    family: str
    writer: str
    """Name of the writer in file names, which contains the worker, the start time and the process
    id."""
    worker: str
    """Name of the process, as ``kind/index``."""
    began: float
    """Start of the writer, in seconds since the epoch."""
    by_step: bool = True
    """Whether the process works step by step. If so, a later incarnation that begins at step k
    invalidates this writer's lines of step k and later."""


class IndexLine(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Index line with the location of its record.

    Excluded from garbage collection (``gc=False``), because a reader has hundreds of thousands of
    them and they contain only numbers and strings.
    """

    id: str
    """Id of the rollout, ``<sample>/<row>``."""
    time: float
    """Time of writing in seconds since the epoch."""
    step: int
    shard: int = NO_SHARD
    """Number of the shard that contains the record; ``NO_SHARD`` if there is no record."""
    offset: int = 0
    """Offset of the gzip member in the shard."""
    bytes: int = 0
    """Size of the member in bytes."""
    line: int = 0
    """Index of the record's line in the member, from 0."""
    has_tokens: bool = False
    writer: int = NO_SHARD
    """Number that a reader gives to the index file; not stored in the file."""

    @property
    def sample(self) -> str:
        """Id of the sample (group) to which the rollout belongs."""
        return self.id.rpartition("/")[0]

    @property
    def row(self) -> int:
        """Number of the rollout among the rows of its sample."""
        return int(self.id.rpartition("/")[2])


class PlayLine(IndexLine, kw_only=True, omit_defaults=True):
    """Index line of a rollout as played.

    ``step`` is the train step that played the rollout, counted from 1 as in ``metrics.jsonl``. In
    an asynchronous run it is the step after its admission, and in an evaluation the number of
    completed steps.
    """

    version: int | None = None
    """Oldest policy version that sampled one of the rollout's tokens; None if it has no tokens."""
    task: str = ""
    template: str = ""
    group: str = ""
    env: str = ""
    split: str = "train"
    """``train`` or ``eval/<name>``."""
    reward: float | None = None
    """Reward; None if the rollout failed."""
    success: bool = False
    length: int = 0
    """Number of sampled tokens."""
    turns: int = 0
    truncated: bool = False
    failure: str | None = None
    """Kind of failure; None for a valid rollout."""
    attempt: int = 0
    branch: int | None = None
    """If this row is a further conversation of a rollout: number of the rollout's main row; else
    None."""
    seconds: float = 0.0
    """Duration of playing in seconds."""


class TrainLine(IndexLine, kw_only=True, omit_defaults=True):
    """Index line of a row that was trained on. ``step`` is the train step, counted from 1.

    Unknown statistics are None, for example because a row without a learning signal does not pass
    through the model.
    """

    version: int = 0
    """Version of the weights that were trained."""
    advantage: float | None = None
    """Mean advantage over the trained tokens."""
    ratio_max: float | None = None
    """Largest ratio of new to old probability in the last pass."""
    clip_fraction: float | None = None
    """Fraction of clipped tokens in the last pass."""
    mismatch: float | None = None
    """Mean absolute difference between the engine's and the trainer's log-probabilities before the
    step's first update."""
    n_tokens: int = 0
    """Number of trained tokens."""
    staleness: int | None = None
    """Number of versions between the weights that sampled the oldest token and the trained
    weights."""


class IndexNote(msgspec.Struct, kw_only=True):
    """Index line that says why the recording stopped or how much was dropped."""

    note: str
    time: float


def rollouts_folder(folder: Path) -> Path:
    """Return the folder of rollouts in a run folder; ``folder`` itself if it is already the folder
    of rollouts."""
    return folder if folder.name == FOLDER else folder / FOLDER


def shard_name(family: str, writer: str, number: int) -> str:
    """Return the file name of a shard."""
    return f"{family}-{writer}-{number:04d}{SHARD_SUFFIX}"


def index_name(family: str, writer: str) -> str:
    """Return the file name of an index."""
    return f"{family}-{writer}{INDEX_SUFFIX}"


def shorten_text(text: str, max_chars: int = MAX_NAME_CHARS) -> str:
    """Return a string of at most ``max_chars`` characters that can be encoded as UTF-8."""
    return repair_text(text if len(text) <= max_chars else text[: max_chars - 3] + "...")


def repair_text(text: str) -> str:
    """Return a string that can be encoded as UTF-8, with lone surrogates replaced by replacement
    characters."""
    return (
        text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    )


def encode_record(value: Any) -> bytes:
    """Encode a record as one JSON line without a newline.

    Lone surrogates are written as escapes. Numbers that JSON does not support become null, keys
    become strings, and values of other types are replaced by descriptions.
    """
    try:
        return _ENCODER.encode(value)
    except Exception:
        return json.dumps(
            to_plain(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False
        ).encode()


def decode_record(line: bytes) -> Any:
    """Decode a line that ``encode_record`` has written. Raises ValueError."""
    return json.loads(line)


def to_plain(value: Any, depth: int = 40, text: Callable[[str], str] = str) -> Any:
    """Convert any value to plain data for JSON.

    text: function that is applied to all strings. Values nested deeper than ``depth`` are replaced
    by descriptions.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > 0 and isinstance(value, Mapping):
        return {
            text(key) if isinstance(key, str) else ascii(key): to_plain(item, depth - 1, text)
            for key, item in value.items()
        }
    if (
        depth > 0
        and isinstance(value, (Sequence, set, frozenset))
        and not isinstance(value, (bytes, bytearray))
    ):
        return [to_plain(item, depth - 1, text) for item in value]
    return _describe(value)


def _describe(value: Any) -> Any:
    """Return a substitute for a value that JSON does not support: the number in a NumPy scalar,
    otherwise a description."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) == ():
        return to_plain(item())
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(
        value, (str, bytes, bytearray)
    ):
        return list(value)
    try:
        return ascii(value)[:1000]
    except Exception:
        return f"<{type(value).__name__}>"


_ENCODER = msgspec.json.Encoder(enc_hook=_describe)
