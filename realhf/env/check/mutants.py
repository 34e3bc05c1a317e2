"""Writes mutants of a demonstration, whose turns are texts or calls of tools."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from realhf.env.check.scripts import call_text, functions, policy_turn, sample
from realhf.env.mutation.sequences import FIRST, Change, reordered, with_others, with_variants
from realhf.env.mutation.texts import changed_text
from realhf.env.mutation.values import NEIGHBOUR, changed_arguments, neighbours, words_of

OTHER_TOOL, UNDONE = "another tool", "undone"
_OPPOSITES = {
    one: other
    for pair in (
        ("add", "remove"), ("attach", "detach"), ("create", "delete"), ("do", "undo"), ("enable", "disable"),
        ("grant", "revoke"), ("insert", "delete"), ("lock", "unlock"), ("open", "close"), ("push", "pop"),
        ("put", "delete"), ("set", "unset"), ("show", "hide"), ("start", "stop"), ("write", "delete"),
    )
    for one, other in (pair, pair[::-1])
}  # fmt: skip
_BESIDE_PER_TOOL = 8
_LIKELY = 8


class Action(NamedTuple):
    """A turn of a policy: its text, and calls as (name, arguments)."""

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def text(self) -> str:
        """Return the turn as a policy writes it."""
        return "\n".join([*([self.content] if self.content or not self.calls else []), *_written(self.calls)])


def read_action(text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Read a turn; one with a call that cannot be read is a text."""
    message = policy_turn(text, tools)
    if any(call.problem for call in message.tool_calls):
        return Action(text)
    return Action(message.content.strip(), tuple((call.name, dict(call.arguments)) for call in message.tool_calls))


def mutants_of(
    actions: Sequence[Action], tools: Sequence[Mapping[str, Any]], words: Sequence[str], rng: random.Random
) -> Iterator[Change[tuple[Action, ...]]]:
    """Yield the actions with something changed. ``words`` stand in the episode and may be names, the likeliest first;
    ``rng`` draws the
    arguments of calls that the demonstration does not make."""
    properties = {name: _properties(parameters) for name, parameters in functions(tools)}

    def variants(action: Action) -> Iterator[Change[Action]]:
        for at, (name, given) in enumerate(action.calls):
            for kind, what, changed in _changed_calls(name, given, properties, words):
                yield Change(kind, what, action._replace(calls=(*action.calls[:at], changed, *action.calls[at + 1 :])))
        if action.content:
            for kind, what, text in changed_text(action.content, words):
                yield Change(kind, what, action._replace(content=text))

    beside = [
        Change(FIRST, f"{name} beside the task", Action("", ((name, _filled(known, words, rng)),)))
        for name, known in properties.items()
        for _ in range(_BESIDE_PER_TOOL)
    ]
    yield from chain(
        reordered(actions),
        with_variants(actions, variants),
        with_others(actions, beside),
        _undone(actions, properties, words),
        _to_neighbours(actions, words),
    )


def _changed_calls(
    name: str, given: dict[str, Any], properties: Mapping[str, Mapping[str, Any]], words: Sequence[str]
) -> Iterator[Change[tuple[str, dict[str, Any]]]]:
    for kind, what, arguments in changed_arguments(given, properties.get(name, {}), words):
        yield Change(kind, what, (name, arguments))
    for other, known in properties.items():
        if other != name and {*given} <= {*known}:
            yield Change(OTHER_TOOL, f"{other} and not {name}", (other, given))


def _undone(
    actions: Sequence[Action], properties: Mapping[str, Mapping[str, Any]], words: Sequence[str]
) -> Iterator[Change[tuple[Action, ...]]]:
    """Yield the actions with each call undone right behind it, and before the last action."""
    all_of = tuple(actions)
    for at, action in enumerate(all_of):
        for name, given in action.calls:
            for inverse in _inverses(name, given, properties, words):
                what = f"action {at + 1} undone by {inverse[0]}"
                undone = Action("", (inverse,))
                yield Change(UNDONE, what, (*all_of[: at + 1], undone, *all_of[at + 1 :]))
                if at + 1 < len(all_of):
                    yield Change(UNDONE, f"{what}, before the last", (*all_of[:-1], undone, all_of[-1]))


def _inverses(
    name: str, given: dict[str, Any], properties: Mapping[str, Mapping[str, Any]], words: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield calls that may undo one: the same with two arguments exchanged, and tools of the opposite name."""
    texts = [key for key, value in given.items() if isinstance(value, str)]
    if len(texts) == 2:
        yield name, {**given, texts[0]: given[texts[1]], texts[1]: given[texts[0]]}
    verb, _, rest = name.partition("_")
    for other, known in properties.items():
        first, _, others_rest = other.partition("_")
        if _OPPOSITES.get(verb) == first and rest == others_rest:
            yield other, {key: given.get(key, next(iter(words), "")) for key in known}
        elif _OPPOSITES.get(verb) == first and (shared := {key: given[key] for key in known if key in given}):
            yield other, shared


def _to_neighbours(actions: Sequence[Action], words: Sequence[str]) -> Iterator[Change[tuple[Action, ...]]]:
    """Yield everything done to a namesake: a word that stands in several places or in one is another everywhere."""
    all_of = tuple(actions)
    for word in words_of(action.text() for action in actions):
        if word not in words or len(word) < 2:
            continue
        for other in neighbours(word, words):
            changed = tuple(_renamed(action, word, other) for action in all_of)
            if changed != all_of:
                yield Change(NEIGHBOUR, f"{other} for {word} everywhere", changed)
                yield Change(f"{NEIGHBOUR}, before", f"everything to {other} for {word} first", (*changed, *all_of))


def _renamed(action: Action, word: str, other: str) -> Action:
    calls = tuple(
        (name, {key: _replaced(value, word, other) for key, value in given.items()}) for name, given in action.calls
    )
    return Action(action.content.replace(word, other), calls)


def _replaced(value: Any, word: str, other: str) -> Any:
    return value.replace(word, other) if isinstance(value, str) else value


def _filled(known: Mapping[str, Any], words: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Arguments for a call, with words of the episode where a text is wanted."""
    named = {}
    for name, schema in known.items():
        is_text = schema.get("type", "string") == "string" and not schema.get("enum") and words
        likely = words[: rng.choice((_LIKELY, len(words)))]
        named[name] = rng.choice(likely) if is_text else sample(schema, rng)
    return named


def _properties(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = parameters.get("properties")
    return (
        {name: each for name, each in found.items() if isinstance(each, Mapping)} if isinstance(found, Mapping) else {}
    )


def _written(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    return [call_text(name, given) for name, given in calls]
