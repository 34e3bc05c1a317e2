"""Mutation of an environment's demonstrations, which lists the mutants that earn the full reward.

A mutant is a demonstration with a change: to an argument, a word, the order or a name, or with an
additional call. A mutant with the full reward either leaves the same state as the demonstration, or
shows that the reward can be earned without solving the task. The two are distinguished
automatically if the environment describes its state (``view`` in the info of a turn); otherwise a
person must read the list.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from realhf.api.environment import (
    SOLUTION,
    TRAIN,
    Demonstration,
    DemonstrationRequest,
    EnvironmentSpec,
)
from realhf.api.passport import Counts
from realhf.env.check.episodes import Case, CheckHarness, Episode
from realhf.env.check.mutators import (
    EXACT_NAME,
    FIRST,
    LEFT_OVER,
    NEIGHBOUR,
    OWN_NAMES,
    REMOVED_AGAIN,
    Change,
    changed_arguments,
    changed_text,
    drawn,
    near_names,
    neighbours,
    other_values,
    reordered,
    with_others,
    with_variants,
    words_of,
)
from realhf.env.check.report import FAULT, OK, READ, Finding, counted, quoted
from realhf.env.check.scripts import (
    call_text,
    functions,
    policy_turn,
    properties_of,
    sample,
    type_of,
)

OTHER_TOOL = "another tool"
"""Kind of a change that calls another tool with the same arguments."""
UNDONE = "undone"
"""Kind of a change that undoes a call."""
_OPPOSITES = {
    one: other
    for pair in (
        ("add", "remove"), ("attach", "detach"), ("create", "delete"), ("do", "undo"), ("enable", "disable"),
        ("grant", "revoke"), ("insert", "delete"), ("lock", "unlock"), ("open", "close"), ("push", "pop"),
        ("put", "delete"), ("set", "unset"), ("show", "hide"), ("start", "stop"), ("write", "delete"),
    )
    for one, other in (pair, pair[::-1])
}  # fmt: skip
"""Verbs in the names of tools, mapped to those that undo them."""
_BESIDE_PER_TOOL = 8
"""Additional calls drawn per tool."""
_LIKELY = 8
"""Number of words from which likely arguments are drawn."""


class Action(NamedTuple):
    """A turn of a policy."""

    content: str
    """Text besides the calls."""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Calls as (name, arguments)."""

    def text(self) -> str:
        """Return the turn as a policy writes it."""
        return "\n".join(
            [
                *([self.content] if self.content or not self.calls else []),
                *(call_text(*call) for call in self.calls),
            ]
        )

    def renamed(self, word: str, other: str) -> Action:
        """Return the turn with ``word`` replaced by ``other``, also in arguments that are texts."""
        put = lambda value: value.replace(word, other) if isinstance(value, str) else value
        calls = tuple(
            (name, {key: put(value) for key, value in given.items()}) for name, given in self.calls
        )
        return Action(self.content.replace(word, other), calls)


