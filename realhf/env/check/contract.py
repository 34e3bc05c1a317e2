"""Judges task sets and whatever an environment hands out against the contract: messages, tools, openings, turns."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from realhf.api.environment import HELD_OUT, SPLITS, TRAIN, EnvironmentSpec, Opening, Task, TaskSet, Turn
from realhf.env.check.calls import UserCode, described
from realhf.env.check.report import Finding, counted, quoted

OPENING_ROLES = ("system", "user", "assistant", "tool")
TURN_ROLES = ("system", "user", "tool")
LARGEST_REWARD = 1000.0
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DEEPEST = 40
_TYPES = {"string", "integer", "number", "boolean", "array", "object", "null"}
_SAYS_TYPE = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")


def not_json(value: Any, name: str, depth: int = 0) -> str:
    """Say what part of ``value`` JSON cannot hold, "" if it can hold all of it."""
    if value is None or isinstance(value, bool | int):
        return ""
    if isinstance(value, str):
        return "" if value.isascii() or _encodable(value) else f"{name} holds a lone surrogate, which UTF-8 cannot hold"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{name} is {value}, which is no JSON"
    if depth > _DEEPEST:
        return f"{name} is nested more than {_DEEPEST} deep"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"{name} has the key {key!r}, which is no text"
            if wrong := not_json(item, f"{name}[{key!r}]", depth + 1):
                return wrong
        return ""
    if isinstance(value, list | tuple):
        return next(filter(None, (not_json(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value))), "")
    return f"{name} is of the type {type(value).__name__}, which is no JSON"


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def message_problems(messages: Any, name: str, roles: Sequence[str]) -> Iterator[str]:
    """Judge a sequence of chat messages."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        yield f"{name} is of the type {type(messages).__name__} and not a list of messages"
        return
    for index, message in enumerate(messages):
        here = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            yield f"{here} is of the type {type(message).__name__} and not a map with role and content"
        elif wrong := not_json(message, here):
            yield wrong
        elif message.get("role") not in roles:
            yield f"{here} has the role {message.get('role')!r} (known here: {', '.join(roles)})"
        elif not isinstance(message.get("content"), str) and not (
            message["role"] == "assistant" and message.get("tool_calls")
        ):
            yield f"{here} has no text as its content"


def opening_problems(opening: Any, system_prompt: str) -> Iterator[str]:
    """Judge what ``reset`` returned, but for its tools."""
    if not isinstance(opening, Opening):
        yield f"it returns {_article(opening)} and not an Opening"
        return
    wrong = [*message_problems(opening.messages, "messages", OPENING_ROLES)]
    yield from wrong
    if not wrong and not opening.messages and not system_prompt:
        yield "it returns no message, and there is no system prompt: the policy would see nothing"
    if text := not_json(opening.info, "info"):
        yield text


