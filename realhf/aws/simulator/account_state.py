"""Export of a simulator's account to its owner, and reset of the settings in MiniStack's modules.

MiniStack keeps all resources in its scoped stores. They are read directly instead of through its
operations, because content that no operation shows (bytes of an object, waiting messages) belongs
to the account too.

Texts that the simulator generated ("drawn" from its seeded randomness, such as ids) are marked,
because no agent can choose them. In the string ``vpc-1f0c93ab/rules`` the *pieces*, parts that look
like an id, are examined one by one, and ``1f0c93ab`` is marked if the simulator generated it.

MiniStack's own reset empties its stores. Other module state (switches set through its configuration
path, counters) survives that reset and would carry information from one episode to the next.
"""

from __future__ import annotations

import base64
import hashlib
import json
import marshal
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from operator import is_, itemgetter
from typing import Any

DRAWN = "\ue000"
END_DRAWN = "\ue001"
"""Marks before and after a text that the simulator generated."""
MAX_LEAVES = 200_000
"""Maximum number of values in a report."""
MAX_TEXT_LENGTH = 65_536
"""Maximum length of a reported string, in characters. A longer one is replaced by its digest."""
_MAX_DEPTH = 40
"""Maximum depth of a record."""
_KEPT_DRAWS = 4 << 20
"""Maximum number of characters of generated texts that are kept between two resets."""
_MIN_DRAW_LENGTH = 6
"""Minimum length of a text that is recognized as generated."""
_MAX_BITS = 10_000
"""Maximum size of an integer reported in decimal, in bits. Python refuses to convert much larger
ones."""
_MAX_DRAW_LENGTH = 64
"""Maximum length of a byte string that may be generated, in bytes."""
_MAX_RUN_LENGTH = 4096
"""Maximum length of a text recorded character by character. Also the length from which new text
discards the cache of absent endings."""
_MAX_NAME_LENGTH = 256
"""Maximum length of a text for which the quick test by word endings is made, in characters."""
_MAX_LOOKUPS = 4096
"""Maximum number of pieces that are known not to be generated. Each of them is searched in every new
text."""
_MAX_KEPT_BYTES = 16 << 10
"""Maximum size of a record, as ``marshal`` writes it, that is kept from one report to the next."""
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_STORES = frozenset({"AccountScopedDict", "AccountRegionScopedDict"})
"""Class names of MiniStack's stores."""
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PIECE = re.compile(rf"{_UUID.pattern}|[0-9A-Za-z_-]{{20,}}|[0-9A-Za-z]{{6,}}")
"""A part of a text that may be generated as a whole."""
_WORD = re.compile(r"[0-9A-Za-z]{6,}")
"""A part of such a piece that may be generated."""
_IGNORED_STORES = frozenset(
    {
        # logs of requests and answers, not state
        *(
            "_events",
            "_events_log",
            "_alarm_history",
            "_composite_triggers",
            "_stack_events",
            "_changes",
            "_queries",
        ),
        *(
            "_shard_iterators",
            "_txn_idempotency",
            "_caller_refs",
            "_hc_caller_refs",
            "_credential_reports",
        ),
        *(
            "_jwks_cache",
            "_oidc_config_cache",
            "_oidc_pending",
            "_challenge_sessions",
            "_change_progress",
        ),
        # read positions in streams
        *(
            "_kinesis_positions",
            "_dynamodb_stream_positions",
            "_esm_backoff_until",
            "_positions",
            "_stream_records",
        ),
        # indices of other stores
        *(
            "_queue_name_to_url",
            "_sub_arn_to_topic",
            "_alias_dates",
            "_aws_managed_attachment_counts",
        ),
        *("_pool_domain_map", "_callback_index", "_stream_trimmed"),
    }
)
"""Stores that contain no part of the account."""
_OF_AWS = "default."
"""Prefix of ElastiCache's many parameter groups that belong to AWS."""


class TooLarge(Exception):
    """The account exceeds the limits of a report."""


_TOO_LARGE = f"an account of more than {MAX_LEAVES} parts, or deeper than {_MAX_DEPTH}"
"""Message of the error about such an account."""