def read_action(text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Parse a turn; one with an invalid call becomes a turn of text only."""
    message = policy_turn(text, tools)
    if any(call.problem for call in message.tool_calls):
        return Action(text)
    return Action(
        message.content.strip(),
        tuple((call.name, dict(call.arguments)) for call in message.tool_calls),
    )


class Mutants:
    """Iterable of the mutants of ``actions``, which call ``tools``.

    Args:
        actions: The demonstration.
        tools: Schemas of the tools.
        words: Words of the episode that may be names, likeliest first.
        rng: Draws the arguments of calls that the demonstration does not make.
        described: Whether states can be compared; then mutants that leave something additional
            behind, and mutants with slightly wrong names, are included.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        tools: Sequence[Mapping[str, Any]],
        words: Sequence[str],
        rng: random.Random,
        *,
        described: bool = False,
    ) -> None:
        self._described = described
        self._actions = tuple(actions)
        self._words = words
        self._rng = rng
        self._properties = {
            name: properties_of(parameters) for name, parameters in functions(tools)
        }

    def __iter__(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the mutants."""
        beside = [
            Change(FIRST, f"{name} beside the task", Action("", ((name, self._filled(known)),)))
            for name, known in self._properties.items()
            for _ in range(_BESIDE_PER_TOOL)
        ]
        yield from reordered(self._actions)
        yield from with_variants(self._actions, self._variants)
        yield from with_others(self._actions, beside)
        yield from self._undone()
        yield from self._to_neighbours()
        if self._described:
            yield from self._left_over()
            yield from self._nearly_named()

    def _left_over(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions with an additional thing created, and with the same thing created and
        removed again."""
        all_of = self._actions
        for call in self._made_beside():
            beside = Action("", (call,))
            what = f"{_line(beside)} beside the work"
            yield Change(LEFT_OVER, f"{what}, first", (beside, *all_of))
            yield Change(LEFT_OVER, f"{what}, last", (*all_of, beside))
            if len(all_of) > 1:
                yield Change(
                    LEFT_OVER, f"{what}, before the last action", (*all_of[:-1], beside, all_of[-1])
                )
            for inverse in self._inverses(*call):
                removed = (beside, Action("", (inverse,)))
                yield Change(REMOVED_AGAIN, f"{what} and removed again, first", (*removed, *all_of))

    def _made_beside(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield calls that create additional things: each text argument is replaced by unrelated
        names and by names similar to those of the demonstration."""
        made = {name: given for action in self._actions for name, given in action.calls}
        for name, known in self._properties.items():
            for key, schema in known.items():
                if type_of(schema) not in ("", "string") or schema.get("enum"):
                    continue
                base = made.get(name) or self._filled(known)
                for other in (
                    *OWN_NAMES,
                    *(near for word in self._names() for near in near_names(word)),
                ):
                    yield name, {**base, key: other}

    def _nearly_named(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions with a slightly wrong name, in all actions and in a single one."""
        all_of = self._actions
        for word in self._names():
            for other in near_names(word):
                changed = tuple(action.renamed(word, other) for action in all_of)
                yield Change(EXACT_NAME, f"{other!r} for {word!r} everywhere", changed)
                for at, action in enumerate(changed if len(all_of) > 1 else ()):
                    if action != all_of[at]:
                        what = f"{other!r} for {word!r} in action {at + 1}"
                        yield Change(EXACT_NAME, what, (*all_of[:at], action, *all_of[at + 1 :]))

    def _names(self) -> list[str]:
        """Return the words that may be names: words of arguments, and quoted words of texts."""
        given = [
            value for action in self._actions for _, each in action.calls for value in each.values()
        ]
        texts = [value for value in given if isinstance(value, str)]
        texts += [found for action in self._actions for found in _QUOTED.findall(action.content)]
        return [word for word in words_of(texts) if len(word) > 1 and any(map(str.isalpha, word))]

    def _variants(self, action: Action) -> Iterator[Change[Action]]:
        for at, (name, given) in enumerate(action.calls):
            for kind, what, changed in self._changed_calls(name, given):
                yield Change(
                    kind,
                    what,
                    action._replace(calls=(*action.calls[:at], changed, *action.calls[at + 1 :])),
                )
        if action.content:
            for kind, what, text in changed_text(action.content, self._words):
                yield Change(kind, what, action._replace(content=text))

    def _changed_calls(
        self, name: str, given: dict[str, Any]
    ) -> Iterator[Change[tuple[str, dict[str, Any]]]]:
        for kind, what, arguments in changed_arguments(
            given, self._properties.get(name, {}), self._words
        ):
            yield Change(kind, what, (name, arguments))
        for other, known in self._properties.items():
            if other != name and {*given} <= {*known}:
                yield Change(OTHER_TOOL, f"{other} and not {name}", (other, given))

    def _undone(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions with a call undone, either directly after it or before the last
        action."""
        all_of = self._actions
        for at, action in enumerate(all_of):
            for inverse in (inverse for call in action.calls for inverse in self._inverses(*call)):
                what = f"action {at + 1} undone by {inverse[0]}"
                undone = Action("", (inverse,))
                yield Change(UNDONE, what, (*all_of[: at + 1], undone, *all_of[at + 1 :]))
                if at + 1 < len(all_of):
                    yield Change(
                        UNDONE, f"{what}, before the last", (*all_of[:-1], undone, all_of[-1])
                    )

    def _inverses(self, name: str, given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield calls that may undo a call: the same call with two arguments exchanged, and tools
        with the opposite verb."""
        texts = [key for key, value in given.items() if isinstance(value, str)]
        if len(texts) == 2:
            yield name, {**given, texts[0]: given[texts[1]], texts[1]: given[texts[0]]}
        verb, _, rest = name.partition("_")
        for other, known in self._properties.items():
            first, _, others_rest = other.partition("_")
            if _OPPOSITES.get(verb) == first and rest == others_rest:
                yield other, {key: given.get(key, next(iter(self._words), "")) for key in known}
            elif _OPPOSITES.get(verb) == first and (
                shared := {key: given[key] for key in known if key in given}
            ):
                yield other, shared

    def _to_neighbours(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions applied to a similar name: a word is replaced by a similar one
        everywhere."""
        for word in words_of(action.text() for action in self._actions):
            if word not in self._words or len(word) < 2:
                continue
            for other in neighbours(word, self._words):
                changed = tuple(action.renamed(word, other) for action in self._actions)
                if changed != self._actions:
                    yield Change(NEIGHBOUR, f"{other} for {word} everywhere", changed)
                    what = f"everything to {other} for {word} first"
                    yield Change(f"{NEIGHBOUR}, before", what, (*changed, *self._actions))

    def _filled(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments for a call; texts are drawn from the words of the episode."""
        named = {}
        for name, schema in known.items():
            is_text = type_of(schema) in ("", "string") and not schema.get("enum") and self._words
            likely = self._words[: self._rng.choice((_LIKELY, len(self._words)))]
            named[name] = self._rng.choice(likely) if is_text else sample(schema, self._rng)
        return named


MUTANTS = "mutants"
"""Name of the check."""
_EPISODES_PER_TASK = 2
"""Episodes requested per task from the solver."""
_ALIKE = 1e-6
"""Tolerance within which rewards count as equal."""
_SHOWN_ACTIONS = 600
"""Maximum length in characters of actions in a finding."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MEMBER_SHARE = 4
"""One in this many plays examines whether the arguments have a visible effect."""
_PUNISHED = "What was made and removed again costs nothing, unless the task says that it does"
_UNSHOWN = "Show it under `view` and look at it in the reward, or refuse or leave out the argument"
_NO_SCRIPT = (
    "Give the class, or the module of a verifier, demonstrate(request) that yields "
    "Demonstration(task, turns), as "
    "docs/extend/environment.md shows"
)
_BOUGHT = (
    "Pay for the state that the episode leaves, or describe in `view` only what the task is about"
)
_NO_VIEW = (
    "It is right if the task asks no more; else a policy finds it, too. What an episode leaves may "
    "be described under "
    "`view`: in a class with tools a property, in a class that speaks messages in the info of its "
    "turns"
)


@dataclass
class Tally:
    """Counts of the mutants of one task."""

    mutants: int = 0
    """Number of mutants played."""
    paid: int = 0
    """Mutants with the full reward."""
    unequal: int = 0
    """Mutants with the full reward that leave another state."""
    underpaid: int = 0
    """Mutants that leave the same state with a smaller reward."""
    punished: int = 0
    """Underpaid mutants that created something additional and removed it again."""
    members: int = 0
    """Arguments whose value affects neither the view nor the reward."""

    def remark(self, *, described: bool) -> str:
        """Return the counts as a line for display."""
        paid = f"{counted(self.mutants, 'mutant')}, {self.paid:,} paid in full"
        if not described:
            return f"{paid}{': read them' if self.paid else ''}"
        told = f"{paid}, {self.unequal:,} of them for another state" if self.paid else paid
        return (
            f"{told}; {self.underpaid:,} leave the same state and earn less"
            if self.underpaid
            else told
        )


@dataclass
class Outcome:
    """Results of the mutation, which ``--json`` prints."""

    seed: int
    """Seed of the demonstrations and mutants."""
    described: bool = False
    """Whether the environment describes its state (``view``)."""
    tasks: dict[str, Tally] = field(default_factory=dict)
    """Counts by template."""
    kinds: dict[str, Counts] = field(default_factory=dict)
    """Counts by kind of change, if the state is described."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """Mutants with the full reward that are not known to leave the same state."""
    members: list[dict[str, str]] = field(default_factory=list)
    """Arguments whose value has no visible effect: template, tool and argument."""


class Member(NamedTuple):
    """An argument of a call in a demonstration."""

    action: int
    """Index of the action."""
    call: int
    """Index of the call in the action."""
    tool: str
    """Name of the tool."""
    name: str
    """Name of the argument."""
    schema: Mapping[str, Any]
    """JSON schema of the argument."""

    def put(self, actions: Sequence[Action], value: Any) -> tuple[Action, ...]:
        """Return the actions with the argument set to ``value``."""
        calls = [*actions[self.action].calls]
        calls[self.call] = (self.tool, {**calls[self.call][1], self.name: value})
        changed = actions[self.action]._replace(calls=tuple(calls))
        return (*actions[: self.action], changed, *actions[self.action + 1 :])

    def without_call(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Return the actions without the call."""
        calls = actions[self.action].calls
        kept = actions[self.action]._replace(calls=(*calls[: self.call], *calls[self.call + 1 :]))
        return (
            *actions[: self.action],
            *([kept] if kept.calls else []),
            *actions[self.action + 1 :],
        )


def missing(spec: EnvironmentSpec) -> Finding | None:
    """Return a finding that says why there is nothing to mutate; None if there are
    demonstrations."""
    if spec.demonstrate is not None:
        return None
    if spec.demonstrations is not None:
        module = spec.demonstrations.module
        what = (
            f"its demonstrations are played by the program {module}, so there are no scripts to "
            f"change"
        )
        return Finding(MUTANTS, what, "Its own tests mutate it")
    return Finding(MUTANTS, "it has no scripted solver, so there is nothing to change", _NO_SCRIPT)


def scripts_of(spec: EnvironmentSpec, seed: int) -> dict[str, list[Demonstration]]:
    """Return a few solutions by template. Errors of the environment's solver are passed on."""
    assert spec.demonstrate is not None
    tasks = spec.tasks(TRAIN)
    found = {}
    for script in spec.demonstrate(DemonstrationRequest(_EPISODES_PER_TASK, seed)):
        if script.succeeds and script.kind == SOLUTION:
            template = next(
                (
                    t
                    for t in tasks.group_of
                    if tasks.instantiate(t, script.task.seed) == script.task
                ),
                "",
            )
            found.setdefault(template or script.task.id, []).append(script)
    order = [*tasks.group_of]
    return dict(
        sorted(
            found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)
        )
    )


class Mutation:
    """Player of mutants, at most ``most`` in total; ``add`` is called with each finding."""

    def __init__(
        self, harness: CheckHarness, most: int, seed: int, add: Callable[[Finding], None]
    ) -> None:
        self._create_harness = harness
        self._most = most
        self._add = add
        self.outcome = Outcome(seed)
        self._shows: dict[tuple[str, str], bool] = {}
        """By (tool, argument) of the current template, whether different values had different
        effects."""

    async def play(
        self,
        scripts: Mapping[str, Sequence[Demonstration]],
        begin: Callable[[str], None],
        end: Callable[[str, str, str], None],
    ) -> None:
        """Play the mutants of all demonstrations. Raises CallFailed if a call hung.

        Args:
            scripts: Demonstrations by template.
            begin: Called with a description of the next step.
            end: Called with the verdict on each template: name, outcome, remark.
        """
        played = 0
        scripted = sum(map(len, scripts.values()))
        for template, solutions in scripts.items():
            tally = self.outcome.tasks.setdefault(template, Tally())
            faults = 0
            for number, script in enumerate(solutions):
                rng = random.Random(f"mutants {self.outcome.seed} {template} {number}")
                begin(f"{played + tally.mutants:,} of at most {self._most:,} mutants, {template}")
                faults += await self._script(
                    template, script, max(1, self._most // scripted), rng, tally
                )
            self._tell_members(template, tally)
            played += tally.mutants
            described = self.outcome.described
            reads = bool(tally.members or tally.punished or (tally.paid and not described))
            outcome = FAULT if faults or tally.unequal else READ if reads else OK
            end(template, outcome, tally.remark(described=described))
        if not self.outcome.described and self.outcome.listed:
            what = (
                "it does not describe the state that an episode leaves, so what is paid in full is "
                "for you to judge"
            )
            self._add(Finding(MUTANTS, what, _NO_VIEW, is_fault=False))

    async def _script(
        self, template: str, script: Demonstration, most: int, rng: random.Random, tally: Tally
    ) -> int:
        """Play a demonstration and at most ``most`` of its mutants; return the number of faults in
        playing the demonstration."""
        whole = await self._create_harness.follow(Case(script.task, script.turns))
        if whole is None or not (whole.solved or whole.paid > 0):
            fate = (
                "cannot be played" if whole is None else f"is not solved and earns {whole.paid:g}"
            )
            what = f"a demonstration {fate}, so its mutants say nothing"
            self._add(
                Finding(MUTANTS, what, "`check` without --mutate says more", task=script.task.id)
            )
            return 1
        self.outcome.described = self.outcome.described or whole.view is not None
        actions = [read_action(text, whole.tools) for text in script.turns]
        words = words_of([*_shown(whole.view), *_said(actions), *whole.texts[::-1]])
        sent = {script.turns}
        seen = {(*whole.said,), tuple(action.text() for action in actions[: len(whole.said)])}
        if whole.view is not None:
            await self._look_at_members(script, whole, actions, most // _MEMBER_SHARE, rng)
        mutants = Mutants(actions, whole.tools, words, rng, described=whole.view is not None)
        for change in drawn(_texts(mutants), 2 * most, rng):
            if change.value in sent:
                continue
            sent.add(change.value)
            mutant = await self._create_harness.follow(Case(script.task, change.value))
            if mutant is None or (*mutant.said,) in seen:  # the episode ended before the change
                continue
            seen.add((*mutant.said,))
            tally.mutants += 1
            self._judge(template, script, whole, mutant, change, tally)
            if len(seen) > most:
                break
        return 0

    async def _look_at_members(
        self,
        script: Demonstration,
        whole: Episode,
        actions: Sequence[Action],
        most: int,
        rng: random.Random,
    ) -> None:
        """Determine with about ``most`` plays which arguments have values without a visible
        effect."""
        members = _members(actions, whole.tools)
        rng.shuffle(members)
        plays = 0
        for member in members:
            values = other_values(
                actions[member.action].calls[member.call][1].get(member.name), member.schema
            )
            if self._shows.get((member.tool, member.name)) or not values:
                continue
            if plays >= most:
                return
            plays += 2 + len(values)
            shows = await self._shown_by(script, whole, actions, member, values)
            if shows is not None:
                self._shows[member.tool, member.name] = shows

    async def _shown_by(
        self,
        script: Demonstration,
        whole: Episode,
        actions: Sequence[Action],
        member: Member,
        values: Sequence[Any],
    ) -> bool | None:
        """Return whether view or reward depend on the value of an argument.

        A rejected value is recognised by the state of the episode without the call. None is
        returned if that state equals the one with the call, or if too few of the values are
        accepted.
        """
        refused = await self._left(script, member.without_call(actions))
        right = (whole.view, whole.paid, whole.solved)
        if refused is None or refused[0] == whole.view:
            return None
        left = [await self._left(script, member.put(actions, value)) for value in values]
        if any(one not in (right, refused, None) for one in left):
            return True
        if left.count(right) < min(2, len(values)):
            return None
        # A later action may hide the effect, so the states directly after the call are compared.
        until = actions[: member.action + 1]
        first = await self._left(script, until)
        accepted = [value for value, one in zip(values, left, strict=True) if one == right]
        return any(
            [await self._left(script, member.put(until, value)) != first for value in accepted]
        )

    async def _left(
        self, script: Demonstration, actions: Sequence[Action]
    ) -> tuple[Any, float, bool] | None:
        """Play actions; return (view, reward, solved), or None if they cannot be played."""
        episode = await self._create_harness.follow(
            Case(script.task, tuple(action.text() for action in actions))
        )
        return None if episode is None else (episode.view, episode.paid, episode.solved)

    def _tell_members(self, template: str, tally: Tally) -> None:
        for (tool, name), shows in sorted(self._shows.items()):
            if not shows:
                tally.members += 1
                self.outcome.members.append({"template": template, "tool": tool, "argument": name})
                what = (
                    f"the value of {name} of {tool} shows nowhere in the view, so nothing tells a "
                    f"wrong one"
                )
                self._add(Finding(MUTANTS, f"{what} ({template})", _UNSHOWN, is_fault=False))
        self._shows.clear()

    def _judge(
        self,
        template: str,
        script: Demonstration,
        whole: Episode,
        mutant: Episode,
        change: Change[tuple[str, ...]],
        tally: Tally,
    ) -> None:
        described = whole.view is not None
        equal = described and mutant.view == whole.view
        # Any success with another state counts as the full reward, even if an additional turn
        # reduced it.
        paid = mutant.paid >= whole.paid - _ALIKE or (described and mutant.solved and whole.solved)
        tally.paid += paid
        tally.underpaid += equal and not paid
        made_nothing = change.kind == REMOVED_AGAIN and (
            len(mutant.views) < 2 or mutant.views[0] == mutant.views[1]
        )
        if described and not made_nothing:
            kind = change.kind.partition(",")[0]
            self.outcome.kinds.setdefault(kind, Counts()).add(right=equal, paid=paid)
        if change.kind == REMOVED_AGAIN and equal and not paid and not made_nothing:
            tally.punished += 1
            what = f"a reward of {mutant.paid:g} for the same state ({change.what})"
            kind = f"{template} {change.kind}"
            self._add(
                Finding(MUTANTS, what, _PUNISHED, task=script.task.id, is_fault=False, kind=kind)
            )
        if not paid or equal:
            return
        tally.unequal += described
        actions = [_line(read_action(text, whole.tools)) for text in mutant.said]
        told = {
            "template": template,
            "task": script.task.id,
            "change": f"{change.kind}: {change.what}",
        }
        self.outcome.listed.append(
            told | {"actions": actions, "paid": mutant.paid, "success": mutant.solved}
        )
        did = quoted("; ".join(actions), _SHOWN_ACTIONS)
        if described:
            what = (
                f"a reward of {mutant.paid:g} though another state is left ({change.what}): {did}"
            )
            self._add(Finding(MUTANTS, what, _BOUGHT, task=script.task.id))
        else:
            what = f"a reward of {mutant.paid:g} ({change.what}): {did}"
            kind = f"{template} {change.kind}"
            self._add(Finding(MUTANTS, what, task=script.task.id, is_fault=False, kind=kind))


def _members(actions: Sequence[Action], tools: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Return all arguments of all calls, including those that are not given."""
    properties = {name: properties_of(parameters) for name, parameters in functions(tools)}
    return [
        Member(number, at, tool, name, properties.get(tool, {}).get(name, {}))
        for number, action in enumerate(actions)
        for at, (tool, given) in enumerate(action.calls)
        for name in dict.fromkeys([*given, *properties.get(tool, {})])
    ]


def _texts(changes: Iterable[Change[tuple[Action, ...]]]) -> Iterator[Change[tuple[str, ...]]]:
    return (
        Change(kind, what, tuple(action.text() for action in actions))
        for kind, what, actions in changes
    )


def _said(actions: Iterable[Action]) -> Iterator[str]:
    """Yield the texts and argument values that a demonstration sends, without argument names."""
    for action in actions:
        yield action.content
        yield from (str(value) for _, given in action.calls for value in given.values())


def _shown(view: Any) -> list[str]:
    """Return the texts in the rows of a described state, which may be names."""
    rows = view.get("rows", ()) if isinstance(view, Mapping) else ()
    return [str(cell) for row in rows if isinstance(row, Sequence) for cell in row]


def _line(action: Action) -> str:
    """Format an action for display."""
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for name, given in action.calls
    ]
    return (
        " ".join([*([quoted(action.content, 200)] if action.content else []), *calls])
        or "(nothing)"
    )