def tool_problems(tools: Any) -> Iterator[str]:
    """Judge the JSON schemas of tools, in the form of the OpenAI chat API."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        yield f"tools is of the type {type(tools).__name__} and not a list of schemas"
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(function := tool.get("function"), Mapping):
            yield f'tool {index} is not a map {{"type": "function", "function": {{...}}}}'
            continue
        if wrong := not_json(tool, f"tool {index}"):
            yield wrong
            continue
        name = function.get("name")
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            yield f"tool {index} has the name {name!r}; a name has 1 to 64 letters, digits, underscores and hyphens"
        elif name in names:
            yield f"two tools have the name {name!r}"
        else:
            names.add(name)
            yield from (f"tool {name!r} {text}" for text in _function_problems(function))


def _function_problems(function: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(function.get("description"), str) or not function["description"].strip():
        yield "has no description"
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        yield "has parameters that are not a JSON schema of the type object"
        return
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        yield "has properties that are not a map"
        return
    for name, schema in properties.items():
        if not isinstance(schema, Mapping) or not any(word in schema for word in _SAYS_TYPE):
            yield f"has the parameter {name!r} without a type"
        elif not {*_listed(schema.get("type", ()))} <= _TYPES:
            yield f"has the parameter {name!r} of the unknown type {schema['type']!r}"
    required = parameters.get("required", ())
    if isinstance(required, str) or not isinstance(required, Sequence) or not {*map(str, required)} <= {*properties}:
        yield "requires a parameter that it does not have"


def _listed(kind: Any) -> list[str]:
    return [kind] if isinstance(kind, str) else [str(item) for item in kind]


def turn_problems(turn: Any) -> Iterator[str]:
    """Judge what ``step`` returned."""
    if not isinstance(turn, Turn):
        yield f"it returns {_article(turn)} and not a Turn"
        return
    yield from message_problems(turn.messages, "messages", TURN_ROLES)
    if not isinstance(turn.done, bool):
        yield f"done is of the type {type(turn.done).__name__} and not True or False"
    yield from _reward_problems(turn)
    yield from _metric_problems(turn)
    if text := not_json(turn.info, "info"):
        yield text


def _reward_problems(turn: Turn) -> Iterator[str]:
    if turn.reward is not None and (text := _number_problem(turn.reward)):
        yield f"the reward {text}"
    elif turn.reward is not None and abs(turn.reward) > LARGEST_REWARD:
        yield f"the reward is {turn.reward:g}; rewards beyond {LARGEST_REWARD:g} drown everything else in a batch"
    if turn.final and turn.reward is None:
        yield "it is final and has no reward"
    if not isinstance(turn.rewards, Mapping):
        yield f"rewards is of the type {type(turn.rewards).__name__} and not a map of named components"
        return
    for name, value in turn.rewards.items():
        if text := _number_problem(value):
            yield f"the component {name!r} of the reward {text}"


def _metric_problems(turn: Turn) -> Iterator[str]:
    if not isinstance(turn.metrics, Mapping):
        yield f"metrics is of the type {type(turn.metrics).__name__} and not a map of numbers"
        return
    for name, value in turn.metrics.items():
        if text := _number_problem(value):
            yield f"the metric {name!r} {text}"
        elif name in ("success", "progress") and not 0 <= value <= 1:
            yield f"the metric {name!r} is {value:g} and not between 0 and 1"


def _number_problem(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is of the type {type(value).__name__} and no number"
    return "" if math.isfinite(value) else f"is {value}"


def _article(value: Any) -> str:
    return "None" if value is None else f"an object of the type {type(value).__name__}"


def solved(turn: Turn) -> bool:
    """Return whether a turn says that the task is solved."""
    return turn.metrics.get("success") == 1


def ends(turn: Turn) -> bool:
    """Return whether the episode is over after a turn: it is done, or the task is solved."""
    return turn.done or solved(turn)


def plain(found: Opening | Turn) -> dict[str, Any]:
    """Return what a policy and a trainer see of an opening or a turn, as plain JSON values; ``info`` is for people and
    left out. Call it on what has no problems only."""
    if isinstance(found, Opening):
        return json.loads(json.dumps({"messages": [*map(dict, found.messages)], "tools": [*map(dict, found.tools)]}))
    seen = {
        "messages": [*map(dict, found.messages)],
        "done": found.done,
        "reward": found.reward,
        "rewards": dict(found.rewards),
        "metrics": dict(found.metrics),
        "final": found.final,
    }
    return json.loads(json.dumps(seen))


CHECK = "tasks"
_MOST_TEMPLATES = 2000
_SEEDS = (0, 1, 2, 12_345, 2**31 - 1)
_FEW_SEEDS = _SEEDS[:2]
_MOST_TWINS = 4
_MANY = 200
"""From this number of templates on, fewer seeds are tried of each."""


class Sampled(NamedTuple):
    """A task that a check plays, with where it comes from."""

    split: str
    template: str
    task: Task


class TaskSetJudge:
    """Judges the task sets of ``spec``; ``add`` takes what is wrong."""

    def __init__(self, spec: EnvironmentSpec, code: UserCode, add: Callable[[Finding], None]) -> None:
        self._spec = spec
        self._code = code
        self._add = add
        self.sets: dict[str, TaskSet] = {}
        self.instances: dict[str, list[Sampled]] = {}
        self.twins: list[tuple[Sampled, Sampled]] = []
        """Tasks of one id and payload and two seeds: they must be the same episode."""

    def judge(self) -> None:
        """Look at both splits and at the two together."""
        for split in SPLITS:
            try:
                found = self._spec.tasks(split)
                self.sets[split] = found
                self._judge_groups(split, found)
                self.instances[split] = [*self._instances(split, found)]
            except (Exception, SystemExit) as error:
                self.sets.pop(split, None)
                what = str(error) if isinstance(error, ValueError) else described(error)
                mend = "tasks(split) and instantiate(template, seed) return for every split, template and seed"
                place, kind = self._code.of_exception(error), type(error).__name__
                what = f"the split {split!r} cannot be made: {quoted(what)}"
                self._add(Finding(CHECK, what, mend, place, kind=kind))
        self._judge_overlap()

    def groups(self) -> dict[str, dict[str, int]]:
        """Return for each split its groups, each with its number of templates."""
        found = {split: [*tasks.group_of.values()] for split, tasks in self.sets.items()}
        return {split: {group: of.count(group) for group in dict.fromkeys(of)} for split, of in found.items()}

    def remark(self) -> str:
        """Return one line about the sizes of the splits."""
        return ", ".join(
            f"{split}: {counted(sum(of.values()), 'template')} in {counted(len(of), 'group')}"
            for split, of in self.groups().items()
        )

    def _fault(self, what: str, mend: str, *, where: str = "", task: str = "") -> None:
        self._add(Finding(CHECK, what, mend, where, task))

    def _judge_groups(self, split: str, tasks: TaskSet) -> None:
        group_of, groups = dict(tasks.group_of), [*tasks.groups]
        mend = "group_of maps every template to one of groups, and groups are listed once each, the easiest first"
        if not group_of:
            self._fault(f"the split {split!r} has no task", "Give it at least one; a fifth of all is usual")
            return
        if not_text := [key for pair in group_of.items() for key in pair if not isinstance(key, str)]:
            self._fault(f"split {split!r}: group_of holds {quoted(repr(not_text[0]), 60)}, which is no text", mend)
        if len({*groups}) < len(groups):
            self._fault(f"split {split!r}: a group is listed twice in groups", mend)
        if unknown := [group for group in group_of.values() if group not in groups]:
            self._fault(f"split {split!r}: the group {unknown[0]!r} of a template is not in groups", mend)
        if empty := [group for group in groups if group not in {*group_of.values()}]:
            self._fault(f"split {split!r}: the group {empty[0]!r} has no template", mend)
        if [*self._spec.tasks(split).group_of.items()] != [*group_of.items()]:
            self._fault(f"split {split!r}: a second call of tasks lists other templates or another order", mend)

    def _instances(self, split: str, tasks: TaskSet) -> Iterator[Sampled]:
        templates = spread([*tasks.group_of], _MOST_TEMPLATES)
        seeds = _SEEDS if len(templates) < _MANY else _FEW_SEEDS
        owner: dict[str, Sampled] = {}
        for template in templates:
            for seed in seeds:
                task, again = tasks.instantiate(template, seed), tasks.instantiate(template, seed)
                if wrong := _task_problem(task):
                    self._fault(
                        f"instantiate({template!r}, {seed}) returns a task whose {wrong}",
                        "See Task in realhf/api/environment.py",
                    )
                    return
                if task != again:
                    self._fault(
                        f"instantiate({template!r}, {seed}) returns another task the second time",
                        "Draw from random.Random(seed) alone, not from the clock or a generator that is shared",
                        task=task.id,
                    )
                    return
                sampled = Sampled(split, template, task)
                other = owner.setdefault(task.id, sampled)
                if other.template != template or other.task.payload != task.payload:
                    self._fault(
                        f"an id names two tasks: that of {other.template!r} and that of {template!r}",
                        "Make the template and whatever else tells instances apart part of the id",
                        task=task.id,
                    )
                    return
                if other.task.seed != task.seed and len(self.twins) < _MOST_TWINS:
                    self.twins.append((other, sampled))
                yield sampled

    def _judge_overlap(self) -> None:
        seen = {instance_key(found.task): found for found in self.instances.get(TRAIN, ())}
        for found in self.instances.get(HELD_OUT, ()):
            if twin := seen.get(instance_key(found.task)):
                same = f"train {twin.task.id!r} and held-out {found.task.id!r}"
                self._fault(
                    f"the splits share an instance: {same}",
                    "Hold out rows or seeds that training never draws, else evaluation measures memory",
                    task=found.task.id,
                )
                return


def instance_key(task: Task) -> str:
    """Return a text that two tasks share when the same episode is played for both."""
    return json.dumps([task.payload, task.seed], sort_keys=True, default=repr)


def _task_problem(task: object) -> str:
    if not isinstance(task, Task):
        return f"type is {type(task).__name__} and not Task"
    if not isinstance(task.id, str) or not task.id:
        return f"id is {quoted(repr(task.id), 60)}"
    if not isinstance(task.seed, int) or isinstance(task.seed, bool):
        return f"seed is of the type {type(task.seed).__name__}"
    if not isinstance(task.payload, Mapping):
        return f"payload is of the type {type(task.payload).__name__} and not a map"
    return not_json(task.payload, "payload") and f"payload is no JSON: {not_json(task.payload, 'payload')}"


def spread(items: Sequence[str], most: int) -> list[str]:
    """Return at most ``most`` items, evenly spread over all."""
    step = max(1, -(-len(items) // most))
    return [*items[::step]]


def choose(instances: Mapping[str, Sequence[Sampled]], sets: Mapping[str, TaskSet], most: int) -> list[Sampled]:
    """Return the tasks that are played: one of every group of both splits in turns, up to ``most``."""
    rng = random.Random(0)
    by_group: dict[tuple[str, str], list[Sampled]] = {}
    for split, found in instances.items():
        for sampled in found:
            by_group.setdefault((split, sets[split].group_of[sampled.template]), []).append(sampled)
    for found in by_group.values():
        rng.shuffle(found)
    chosen: dict[str, Sampled] = {}
    while len(chosen) < most and any(by_group.values()):
        for found in by_group.values():
            if found and len(chosen) < most:
                sampled = found.pop()
                chosen.setdefault(sampled.task.id, sampled)
    return [*chosen.values()]
