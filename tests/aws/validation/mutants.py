"""Generates mutants of a task: command lists that are nearly its solution, to prove its grader.

They come from botocore's models, the solution and the set-up, so that no list of anybody's limits
them. A mutant may happen to be right: where its making does not tell, who plays it decides by the
state that it leaves. Everything here is pure; one seed gives one list.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, zip_longest
from types import MappingProxyType

from botocore import xform_name

from realhf.aws.tasks.loader import get_template, is_name, whole_state
from realhf.aws.tasks.task import SetupCommand, Task
from tests.aws.validation.command_line import CommandLine, as_steps, moved, renumbered, sendable
from tests.aws.validation.companion_mutants import companions
from tests.aws.validation.default_mutants import given_defaults
from tests.aws.validation.edge_mutants import beside, member_changes
from tests.aws.validation.field_changes import OTHER_REGION, line_changes
from tests.aws.validation.mutant import Mutant, inserted, replaced, request_of, words_of
from tests.aws.validation.resource_deeds import Request, cli_service, deeds

_ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "vpc": ("describe-vpcs", "Vpcs[{}].VpcId"),
        "subnet": ("describe-subnets", "Subnets[{}].SubnetId"),
        "group-id": ("describe-security-groups", "SecurityGroups[{}].GroupId"),
        "security-group": ("describe-security-groups", "SecurityGroups[{}].GroupId"),
    }
)
"""Options whose value is one of a network's parts, with the list where others stand: those of the
default VPC too."""
_CAPTURED_SETUP = re.compile(r"\$\{setup(\d+):")


def mutants_of(task: Task, most: int, seed: int) -> list[Mutant]:
    """Return at most ``most`` mutants of an instance, a sample that ``seed`` decides, as many of
    each kind, and within a kind of each part of the task, as there are."""
    rng = random.Random(f"mutants:{task.task_id}:{task.seed}:{seed}")
    everything = chain(
        *(_fields(task), _orders(task), _neighbours(task), _damages(task), _blind(task)),
        *(beside(task), member_changes(task), given_defaults(task), companions(task)),
    )
    different = {
        mutant.commands: mutant for mutant in everything if mutant.commands != task.solution
    }
    levels: tuple[Callable[[Mutant], str], ...] = (
        lambda mutant: mutant.kind,
        lambda mutant: mutant.about,
        lambda mutant: mutant.place,
    )
    return list(islice(_taking_turns(list(different.values()), levels, rng), most))


def _taking_turns(
    mutants: list[Mutant], levels: Sequence[Callable[[Mutant], str]], rng: random.Random
) -> Iterator[Mutant]:
    """Yield the mutants so that the groups of the first level take turns, within each those of the
    next, and so on."""
    rng.shuffle(mutants)
    if not levels:
        yield from mutants
        return
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(levels[0](mutant), []).append(mutant)
    for turn in zip_longest(*(_taking_turns(group, levels[1:], rng) for group in groups.values())):
        yield from (mutant for mutant in turn if mutant is not None)


def _fields(task: Task) -> Iterator[Mutant]:
    words = words_of(task)
    for place, line in enumerate(task.solution):
        for path, what, changed in line_changes(line, words.before(place)):
            yield Mutant(
                "field", f"command {place + 1}", path, what, replaced(task.solution, place, changed)
            )


def _orders(task: Task) -> Iterator[Mutant]:
    lines = task.solution
    words = words_of(task)
    last = len(lines) - 1
    for place, line in enumerate(lines):
        about = f"command {place + 1}"
        places = {number: number - (number > place + 1) for number in range(len(lines) + 1)} | {
            place + 1: 0
        }
        kept = tuple(
            renumbered(other, places) for number, other in enumerate(lines) if number != place
        )
        yield Mutant("order", "left out", about, "left out", kept)
        yield Mutant("order", "twice", about, "done twice", inserted(lines, place + 1, [line]))
        if place < last:
            exchanged = {place + 1: place + 2, place + 2: place + 1}
            order = [*lines[:place], lines[place + 1], line, *lines[place + 2 :]]
            numbers = {number: exchanged.get(number, number) for number in range(len(lines) + 1)}
            exchanged_lines = tuple(renumbered(other, numbers) for other in order)
            yield Mutant("order", "another order", about, "after the next", exchanged_lines)
        for kind, operation, deed in deeds(
            request_of(line, f"step{place + 1}"), words.before(place)
        ):
            if place < last:
                yield Mutant(
                    "order", kind, f"{about} by {operation}", "", inserted(lines, last, [deed])
                )
            if kind == "undone":
                numbers = {
                    number: number + 2 * (number > place) for number in range(len(lines) + 1)
                }
                again = [deed, line]
                after = [renumbered(other, numbers) for other in lines[place + 1 :]]
                again_and_rest = (*lines[: place + 1], *again, *after)
                yield Mutant(
                    "order", "undone and done again", f"{about} by {operation}", "", again_and_rest
                )


def _neighbours(task: Task) -> Iterator[Mutant]:
    lines = task.solution
    for pattern, what in _other_names(task):
        renamed = tuple(pattern(line) for line in lines)
        if renamed != lines:
            yield Mutant("neighbour", "another name", "", what, renamed)
            yield Mutant("neighbour", "a copy first", "", what, _followed(renamed, lines))
            own = tuple(as_steps(pattern(line)) for line in _world(task))
            rest = tuple(as_steps(moved(line, len(own))) for line in renamed)
            yield Mutant("neighbour", "a world of one's own", "", what, own + rest)
            yield Mutant(
                "neighbour", "a world of one's own first", "", what, _followed(own + rest, lines)
            )
        for place, line in enumerate(lines):
            if pattern(line) != line:
                about = f"command {place + 1}"
                other = pattern(line)
                yield Mutant(
                    "neighbour", "one for another name", about, what, replaced(lines, place, other)
                )
                yield Mutant(
                    "neighbour",
                    "one for another name first",
                    about,
                    what,
                    inserted(lines, place, [other]),
                )
    yield from _copies_of_the_setup(task)
    yield from _other_parts_of_the_network(lines)
    words = words_of(task)
    for place, line in enumerate(lines):
        about = f"command {place + 1}"
        there = replaced(lines, place, f"{line} --region {OTHER_REGION}")
        yield Mutant("neighbour", "another region", about, OTHER_REGION, there)
        for path, what, changed in line_changes(line, words.before(place)):
            yield Mutant(
                "neighbour",
                f"beside {about}",
                path,
                f"{what} first",
                inserted(lines, place, [changed]),
            )


def _followed(first: Sequence[str], then: Sequence[str]) -> tuple[str, ...]:
    return (*first, *(moved(line, len(first)) for line in then))


def _other_names(task: Task) -> Iterator[tuple[Callable[[str], str], str]]:
    """Yield (rewrite of a line, what it does) for each drawn name and each drawn value of a
    task."""
    kinds = get_template(task.task_id).params
    for key, value in task.params.items():
        others = (
            [f"{value}-2"]
            if is_name(value)
            else [str(other) for other in kinds[key] if other != value]
        )
        for other in others:
            word = re.escape(str(value))
            pattern = re.compile(word if is_name(value) else rf"(?<![\w.-]){word}(?![\w.])")
            yield partial(pattern.sub, other), f"{other} for {value}"


def _world(task: Task) -> list[str]:
    return [line for command in (*task.setup, *task.possible_drifts) if (line := sendable(command))]


def _copies_of_the_setup(task: Task) -> Iterator[Mutant]:
    """Yield the solution on a second one of each thing that the set-up made and the solution speaks
    of."""
    used = sorted(
        {int(number) for line in task.solution for number in _CAPTURED_SETUP.findall(line)}
    )
    for number in used:
        copy = sendable(task.setup[number - 1])
        if not copy:
            continue
        on_copy = [
            moved(line, 1).replace(f"${{setup{number}:", "${step1:") for line in task.solution
        ]
        about = f"another {task.setup[number - 1].operation}"
        yield Mutant("neighbour", about, "", "the whole solution", (copy, *on_copy))
        for place in range(len(task.solution)):
            right = [moved(other, 1) for other in task.solution]
            if on_copy[place] != right[place]:
                changed = (copy, *replaced(right, place, on_copy[place]))
                yield Mutant("neighbour", about, f"command {place + 1}", "on the copy", changed)


def _other_parts_of_the_network(lines: Sequence[str]) -> Iterator[Mutant]:
    for place, line in enumerate(lines):
        command = CommandLine.parse(line)
        for option, values in command.options:
            kind = next((kind for kind in _ELSEWHERE if kind in option), None)
            if (
                kind is None
                or not values
                or not values[0].startswith(("${", "vpc-", "subnet-", "sg-"))
            ):
                continue
            listing, path = _ELSEWHERE[kind]
            for index in (0, -1):
                capture = f"${{step1:{path.format(index)}}}"
                changed = str(
                    command.with_value(option, capture, *(moved(value, 1) for value in values[1:]))
                )
                rest = [moved(other, 1) for other in lines]
                rest[place] = changed.replace(moved(capture, 0), capture)
                what = f"number {index} of {listing}"
                yield Mutant(
                    "neighbour",
                    "elsewhere",
                    f"command {place + 1} {option}",
                    what,
                    (f"aws ec2 {listing}", *rest),
                )


def _damages(task: Task) -> Iterator[Mutant]:
    words = words_of(task).before(0)
    lines = task.solution
    world = [(f"setup{number}", command) for number, command in enumerate(task.setup, 1)]
    world += [(f"decoy{number}", command) for number, command in enumerate(task.decoys, 1)]
    for answer, command in world:
        line = sendable(command)
        request = _setup_request(command, line, answer)
        for kind, operation, deed in deeds(request, words) if request else ():
            if "${decoy" in deed:
                continue
            about = f"{answer} {command} {kind}"
            yield from _before_and_after(about, operation, "", [deed], lines)
            if kind == "undone" and line:
                yield from _before_and_after(
                    f"{about} and made again", operation, "", [deed, line], lines
                )
        for path, what, changed in line_changes(line, words) if line else ():
            yield from _before_and_after(
                f"{answer} {command} again", path, f"{what}, ", [changed], lines
            )


def _setup_request(command: SetupCommand, line: str, answer: str) -> Request | None:
    if command.command:
        return request_of(line, answer)
    return Request(
        cli_service(command.service), xform_name(command.operation, "-"), command.params, answer
    )


def _before_and_after(
    about: str, place: str, what: str, extra: Sequence[str], lines: Sequence[str]
) -> Iterator[Mutant]:
    """Yield the solution with ``extra`` before it, and before its last command: after that the
    episode is over."""
    yield Mutant("damage", about, place, f"{what}before", inserted(lines, 0, extra))
    if len(lines) > 1:
        yield Mutant("damage", about, place, f"{what}after", inserted(lines, len(lines) - 1, extra))


def _blind(task: Task) -> Iterator[Mutant]:
    """Yield the whole specification of a drift task applied without a look, and after a wrong write
    of each field."""
    if not task.possible_drifts:
        return
    whole = tuple(whole_state(task))
    words = words_of(task).before(0)
    yield Mutant("blind", "the whole specification", "", "as it stands", whole)
    yield Mutant("blind", "the whole specification", "", "backwards", whole[::-1])
    yield Mutant(
        "blind", "the whole specification", "", "after the repair", (*task.solution[:-1], *whole)
    )
    for place, line in enumerate(whole):
        for path, what, changed in line_changes(line, words):
            about = f"a dirty write of {place + 1}"
            for then, rest in (
                ("everything", whole),
                ("that command and the repair", (line, *task.solution)),
                ("the repair", task.solution),
            ):
                yield Mutant("blind", about, path, f"{what}, then {then}", (changed, *rest))
    for lines in _each_repair(task):
        yield Mutant("blind", "repairs", "", "of everything that could have drifted", lines)


def _each_repair(task: Task) -> Iterable[tuple[str, ...]]:
    yield tuple(line for drift in task.possible_drifts for line in drift.repair)
    for drift in task.possible_drifts:
        yield (*drift.repair, *task.solution)
