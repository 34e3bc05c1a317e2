"""Mutation of an environment's demonstrations, to list the mutants that earn the full reward.

A mutant is a demonstration with a change: to an argument, a word, the order of actions or a name,
or with an additional call. A mutant with the full reward either leaves the same state as the
demonstration, or shows that the reward can be earned without solving the task. The two cases are
told apart automatically if the environment describes its state (``view`` in the info of a turn);
otherwise a person must read the list.
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
from realhf.env.check.episodes import Case, CheckedEpisode, CheckHarness
from realhf.env.check.mutators import (
    EXACT_NAME,
    FIRST,
    LEFT_OVER,
    NEIGHBOUR,
    OWN_NAMES,
    REMOVED_AGAIN,
    Change,
    change_arguments,
    change_text,
    draw_changes,
    find_neighbours,
    insert_others,
    insert_variants,
    other_values,
    reorder,
    similar_names,
    split_words,
)
from realhf.env.check.report import FAULT, OK, READ, Finding, format_count, quote
from realhf.env.check.scripts import (
    call_text,
    list_functions,
    policy_turn,
    property_schemas,
    sample_value,
    schema_type,
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
"""Verbs in names of tools, mapped to the verb that undoes each."""
_ADDITIONAL_PER_TOOL = 8
"""Number of additional calls drawn per tool."""
_LIKELY = 8
"""Number of the likeliest words from which arguments are drawn."""


class Action(NamedTuple):
    """A turn of a policy."""

    content: str
    """Text of the turn outside its calls."""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Calls as (name, arguments)."""

    def text(self) -> str:
        """Return the text that a policy would generate for this turn."""
        return "\n".join(
            [
                *([self.content] if self.content or not self.calls else []),
                *(call_text(*call) for call in self.calls),
            ]
        )

    def rename(self, word: str, replacement: str) -> Action:
        """Return the turn with ``word`` replaced by ``replacement``, also in string arguments."""

        def replace_in(value: Any) -> Any:
            return value.replace(word, replacement) if isinstance(value, str) else value

        calls = tuple(
            (name, {key: replace_in(value) for key, value in arguments.items()})
            for name, arguments in self.calls
        )
        return Action(self.content.replace(word, replacement), calls)