class Draws:
    """The texts (ids, suffixes, secrets) that the simulator has generated since the last reset."""

    def __init__(self) -> None:
        self.epoch = 0
        """Number that changes at each ``refresh`` after which ``mark`` may answer otherwise than
        before about a text that it has been asked about."""
        self.clear()

    def clear(self) -> None:
        """Discard all recorded texts and the caches about them."""
        self.epoch += 1
        self._texts: list[str] = []
        """The recorded texts. After ``refresh`` the indexed ones are a single text, the first."""
        self._size = 0
        """Number of characters of the recorded texts."""
        self._was_dropped = False
        """Whether recorded texts were dropped since the last ``refresh``; ``_texts`` may no longer
        begin with the indexed ones."""
        self._index = ""
        """All texts that ``mark`` recognizes, one after another."""
        self._unfinished = ""
        """The text that is being generated character by character."""
        self._lookup_cache: dict[str, bool] = {}
        """Whether a piece occurs in ``_index``, by the piece."""
        self._absent_endings: set[str] = set()
        """Cache of word endings that occur in no generated text."""
        self._marked_endings: set[str] | None = set()
        """Word endings of the texts that ``mark`` was given since ``begin_record``; None if one of
        them may contain a generated part."""

    def add(self, *texts: str) -> None:
        """Record generated texts."""
        self._texts.extend(texts)
        self._size += sum(map(len, texts))
        if self._size > _KEPT_DRAWS:  # so much text is data, not names: drop the older half
            self._texts = [*self._texts[len(self._texts) // 2 :]]
            self._size = self._size // 2
            self._was_dropped = True

    def add_letter(self, letter: str) -> None:
        """Record one character of a text that is generated character by character."""
        self._unfinished += letter
        if len(self._unfinished) > _MAX_RUN_LENGTH:
            self.add(self._unfinished)
            self._unfinished = ""

    def refresh(self) -> None:
        """Index the texts recorded since the last call. Call it before ``mark``."""
        if self._was_dropped or len(self._texts) > bool(self._index) or self._unfinished:
            if self._was_dropped:
                self._lookup_cache = {
                    piece: True for piece, drawn in self._lookup_cache.items() if drawn
                }
                self._absent_endings.clear()
                self.epoch += 1
                self._was_dropped = False
            else:
                new = "\n".join([*self._texts[bool(self._index) :], self._unfinished])
                self._update_caches(new)
            self._index = "\n".join([*self._texts, self._unfinished])
            self._texts = [self._index]
            self._unfinished = ""

    def _update_caches(self, new: str) -> None:
        """Drop from the caches what the text ``new`` makes wrong. If that is anything, answers of
        ``mark`` may change, so a new epoch begins."""
        absent = [piece for piece, drawn in self._lookup_cache.items() if not drawn]
        is_searchable = len(new) < _MAX_RUN_LENGTH and len(absent) <= _MAX_LOOKUPS
        found = [piece for piece in absent if not is_searchable or piece in new]
        ends = {end for end in self._absent_endings if not is_searchable or end in new}
        for piece in found:
            del self._lookup_cache[piece]
        self._absent_endings -= ends
        self.epoch += bool(found or ends or not is_searchable)

    def lacks(self, ends: frozenset[str]) -> bool:
        """Return whether none of these word endings occurs in a generated text."""
        if ends <= self._absent_endings:
            return True
        self._absent_endings.update(
            end for end in ends - self._absent_endings if end not in self._index
        )
        return ends <= self._absent_endings

    def begin_record(self) -> None:
        """Begin to collect the word endings of the texts that ``mark`` is given."""
        self._marked_endings = set()

    def end_record(self) -> frozenset[str] | None:
        """Return the word endings since ``begin_record``, or None if a text may have been marked.
        As long as ``lacks`` is true of them, the texts stay as they are."""
        return None if self._marked_endings is None else frozenset(self._marked_endings)

    def mark(self, text: str) -> str:
        """Return a text with marks around all of its generated parts."""
        if DRAWN in text or END_DRAWN in text:
            text = text.replace(DRAWN, "?").replace(END_DRAWN, "?")
        if len(text) <= _MAX_NAME_LENGTH:
            ends = _word_endings(text)
            if self.lacks(ends):
                if self._marked_endings is not None:
                    self._marked_endings |= ends
                return text
        self._marked_endings = None
        return _PIECE.sub(self._mark_piece, text)

    def _mark_piece(self, match: re.Match[str]) -> str:
        """Return a matched part of a string with marks around the generated id in it, if any.

        A UUID is marked whole. Otherwise the longest suffix that a generator produced is marked,
        since an id may follow a short fixed prefix such as ``vpc-``.
        """
        piece = match[0]
        if _UUID.fullmatch(piece):  # clients generate UUIDs too, as request tokens
            return f"{DRAWN}{piece}{END_DRAWN}"
        for start in range(min(6, len(piece) - _MIN_DRAW_LENGTH + 1)):
            if self._is_generated(piece[start:]):
                return f"{piece[:start]}{DRAWN}{piece[start:]}{END_DRAWN}"
        return piece if _WORD.fullmatch(piece) else _WORD.sub(self._mark_piece, piece)

    def _is_generated(self, piece: str) -> bool:
        """Return whether a piece occurs in a generated text."""
        known = self._lookup_cache.get(piece)
        if known is None:
            known = self._lookup_cache[piece] = piece in self._index
        return known


@lru_cache(8192)
def _word_endings(text: str) -> frozenset[str]:
    """Return the last characters of every word in a text.

    Prefixing a generated text does not change its ending, so a text whose endings occur in no
    generated text contains none. A UUID yields "", which occurs in every text.
    """
    pieces = _PIECE.findall(text)
    words = (
        "" if _UUID.fullmatch(piece) else word
        for piece in pieces
        for word in (piece, *_WORD.findall(piece))
    )
    return frozenset(word[-_MIN_DRAW_LENGTH:] for word in words)


@dataclass(frozen=True, slots=True)
class _KeptRecord:
    """A record as it was reported last."""

    content: bytes | None
    """What it was made from, as ``marshal`` writes it; None if ``marshal`` cannot write it or it is
    too long to be kept."""
    serial: int
    """Its serial number."""
    epoch: int
    """``Draws.epoch`` at that time."""
    endings: frozenset[str] | None
    """The word endings of its texts, if it contains nothing that was generated; otherwise None."""
    leaves: int
    """Number of its values."""
    text: str
    """The record as JSON."""

    def describes(self, content: bytes | None, serial: int, draws: Draws) -> bool:
        """Return whether the record would be the same again."""
        return (
            content is not None
            and self.content == content
            and self.serial == serial
            and (
                self.epoch == draws.epoch
                or (self.endings is not None and draws.lacks(self.endings))
            )
        )


def _write_plain(value: Any) -> bytes | None:
    """Return plain data as bytes, or None if it is not plain or is too long to be kept. Equal bytes
    mean equal data, of the same types and in the same order."""
    try:
        content = marshal.dumps(value, _WITHOUT_REFERENCES)
    except (ValueError, MemoryError):
        return None
    return content if len(content) <= _MAX_KEPT_BYTES else None


_WITHOUT_REFERENCES = 2
"""The last version of ``marshal``'s format whose bytes depend on the data alone. Later ones also
write which of its parts are the same object."""


class AccountState:
    """Reader of the account in MiniStack's stores.

    A record's serial number is the number of earlier deletions under its name. So a resource that
    was deleted and created again is recognized even if its content is the same.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._modules = 0
        self._stores: list[tuple[str, str, Any]] = []
        self._deleted: Counter[tuple[int, Any]] = Counter()
        """Number of deletions, by (id of the store object, scoped name)."""
        self._kept: dict[tuple[str, str, Any], _KeptRecord] = {}
        """The records of the last report, by (module, store, scoped name)."""
        self._unkept: dict[tuple[str, str, Any], int] = {}
        """The ids of the values that ``_write_plain`` could not write, by the same names. They are
        exported each time, so nothing is missed if another object has the same id."""

    def watch(self, store: type) -> None:
        """Wrap the methods of a store class that delete records, so that deletions are counted."""

        def count_deletions(
            deletes: Callable[..., Any], scoped: Callable[..., Any]
        ) -> Callable[..., Any]:
            @wraps(deletes)
            def delete(stored: Any, *arguments: Any) -> Any:
                name = scoped(stored, *arguments)
                if name in stored._data:
                    self._deleted[id(stored), name] += 1
                return deletes(stored, *arguments)

            return delete

        inner = store._scoped  # type: ignore[attr-defined]
        for method in ("__delitem__", "pop"):
            setattr(
                store,
                method,
                count_deletions(
                    getattr(store, method), lambda stored, name, *_: inner(stored, name)
                ),
            )
        regional = len(inner.__get__(store())("")) == 3
        store.pop_scoped = count_deletions(  # type: ignore[attr-defined]
            store.pop_scoped,  # type: ignore[attr-defined]
            lambda stored, account, region, name, *_: (
                (account, region, name) if regional else (account, name)
            ),
        )

    def forget(self) -> None:
        """Reset the deletion counts and the generated texts."""
        self._deleted.clear()
        self._draws.clear()

    def report(self) -> list[str]:
        """Return the account's records, each as JSON: [module, store, region, key, serial, value].
        Raises TooLarge.

        A record that is as it was in the last report is not written again. Whether it is shows a
        comparison of its whole content, which ``marshal`` writes much faster than a record is made:
        services change their records in place, so nothing tells that one has changed.
        """
        self._find_stores()
        self._draws.refresh()
        exporter = StateExporter(self._draws.mark)
        kept: dict[tuple[str, str, Any], _KeptRecord] = {}
        unkept: dict[tuple[str, str, Any], int] = {}
        records = []
        for module, store, contents in self._stores:
            for scoped, value in list(contents._data.items()) if contents._data else ():
                if module == "elasticache" and str(scoped[-1]).startswith(_OF_AWS):
                    continue
                place = (module, store, scoped)
                serial = self._deleted[id(contents), scoped]
                is_unkept = self._unkept.get(place) == id(value)
                content = None if is_unkept else _write_plain(value)
                known = self._kept.get(place)
                if known is not None and known.describes(content, serial, self._draws):
                    exporter.count(known.leaves)
                else:
                    region = scoped[1] if len(scoped) == 3 else ""
                    before = exporter.leaves_left
                    self._draws.begin_record()
                    key = exporter.key(scoped[-1])
                    record = [module, store, region, key, serial, exporter.export(value)]
                    leaves = before - exporter.leaves_left
                    epoch = self._draws.epoch
                    endings = self._draws.end_record()
                    known = _KeptRecord(content, serial, epoch, endings, leaves, _ENCODE(record))
                if content is None:
                    unkept[place] = id(value)
                else:
                    kept[place] = known
                records.append(known.text)
        self._kept = kept
        self._unkept = unkept
        return records

    def _find_stores(self) -> None:
        """Find the stores in MiniStack's modules. Search again only if modules were imported
        since."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        stores: dict[int, tuple[str, str, Any]] = {}
        for module, name, store in _module_contents():
            if type(store).__name__ in _STORES and name not in _IGNORED_STORES:
                stores.setdefault(id(store), (module, name.strip("_"), store))
        self._stores = list(stores.values())


def _module_contents() -> Iterator[tuple[str, str, Any]]:
    """Yield (module, name, value) for everything in the modules of MiniStack's services."""
    for module, contents in sorted(sys.modules.items()):
        if module.startswith("ministack.services."):
            for name, value in vars(contents).items():
                yield module.split(".")[2], name, value


class StateExporter:
    """Converter of records to plain data, up to a maximum size and depth."""

    def __init__(self, mark: Callable[[str], str]) -> None:
        self._mark = mark
        self.leaves_left = MAX_LEAVES
        """Number of values that may still be exported."""

    def count(self, leaves: int) -> None:
        """Count values that were exported earlier. Raises TooLarge."""
        self.leaves_left -= leaves
        if self.leaves_left < 0:
            raise TooLarge(_TOO_LARGE)

    def key(self, key: Any) -> str:
        """Return a key of a store or a mapping as a string."""
        if isinstance(key, str):
            return self._mark(key)
        return "/".join(map(self.key, key)) if isinstance(key, tuple) else str(key)

    def export(self, value: Any, depth: int = 0) -> Any:
        """Return a value as plain data. Raises TooLarge."""
        if value is None or isinstance(value, (bool, int, float)):
            # Python refuses to write larger integers in decimal; a template may contain them in
            # hexadecimal.
            return (
                hex(value) if isinstance(value, int) and value.bit_length() > _MAX_BITS else value
            )
        self.leaves_left -= 1
        if self.leaves_left < 0 or depth > _MAX_DEPTH:
            raise TooLarge(_TOO_LARGE)
        if isinstance(value, str):
            return (
                self._mark(value)
                if len(value) <= MAX_TEXT_LENGTH
                else _digest(value.encode("utf-8", "replace"))
            )
        if isinstance(value, (dict, Mapping)):
            if type(value).__name__ in _STORES:
                value = value._data  # type: ignore[attr-defined]
            return {
                self.key(name): self.export(item, depth + 1) for name, item in list(value.items())
            }
        if isinstance(value, list | tuple):
            return [self.export(item, depth + 1) for item in list(value)]
        if isinstance(value, set | frozenset):
            return sorted((self.export(item, depth + 1) for item in list(value)), key=repr)
        if isinstance(value, bytes | bytearray | memoryview):
            text = self._mark(bytes(value).hex()) if len(value) <= _MAX_DRAW_LENGTH else ""
            return text if DRAWN in text else _digest(bytes(value))
        return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"


def _digest(content: bytes) -> str:
    """Return the length and SHA-256 digest of bytes, as a string."""
    return (
        f"{len(content)} bytes, sha256 "
        f"{base64.b64encode(hashlib.sha256(content).digest()).decode()}"
    )


_PACKAGE = "ministack"
_PLAIN = (str, bytes, int, float, bool, type(None))
"""Types of plain settings."""
_SWITCHES_THAT_ARE_OBJECTS = frozenset({("ministack.services.stepfunctions", "_sfn_mock_config")})
"""Settings that are restored although they are objects, as (module, name)."""
_RUNNING = re.compile(r"_started$|^_inflight_total$|^_generation$")
"""Names of variables about threads and waits that outlive a reset. Restoring them would start these
twice."""


class ModuleSwitches:
    """The plain settings (numbers, strings, flags) in MiniStack's modules, as they were at
    construction."""

    def __init__(self) -> None:
        self._initial: dict[str, dict[str, Any]] = {}
        for module, name, value in _find_settings():
            self._initial.setdefault(module, {})[name] = value
        self._quick_looks: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {}
        for module, settings in self._initial.items():
            # with a name given twice, since itemgetter returns no tuple for a single one
            names = [*settings, next(iter(settings))]
            take = itemgetter(*names)
            self._quick_looks[module] = (take, take(settings))
        """For each module a function that takes its settings, and what it returned at
        construction."""

    def restore(self) -> list[str]:
        """Restore the settings that have changed, and return their names.

        A setting that was None and is now an object (a thread, a lock) was created on first use. It
        is left unchanged.
        """
        changed = []
        for module, settings in self._initial.items():
            names = vars(sys.modules[module])
            take, initial = self._quick_looks[module]
            try:
                if all(map(is_, take(names), initial)):
                    continue  # as in nearly all modules; a quick test, since there are a thousand
            except KeyError:
                pass
            for name, value in settings.items():
                now = names.get(name)
                if now is value or (value is None and not _is_plain(now)):
                    continue
                if type(now) is not type(value) or now != value:
                    changed.append(f"{module}.{name}")
                names[name] = value
        return changed

    def values(self) -> dict[str, str]:
        """Return the present settings as strings, by name, so that two points in time can be
        compared."""
        return {
            f"{module}.{name}": repr(vars(sys.modules[module]).get(name))[:200]
            for module, settings in self._initial.items()
            for name in settings
        }


def _find_settings() -> list[tuple[str, str, Any]]:
    """Return (module, name, value) of every setting."""
    settings = []
    for module, contents in list(sys.modules.items()):
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            for name, value in vars(contents).items():
                if name.startswith("__") or _RUNNING.search(name):
                    continue
                if _is_plain(value) or (module, name) in _SWITCHES_THAT_ARE_OBJECTS:
                    settings.append((module, name, value))
    return settings


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain data."""
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple | frozenset) and all(map(_is_plain, value))
    )
