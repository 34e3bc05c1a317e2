"""Tells the owner what the account in a simulator holds, and restores the settings that live in its modules.

All of MiniStack's resources lie in its scoped stores, and those are read here, not the answers of its operations: what
no operation shows (the bytes of an object, messages that wait) belongs to the account too. Texts that the simulator
drew itself are marked, because nobody can ask for them.

MiniStack's own reset empties its stores. What else its modules hold by name (switches that its configuration path sets,
counters) survives it, and would carry knowledge from one episode to another.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any

DRAWN = "\ue000"
END_DRAWN = "\ue001"
"""Marks around a text that the simulator drew."""
MOST_LEAVES = 200_000
LONGEST_TEXT = 65_536
"""Texts that are longer are told by their digest."""
_DEEPEST = 40
_KEPT_DRAWS = 4 << 20
"""Characters of drawn texts that are remembered between two resets."""
_SHORTEST_DRAW = 6
_MOST_BITS = 10_000
_LONGEST_DRAW = 64
"""Bytes."""
_LONGEST_RUN = 4096
_LONGEST_NAME = 256
"""Texts that are longer are looked at anew each time."""
_ENCODE = json.JSONEncoder(separators=(",", ":")).encode
_STORES = frozenset({"AccountScopedDict", "AccountRegionScopedDict"})
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PIECE = re.compile(rf"{_UUID.pattern}|[0-9A-Za-z_-]{{20,}}|[0-9A-Za-z]{{6,}}")
_WORD = re.compile(r"[0-9A-Za-z]{6,}")
_UNSAID = frozenset(
    {
        # what was asked and answered, not what there is
        *("_events", "_events_log", "_alarm_history", "_composite_triggers", "_stack_events", "_changes", "_queries"),
        *("_shard_iterators", "_txn_idempotency", "_caller_refs", "_hc_caller_refs", "_credential_reports"),
        *("_jwks_cache", "_oidc_config_cache", "_oidc_pending", "_challenge_sessions", "_change_progress"),
        # where readers of streams stand
        *("_kinesis_positions", "_dynamodb_stream_positions", "_esm_backoff_until", "_positions", "_stream_records"),
        # other ways to find the same
        *("_queue_name_to_url", "_sub_arn_to_topic", "_alias_dates", "_aws_managed_attachment_counts"),
        *("_pool_domain_map", "_callback_index", "_stream_trimmed"),
    }
)
"""Stores that hold no part of an account."""
_OF_AWS = "default."
"""Begins the names of ElastiCache's many parameter groups that belong to AWS."""


class TooLarge(Exception):
    """The account holds more than is told."""


