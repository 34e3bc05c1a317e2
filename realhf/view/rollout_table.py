"""Rollouts of a run for the page: a table of all of them as columns, a single one with all details,
and a full-text search."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realhf.base import process_clock
from realhf.monitor.rollouts.format import NO_SHARD, PlayLine
from realhf.monitor.rollouts.reader import NoRecord, RolloutRow, RolloutStore
from realhf.view.run_data import pack

Array = np.ndarray[Any, Any]
NONE = -1
"""Value that means "no version" or "no staleness" in a column of integers."""
PLAYED_TOKENS = 1
"""Bit of the column ``tokens``: the tokens of the played rollout are recorded."""
TRAINED_TOKENS = 2
"""Bit of the column ``tokens``: the tokens used in training are recorded."""
MAX_GROUP = 64
"""Maximum number of rollouts of the same group that are returned along with a rollout."""
MAX_EXTRACTED = 1000
"""Maximum number of rollouts that are extracted in full for a report."""
_TEXTS = ("task", "template", "group", "env", "split", "failure")
"""Columns of strings, which are sent as indices into tables."""
_MIN_INT32 = -(2**31)
"""Smallest 32-bit integer, the type of the columns."""
_MAX_INT32 = 2**31 - 1
"""Largest 32-bit integer, the type of the columns."""


class RunRollouts:
    """Rollouts in a run folder, read as they are added. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._store = RolloutStore(run_dir)
        self._lock = threading.Lock()
        self._rows: list[RolloutRow] = []
        self._packed_table = b""
        self._table_version: tuple[Any, ...] = ()

    def pack(self) -> bytes:
        """Return a table of all rollouts as columns (``run_data.pack``), ordered by step. Each
        rollout has a row, and each further conversation of a rollout (``branch``) has one.

        Strings are sent as indices into the tables of the header. The id of a rollout is
        ``samples[sample]/row``.
        """
        with self._lock:
            rows = self._refresh()
            if not self._packed_table:
                self._packed_table = _pack_rows(rows, self._store.problems)
            return self._packed_table

    def read_rollout(self, name: str, seen: str = "") -> dict[str, Any] | None:
        """Return a rollout's index lines and records, and the index lines of its group; None if
        there is no such rollout.

        A record that cannot be read is replaced by {problem}. ``stamp`` changes whenever one of the
        lines changes. If it equals ``seen``, no record is read and the result is {id, stamp, same}.
        """
        with self._lock:
            self._store.refresh()
            row = self._store.find(name)
            group = [] if row is None else self._store.group(row.play.sample)[:MAX_GROUP]
        if row is None:
            return None
        lines = {
            "step": row.step,
            "line": _to_builtins(row.play),
            "train_line": None if row.train is None else _to_builtins(row.train),
            "group": [
                {
                    **_to_builtins(member.play),
                    "train": None if member.train is None else _to_builtins(member.train),
                }
                for member in group
            ],
        }
        stamp = hashlib.blake2b(msgspec.json.encode(lines), digest_size=12).hexdigest()
        if stamp == seen:
            return {"id": name, "stamp": stamp, "same": True}
        return {
            "id": name,
            "stamp": stamp,
            **lines,
            "play": self._record(row.play),
            "train": None
            if row.train is None or row.train.shard == NO_SHARD
            else self._record(row.train),
        }

    def extract(self, max_rows: int, max_bytes: int) -> tuple[bytes, dict[str, dict[str, Any]]]:
        """Return the last ``max_rows`` rows in the format of ``pack``, and {id: result of
        ``read_rollout``} for the latest rollouts that fit into ``max_bytes`` of JSON.

        In the rows, all other rollouts are marked as not recorded. A rollout that takes a quarter
        of the bytes or more is left out.
        """
        rows = self.index()[-max_rows:]
        remaining_bytes = max_bytes
        records: dict[str, dict[str, Any]] = {}
        for row in [row for row in reversed(rows) if row.play.shard != NO_SHARD][
            : MAX_EXTRACTED if max_bytes else 0
        ]:
            record = self.read_rollout(row.play.id)
            size = len(json.dumps(record))
            if record is None or size >= max_bytes // 4:
                continue
            remaining_bytes -= size
            if remaining_bytes < 0:
                break
            records[row.play.id] = record
        marked_rows = [row if row.play.id in records else _without_record(row) for row in rows]
        return _pack_rows(marked_rows, self._store.problems), records

    def index(self) -> list[RolloutRow]:
        """Return the rows of the rollouts that count."""
        with self._lock:
            return list(self._refresh())

    def search(
        self, text: str, deadline: float, is_stopped: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """Yield {ids} of rollouts whose conversation, task or failure contains a string (ignoring
        case), newest first, and at the end {done, searched, of}.

        deadline: time on the clock ``process_clock.now`` at which the search ends. is_stopped:
        returns whether the search must end now.
        """
        with self._lock:
            lines = [row.play for row in self._refresh() if row.play.shard != NO_SHARD]
        needle = text.casefold()
        searched = 0
        members = [
            list(found)
            for _, found in itertools.groupby(
                sorted(lines, key=_member_position), key=_member_position
            )
        ]
        members.sort(key=lambda found: -max(line.time for line in found))
        for member in members:
            if is_stopped() or process_clock.now() > deadline:
                break
            found = list(self._search_member(member, needle))
            searched += len(member)
            if found:
                yield {"ids": found}
        yield {"done": searched == len(lines), "searched": searched, "of": len(lines)}

    def _search_member(self, member: Sequence[PlayLine], needle: str) -> Iterator[str]:
        """Yield the ids of rollouts in one compressed member of a file that contain a string."""
        try:
            texts = self._store.member(member[0])
        except NoRecord:
            return
        plain = needle.encode() if _is_unchanged_by_json(needle) else b""
        for line in member:
            if (
                0 <= line.line < len(texts)
                and _may_hold(texts[line.line], plain)
                and needle in _searched_text(texts[line.line])
            ):
                yield line.id

    def _record(self, line: Any) -> dict[str, Any]:
        """Return the record for an index line; {problem} if it cannot be read."""
        try:
            return self._store.record(line)
        except NoRecord as error:
            return {"problem": str(error)}

    def _refresh(self) -> list[RolloutRow]:
        """Read what was added and return the rows. If they have changed, drop the cached packed
        table."""
        self._store.refresh()
        store = self._store
        version = store.epoch, len(store.play.lines), len(store.train.lines), *store.problems
        if version != self._table_version:
            self._table_version = version
            self._packed_table = b""
            # The rows of a folder that has vanished are still shown.
            if store.play.lines or not self._rows:
                self._rows = sorted(self._store.rows(), key=lambda row: row.step)
        return self._rows


class _SearchedFields(msgspec.Struct):
    """Parts of a record that are searched."""

    task: Any = ""
    """Payload of the task."""
    status: Any = ""
    """Status of the rollout, or of its failure."""
    message: Any = ""
    """Message of a failure."""
    messages: list[Any] = []
    """Messages of the conversation."""


_decode_words = msgspec.json.Decoder(_SearchedFields).decode


def _is_unchanged_by_json(needle: str) -> bool:
    """Return whether JSON encodes this string unchanged."""
    return needle.isascii() and needle.isprintable() and not set('"\\') & set(needle)


def _may_hold(line: bytes, plain: bytes) -> bool:
    """Return whether an encoded record may contain a string, without decoding it.
    ``_is_unchanged_by_json`` must hold for the string. The result is always true for a record with
    characters beyond ASCII, also escaped ones, because such a character can equal an ASCII one if
    case is ignored."""
    return plain in line.lower() or not line.isascii() or b"\\u" in line or b"\\/" in line


def _searched_text(line: bytes) -> str:
    """Return the searched text of a record, without the names of its fields."""
    try:
        words = _decode_words(line)
    except (msgspec.MsgspecError, RecursionError):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            return ""
        if not isinstance(content, dict):
            return ""
        words = _SearchedFields(
            content.get("task"),
            content.get("status"),
            content.get("message"),
            content.get("messages", []),
        )
    return "\n".join(
        _collect_texts([words.task, words.status, words.message, words.messages])
    ).casefold()


def _collect_texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield all strings in a value, down to a limited depth."""
    if isinstance(value, str):
        yield value
    elif depth < 20 and isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _collect_texts(inner, depth + 1)


def _member_position(line: PlayLine) -> tuple[int, int, int]:
    """Return the position of the compressed member that contains a line's record."""
    return line.writer, line.shard, line.offset


def _to_builtins(line: Any) -> dict[str, Any]:
    """Return an index line as a value for JSON."""
    return msgspec.to_builtins(line) | {"has_tokens": line.has_tokens}


def _without_record(row: RolloutRow) -> RolloutRow:
    """Return a copy of a row that is marked as having no record."""
    play = msgspec.structs.replace(row.play, shard=NO_SHARD)
    return RolloutRow(
        play, None if row.train is None else msgspec.structs.replace(row.train, shard=NO_SHARD)
    )


def _pack_rows(rows: Sequence[RolloutRow], problems: Sequence[str]) -> bytes:
    """Return rows in the format of ``RunRollouts.pack``."""
    plays = [row.play for row in rows]
    trains = [row.train for row in rows]
    codes: dict[str, Array] = {}
    tables: dict[str, list[str]] = {}
    for name in _TEXTS:
        codes[name], tables[name] = _encode_texts(_text_field(play, name) for play in plays)
    parts = [play.id.rpartition("/") for play in plays]
    codes["sample"], tables["sample"] = _encode_texts(part[0] for part in parts)
    tokens = [
        PLAYED_TOKENS * play.has_tokens + TRAINED_TOKENS * (train is not None and train.has_tokens)
        for play, train in zip(plays, trains, strict=True)
    ]
    columns = {
        "row": _to_int32(
            int(part[2]) if part[2].isdecimal() and len(part[2]) < 16 else 0 for part in parts
        ),
        "step": _to_int32(row.step for row in rows),
        "time": np.array([play.time for play in plays], dtype=np.float64),
        "version": _to_int32(NONE if play.version is None else play.version for play in plays),
        "reward": _to_float32(play.reward for play in plays),
        "success": np.array([play.success for play in plays], dtype=np.uint8),
        "length": _to_int32(play.length for play in plays),
        "turns": _to_int32(play.turns for play in plays),
        "branch": np.array([play.branch is not None for play in plays], dtype=np.uint8),
        "truncated": np.array([play.truncated for play in plays], dtype=np.uint8),
        "seconds": _to_float32(play.seconds for play in plays),
        "kept": np.array([play.shard != NO_SHARD for play in plays], dtype=np.uint8),
        "tokens": np.array(tokens, dtype=np.uint8),
        "staleness": _to_int32(NONE if row.staleness is None else row.staleness for row in rows),
    }
    for name in ("advantage", "ratio_max", "clip_fraction", "mismatch"):
        columns[name] = _to_float32(
            None if train is None else getattr(train, name) for train in trains
        )
    return pack(
        {"count": len(rows), "tables": tables, "problems": list(problems)[:20]},
        {**columns, **codes},
    )


def _text_field(play: PlayLine, name: str) -> str:
    """Return a string field of an index line. Runs of earlier versions do not record a template;
    there each task is its own template."""
    return getattr(play, name) or (play.task if name == "template" else "")


def _encode_texts(values: Iterable[str]) -> tuple[Array, list[str]]:
    """Return (index of each string in a table, the table)."""
    table: dict[str, int] = {}
    codes = [table.setdefault(value, len(table)) for value in values]
    return np.array(codes, dtype=np.uint32), list(table)


def _to_int32(values: Iterable[int]) -> Array:
    """Return numbers as an array of int32. Numbers out of range, which come from a damaged index,
    are clipped."""
    numbers = list(values)
    try:
        wide = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
    except OverflowError:
        wide = np.array(
            [max(_MIN_INT32, min(_MAX_INT32, value)) for value in numbers], dtype=np.int64
        )
    return np.clip(wide, _MIN_INT32, _MAX_INT32).astype(np.int32)


def _to_float32(values: Iterable[float | None]) -> Array:
    """Return numbers as an array of float32, with NaN for None."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float32)