def read_action(text: str, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Parse a turn. A turn with an invalid call is treated as text only."""
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
        has_view: Whether states can be compared; then mutants that leave something additional
            behind, and mutants with slightly wrong names, are included.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        tools: Sequence[Mapping[str, Any]],
        words: Sequence[str],
        rng: random.Random,
        *,
        has_view: bool = False,
    ) -> None:
        self._has_view = has_view
        self._actions = tuple(actions)
        self._words = words
        self._rng = rng
        self._properties = {
            name: property_schemas(parameters) for name, parameters in list_functions(tools)
        }

    def __iter__(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the mutants."""
        additional = [
            Change(
                FIRST,
                f"{name} beside the task",
                Action("", ((name, self._draw_arguments(properties)),)),
            )
            for name, properties in self._properties.items()
            for _ in range(_ADDITIONAL_PER_TOOL)
        ]
        yield from reorder(self._actions)
        yield from insert_variants(self._actions, self._variants)
        yield from insert_others(self._actions, additional)
        yield from self._undo_calls()
        yield from self._retarget()
        if self._has_view:
            yield from self._leave_additional()
            yield from self._misname()

    def _leave_additional(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield variants of the actions: some that also create another object, and some that create
        it and then remove it."""
        actions = self._actions
        for call in self._creation_calls():
            additional = Action("", (call,))
            what = f"{_format_action(additional)} beside the work"
            yield Change(LEFT_OVER, f"{what}, first", (additional, *actions))
            yield Change(LEFT_OVER, f"{what}, last", (*actions, additional))
            if len(actions) > 1:
                yield Change(
                    LEFT_OVER,
                    f"{what}, before the last action",
                    (*actions[:-1], additional, actions[-1]),
                )
            for inverse in self._inverses(*call):
                created_and_removed = (additional, Action("", (inverse,)))
                yield Change(
                    REMOVED_AGAIN,
                    f"{what} and removed again, first",
                    (*created_and_removed, *actions),
                )

    def _creation_calls(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield calls that create something additional: each string argument is replaced by
        unrelated names, and by names similar to those in the demonstration."""
        arguments_by_tool = {
            name: arguments for action in self._actions for name, arguments in action.calls
        }
        for name, properties in self._properties.items():
            for key, schema in properties.items():
                if schema_type(schema) not in ("", "string") or schema.get("enum"):
                    continue
                base = arguments_by_tool.get(name) or self._draw_arguments(properties)
                for new_name in (
                    *OWN_NAMES,
                    *(near for word in self._candidate_names() for near in similar_names(word)),
                ):
                    yield name, {**base, key: new_name}

    def _misname(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions with a slightly wrong name, in all actions and in a single one."""
        actions = self._actions
        for word in self._candidate_names():
            for misspelled in similar_names(word):
                changed = tuple(action.rename(word, misspelled) for action in actions)
                yield Change(EXACT_NAME, f"{misspelled!r} for {word!r} everywhere", changed)
                for at, action in enumerate(changed if len(actions) > 1 else ()):
                    if action != actions[at]:
                        what = f"{misspelled!r} for {word!r} in action {at + 1}"
                        yield Change(EXACT_NAME, what, (*actions[:at], action, *actions[at + 1 :]))

    def _candidate_names(self) -> list[str]:
        """Return the words that may be names: words of arguments, and quoted words of texts."""
        values = [
            value for action in self._actions for _, each in action.calls for value in each.values()
        ]
        texts = [value for value in values if isinstance(value, str)]
        texts += [
            quoted_word
            for action in self._actions
            for quoted_word in _QUOTED.findall(action.content)
        ]
        return [
            word for word in split_words(texts) if len(word) > 1 and any(map(str.isalpha, word))
        ]

    def _variants(self, action: Action) -> Iterator[Change[Action]]:
        for at, (name, arguments) in enumerate(action.calls):
            for kind, what, changed in self._change_call(name, arguments):
                yield Change(
                    kind,
                    what,
                    action._replace(calls=(*action.calls[:at], changed, *action.calls[at + 1 :])),
                )
        if action.content:
            for kind, what, text in change_text(action.content, self._words):
                yield Change(kind, what, action._replace(content=text))

    def _change_call(
        self, name: str, arguments: dict[str, Any]
    ) -> Iterator[Change[tuple[str, dict[str, Any]]]]:
        for kind, what, changed in change_arguments(
            arguments, self._properties.get(name, {}), self._words
        ):
            yield Change(kind, what, (name, changed))
        for other_tool, properties in self._properties.items():
            if other_tool != name and {*arguments} <= {*properties}:
                yield Change(OTHER_TOOL, f"{other_tool} and not {name}", (other_tool, arguments))

    def _undo_calls(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions with a call undone, either directly after the call or before the last
        action."""
        actions = self._actions
        for at, action in enumerate(actions):
            for inverse in (inverse for call in action.calls for inverse in self._inverses(*call)):
                what = f"action {at + 1} undone by {inverse[0]}"
                undo = Action("", (inverse,))
                yield Change(UNDONE, what, (*actions[: at + 1], undo, *actions[at + 1 :]))
                if at + 1 < len(actions):
                    yield Change(
                        UNDONE, f"{what}, before the last", (*actions[:-1], undo, actions[-1])
                    )

    def _inverses(
        self, name: str, arguments: dict[str, Any]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield calls that may undo a call: the same call with two arguments exchanged, and tools
        with the opposite verb."""
        texts = [key for key, value in arguments.items() if isinstance(value, str)]
        if len(texts) == 2:
            yield name, {**arguments, texts[0]: arguments[texts[1]], texts[1]: arguments[texts[0]]}
        verb, _, object_name = name.partition("_")
        for other_tool, properties in self._properties.items():
            other_verb, _, other_object = other_tool.partition("_")
            if _OPPOSITES.get(verb) == other_verb and object_name == other_object:
                yield (
                    other_tool,
                    {key: arguments.get(key, next(iter(self._words), "")) for key in properties},
                )
            elif _OPPOSITES.get(verb) == other_verb and (
                shared := {key: arguments[key] for key in properties if key in arguments}
            ):
                yield other_tool, shared

    def _retarget(self) -> Iterator[Change[tuple[Action, ...]]]:
        """Yield the actions applied to a similar name: a word is replaced by a similar one
        everywhere."""
        for word in split_words(action.text() for action in self._actions):
            if word not in self._words or len(word) < 2:
                continue
            for similar in find_neighbours(word, self._words):
                changed = tuple(action.rename(word, similar) for action in self._actions)
                if changed != self._actions:
                    yield Change(NEIGHBOUR, f"{similar} for {word} everywhere", changed)
                    what = f"everything to {similar} for {word} first"
                    yield Change(f"{NEIGHBOUR}, before", what, (*changed, *self._actions))

    def _draw_arguments(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return random arguments for a call; string arguments are drawn from the words of the
        episode."""
        arguments = {}
        for name, schema in properties.items():
            is_text = (
                schema_type(schema) in ("", "string") and not schema.get("enum") and self._words
            )
            likely = self._words[: self._rng.choice((_LIKELY, len(self._words)))]
            arguments[name] = (
                self._rng.choice(likely) if is_text else sample_value(schema, self._rng)
            )
        return arguments


MUTANTS = "mutants"
"""Name of the check."""
_EPISODES_PER_TASK = 2
"""Number of episodes requested per task from the solver."""
_ALIKE = 1e-6
"""Tolerance within which rewards count as equal."""
_SHOWN_ACTIONS = 600
"""Maximum length in characters of actions in a finding."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MEMBER_SHARE = 4
"""One in this many plays is used to examine whether arguments have a visible effect."""
_ADVICE_ON_UNDERPAID = (
    "What was made and removed again costs nothing, unless the task says that it does"
)
_ADVICE_ON_MEMBERS = (
    "Show it under `view` and look at it in the reward, or refuse or leave out the argument"
)
_ADVICE_ON_SOLVER = (
    "Give the class, or the module of a verifier, demonstrate(request) that yields "
    "Demonstration(task, turns), as "
    "docs/extend/environment.md shows"
)
_ADVICE_ON_OVERPAID = (
    "Pay for the state that the episode leaves, or describe in `view` only what the task is about"
)
_ADVICE_ON_VIEW = (
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
    """Number of mutants that earned the full reward."""
    unequal: int = 0
    """Number of mutants that earned the full reward although they left a different state."""
    underpaid: int = 0
    """Number of mutants that left the same state but earned a smaller reward."""
    punished: int = 0
    """Number of those underpaid mutants that created something additional and removed it again."""
    members: int = 0
    """Number of arguments whose value affects neither the view nor the reward."""

    def format(self, *, has_view: bool) -> str:
        """Return the counts as a line for display."""
        paid = f"{format_count(self.mutants, 'mutant')}, {self.paid:,} paid in full"
        if not has_view:
            return f"{paid}{': read them' if self.paid else ''}"
        text = f"{paid}, {self.unequal:,} of them for another state" if self.paid else paid
        return (
            f"{text}; {self.underpaid:,} leave the same state and earn less"
            if self.underpaid
            else text
        )


@dataclass
class Outcome:
    """Results of the mutation, as printed by ``--json``."""

    seed: int
    """Seed of the demonstrations and mutants."""
    described: bool = False
    """Whether the environment describes its state in ``view``."""
    tasks: dict[str, Tally] = field(default_factory=dict)
    """Counts by task template."""
    kinds: dict[str, Counts] = field(default_factory=dict)
    """Counts by kind of change; only if the state is described."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """Mutants that earned the full reward and are not known to leave the same state."""
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

    def replace_value(self, actions: Sequence[Action], value: Any) -> tuple[Action, ...]:
        """Return the actions with the argument set to ``value``."""
        calls = [*actions[self.action].calls]
        calls[self.call] = (self.tool, {**calls[self.call][1], self.name: value})
        changed = actions[self.action]._replace(calls=tuple(calls))
        return (*actions[: self.action], changed, *actions[self.action + 1 :])

    def without_call(self, actions: Sequence[Action]) -> tuple[Action, ...]:
        """Return the actions without the call."""
        calls = actions[self.action].calls
        without = actions[self.action]._replace(
            calls=(*calls[: self.call], *calls[self.call + 1 :])
        )
        return (
            *actions[: self.action],
            *([without] if without.calls else []),
            *actions[self.action + 1 :],
        )


def find_obstacle(spec: EnvironmentSpec) -> Finding | None:
    """Return a finding that says why no mutants can be played; None if there are demonstrations."""
    if spec.demonstrate is not None:
        return None
    if spec.demonstrations is not None:
        module = spec.demonstrations.module
        what = (
            f"its demonstrations are played by the program {module}, so there are no scripts to "
            f"change"
        )
        return Finding(MUTANTS, what, "Its own tests mutate it")
    return Finding(
        MUTANTS, "it has no scripted solver, so there is nothing to change", _ADVICE_ON_SOLVER
    )


def collect_solutions(spec: EnvironmentSpec, seed: int) -> dict[str, list[Demonstration]]:
    """Return a few solutions by template. Errors of the environment's solver are passed on."""
    assert spec.demonstrate is not None
    tasks = spec.tasks(TRAIN)
    by_template = {}
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
            by_template.setdefault(template or script.task.id, []).append(script)
    order = [*tasks.group_of]
    return dict(
        sorted(
            by_template.items(),
            key=lambda item: order.index(item[0]) if item[0] in order else len(order),
        )
    )


class Mutation:
    """Player of mutants, at most ``max_mutants`` in total; ``add`` is called with each finding."""

    def __init__(
        self, harness: CheckHarness, max_mutants: int, seed: int, add: Callable[[Finding], None]
    ) -> None:
        self._harness = harness
        self._max_mutants = max_mutants
        self._add = add
        self.outcome = Outcome(seed)
        self._effects: dict[tuple[str, str], bool] = {}
        """For each (tool, argument) of the current template, whether different values had different
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
                begin(
                    f"{played + tally.mutants:,} of at most {self._max_mutants:,} mutants, "
                    f"{template}"
                )
                faults += await self._play_script(
                    template, script, max(1, self._max_mutants // scripted), rng, tally
                )
            self._report_members(template, tally)
            played += tally.mutants
            has_view = self.outcome.described
            needs_reading = bool(tally.members or tally.punished or (tally.paid and not has_view))
            outcome = FAULT if faults or tally.unequal else READ if needs_reading else OK
            end(template, outcome, tally.format(has_view=has_view))
        if not self.outcome.described and self.outcome.listed:
            what = (
                "it does not describe the state that an episode leaves, so what is paid in full is "
                "for you to judge"
            )
            self._add(Finding(MUTANTS, what, _ADVICE_ON_VIEW, is_fault=False))

    async def _play_script(
        self,
        template: str,
        script: Demonstration,
        max_mutants: int,
        rng: random.Random,
        tally: Tally,
    ) -> int:
        """Play a demonstration and at most ``max_mutants`` of its mutants. Return the number of
        faults found in the demonstration itself."""
        original = await self._harness.follow(Case(script.task, script.turns))
        if original is None or not (original.solved or original.episode_return > 0):
            fate = (
                "cannot be played"
                if original is None
                else f"is not solved and earns {original.episode_return:g}"
            )
            what = f"a demonstration {fate}, so its mutants prove nothing"
            self._add(
                Finding(MUTANTS, what, "`check` without --mutate says more", task=script.task.id)
            )
            return 1
        self.outcome.described = self.outcome.described or original.view is not None
        actions = [read_action(text, original.tools) for text in script.turns]
        words = split_words(
            [*_view_texts(original.view), *_policy_texts(actions), *original.texts[::-1]]
        )
        tried_scripts = {script.turns}
        played_texts = {
            (*original.policy_texts,),
            tuple(action.text() for action in actions[: len(original.policy_texts)]),
        }
        if original.view is not None:
            await self._probe_members(script, original, actions, max_mutants // _MEMBER_SHARE, rng)
        mutants = Mutants(actions, original.tools, words, rng, has_view=original.view is not None)
        for change in draw_changes(_to_texts(mutants), 2 * max_mutants, rng):
            if change.value in tried_scripts:
                continue
            tried_scripts.add(change.value)
            mutant = await self._harness.follow(Case(script.task, change.value))
            # If an episode ends before the changed action, its texts equal those of an earlier play.
            if mutant is None or (*mutant.policy_texts,) in played_texts:
                continue
            played_texts.add((*mutant.policy_texts,))
            tally.mutants += 1
            self._count_mutant(template, script, original, mutant, change, tally)
            if len(played_texts) > max_mutants:
                break
        return 0

    async def _probe_members(
        self,
        script: Demonstration,
        original: CheckedEpisode,
        actions: Sequence[Action],
        max_plays: int,
        rng: random.Random,
    ) -> None:
        """Find out, with about ``max_plays`` plays, which arguments have values without a visible
        effect."""
        members = _list_members(actions, original.tools)
        rng.shuffle(members)
        plays = 0
        for member in members:
            values = other_values(
                actions[member.action].calls[member.call][1].get(member.name), member.schema
            )
            if self._effects.get((member.tool, member.name)) or not values:
                continue
            if plays >= max_plays:
                return
            plays += 2 + len(values)
            has_effect = await self._has_visible_effect(script, original, actions, member, values)
            if has_effect is not None:
                self._effects[member.tool, member.name] = has_effect

    async def _has_visible_effect(
        self,
        script: Demonstration,
        original: CheckedEpisode,
        actions: Sequence[Action],
        member: Member,
        values: Sequence[Any],
    ) -> bool | None:
        """Return whether the view or the reward depends on the value of an argument.

        A value counts as rejected if it leads to the same state as leaving the call out. Return
        None if that state equals the one with the original call, or if too few of the values are
        accepted.
        """
        without_call = await self._play_outcome(script, member.without_call(actions))
        original_outcome = (original.view, original.episode_return, original.solved)
        if without_call is None or without_call[0] == original.view:
            return None
        outcomes = [
            await self._play_outcome(script, member.replace_value(actions, value))
            for value in values
        ]
        if any(outcome not in (original_outcome, without_call, None) for outcome in outcomes):
            return True
        if outcomes.count(original_outcome) < min(2, len(values)):
            return None
        # A later action may hide the effect, so the states directly after the call are compared.
        prefix = actions[: member.action + 1]
        first = await self._play_outcome(script, prefix)
        accepted = [
            value
            for value, outcome in zip(values, outcomes, strict=True)
            if outcome == original_outcome
        ]
        return any(
            [
                await self._play_outcome(script, member.replace_value(prefix, value)) != first
                for value in accepted
            ]
        )

    async def _play_outcome(
        self, script: Demonstration, actions: Sequence[Action]
    ) -> tuple[Any, float, bool] | None:
        """Play actions; return (view, reward, solved), or None if they cannot be played."""
        episode = await self._harness.follow(
            Case(script.task, tuple(action.text() for action in actions))
        )
        return None if episode is None else (episode.view, episode.episode_return, episode.solved)

    def _report_members(self, template: str, tally: Tally) -> None:
        for (tool, name), has_effect in sorted(self._effects.items()):
            if not has_effect:
                tally.members += 1
                self.outcome.members.append({"template": template, "tool": tool, "argument": name})
                what = (
                    f"the value of {name} of {tool} does not appear in the view, so a "
                    f"wrong value cannot be recognised"
                )
                self._add(
                    Finding(MUTANTS, f"{what} ({template})", _ADVICE_ON_MEMBERS, is_fault=False)
                )
        self._effects.clear()

    def _count_mutant(
        self,
        template: str,
        script: Demonstration,
        original: CheckedEpisode,
        mutant: CheckedEpisode,
        change: Change[tuple[str, ...]],
        tally: Tally,
    ) -> None:
        has_view = original.view is not None
        equal = has_view and mutant.view == original.view
        # Any success with another state counts as the full reward, even if an additional turn
        # reduced it.
        paid = mutant.episode_return >= original.episode_return - _ALIKE or (
            has_view and mutant.solved and original.solved
        )
        tally.paid += paid
        tally.underpaid += equal and not paid
        made_nothing = change.kind == REMOVED_AGAIN and (
            len(mutant.views) < 2 or mutant.views[0] == mutant.views[1]
        )
        if has_view and not made_nothing:
            kind = change.kind.partition(",")[0]
            self.outcome.kinds.setdefault(kind, Counts()).add(right=equal, paid=paid)
        if change.kind == REMOVED_AGAIN and equal and not paid and not made_nothing:
            tally.punished += 1
            what = f"a reward of {mutant.episode_return:g} for the same state ({change.what})"
            kind = f"{template} {change.kind}"
            self._add(
                Finding(
                    MUTANTS,
                    what,
                    _ADVICE_ON_UNDERPAID,
                    task=script.task.id,
                    is_fault=False,
                    kind=kind,
                )
            )
        if not paid or equal:
            return
        tally.unequal += has_view
        actions = [
            _format_action(read_action(text, original.tools)) for text in mutant.policy_texts
        ]
        entry = {
            "template": template,
            "task": script.task.id,
            "change": f"{change.kind}: {change.what}",
        }
        self.outcome.listed.append(
            entry | {"actions": actions, "paid": mutant.episode_return, "success": mutant.solved}
        )
        actions_text = quote("; ".join(actions), _SHOWN_ACTIONS)
        if has_view:
            what = (
                f"a reward of {mutant.episode_return:g} though another state is left "
                f"({change.what}): {actions_text}"
            )
            self._add(Finding(MUTANTS, what, _ADVICE_ON_OVERPAID, task=script.task.id))
        else:
            what = f"a reward of {mutant.episode_return:g} ({change.what}): {actions_text}"
            kind = f"{template} {change.kind}"
            self._add(Finding(MUTANTS, what, task=script.task.id, is_fault=False, kind=kind))


def _list_members(actions: Sequence[Action], tools: Sequence[Mapping[str, Any]]) -> list[Member]:
    """Return all arguments of all calls, including those that are not given."""
    properties = {name: property_schemas(parameters) for name, parameters in list_functions(tools)}
    return [
        Member(number, at, tool, name, properties.get(tool, {}).get(name, {}))
        for number, action in enumerate(actions)
        for at, (tool, arguments) in enumerate(action.calls)
        for name in dict.fromkeys([*arguments, *properties.get(tool, {})])
    ]


def _to_texts(changes: Iterable[Change[tuple[Action, ...]]]) -> Iterator[Change[tuple[str, ...]]]:
    return (
        Change(kind, what, tuple(action.text() for action in actions))
        for kind, what, actions in changes
    )


def _policy_texts(actions: Iterable[Action]) -> Iterator[str]:
    """Yield the texts and argument values that a demonstration sends, without argument names."""
    for action in actions:
        yield action.content
        yield from (str(value) for _, arguments in action.calls for value in arguments.values())


def _view_texts(view: Any) -> list[str]:
    """Return the strings in the rows of a described state, because these may be names."""
    rows = view.get("rows", ()) if isinstance(view, Mapping) else ()
    return [str(cell) for row in rows if isinstance(row, Sequence) for cell in row]


def _format_action(action: Action) -> str:
    """Format an action for display."""
    calls = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in action.calls
    ]
    return (
        " ".join([*([quote(action.content, 200)] if action.content else []), *calls]) or "(nothing)"
    )
