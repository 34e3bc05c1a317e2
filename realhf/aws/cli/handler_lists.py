"""Handlers of the AWS CLI's and botocore's events: known lists of them, and those that would do
something.

``botocore`` means the CLI's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import awscli  # noqa: F401  (must be first: makes the name botocore refer to the CLI's own copy)
from botocore.hooks import EventAliaser, HierarchicalEmitter


def keep_handler_lists(first: HierarchicalEmitter) -> None:
    """Keep the known lists of handlers when a handler is registered for another kind of event.

    ``_lookup_cache`` becomes a dict by the first word of the event. Its inner dicts are never
    shared by two emitters, whose handlers differ. ``first``: the emitter of which all others are
    copies.
    """
    emitters = HierarchicalEmitter
    register_section = emitters._register_section
    unregister = emitters.unregister
    copy_emitter = emitters.__copy__
    first._lookup_cache = {}

    def without(known: dict[str, Any], event_name: str) -> dict[str, Any]:
        kind = event_name.partition(".")[0]
        return {} if "*" in kind else {name: known[name] for name in known if name != kind}

    def register(emitter: Any, event_name: str, *arguments: Any, **options: Any) -> None:
        known = emitter._lookup_cache
        register_section(emitter, event_name, *arguments, **options)
        emitter._lookup_cache = without(known, event_name)

    def remove(emitter: Any, event_name: str, *arguments: Any, **options: Any) -> None:
        known = emitter._lookup_cache
        unregister(emitter, event_name, *arguments, **options)
        if emitter._lookup_cache is not known:
            emitter._lookup_cache = without(known, event_name)

    def copied(emitter: Any) -> Any:
        other = copy_emitter(emitter)
        other._lookup_cache = {}
        return other

    def emit_to(
        emitter: Any, event_name: str, arguments: dict[str, Any], stop_on_response: bool = False
    ) -> list[Any]:
        handlers = _find_handlers(emitter, event_name.partition(".")[0], event_name)
        if not handlers:
            return []
        arguments["event_name"] = event_name
        responses = []
        for handler in handlers:
            response = handler(**arguments)
            responses.append((handler, response))
            if stop_on_response and response is not None:
                break
        return responses

    def emit_alias(aliaser: Any, event_name: str, **arguments: Any) -> list[Any]:
        return aliaser._emitter._emit(aliaser._alias_event_name(event_name), arguments)

    emitters._register_section = register  # type: ignore[method-assign]
    emitters.unregister = remove  # type: ignore[method-assign]
    emitters.__copy__ = copied  # type: ignore[method-assign]
    emitters._emit = emit_to  # type: ignore[method-assign]
    EventAliaser.emit = emit_alias  # type: ignore[method-assign]


def rename_events_quickly() -> None:
    """Find the new name of an event by its parts. The original tries all aliases, one by one."""

    def alias_event_name(aliaser: Any, event_name: str) -> str:
        renamed = aliaser._alias_name_cache.get(event_name)
        if renamed is not None:
            return renamed
        plan = aliaser.__dict__.get("_alias_plan")
        if plan is None:
            plan = aliaser._alias_plan = _AliasPlan(aliaser._event_aliases)
        renamed = plan.rename(event_name, aliaser._replace_subsection)
        aliaser._alias_name_cache[event_name] = renamed
        return renamed

    EventAliaser._alias_event_name = alias_event_name  # type: ignore[method-assign]


class _AliasPlan:
    """Aliases of events, of which the first one that applies counts. ``aliases``: new parts of the
    name by old ones."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        numbered = list(enumerate(aliases.items()))
        self._single = {
            old: (number, old, new) for number, (old, new) in numbered if "." not in old
        }
        self._several = [(number, old, new) for number, (old, new) in numbered if "." in old]

    def rename(self, name: str, replace: Callable[[list[str], list[str], str], None]) -> str:
        """Return the new name of an event. ``replace`` (parts, old ones, new one) replaces several
        parts by one."""
        parts = name.split(".")
        matches = [self._single[part] for part in parts if part in self._single]
        matches += [alias for alias in self._several if alias[1] in name]
        if not matches:
            return name
        _, old, new = min(matches)
        if "." in old:
            replace(parts, old.split("."), new)
        else:
            parts[parts.index(old)] = new
        return ".".join(parts)


def _find_handlers(emitter: Any, kind: str, event_name: str) -> Any:
    """Return the handlers of an event in their order. It is the same object until a handler of this
    kind of event is registered or removed."""
    known = emitter._lookup_cache.get(kind)
    if known is None:
        known = emitter._lookup_cache[kind] = {}
    handlers = known.get(event_name)
    if handlers is None:
        handlers = known[event_name] = emitter._handlers.prefix_search(event_name)
    return handlers


class KnownEvent:
    """One event, of which only the handlers are called that would do something.

    ``emitter``: as ``client.meta.events``. ``is_idle(handler)``: whether a handler does nothing for
    this event, whatever its arguments.
    """

    __slots__ = ("_emitter", "_is_idle", "_kind", "_known", "_name")

    def __init__(self, emitter: Any, name: str, is_idle: Callable[[Any], bool]) -> None:
        if isinstance(emitter, EventAliaser):
            name = emitter._alias_event_name(name)
            emitter = emitter._emitter
        self._emitter = emitter
        self._name = name
        self._kind = name.partition(".")[0]
        self._is_idle = is_idle
        # (all handlers, those that would do something), one object because other threads may ask
        self._known: tuple[Any, tuple[Any, ...]] = (None, ())

    @property
    def handlers(self) -> tuple[Any, ...]:
        """The handlers that would do something, in their order."""
        handlers = _find_handlers(self._emitter, self._kind, self._name)
        known, busy = self._known
        if handlers is not known:
            busy = tuple(handler for handler in handlers if not self._is_idle(handler))
            self._known = (handlers, busy)
        return busy

    def emit(self, **arguments: Any) -> Any:
        """Call the handlers and return their first answer that is not None."""
        first = None
        for handler in self.handlers:
            answer = handler(event_name=self._name, **arguments)
            if first is None:
                first = answer
        return first

    def emit_until_answer(self, **arguments: Any) -> Any:
        """Call the handlers until one answers something else than None, and return that."""
        for handler in self.handlers:
            answer = handler(event_name=self._name, **arguments)
            if answer is not None:
                return answer
        return None