class Draws:
    """Remembers every text that the simulator drew since the last reset."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._parts: list[str] = []
        self._size = 0
        self._text = self._letters = ""
        self._known: dict[str, bool] = {}
        self._undrawn: set[str] = set()
        """Ends of words that no drawn text has."""

    def add(self, *texts: str) -> None:
        """Remember texts that were drawn."""
        self._parts.extend(texts)
        self._size += sum(map(len, texts))
        if self._size > _KEPT_DRAWS:  # whoever draws so much names nothing by it
            self._parts = [*self._parts[len(self._parts) // 2 :]]
            self._size = self._size // 2

    def add_letter(self, letter: str) -> None:
        """Remember one more letter of a text that is drawn letter by letter."""
        self._letters += letter
        if len(self._letters) > _LONGEST_RUN:
            self.add(self._letters)
            self._letters = ""

    def look(self) -> None:
        """Take in what was drawn meanwhile, before texts are marked."""
        if len(self._parts) > bool(self._text) or self._letters:
            new = "\n".join([*self._parts[bool(self._text) :], self._letters])
            self._undrawn = {end for end in self._undrawn if end not in new} if len(new) < _LONGEST_RUN else set()
            self._text = "\n".join([*self._parts, self._letters])
            self._parts = [self._text]
            self._letters = ""
            self._known = {piece: True for piece, drawn in self._known.items() if drawn}

    def marked(self, text: str) -> str:
        """Return a text with marks around all that was drawn."""
        if DRAWN in text or END_DRAWN in text:
            text = text.replace(DRAWN, "?").replace(END_DRAWN, "?")
        if len(text) <= _LONGEST_NAME:
            ends = _ends(text)
            self._undrawn.update(end for end in ends - self._undrawn if end not in self._text)
            if ends <= self._undrawn:
                return text
        return _PIECE.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        piece = match[0]
        if _UUID.fullmatch(piece):  # clients draw them too, where a request wants a token
            return f"{DRAWN}{piece}{END_DRAWN}"
        for start in range(min(6, len(piece) - _SHORTEST_DRAW + 1)):
            if self._was_drawn(piece[start:]):
                return f"{piece[:start]}{DRAWN}{piece[start:]}{END_DRAWN}"
        return piece if _WORD.fullmatch(piece) else _WORD.sub(self._mark, piece)

    def _was_drawn(self, piece: str) -> bool:
        known = self._known.get(piece)
        if known is None:
            known = self._known[piece] = piece in self._text
        return known


@lru_cache(8192)
def _ends(text: str) -> frozenset[str]:
    """Return the last characters of all words of a text: one that was drawn ends as it was drawn. "", which every text
    has, for a UUID."""
    pieces = _PIECE.findall(text)
    words = ("" if _UUID.fullmatch(piece) else word for piece in pieces for word in (piece, *_WORD.findall(piece)))
    return frozenset(word[-_SHORTEST_DRAW:] for word in words)


class AccountState:
    """Reads the stores. The serial number of a record counts how often one of its name was deleted before it: what was
    made anew is known, whatever it says."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._modules = 0
        self._stores: list[tuple[str, str, Any]] = []
        self._deleted: Counter[tuple[int, Any]] = Counter()

    def watch(self, store: type) -> None:
        """Count what is deleted from stores of a class."""

        def counted(deletes: Callable[..., Any], scoped: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(deletes)
            def delete(held: Any, *arguments: Any) -> Any:
                name = scoped(held, *arguments)
                if name in held._data:
                    self._deleted[id(held), name] += 1
                return deletes(held, *arguments)

            return delete

        inner = store._scoped  # type: ignore[attr-defined]
        for method in ("__delitem__", "pop"):
            setattr(store, method, counted(getattr(store, method), lambda held, name, *_: inner(held, name)))
        regional = len(inner.__get__(store())("")) == 3
        store.pop_scoped = counted(  # type: ignore[attr-defined]
            store.pop_scoped,  # type: ignore[attr-defined]
            lambda held, account, region, name, *_: (account, region, name) if regional else (account, name),
        )

    def forget(self) -> None:
        """Begin anew, after a reset."""
        self._deleted.clear()
        self._draws.clear()

    def report(self) -> list[str]:
        """Return records: lists of module, store, region, key, serial and value, each as JSON. Raises TooLarge."""
        self._find_stores()
        self._draws.look()
        exporter = StateExporter(self._draws.marked)
        records = []
        for module, store, held in self._stores:
            for scoped, value in list(held._data.items()) if held._data else ():
                if module == "elasticache" and str(scoped[-1]).startswith(_OF_AWS):
                    continue
                region = scoped[1] if len(scoped) == 3 else ""
                serial = self._deleted[id(held), scoped]
                record = [module, store, region, exporter.key(scoped[-1]), serial, exporter.tell(value)]
                records.append(_ENCODE(record))
        return records

    def _find_stores(self) -> None:
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        found: dict[int, tuple[str, str, Any]] = {}
        for module, name, held in _module_contents():
            if type(held).__name__ in _STORES and name not in _UNSAID:
                found.setdefault(id(held), (module, name.strip("_"), held))
        self._stores = list(found.values())


def _module_contents() -> Iterator[tuple[str, str, Any]]:
    for module, contents in sorted(sys.modules.items()):
        if module.startswith("ministack.services."):
            for name, held in vars(contents).items():
                yield module.split(".")[2], name, held


class StateExporter:
    """Turns records into plain data, within bounds."""

    def __init__(self, marked: Callable[[str], str]) -> None:
        self._marked = marked
        self._left = MOST_LEAVES

    def key(self, key: Any) -> str:
        """Return a key of a store or a map as text."""
        if isinstance(key, str):
            return self._marked(key)
        return "/".join(map(self.key, key)) if isinstance(key, tuple) else str(key)

    def tell(self, value: Any, depth: int = 0) -> Any:
        """Return a value as plain data. Raises TooLarge."""
        if value is None or isinstance(value, (bool, int, float)):
            # Python refuses to write larger integers in decimals, and a template may hold them in hexadecimals.
            return hex(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST:
            raise TooLarge(f"an account of more than {MOST_LEAVES} parts, or deeper than {_DEEPEST}")
        if isinstance(value, str):
            return self._marked(value) if len(value) <= LONGEST_TEXT else _digest(value.encode("utf-8", "replace"))
        if isinstance(value, (dict, Mapping)):
            if type(value).__name__ in _STORES:
                value = value._data  # type: ignore[attr-defined]
            return {self.key(name): self.tell(item, depth + 1) for name, item in list(value.items())}
        if isinstance(value, list | tuple):
            return [self.tell(item, depth + 1) for item in list(value)]
        if isinstance(value, set | frozenset):
            return sorted((self.tell(item, depth + 1) for item in list(value)), key=repr)
        if isinstance(value, bytes | bytearray | memoryview):
            text = self._marked(bytes(value).hex()) if len(value) <= _LONGEST_DRAW else ""
            return text if DRAWN in text else _digest(bytes(value))
        return value.isoformat() if isinstance(value, datetime) else f"<{type(value).__name__}>"


def _digest(content: bytes) -> str:
    return f"{len(content)} bytes, sha256 {base64.b64encode(hashlib.sha256(content).digest()).decode()}"


_PACKAGE = "ministack"
_PLAIN = (str, bytes, int, float, bool, type(None))
_SWITCHES_THAT_ARE_OBJECTS = frozenset({("ministack.services.stepfunctions", "_sfn_mock_config")})
_RUNNING = re.compile(r"_started$|^_inflight_total$|^_generation$")
"""Names of threads and waits that outlive a reset; to forget them would start them twice."""


class ModuleSwitches:
    """Remembers the plain values (numbers, texts, flags) that MiniStack's modules hold at the moment this is made."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[str, Any]] = {}
        for module, name, value in _settings():
            self._taken.setdefault(module, {})[name] = value

    def restore(self) -> list[str]:
        """Put back what changed; returns its names. Where there was nothing and is an object now (a thread, a lock),
        that was made when first needed, and stays."""
        changed = []
        for module, settings in self._taken.items():
            names = vars(sys.modules[module])
            for name, value in settings.items():
                now = names.get(name)
                if now is value or (value is None and not _is_plain(now)):
                    continue
                if type(now) is not type(value) or now != value:
                    changed.append(f"{module}.{name}")
                names[name] = value
        return changed

    def values(self) -> dict[str, str]:
        """Return the present values, as text, by name: for comparing two moments."""
        return {
            f"{module}.{name}": repr(vars(sys.modules[module]).get(name))[:200]
            for module, settings in self._taken.items()
            for name in settings
        }


def _settings() -> list[tuple[str, str, Any]]:
    found = []
    for module, contents in list(sys.modules.items()):
        if module == _PACKAGE or module.startswith(f"{_PACKAGE}."):
            for name, value in vars(contents).items():
                if name.startswith("__") or _RUNNING.search(name):
                    continue
                if _is_plain(value) or (module, name) in _SWITCHES_THAT_ARE_OBJECTS:
                    found.append((module, name, value))
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | frozenset) and all(map(_is_plain, value)))
